// Stage `grad_gates`: di and df from q.dq and k.dk of every token.
#include "cuda/common/runs.cuh"
#include "cuda/gates/cta.cuh"
#include "cuda/launch.h"
#include "plan/hopper_sizes.h"

namespace tfla::cuda {

namespace {

using namespace gates;

template <class T>
using RealOf = typename Config<T>::Real;

// Vectors of one chunk and head, which come in parts that add up.
template <class Real>
struct Sums {
  std::int64_t at, part_size;
  int parts, length;

  // The sums of a lane's tokens; zero beyond the chunk.
  template <int Terms>
  __device__ __forceinline__ void gather(const Real* sums, int t, double (&to)[lane_tokens]) const {
    const bool whole = t + lane_tokens <= length && at % lane_tokens == 0 && part_size % lane_tokens == 0;
#pragma unroll
    for (double& x : to) x = 0;
    for (int part = 0; part < Terms * parts; ++part) {
      const Real* from = sums + part * part_size + at + t;
      Real x[lane_tokens];
      if (whole) {
        constexpr int pieces = static_cast<int>(sizeof(x) / sizeof(float4));
        float4 piece[pieces];
#pragma unroll
        for (int p = 0; p < pieces; ++p) piece[p] = reinterpret_cast<const float4*>(from)[p];
        memcpy(x, piece, sizeof(x));
      } else {
#pragma unroll
        for (int e = 0; e < lane_tokens; ++e) x[e] = t + e < length ? from[e] : Real{0};
      }
#pragma unroll
      for (int e = 0; e < lane_tokens; ++e) to[e] += static_cast<double>(x[e]);
    }
  }
  template <int Terms>
  __device__ __forceinline__ double total(const Real* sums, int t) const {
    double x[lane_tokens];
    gather<Terms>(sums, t, x);
    return (x[0] + x[1]) + (x[2] + x[3]);
  }
};

// Writes the gradient of the raw gate of a thread's tokens. `from` holds that of its logarithm.
template <class Real>
__device__ __forceinline__ void write_gradient(const Call<Real>& call, const Chunk& chunk, int start, int first_head,
                                               const Strided& gate, const Strided& gradient, GateType type, GateLog log,
                                               const Slab<Real>& from) {
  const ByTokens mine;
  if (first_head + mine.head >= call.dims.heads) return;
  const auto cap = static_cast<Real>(call.rules.cap);
  const auto token = [&](int x) { return start + mine.place + x * ByTokens::step; };
  const auto at = [&](const Strided& tensor, int x) {
    return gate_at(tensor, chunk.batch, chunk.token + token(x), first_head + mine.head);
  };
  with_gate(gate, type, [&](auto* data) {
    using Gate = std::remove_reference_t<decltype(*data)>;
    Gate raw[ByTokens::rounds];  // all loads are in flight before the first is waited for
#pragma unroll
    for (int x = 0; x < ByTokens::rounds; ++x)
      if (token(x) < chunk.length) raw[x] = data[at(gate, x)];
#pragma unroll
    for (int x = 0; x < ByTokens::rounds; ++x) {
      if (token(x) >= chunk.length) continue;
      const Real slope = raw_gate_slope(log, call.rules.capped, cap, gate_as<Real>(raw[x]));
      const Real value = from.of[mine.head][mine.place + x * ByTokens::step] * slope;
      Gate& to = static_cast<Gate*>(gradient.data)[at(gradient, x)];
      if constexpr (is_16_bit<Gate>)
        to = narrow<Gate>(static_cast<float>(value));
      else
        to = static_cast<Gate>(value);
    }
  });
}

// <C, dC> at the end of a chunk.
//
// Where every chunk has a product (grad_states, grad_qk): a chunk says what <C, dC> is at its end: `through`, of C at
// its start, and what it adds itself, the sum of `outflow`. So does the previous chunk, less the row - column of this
// one, and the next chunk, with its own row - column. C and dC are rounded in each chunk anew, so a mean of the three
// is closer where nothing is forgotten; where much is, the roundings of outflow cancel in row - column of the own chunk
// alone. Hence the weights: what is kept of the state in between. Without a gradient of the last state the last chunk
// is taken at its word, which is zero; so is a chunk that a sequence of a run ends with.
//
// A warp works on one head; each lane has a part of the sums.
struct Ending {
  double product;
  double missing;  // what the sum of row - column over the chunk lacks
};
template <class Real, int Terms>
struct ChunkEnd {
  const Call<Real>& call;
  int head, lane, parts, through_parts;

