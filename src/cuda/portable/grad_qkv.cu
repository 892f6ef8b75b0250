// Stage `grad_qkv`: dQ by rows, dK and dV by columns. A CTA has 64 tokens of a chunk and walks over the tiles of the
// chunk on their side of the diagonal. It sums over the heads that share a query/key head, in head order: no atomics.
// The sums for grad_gates come from the float32 accumulators; float32 and float64 tensors take them from the squares.
#include "cuda/arch/dynamic_shared.h"
#include "cuda/launch.h"
#include "cuda/portable/square_sums.cuh"

namespace tfla::cuda {

namespace {

template <class T>
using RealOf = typename Config<T>::Real;

// Where a CTA works: 64 tokens of a chunk, some columns of the result, a head of the result.
struct Place {
  Chunk chunk;
  std::int64_t number;
  int first;  // first token, in the chunk
  int count;  // tokens
  int tile;   // tile of columns
  int head;

  template <class Real>
  __device__ Place(const Call<Real>& call, int row_tiles, int column_tiles, int heads) {
    unsigned unit = blockIdx.x;  // a division in 64 bits takes a hundred instructions
    tile = static_cast<int>(unit % column_tiles);
    unit /= column_tiles;
    first = static_cast<int>(unit % row_tiles) * tile_rows;
    unit /= row_tiles;
    head = static_cast<int>(unit % heads);
    number = unit / heads;
    chunk = call.packing.chunks[number];
    count = min(tile_rows, chunk.length - first);
  }
};

// The products of one square, and the gates in between.
template <class T>
struct Squares {
  using Real = RealOf<T>;
  using Square = Accumulator<T, tile_rows>;
  const Call<Real>& call;
  const Chunk& chunk;
  int head;

  __device__ View<T> q(int first) const {
    return tokens_of<T>(call.tensors.q, chunk, head / call.dims.group, first, call.dims.dqk);
  }
  __device__ View<T> k(int first) const {
    return tokens_of<T>(call.tensors.k, chunk, head / call.dims.group, first, call.dims.dqk);
  }
  __device__ View<T> v(int first) const { return tokens_of<T>(call.tensors.v, chunk, head, first, call.dims.dhv); }
  __device__ View<T> dh(int first) const { return tokens_of<T>(call.tensors.dh, chunk, head, first, call.dims.dhv); }

  // Q K^T, and dH V^T.
  __device__ RowsByRows<T, T, tile_rows> scores(int row, int col) const { return {q(row), k(col)}; }
  __device__ RowsByRows<T, T, tile_rows> dscores(int row, int col) const { return {dh(row), v(col)}; }
  // Q K^T over a tile of columns: sums of S . dS come in such parts too.
  __device__ RowsByRows<T, T, tile_rows> partial_scores(int row, int col, int first) const {
    return {q(row).columns(first, Config<T>::width), k(col).columns(first, Config<T>::width)};
  }

