// The plan: every choice of a call, made once, as plain data. It can be printed, compared, cached and tested.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

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
  bool states = false;    // packed on cuda: a state, or a gradient of one, is given or asked for
  bool aligned = true;    // cuda: rows of the tensors, for step those of C, begin on 16 bytes

  bool operator==(const MlstmShape&) const = default;
};

// The shape of a dense batch, read off q, v, i and what gradients are given; q and v have four axes. Checks nothing.
// (Packed sequences are counted in cu_seqlens: plan(args) has their shape.)
template <class Args>
[[nodiscard]] MlstmShape shape_of(const Args& args) {
  MlstmShape shape{.batch = args.q.shape[0],
                   .tokens = args.q.shape[1],
                   .qk_heads = args.q.shape[2],
                   .heads = args.v.shape[2],
                   .dqk = args.q.shape[3],
                   .dhv = args.v.shape[3],
                   .sequences = args.q.shape[0],
                   .longest = args.q.shape[1],
                   .dtype = args.q.dtype,
                   .gate_dtype = args.i.dtype};
  if constexpr (requires { args.dlast_state; }) shape.dn_last = args.dlast_state.n.given();
  return shape;
}

// What a plan knows of a GPU.
struct DeviceFacts {
  int capability = 0;  // 10 * major + minor
  int multiprocessors = 0;
  int shared_bytes = 0;  // of shared memory that a CTA may have
  int code = 0;          // newest architecture that the library has code for and the GPU runs; 0: as its capability

  bool operator==(const DeviceFacts&) const = default;
};

// GPUs by name, to plan for one that is not there.
struct KnownGpu {
  std::string_view name;
  DeviceFacts facts;
};
[[nodiscard]] std::span<const KnownGpu> known_gpus();

struct Execution {
  Device device = Device::cpu;
  int threads = 0;                      // cpu: 0 is as many as OpenMP would use
  void* stream = nullptr;               // cuda: a cudaStream_t; calls are enqueued on it and return at once
  bool portable = false;                // cuda: only the kernels that every GPU has, to compare with
  bool untested = false;                // cuda: operators too whose tests no GPU has run
  std::optional<DeviceFacts> gpu = {};  // cuda: plan for this GPU; default: the current one
};

// One step of a call: a kernel on a GPU, a pass on the CPU.
struct Launch {
  std::uint8_t kernel = 0;   // row in the table of compiled kernels
  std::uint8_t variant = 0;  // bits, by kernel: packed sequences, what is kept, ...

  bool operator==(const Launch&) const = default;
};
[[nodiscard]] std::string describe(const Launch& launch, Device device);

// The steps of a call in their order.
class Launches {
 public:
  static constexpr std::size_t most = 16;

  [[nodiscard]] const Launch* begin() const { return all_.data(); }
  [[nodiscard]] const Launch* end() const { return all_.data() + size_; }
  [[nodiscard]] std::size_t size() const { return size_; }
  [[nodiscard]] const Launch& operator[](std::size_t number) const { return all_.at(number); }
  void add(const Launch& launch) { all_.at(size_++) = launch; }
  bool operator==(const Launches&) const = default;

 private:
  std::array<Launch, most> all_{};
  std::size_t size_ = 0;
};

struct Plan {
  Operation operation = Operation::forward;
  Device device = Device::cpu;
  Formulation formulation = Formulation::chunkwise;
  MlstmShape shape = {};
  MlstmOptions options = {};
  DType compute = DType::float32;  // float64 for float64 inputs, else float32
  int threads = 1;
  DeviceFacts gpu = {};       // cuda: what it was made for
  Launches launches = {};     // what runs, in this order; once for each slice
  Keep keep = Keep::nothing;  // what forward leaves in `saved` for backward: no more than options.keep asks for

  // Token ranges, each a whole number of the one before it (the last of a sequence may be short).
  std::int64_t tile = 0;   // tokens of one set of matrix products
  std::int64_t chunk = 0;  // spacing of the states that backward stores
  std::int64_t span = 0;   // tokens one thread works through alone; the longest sequence: stages are fused

  std::int64_t abreast = 1;  // cpu, forward: adjacent heads that one thread takes through a tile before the next tile
  std::int64_t panel = 0;    // columns of the state that step and the recurrent formulation update at a time

  std::int64_t segments = 1;  // cuda: parts of a sequence that are worked through side by side
  std::int64_t pieces = 1;  // cuda: parts of a segment, summed up side by side for the states that segments start from
  std::int64_t slices = 1;  // cuda: parts of the heads that backward takes one after the other, in the same scratch
  std::int64_t run = 0;     // cuda: packed sequences that begin in the same window of so many tokens are one run, which
                            // kernels take for a sequence; 0: each is by itself

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

// From a shape alone (no data needed), or from arguments, which are validated first. Pure: with execution.gpu no GPU is
// asked, and none needs to be there.
[[nodiscard]] Plan plan(Operation operation, const MlstmShape& shape, const MlstmOptions& options,
                        const Execution& execution = {});
[[nodiscard]] Plan plan(const MlstmForward& args, const Execution& execution = {});
[[nodiscard]] Plan plan(const MlstmBackward& args, const Execution& execution = {});
[[nodiscard]] Plan plan(const MlstmStep& args, const Execution& execution = {});

// Whether a plan that was made from a shape is one for these tensors: some kernels want rows that begin on 16 bytes, as
// MlstmShape::aligned says. Calls refuse a plan that is not, and one made for another shape or other options.
[[nodiscard]] bool fits(const Plan& plan, const MlstmForward& args);
[[nodiscard]] bool fits(const Plan& plan, const MlstmBackward& args);
[[nodiscard]] bool fits(const Plan& plan, const MlstmStep& args);

}  // namespace tfla
