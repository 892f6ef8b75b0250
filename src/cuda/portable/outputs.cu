// Stage `outputs`: den H = scale qbar (Q C) + (D . Q K^T) V. A CTA has 64 rows of a chunk and a tile of dhv columns,
// and walks over the key tiles of the chunk up to the diagonal. The same kernel gives deta of the exact normalizer
// gradient (stage `grad_denominators`): there a product with dH takes the place of the store.
#include "cuda/arch/dynamic_shared.h"
#include "cuda/launch.h"
#include "cuda/portable/products.cuh"

namespace tfla::cuda {

namespace {

enum class Wanted { outputs, grad_denominators };

// A number for each of this thread's rows.
template <class T>
using PerRow = typename Config<T>::Real[Accumulator<T, tile_rows>::rows];

// q.n of this thread's rows with the n of the chunk's start.
template <class T>
__device__ __forceinline__ void dots_with_n(const Call<typename Config<T>::Real>& call, const View<T>& q,
                                            std::int64_t number, int head, PerRow<T>& sums) {
  using Scores = Accumulator<T, tile_rows>;
  using Real = typename Config<T>::Real;
  const auto* n =
      static_cast<const typename Config<T>::Norm*>(call.stored.n) + (number * call.dims.heads + head) * call.dims.dqk;
#pragma unroll
  for (int r = 0; r < Scores::rows; ++r) {
    const T* line = q.data + min(Scores::row_of(r), q.rows - 1) * q.stride;
    Real sum = 0;
    if (q.wide && call.dims.dqk % 8 == 0) {  // two numbers a load
#pragma unroll 8
      for (int c = threadIdx.x % Scores::lanes * 2; c < call.dims.dqk; c += Scores::lanes * 2) {
        T pair[2];
        *reinterpret_cast<uint32_t*>(pair) = *reinterpret_cast<const uint32_t*>(line + c);
        sum += widen<Real>(pair[0]) * static_cast<Real>(n[c]) + widen<Real>(pair[1]) * static_cast<Real>(n[c + 1]);
      }
    } else {
      for (int c = threadIdx.x % Scores::lanes; c < call.dims.dqk; c += Scores::lanes)
        sum += widen<Real>(line[c]) * static_cast<Real>(n[c]);
    }
    sums[r] = Scores::over_row(sum);
  }
}

// Which rows of which chunk a CTA has, and which tile of columns where several share the rows.
struct OutputUnit {
  int tile, row, head;
  std::int64_t number;

