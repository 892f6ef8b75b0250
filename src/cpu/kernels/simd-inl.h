// The loops behind simd.h, compiled once per instruction set. Included by simd.cc through foreach_target only.
//
// Elementwise loops are left to the compiler, which sees the instruction set of the enclosing namespace; reductions
// and transcendental functions are written with Highway.
#if defined(TFLA_CPU_SIMD_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef TFLA_CPU_SIMD_INL_H
#undef TFLA_CPU_SIMD_INL_H
#else
#define TFLA_CPU_SIMD_INL_H
#endif

#include <hwy/contrib/math/math-inl.h>
#include <hwy/highway.h>

#include <bit>
#include <cstdint>

HWY_BEFORE_NAMESPACE();
namespace tfla::cpu::simd {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using std::int64_t;

// ---------------------------------------------------------------- conversions

HWY_INLINE float widen_bf16(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

HWY_INLINE uint16_t narrow_bf16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16;
  const uint32_t quiet_nan = (bits >> 16) | 0x40U;
  return static_cast<uint16_t>((bits & 0x7FFFFFFFU) > 0x7F800000U ? quiet_nan : rounded);
}

// Integer arithmetic throughout: workers flush subnormal floats, and small halves must survive that.
HWY_INLINE float widen_f16(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000U) << 16;
  const uint32_t magnitude = half & 0x7FFFU;
  const uint32_t normal = (magnitude << 13) + (112U << 23);
  const uint32_t special = (magnitude << 13) | 0x7F800000U;
  // A subnormal half is m 2^-24 = 2^-14 (1 + m / 1024) - 2^-14.
  const float small = std::bit_cast<float>(0x38800000U | (magnitude << 13)) - std::bit_cast<float>(0x38800000U);
  const uint32_t bits = magnitude >= 0x7C00U ? special : magnitude >= 0x0400U ? normal : std::bit_cast<uint32_t>(small);
  return std::bit_cast<float>(sign | bits);
}

HWY_INLINE uint16_t narrow_f16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000U;
  const uint32_t magnitude = bits & 0x7FFFFFFFU;
  const uint32_t normal = (magnitude + 0xFFFU + ((magnitude >> 13) & 1U) - (112U << 23)) >> 13;
  // Adding one half puts the last bit of a subnormal half at the last bit of the float, which rounds it.
  const uint32_t small = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5F) - 0x3F000000U;
  const uint32_t special = magnitude > 0x7F800000U ? 0x7E00U : 0x7C00U;
  const uint32_t half = magnitude >= 0x47800000U ? special : magnitude >= 0x38800000U ? normal : small;
  return static_cast<uint16_t>(sign | half);
}

HWY_ATTR void load_bf16(const uint16_t* HWY_RESTRICT from, float* HWY_RESTRICT to, int64_t n) {
  for (int64_t j = 0; j < n; ++j) to[j] = widen_bf16(from[j]);
}
HWY_ATTR void load_f16(const uint16_t* HWY_RESTRICT from, float* HWY_RESTRICT to, int64_t n) {
  for (int64_t j = 0; j < n; ++j) to[j] = widen_f16(from[j]);
}
HWY_ATTR void store_bf16(float scale, const float* HWY_RESTRICT from, uint16_t* HWY_RESTRICT to, int64_t n) {
  for (int64_t j = 0; j < n; ++j) to[j] = narrow_bf16(scale * from[j]);
}
HWY_ATTR void store_f16(float scale, const float* HWY_RESTRICT from, uint16_t* HWY_RESTRICT to, int64_t n) {
  for (int64_t j = 0; j < n; ++j) to[j] = narrow_f16(scale * from[j]);
}

