// The C API of the delta rule (tfla/delta.h), as tfla/tfla_c.h has that of the mLSTM.
#ifndef TFLA_TFLA_C_DELTA_H
#define TFLA_TFLA_C_DELTA_H

#include "tfla/tfla_c.h"

#ifdef __cplusplus
extern "C" {
#endif

// How beta is read: as it is, sigmoid(beta), or 2 sigmoid(beta).
enum { TFLA_WRITE_PLAIN, TFLA_WRITE_SIGMOID, TFLA_WRITE_TWICE_SIGMOID };

typedef struct tfla_delta_options {
  size_t struct_size;
  int32_t write;         // TFLA_WRITE_...
  int32_t normalize_qk;  // q and k become x / sqrt(|x|^2 + 1e-6) first
  int64_t chunk_size;    // 0: chosen by the plan
  int32_t has_qk_scale;  // whether `qk_scale` counts; without it dqk^-0.5
  int32_t reserved;      // 0
  double qk_scale;
} tfla_delta_options;

typedef struct tfla_delta_forward_args {
  size_t struct_size;
  const tfla_delta_options* options;  // NULL: the defaults
  tfla_tensor q;                      // [B,T,Hqk,dqk]
  tfla_tensor k;                      // [B,T,Hqk,dqk]
  tfla_tensor v;                      // [B,T,H,dhv]
  tfla_tensor beta;                   // [B,T,H]
  tfla_tensor g;                      // [B,T,H]        optional
  tfla_tensor A_log;                  // [H]            optional
  tfla_tensor dt_bias;                // [H]            optional
  tfla_tensor h;                      // [B,T,H,dhv]    out
  tfla_tensor initial_state;          // [N,H,dqk,dhv]  optional
  tfla_tensor last_state;             // [N,H,dqk,dhv]  optional out; may be the very view of initial_state
  tfla_tensor cu_seqlens;             // [N+1]          optional
} tfla_delta_forward_args;

typedef struct tfla_delta_backward_args {
  size_t struct_size;
  const tfla_delta_options* options;  // as given to forward
  tfla_tensor q;                      // [B,T,Hqk,dqk]
  tfla_tensor k;                      // [B,T,Hqk,dqk]
  tfla_tensor v;                      // [B,T,H,dhv]
  tfla_tensor beta;                   // [B,T,H]
  tfla_tensor g;                      // [B,T,H]
  tfla_tensor A_log;                  // [H]
  tfla_tensor dt_bias;                // [H]
  tfla_tensor dh;                     // [B,T,H,dhv]
  tfla_tensor dq;                     // [B,T,Hqk,dqk]  out
  tfla_tensor dk;                     // [B,T,Hqk,dqk]  out
  tfla_tensor dv;                     // [B,T,H,dhv]    out
  tfla_tensor dbeta;                  // [B,T,H]        out
  tfla_tensor dg;                     // [B,T,H]        out, where g is given
  tfla_tensor dA_log;                 // [H]            out, where A_log is given
  tfla_tensor ddt_bias;               // [H]            out, where dt_bias is given
  tfla_tensor initial_state;          // [N,H,dqk,dhv]  as given to forward
  tfla_tensor dlast_state;            // [N,H,dqk,dhv]  optional
  tfla_tensor dinitial_state;         // [N,H,dqk,dhv]  optional out
  tfla_tensor cu_seqlens;             // [N+1]          as given to forward
} tfla_delta_backward_args;

typedef struct tfla_delta_step_args {
  size_t struct_size;
  const tfla_delta_options* options;  // NULL: the defaults
  tfla_tensor q;                      // [B,T,Hqk,dqk]  T new tokens, usually 1
  tfla_tensor k;                      // [B,T,Hqk,dqk]
  tfla_tensor v;                      // [B,T,H,dhv]
  tfla_tensor beta;                   // [B,T,H]
  tfla_tensor g;                      // [B,T,H]
  tfla_tensor A_log;                  // [H]
  tfla_tensor dt_bias;                // [H]
  tfla_tensor h;                      // [B,T,H,dhv]    out
  tfla_tensor state;                  // [S,H,dqk,dhv]  updated in place
  tfla_tensor slots;                  // [B]            optional: row b uses state slots[b], -1 is padding
} tfla_delta_step_args;

// Validate, plan, allocate scratch, run. `execution` may be NULL: the CPU with all its threads.
tfla_status tfla_delta_forward(const tfla_delta_forward_args* args, const tfla_execution* execution);
tfla_status tfla_delta_backward(const tfla_delta_backward_args* args, const tfla_execution* execution);
tfla_status tfla_delta_step(const tfla_delta_step_args* args, const tfla_execution* execution);

#ifdef __cplusplus
}  // extern "C"
#endif

#endif  // TFLA_TFLA_C_DELTA_H