  __device__ OutputUnit(const Dims& dims, int ctas_across, int row_tiles) {
    unsigned unit = blockIdx.x;
    tile = static_cast<int>(unit % ctas_across);
    unit /= ctas_across;
    row = static_cast<int>(unit % row_tiles) * tile_rows;
    unit /= row_tiles;
    head = static_cast<int>(unit % dims.heads);
    number = unit / dims.heads;
  }
};

// Q C and q.n with the weight of the chunk's start in each row.
template <class T>
__device__ __forceinline__ void decay_state(const Call<typename Config<T>::Real>& call, std::int64_t at, int rows,
                                            Accumulator<T, Config<T>::width>& O, PerRow<T>& qn) {
  using Scores = Accumulator<T, tile_rows>;
  using Real = typename Config<T>::Real;
  Real weight[Scores::rows];
#pragma unroll
  for (int r = 0; r < Scores::rows; ++r) {
    weight[r] = static_cast<Real>(call.rules.scale) * call.gates.qbar[at + min(Scores::row_of(r), rows - 1)];
    qn[r] *= weight[r];
  }
  O.each([&](int r, int, int, int, Real& value) { value *= weight[r]; });
}

// 1 / den of this thread's rows, from the two parts of q.n: that of the state, and this thread's share of the sums of
// S. Where `stores`, the first thread of a row keeps it.
template <class T>
__device__ __forceinline__ void make_denominators(const Call<typename Config<T>::Real>& call, std::int64_t at, int rows,
                                                  bool stores, const PerRow<T>& qn, const PerRow<T>& part,
                                                  PerRow<T>& inverse) {
  using Scores = Accumulator<T, tile_rows>;
#pragma unroll
  for (int r = 0; r < Scores::rows; ++r) {
    const int t = min(Scores::row_of(r), rows - 1);
    Denominator<typename Config<T>::Real> den;
    if (call.rules.normalized) den = {qn[r] + Scores::over_row(part[r]), call.gates.floor[at + t], call.rules.eps};
    inverse[r] = den.inverse;
    if (stores && threadIdx.x % Scores::lanes == 0 && Scores::row_of(r) < rows) {
      call.gates.inverse[at + t] = den.inverse;
      call.gates.slope[at + t] = den.slope;
    }
  }
}

// deta of this thread's rows, from its share of their dh.h.
template <class T>
__device__ __forceinline__ void store_deta(const Call<typename Config<T>::Real>& call, std::int64_t at, int rows,
                                           const PerRow<T>& dh_h) {
  using Scores = Accumulator<T, tile_rows>;
#pragma unroll
  for (int r = 0; r < Scores::rows; ++r) {
    const int i = Scores::row_of(r);
    const auto product = Scores::over_row(dh_h[r]);
    if (i < rows && threadIdx.x % Scores::lanes == 0) call.gates.deta[at + i] = call.gates.slope[at + i] * product;
  }
}

template <class T, Wanted Want>
__global__ void __launch_bounds__(block_threads, Config<T>::blocks)
    outputs_kernel(Call<typename Config<T>::Real> call, int row_tiles, int dhv_tiles) {
  using Real = typename Config<T>::Real;
  using Stored = typename Config<T>::Stored;
  using Scores = Accumulator<T, tile_rows>;
  constexpr int width = Config<T>::width;
  TFLA_DYNAMIC_SHARED(16, memory);
  Stream<T> stream{Workspace<T>(memory)};

  const auto [first_tile, row, head, number] =
      OutputUnit(call.dims, Want == Wanted::outputs ? dhv_tiles : 1, row_tiles);
  const Chunk chunk = call.packing.chunks[number];
  if (row >= chunk.length) return;
  const int rows = min(tile_rows, chunk.length - row);
  const int qk_head = head / call.dims.group;
  const std::int64_t at = call.dims.vector(chunk, head);
  const auto scale = static_cast<Real>(call.rules.scale);
  const bool has_state = number != chunk.first || call.carried.C0.data != nullptr;
  const View<T> q = tokens_of<T>(call.tensors.q, chunk, qk_head, row, call.dims.dqk);

  // 16-bit types: the rows of S, summed before they are rounded, give q.n. Other types need more digits than that has,
  // and find the denominators made.
  constexpr bool makes_denominators = is_16_bit<T> && Want == Wanted::outputs;
  Real qn[Scores::rows] = {};
  RowTerms<T> terms;
#pragma unroll
  for (Real& factor : terms.factor) factor = scale;

  Real dh_h[Scores::rows] = {};
  // outputs: a CTA has one tile of columns. grad_denominators: it has all in turn, since dh.h sums over them.
  const int last_tile = Want == Wanted::grad_denominators ? dhv_tiles : first_tile + 1;
  for (int tile = first_tile; tile < last_tile; ++tile) {
    const int col = tile * width;
    const auto scores = [&](int key) {
      return RowsByRows<T, T, tile_rows>{q, tokens_of<T>(call.tensors.k, chunk, qk_head, key, call.dims.dqk)};
    };
    const auto values = [&](int key) {
      return TileByColumns<Order::depth_last, Digits::all, T>{
          tokens_of<T>(call.tensors.v, chunk, head, key, call.dims.dhv).from_column(col)};
    };
    Accumulator<T, width> O;
    O.clear();
    if (has_state) {
      const RowsByColumns<T, Stored> inter{q, chunk_state<T>(call, call.stored.C, number, head).from_column(col)};
      stream.start(inter);
      stream.run(O, inter, [&](int buffer) { scores(0).load(stream.space, 0, buffer); });
      if (makes_denominators && call.rules.normalized) dots_with_n<T>(call, q, number, head, qn);
      decay_state<T>(call, at + row, rows, O, qn);
    } else {
      stream.start(scores(0));
    }
    Real part[Scores::rows] = {};
    walk_squares<T>(O, stream, 0, row, scores, values, [&](Scores& S, int key) {
      gate_square<T>(S, call, chunk, at, row, key, terms);
      if (makes_denominators && call.rules.normalized)
        S.each([&](int r, int, int, int, Real& value) { part[r] += value; });
    });
    Real inverse[Scores::rows];
    if constexpr (makes_denominators) {
      make_denominators<T>(call, at + row, rows, tile == 0, qn, part, inverse);
    } else {
#pragma unroll
      for (int r = 0; r < Scores::rows; ++r)
        inverse[r] = call.gates.inverse[at + row + min(Scores::row_of(r), rows - 1)];
    }
    O.each([&](int r, int, int, int, Real& value) { value *= inverse[r]; });
    if constexpr (Want == Wanted::outputs) {
      store_rows(O, call.tensors.h, chunk, head, row, rows, col, call.dims.dhv, stream.space);
    } else {
      const View<T> dh = tokens_of<T>(call.tensors.dh, chunk, head, row, call.dims.dhv);
      O.each([&](int r, int i, int, int c, Real& value) {
        if (i < rows && col + c < dh.cols) dh_h[r] += value * widen<Real>(dh.data[i * dh.stride + col + c]);
      });
    }
  }
  if constexpr (Want == Wanted::grad_denominators) store_deta<T>(call, at + row, rows, dh_h);
}

template <class T, Wanted Want>
void launch(const Call<typename Config<T>::Real>& call, cudaStream_t stream) {
  const int row_tiles = (call.dims.L + tile_rows - 1) / tile_rows;
  const int dhv_tiles = (call.dims.dhv + Config<T>::width - 1) / Config<T>::width;
  const std::int64_t ctas =
      call.dims.chunk_count * call.dims.heads * row_tiles * (Want == Wanted::outputs ? dhv_tiles : 1);
  if (ctas == 0) return;
  launch_blocks("outputs", outputs_kernel<T, Want>, ctas, block_threads, Workspace<T>::bytes, stream, call, row_tiles,
                dhv_tiles);
}

}  // namespace

template <class T>
void launch_outputs(const Call<typename Config<T>::Real>& call, cudaStream_t stream) {
  launch<T, Wanted::outputs>(call, stream);
}

template <class T>
void launch_grad_denominators(const Call<typename Config<T>::Real>& call, cudaStream_t stream) {
  if (call.rules.exact) launch<T, Wanted::grad_denominators>(call, stream);
}

#define TFLA_INSTANTIATE(T)                                                             \
  template void launch_outputs<T>(const Call<typename Config<T>::Real>&, cudaStream_t); \
  template void launch_grad_denominators<T>(const Call<typename Config<T>::Real>&, cudaStream_t)
TFLA_FOR_EACH_TYPE(TFLA_INSTANTIATE);
#undef TFLA_INSTANTIATE

}  // namespace tfla::cuda