// Past the caches where a row begins at a whole vector.
template <class Real>
HWY_INLINE void stream(Real factor, const Real* HWY_RESTRICT from, Real* HWY_RESTRICT to, int64_t n) {
  const hn::ScalableTag<Real> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto times = hn::Set(d, factor);
  int64_t j = 0;
  if (reinterpret_cast<uintptr_t>(to) % (sizeof(Real) * hn::Lanes(d)) == 0) {
    for (; j + lanes <= n; j += lanes) hn::Stream(hn::Mul(times, hn::LoadU(d, from + j)), d, to + j);
  }
  for (; j < n; ++j) to[j] = factor * from[j];
}

// ---------------------------------------------------------------- transcendental functions

// Highway's Exp maps NaN to 0, which would turn a NaN gate into a closed one.
template <class D, class V>
HWY_INLINE V exp_keeping_nan(D d, V x) {
  return hn::IfThenElse(hn::IsNaN(x), x, hn::Exp(d, x));
}

// Calls op(vector) on x in place; the tail goes through a padded copy.
template <class Real, class Op>
HWY_INLINE void transform(Real* x, int64_t n, const Op& op) {
  const hn::ScalableTag<Real> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t j = 0;
  for (; j + lanes <= n; j += lanes) hn::StoreU(op(d, hn::LoadU(d, x + j)), d, x + j);
  if (j == n) return;
  HWY_ALIGN Real tail[HWY_MAX_BYTES / sizeof(Real)] = {};
  for (int64_t r = j; r < n; ++r) tail[r - j] = x[r];
  hn::Store(op(d, hn::Load(d, tail)), d, tail);
  for (int64_t r = j; r < n; ++r) x[r] = tail[r - j];
}

HWY_ATTR void soft_cap(double cap, double* x, int64_t n) {
  transform(x, n, [cap](auto d, auto value) HWY_ATTR {
    const auto bound = hn::Set(d, cap);
    const auto ratio = hn::Div(value, bound);
    return hn::IfThenElse(hn::IsNaN(value), value, hn::Mul(bound, hn::Tanh(d, ratio)));
  });
}

// log sigmoid(x) = min(x, 0) - log1p(exp(-|x|))
HWY_ATTR void log_sigmoid(double* x, int64_t n) {
  transform(x, n, [](auto d, auto value) HWY_ATTR {
    const auto decay = hn::Exp(d, hn::Neg(hn::Abs(value)));
    const auto result = hn::Sub(hn::Min(value, hn::Zero(d)), hn::Log1p(d, decay));
    return hn::IfThenElse(hn::IsNaN(value), value, result);
  });
}

HWY_ATTR void log(double* x, int64_t n) {
  transform(x, n,
            [](auto d, auto value) HWY_ATTR { return hn::IfThenElse(hn::IsNaN(value), value, hn::Log(d, value)); });
}

template <class D, class V>
HWY_INLINE V sigmoid(D d, V x) {
  const auto decay = exp_keeping_nan(d, hn::Neg(hn::Abs(x)));
  const auto one = hn::Set(d, hn::TFromD<D>{1});
  return hn::Div(hn::IfThenElse(hn::Lt(x, hn::Zero(d)), decay, one), hn::Add(one, decay));
}

template <class Real>
HWY_INLINE void silu(Real* x, int64_t n) {
  transform(x, n, [](auto d, auto value) HWY_ATTR { return hn::Mul(value, sigmoid(d, value)); });
}

// silu'(z) = s (1 + z (1 - s)) with s = sigmoid(z).
template <class Real>
HWY_INLINE void silu_gradient(const Real* HWY_RESTRICT z, const Real* HWY_RESTRICT u, const Real* HWY_RESTRICT dy,
                              Real* HWY_RESTRICT dz, int64_t n) {
  for (int64_t j = 0; j < n; ++j) dz[j] = z[j];
  transform(dz, n, [](auto d, auto value) HWY_ATTR {
    const auto s = sigmoid(d, value), one = hn::Set(d, hn::TFromD<decltype(d)>{1});
    return hn::Mul(s, hn::MulAdd(value, hn::Sub(one, s), one));
  });
  for (int64_t j = 0; j < n; ++j) dz[j] *= u[j] * dy[j];
}

