// A tile of the state, rows of dqk by columns of dhv, in the registers of one warpgroup, in float32. Tokens are added
// to it, and it is rounded into shared memory.
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

// The sum over the four lanes that hold a row.
__device__ __forceinline__ float over_row(float x) {
  x += __shfl_xor_sync(0xFFFFFFFFU, x, 1);
  return x + __shfl_xor_sync(0xFFFFFFFFU, x, 2);
}

// float32 to 16 bits and back.
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

// Rounds a pair to 16 bits. rest: what the rounding left, as another pair.
template <class T>
__device__ __forceinline__ uint32_t split(float2 x, uint32_t& rest) {
  const uint32_t high = arch::pack(x, T{});
  const float2 rounded = arch::unpack(high, T{});
  rest = arch::pack(float2{x.x - rounded.x, x.y - rounded.y}, T{});
  return high;
}

// How weighted keys enter the products. Rounded once; or as the sum of two bfloat16, both terms made at a time, which
// takes more registers, or in turn, which makes them twice. One float16 has the digits of results in float16.
// The weights of two tokens: rounded, and what the rounding left.
struct WeightPair {
  uint32_t high, low;

  __device__ __forceinline__ explicit WeightPair(uint2 words) : high(words.x), low(words.y) {}
};

enum class KeyTerms : std::uint8_t { one, two, two_in_turn };

struct TileConfig {
  int row_panels;  // of 64 rows of dqk
  int columns;     // of dhv
  KeyTerms terms = KeyTerms::one;
  int panels_at_once = 1;       // row panels whose operands are made at a time
  int operand_sets = 2;         // in registers: one is made while the products of the others are in flight
  bool paired_weights = false;  // keys are weighted two at a time, by weights in two bfloat16; n comes from a product
  bool sums_n = true;           // n is summed up with C
  bool reads_ahead = false;     // keys are read while the products before them are in flight, which takes registers
  int tokens = token_block;     // that are added at a time
  int value_panel_bytes = panel_bytes;  // from one panel of values to the next
};

template <class T, TileConfig C>
struct StateTile {
  static_assert(!C.paired_weights || (C.panels_at_once == 1 && C.terms != KeyTerms::two_in_turn),
                "paired weights must be made one row panel at a time, all terms at once");
  static_assert(C.row_panels % C.panels_at_once == 0, "row_panels must be a multiple of panels_at_once");

  float c[C.row_panels][C.columns / 2];

  // Sums of a thread's weighted keys, of the two rows that it has of each panel.
  using N = float[C.row_panels][2];

  // visit(row, column, value, next value)
  template <class Visit>
  __device__ __forceinline__ void each(const Lane& lane, const Visit& visit) {
#pragma unroll
    for (int m = 0; m < C.row_panels; ++m)
#pragma unroll
      for (int e = 0; e < C.columns / 2; e += 2)
        visit(64 * m + lane.row + e / 2 % 2 * 8, e / 4 * 8 + lane.pair, c[m][e], c[m][e + 1]);
  }

  __device__ __forceinline__ void clear(int panel) {
#pragma unroll
    for (float& x : c[panel]) x = 0;
  }

  __device__ __forceinline__ void multiply_by(float factor) {
#pragma unroll
    for (int m = 0; m < C.row_panels; ++m)
#pragma unroll
      for (float& x : c[m]) x *= factor;
  }

  // Keeps the compiler from moving work on the tile over this line.
  __device__ __forceinline__ void pin() {
#pragma unroll
    for (int m = 0; m < C.row_panels; ++m) arch::pin(c[m]);
  }

  // The largest size of this thread's numbers.
  __device__ __forceinline__ float largest() const {
    float parts[4]{};
#pragma unroll
    for (int m = 0; m < C.row_panels; ++m)
#pragma unroll
      for (int e = 0; e < C.columns / 2; ++e) parts[e % 4] = fmaxf(parts[e % 4], fabsf(c[m][e]));
    return fmaxf(fmaxf(parts[0], parts[1]), fmaxf(parts[2], parts[3]));
  }

  // Rounds the tile into panels of shared memory. panel_step: bytes between panels of 64 columns, which may have more
  // rows than the tile.
  __device__ __forceinline__ void publish(unsigned panels, const Lane& lane, float scale16,
                                          int panel_step = C.row_panels * panel_bytes) {
#pragma unroll
    for (int m = 0; m < C.row_panels; ++m)
#pragma unroll
      for (int n = 0; n < C.columns / 16; ++n) {
        const unsigned to = (panels + n / 4 * panel_step + m * panel_bytes + lane.tile_row()) ^ (n % 4 * 32);
        store(to, c[m] + 8 * n, scale16);
      }
  }
  // The same into groups of eight columns (arch::groups_descriptor).
  __device__ __forceinline__ void publish_groups(unsigned groups, const Lane& lane, float scale16) {
    constexpr int group_bytes = 64 * C.row_panels * 16;
#pragma unroll
    for (int m = 0; m < C.row_panels; ++m)
#pragma unroll
      for (int n = 0; n < C.columns / 16; ++n)
        store(groups + lane.group_row(group_bytes) + m * (64 * 16) + n * (2 * group_bytes), c[m] + 8 * n, scale16);
  }

