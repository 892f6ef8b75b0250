// Stage `gradients`: dQ by rows, dK and dV by columns, 64 tokens of a chunk per block, walking over the tiles of the
// chunk on their side of the diagonal; then the gate gradients. Heads that share a query/key head are summed in the
// block, in head order: no atomics. Sums for the gate gradients come from the float32 accumulators.
#include "cuda/launch.h"
#include "cuda/portable/products.cuh"

namespace tfla::cuda {

namespace {

template <class T>
using RealOf = typename Config<T>::Real;

// Where a block works: 64 tokens of a chunk, some columns of the result, a head of the result.
struct Place {
  Chunk chunk;
  std::int64_t number;
  int first;  // first token, in the chunk
  int count;  // tokens
  int tile;   // tile of columns
  int head;

  template <class Real>
  __device__ Place(const Call<Real>& call, int row_tiles, int column_tiles, int heads) {
    std::int64_t unit = blockIdx.x;
    tile = static_cast<int>(unit % column_tiles);
    unit /= column_tiles;
    first = static_cast<int>(unit % row_tiles) * tile_rows;
    unit /= row_tiles;
    head = static_cast<int>(unit % heads);
    number = unit / heads;
    chunk = call.chunks[number];
    count = min(tile_rows, chunk.length - first);
  }
};

// P = gated gradient of the scores of one square: D (inverse dH V^T + deta), zero above the diagonal and outside.
template <class T>
__device__ __forceinline__ void score_gradients(const Call<RealOf<T>>& call, const Chunk& chunk, int head, int row,
                                                int col, const Workspace<T>& space) {
  using Real = RealOf<T>;
  const std::int64_t at = call.vector(chunk, head);
  const auto scale = static_cast<Real>(call.scale);
  Accumulator<T, tile_rows> dS;
  dS.clear();
  rows_by_rows(dS, tokens_of<T>(call.dh, chunk, head, row, call.dhv), tokens_of<T>(call.v, chunk, head, col, call.dhv),
               space);
  dS.each([&](int, int i, int, int j, Real& value) {
    const bool seen = row + i < chunk.length && col + j <= row + i;
    Real gradient = 0;
    if (seen) {
      gradient = value * call.inverse[at + row + i];
      if (call.exact) gradient += call.deta[at + row + i];
      gradient *= scale * exp2_sum(call.u2[at + row + i], call.c2[at + col + j]);
    }
    value = gradient;
  });
  write_tile(dS, space.p, Workspace<T>::p_stride);
}

// P = gated scores of one square, over the denominator of the row.
template <class T>
__device__ __forceinline__ void normalized_scores(const Call<RealOf<T>>& call, const Chunk& chunk, int head, int row,
                                                  int col, const Workspace<T>& space) {
  using Real = RealOf<T>;
  const std::int64_t at = call.vector(chunk, head);
  const auto scale = static_cast<Real>(call.scale);
  const int qk_head = head / call.group;
  Accumulator<T, tile_rows> S;
  S.clear();
  rows_by_rows(S, tokens_of<T>(call.q, chunk, qk_head, row, call.dqk),
               tokens_of<T>(call.k, chunk, qk_head, col, call.dqk), space);
  S.each([&](int, int i, int, int j, Real& value) {
    const bool seen = row + i < chunk.length && col + j <= row + i;
    const Real weight =
        seen ? call.inverse[at + row + i] * (scale * exp2_sum(call.u2[at + row + i], call.c2[at + col + j])) : Real{0};
    value = seen ? value * weight : Real{0};
  });
  write_tile(S, space.p, Workspace<T>::p_stride);
}

// Dot products of the rows of acc with those of a tensor, over this block's columns, into sums[at ...].
template <class T, int N>
__device__ __forceinline__ void row_dots(Accumulator<T, N>& acc, const View<T>& x, RealOf<T>* sums) {
  using Real = RealOf<T>;
  Real parts[Accumulator<T, N>::rows] = {};
  acc.each([&](int r, int i, int, int c, Real& value) {
    if (i < x.rows && c < x.cols) parts[r] += value * widen<Real>(x.data[i * x.stride + c]);
  });
#pragma unroll
  for (int r = 0; r < Accumulator<T, N>::rows; ++r) {
    const Real sum = Accumulator<T, N>::over_row(parts[r]);
    const int i = Accumulator<T, N>::row_of(r);
    if (i < x.rows && threadIdx.x % Accumulator<T, N>::lanes == 0) sums[i] = sum;
  }
}

template <class T>
__device__ View<typename Config<T>::Stored> stored_state(const Call<RealOf<T>>& call, const void* states,
                                                         std::int64_t number, int head) {
  using Stored = typename Config<T>::Stored;
  return {static_cast<const Stored*>(states) + call.state(number, head), call.padded_dhv(), call.dqk, call.dhv, true};
}

// Adds a head's part to the sum over the heads that share a query/key head.
template <class Sums>
__device__ __forceinline__ void add_to(Sums& total, const Sums& part) {
#pragma unroll
  for (int e = 0; e < Sums::rows * Sums::cols; ++e) total.x[e] += part.x[e];
}

// Shared: several heads read one query/key head. Without that, the registers of a second sum are saved.
template <class T, bool Shared>
__global__ void __launch_bounds__(block_threads) dq_kernel(Call<RealOf<T>> call, int row_tiles, int dqk_tiles) {
  using Real = RealOf<T>;
  constexpr int width = Config<T>::width;
  extern __shared__ __align__(16) unsigned char memory[];
  const Workspace<T> space(memory);
  const Place place(call, row_tiles, dqk_tiles, call.qk_heads);
  if (place.count <= 0) return;
  const Chunk& chunk = place.chunk;
  const int col = place.tile * width;
  const auto scale = static_cast<Real>(call.scale);
  const bool has_state = place.number != chunk.first || call.C0.data != nullptr;

  Accumulator<T, width> dQ, total;
  if (Shared) total.clear();
  const int group = Shared ? call.group : 1;
  for (int head = place.head * group; head < (place.head + 1) * group; ++head) {
    const std::int64_t at = call.vector(chunk, head) + place.first;
    dQ.clear();
    if (has_state) {
      const auto* n =
          static_cast<const typename Config<T>::Norm*>(call.n_states) + (place.number * call.heads + head) * call.dqk;
      rows_by_rows(dQ, tokens_of<T>(call.dh, chunk, head, place.first, call.dhv),
                   stored_state<T>(call, call.states, place.number, head).from_row(col), space);
      dQ.each([&](int, int i, int, int c, Real& value) {
        if (i >= place.count) return;
        value *= call.inverse[at + i];
        if (call.exact && col + c < call.dqk) value += call.deta[at + i] * static_cast<Real>(n[col + c]);
        value *= scale * call.qbar[at + i];
      });
    }
    for (int key = 0; key <= place.first; key += tile_rows) {
      score_gradients<T>(call, chunk, head, place.first, key, space);
      tile_by_columns<Order::depth_last>(dQ, tokens_of<T>(call.k, chunk, place.head, key, call.dqk).from_column(col),
                                         space);
    }
    row_dots(dQ, tokens_of<T>(call.q, chunk, place.head, place.first, call.dqk).from_column(col),
             call.row_sums + place.tile * call.heads * call.all_tokens() + at);
    if (Shared) add_to(total, dQ);
  }
  store_rows(Shared ? total : dQ, call.dq, chunk, place.head, place.first, place.count, col, call.dqk, space);
}

template <class T, bool Shared>
__global__ void __launch_bounds__(block_threads) dk_kernel(Call<RealOf<T>> call, int row_tiles, int dqk_tiles) {
  using Real = RealOf<T>;
  constexpr int width = Config<T>::width;
  extern __shared__ __align__(16) unsigned char memory[];
  const Workspace<T> space(memory);
  const Place place(call, row_tiles, dqk_tiles, call.qk_heads);
  if (place.count <= 0) return;
  const Chunk& chunk = place.chunk;
  const int col = place.tile * width;
  const View<T> k = tokens_of<T>(call.k, chunk, place.head, place.first, call.dqk).from_column(col);

  Accumulator<T, width> dK, total;
  if (Shared) total.clear();
  const int group = Shared ? call.group : 1;
  for (int head = place.head * group; head < (place.head + 1) * group; ++head) {
    const std::int64_t at = call.vector(chunk, head) + place.first;
    const std::int64_t part = place.tile * call.heads * call.all_tokens() + at;
    const Real* dn = call.dn_states + (place.number * call.heads + head) * call.dqk;
    dK.clear();
    rows_by_rows(dK, tokens_of<T>(call.v, chunk, head, place.first, call.dhv),
                 stored_state<T>(call, call.dstates, place.number, head).from_row(col), space);
    dK.each([&](int, int i, int, int c, Real& value) {
      if (i >= place.count) return;
      if (col + c < call.dqk) value += dn[col + c];
      value *= call.abar[at + i];
    });
    row_dots(dK, k, call.outflow + part);
    for (int row = place.first; row < chunk.length; row += tile_rows) {
      score_gradients<T>(call, chunk, head, row, place.first, space);
      tile_by_columns<Order::depth_first>(dK, tokens_of<T>(call.q, chunk, place.head, row, call.dqk).from_column(col),
                                          space);
    }
    row_dots(dK, k, call.column_sums + part);
    if (Shared) add_to(total, dK);
  }
  store_rows(Shared ? total : dK, call.dk, chunk, place.head, place.first, place.count, col, call.dqk, space);
}

template <class T>
__global__ void __launch_bounds__(block_threads) dv_kernel(Call<RealOf<T>> call, int row_tiles, int dhv_tiles) {
  using Real = RealOf<T>;
  constexpr int width = Config<T>::width;
  extern __shared__ __align__(16) unsigned char memory[];
  const Workspace<T> space(memory);
  const Place place(call, row_tiles, dhv_tiles, call.heads);
  if (place.count <= 0) return;
  const Chunk& chunk = place.chunk;
  const int col = place.tile * width;
  const int head = place.head;
  const std::int64_t at = call.vector(chunk, head) + place.first;
  Accumulator<T, width> dV;
  dV.clear();
  rows_by_columns(dV, tokens_of<T>(call.k, chunk, head / call.group, place.first, call.dqk),
                  stored_state<T>(call, call.dstates, place.number, head).from_column(col), space);
  dV.each([&](int, int i, int, int, Real& value) {
    if (i < place.count) value *= call.abar[at + i];
  });
  for (int row = place.first; row < chunk.length; row += tile_rows) {
    normalized_scores<T>(call, chunk, head, row, place.first, space);
    tile_by_columns<Order::depth_first>(dV, tokens_of<T>(call.dh, chunk, head, row, call.dhv).from_column(col), space);
  }
  store_rows(dV, call.dv, chunk, head, place.first, place.count, col, call.dhv, space);
}

// What passes through a chunk from its first state to its last: gbar (<C, dC> + <n, dn>).
template <class T>
__global__ void __launch_bounds__(block_threads) through_kernel(Call<RealOf<T>> call) {
  using Real = RealOf<T>;
  using Stored = typename Config<T>::Stored;
  const std::int64_t unit = blockIdx.x;
  const std::int64_t number = unit / call.heads;
  const int head = static_cast<int>(unit % call.heads);
  const Chunk chunk = call.chunks[number];
  if (chunk.length == 0) return;
  const Stored* C = static_cast<const Stored*>(call.states) + call.state(number, head);
  const Stored* dC = static_cast<const Stored*>(call.dstates) + call.state(number, head);
  double sum = 0;
  const std::int64_t size = static_cast<std::int64_t>(call.dqk) * call.padded_dhv();
  constexpr int piece = 16 / sizeof(Stored);
  for (std::int64_t e = threadIdx.x * piece; e < size; e += block_threads * piece) {
    const uint4 left = *reinterpret_cast<const uint4*>(C + e), right = *reinterpret_cast<const uint4*>(dC + e);
    Real part = 0;
#pragma unroll
    for (int x = 0; x < piece; ++x) {
      part += widen<Real>(reinterpret_cast<const Stored*>(&left)[x]) *
              widen<Real>(reinterpret_cast<const Stored*>(&right)[x]);
    }
    sum += part;
  }
  for (int r = threadIdx.x; r < call.dqk; r += block_threads) {
    sum += static_cast<double>(static_cast<const typename Config<T>::Norm*>(call.n_states)[unit * call.dqk + r]) *
           static_cast<double>(call.dn_states[unit * call.dqk + r]);
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xFFFFFFFFU, sum, offset);
  __shared__ double parts[block_threads / 32];
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    double total = 0;
    for (double part : parts) total += part;
    call.through[unit] = static_cast<double>(call.gbar[unit]) * total;
  }
}

__device__ double sigmoid(double x) { return x >= 0 ? 1 / (1 + exp(-x)) : exp(x) / (1 + exp(x)); }

// Derivative of log sigmoid(cap(x)), or of cap(x) alone, by the raw gate x.
template <class Real>
__device__ double gate_slope(const Call<Real>& call, bool log_sigmoid, double x) {
  const double t = call.capped ? tanh(x / call.cap) : 0.0;
  return (1 - t * t) * (log_sigmoid ? sigmoid(-(call.capped ? call.cap * t : x)) : 1.0);
}

// dlogf_t = sum_{s >= t} (row_s - column_s) + sum_{j < t} outflow_j + through; dlogi = column + outflow. One warp per
// chunk and head, from the last token to the first.
template <class Real>
__global__ void gate_gradients_kernel(Call<Real> call, int parts) {
  const std::int64_t unit = (blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x) / 32;
  if (unit >= call.numbers * call.heads) return;
  const Chunk chunk = call.chunks[unit / call.heads];
  if (chunk.length == 0) return;
  const int head = static_cast<int>(unit % call.heads);
  const int lane = threadIdx.x % 32;
  const std::int64_t at = call.vector(chunk, head);
  const std::int64_t part_size = call.heads * call.all_tokens();
  const auto gather = [&](const Real* sums, int t) {
    double sum = 0;
    for (int part = 0; part < parts; ++part) sum += static_cast<double>(sums[part * part_size + at + t]);
    return sum;
  };
  double all_outflow = 0;
  for (int t = lane; t < chunk.length; t += 32) all_outflow += gather(call.outflow, t);
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) all_outflow += __shfl_xor_sync(0xFFFFFFFFU, all_outflow, offset);