template <class Real>
HWY_INLINE void exp_shifted(Real scale, double shift, const double* x, Real* out, int64_t n) {
  for (int64_t j = 0; j < n; ++j) out[j] = static_cast<Real>(shift + x[j]);
  transform(out, n,
            [scale](auto d, auto value) HWY_ATTR { return hn::Mul(hn::Set(d, scale), exp_keeping_nan(d, value)); });
}

// ---------------------------------------------------------------- elementwise loops and reductions

template <class Real>
HWY_INLINE void scale(Real factor, const Real* x, Real* out, int64_t n) {
  for (int64_t j = 0; j < n; ++j) out[j] = factor * x[j];
}

template <class Real>
HWY_INLINE void add(Real factor, const Real* HWY_RESTRICT x, Real* HWY_RESTRICT out, int64_t n) {
  for (int64_t j = 0; j < n; ++j) out[j] += factor * x[j];
}

template <class Real>
HWY_INLINE double dot(const Real* x, const Real* y, int64_t n) {
  const hn::ScalableTag<Real> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  auto even = hn::Zero(d);
  auto odd = hn::Zero(d);
  int64_t j = 0;
  for (; j + 2 * lanes <= n; j += 2 * lanes) {
    even = hn::MulAdd(hn::LoadU(d, x + j), hn::LoadU(d, y + j), even);
    odd = hn::MulAdd(hn::LoadU(d, x + j + lanes), hn::LoadU(d, y + j + lanes), odd);
  }
  auto sum = static_cast<double>(hn::GetLane(hn::SumOfLanes(d, hn::Add(even, odd))));
  for (; j < n; ++j) sum += static_cast<double>(x[j]) * static_cast<double>(y[j]);
  return sum;
}

// `more` may be null.
template <class Real>
HWY_INLINE double weigh(Real factor, const Real* HWY_RESTRICT weights, const Real* HWY_RESTRICT more,
                        Real* HWY_RESTRICT x, int64_t n) {
  const hn::ScalableTag<Real> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto times = hn::Set(d, factor);
  auto sums = hn::Zero(d);
  int64_t j = 0;
  for (; j + lanes <= n; j += lanes) {
    auto value = hn::LoadU(d, x + j);
    if (more != nullptr) value = hn::Add(value, hn::LoadU(d, more + j));
    sums = hn::MulAdd(hn::LoadU(d, weights + j), value, sums);
    hn::StoreU(hn::Mul(times, value), d, x + j);
  }
  auto sum = static_cast<double>(hn::GetLane(hn::SumOfLanes(d, sums)));
  for (; j < n; ++j) {
    const Real value = more != nullptr ? x[j] + more[j] : x[j];
    sum += static_cast<double>(weights[j]) * static_cast<double>(value);
    x[j] = factor * value;
  }
  return sum;
}

template <class Real>
HWY_INLINE void multiply(const Real* HWY_RESTRICT x, Real* HWY_RESTRICT out, int64_t n) {
  for (int64_t j = 0; j < n; ++j) out[j] *= x[j];
}

template <class Real>
HWY_INLINE void add_product(const Real* HWY_RESTRICT x, const Real* HWY_RESTRICT y, Real* HWY_RESTRICT out, int64_t n) {
  for (int64_t j = 0; j < n; ++j) out[j] += x[j] * y[j];
}

// The sum of term(j) for j in [0, n): eight independent sums, so that the compiler may keep them in vectors.
template <class Term>
HWY_INLINE double sum_of(int64_t n, const Term& term) {
  constexpr int64_t ways = 8;
  double sums[ways] = {};
  int64_t j = 0;
  for (; j + ways <= n; j += ways) {
    for (int64_t w = 0; w < ways; ++w) sums[w] += term(j + w);
  }
  double sum = ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
  for (; j < n; ++j) sum += term(j);
  return sum;
}

