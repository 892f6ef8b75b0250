// grad_qk and row_dots: from a call to the arguments of the kernels.
#pragma once

#include "cuda/launch.h"
#include "cuda/sm90/grad_qk/shared.cuh"

namespace tfla::cuda::sm90::grad_qk {

inline Maps maps_of(const Call<float>& call) {
  const Tensors& tensors = call.tensors;
  return {.q = qk_map(call, tensors.q, chunk_tokens),
          .k = qk_map(call, tensors.k, chunk_tokens),
          .v = hv_map(call, tensors.v, chunk_tokens),
          .dh = hv_map(call, tensors.dh, chunk_tokens),
          .dq = grad_qk_map(call, tensors.dq_heads, token_block),
          .dk = grad_qk_map(call, tensors.dk_heads, token_block),
          .C = state_map(call, call.stored.C, tile_columns),
          .dC = state_map(call, call.stored.dC, tile_columns)};
}

inline Work work_of(const Call<float>& call, int tiles_per_chunk, std::int64_t ctas) {
  static_assert(tile_columns == tfla::cuda::Config<__nv_bfloat16>::width, "row sums come in parts of as many columns");
  return {.chunks = Chunks(call),
          .row_sums = call.sums.rows,
          .column_sums = call.sums.columns,
          .outflow = call.sums.outflow,
          .dhv_panels = (call.dims.dhv + panel - 1) / panel,
          .tiles = ColumnTiles(call, tiles_per_chunk, ctas),
          .dqk = call.dims.dqk,
          .vectors = static_cast<int>(call.dims.all_tokens() * call.dims.heads),
          .state_tiles = static_cast<int>(hopper::state_tiles(call.dims.dqk, call.dims.dhv)),
          .state_columns = static_cast<int>(hopper::state_columns(call.dims.dhv)),
          .traces = call.sums.traces,
          .decays = call.gates.gbar,
          .n = static_cast<const float*>(call.stored.n),
          .dn = call.stored.dn};
}

template <class C, class Kernel>
void launch_tiles(const char* name, Kernel kernel, const Call<float>& call, cudaStream_t stream) {
  static_assert(shared_bytes<C> <= cta_shared_bytes, "what a CTA may have");
  const int tiles_per_chunk = (call.dims.dqk + tile_columns - 1) / tile_columns;
  const std::int64_t ctas = ctas_for(call.dims.chunk_count * call.dims.heads * tiles_per_chunk);
  launch_chained(name, kernel, ctas, C::threads, shared_bytes<C>, stream,
                 add_nothing<C::packed>(maps_of(call), call, chunk_tokens), work_of(call, tiles_per_chunk, ctas));
}

}  // namespace tfla::cuda::sm90::grad_qk
