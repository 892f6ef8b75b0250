// solve: the triangular system of every tile of the delta rule, all tiles side by side. A CTA has a tile of one head of
// q and k and goes through the heads of v that share it.
//
//   all warps   K K^T by one set of products, then L of as many heads as there are squares in shared memory
//   a warp      gates of one head, then Z = L - L (beta Z) from the top, in place: a lane has two columns
//
// Sums of Z are float32, as many products as a triangle has: the tensor cores would round what they multiply, and
// rounding errors of Z grow with repeated keys (docs/delta.md).
#include <algorithm>

#include "cuda/arch/barrier.cuh"
#include "cuda/arch/copy.cuh"
#include "cuda/arch/dynamic_shared.h"
#include "cuda/arch/mma.cuh"
#include "cuda/arch/tma.cuh"
#include "cuda/arch/wgmma.cuh"
#include "cuda/delta/tokens.cuh"
#include "cuda/device.h"
#include "cuda/sm90/common/lane.cuh"
#include "cuda/sm90/common/roles.cuh"
#include "cuda/sm90/delta/solved.cuh"

namespace tfla::cuda::sm90::delta_rule {

namespace {

using arch::Major;
using tfla::cuda::delta::Sequence;
using tfla::cuda::delta::Tile;

struct SolveOptions {
  int key_panels;  // of dqk
  int heads;       // at a time
};

template <SolveOptions O>
struct SolveConfig {
  static constexpr int key_panels = O.key_panels, heads = O.heads;
  static constexpr int threads = warpgroup_threads;
};

inline constexpr int pitch = tile_tokens + 8;  // floats of a row of a square; rows begin eight banks apart
inline constexpr int block = 16;               // rows whose sums a lane holds

// Of the tokens of a tile, for one head.
struct HeadGates {
  double b[tile_tokens];  // to the base 2
  float write[tile_tokens];
  float key[tile_tokens];  // 1 / |k|
};

template <class C>
struct alignas(panel_alignment) SolveShared {
  unsigned char keys[C::key_panels * panel_bytes];
  float squares[C::heads][tile_tokens * pitch];
  HeadGates gates[C::heads];
  alignas(8) unsigned char full[8];
};

struct SolveMaps {
  CUtensorMap k;
};

// The gates of a head by one warp, two tokens a lane, and the vectors of its tokens to memory.
__device__ __forceinline__ void make_gates(const DeltaCall& call, const Tile& tile, HeadGates& gates, float* vectors) {
  const int lane = static_cast<int>(threadIdx.x) % warp_threads, first = 2 * lane;
  // What is left of a state after exp(-100) is not seen in any result, and sums stay small enough for float.
  constexpr double least = -100;
  double g[2];
  float beta[2], q_norm[2], k_norm[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const bool valid = first + e < tile.count;
    const std::int64_t token = tile.token + (valid ? first + e : 0);
    const std::int64_t norm =
        (tile.batch * call.dims.tokens + token) * call.dims.qk_heads + tile.head / call.dims.group;
    const bool normed = valid && call.rules.normalize_qk;
    const double decay = valid ? tfla::cuda::delta::log_decay(call, tile.batch, token, tile.head) : 0;
    g[e] = (decay < least ? least : decay) * log2_e;
    beta[e] = valid ? static_cast<float>(write_strength(
                          call.rules.write, tfla::cuda::delta::raw_beta(call, tile.batch, token, tile.head)))
                    : 0.0F;
    q_norm[e] = normed ? call.scratch.q_norm[norm] : 1.0F;
    k_norm[e] = normed ? call.scratch.k_norm[norm] : 1.0F;
  }
  double sum = g[0] + g[1];
#pragma unroll
  for (int by = 1; by < warp_threads; by *= 2) {
    const double below = __shfl_up_sync(0xFFFFFFFFU, sum, by);
    if (lane >= by) sum += below;
  }
  const double all = __shfl_sync(0xFFFFFFFFU, sum, warp_threads - 1), b[2] = {sum - g[1], sum};
  const auto scale = static_cast<float>(call.rules.scale);
  const auto write = [&](Vector vector, const auto& number) {
    reinterpret_cast<float2*>(vectors + static_cast<int>(vector) * tile_tokens)[lane] = {number(0), number(1)};
  };
  const auto left = [](double exponent) { return arch::exp2(static_cast<float>(exponent)); };
  write(Vector::recall, [&](int e) { return left(b[e]) * k_norm[e]; });
  write(Vector::write, [&](int e) { return beta[e]; });
  write(Vector::keep, [&](int e) { return beta[e] * left(all - b[e]) * k_norm[e]; });
  write(Vector::read, [&](int e) { return scale * left(b[e]) * q_norm[e]; });
  write(Vector::sum, [&](int e) { return static_cast<float>(b[e]); });
  write(Vector::query, [&](int e) { return scale * q_norm[e]; });
  write(Vector::key, [&](int e) { return beta[e] * k_norm[e]; });
  write(Vector::decay, [&](int) { return left(all); });
  write(Vector::left, [&](int e) { return left(all - b[e]) * k_norm[e]; });
  write(Vector::norm, [&](int e) { return k_norm[e]; });
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    gates.b[first + e] = b[e];
    gates.write[first + e] = beta[e];
    gates.key[first + e] = k_norm[e];
  }
}

// L of one head from the scores that a warpgroup has.
__device__ __forceinline__ void write_square(const float (&scores)[32], const HeadGates& gates, float* square) {
  const Lane lane;
  const double b[2] = {gates.b[lane.row], gates.b[lane.row + 8]};
  const float key[2] = {gates.key[lane.row], gates.key[lane.row + 8]};
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const int j = 8 * n + lane.pair;
    const double sums[2] = {gates.b[j], gates.b[j + 1]};
    const float keys[2] = {gates.key[j], gates.key[j + 1]};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int t = lane.row + 8 * r;
      float pair[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float gated =
            scores[4 * n + 2 * r + e] * arch::exp2(static_cast<float>(b[r] - sums[e])) * key[r] * keys[e];
        pair[e] = j + e < t ? gated : 0.0F;
      }
      *reinterpret_cast<float2*>(square + t * pitch + j) = {pair[0], pair[1]};
    }
  }
}

