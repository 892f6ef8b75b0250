// A tile of the state in the registers of one warpgroup: 64 M rows of dqk by N columns of dhv, in float32, and what
// happens to it: tokens are added, it goes to shared memory as 16 bits, it comes from and goes to global memory.
#pragma once

#include "cuda/arch/barrier.cuh"
#include "cuda/arch/mma.cuh"
#include "cuda/arch/shared.cuh"
#include "cuda/arch/wgmma.cuh"
#include "cuda/call.h"
#include "cuda/sm90/common/lane.cuh"
#include "cuda/sm90/common/limits.h"
#include "cuda/sm90/common/scale16.cuh"

namespace tfla::cuda::sm90 {

inline constexpr int block_tokens = token_block;  // tokens that are added at a time

// The sum over the four lanes that hold a row.
__device__ __forceinline__ float over_row(float x) {
  x += __shfl_xor_sync(0xFFFFFFFFU, x, 1);
  return x + __shfl_xor_sync(0xFFFFFFFFU, x, 2);
}

// Numbers of 16 bits by their bits.
template <class T>
__device__ __forceinline__ unsigned short to_bits(float x) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>)
    return __bfloat16_as_ushort(__float2bfloat16_rn(x));
  else
    return __half_as_ushort(__float2half_rn(x));
}
template <class T>
__device__ __forceinline__ float from_bits(unsigned short bits) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>)
    return __bfloat162float(__ushort_as_bfloat16(bits));
  else
    return __half2float(__ushort_as_half(bits));
}

// Two of them, and what rounding left, as two more.
template <class T>
__device__ __forceinline__ uint32_t split(float2 x, uint32_t& rest) {
  const uint32_t high = arch::pack(x, T{});
  const float2 rounded = arch::unpack(high, T{});
  rest = arch::pack(float2{x.x - rounded.x, x.y - rounded.y}, T{});
  return high;
}

// How weighted keys go into the products: rounded once, or as the sum of two bfloat16 (one float16 has the digits of
// results in float16). Both terms at once take more registers; one after the other, they are made twice.
enum class Terms { one, two, two_in_turn };

// Together: 64-row parts whose operands are made at a time. Sets: of them in registers; one is made while the others
// are multiplied.
// Pairs: keys are weighted two at a time, by weights in two bfloat16, and summed up to n by a product. Sums: there is
// n. Ahead: keys are read while those before them are multiplied, which takes registers.
template <class T, int M, int N, Terms Keys, int Together = (M > 1 ? 2 : 1), int Sets = 2, bool Pairs = false,
          bool Sums = true, bool Ahead = false>
struct StateTile {
  static_assert(!Pairs || (Together == 1 && Keys != Terms::two_in_turn));
  static constexpr int together = Together;
  float c[M][N / 2];

  struct Weighted {
    uint32_t high[together][4];
    uint32_t low[Keys == Terms::two ? together : 1][4];
  };