template <class Real>
HWY_INLINE double add_products(const Real* HWY_RESTRICT x, const Real* HWY_RESTRICT y, double* HWY_RESTRICT columns,
                               int64_t n) {
  return sum_of(n, [=](int64_t j) HWY_ATTR {
    const double value = static_cast<double>(x[j]) * static_cast<double>(y[j]);
    columns[j] += value;
    return value;
  });
}

// `lanes` numbers of either type as doubles.
template <class D>
HWY_INLINE hn::Vec<D> load_as_double(D d, const float* from) {
  return hn::PromoteTo(d, hn::LoadU(hn::Rebind<float, D>(), from));
}
template <class D>
HWY_INLINE hn::Vec<D> load_as_double(D d, const double* from) {
  return hn::LoadU(d, from);
}

// Each token's sum is taken in the same order however many tokens come at once.
template <int Tokens, class Real>
HWY_INLINE void step_vectors(const double* decay, const double* weight, const Real* const* k, const Real* const* q,
                             double* HWY_RESTRICT n, int64_t count, double* sums) {
  const hn::ScalableTag<double> d;
  using Vector = hn::Vec<decltype(d)>;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  Vector even[Tokens];
  Vector odd[Tokens];
  HWY_UNROLL(4)
  for (int t = 0; t < Tokens; ++t) even[t] = odd[t] = hn::Zero(d);
  const auto update = [&](int64_t j, Vector* part) HWY_ATTR {
    Vector value = hn::LoadU(d, n + j);
    HWY_UNROLL(4)
    for (int t = 0; t < Tokens; ++t) {
      const Vector kept = hn::Mul(hn::Set(d, decay[t]), value);
      value = hn::MulAdd(hn::Set(d, weight[t]), load_as_double(d, k[t] + j), kept);
      part[t] = hn::MulAdd(load_as_double(d, q[t] + j), value, part[t]);
    }
    hn::StoreU(value, d, n + j);
  };
  int64_t j = 0;
  for (; j + 2 * lanes <= count; j += 2 * lanes) {
    update(j, even);
    update(j + lanes, odd);
  }
  HWY_UNROLL(4)
  for (int t = 0; t < Tokens; ++t) sums[t] = hn::GetLane(hn::SumOfLanes(d, hn::Add(even[t], odd[t])));
  for (; j < count; ++j) {
    for (int t = 0; t < Tokens; ++t) {
      n[j] = decay[t] * n[j] + weight[t] * static_cast<double>(k[t][j]);
      sums[t] += static_cast<double>(q[t][j]) * n[j];
    }
  }
}

template <class Real>
HWY_INLINE void step_vector(int64_t tokens, const double* decay, const double* weight, const Real* const* k,
                            const Real* const* q, double* n, int64_t count, double* sums) {
  constexpr int block = 4;
  int64_t t = 0;
  for (; t + block <= tokens; t += block) {
    step_vectors<block>(decay + t, weight + t, k + t, q + t, n, count, sums + t);
  }
  for (; t < tokens; ++t) step_vectors<1>(decay + t, weight + t, k + t, q + t, n, count, sums + t);
}

// ---------------------------------------------------------------- step

template <class D, class Real, class V = hn::Vec<D>>
HWY_INLINE V decayed(D d, const Decay<Real>& decay, V x, V added) {
  return hn::MulAdd(hn::Set(d, decay.whole), x, hn::MulAdd(hn::Set(d, decay.rest), x, added));
}