  __device__ __forceinline__ Sums<Real> sums_of(const Chunk& of) const {
    return {call.dims.vector(of, head), call.dims.heads * call.dims.all_tokens(), parts, of.length};
  }
  // This lane's part of what a chunk says, and of its row - column.
  __device__ __forceinline__ double said(std::int64_t number, const Sums<Real>& of) const {
    double sum = 0;
    const double* through = call.sums.through + (number * call.dims.heads + head) * through_parts;
    for (int part = lane; part < through_parts; part += warp_size) sum += through[part];
    for (int t = lane * lane_tokens; t < of.length; t += slab_tokens) sum += of.template total<1>(call.sums.outflow, t);
    return sum;
  }
  __device__ __forceinline__ double change(const Sums<Real>& of) const {
    double sum = 0;
    for (int t = lane * lane_tokens; t < of.length; t += slab_tokens)
      sum += of.template total<Terms>(call.sums.rows, t) - of.template total<Terms>(call.sums.columns, t);
    return sum;
  }
  __device__ __forceinline__ Ending product(std::int64_t number, const Chunk& chunk, const Sums<Real>& sums) const {
    const Ending part =
        call.stored.checkpoints != nullptr ? from_checkpoints(number, chunk) : Ending{mean(number, chunk, sums), 0};
    return {over_warp(part.product), over_warp(part.missing)};
  }

 private:
  __device__ __forceinline__ static double over_warp(double x) {
#pragma unroll
    for (int offset = warp_size / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xFFFFFFFFU, x, offset);
    return x;
  }

  // Where <C, dC> is known at checkpoints alone, whole chunks apart: that of the next one, with the row - column of the
  // tokens up to there, is what the one before says it is but for roundings, of which every chunk adds its own. So what
  // is missing is dealt out evenly to the tokens in between.
  static constexpr int apart = hopper::checkpoint / hopper::chunk;
  static_assert(hopper::chunk == slab_tokens, "a warp must have all tokens of a chunk at once");
  __device__ __forceinline__ double checkpoint(const Chunk& chunk, int own) const {
    const Chunk& first = call.packing.chunks[chunk.first];
    const std::int64_t number = call.dims.first_checkpoint(chunk.sequence, first.packed, hopper::checkpoint) + own;
    double sum = 0;
    const double* through = call.sums.through + (number * call.dims.heads + head) * through_parts;
    for (int part = lane; part < through_parts; part += warp_size) sum += through[part];
    return sum;
  }
  // Sums row - column over the tokens of a chunk: up to the first one that begins a sequence of a run, or from the last
  // such one on. Returns whether there is none.
  __device__ __forceinline__ bool add_change(const Chunk& of, bool to_first, double& sum) const {
    const Sums<Real> sums = sums_of(of);
    const int t = lane * lane_tokens;
    const unsigned begins = first_tokens(call, of, t) & ((1U << lane_tokens) - 1);
    const unsigned lanes = __ballot_sync(0xFFFFFFFFU, begins != 0);
    int from = 0, to = lane_tokens;  // of this lane's tokens
    if (lanes != 0) {
      const int at = to_first ? __ffs(static_cast<int>(lanes)) - 1 : warp_size - 1 - __clz(static_cast<int>(lanes));
      if (to_first)
        to = lane < at ? lane_tokens : lane > at ? 0 : __ffs(static_cast<int>(begins)) - 1;
      else
        from = lane > at ? 0 : lane < at ? lane_tokens : warp_size - 1 - __clz(static_cast<int>(begins));
    }
    double row[lane_tokens], column[lane_tokens];
    sums.template gather<Terms>(call.sums.rows, t, row);
    sums.template gather<Terms>(call.sums.columns, t, column);
#pragma unroll
    for (int x = 0; x < lane_tokens; ++x)
      if (x >= from && x < to) sum += row[x] - column[x];
    return lanes == 0;
  }
  // This lane's part.
  __device__ __forceinline__ Ending from_checkpoints(std::int64_t number, const Chunk& chunk) const {
    double after = 0, before = 0;
    int later = 0, earlier = 0;  // chunks up to the next checkpoint, and from the last one on with this one
    for (std::int64_t at = number;; ++at, ++later) {
      const Chunk next = at + 1 < call.dims.chunk_count ? call.packing.chunks[at + 1] : Chunk{};
      const bool has_next = next.length > 0 && next.first == chunk.first;
      const int chunks = static_cast<int>(at + 1 - chunk.first);
      if (has_next ? chunks % apart == 0 : call.carried.dC_last.data != nullptr)
        after += checkpoint(chunk, (chunks + apart - 1) / apart);
      else if (has_next && add_change(next, true, after))
        continue;
      break;
    }
    for (std::int64_t at = number;; --at) {
      // The sequence begins inside of its run: there is nothing before it. A chunk with several is left as it is.
      if (!add_change(call.packing.chunks[at], false, before)) {
        if (at == number) return {after, 0};
        ++earlier;
        break;
      }
      ++earlier;
      const int chunks = static_cast<int>(at - chunk.first);
      if (chunks % apart != 0) continue;
      if (chunks > 0 || call.carried.C0.data != nullptr) before -= checkpoint(chunk, chunks / apart);
      break;
    }
    const double missing = (-before - after) / (later + earlier);
    return {after + later * missing, missing};
  }

