// Stage `step` for one token of each of many states, in two launches: the scalars of all tokens with n and m, then C in
// strips of columns. The CTAs of the second launch need neither each other nor the chain from the gates to the first
// product. They can be small, which leaves less idle while the last ones end: that saves more than a launch costs.
#pragma once

#include "cuda/arch/cluster.cuh"
#include "cuda/launch.h"
#include "cuda/step/token.cuh"

namespace tfla::cuda {

namespace many {

inline constexpr int column_groups = 16;  // threads side by side on a row of C, four columns each
inline constexpr int row_groups = step_threads / column_groups;
inline constexpr int piece = Piece<float>::size;
inline constexpr int width = column_groups * piece;
inline constexpr int most_rows = 1024;

// Rows of a thread in flight, and CTAs per multiprocessor. Tall states are fastest in few CTAs with much in flight. Low
// ones have no more rows than that, and a CTA at its end has nothing in flight: they are fastest in many CTAs.
struct Tall {
  static constexpr int ahead = 8, ctas = 2;  // 94 registers leave no room for a third
  static constexpr int least_rows = 2 * ahead * row_groups;
};
struct Low {
  static constexpr int ahead = 5, ctas = 4;
};

}  // namespace many

// A CTA is one warp and has one state: the compiler then takes 57 registers instead of 39, and a step takes 1.2 us less
// than with four warps to a CTA (H200).
template <class T>
__global__ void __launch_bounds__(warp_size) step_tokens_kernel(StepCall<float> step) {
#if __CUDA_ARCH__ >= 900  // never launched on older GPUs, like everything here
  const Call<float>& call = step.call;
  arch::after_previous_kernel();
  arch::let_next_kernel_start();
  const int head = static_cast<int>(blockIdx.x % call.dims.heads);
  const Row<float> row(step, blockIdx.x / call.dims.heads);
  if (!row.has_state(step)) return row.template clear_outputs<T>(call, head, 0, call.dims.dhv);
  const T* q = row_of<T>(call.tensors.q, row.batch, row.token, head / call.dims.group);
  const T* k = row_of<T>(call.tensors.k, row.batch, row.token, head / call.dims.group);
  const TokenScalars<float> own = token_scalars<T>(step, row, 0, head, q, k);
  float* n = static_cast<float*>(step.n.data) + row.slot * step.n.sequence + head * step.n.head;
#pragma unroll 8
  for (int r = threadIdx.x; r < call.dims.dqk; r += warp_size)
    n[r] = decayed(own.decay, n[r], own.weight * widen<float>(k[r]));
  if (threadIdx.x != 0) return;
  const std::int64_t at = head * call.dims.all_tokens() + row.packed;
  step.decay[at] = own.decay;
  step.weight[at] = own.weight;
  call.gates.inverse[at] = own.inverse;
  static_cast<float*>(step.m.data)[row.slot * step.m.sequence + head * step.m.head] = own.m;
#endif
}

// Calls work(decayed), where decayed(x, a, b) is an element x of the state after its decay, plus a b. `work` is
// compiled for both kinds of decay, so that an element takes two instructions.
template <class Work>
__device__ __forceinline__ void with_decay(const Decay<float>& decay, const Work& work) {
  const float rest = decay.rest;
  if (decay.whole != 0)
    work([rest](float x, float a, float b) { return fmaf(rest, x, fmaf(a, b, x)); });
  else
    work([rest](float x, float a, float b) { return fmaf(rest, x, a * b); });
}

template <class T, class Shape>
__global__ void __launch_bounds__(step_threads, Shape::ctas) step_strips_kernel(StepCall<float> step, int strips) {
#if __CUDA_ARCH__ >= 900
  using namespace many;
  constexpr int ahead = Shape::ahead;
  const Call<float>& call = step.call;
  arch::let_next_kernel_start();
  const int strip = static_cast<int>(blockIdx.x % strips);
  const unsigned unit = blockIdx.x / strips;
  const int head = static_cast<int>(unit % call.dims.heads);
  const Row<float> row(step, unit / call.dims.heads);
  if (!row.has_state(step)) return;
  const int column = strip * width + threadIdx.x % column_groups * piece;
  const int first = threadIdx.x / column_groups;
  const int rows = column < call.dims.dhv ? call.dims.dqk - first : 0;  // from this thread's first row on
  float* to =
      static_cast<float*>(step.C.data) + row.slot * step.C.sequence + head * step.C.head + first * step.C.row + column;
  const float* from = to;
  const std::int64_t stride = row_groups * step.C.row;
  __shared__ float sums[step_threads / warp_size][width];
  __shared__ float2 factors[most_rows];  // q and k

  float4 coming[ahead];
  const auto load = [&](float4& to_come, int r) {
    if (r < rows) to_come = __ldcg(reinterpret_cast<const float4*>(from));
    from += stride;
  };
#pragma unroll
  for (int x = 0; x < ahead; ++x) load(coming[x], x * row_groups);
  const T* q = row_of<T>(call.tensors.q, row.batch, row.token, head / call.dims.group);
  const T* k = row_of<T>(call.tensors.k, row.batch, row.token, head / call.dims.group);
  const T* v = row_of<T>(call.tensors.v, row.batch, row.token, head) + column;
  for (int r = threadIdx.x; r < call.dims.dqk; r += step_threads)
    factors[r] = {widen<float>(__ldcg(q + r)), widen<float>(__ldcg(k + r))};
  float value[piece], out[piece] = {};
#pragma unroll
  for (int e = 0; e < piece; ++e) value[e] = rows > 0 ? widen<float>(__ldcg(v + e)) : 0.0F;
  // step_tokens writes what is read from here on. All else was there when it let this kernel start.
  arch::after_previous_kernel();
  const std::int64_t at = head * call.dims.all_tokens() + row.packed;
  const float2 parts = __ldcg(reinterpret_cast<const float2*>(step.decay) + at);
  const Decay<float> decay{parts.x, parts.y};
  const float weight = __ldcg(step.weight + at);
  __syncthreads();
  with_decay(decay, [&](const auto& decayed) {
    for (int base = 0; base < rows; base += ahead * row_groups) {
#pragma unroll
      for (int x = 0; x < ahead; ++x) {
        const int r = base + x * row_groups;
        const float4 here = coming[x];
        load(coming[x], r + ahead * row_groups);
        if (r < rows) {
          const auto [query, key] = factors[first + r];
          const float input = weight * key;
          float c[piece] = {here.x, here.y, here.z, here.w};
#pragma unroll
          for (int e = 0; e < piece; ++e) {
            c[e] = decayed(c[e], input, value[e]);
            out[e] += query * c[e];
          }
          *reinterpret_cast<float4*>(to) = {c[0], c[1], c[2], c[3]};
        }
        to += stride;
      }
    }
  });
  sum_rows<column_groups>(out, sums);
  __syncthreads();
  const int own = static_cast<int>(threadIdx.x);
  if (own < min(width, call.dims.dhv - strip * width)) {
    float total = 0;
    for (const auto& warp : sums) total += warp[own];
    row_of<T>(call.tensors.h, row.batch, row.token, head)[strip * width + own] =
        narrow<T>(static_cast<float>(call.rules.scale) * total * __ldcg(call.gates.inverse + at));
  }
#endif
}

inline int strips_of(int dhv) { return (dhv + many::width - 1) / many::width; }

template <class T>
void launch_many(const StepCall<float>& step, cudaStream_t stream) {
  const std::int64_t units = step.call.dims.sequences * step.call.dims.heads;
  const int strips = strips_of(step.call.dims.dhv);
  launch_chained("step_tokens", step_tokens_kernel<T>, units, warp_size, 0, stream, step);
  const auto launch_strips = [&](auto kernel) {
    launch_chained("step_strips", kernel, units * strips, step_threads, 0, stream, step, strips);
  };
  if (step.call.dims.dqk >= many::Tall::least_rows)
    launch_strips(step_strips_kernel<T, many::Tall>);
  else
    launch_strips(step_strips_kernel<T, many::Low>);
}
static_assert(many::most_rows == 1024 && many::Tall::least_rows == 256, "the rows of kernel_table.h");

}  // namespace tfla::cuda