  // Walking backwards, `later` holds sum_{s > t} (row - column - outflow), so that through + all_outflow + later + ...
  // is dlogf.
  double later = 0;
  for (int base = (chunk.length - 1) / 32 * 32; base >= 0; base -= 32) {
    const int t = base + lane;
    const bool valid = t < chunk.length;
    const double row = valid ? gather(call.row_sums, t) : 0, column = valid ? gather(call.column_sums, t) : 0;
    double suffix = row - column;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const double other = __shfl_down_sync(0xFFFFFFFFU, suffix, offset);
      if (lane + offset < 32) suffix += other;
    }
    if (valid) {
      const double dlogf = later + suffix + all_outflow + call.through[unit];
      const double i = read_gate(call.i, call.i_type, chunk.batch, chunk.token + t, head);
      const double f = read_gate(call.f, call.f_type, chunk.batch, chunk.token + t, head);
      write_gate(call.di, call.i_type, chunk.batch, chunk.token + t, head,
                 column * gate_slope(call, !call.log_space && !call.exponential, i));
      write_gate(call.df, call.f_type, chunk.batch, chunk.token + t, head,
                 dlogf * gate_slope(call, !call.log_space, f));
    }
    later += __shfl_sync(0xFFFFFFFFU, suffix, 0);
  }
}

}  // namespace

