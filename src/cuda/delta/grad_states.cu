// Backward of the delta rule through the states: a CTA has a block of columns of one head of one sequence and goes from
// the last tile to the first.
//
//   dw = P^T dH + (abar K) dC     dX = dw - L^T (beta dX)     dV = beta dX
//   dC = gbar dC + (scale qbar Q)^T dH - (qbar K)^T dV
//
// It leaves dX, and dC at the end of every tile, from which all other gradients are made side by side.
#include "cuda/arch/dynamic_shared.h"
#include "cuda/delta/tile.cuh"
#include "cuda/device.h"

namespace tfla::cuda::delta {

namespace {

template <class Real>
struct GradShared {
  Slab<Real> slab;
  Gates<Real> gates;
  Real square[Block<Real>::square];  // P, then L
  Real dV[Block<Real>::square];      // [tile,columns]
};

template <class T>
struct GradTile {
  using Real = typename Config<T>::Real;
  using Size = Block<Real>;
  const Call<Real>& call;
  GradShared<Real>& shared;
  const Panel<Real>& panel;
  const Tile& tile;
  Keys<T> q, k;
  Rows<T> dh;
  const Real* dC;  // at the tile's end
  bool zero;       // dC is zero, and its memory is not initialised

  __device__ __forceinline__ void values() const {
    const Dims& dims = call.dims;
    const Gates<Real>& gates = shared.gates;
    query_scores<T>(shared.slab, gates, tile.count, dims.dqk, static_cast<Real>(call.rules.scale), q, k, shared.square);
    Sums<Real> dw;
    multiply<Along::outer, Along::outer>(
        dw, shared.slab, tile.count, panel.width, tile.count,
        [&](int j, int t) { return shared.square[t * Size::pitch + j]; }, [&](int c, int t) { return dh(t, c); });
    if (!zero) {
      multiply<Along::depth, Along::outer>(
          dw, shared.slab, tile.count, panel.width, dims.dqk, [&](int t, int d) { return gates.abar[t] * k(t, d); },
          [&](int c, int d) { return dC[static_cast<std::int64_t>(d) * dims.dhv + c]; });
    }
    dw.each(tile.count, panel.width, [&](int, int t, int c, Real sum) { shared.dV[t * Size::pitch + c] = sum; });
    key_scores<T>(shared.slab, gates, tile.count, dims.dqk, k, shared.square);
    Real* dX = call.scratch.grad_residuals + tile.row(call) * dims.dhv + panel.first;
    T* dv = row_of<T>(call.tensors.dv, tile.batch, tile.token, tile.head) + panel.first;
    solve_transposed(shared.square, gates.beta, shared.dV, tile.count, panel.width, [&](int t, int c, Real value) {
      dX[static_cast<std::int64_t>(t) * dims.heads * dims.dhv + c] = value;
      dv[t * call.tensors.dv.token + c] = narrow<T>(gates.beta[t] * value);
    });
  }

