// Where the sequences and tiles of a call of the delta rule lie, and its raw gates.
#pragma once

#include "core/delta_gates.h"
#include "cuda/common/device.cuh"
#include "cuda/delta/call.h"

namespace tfla::cuda::delta {

// One sequence. A dense batch has one per row.
struct Sequence {
  int batch;
  std::int64_t token;  // the first, in its row of the batch
  std::int64_t length;
  std::int64_t first_tile;  // its number
};

template <class Real>
__device__ __forceinline__ std::int64_t boundary(const Call<Real>& call, std::int64_t index) {
  return read_boundary(call.cu_seqlens, index * call.cu_stride, call.cu_is_64_bit, call.dims.tokens);
}

template <class Real>
__device__ __forceinline__ Sequence sequence_at(const Call<Real>& call, std::int64_t index) {
  const Dims& dims = call.dims;
  if (call.cu_seqlens == nullptr) return {static_cast<int>(index), 0, dims.tokens, index * dims.tiles_per_row};
  const std::int64_t start = boundary(call, index), end = boundary(call, index + 1);
  return {0, start, end > start ? end - start : 0, start / dims.tile + index};
}

// Tokens [token, token + count) of a row of the batch, for one value head.
struct Tile {
  std::int64_t number;  // over all sequences
  std::int64_t token;
  int batch, head;
  int count;

  // Where its first row lies in [B,T,H] scratch.
  template <class Real>
  [[nodiscard]] __device__ __forceinline__ std::int64_t row(const Call<Real>& call) const {
    return (batch * call.dims.tokens + token) * call.dims.heads + head;
  }
};

template <class Real>
__device__ __forceinline__ Tile tile_of(const Call<Real>& call, const Sequence& sequence, int head,
                                        std::int64_t index) {
  const std::int64_t begin = index * call.dims.tile, left = sequence.length - begin;
  return {sequence.first_tile + index, sequence.token + begin, sequence.batch, head,
          static_cast<int>(left < call.dims.tile ? left : call.dims.tile)};
}

template <class Real>
__device__ __forceinline__ std::int64_t tiles_of(const Call<Real>& call, const Sequence& sequence) {
  return (sequence.length + call.dims.tile - 1) / call.dims.tile;
}

// The sequence that has the tile of this number, if any has: see Sequence::first_tile.
template <class Real>
__device__ __forceinline__ std::int64_t sequence_of_tile(const Call<Real>& call, std::int64_t number) {
  if (call.cu_seqlens == nullptr) return number / call.dims.tiles_per_row;
  std::int64_t low = 0, high = call.dims.sequences - 1;  // the last one that begins at this number or before
  while (low < high) {
    const std::int64_t middle = (low + high + 1) / 2;
    if (boundary(call, middle) / call.dims.tile + middle <= number) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// The logarithm of a token's decay, with its limit.
template <class Real>
__device__ __forceinline__ double log_decay(const Call<Real>& call, int batch, std::int64_t token, int head) {
  const Tensors& tensors = call.tensors;
  if (tensors.g.data == nullptr) return 0;
  const double g = read_gate(tensors.g, call.rules.g_type, batch, token, head);
  if (tensors.A_log.data == nullptr) return limit_decay(g);
  const double bias =
      tensors.dt_bias.data == nullptr ? 0.0 : read_gate(tensors.dt_bias, call.rules.dt_bias_type, 0, 0, head);
  return limit_decay(-exp(read_gate(tensors.A_log, call.rules.A_log_type, 0, 0, head)) * softplus(g + bias));
}

template <class Real>
__device__ __forceinline__ double raw_beta(const Call<Real>& call, int batch, std::int64_t token, int head) {
  return read_gate(call.tensors.beta, call.rules.beta_type, batch, token, head);
}

}  // namespace tfla::cuda::delta