// `Rows` rows of C at a time: v and h are then read once per block and stay in the first-level cache.
template <int Rows, class Real>
HWY_INLINE void step_rows(Decay<Real> decay, const Real* HWY_RESTRICT input, const Real* HWY_RESTRICT q,
                          const Real* HWY_RESTRICT v, Real* HWY_RESTRICT C, int64_t stride, Real* HWY_RESTRICT h,
                          int64_t cols) {
  const hn::ScalableTag<Real> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t j = 0;
  for (; j + lanes <= cols; j += lanes) {
    const auto value = hn::LoadU(d, v + j);
    auto out = hn::LoadU(d, h + j);
    for (int r = 0; r < Rows; ++r) {
      Real* row = C + r * stride + j;
      const auto updated = decayed(d, decay, hn::LoadU(d, row), hn::Mul(hn::Set(d, input[r]), value));
      hn::StoreU(updated, d, row);
      out = hn::MulAdd(hn::Set(d, q[r]), updated, out);
    }
    hn::StoreU(out, d, h + j);
  }
  if (j == cols) return;
  // The same operations on one lane, so that an element does not depend on where its panel ends.
  const hn::CappedTag<Real, 1> one;
  for (; j < cols; ++j) {
    const auto value = hn::LoadU(one, v + j);
    auto out = hn::LoadU(one, h + j);
    for (int r = 0; r < Rows; ++r) {
      Real* row = C + r * stride + j;
      const auto updated = decayed(one, decay, hn::LoadU(one, row), hn::Mul(hn::Set(one, input[r]), value));
      hn::StoreU(updated, one, row);
      out = hn::MulAdd(hn::Set(one, q[r]), updated, out);
    }
    hn::StoreU(out, one, h + j);
  }
}

template <class Real>
HWY_INLINE void step_panel(Decay<Real> decay, const Real* input, const Real* q, const Real* v, Real* C, int64_t stride,
                           Real* h, int64_t rows, int64_t cols) {
  constexpr int block = 4;
  for (int64_t j = 0; j < cols; ++j) h[j] = 0;
  int64_t r = 0;
  for (; r + block <= rows; r += block) step_rows<block>(decay, input + r, q + r, v, C + r * stride, stride, h, cols);
  for (; r < rows; ++r) step_rows<1>(decay, input + r, q + r, v, C + r * stride, stride, h, cols);
}

template <class Real>
HWY_INLINE Real step_row(Decay<Real> decay, Real weight, const Real* HWY_RESTRICT k, const Real* HWY_RESTRICT q,
                         Real* HWY_RESTRICT S, int64_t n) {
  const hn::ScalableTag<Real> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  auto even = hn::Zero(d), odd = hn::Zero(d);
  const auto update = [&](auto tag, int64_t j, auto sum) HWY_ATTR {
    const auto added = hn::Mul(hn::Set(tag, weight), hn::LoadU(tag, k + j));
    const auto updated = decayed(tag, decay, hn::LoadU(tag, S + j), added);
    hn::StoreU(updated, tag, S + j);
    return hn::MulAdd(hn::LoadU(tag, q + j), updated, sum);
  };
  int64_t j = 0;
  for (; j + 2 * lanes <= n; j += 2 * lanes) {
    even = update(d, j, even);
    odd = update(d, j + lanes, odd);
  }
  const hn::CappedTag<Real, 1> one;
  auto rest = hn::Zero(one);
  for (; j < n; ++j) rest = update(one, j, rest);
  return hn::GetLane(hn::SumOfLanes(d, hn::Add(even, odd))) + hn::GetLane(rest);
}

template <int Rows, class Real>
HWY_INLINE void add_rows(const Real* HWY_RESTRICT weights, const Real* HWY_RESTRICT C, int64_t stride,
                         Real* HWY_RESTRICT out, int64_t cols) {
  const auto columns = [&](auto d, int64_t j) HWY_ATTR {
    auto sum = hn::LoadU(d, out + j);
    for (int r = 0; r < Rows; ++r) sum = hn::MulAdd(hn::Set(d, weights[r]), hn::LoadU(d, C + r * stride + j), sum);
    hn::StoreU(sum, d, out + j);
  };
  const hn::ScalableTag<Real> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t j = 0;
  for (; j + lanes <= cols; j += lanes) columns(d, j);
  for (; j < cols; ++j) columns(hn::CappedTag<Real, 1>(), j);
}