  // dC at the tile's start, with rows of `row` numbers.
  __device__ __forceinline__ void advance(Real* next, std::int64_t row) const {
    const Dims& dims = call.dims;
    const Gates<Real>& gates = shared.gates;
    const auto scale = static_cast<Real>(call.rules.scale);
    for (int first = 0; first < dims.dqk; first += Size::size) {
      const int rows = min(Size::size, dims.dqk - first);
      Sums<Real> added;
      multiply<Along::outer, Along::outer>(
          added, shared.slab, rows, panel.width, tile.count,
          [&](int d, int t) { return scale * gates.qbar[t] * q(t, first + d); },
          [&](int c, int t) { return dh(t, c); });
      multiply<Along::outer, Along::outer>(
          added, shared.slab, rows, panel.width, tile.count,
          [&](int d, int t) { return -gates.qbar[t] * k(t, first + d); },
          [&](int c, int t) { return shared.dV[t * Size::pitch + c]; });
      added.each(rows, panel.width, [&](int, int d, int c, Real sum) {
        const Real kept = zero ? Real{0} : gates.gbar * dC[static_cast<std::int64_t>(first + d) * dims.dhv + c];
        next[(first + d) * row + c] = kept + sum;
      });
    }
  }
};

// A sequence without tokens: the gradient of the last state is that of the initial one.
template <class Real>
__device__ __forceinline__ void pass_through(const Call<Real>& call, const Panel<Real>& panel) {
  const StridedState &from = call.carried.dlast, &to = call.carried.dinitial;
  if (to.data == nullptr) return;
  const Real* last = from.data == nullptr ? nullptr : carried<Real>(from, panel.sequence, panel.head, panel.first);
  Real* first = carried<Real>(to, panel.sequence, panel.head, panel.first);
  each_of_state(call.dims.dqk, panel.width, Block<Real>::size,
                [&](int d, int c) { first[d * to.row + c] = last == nullptr ? Real{0} : last[d * from.row + c]; });
}

template <class T>
__global__ void __launch_bounds__(threads) grad_states_kernel(Call<typename Config<T>::Real> call) {
  using Real = typename Config<T>::Real;
  TFLA_DYNAMIC_SHARED(16, memory);
  auto& shared = *reinterpret_cast<GradShared<Real>*>(memory);
  const Dims& dims = call.dims;
  const Panel<Real> panel(dims, blockIdx.x);
  const Sequence sequence = sequence_at(call, panel.sequence);
  const std::int64_t tiles = tiles_of(call, sequence);
  if (tiles == 0) return pass_through(call, panel);
  const auto state = [&](std::int64_t tile) {
    return state_at(call.scratch.grad_states, dims, sequence.first_tile + tile, panel.head, panel.first);
  };
  const StridedState &last = call.carried.dlast, &initial = call.carried.dinitial;
  bool zero = last.data == nullptr;
  if (!zero) {
    const Real* from = carried<Real>(last, panel.sequence, panel.head, panel.first);
    Real* to = state(tiles - 1);
    each_of_state(dims.dqk, panel.width, Block<Real>::size,
                  [&](int d, int c) { to[static_cast<std::int64_t>(d) * dims.dhv + c] = from[d * last.row + c]; });
  }
  for (std::int64_t index = tiles - 1; index >= 0; --index) {
    const Tile tile = tile_of(call, sequence, panel.head, index);
    load_gates(call, tile, shared.gates);
    const int qk_head = panel.head / dims.group;
    const GradTile<T> work{call,
                           shared,
                           panel,
                           tile,
                           {{call.tensors.q, tile, qk_head}, shared.gates.q_norm},
                           {{call.tensors.k, tile, qk_head}, shared.gates.k_norm},
                           {call.tensors.dh, tile, panel.head, panel.first},
                           state(index),
                           zero};
    work.values();
    if (index > 0) {
      work.advance(state(index - 1), dims.dhv);
    } else if (initial.data != nullptr) {
      work.advance(carried<Real>(initial, panel.sequence, panel.head, panel.first), initial.row);
    }
    zero = false;
  }
}

}  // namespace

template <class T>
void launch_grad_states(const Call<typename Config<T>::Real>& call, cudaStream_t stream) {
  using Real = typename Config<T>::Real;
  const std::int64_t ctas = panels_of<Real>(call.dims);
  if (ctas == 0) return;
  launch_blocks("delta grad_states", grad_states_kernel<T>, ctas, threads, static_cast<int>(sizeof(GradShared<Real>)),
                stream, call);
}

#define TFLA_INSTANTIATE(T) template void launch_grad_states<T>(const Call<typename Config<T>::Real>&, cudaStream_t)
TFLA_FOR_EACH_TYPE(TFLA_INSTANTIATE);
#undef TFLA_INSTANTIATE

}  // namespace tfla::cuda::delta
