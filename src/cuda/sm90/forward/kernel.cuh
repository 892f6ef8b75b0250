// Forward on Hopper: H, the states of a sequence never leaving the chip. Chunks are token blocks of 64 tokens. A CTA
// owns 64 or 128 columns of dhv of one head over a segment of a sequence; CTAs are persistent.
//
//   warp 0       loads Q, K, V of the next token blocks into rings
//   warp 1       loads their gate vectors
//   warps 2, 3   store H from shared to global memory, one for each output warpgroup
//   warps 4-11   outputs: two warpgroups take token blocks in turn. S = Q K^T, gates, O = P V, O += Q C; H goes where Q
//                was
//   warps 12-15  the state: rounds C for the outputs, then adds the keys and values of the token block
//
// With dqk above 128 and dhv above 64 the state is split between warps 8-15, and warps 4-7 make all outputs; warp 3
// loads K.
//
//   loads      Q ring         K ring         V ring, gate vectors             H out of Q's slot
//                 |              |              |                                  ^
//   outputs    S = Q K^T  ->  gate, sum rows ->  O = P V  ->  O += Q C, q.n -------'
//                                                                ^
//   state      C rounded into shared memory ---------------------'  then C = decay C + (abar K)^T V, n likewise
//
// For training the rounded states of chunk starts go to global memory too, from where the outputs read them. Backward
// needs them to more digits than H does, so weighted keys enter their products as the sum of two bfloat16.
//
// In float16 the rounded C, n and P have a scale16 each (scale16.cuh), and one term has the digits. No states are kept.
//
// Heads of dqk above 256 take two kernels (inst/bf16_dqk512.cu). In reverse time the same kernel makes dC and dV
// (inst/grad_states_v.cu).
#pragma once

#include <algorithm>

#include "cuda/arch/cluster.cuh"
#include "cuda/arch/copy.cuh"
#include "cuda/arch/dynamic_shared.h"
#include "cuda/launch.h"
#include "cuda/sm90/common/maps.cuh"
#include "cuda/sm90/common/table_rows.h"
#include "cuda/sm90/entry.h"
#include "cuda/sm90/forward/load.cuh"
#include "cuda/sm90/forward/outputs/outputs.cuh"
#include "cuda/sm90/forward/state.cuh"
#include "cuda/sm90/forward/store.cuh"

