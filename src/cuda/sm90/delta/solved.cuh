// What solve leaves of a tile of one head, and how forward reads it: Z in two terms of bfloat16, then vectors of
// floats.
//
//   Z = (I + L beta)^-1 L      L_tj = D_tj k_t.k_j for j < t
//
// The residuals of a tile are r = X - Z (beta X) with X = V - (qbar K) C. Z is strictly lower: the unit diagonal of the
// inverse is never rounded. Factors of the norms of q and k are in the vectors, so that Q and K are operands as they
// are.
#pragma once

#include "cuda/arch/shared.cuh"
#include "cuda/sm90/common/lane.cuh"
#include "cuda/sm90/common/maps.cuh"
#include "cuda/sm90/delta/entry.h"

namespace tfla::cuda::sm90::delta_rule {

using DeltaCall = tfla::cuda::delta::Call<float>;

inline constexpr int tile_tokens = tfla::hopper::delta_tile;
static_assert(tile_tokens == token_block && tile_tokens == panel);

// Factors of a token.
enum class Vector : int {
  recall,  // exp(b) |k|^-1: of what the state says of its key
  write,   // beta
  keep,    // beta exp(b_end - b) |k|^-1: of what it leaves in the state at the tile's end
  read,    // scale exp(b) |q|^-1: of what the state says of its query
  sum,     // b: the sum of the log decays since the tile began, to the base 2
  query,   // scale |q|^-1
  key,     // beta |k|^-1
  decay,   // exp(b_end), the same number for all
  left,    // exp(b_end - b) |k|^-1: of what a state at the tile's end says of its key
  norm     // |k|^-1
};

inline constexpr int solved_rows = tfla::hopper::solved_rows;
inline constexpr unsigned solved_bytes = solved_rows * panel_row_bytes;
inline constexpr unsigned second_term = panel_bytes;  // from the first term of Z
static_assert(solved_bytes % panel_alignment == 0);

[[nodiscard]] __host__ __device__ constexpr int first_row(Vector vector) {
  return 2 * tile_tokens + 2 * static_cast<int>(vector);
}

// Where the two tokens that a thread has of every eight lie in a vector, but for what is known of them before: rows are
// swizzled, of odd number and of even number in two ways.
struct TokenPair {
  unsigned even;

  __device__ __forceinline__ explicit TokenPair(const Lane& lane) : even(lane.pair / 4 * 16 + lane.pair % 4 * 4) {}
  [[nodiscard]] __device__ __forceinline__ unsigned of_row(int row) const { return even ^ (row % 2 * 16); }
};

// A tile as TMA leaves it in shared memory: rows of 128 bytes, swizzled.
struct SolvedTile {
  static constexpr int row_floats = panel_row_bytes / 4;
  unsigned memory;

  [[nodiscard]] __device__ __forceinline__ unsigned z() const { return memory; }
  // Of tokens 8 n + lane.pair and the next.
  [[nodiscard]] __device__ __forceinline__ float2 pair(Vector vector, int n, const TokenPair& own) const {
    const int row = first_row(vector) + 8 * n / row_floats, unit = 2 * n % 8;
    return arch::read_float2(memory + row * panel_row_bytes + (unit ^ (row & 6)) * 16 + own.of_row(row));
  }
  [[nodiscard]] __device__ __forceinline__ float one(Vector vector, int t) const {
    const int row = first_row(vector) + t / row_floats, column = t % row_floats;
    return arch::read_float(memory + row * panel_row_bytes + ((column / 4) ^ (row % 8)) * 16 + column % 4 * 4);
  }
};

}  // namespace tfla::cuda::sm90::delta_rule
