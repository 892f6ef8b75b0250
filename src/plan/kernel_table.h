// Every kernel of the CUDA backend, as rows of one table. The plan picks rows and lists them, run executes the list,
// and `tfla explain` prints it. A head dimension on Hopper is a row here: cuda/sm90/*/inst compile what the rows say.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string_view>

#include "tfla/plan.h"

namespace tfla {

// Kernels, named for what they make. One name may have rows for several architectures and tiles.
enum class Kernel : std::uint8_t {
  gates,                // vectors of the gates: u, c, qbar, abar, gbar
  copy_state,           // a copy of the initial state, where the last one takes its place
  segment_totals,       // what each segment adds to the state
  segment_scan,         // the states that segments start from
  states,               // C and n at the starts of chunks
  denominators,         // 1 / den of every row
  outputs,              // H from stored states
  forward,              // H, with states on the chip
  grad_denominators,    // gradient of q.n of every row
  grad_segment_totals,  // as segment_totals, in reverse time
  grad_segment_scan,    // the dC that segments end with
  grad_states,          // dC and dn at the ends of chunks
  grad_states_v,        // dC and dV
  row_dots,             // dh.h of every row
  grad_n,               // gradients of n
  grad_v,               // dV
  grad_qk,              // dQ, dK
  grad_qk_norm,         // dQ, dK with gradients of n
  grad_q_forward,       // dQ, with C on the chip
  grad_v_reverse,       // dV, with dC on the chip
  grad_k_reverse,       // dK, with dC on the chip
  grad_qkv,             // dQ, dK, dV
  grad_qkv_small,       // dQ, dK, dV of small heads
  sum_groups,           // dQ, dK of a group of heads from those of its heads
  grad_gates,           // di, df
  start_state,          // the state before the first token, for the recurrent formulation
  step,                 // tokens on states in place
  step_many,            // one token of each of many states
};

// The code a row needs: any GPU's; that of sm_90 or newer, for clusters; that of sm_90a alone, for wgmma.
enum class Needs : std::uint8_t { any_gpu, clusters, sm90a };

// Shared memory that a CTA of such code takes at most, as the kernels assert: all that sm_90 has, or all that sm_86
// has, which has the least.
[[nodiscard]] constexpr int most_shared_bytes(Needs needs) { return (needs == Needs::sm90a ? 227 : 99) * 1024; }

// Bits of element types.
inline constexpr unsigned bf16 = 1, fp16 = 2, fp32 = 4, fp64 = 8, half_types = bf16 | fp16, all_types = 15;
[[nodiscard]] constexpr unsigned type_bit(DType dtype) {
  switch (dtype) {
    case DType::bfloat16: return bf16;
    case DType::float16: return fp16;
    case DType::float32: return fp32;
    case DType::float64: return fp64;
    default: return 0;
  }
}

// Bits of batches that a row takes.
inline constexpr unsigned dense = 1, packed = 2, any_batch = dense | packed;

// Sizes above `above` and up to `most`.
struct Sizes {
  std::int64_t above = 0;
  std::int64_t most = std::numeric_limits<std::int64_t>::max();

  [[nodiscard]] constexpr bool has(std::int64_t size) const { return size > above && size <= most; }
};
[[nodiscard]] constexpr Sizes to(std::int64_t most) { return {.above = 0, .most = most}; }
[[nodiscard]] constexpr Sizes above(std::int64_t above) { return {.above = above}; }
inline constexpr Sizes any_size = {};

struct KernelRow {
  Kernel kernel;
  Needs needs = Needs::any_gpu;
  unsigned types = all_types;
  Sizes dqk = {}, dhv = {};      // of the heads it takes
  int rows = 0, columns = 0;     // of dqk and dhv in one CTA's tile; 0: a loop goes over all of them
  unsigned batches = any_batch;  // dense, packed
  unsigned keeps_states = 0;     // of which batches it leaves states to backward
  unsigned epilogues = 0;        // of which bfloat16 batches it may end as the state space dual does