  // This lane's part of the mean of three.
  __device__ __forceinline__ double mean(std::int64_t number, const Chunk& chunk, const Sums<Real>& sums) const {
    double ending = said(number, sums), weights = 1;
    const Chunk next = number + 1 < call.dims.chunk_count ? call.packing.chunks[number + 1] : Chunk{};
    const bool has_next = next.length > 0 && next.first == chunk.first && (first_tokens(call, next, 0) & 1) == 0;
    if (has_next) {
      const Sums<Real> of = sums_of(next);
      const double weight = call.gates.gbar[(number + 1) * call.dims.heads + head];
      ending += weight * (said(number + 1, of) + change(of));
      weights += weight;
    }
    if (number > chunk.first && (has_next || call.carried.dC_last.data != nullptr)) {
      const double weight = call.gates.gbar[number * call.dims.heads + head];
      ending += weight * (said(number - 1, sums_of(call.packing.chunks[number - 1])) - change(sums));
      weights += weight;
    }
    return ending / weights;
  }
};

// The sums of row - column from each of a lane's tokens to the end of their chunk or of their sequence, whichever comes
// first. A sum that ends with the chunk has `beyond` in it, which is <C, dC> there.
struct Suffixes {
  double sum[lane_tokens];
  double of_slab;  // from the slab's first token