template <class T>
void launch_gradients(const Call<RealOf<T>>& call, cudaStream_t stream) {
  if (call.numbers == 0) return;
  const int row_tiles = (call.L + tile_rows - 1) / tile_rows;
  const int dqk_tiles = (call.dqk + Config<T>::width - 1) / Config<T>::width;
  const int dhv_tiles = (call.dhv + Config<T>::width - 1) / Config<T>::width;
  const std::int64_t tiles = call.numbers * row_tiles;
  constexpr int bytes = Workspace<T>::bytes;
  const bool shared = call.group > 1;
  launch_blocks("dq", shared ? dq_kernel<T, true> : dq_kernel<T, false>, tiles * call.qk_heads * dqk_tiles,
                block_threads, bytes, stream, call, row_tiles, dqk_tiles);
  launch_blocks("dk", shared ? dk_kernel<T, true> : dk_kernel<T, false>, tiles * call.qk_heads * dqk_tiles,
                block_threads, bytes, stream, call, row_tiles, dqk_tiles);
  launch_blocks("dv", dv_kernel<T>, tiles * call.heads * dhv_tiles, block_threads, bytes, stream, call, row_tiles,
                dhv_tiles);
  launch_blocks("through", through_kernel<T>, call.numbers * call.heads, block_threads, 0, stream, call);
  const std::int64_t warps = call.numbers * call.heads;
  launch_blocks("gate_gradients", gate_gradients_kernel<RealOf<T>>, (warps * 32 + block_threads - 1) / block_threads,
                block_threads, 0, stream, call, dqk_tiles);
}

#define TFLA_INSTANTIATE(T) template void launch_gradients<T>(const Call<typename Config<T>::Real>&, cudaStream_t)
TFLA_INSTANTIATE(__nv_bfloat16);
TFLA_INSTANTIATE(__half);
TFLA_INSTANTIATE(float);
TFLA_INSTANTIATE(double);
#undef TFLA_INSTANTIATE

}  // namespace tfla::cuda