// Rows of Z of a lane's first `Columns` columns, lane and lane + 32.
struct Rows {
  float sum[2][block];
};

// Takes what rows of block `from` have in rows of block `to`.
template <int Columns>
__device__ __forceinline__ void take_block(Rows& rows, const float* square, const float* beta, int to, int from) {
  const int lane = static_cast<int>(threadIdx.x) % warp_threads;
#pragma unroll
  for (int first = 0; first < block; first += 4) {
    float x[Columns][4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int row = from * block + first + j;
#pragma unroll
      for (int c = 0; c < Columns; ++c) x[c][j] = beta[row] * square[row * pitch + lane + warp_threads * c];
    }
#pragma unroll
    for (int i = 0; i < block; ++i) {
      const float4 l = *reinterpret_cast<const float4*>(square + (to * block + i) * pitch + from * block + first);
#pragma unroll
      for (int c = 0; c < Columns; ++c) rows.sum[c][i] -= l.x * x[c][0] + l.y * x[c][1] + l.z * x[c][2] + l.w * x[c][3];
    }
  }
}

// Solves a block of rows, whose sums have been taken from by all blocks above.
template <int Columns>
__device__ __forceinline__ void solve_block(Rows& rows, const float* square, const float* beta, int at) {
#pragma unroll
  for (int j = 0; j + 1 < block; ++j) {
    const int row = at * block + j;
    float x[Columns];
#pragma unroll
    for (int c = 0; c < Columns; ++c) x[c] = beta[row] * rows.sum[c][j];
#pragma unroll
    for (int i = j + 1; i < block; ++i) {
      const float l = square[(at * block + i) * pitch + row];
#pragma unroll
      for (int c = 0; c < Columns; ++c) rows.sum[c][i] -= l * x[c];
    }
  }
}

// One block of rows of Z in the place of L. Columns: 1 where columns from 32 on are zero.
template <int Columns>
__device__ __forceinline__ void finish_block(float* square, const float* beta, int at) {
  const int lane = static_cast<int>(threadIdx.x) % warp_threads;
  constexpr int half = tile_tokens / 2 / block;
  Rows rows;
#pragma unroll
  for (int i = 0; i < block; ++i)
#pragma unroll
    for (int c = 0; c < Columns; ++c) rows.sum[c][i] = square[(at * block + i) * pitch + lane + warp_threads * c];
#pragma unroll 1
  for (int from = 0; from < min(at, half); ++from) take_block<1>(rows, square, beta, at, from);
#pragma unroll 1
  for (int from = half; from < at; ++from) take_block<Columns>(rows, square, beta, at, from);
  solve_block<Columns>(rows, square, beta, at);
  __syncwarp();  // all lanes have read L
#pragma unroll
  for (int i = 0; i < block; ++i)
#pragma unroll
    for (int c = 0; c < Columns; ++c) square[(at * block + i) * pitch + lane + warp_threads * c] = rows.sum[c][i];
  __syncwarp();
}

// Z of one head to memory, in two terms.
__device__ __forceinline__ void write_terms(const float* square, unsigned char* solved) {
  const int lane = static_cast<int>(threadIdx.x) % warp_threads;
  constexpr int numbers = 8, in_row = tile_tokens / numbers;
  for (int unit = lane; unit < tile_tokens * in_row; unit += warp_threads) {
    const int row = unit / in_row, column = unit % in_row * numbers;
    const auto* from = reinterpret_cast<const float4*>(square + row * pitch + column);
    const float4 halves[2] = {from[0], from[1]};
    const float2 z[4] = {
        {halves[0].x, halves[0].y}, {halves[0].z, halves[0].w}, {halves[1].x, halves[1].y}, {halves[1].z, halves[1].w}};
    unsigned high[4], low[4];
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      high[x] = arch::round_pair(z[x]);
      const float2 rounded = arch::widen_pair(high[x]);
      low[x] = arch::round_pair({z[x].x - rounded.x, z[x].y - rounded.y});
    }
    unsigned char* to = solved + row * panel_row_bytes + column * 2;
    *reinterpret_cast<uint4*>(to) = {high[0], high[1], high[2], high[3]};
    *reinterpret_cast<uint4*>(to + second_term) = {low[0], low[1], low[2], low[3]};
  }
}

