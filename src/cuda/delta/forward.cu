// Forward of the delta rule, and the states and residuals that backward needs: a CTA has a block of columns of one head
// of one sequence and goes from tile to tile.
//
//   r + L (beta r) = V - (qbar K) C     w = beta r     H = (scale qbar Q) C + P w     C' = gbar C + (abar K)^T w
//
// The state lies in scratch: the products of a tile take longer than moving it through L2.
#include "cuda/arch/dynamic_shared.h"
#include "cuda/delta/tile.cuh"
#include "cuda/device.h"

namespace tfla::cuda::delta {

namespace {

template <class Real>
struct ForwardShared {
  Slab<Real> slab;
  Gates<Real> gates;
  Real square[Block<Real>::square];  // L, then P
  Real w[Block<Real>::square];       // [tile,columns]
};

template <class T>
struct ForwardTile {
  using Real = typename Config<T>::Real;
  using Size = Block<Real>;
  const Call<Real>& call;
  ForwardShared<Real>& shared;
  const Panel<Real>& panel;
  const Tile& tile;
  Keys<T> q, k;
  const Real* C;  // at the tile's start
  bool zero;      // C is zero, and its memory is not initialised

  // w, and r where it is kept.
  __device__ __forceinline__ void residuals() const {
    const Dims& dims = call.dims;
    const Gates<Real>& gates = shared.gates;
    key_scores<T>(shared.slab, gates, tile.count, dims.dqk, k, shared.square);
    const Rows<T> v(call.tensors.v, tile, tile.head, panel.first);
    Sums<Real> recalled;
    if (!zero) {
      multiply<Along::depth, Along::outer>(
          recalled, shared.slab, tile.count, panel.width, dims.dqk,
          [&](int t, int d) { return gates.qbar[t] * k(t, d); },
          [&](int c, int d) { return C[static_cast<std::int64_t>(d) * dims.dhv + c]; });
    }
    recalled.each(tile.count, panel.width,
                  [&](int, int t, int c, Real sum) { shared.w[t * Size::pitch + c] = v(t, c) - sum; });
    Real* r = call.scratch.residuals;
    if (r != nullptr) r += tile.row(call) * dims.dhv + panel.first;
    solve(shared.square, gates.beta, shared.w, tile.count, panel.width, [&](int t, int c, Real value) {
      if (r != nullptr) r[static_cast<std::int64_t>(t) * dims.heads * dims.dhv + c] = value;
    });
  }

  __device__ __forceinline__ void outputs() const {
    const Dims& dims = call.dims;
    const Gates<Real>& gates = shared.gates;
    const auto scale = static_cast<Real>(call.rules.scale);
    query_scores<T>(shared.slab, gates, tile.count, dims.dqk, scale, q, k, shared.square);
    Sums<Real> h;
    multiply<Along::depth, Along::outer>(
        h, shared.slab, tile.count, panel.width, tile.count,
        [&](int t, int j) { return shared.square[t * Size::pitch + j]; },
        [&](int c, int j) { return shared.w[j * Size::pitch + c]; });
    if (!zero) {
      multiply<Along::depth, Along::outer>(
          h, shared.slab, tile.count, panel.width, dims.dqk,
          [&](int t, int d) { return scale * gates.qbar[t] * q(t, d); },
          [&](int c, int d) { return C[static_cast<std::int64_t>(d) * dims.dhv + c]; });
    }
    T* out = row_of<T>(call.tensors.h, tile.batch, tile.token, tile.head) + panel.first;
    h.each(tile.count, panel.width,
           [&](int, int t, int c, Real sum) { out[t * call.tensors.h.token + c] = narrow<T>(sum); });
  }

