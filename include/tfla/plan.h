// The plan: every choice of a call, made once, as plain data. It can be printed, compared, cached and tested.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "tfla/mlstm.h"

namespace tfla {

enum class Operation : std::uint8_t { forward, backward, step };

// What a call looks like without its pointers.
struct MlstmShape {
  std::int64_t batch = 1;
  std::int64_t tokens = 0;    // T; for packed sequences the length of the packed axis
  std::int64_t qk_heads = 1;  // Hqk
  std::int64_t heads = 1;     // H
  std::int64_t dqk = 1;
  std::int64_t dhv = 1;
  std::int64_t sequences = 1;    // N
  std::int64_t longest = 0;      // tokens of the longest sequence
  DType dtype = DType::float32;  // of q, k, v, h
  DType gate_dtype = DType::float32;
  bool packed = false;    // cu_seqlens is given; else N = B
  bool in_place = false;  // forward on cuda: last_state is initial_state
  bool dn_last = false;   // backward: a gradient of the last n is given

  bool operator==(const MlstmShape&) const = default;
};

struct Execution {
  Device device = Device::cpu;
  int threads = 0;         // cpu: 0 is as many as OpenMP would use
  void* stream = nullptr;  // cuda: a cudaStream_t; calls are enqueued on it and return at once
  bool portable = false;   // cuda: only the kernels that every GPU has, to compare with
};

struct Plan {
  Operation operation = Operation::forward;
  Device device = Device::cpu;
  Formulation formulation = Formulation::chunkwise;
  MlstmShape shape;
  MlstmOptions options;
  DType compute = DType::float32;  // float64 for float64 inputs, else float32
  int threads = 1;

  // Token ranges, each a whole number of the one before it (the last of a sequence may be short).
  std::int64_t tile = 0;   // tokens of one set of matrix products
  std::int64_t chunk = 0;  // spacing of the states that backward stores
  std::int64_t span = 0;   // tokens one thread works through alone; the longest sequence: stages are fused

  std::int64_t abreast = 1;  // cpu, forward: adjacent heads that one thread takes through a tile before the next tile
  std::int64_t panel = 0;    // columns of the state that step and the recurrent formulation update at a time

  std::int64_t segments = 1;  // cuda: parts of a sequence that are worked through side by side
  std::int64_t pieces = 1;  // cuda: parts of a segment, summed up side by side for the states that segments start from
  std::int64_t slices = 1;  // cuda: parts of the heads that backward takes one after the other, in the same scratch

  bool hopper = false;            // cuda: stages states and outputs by kernels of sm_90a
  bool hopper_gradients = false;  // and stage gradients
  bool hopper_reverse = false;    // dC and dV by one of them, in place of stages dstates and values
  bool one_launch = false;        // cuda: step by one kernel of sm_90, which needs no scratch
  bool norm_gradients = false;    // backward: the exact gradient of the normalizer, or one of the last n

  bool keeps_states = false;  // from forward to backward, in `saved`
  bool keeps_rows = false;    // of these only the denominators
  std::size_t scratch_bytes = 0;
  std::size_t saved_bytes = 0;  // 0 on the CPU, where states are cheaper to compute than to keep
  double flops = 0;             // of the matrix products, masked halves of tiles included
  double useful_flops = 0;      // only the causal half of the products inside a tile
  double bytes = 0;             // inputs, outputs and states, each moved once

  [[nodiscard]] bool fused() const { return span >= shape.longest; }
  bool operator==(const Plan&) const = default;
};

// A page a person can read; what `tfla explain` prints.
[[nodiscard]] std::string describe(const Plan& plan);

// From a shape alone (no data needed), or from arguments, which are validated first.
[[nodiscard]] Plan plan(Operation operation, const MlstmShape& shape, const MlstmOptions& options,
                        const Execution& execution = {});
[[nodiscard]] Plan plan(const MlstmForward& args, const Execution& execution = {});
[[nodiscard]] Plan plan(const MlstmBackward& args, const Execution& execution = {});
[[nodiscard]] Plan plan(const MlstmStep& args, const Execution& execution = {});

// Whether a plan made from the shape of these tensors is one for them: the kernels of sm_90 want rows on 16 bytes, of
// step those of C. Calls refuse a plan that is not, and one made for another shape or other options.
[[nodiscard]] bool fits(const Plan& plan, const MlstmForward& args);
[[nodiscard]] bool fits(const Plan& plan, const MlstmBackward& args);
[[nodiscard]] bool fits(const Plan& plan, const MlstmStep& args);

}  // namespace tfla