template <class C>
__device__ __forceinline__ void multiply_keys(float (&scores)[32], unsigned keys) {
  arch::products_begin();
#pragma unroll
  for (int step = 0; step < 4 * C::key_panels; ++step) {
    const std::uint64_t k = arch::tile_descriptor(keys + step / 4 * panel_bytes + step % 4 * 32);
    arch::multiply<__nv_bfloat16, Major::depth, Major::depth>(scores, k, k, step > 0);
  }
  arch::products_commit();
  arch::products_wait<0>();
  arch::pin(scores);
}

template <class C>
__global__ void __launch_bounds__(C::threads)
    solve_kernel(const __grid_constant__ SolveMaps maps, const __grid_constant__ DeltaCall call) {
  TFLA_DYNAMIC_SHARED(1024, memory);
  auto& shared = *reinterpret_cast<SolveShared<C>*>(memory);
  const unsigned full = arch::shared_address(shared.full), keys = arch::shared_address(shared.keys);
  begin_kernel([&] { arch::barrier_init(full, 1); });

  const std::int64_t number = blockIdx.x / call.dims.qk_heads;
  const int qk_head = static_cast<int>(blockIdx.x % call.dims.qk_heads);
  const std::int64_t sequence_number = sequence_of_tile(call, number);
  const Sequence sequence = sequence_at(call, sequence_number);
  const std::int64_t index = number - sequence.first_tile;
  if (index < 0 || index >= tiles_of(call, sequence)) return;
  const bool packed = call.cu_seqlens != nullptr;
  if (threadIdx.x == 0) {
    const auto begin = static_cast<int>(index * tile_tokens);
    const int token = begin + (packed ? static_cast<int>(call.dims.tokens - sequence.length) : 0);
    const int batch = packed ? static_cast<int>(sequence.token + sequence.length) : sequence.batch;
    arch::arrive_expecting(full, sizeof(shared.keys));
    for (int p = 0; p < C::key_panels; ++p)
      arch::load_box(keys + p * panel_bytes, &maps.k, full, p * panel, token, qk_head, batch);
  }
  arch::wait(full, 0);
  float scores[32];
  multiply_keys<C>(scores, keys);

  const int warp = static_cast<int>(threadIdx.x) / warp_threads, group = call.dims.group;
#pragma unroll 1
  for (int first = 0; first < group; first += C::heads) {
    const int heads = min(C::heads, group - first), head = qk_head * group + first + warp;
    auto* solved = static_cast<unsigned char*>(call.scratch.solved) + (number * call.dims.heads + head) * solved_bytes;
    if (warp < heads) {
      make_gates(call, tile_of(call, sequence, head, index), shared.gates[warp],
                 reinterpret_cast<float*>(solved + first_row(Vector::recall) * panel_row_bytes));
    }
    __syncthreads();
    for (int h = 0; h < heads; ++h) write_square(scores, shared.gates[h], shared.squares[h]);
    __syncthreads();
    if (warp < heads) {
      float* square = shared.squares[warp];
      const float* beta = shared.gates[warp].write;
#pragma unroll 1
      for (int at = 0; at < 2; ++at) finish_block<1>(square, beta, at);
#pragma unroll 1
      for (int at = 2; at < 4; ++at) finish_block<2>(square, beta, at);
      write_terms(square, solved);
    }
    __syncthreads();
  }
}

template <SolveOptions O>
void launch_solve(const DeltaCall& call, cudaStream_t stream) {
  using C = SolveConfig<O>;
  const auto& dims = call.dims;
  const TokenAxes axes{dims.batch, dims.tokens, call.cu_seqlens != nullptr};
  const SolveMaps maps{token_map(axes, call.tensors.k, dims.qk_heads, dims.dqk, tile_tokens)};
  launch_chained("delta solve", solve_kernel<C>, dims.tiles * dims.qk_heads, C::threads,
                 static_cast<int>(sizeof(SolveShared<C>)), stream, maps, call);
}

template <int KeyPanels>
void launch_solve_for(const DeltaCall& call, cudaStream_t stream) {
  if (call.dims.group == 1) return launch_solve<SolveOptions{KeyPanels, 1}>(call, stream);
  if (call.dims.group == 2) return launch_solve<SolveOptions{KeyPanels, 2}>(call, stream);
  launch_solve<SolveOptions{KeyPanels, 4}>(call, stream);
}

}  // namespace

}  // namespace tfla::cuda::sm90::delta_rule

namespace tfla::cuda::sm90 {

void launch_delta_solve(const delta::Call<float>& call, cudaStream_t stream) {
  if (call.dims.dqk <= panel) return delta_rule::launch_solve_for<1>(call, stream);
  delta_rule::launch_solve_for<2>(call, stream);
}

}  // namespace tfla::cuda::sm90