namespace tfla::cuda::sm90 {

namespace forward {

// The first warpgroup.
template <class C>
__device__ __forceinline__ void load_and_store(const Cta<C>& cta) {
  const Load<C> load{cta};
  const int warp = static_cast<int>(threadIdx.x) / warp_threads;
  if (C::split_state) {
    if (threadIdx.x == 0) load.values_and_queries_alone();
    if (threadIdx.x == 3 * warp_threads) load.keys_alone();
  } else {
    if (threadIdx.x == 0) load.tokens();
  }
  if (warp == 1) load.gates();
  if (warp >= 2 && warp < 2 + C::output_warpgroups) Store<C>{cta}.outputs(warp - 2);
}

template <class C>
__global__ void __launch_bounds__(threads, 1)
    forward_kernel(const __grid_constant__ typename Cta<C>::Maps maps, const __grid_constant__ Call<float> call,
                   const __grid_constant__ typename Cta<C>::Work work) {
  TFLA_DYNAMIC_SHARED(1, memory);
  const Cta<C> cta{call, maps, work, {(arch::shared_address(memory) + 1023U) & ~1023U}};
  // As begin_kernel, with n cleared meanwhile.
  if (threadIdx.x == 0) cta.shared.init_barriers();
  if (C::clears_n) cta.shared.clear_n();
  __syncthreads();
  arch::after_previous_kernel();
  arch::let_next_kernel_start();
  const int warpgroup = static_cast<int>(threadIdx.x) / warpgroup_threads;
  if (warpgroup == 0) {
    arch::fewer_registers<C::move_registers>();
    load_and_store(cta);
  } else if (warpgroup <= C::output_warpgroups) {
    arch::more_registers<C::output_registers>();
    // One copy of the code for both output warpgroups, where run_roles would make two: with two, warps wait for
    // instructions. The number is broadcast, so that descriptors are uniform.
    Output<C>{cta}.make(C::output_warpgroups == 1 ? 0 : __shfl_sync(0xFFFFFFFFU, warpgroup, 0) - 1);
  } else if (C::split_state && warpgroup == 2) {
    arch::more_registers<C::state_registers>();
    State<C, 0>{cta}.carry();
  } else {
    arch::more_registers<C::state_registers>();
    State<C, C::state_warpgroups - 1>{cta}.carry();
  }
}

template <class C>
void set_kept(const Call<float>& call, Work& work, Maps& maps) {
  while (token_block << work.kept_shift < call.dims.kept_chunk) ++work.kept_shift;
  work.kept_chunks = static_cast<int>((call.dims.tokens + call.dims.kept_chunk - 1) / call.dims.kept_chunk);
  maps.states = matrix_map(call.stored.C, call.dims.kept_count() * call.dims.heads, call.dims.dqk,
                           call.dims.padded_dhv(), C::split_state ? 16 : 64 * C::dqk_panels);
}

template <class C>
constexpr const char* kernel_name() {
  if (C::grad_qk) return C::reverse ? "grad_k_reverse" : "grad_q_forward";
  if (C::reverse) return C::keeps_states ? "grad_states_v" : "grad_v_reverse";
  return "forward";
}

// The work of a CTA with what an epilogue needs of it.
template <class C>
typename Cta<C>::Work with_epilogue(const typename Cta<C>::PlainWork& work, const Epilogue& epilogue) {
  if constexpr (C::epilogue)
    return {work, epilogue.D, epilogue.z.data != nullptr, epilogue.ungated.data != nullptr};
  else
    return work;
}

// factors: of dQ and dK (Maps::factors).
template <class C>
void launch(const Call<float>& call, cudaStream_t stream, const Strided& factors = {}, const Epilogue& epilogue = {}) {
  Work work{};
  work.column_tiles = (call.dims.dhv + C::columns - 1) / C::columns;
  work.items = static_cast<int>(call.dims.sequences) * call.dims.heads * call.dims.segments * work.column_tiles;
  work.ctas = std::min(work.items, multiprocessors());
  work.scale = static_cast<float>(call.rules.scale);
  work.eps = static_cast<float>(call.rules.eps);
  work.factors = factors;
  typename Cta<C>::DenseMaps maps{};
  maps.q = qk_map(call, call.tensors.q, token_block);
  maps.k = qk_map(call, call.tensors.k, token_block);
  maps.v = hv_map(call, call.tensors.v, token_block);
  maps.h = hv_map(call, call.tensors.h, token_block);
  if (C::grad_qk) maps.factors = hv_map(call, factors, token_block);
  if (C::keeps_states) set_kept<C>(call, work, maps);
  if constexpr (C::epilogue) {
    if (epilogue.z.data != nullptr) maps.z = hv_map(call, epilogue.z, token_block);
    if (epilogue.ungated.data != nullptr) maps.ungated = hv_map(call, epilogue.ungated, token_block);
  }
  const auto start = [&](const typename Cta<C>::PlainWork& all, int ctas) {
    launch_chained(kernel_name<C>(), forward_kernel<C>, ctas, threads, Shared<C>::bytes, stream,
                   add_nothing<C::packed>(maps, call, token_block), call, with_epilogue<C>(all, epilogue));
  };
  if constexpr (C::packed) {
    const Units units(call, call.dims.heads * work.column_tiles);
    start({work, units, Divider(work.column_tiles), Divider(call.dims.heads)}, units.ctas);
  } else {
    start(work, work.ctas);
  }
}

// Packed sequences of dqk above 128 keep no states in forward: plan.cc asks for none there.
constexpr Options packed(Options options) {
  options.packed = true;
  if (options.direction == Time::forward && options.dqk_panels > 2) options.keep = Keep::nothing;
  return options;
}
template <class T, Options O>
void launch_by_packing(const Call<float>& call, cudaStream_t stream, const Strided& factors = {},
                       const Epilogue& epilogue = {}) {
  call.packing.cu_seqlens == nullptr ? launch<Config<T, O>>(call, stream, factors, epilogue)
                                     : launch<Config<T, packed(O)>>(call, stream, factors, epilogue);
}

template <class T, int DqkPanels, int Columns, Keep K>
void launch_by_norm(const Call<float>& call, cudaStream_t stream) {
  constexpr Options options{.dqk_panels = DqkPanels, .columns = Columns, .normalized = false, .keep = K};
  constexpr Options with_n{.dqk_panels = DqkPanels, .columns = Columns, .normalized = true, .keep = K};
  call.rules.normalized ? launch_by_packing<T, with_n>(call, stream) : launch_by_packing<T, options>(call, stream);
}

template <class T, int DqkPanels, int Columns>
void launch_shape(const Call<float>& call, cudaStream_t stream) {
  if constexpr (!needs_scale16<T>) {  // float16 keeps no states: plan.cc asks for none there
    if (call.dims.kept_chunk > 0) return launch_by_norm<T, DqkPanels, Columns, Keep::states>(call, stream);
  }
  launch_by_norm<T, DqkPanels, Columns, Keep::nothing>(call, stream);
}

}  // namespace forward

template <class T>
void launch_forward(const Call<float>& call, TileSize tile, cudaStream_t stream) {
  with_row<Kernel::forward, T>(tile, [&](auto row) {
    constexpr int dqk = decltype(row)::rows;
    if constexpr (dqk <= hopper::dqk_of_a_pass)  // more: inst/bf16_dqk512.cu
      forward::launch_shape<T, dqk / panel, decltype(row)::columns>(call, stream);
  });
}

}  // namespace tfla::cuda::sm90
