// The C API: the operators of tfla/mlstm.h for C and for every language that can call it.
//
//   tfla_mlstm_forward_args args = {.struct_size = sizeof args,
//                                   .q = tfla_dense(q, TFLA_FLOAT32, 4, (int64_t[]){B, T, H, dqk}), ...};
//   if (tfla_mlstm_forward(&args, NULL) != TFLA_OK) puts(tfla_last_error());
//
// 0 is the default of every field: what an initialiser leaves out is not given. Axes, shapes, dtypes and options mean
// what they mean in tfla/mlstm.h. Every struct that may grow begins with its own size, which the caller sets: fields
// that an older caller does not know are 0, and a newer caller's fields that this library does not know have to be. All
// functions may be called from several threads at once; none throws or ends the program.
#ifndef TFLA_TFLA_C_H
#define TFLA_TFLA_C_H

#include <stddef.h>  // NOLINT(modernize-deprecated-headers): C has no other
#include <stdint.h>  // NOLINT(modernize-deprecated-headers)

#ifdef __cplusplus
extern "C" {
#endif

// ---------------------------------------------------------------- results

typedef enum tfla_status {
  TFLA_OK = 0,
  TFLA_INVALID_ARGUMENT = 1,  // refused before anything was written
  TFLA_UNAVAILABLE = 2,       // the call is fine, but this build or machine cannot run it
  TFLA_OUT_OF_MEMORY = 3,
  TFLA_FAILED = 4  // anything else
} tfla_status;

// One sentence on the last call of this thread that did not return TFLA_OK; empty before the first. It lives until the
// next such call.
const char* tfla_last_error(void);

const char* tfla_version(void);

// ---------------------------------------------------------------- tensors

enum { TFLA_FLOAT32, TFLA_FLOAT64, TFLA_BFLOAT16, TFLA_FLOAT16, TFLA_INT32, TFLA_INT64 };

// A view of memory that the caller owns. Rank 0: not given. Inputs are never written.
typedef struct tfla_tensor {
  void* data;
  int32_t dtype;  // TFLA_FLOAT32 ...
  int32_t rank;   // 1 to 4
  int64_t shape[4];
  int64_t strides[4];  // in elements, not bytes; that of the last axis is 1
} tfla_tensor;

// A row-major, densely packed tensor; `shape` has `rank` numbers.
tfla_tensor tfla_dense(const void* data, int32_t dtype, int32_t rank, const int64_t* shape);

// The stabilised state: true C = C exp(m), true n = n exp(m).
typedef struct tfla_mlstm_state {
  tfla_tensor C;  // [N,H,dqk,dhv]
  tfla_tensor n;  // [N,H,dqk]
  tfla_tensor m;  // [N,H]
} tfla_mlstm_state;

typedef struct tfla_mlstm_state_grad {
  tfla_tensor C;  // [N,H,dqk,dhv]
  tfla_tensor n;  // [N,H,dqk]
} tfla_mlstm_state_grad;

// ---------------------------------------------------------------- options

enum { TFLA_GATE_EXPONENTIAL, TFLA_GATE_SIGMOID, TFLA_GATE_LOG };
enum { TFLA_NORMALIZER_AUTOMATIC, TFLA_NORMALIZER_NONE, TFLA_NORMALIZER_MAX };
enum { TFLA_CHUNKWISE, TFLA_PARALLEL, TFLA_RECURRENT };
enum { TFLA_CPU, TFLA_CUDA };
// What forward leaves in `saved` for backward on a GPU, where it would be computed again.
enum { TFLA_KEEP_NOTHING = 0, TFLA_KEEP_DENOMINATORS = 1, TFLA_KEEP_STATES = 2 };

typedef struct tfla_mlstm_options {
  size_t struct_size;
  int32_t gate;         // TFLA_GATE_...
  int32_t normalizer;   // TFLA_NORMALIZER_...
  int32_t formulation;  // TFLA_CHUNKWISE ...
  int32_t keep;         // TFLA_KEEP_...
  int64_t chunk_size;   // 0: chosen by the plan
  int32_t exact_normalizer_grad;
  int32_t has_eps;       // whether `eps` counts; without it 1e-6
  int32_t has_qk_scale;  // whether `qk_scale` counts; without it dqk^-0.5
  int32_t has_soft_cap;  // whether `soft_cap` counts; without it there is none
  double eps;
  double qk_scale;
  double soft_cap;
} tfla_mlstm_options;

typedef struct tfla_execution {
  size_t struct_size;
  int32_t device;    // TFLA_CPU or TFLA_CUDA, where all tensors lie
  int32_t threads;   // cpu: 0 is as many as OpenMP would use
  void* stream;      // cuda: a cudaStream_t; calls are enqueued on it and return at once
  int32_t portable;  // cuda: only the kernels that every GPU has
  int32_t reserved;  // 0
} tfla_execution;

// ---------------------------------------------------------------- operations

typedef struct tfla_mlstm_forward_args {
  size_t struct_size;
  const tfla_mlstm_options* options;  // NULL: the defaults
  tfla_tensor q;                      // [B,T,Hqk,dqk]
  tfla_tensor k;                      // [B,T,Hqk,dqk]
  tfla_tensor v;                      // [B,T,H,dhv]
  tfla_tensor i;                      // [B,T,H]
  tfla_tensor f;                      // [B,T,H]
  tfla_tensor h;                      // [B,T,H,dhv]  out
  tfla_mlstm_state initial_state;     // optional, all three or none
  tfla_mlstm_state last_state;        // optional out; may be the very views of initial_state
  tfla_tensor cu_seqlens;             // [N+1]        optional
  void* saved;                        // out, with options.keep: tfla_plan_saved_bytes, aligned to 64 bytes
  size_t saved_bytes;
} tfla_mlstm_forward_args;

typedef struct tfla_mlstm_backward_args {
  size_t struct_size;
  const tfla_mlstm_options* options;     // as given to forward
  tfla_tensor q;                         // [B,T,Hqk,dqk]
  tfla_tensor k;                         // [B,T,Hqk,dqk]
  tfla_tensor v;                         // [B,T,H,dhv]
  tfla_tensor i;                         // [B,T,H]
  tfla_tensor f;                         // [B,T,H]
  tfla_tensor dh;                        // [B,T,H,dhv]
  tfla_tensor dq;                        // [B,T,Hqk,dqk]  out
  tfla_tensor dk;                        // [B,T,Hqk,dqk]  out
  tfla_tensor dv;                        // [B,T,H,dhv]    out
  tfla_tensor di;                        // [B,T,H]        out
  tfla_tensor df;                        // [B,T,H]        out
  tfla_mlstm_state initial_state;        // as given to forward
  tfla_mlstm_state_grad dlast_state;     // optional: C, n or both
  tfla_mlstm_state_grad dinitial_state;  // optional out: C, n or both
  tfla_tensor cu_seqlens;                // as given to forward
  const void* saved;                     // as forward left it
  size_t saved_bytes;
} tfla_mlstm_backward_args;

typedef struct tfla_mlstm_step_args {
  size_t struct_size;
  const tfla_mlstm_options* options;  // NULL: the defaults
  tfla_tensor q;                      // [B,T,Hqk,dqk]  T new tokens, usually 1
  tfla_tensor k;                      // [B,T,Hqk,dqk]
  tfla_tensor v;                      // [B,T,H,dhv]
  tfla_tensor i;                      // [B,T,H]
  tfla_tensor f;                      // [B,T,H]
  tfla_tensor h;                      // [B,T,H,dhv]    out
  tfla_mlstm_state state;             // [S,...]        updated in place
  tfla_tensor slots;                  // [B]            optional: row b uses state slots[b], -1 is padding
} tfla_mlstm_step_args;

// Validate, plan, allocate scratch, run. `execution` may be NULL: the CPU with all its threads.
tfla_status tfla_mlstm_forward(const tfla_mlstm_forward_args* args, const tfla_execution* execution);
tfla_status tfla_mlstm_backward(const tfla_mlstm_backward_args* args, const tfla_execution* execution);
tfla_status tfla_mlstm_step(const tfla_mlstm_step_args* args, const tfla_execution* execution);

// ---------------------------------------------------------------- plans: the same without allocation

// Every choice of a call, made once. It may be used for any call of the same shape, dtypes, options and layout.
typedef struct tfla_plan tfla_plan;

// Set *plan on TFLA_OK; the caller frees it. `saved` of the arguments is not looked at: its size comes from the plan.
tfla_status tfla_plan_forward(const tfla_mlstm_forward_args* args, const tfla_execution* execution, tfla_plan** plan);
tfla_status tfla_plan_backward(const tfla_mlstm_backward_args* args, const tfla_execution* execution, tfla_plan** plan);
tfla_status tfla_plan_step(const tfla_mlstm_step_args* args, const tfla_execution* execution, tfla_plan** plan);
void tfla_plan_free(tfla_plan* plan);  // NULL is fine

size_t tfla_plan_scratch_bytes(const tfla_plan* plan);
size_t tfla_plan_saved_bytes(const tfla_plan* plan);  // 0 on the CPU, where nothing is kept
// Writes at most `bytes` characters of a page a person can read, the last of them 0, and returns how many there are
// without it, as snprintf does.
size_t tfla_plan_describe(const tfla_plan* plan, char* text, size_t bytes);

// `scratch` is at least tfla_plan_scratch_bytes long, in any state, aligned to 64 bytes, on the plan's device.
tfla_status tfla_run_forward(const tfla_mlstm_forward_args* args, const tfla_plan* plan, void* scratch,
                             size_t scratch_bytes, void* stream);
tfla_status tfla_run_backward(const tfla_mlstm_backward_args* args, const tfla_plan* plan, void* scratch,
                              size_t scratch_bytes, void* stream);
tfla_status tfla_run_step(const tfla_mlstm_step_args* args, const tfla_plan* plan, void* scratch, size_t scratch_bytes,
                          void* stream);

#ifdef __cplusplus
}  // extern "C"
#endif

#endif  // TFLA_TFLA_C_H