  template <class Visit>
  __device__ __forceinline__ void each(const Lane& at, const Visit& visit) {  // visit(row, column, value, next value)
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int e = 0; e < N / 2; e += 2)
        visit(64 * m + at.row + e / 2 % 2 * 8, e / 4 * 8 + at.pair, c[m][e], c[m][e + 1]);
  }

  __device__ __forceinline__ void scale(float by) {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (float& x : c[m]) x *= by;
  }

  __device__ __forceinline__ void hold() {
#pragma unroll
    for (int m = 0; m < M; ++m) arch::pin(c[m]);
  }

  // Of this thread.
  __device__ __forceinline__ float largest() const {
    float parts[4]{};
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int e = 0; e < N / 2; ++e) parts[e % 4] = fmaxf(parts[e % 4], fabsf(c[m][e]));
    return fmaxf(fmaxf(parts[0], parts[1]), fmaxf(parts[2], parts[3]));
  }

  // Rounded, into panels of 64 columns by 64 M rows, or into those rows of larger ones. lift: see lift.cuh.
  __device__ __forceinline__ void publish(unsigned panels, const Lane& at, float lift,
                                          int panel_step = M * panel_bytes) {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int n = 0; n < N / 16; ++n) {
        const unsigned to = (panels + n / 4 * panel_step + m * panel_bytes + at.tile_row()) ^ (n % 4 * 32);
        store(to, c[m] + 8 * n, lift);
      }
  }
  // The same into groups of eight columns.
  __device__ __forceinline__ void publish_groups(unsigned groups, const Lane& at, float lift) {
    constexpr int group_bytes = 64 * M * 16;
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int n = 0; n < N / 16; ++n)
        store(groups + at.group_row(group_bytes) + m * (64 * 16) + n * (2 * group_bytes), c[m] + 8 * n, lift);
  }

  // This thread's share of the product with a state in such panels.
  __device__ __forceinline__ float product_with(unsigned panels, const Lane& at) {
    float sum = 0;
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int n = 0; n < N / 16; ++n) {
        uint32_t tiles[4];
        arch::load_tiles(tiles, (panels + n / 4 * (M * panel_bytes) + m * panel_bytes + at.tile_row()) ^ (n % 4 * 32));
#pragma unroll
        for (int x = 0; x < 4; ++x) {
          const float2 pair = arch::unpack(tiles[x], T{});
          sum += c[m][8 * n + 2 * x] * pair.x + c[m][8 * n + 2 * x + 1] * pair.y;
        }
      }
    return sum;
  }

  // Adds 64 tokens: (weight X)^T Y. X: M panels, from the lane's transposed_row on; Y: N / 64 panels; weight(k) gives
  // those of tokens k and k + 1. Sums of weight X over this thread's tokens go to n. The products are under way on
  // return. before(): what happens to the state first.
  template <class Weight, class Before>
  __device__ __forceinline__ void add(unsigned x, unsigned y, const Lane& at, const Weight& weight, float (&n)[M][2],
                                      const Before& before) {
    if constexpr (Pairs) return add_pairs(x, y, at, weight, n, before);
    Weighted parts[Sets];
    constexpr int turns = Keys == Terms::two_in_turn ? 2 : 1;
    constexpr int groups = M / together, steps = block_tokens / 16 * groups * turns;
    const std::uint64_t values = arch::tile_descriptor(y, panel_bytes);
    Raw raw;
    float2 weights[2];
    const auto fetch = [&](int s) {
      const int k = s / turns / groups, first = s / turns % groups * together;
      load(raw, x + first * panel_bytes + k * 16 * 128);
      weights[0] = weight(16 * k + at.pair);
      weights[1] = weight(16 * k + 8 + at.pair);
    };
    if constexpr (Ahead) fetch(0);
    before();
    hold();
#pragma unroll
    for (int s = 0; s < steps; ++s) {
      const int k = s / turns / groups, first = s / turns % groups * together;
      Weighted& part = parts[s % Sets];
      if (s >= Sets) arch::products_wait<Sets - 1>();  // the products that read these registers are done
      if constexpr (!Ahead) fetch(s);
      weigh(part, raw, weights, s % turns == 1, n, first);
      if (Ahead && s + 1 < steps) fetch(s + 1);
      arch::products_begin();
#pragma unroll
      for (int m = 0; m < together; ++m) {
        arch::multiply<T, arch::Major::across>(c[first + m], part.high[m], values + k * (16 * 128 / 16), true);
        if constexpr (Keys == Terms::two)
          arch::multiply<T, arch::Major::across>(c[first + m], part.low[m], values + k * (16 * 128 / 16), true);
      }
      arch::products_commit();
    }
  }

 private:
  __device__ __forceinline__ static void store(unsigned to, const float* x, float lift) {
    const auto pack = [&](int e) {
      if constexpr (has_lifts<T>) return arch::pack(float2{x[e] * lift, x[e + 1] * lift}, T{});
      return arch::pack(float2{x[e], x[e + 1]}, T{});
    };
    arch::store_tiles(to, pack(0), pack(2), pack(4), pack(6));
  }

  template <class Weight, class Before>
  __device__ __forceinline__ void add_pairs(unsigned x, unsigned y, const Lane& at, const Weight& weight,
                                            float (&n)[M][2], const Before& before) {
    Weighted parts[Sets];
    const std::uint64_t values = arch::tile_descriptor(y, panel_bytes);
    // Weights in three terms, in three columns of eight: n is their product with the keys.
    const int term = at.lane / 4;
    const uint32_t first = term == 0 ? ~0U : 0, second = term == 1 ? ~0U : 0, third = term == 2 ? ~0U : 0;
    uint32_t raw[4];
    if constexpr (Ahead) arch::load_tiles_transposed(raw, x);
    before();
    hold();
#pragma unroll
    for (int k = 0; k < block_tokens / 16; ++k) {
      uint32_t high[2], low[2], column[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float2 w = weight(16 * k + 8 * h + at.pair);
        high[h] = arch::round_pair(w);
        const float2 a = arch::widen_pair(high[h]), rest{w.x - a.x, w.y - a.y};
        low[h] = arch::round_pair(rest);
        const float2 b = arch::widen_pair(low[h]);
        const uint32_t lowest = arch::round_pair({rest.x - b.x, rest.y - b.y});
        column[h] = (high[h] & first) | (low[h] & second) | (lowest & third);
      }
#pragma unroll
      for (int m = 0; m < M; ++m) {
        const int s = k * M + m;
        Weighted& part = parts[s % Sets];
        if (s >= Sets) arch::products_wait<Sets - 1>();
        if constexpr (!Ahead) arch::load_tiles_transposed(raw, x + m * panel_bytes + k * 16 * 128);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if constexpr (Keys == Terms::two) {
            part.high[0][e] = arch::multiply_pairs(raw[e], high[e / 2]);
            const uint32_t rest = arch::multiply_add_pairs(raw[e], high[e / 2], arch::negate_pair(part.high[0][e]));
            part.low[0][e] = arch::multiply_add_pairs(raw[e], low[e / 2], rest);
          } else {
            part.high[0][e] = arch::multiply_add_pairs(raw[e], high[e / 2], arch::multiply_pairs(raw[e], low[e / 2]));
          }
        }
        float sums[4] = {0, 0, 0, 0};  // of 16 tokens: tensor cores do not round as an addition does
        if constexpr (Sums) arch::multiply_add(sums, raw, column[0], column[1], __nv_bfloat16{});
        if (Ahead && s + 1 < block_tokens / 16 * M)
          arch::load_tiles_transposed(raw, x + (s + 1) % M * panel_bytes + (s + 1) / M * 16 * 128);
        arch::products_begin();
        arch::multiply<__nv_bfloat16, arch::Major::across>(c[m], part.high[0], values + k * (16 * 128 / 16), true);
        if constexpr (Keys == Terms::two)
          arch::multiply<__nv_bfloat16, arch::Major::across>(c[m], part.low[0], values + k * (16 * 128 / 16), true);
        arch::products_commit();
        if constexpr (Sums) {
          n[m][0] += sums[0] + sums[1];
          n[m][1] += sums[2] + sums[3];
        }
      }
    }
  }

  using Raw = uint32_t[together][4];
  __device__ __forceinline__ static void load(Raw& raw, unsigned x) {
#pragma unroll
    for (int m = 0; m < together; ++m) arch::load_tiles_transposed(raw[m], x + m * panel_bytes);
  }
  __device__ __forceinline__ void weigh(Weighted& part, const Raw& raw, const float2 (&by)[2], bool second_term,
                                        float (&n)[M][2], int first) {
#pragma unroll
    for (int m = 0; m < together; ++m) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float2 weights = by[e / 2];
        float2 value = arch::unpack(raw[m][e], T{});
        value = {value.x * weights.x, value.y * weights.y};
        if (second_term) {
          split<T>(value, part.high[m][e]);
          continue;
        }
        if constexpr (Sums) n[first + m][e % 2] += value.x + value.y;
        if constexpr (Keys == Terms::two)
          part.high[m][e] = split<T>(value, part.low[m][e]);
        else
          part.high[m][e] = arch::pack(value, T{});
      }
    }
  }
};

}  // namespace tfla::cuda::sm90
