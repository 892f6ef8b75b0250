// The kernels behind conv.h, compiled once per instruction set. Included by conv.cc through foreach_target only.
#if defined(TFLA_CPU_CONV_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef TFLA_CPU_CONV_INL_H
#undef TFLA_CPU_CONV_INL_H
#else
#define TFLA_CPU_CONV_INL_H
#endif

#include <hwy/contrib/math/math-inl.h>
#include <hwy/highway.h>

#include <cstdint>
#include <limits>

HWY_BEFORE_NAMESPACE();
namespace tfla::cpu {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using std::int64_t;

// The width as the compiler knows it, or 0 where it does not.
template <int Width>
HWY_INLINE int64_t known(int64_t width) {
  return Width > 0 ? Width : width;
}

// Calls body(d, j) for vectors of [0, inner), then with one lane: an element does not depend on where a row ends.
template <class Real, class Body>
HWY_INLINE void for_vectors(int64_t inner, const Body& body) {
  const hn::ScalableTag<Real> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t j = 0;
  for (; j + lanes <= inner; j += lanes) body(d, j);
  for (; j < inner; ++j) body(hn::CappedTag<Real, 1>(), j);
}

// finish(d, sum, o, j) makes of the sum what is stored.
template <int Width, bool AlongTokens, class Real, class Finish>
HWY_INLINE void correlate_tile(const Correlation<Real>& work, const Finish& finish) {
  const int64_t width = known<Width>(work.width);
  for (int64_t o = 0; o < work.outer; ++o) {
    const Real* x = work.x + o * work.x_outer;
    Real* out = work.out + o * work.out_outer;
    for_vectors<Real>(work.inner, [&](auto d, int64_t j) HWY_ATTR {
      const auto channel = [&](const Real* values) HWY_ATTR {
        if constexpr (AlongTokens) {
          return hn::Set(d, values[o]);
        } else {
          return hn::LoadU(d, values + j);
        }
      };
      auto sum = work.bias == nullptr ? hn::Zero(d) : channel(work.bias);
      HWY_UNROLL(4)
      for (int64_t k = 0; k < width; ++k) {
        sum = hn::MulAdd(channel(work.weight + k * work.weight_tap), hn::LoadU(d, x + k * work.x_tap + j), sum);
      }
      hn::StoreU(finish(d, sum, o, j), d, out + j);
    });
  }
}

template <class Real, class Finish>
HWY_INLINE void correlate_any(const Correlation<Real>& work, const Finish& finish) {
  const bool along = work.along_tokens;
  switch (work.width) {
    case 2: return along ? correlate_tile<2, true>(work, finish) : correlate_tile<2, false>(work, finish);
    case 3: return along ? correlate_tile<3, true>(work, finish) : correlate_tile<3, false>(work, finish);
    case 4: return along ? correlate_tile<4, true>(work, finish) : correlate_tile<4, false>(work, finish);
    default: return along ? correlate_tile<0, true>(work, finish) : correlate_tile<0, false>(work, finish);
  }
}

// 1 + exp(-x). Highway's Exp holds up to 104 and 706, and makes 0 of NaN: callers multiply by x, which keeps it.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V sigmoid_denominator(D d, V x) {
  using Real = hn::TFromD<D>;
  const auto exponent = hn::Neg(x);
  const auto most = hn::Set(d, static_cast<Real>(sizeof(Real) == 4 ? 104 : 706));
  const auto infinity = hn::Set(d, std::numeric_limits<Real>::infinity());
  const auto power = hn::IfThenElse(hn::Gt(exponent, most), infinity, hn::Exp(d, exponent));
  return hn::Add(hn::Set(d, Real{1}), power);
}

template <class Real>
HWY_INLINE void correlate_activated(const Correlation<Real>& work, bool silu) {
  if (silu) {
    correlate_any(
        work, [](auto d, auto sum, int64_t, int64_t) HWY_ATTR { return hn::Div(sum, sigmoid_denominator(d, sum)); });
  } else {
    correlate_any(work, [](auto, auto sum, int64_t, int64_t) HWY_ATTR { return sum; });
  }
}

// silu'(z) = s (1 + z (1 - s)) with s = sigmoid(z)
template <class Real>
HWY_INLINE void correlate_to_slope(const Correlation<Real>& work, const Real* dy, int64_t dy_outer) {
  correlate_any(work, [=](auto d, auto sum, int64_t o, int64_t j) HWY_ATTR {
    const auto one = hn::Set(d, Real{1});
    const auto s = hn::Div(one, sigmoid_denominator(d, sum));
    const auto slope = hn::Mul(s, hn::MulAdd(sum, hn::Sub(one, s), one));
    return hn::Mul(hn::LoadU(d, dy + o * dy_outer + j), slope);
  });
}

// ---------------------------------------------------------------- sums over tokens