  // This thread's share of the scalar product with a state in such panels.
  __device__ __forceinline__ float product_with(unsigned panels, const Lane& lane) {
    float2 sums{0, 0};
#pragma unroll
    for (int m = 0; m < C.row_panels; ++m)
#pragma unroll
      for (int p = 0; p < C.columns / panel; ++p)
        add_product(sums, m, p, panels + p * (C.row_panels * panel_bytes) + m * panel_bytes, lane);
    return sums.x + sums.y;
  }
  // Adds the product over 64 rows and 64 columns.
  __device__ __forceinline__ void add_product(float2& sums, int row_panel, int column_panel, unsigned other,
                                              const Lane& lane) {
#pragma unroll
    for (int n = 0; n < panel / 16; ++n) {
      uint32_t tiles[4];
      arch::load_tiles(tiles, (other + lane.tile_row()) ^ (n * 32));
      const float* own = c[row_panel] + column_panel * (panel / 2) + 8 * n;
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        const float2 pair = arch::unpack(tiles[x], T{});
        sums = {fmaf(own[2 * x], pair.x, sums.x), fmaf(own[2 * x + 1], pair.y, sums.y)};
      }
    }
  }

  // Adds tokens: C += (weight X)^T Y. x: row_panels panels of keys, from the lane's transposed_row on; y: panels
  // of values; weight(t): of tokens t and t + 1, a float2 or, for paired weights without n, a WeightPair. The sums of
  // weight X over this thread's tokens go to n. before(): what happens to the state first. The products are in flight
  // on return.
  template <class Weight, class Before>
  __device__ __forceinline__ void add(unsigned x, unsigned y, const Lane& lane, const Weight& weight, N& n,
                                      const Before& before) {
    if constexpr (C.paired_weights)
      add_pairs(x, y, lane, weight, n, before);
    else
      add_singles(x, y, lane, weight, n, before);
  }

 private:
  static constexpr int at_once = C.panels_at_once;
  static constexpr int token_step = 16 * panel_row_bytes;  // bytes of 16 tokens

  // Operands of row panels: weighted keys, rounded, and with two terms what the rounding left.
  struct Weighted {
    uint32_t high[at_once][4];
    uint32_t low[C.terms == KeyTerms::two ? at_once : 1][4];
  };
  using Keys = uint32_t[at_once][4];

  __device__ __forceinline__ static void store(unsigned to, const float* x, float scale16) {
    const auto pack = [&](int e) {
      if constexpr (needs_scale16<T>) return arch::pack(float2{x[e] * scale16, x[e + 1] * scale16}, T{});
      return arch::pack(float2{x[e], x[e + 1]}, T{});
    };
    arch::store_tiles(to, pack(0), pack(2), pack(4), pack(6));
  }

  template <class Weight, class Before>
  __device__ __forceinline__ void add_singles(unsigned x, unsigned y, const Lane& lane, const Weight& weight, N& n,
                                              const Before& before) {
    Weighted sets[C.operand_sets];
    constexpr int turns = C.terms == KeyTerms::two_in_turn ? 2 : 1;
    constexpr int groups = C.row_panels / at_once, steps = C.tokens / 16 * groups * turns;
    const std::uint64_t values = arch::tile_descriptor(y, C.value_panel_bytes);
    Keys keys;
    float2 weights[2];
    const auto read = [&](int s) {
      const int k = s / turns / groups, first = s / turns % groups * at_once;
#pragma unroll
      for (int m = 0; m < at_once; ++m)
        arch::load_tiles_transposed(keys[m], x + first * panel_bytes + k * token_step + m * panel_bytes);
      weights[0] = weight(16 * k + lane.pair);
      weights[1] = weight(16 * k + 8 + lane.pair);
    };
    if constexpr (C.reads_ahead) read(0);
    before();
    pin();
#pragma unroll
    for (int s = 0; s < steps; ++s) {
      const int k = s / turns / groups, first = s / turns % groups * at_once;
      Weighted& set = sets[s % C.operand_sets];
      if (s >= C.operand_sets) arch::products_wait<C.operand_sets - 1>();  // the products that read this set are done
      if constexpr (!C.reads_ahead) read(s);
      weigh(set, keys, weights, s % turns == 1, n, first);
      if (C.reads_ahead && s + 1 < steps) read(s + 1);
      arch::products_begin();
#pragma unroll
      for (int m = 0; m < at_once; ++m) multiply(first + m, set, m, values + k * (token_step / 16));
      arch::products_commit();
    }
  }

  // c[panel] += operand m of a set, times the values of 16 tokens.
  __device__ __forceinline__ void multiply(int panel, const Weighted& set, int m, std::uint64_t values) {
    arch::multiply<T, arch::Major::across>(c[panel], set.high[m], values, true);
    if constexpr (C.terms == KeyTerms::two) arch::multiply<T, arch::Major::across>(c[panel], set.low[m], values, true);
  }

  // second_term: of two in turn.
  __device__ __forceinline__ void weigh(Weighted& set, const Keys& keys, const float2 (&by)[2], bool second_term, N& n,
                                        int first) {
#pragma unroll
    for (int m = 0; m < at_once; ++m) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float2 weights = by[e / 2];
        float2 value = arch::unpack(keys[m][e], T{});
        value = {value.x * weights.x, value.y * weights.y};
        if (second_term) {
          split<T>(value, set.high[m][e]);
          continue;
        }
        if constexpr (C.sums_n) n[first + m][e % 2] += value.x + value.y;
        if constexpr (C.terms == KeyTerms::two)
          set.high[m][e] = split<T>(value, set.low[m][e]);
        else
          set.high[m][e] = arch::pack(value, T{});
      }
    }
  }

  // Weights of 16 tokens as pairs of bfloat16, in two terms. column: this lane's part of an operand of eight columns,
  // of which three hold the three terms of the weights: n is its product with the keys.
  struct PairedWeights {
    uint32_t high[2], low[2], column[2];
  };
  template <class Weight>
  __device__ __forceinline__ static PairedWeights pair_weights(int k, const Lane& lane, const Weight& weight,
                                                               const uint32_t (&masks)[3]) {
    PairedWeights w;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const auto given = weight(16 * k + 8 * h + lane.pair);
      if constexpr (std::is_same_v<decltype(given), const WeightPair>) {
        w.high[h] = given.high;
        w.low[h] = given.low;
      } else {
        const float2 whole = given;
        w.high[h] = arch::round_pair(whole);
        const float2 a = arch::widen_pair(w.high[h]), rest{whole.x - a.x, whole.y - a.y};
        w.low[h] = arch::round_pair(rest);
        const float2 b = arch::widen_pair(w.low[h]);
        const uint32_t lowest = arch::round_pair({rest.x - b.x, rest.y - b.y});
        w.column[h] = (w.high[h] & masks[0]) | (w.low[h] & masks[1]) | (lowest & masks[2]);
      }
    }
    return w;
  }
  __device__ __forceinline__ static void weigh_pairs(Weighted& set, const uint32_t (&keys)[4], const PairedWeights& w) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if constexpr (C.terms == KeyTerms::two) {
        set.high[0][e] = arch::multiply_pairs(keys[e], w.high[e / 2]);
        const uint32_t rest = arch::multiply_add_pairs(keys[e], w.high[e / 2], arch::negate_pair(set.high[0][e]));
        set.low[0][e] = arch::multiply_add_pairs(keys[e], w.low[e / 2], rest);
      } else {
        set.high[0][e] = arch::multiply_add_pairs(keys[e], w.high[e / 2], arch::multiply_pairs(keys[e], w.low[e / 2]));
      }
    }
  }

  template <class Weight, class Before>
  __device__ __forceinline__ void add_pairs(unsigned x, unsigned y, const Lane& lane, const Weight& weight, N& n,
                                            const Before& before) {
    Weighted sets[C.operand_sets];
    const std::uint64_t values = arch::tile_descriptor(y, C.value_panel_bytes);
    const int term = lane.lane / 4;
    const uint32_t masks[3] = {term == 0 ? ~0U : 0, term == 1 ? ~0U : 0, term == 2 ? ~0U : 0};
    uint32_t keys[4];
    if constexpr (C.reads_ahead) arch::load_tiles_transposed(keys, x);
    before();
    pin();
#pragma unroll
    for (int k = 0; k < C.tokens / 16; ++k) {
      const PairedWeights weights = pair_weights(k, lane, weight, masks);
#pragma unroll
      for (int m = 0; m < C.row_panels; ++m) {
        const int s = k * C.row_panels + m;
        Weighted& set = sets[s % C.operand_sets];
        if (s >= C.operand_sets) arch::products_wait<C.operand_sets - 1>();
        if constexpr (!C.reads_ahead) arch::load_tiles_transposed(keys, x + m * panel_bytes + k * token_step);
        weigh_pairs(set, keys, weights);
        float sums[4] = {0, 0, 0, 0};  // of 16 tokens: tensor cores do not round as an addition does
        if constexpr (C.sums_n) arch::multiply_add(sums, keys, weights.column[0], weights.column[1], __nv_bfloat16{});
        if (C.reads_ahead && s + 1 < C.tokens / 16 * C.row_panels)
          arch::load_tiles_transposed(keys,
                                      x + (s + 1) % C.row_panels * panel_bytes + (s + 1) / C.row_panels * token_step);
        arch::products_begin();
        multiply(m, set, 0, values + k * (token_step / 16));
        arch::products_commit();
        if constexpr (C.sums_n) {
          n[m][0] += sums[0] + sums[1];
          n[m][1] += sums[2] + sums[3];
        }
      }
    }
  }
};

}  // namespace tfla::cuda::sm90