  [[nodiscard]] constexpr bool takes(const MlstmShape& shape) const {
    return (types & type_bit(shape.dtype)) != 0 && dqk.has(shape.dqk) && dhv.has(shape.dhv) &&
           (batches & (shape.packed ? packed : dense)) != 0;
  }
  [[nodiscard]] constexpr bool has_epilogue(const MlstmShape& shape) const {
    return shape.dtype == DType::bfloat16 && (epilogues & (shape.packed ? packed : dense)) != 0;
  }
  [[nodiscard]] constexpr KernelRow of(unsigned some_types) const {
    KernelRow row = *this;
    row.types = some_types;
    return row;
  }
  [[nodiscard]] constexpr KernelRow on(unsigned some_batches) const {
    KernelRow row = *this;
    row.batches = some_batches;
    return row;
  }
  [[nodiscard]] constexpr KernelRow keeping(unsigned some_batches) const {
    KernelRow row = *this;
    row.keeps_states = some_batches;
    return row;
  }
  [[nodiscard]] constexpr KernelRow with_epilogue(unsigned some_batches) const {
    KernelRow row = *this;
    row.epilogues = some_batches;
    return row;
  }
};

// Rows of every GPU, of clusters, and of Hopper.
[[nodiscard]] constexpr KernelRow everywhere(Kernel kernel, int rows = 0, int columns = 0) {
  return {.kernel = kernel, .rows = rows, .columns = columns};
}
[[nodiscard]] constexpr KernelRow clusters(Kernel kernel, unsigned types = all_types, Sizes dqk = {}, Sizes dhv = {},
                                           int rows = 0, int columns = 0) {
  return {.kernel = kernel,
          .needs = Needs::clusters,
          .types = types,
          .dqk = dqk,
          .dhv = dhv,
          .rows = rows,
          .columns = columns};
}
[[nodiscard]] constexpr KernelRow sm90a(Kernel kernel, unsigned types, Sizes dqk = {}, Sizes dhv = {}, int rows = 0,
                                        int columns = 0) {
  return {.kernel = kernel,
          .needs = Needs::sm90a,
          .types = types,
          .dqk = dqk,
          .dhv = dhv,
          .rows = rows,
          .columns = columns};
}

// Of the rows of a kernel the first that takes a shape is the one that runs. What binds a limit stands beside it.
// clang-format off
inline constexpr auto kernel_table = std::to_array<KernelRow>({
    // three launches; or one by clusters, where a sequence has no more chunks than the eight CTAs of one
    everywhere(Kernel::gates),
    clusters(Kernel::gates).on(dense),

    // every GPU: tiles of 64 x 64 tokens, heads of any size
    everywhere(Kernel::segment_totals),
    everywhere(Kernel::segment_scan),
    everywhere(Kernel::states),
    everywhere(Kernel::denominators),
    everywhere(Kernel::outputs),
    everywhere(Kernel::grad_denominators),
    everywhere(Kernel::grad_segment_totals),
    everywhere(Kernel::grad_segment_scan),
    everywhere(Kernel::grad_states),
    everywhere(Kernel::grad_qkv),
    everywhere(Kernel::grad_gates),
    everywhere(Kernel::start_state),
    everywhere(Kernel::step, 0, 32),   // few states: more CTAs
    everywhere(Kernel::step, 0, 128),

    // step by clusters of up to eight CTAs, which have all columns of a head
    clusters(Kernel::step, all_types, any_size, to(512), 0, 64),  // few states: many rows in flight
    clusters(Kernel::step, all_types, any_size, to(1024), 0, 128),
    clusters(Kernel::step_many, bf16 | fp16 | fp32, {255, 1024}),  // q and k of a head: 8 KB of shared memory
    clusters(Kernel::step_many, bf16 | fp16 | fp32, to(255)),

    // Hopper: H, with the state in registers
    sm90a(Kernel::copy_state, half_types),
    sm90a(Kernel::forward, half_types, to(64),  to(64),    64,  64).keeping(any_batch).with_epilogue(any_batch),
    sm90a(Kernel::forward, half_types, to(64),  above(64), 64,  128).keeping(any_batch).with_epilogue(any_batch),
    sm90a(Kernel::forward, half_types, to(128), to(64),    128, 64).keeping(any_batch).with_epilogue(any_batch),
    sm90a(Kernel::forward, half_types, to(128), above(64), 128, 128).keeping(any_batch).with_epilogue(any_batch),
    sm90a(Kernel::forward, bf16,       to(256), to(64),    256, 64).keeping(dense),   // fp16: shared memory
    sm90a(Kernel::forward, half_types, to(256), above(64), 256, 128).keeping(dense),  // packed: registers
    sm90a(Kernel::forward, bf16,       {256, 512}, any_size, 512, 128).on(dense),     // two launches: registers

    // Hopper: C at the starts of chunks, 128 x 256 of it in the registers of two warpgroups
    sm90a(Kernel::states, half_types, to(64),   to(64),   64,  64),
    sm90a(Kernel::states, half_types, to(64),   to(128),  64,  128),
    sm90a(Kernel::states, half_types, to(64),   any_size, 64,  256),
    sm90a(Kernel::states, half_types, any_size, to(128),  128, 128),
    sm90a(Kernel::states, half_types, any_size, any_size, 128, 256),
    sm90a(Kernel::segment_totals, half_types, to(64),   to(64),   64,  64),
    sm90a(Kernel::segment_totals, half_types, to(64),   to(128),  64,  128),
    sm90a(Kernel::segment_totals, half_types, to(64),   any_size, 64,  256),
    sm90a(Kernel::segment_totals, half_types, any_size, to(128),  128, 128),
    sm90a(Kernel::segment_totals, half_types, any_size, any_size, 128, 256),
    sm90a(Kernel::segment_scan, half_types).on(packed),

    // the same in reverse time
    sm90a(Kernel::grad_states, half_types, to(64),   to(64),   64,  64),
    sm90a(Kernel::grad_states, half_types, to(64),   to(128),  64,  128),
    sm90a(Kernel::grad_states, half_types, to(64),   any_size, 64,  256),
    sm90a(Kernel::grad_states, half_types, any_size, to(128),  128, 128),
    sm90a(Kernel::grad_states, half_types, any_size, any_size, 128, 256),
    sm90a(Kernel::grad_segment_totals, half_types, to(64),   to(64),   64,  64),
    sm90a(Kernel::grad_segment_totals, half_types, to(64),   to(128),  64,  128),
    sm90a(Kernel::grad_segment_totals, half_types, to(64),   any_size, 64,  256),
    sm90a(Kernel::grad_segment_totals, half_types, any_size, to(128),  128, 128),
    sm90a(Kernel::grad_segment_totals, half_types, any_size, any_size, 128, 256),
    sm90a(Kernel::grad_segment_scan, half_types).on(packed),

    // Hopper: dC and dV, by the kernel of forward with names exchanged. Smaller heads have dV in grad_qkv.
    sm90a(Kernel::grad_states_v, bf16, to(64),     above(64), 64,  128),
    sm90a(Kernel::grad_states_v, bf16, to(128),    above(64), 128, 128),
    sm90a(Kernel::grad_states_v, bf16, {128, 256}, to(64),    256, 64),
    sm90a(Kernel::grad_states_v, bf16, {128, 256}, above(64), 256, 128),

    // Hopper: dQ, dV and dK by the kernel of forward, with C or dC in registers. States of dQ and dK are transposed:
    // their rows are of dhv, and their columns of dqk.
    sm90a(Kernel::grad_q_forward, bf16, to(64),    {128, 256}, 256, 64),
    sm90a(Kernel::grad_q_forward, bf16, {64, 128}, {128, 256}, 256, 128),
    sm90a(Kernel::grad_v_reverse, bf16, to(64),    {128, 256}, 64,  128),
    sm90a(Kernel::grad_v_reverse, bf16, {64, 128}, {128, 256}, 128, 128),
    sm90a(Kernel::grad_k_reverse, bf16, to(64),    {128, 256}, 256, 64),
    sm90a(Kernel::grad_k_reverse, bf16, {64, 128}, {128, 256}, 256, 128),

    // Hopper: dQ, dK, dV of a chunk in one CTA, as far as its registers go
    sm90a(Kernel::grad_qkv_small, bf16, to(32), to(32), 32, 32),
    sm90a(Kernel::grad_qkv_small, bf16, to(64), to(64), 64, 64),
    sm90a(Kernel::grad_qkv, half_types, to(64),  to(128), 64,  128),
    sm90a(Kernel::grad_qkv, half_types, to(64),  to(192), 64,  192),
    sm90a(Kernel::grad_qkv, half_types, to(64),  to(256), 64,  256),
    sm90a(Kernel::grad_qkv, bf16,       {64, 128}, to(64), 128, 64),  // fp16: registers
    sm90a(Kernel::grad_qkv, half_types, to(128), to(128), 128, 128),
    sm90a(Kernel::grad_qkv, half_types, to(128), to(192), 128, 192),
    sm90a(Kernel::grad_qkv, half_types, to(128), to(256), 128, 256),

    // Hopper: heads of any size, a tile of dV or of dQ and dK in one CTA. The plan chooses the columns of grad_v.
    sm90a(Kernel::grad_v, half_types, any_size, any_size, 0, 64),
    sm90a(Kernel::grad_v, fp16,       any_size, any_size, 0, 128),
    sm90a(Kernel::grad_v, fp16,       any_size, any_size, 0, 192),
    sm90a(Kernel::grad_v, fp16,       any_size, any_size, 0, 256),
    sm90a(Kernel::grad_v, bf16,       above(256), any_size, 0, 256).on(dense),  // grad_states_v has the others
    sm90a(Kernel::grad_qk,      half_types, any_size, any_size, 128, 0),
    sm90a(Kernel::grad_qk_norm, half_types, any_size, any_size, 128, 0),
    everywhere(Kernel::sum_groups).of(half_types),  // behind Hopper's kernels; portable ones sum in registers
    sm90a(Kernel::row_dots, half_types),
    sm90a(Kernel::grad_n,   half_types),
});
// clang-format on

inline constexpr std::size_t no_row = kernel_table.size();

// The row of a kernel that takes a shape; columns: of this width. no_row where there is none.
[[nodiscard]] constexpr std::size_t find_row(Kernel kernel, Needs needs, const MlstmShape& shape, int columns = 0) {
  for (std::size_t row = 0; row < kernel_table.size(); ++row) {
    const KernelRow& candidate = kernel_table[row];
    if (candidate.kernel == kernel && candidate.needs == needs && candidate.takes(shape) &&
        (columns == 0 || candidate.columns == columns))
      return row;
  }
  return no_row;
}

// Bits of Launch::variant. What a row's kernel is compiled for besides its tile.
namespace variant {
inline constexpr unsigned packed = 1;        // sequences are packed
inline constexpr unsigned keeps_states = 2;  // forward leaves states
inline constexpr unsigned normalized = 4;    // forward divides by denominators
inline constexpr unsigned token_blocks = 8;  // gates: also the vectors of token blocks, for grad_states_v
inline constexpr unsigned one_term = 16;     // segment_totals: keys rounded once, where no states are kept
inline constexpr unsigned rest_of_dqk = 32;  // the second pass over dqk above 256
inline constexpr unsigned epilogue = 64;     // forward of the state space dual: H + D x, times silu(z)
}  // namespace variant

[[nodiscard]] inline const KernelRow& row_of(const Launch& launch) { return kernel_table.at(launch.kernel); }
[[nodiscard]] inline bool is(const Launch& launch, unsigned bits) { return (launch.variant & bits) != 0; }
// Whether a plan launches a kernel, on Hopper or on any GPU.
[[nodiscard]] bool launches(const Plan& plan, Kernel kernel, Needs needs);
[[nodiscard]] std::string_view name(Kernel kernel);

}  // namespace tfla