// Taps [first, first + Taps), and with WithBias the sum of dz.
template <int Taps, bool WithBias, class Real>
HWY_INLINE void sum_rows(const TapSums<Real>& work, int64_t first) {
  for_vectors<Real>(work.inner, [&](auto d, int64_t j) HWY_ATTR {
    using Vector = hn::Vec<decltype(d)>;
    Vector sums[Taps], bias = hn::Zero(d);
    HWY_UNROLL(4)
    for (int k = 0; k < Taps; ++k) sums[k] = hn::Zero(d);
    const Real* x = work.x + first * work.x_tap + j;
    const Real* dz = work.dz + j;
    for (int64_t o = 0; o < work.outer; ++o) {
      const auto gradient = hn::LoadU(d, dz + o * work.dz_outer);
      if constexpr (WithBias) bias = hn::Add(bias, gradient);
      HWY_UNROLL(4)
      for (int k = 0; k < Taps; ++k) {
        sums[k] = hn::MulAdd(gradient, hn::LoadU(d, x + o * work.x_outer + k * work.x_tap), sums[k]);
      }
    }
    HWY_ALIGN Real values[HWY_MAX_BYTES / sizeof(Real)];
    const auto add = [&](Vector sum, int64_t k) HWY_ATTR {
      hn::StoreU(sum, d, values);
      double* to = work.sums + k * work.sums_tap + j;
      for (int64_t lane = 0; lane < static_cast<int64_t>(hn::Lanes(d)); ++lane)
        to[lane] += static_cast<double>(values[lane]);
    };
    for (int k = 0; k < Taps; ++k) add(sums[k], first + k);
    if constexpr (WithBias) add(bias, work.width);
  });
}

template <int Taps, bool WithBias, class Real>
HWY_INLINE void sum_lines(const TapSums<Real>& work, int64_t first) {
  const hn::ScalableTag<Real> d;
  using Vector = hn::Vec<decltype(d)>;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t o = 0; o < work.outer; ++o) {
    const Real* x = work.x + o * work.x_outer + first * work.x_tap;
    const Real* dz = work.dz + o * work.dz_outer;
    Vector sums[Taps], bias = hn::Zero(d);
    HWY_UNROLL(4)
    for (int k = 0; k < Taps; ++k) sums[k] = hn::Zero(d);
    int64_t j = 0;
    for (; j + lanes <= work.inner; j += lanes) {
      const auto gradient = hn::LoadU(d, dz + j);
      if constexpr (WithBias) bias = hn::Add(bias, gradient);
      HWY_UNROLL(4)
      for (int k = 0; k < Taps; ++k) sums[k] = hn::MulAdd(gradient, hn::LoadU(d, x + k * work.x_tap + j), sums[k]);
    }
    for (int k = 0; k < Taps; ++k) {
      auto sum = static_cast<double>(hn::GetLane(hn::SumOfLanes(d, sums[k])));
      for (int64_t r = j; r < work.inner; ++r)
        sum += static_cast<double>(dz[r]) * static_cast<double>(x[k * work.x_tap + r]);
      work.sums[(first + k) * work.sums_tap + o] += sum;
    }
    if constexpr (!WithBias) continue;
    auto sum = static_cast<double>(hn::GetLane(hn::SumOfLanes(d, bias)));
    for (int64_t r = j; r < work.inner; ++r) sum += static_cast<double>(dz[r]);
    work.sums[work.width * work.sums_tap + o] += sum;
  }
}

template <int Taps, bool WithBias, class Real>
HWY_INLINE void sum_taps(const TapSums<Real>& work, int64_t first) {
  if (work.along_tokens) {
    sum_lines<Taps, WithBias>(work, first);
  } else {
    sum_rows<Taps, WithBias>(work, first);
  }
}

// Four taps at a time, so that their sums stay in registers.
template <class Real>
HWY_INLINE void add_all_taps(const TapSums<Real>& work) {
  int64_t first = 0;
  for (; first + 4 <= work.width; first += 4) {
    if (first == 0) {
      sum_taps<4, true>(work, first);
    } else {
      sum_taps<4, false>(work, first);
    }
  }
  for (; first < work.width; ++first) {
    if (first == 0) {
      sum_taps<1, true>(work, first);
    } else {
      sum_taps<1, false>(work, first);
    }
  }
}

#define TFLA_CONV_ENTRIES(Real, suffix)                                                                           \
  HWY_ATTR void correlate_##suffix(const Correlation<Real>& work, bool silu) { correlate_activated(work, silu); } \
  HWY_ATTR void correlate_slope_##suffix(const Correlation<Real>& work, const Real* dy, int64_t dy_outer) {       \
    correlate_to_slope(work, dy, dy_outer);                                                                       \
  }                                                                                                               \
  HWY_ATTR void add_tap_sums_##suffix(const TapSums<Real>& work) { add_all_taps(work); }
TFLA_CONV_ENTRIES(float, f32)
TFLA_CONV_ENTRIES(double, f64)
#undef TFLA_CONV_ENTRIES

}  // namespace HWY_NAMESPACE
}  // namespace tfla::cpu
HWY_AFTER_NAMESPACE();

#endif  // TFLA_CPU_CONV_INL_H