template <class Real>
HWY_INLINE void weighted_rows(const Real* weights, const Real* C, int64_t stride, Real* out, int64_t rows,
                              int64_t cols) {
  constexpr int block = 8;
  for (int64_t j = 0; j < cols; ++j) out[j] = 0;
  int64_t r = 0;
  for (; r + block <= rows; r += block) add_rows<block>(weights + r, C + r * stride, stride, out, cols);
  for (; r < rows; ++r) add_rows<1>(weights + r, C + r * stride, stride, out, cols);
}

// ---------------------------------------------------------------- one entry per type, for the dispatch table

#define TFLA_SIMD_ENTRIES(Real, suffix)                                                                               \
  HWY_ATTR void exp_shifted_##suffix(Real factor, double shift, const double* x, Real* out, int64_t n) {              \
    exp_shifted(factor, shift, x, out, n);                                                                            \
  }                                                                                                                   \
  HWY_ATTR void scale_##suffix(Real factor, const Real* x, Real* out, int64_t n) { scale(factor, x, out, n); }        \
  HWY_ATTR void stream_##suffix(Real factor, const Real* x, Real* out, int64_t n) { stream(factor, x, out, n); }      \
  HWY_ATTR void add_##suffix(Real factor, const Real* x, Real* out, int64_t n) { add(factor, x, out, n); }            \
  HWY_ATTR double dot_##suffix(const Real* x, const Real* y, int64_t n) { return dot(x, y, n); }                      \
  HWY_ATTR double weigh_##suffix(Real factor, const Real* weights, const Real* more, Real* x, int64_t n) {            \
    return weigh(factor, weights, more, x, n);                                                                        \
  }                                                                                                                   \
  HWY_ATTR void multiply_##suffix(const Real* x, Real* out, int64_t n) { multiply(x, out, n); }                       \
  HWY_ATTR void add_product_##suffix(const Real* x, const Real* y, Real* out, int64_t n) {                            \
    add_product(x, y, out, n);                                                                                        \
  }                                                                                                                   \
  HWY_ATTR void silu_##suffix(Real* x, int64_t n) { silu(x, n); }                                                     \
  HWY_ATTR void silu_gradient_##suffix(const Real* z, const Real* u, const Real* dy, Real* dz, int64_t n) {           \
    silu_gradient(z, u, dy, dz, n);                                                                                   \
  }                                                                                                                   \
  HWY_ATTR Real step_row_##suffix(Decay<Real> decay, Real weight, const Real* k, const Real* q, Real* S, int64_t n) { \
    return step_row(decay, weight, k, q, S, n);                                                                       \
  }                                                                                                                   \
  HWY_ATTR double add_products_##suffix(const Real* x, const Real* y, double* columns, int64_t n) {                   \
    return add_products(x, y, columns, n);                                                                            \
  }                                                                                                                   \
  HWY_ATTR void step_vector_##suffix(int64_t tokens, const double* decay, const double* weight, const Real* const* k, \
                                     const Real* const* q, double* n, int64_t count, double* sums) {                  \
    step_vector(tokens, decay, weight, k, q, n, count, sums);                                                         \
  }                                                                                                                   \
  HWY_ATTR void step_panel_##suffix(Decay<Real> decay, const Real* input, const Real* q, const Real* v, Real* C,      \
                                    int64_t stride, Real* h, int64_t rows, int64_t cols) {                            \
    step_panel(decay, input, q, v, C, stride, h, rows, cols);                                                         \
  }                                                                                                                   \
  HWY_ATTR void weighted_rows_##suffix(const Real* weights, const Real* C, int64_t stride, Real* out, int64_t rows,   \
                                       int64_t cols) {                                                                \
    weighted_rows(weights, C, stride, out, rows, cols);                                                               \
  }
TFLA_SIMD_ENTRIES(float, f32)
TFLA_SIMD_ENTRIES(double, f64)
#undef TFLA_SIMD_ENTRIES

HWY_ATTR const char* target() { return hwy::TargetName(HWY_TARGET); }

}  // namespace HWY_NAMESPACE
}  // namespace tfla::cpu::simd
HWY_AFTER_NAMESPACE();

#endif  // include guard