  // dS = scale D . (dS / den + deta), or S = scale D . S / den.
  __device__ __forceinline__ void gate(Square& S, int row, int col, bool of_gradients) const {
    const std::int64_t at = call.dims.vector(chunk, head);
    const auto scale = static_cast<Real>(call.rules.scale);
    RowTerms<T> terms;
#pragma unroll
    for (int r = 0; r < Square::rows; ++r) {
      const int t = min(row + Square::row_of(r), chunk.length - 1);
      terms.factor[r] = scale * call.gates.inverse[at + t];
      if (of_gradients && call.rules.exact) terms.addend[r] = scale * call.gates.deta[at + t];
    }
    gate_square<T>(S, call, chunk, at, row, col, terms);
  }
};

// Calls take(r, row, sum) with the dot products of the rows of acc and of a tensor, over this CTA's columns.
template <class T, int N, class Take>
__device__ __forceinline__ void row_dots(Accumulator<T, N>& acc, const View<T>& x, const Take& take) {
  using Real = RealOf<T>;
  using Sums = Accumulator<T, N>;
#pragma unroll
  for (int r = 0; r < Sums::rows; ++r) {
    const int i = Sums::row_of(r);
    const T* line = x.data + min(i, x.rows - 1) * x.stride;
    Real part = 0;
    if (is_16_bit<T> && x.wide && x.cols >= N) {  // neighbours lie in one thread: two numbers a load
#pragma unroll
      for (int c = 0; c < Sums::cols; c += 2) {
        const uint32_t raw = *reinterpret_cast<const uint32_t*>(line + Sums::col_of(c));
        const T* pair = reinterpret_cast<const T*>(&raw);
        part += acc.at(r, c) * widen<Real>(pair[0]) + acc.at(r, c + 1) * widen<Real>(pair[1]);
      }
    } else {
#pragma unroll
      for (int c = 0; c < Sums::cols; ++c)
        if (Sums::col_of(c) < x.cols) part += acc.at(r, c) * widen<Real>(line[Sums::col_of(c)]);
    }
    take(r, i, Sums::over_row(part));
  }
}
template <class T, int N>
__device__ __forceinline__ void store_row_dots(Accumulator<T, N>& acc, const View<T>& x, RealOf<T>* sums) {
  row_dots(acc, x, [&](int, int i, RealOf<T> sum) {
    if (i < x.rows && threadIdx.x % Accumulator<T, N>::lanes == 0) sums[i] = sum;
  });
}

// Adds a head's part to the sum over the heads that share a query/key head.
template <class Sums>
__device__ __forceinline__ void add_to(Sums& total, const Sums& part) {
#pragma unroll
  for (int e = 0; e < Sums::rows * Sums::cols; ++e) total.x[e] += part.x[e];
}

// Shared: several heads read one query/key head, and the CTA has the registers of a second sum.
template <class T, bool Shared>
__global__ void __launch_bounds__(block_threads, Shared ? 1 : Config<T>::blocks)
    dq_kernel(Call<RealOf<T>> call, int row_tiles, int dqk_tiles) {
  using Real = RealOf<T>;
  using Sums = Accumulator<T, Config<T>::width>;
  TFLA_DYNAMIC_SHARED(16, memory);
  Stream<T> stream{Workspace<T>(memory)};
  const Place place(call, row_tiles, dqk_tiles, call.dims.qk_heads);
  if (place.count <= 0) return;
  const Chunk& chunk = place.chunk;
  const int row = place.first, col = place.tile * Config<T>::width;
  const auto scale = static_cast<Real>(call.rules.scale);
  const bool has_state = place.number != chunk.first || call.carried.C0.data != nullptr;

  Sums dQ, total;
  if (Shared) total.clear();
  const int group = Shared ? call.dims.group : 1;
  for (int head = place.head * group; head < (place.head + 1) * group; ++head) {
    const std::int64_t at = call.dims.vector(chunk, head) + row;
    const Squares<T> squares{call, chunk, head};
    const auto scores = [&](int key) { return squares.dscores(row, key); };
    dQ.clear();
    if (has_state) {
      const RowsByRows<T, typename Config<T>::Stored, Config<T>::width> inter{
          squares.dh(row), chunk_state<T>(call, call.stored.C, place.number, head).from_row(col)};
      stream.start(inter);
      stream.run(dQ, inter, [&](int buffer) { scores(0).load(stream.space, 0, buffer); });
      const auto* n = static_cast<const typename Config<T>::Norm*>(call.stored.n) +
                      (place.number * call.dims.heads + head) * call.dims.dqk;
      Real factor[Sums::rows], addend[Sums::rows];
#pragma unroll
      for (int r = 0; r < Sums::rows; ++r) {
        const std::int64_t t = at + min(Sums::row_of(r), place.count - 1);
        const Real weight = scale * call.gates.qbar[t];
        factor[r] = weight * call.gates.inverse[t];
        addend[r] = call.rules.exact ? weight * call.gates.deta[t] : Real{0};
      }
      dQ.each([&](int r, int, int, int c, Real& value) {
        value *= factor[r];
        if (call.rules.exact && col + c < call.dims.dqk) value += addend[r] * static_cast<Real>(n[col + c]);
      });
    } else {
      stream.start(scores(0));
    }
    const auto keys = [&](int key) {
      return TileByColumns<Order::depth_last, Digits::all, T>{squares.k(key).from_column(col)};
    };
    const auto gate = [&](auto& S, int key) { squares.gate(S, row, key, true); };
    const auto q = [&] { return squares.q(row).from_column(col); };
    const auto row_sums = [&] { return call.sums.rows + place.tile * call.dims.heads * call.dims.all_tokens() + at; };
    if constexpr (Config<T>::sum_terms == 2) {
      RowSums<T> sums;
      if (has_state) row_dots(dQ, q(), [&](int r, int, Real sum) { sums.add_to_row(r, sum); });
      walk_squares<T>(dQ, stream, 0, row, scores, keys, gate,
                      Beside{[&](int key) { return squares.partial_scores(row, key, col); },
                             [&](auto& S) { sums.add(S, stream.space); }});
      sums.store(place.count, row_sums(), dqk_tiles * call.dims.heads * call.dims.all_tokens());
    } else {
      walk_squares<T>(dQ, stream, 0, row, scores, keys, gate);
      store_row_dots(dQ, q(), row_sums());
    }
    if (Shared) add_to(total, dQ);
  }
  store_rows(Shared ? total : dQ, call.tensors.dq, chunk, place.head, row, place.count, col, call.dims.dqk,
             stream.space);
}

template <class T, bool Shared>
__global__ void __launch_bounds__(block_threads, Shared ? 1 : Config<T>::blocks)
    dk_kernel(Call<RealOf<T>> call, int row_tiles, int dqk_tiles) {
  using Real = RealOf<T>;
  using Sums = Accumulator<T, Config<T>::width>;
  TFLA_DYNAMIC_SHARED(16, memory);
  Stream<T> stream{Workspace<T>(memory)};
  const Place place(call, row_tiles, dqk_tiles, call.dims.qk_heads);
  if (place.count <= 0) return;
  const Chunk& chunk = place.chunk;
  const int key = place.first, col = place.tile * Config<T>::width;
  const View<T> k = tokens_of<T>(call.tensors.k, chunk, place.head, key, call.dims.dqk).from_column(col);

  Sums dK, total;
  if (Shared) total.clear();
  const int group = Shared ? call.dims.group : 1;
  for (int head = place.head * group; head < (place.head + 1) * group; ++head) {
    const std::int64_t at = call.dims.vector(chunk, head) + key;
    const std::int64_t part = place.tile * call.dims.heads * call.dims.all_tokens() + at;
    const Real* dn = call.stored.dn + (place.number * call.dims.heads + head) * call.dims.dqk;
    const Squares<T> squares{call, chunk, head};
    const auto scores = [&](int row) { return squares.dscores(row, key); };
    dK.clear();
    const RowsByRows<T, typename Config<T>::Stored, Config<T>::width> inter{
        squares.v(key), chunk_state<T>(call, call.stored.dC, place.number, head).from_row(col)};
    stream.start(inter);
    stream.run(dK, inter, [&](int buffer) { scores(key).load(stream.space, 0, buffer); });
    Real weight[Sums::rows];
#pragma unroll
    for (int r = 0; r < Sums::rows; ++r) weight[r] = call.gates.abar[at + min(Sums::row_of(r), place.count - 1)];
    dK.each([&](int r, int, int, int c, Real& value) {
      if (col + c < call.dims.dqk) value += dn[col + c];
      value *= weight[r];
    });
    store_row_dots(dK, k, call.sums.outflow + part);
    const auto queries = [&](int row) {
      return TileByColumns<Order::depth_first, Digits::all, T>{squares.q(row).from_column(col)};
    };
    const auto gate = [&](auto& S, int row) { squares.gate(S, row, key, true); };
    if constexpr (Config<T>::sum_terms == 2) {
      ColumnSums<T> sums;
      walk_squares<T>(dK, stream, key, chunk.length - 1, scores, queries, gate,
                      Beside{[&](int row) { return squares.partial_scores(row, key, col); },
                             [&](auto& S) { sums.add(S, stream.space); }});
      sums.store(place.count, call.sums.outflow + part, call.sums.columns + part,
                 dqk_tiles * call.dims.heads * call.dims.all_tokens(), stream.space);
    } else {
      walk_squares<T>(dK, stream, key, chunk.length - 1, scores, queries, gate);
      store_row_dots(dK, k, call.sums.columns + part);
    }
    if (Shared) add_to(total, dK);
  }
  store_rows(Shared ? total : dK, call.tensors.dk, chunk, place.head, key, place.count, col, call.dims.dqk,
             stream.space);
}

template <class T>
__global__ void __launch_bounds__(block_threads, Config<T>::blocks)
    dv_kernel(Call<RealOf<T>> call, int row_tiles, int dhv_tiles) {
  using Real = RealOf<T>;
  using Sums = Accumulator<T, Config<T>::width>;
  TFLA_DYNAMIC_SHARED(16, memory);
  Stream<T> stream{Workspace<T>(memory)};
  const Place place(call, row_tiles, dhv_tiles, call.dims.heads);
  if (place.count <= 0) return;
  const Chunk& chunk = place.chunk;
  const int key = place.first, col = place.tile * Config<T>::width, head = place.head;
  const std::int64_t at = call.dims.vector(chunk, head) + key;
  const Squares<T> squares{call, chunk, head};
  const auto scores = [&](int row) { return squares.scores(row, key); };
  Sums dV;
  dV.clear();
  const RowsByColumns<T, typename Config<T>::Stored> inter{
      squares.k(key), chunk_state<T>(call, call.stored.dC, place.number, head).from_column(col)};
  stream.start(inter);
  stream.run(dV, inter, [&](int buffer) { scores(key).load(stream.space, 0, buffer); });
  Real weight[Sums::rows];
#pragma unroll
  for (int r = 0; r < Sums::rows; ++r) weight[r] = call.gates.abar[at + min(Sums::row_of(r), place.count - 1)];
  dV.each([&](int r, int, int, int, Real& value) { value *= weight[r]; });
  walk_squares<T>(
      dV, stream, key, chunk.length - 1, scores,
      [&](int row) { return TileByColumns<Order::depth_first, Digits::rounded, T>{squares.dh(row).from_column(col)}; },
      [&](auto& S, int row) { squares.gate(S, row, key, false); });
  store_rows(dV, call.tensors.dv, chunk, head, key, place.count, col, call.dims.dhv, stream.space);
}

}  // namespace

template <class T>
void launch_grad_qkv(const Call<RealOf<T>>& call, cudaStream_t stream) {
  if (call.dims.chunk_count == 0) return;
  const int row_tiles = (call.dims.L + tile_rows - 1) / tile_rows;
  const int dqk_tiles = (call.dims.dqk + Config<T>::width - 1) / Config<T>::width;
  const int dhv_tiles = (call.dims.dhv + Config<T>::width - 1) / Config<T>::width;
  const std::int64_t tiles = call.dims.chunk_count * row_tiles;
  constexpr int bytes = Workspace<T>::bytes;
  const bool shared = call.dims.group > 1;
  launch_blocks("dq", shared ? dq_kernel<T, true> : dq_kernel<T, false>, tiles * call.dims.qk_heads * dqk_tiles,
                block_threads, bytes, stream, call, row_tiles, dqk_tiles);
  launch_blocks("dk", shared ? dk_kernel<T, true> : dk_kernel<T, false>, tiles * call.dims.qk_heads * dqk_tiles,
                block_threads, bytes, stream, call, row_tiles, dqk_tiles);
  launch_blocks("dv", dv_kernel<T>, tiles * call.dims.heads * dhv_tiles, block_threads, bytes, stream, call, row_tiles,
                dhv_tiles);
}

#define TFLA_INSTANTIATE(T) template void launch_grad_qkv<T>(const Call<typename Config<T>::Real>&, cudaStream_t)
TFLA_FOR_EACH_TYPE(TFLA_INSTANTIATE);
#undef TFLA_INSTANTIATE

}  // namespace tfla::cuda