  // `next` may be C.
  __device__ __forceinline__ void advance(Real* next) const {
    const Dims& dims = call.dims;
    const Gates<Real>& gates = shared.gates;
    for (int first = 0; first < dims.dqk; first += Size::size) {
      const int rows = min(Size::size, dims.dqk - first);
      Sums<Real> added;
      multiply<Along::outer, Along::outer>(
          added, shared.slab, rows, panel.width, tile.count,
          [&](int d, int t) { return gates.abar[t] * k(t, first + d); },
          [&](int c, int t) { return shared.w[t * Size::pitch + c]; });
      added.each(rows, panel.width, [&](int, int d, int c, Real sum) {
        const std::int64_t at = static_cast<std::int64_t>(first + d) * dims.dhv + c;
        next[at] = zero ? sum : gates.gbar * C[at] + sum;
      });
    }
  }
};

// Outputs: h and the last state, with one state per sequence in scratch. Else residuals and a state per tile.
template <class T, bool Outputs>
__global__ void __launch_bounds__(threads) forward_kernel(Call<typename Config<T>::Real> call) {
  using Real = typename Config<T>::Real;
  TFLA_DYNAMIC_SHARED(16, memory);
  auto& shared = *reinterpret_cast<ForwardShared<Real>*>(memory);
  const Dims& dims = call.dims;
  const Panel<Real> panel(dims, blockIdx.x);
  const Sequence sequence = sequence_at(call, panel.sequence);
  const std::int64_t tiles = tiles_of(call, sequence);
  const auto state = [&](std::int64_t tile) {
    return state_at(call.scratch.states, dims, Outputs ? panel.sequence : sequence.first_tile + tile, panel.head,
                    panel.first);
  };
  const StridedState& initial = call.carried.initial;
  bool zero = initial.data == nullptr;
  if (!zero && (Outputs || tiles > 0)) {
    const Real* from = carried<Real>(initial, panel.sequence, panel.head, panel.first);
    Real* to = state(0);
    each_of_state(dims.dqk, panel.width, Block<Real>::size,
                  [&](int d, int c) { to[static_cast<std::int64_t>(d) * dims.dhv + c] = from[d * initial.row + c]; });
  }
  const bool keeps_last = Outputs && call.carried.last.data != nullptr;
  for (std::int64_t index = 0; index < tiles; ++index) {
    const Tile tile = tile_of(call, sequence, panel.head, index);
    load_gates(call, tile, shared.gates);
    const int qk_head = panel.head / dims.group;
    const ForwardTile<T> work{call,
                              shared,
                              panel,
                              tile,
                              {{call.tensors.q, tile, qk_head}, shared.gates.q_norm},
                              {{call.tensors.k, tile, qk_head}, shared.gates.k_norm},
                              state(index),
                              zero};
    work.residuals();
    if (Outputs) work.outputs();
    if (index + 1 < tiles || keeps_last) work.advance(state(Outputs ? 0 : index + 1));
    zero = false;
  }
  if (!keeps_last) return;
  __syncthreads();
  const Real* from = state(0);
  Real* to = carried<Real>(call.carried.last, panel.sequence, panel.head, panel.first);
  each_of_state(dims.dqk, panel.width, Block<Real>::size, [&](int d, int c) {
    to[d * call.carried.last.row + c] = zero ? Real{0} : from[static_cast<std::int64_t>(d) * dims.dhv + c];
  });
}

template <class T, bool Outputs>
void launch(const char* name, const Call<typename Config<T>::Real>& call, cudaStream_t stream) {
  using Real = typename Config<T>::Real;
  const std::int64_t ctas = panels_of<Real>(call.dims);
  if (ctas == 0) return;
  launch_blocks(name, forward_kernel<T, Outputs>, ctas, threads, static_cast<int>(sizeof(ForwardShared<Real>)), stream,
                call);
}

}  // namespace

template <class T>
void launch_forward(const Call<typename Config<T>::Real>& call, cudaStream_t stream) {
  launch<T, true>("delta forward", call, stream);
}
template <class T>
void launch_states(const Call<typename Config<T>::Real>& call, cudaStream_t stream) {
  launch<T, false>("delta states", call, stream);
}

#define TFLA_INSTANTIATE(T)                                                             \
  template void launch_forward<T>(const Call<typename Config<T>::Real>&, cudaStream_t); \
  template void launch_states<T>(const Call<typename Config<T>::Real>&, cudaStream_t)
TFLA_FOR_EACH_TYPE(TFLA_INSTANTIATE);
#undef TFLA_INSTANTIATE

}  // namespace tfla::cuda::delta
