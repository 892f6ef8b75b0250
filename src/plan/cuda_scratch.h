// The scratch of a call on a GPU, and what forward leaves for backward: which buffers there are, and where each begins.
// A plan counts their bytes by this, and a call takes its pointers from it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "tfla/plan.h"

namespace tfla {

// Shapes and meanings are in cuda/call.h.
enum class Buffer : std::uint8_t {
  inverse,
  slope,
  C,
  n,
  dqk_partials,
  chunks,
  run_starts,
  first_tokens,
  packed_segments,
  c,
  u,
  log_c,
  qbar,
  abar,
  floor,
  b_last,
  m_start,
  m_end,
  gbar,
  n_work,
  segment_C,
  segment_n,
  own_C0,
  own_n0,
  deta,
  dC,
  dn,
  dq_heads,
  dk_heads,
  checkpoints,
  row_sums,
  column_sums,
  outflow,
  through,
  block_u,
  block_qbar,
  block_abar,
  block_gbar,
  traces,
  inverse_scale_C,
  inverse_scale_dC,
  decay,
  weight,
  step_C,
  step_n,
  step_m,
  count,
};

class Layout {
 public:
  static constexpr std::size_t absent = static_cast<std::size_t>(-1);

  [[nodiscard]] bool has(Buffer buffer) const { return at(buffer) != absent; }
  [[nodiscard]] std::size_t at(Buffer buffer) const { return offsets_[static_cast<std::size_t>(buffer)]; }
  // Whether it lies in `saved`, not in scratch.
  [[nodiscard]] bool is_saved(Buffer buffer) const { return saved_[static_cast<std::size_t>(buffer)]; }
  [[nodiscard]] std::size_t scratch_bytes() const { return scratch_bytes_; }
  [[nodiscard]] std::size_t saved_bytes() const { return saved_bytes_; }

  void add(Buffer buffer, std::int64_t elements, std::int64_t item, bool saved = false);

 private:
  static constexpr std::size_t buffers = static_cast<std::size_t>(Buffer::count);

  static constexpr std::array<std::size_t, buffers> nowhere() {
    std::array<std::size_t, buffers> offsets{};
    offsets.fill(absent);
    return offsets;
  }

  std::array<std::size_t, buffers> offsets_ = nowhere();
  std::array<bool, buffers> saved_{};
  std::size_t scratch_bytes_ = 0, saved_bytes_ = 0;
};

// Bytes of plain data that kernels list in scratch; cuda/run.cu asserts them.
inline constexpr std::int64_t chunk_bytes = 32, packed_segment_bytes = 16;

// Words of a bit per token, with one to read beyond the last token.
[[nodiscard]] constexpr std::int64_t first_token_words(std::int64_t tokens) { return tokens / 32 + 2; }

// How tokens of a plan are cut, as kernels count it.
struct TokenCut {
  std::int64_t chunk;           // tokens
  std::int64_t chunks_per_row;  // of a dense batch; 0: packed sequences
  std::int64_t chunk_count;     // upper bound of the number of chunks
  std::int64_t kept_chunk;      // tokens between states that forward keeps on Hopper; 0: none
  std::int64_t chunks_per_piece;
  std::int64_t chunks_per_segment;

  // Upper bound of the number of ranges of so many tokens.
  [[nodiscard]] static std::int64_t count(const Plan& plan, std::int64_t tokens);
};
[[nodiscard]] TokenCut cut_tokens(const Plan& plan);

// Of one slice of a plan: all heads where there is one.
[[nodiscard]] Layout lay_out(const Plan& plan);

// The largest slice, in whose scratch all of them run.
[[nodiscard]] Plan largest_slice(Plan plan);

// Parts of dqk in which sums over the rows of dQ and dK come.
[[nodiscard]] std::int64_t sum_parts(const Plan& plan);
// Parts in which <C, dC> of a chunk comes from grad_states or grad_k_reverse, and from grad_qk; 0: not from there.
[[nodiscard]] std::int64_t through_parts(const Plan& plan);
[[nodiscard]] std::int64_t trace_parts(const Plan& plan);

}  // namespace tfla
