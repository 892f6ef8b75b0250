// The tensor maps that a kernel takes, and which of them a box is loaded through.
#pragma once

#include <cuda.h>

#include <type_traits>

#include "cuda/sm90/common/tensor_map.h"

namespace tfla::cuda::sm90 {

// The maps of a kernel, `Dense`, with the one that packed sequences need besides.
template <class Dense>
struct PackedMaps : Dense {
  CUtensorMap nothing;
};
template <class Dense, bool Packed>
using MapsFor = std::conditional_t<Packed, PackedMaps<Dense>, Dense>;

// The map to load a box through. inside: some of the box lies inside of the tensor (see nothing_map).
template <class Maps>
__device__ __forceinline__ const CUtensorMap* map_for(const Maps& maps, const CUtensorMap& map, bool inside) {
  if constexpr (requires { maps.nothing; })
    return inside ? &map : &maps.nothing;
  else
    return &map;
}

// The same for a box of the columns from `column` on, of a tensor that has `columns`.
template <class Maps>
__device__ __forceinline__ const CUtensorMap* map_for(const Maps& maps, const CUtensorMap& map, int column,
                                                      int columns) {
  if constexpr (requires { maps.nothing; })
    return column < columns ? &map : &maps.nothing;
  else
    return &map;
}

// box_tokens: of the boxes that are loaded through map_for.
template <bool Packed, class Dense>
MapsFor<Dense, Packed> add_nothing(const Dense& maps, const Call<float>& call, int box_tokens) {
  if constexpr (Packed)
    return {maps, nothing_map(call.tensors.q.data, box_tokens)};
  else
    return maps;
}

// Maps of the tensors of a call, in boxes of so many tokens: q and k; v, h and their gradients.
inline CUtensorMap qk_map(const Call<float>& call, const Strided& tensor, int box_tokens) {
  return token_map(call, tensor, call.dims.qk_heads, call.dims.dqk, box_tokens);
}
inline CUtensorMap hv_map(const Call<float>& call, const Strided& tensor, int box_tokens) {
  return token_map(call, tensor, call.dims.heads, call.dims.dhv, box_tokens);
}
// The gradients of q and k as the kernels leave them: of every head of v.
inline CUtensorMap grad_qk_map(const Call<float>& call, const Strided& tensor, int box_tokens) {
  return token_map(call, tensor, call.dims.heads, call.dims.dqk, box_tokens);
}
// C of all chunks, or dC, in boxes of so many rows.
inline CUtensorMap state_map(const Call<float>& call, const void* states, int box_rows) {
  return matrix_map(states, call.dims.chunk_count * call.dims.heads, call.dims.dqk, call.dims.padded_dhv(), box_rows);
}

}  // namespace tfla::cuda::sm90