  // begins: bits of the lane's tokens and of the one after them, at which sequences begin.
  __device__ __forceinline__ Suffixes(const double (&row)[lane_tokens], const double (&column)[lane_tokens],
                                      unsigned begins, double beyond) {
    const int lane = static_cast<int>(threadIdx.x) % warp_size;
#pragma unroll
    for (int x = lane_tokens - 1; x >= 0; --x) {
      const bool is_last = (begins >> (x + 1) & 1) != 0;
      const double later = x + 1 < lane_tokens ? sum[x + 1] : 0;
      sum[x] = row[x] - column[x] + (is_last ? 0 : later);
    }
    double all = sum[0];           // from this lane's first token
    bool ends = begins >> 1 != 0;  // it ends before the slab does
#pragma unroll
    for (int offset = 1; offset < warp_size; offset *= 2) {
      const double other = __shfl_down_sync(0xFFFFFFFFU, all, offset);
      const bool other_ends = __shfl_down_sync(0xFFFFFFFFU, static_cast<int>(ends), offset) != 0;
      if (lane + offset >= warp_size || ends) continue;
      all += other;
      ends = other_ends;
    }
    if (!ends) all += beyond;
    of_slab = __shfl_sync(0xFFFFFFFFU, all, 0);
    const double after = __shfl_down_sync(0xFFFFFFFFU, all, 1);
    const double carried = lane + 1 < warp_size ? after : beyond;
#pragma unroll
    for (int x = 0; x < lane_tokens; ++x)
      if (begins >> (x + 1) == 0) sum[x] += carried;
  }
};

// dlogf_t = sum_{s >= t, same chunk} (row_s - column_s) + <C, dC> at the end of the chunk; dlogi = column.
// A CTA has some heads of a chunk, and works from its last token to the first. Terms: Config::sum_terms.
template <class Real, int Terms>
__global__ void __launch_bounds__(threads, sizeof(Real) == 8 ? 2 : 3)
    grad_gates_kernel(Call<Real> call, int parts, int through_parts) {
  __shared__ Slab<Real> dlogi, dlogf;
  arch::after_previous_kernel();
  arch::let_next_kernel_start();
  const std::int64_t number = blockIdx.x / head_groups(call);
  const Chunk chunk = call.packing.chunks[number];
  if (chunk.length == 0) return;
  const int first_head = static_cast<int>(blockIdx.x % head_groups(call)) * heads;
  const int warp = static_cast<int>(threadIdx.x) / warp_size, lane = static_cast<int>(threadIdx.x) % warp_size;
  // Warps beyond the last head do what its warp does, and nothing of it is written.
  const int head = min(first_head + warp, call.dims.heads - 1);
  const ChunkEnd<Real, Terms> end{call, head, lane, parts, through_parts};
  const Sums<Real> sums = end.sums_of(chunk);
  const Ending ending = end.product(number, chunk, sums);
  double beyond = ending.product;
  const float missing = static_cast<float>(ending.missing) / static_cast<float>(chunk.length);  // from token to token
  for (int start = (chunk.length - 1) / slab_tokens * slab_tokens; start >= 0; start -= slab_tokens) {
    const int t = start + lane * lane_tokens;
    double row[lane_tokens], column[lane_tokens];
    sums.template gather<Terms>(call.sums.rows, t, row);
    sums.template gather<Terms>(call.sums.columns, t, column);
    constexpr unsigned own_bits = (2U << lane_tokens) - 1;
    const unsigned begins = first_tokens(call, chunk, t) & own_bits;
    const Suffixes suffixes(row, column, begins, beyond);
#pragma unroll
    for (int x = 0; x < lane_tokens; ++x) {
      dlogi.of[warp][lane * lane_tokens + x] = static_cast<Real>(column[x]);
      // The forget gate of a first token decays nothing.
      dlogf.of[warp][lane * lane_tokens + x] =
          (begins >> x & 1) != 0 ? Real{0} : static_cast<Real>(suffixes.sum[x] + missing * (chunk.length - t - x));
    }
    beyond = suffixes.of_slab;
    __syncthreads();
    write_gradient(call, chunk, start, first_head, call.tensors.i, call.tensors.di, call.rules.i_type,
                   call.rules.family.input, dlogi);
    write_gradient(call, chunk, start, first_head, call.tensors.f, call.tensors.df, call.rules.f_type,
                   call.rules.family.forget, dlogf);
    __syncthreads();  // nobody reads the slabs any more
  }
}

}  // namespace

template <class T>
void launch_grad_gates(const Call<RealOf<T>>& call, cudaStream_t stream) {
  if (call.dims.chunk_count == 0) return;
  launch_chained("grad_gates", grad_gates_kernel<RealOf<T>, Config<T>::sum_terms>,
                 call.dims.chunk_count * head_groups(call), threads, 0, stream, call, call.sums.parts,
                 call.sums.through_parts);
}

#define TFLA_INSTANTIATE(T) template void launch_grad_gates<T>(const Call<typename Config<T>::Real>&, cudaStream_t)
TFLA_FOR_EACH_TYPE(TFLA_INSTANTIATE);
#undef TFLA_INSTANTIATE

}  // namespace tfla::cuda
