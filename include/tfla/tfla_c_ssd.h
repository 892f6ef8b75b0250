// The C API of the state space dual of Mamba-2 (tfla/ssd.h), as tfla/tfla_c.h has that of the mLSTM.
#ifndef TFLA_TFLA_C_SSD_H
#define TFLA_TFLA_C_SSD_H

#include "tfla/tfla_c.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct tfla_ssd_options {
  size_t struct_size;
  int32_t dt_softplus;
  int32_t has_dt_max;  // whether `dt_max` counts; without it there is none
  double dt_min;
  double dt_max;
  int64_t chunk_size;  // 0: chosen by the plan
} tfla_ssd_options;

typedef struct tfla_ssd_forward_args {
  size_t struct_size;
  const tfla_ssd_options* options;  // NULL: the defaults
  tfla_tensor x;                    // [B,T,H,P]
  tfla_tensor dt;                   // [B,T,H]
  tfla_tensor A;                    // [H]
  tfla_tensor B;                    // [B,T,G,S]
  tfla_tensor C;                    // [B,T,G,S]
  tfla_tensor D;                    // [H] or [H,P]  optional
  tfla_tensor z;                    // [B,T,H,P]     optional
  tfla_tensor dt_bias;              // [H]           optional
  tfla_tensor y;                    // [B,T,H,P]     out
  tfla_tensor ungated;              // [B,T,H,P]     optional out, where z is given: for backward
  tfla_tensor initial_state;        // [N,H,P,S]     optional
  tfla_tensor last_state;           // [N,H,P,S]     optional out; may be the very view of initial_state
  tfla_tensor cu_seqlens;           // [N+1]         optional
  tfla_tensor seq_idx;              // [B,T]         optional
} tfla_ssd_forward_args;

typedef struct tfla_ssd_backward_args {
  size_t struct_size;
  const tfla_ssd_options* options;  // as given to forward
  tfla_tensor x;                    // [B,T,H,P]
  tfla_tensor dt;                   // [B,T,H]
  tfla_tensor A;                    // [H]
  tfla_tensor B;                    // [B,T,G,S]
  tfla_tensor C;                    // [B,T,G,S]
  tfla_tensor D;                    // [H] or [H,P]
  tfla_tensor z;                    // [B,T,H,P]
  tfla_tensor dt_bias;              // [H]
  tfla_tensor ungated;              // [B,T,H,P]     as forward left it, where z is given
  tfla_tensor dy;                   // [B,T,H,P]
  tfla_tensor dx;                   // [B,T,H,P]     out
  tfla_tensor ddt;                  // [B,T,H]       out
  tfla_tensor dA;                   // [H]           out
  tfla_tensor dB;                   // [B,T,G,S]     out
  tfla_tensor dC;                   // [B,T,G,S]     out
  tfla_tensor dD;                   // like D        out, where D is given
  tfla_tensor dz;                   // [B,T,H,P]     out, where z is given
  tfla_tensor ddt_bias;             // [H]           out, where dt_bias is given
  tfla_tensor initial_state;        // [N,H,P,S]     as given to forward
  tfla_tensor dlast_state;          // [N,H,P,S]     optional
  tfla_tensor dinitial_state;       // [N,H,P,S]     optional out
  tfla_tensor cu_seqlens;           // [N+1]         as given to forward
  tfla_tensor seq_idx;              // [B,T]         as given to forward
} tfla_ssd_backward_args;

typedef struct tfla_ssd_step_args {
  size_t struct_size;
  const tfla_ssd_options* options;  // NULL: the defaults
  tfla_tensor x;                    // [B,T,H,P]     T new tokens, usually 1
  tfla_tensor dt;                   // [B,T,H]
  tfla_tensor A;                    // [H]
  tfla_tensor B;                    // [B,T,G,S]
  tfla_tensor C;                    // [B,T,G,S]
  tfla_tensor D;                    // [H] or [H,P]
  tfla_tensor z;                    // [B,T,H,P]
  tfla_tensor dt_bias;              // [H]
  tfla_tensor y;                    // [B,T,H,P]     out
  tfla_tensor state;                // [N,H,P,S]     updated in place
  tfla_tensor slots;                // [B]           optional: row b uses state slots[b], -1 is padding
} tfla_ssd_step_args;

// Validate, plan, allocate scratch, run. `execution` may be NULL: the CPU with all its threads.
tfla_status tfla_ssd_forward(const tfla_ssd_forward_args* args, const tfla_execution* execution);
tfla_status tfla_ssd_backward(const tfla_ssd_backward_args* args, const tfla_execution* execution);
tfla_status tfla_ssd_step(const tfla_ssd_step_args* args, const tfla_execution* execution);

#ifdef __cplusplus
}  // extern "C"
#endif

#endif  // TFLA_TFLA_C_SSD_H
