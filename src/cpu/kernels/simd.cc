#include "cpu/kernels/simd.h"

#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/kernels/simd-inl.h"
#include <hwy/foreach_target.h>
// After foreach_target, by Highway's rule.
#include "cpu/kernels/simd-inl.h"

#if HWY_ONCE
namespace tfla::cpu::simd {

HWY_EXPORT(load_bf16);
HWY_EXPORT(load_f16);
HWY_EXPORT(store_bf16);
HWY_EXPORT(store_f16);
HWY_EXPORT(soft_cap);
HWY_EXPORT(log);
HWY_EXPORT(log_sigmoid);
HWY_EXPORT(target);

void load(const void* from, DType dtype, float* to, std::int64_t n) {
  if (n == 0) return;
  if (dtype == DType::bfloat16) {
    HWY_DYNAMIC_DISPATCH(load_bf16)(static_cast<const std::uint16_t*>(from), to, n);
  } else if (dtype == DType::float16) {
    HWY_DYNAMIC_DISPATCH(load_f16)(static_cast<const std::uint16_t*>(from), to, n);
  } else {
    std::memcpy(to, from, static_cast<std::size_t>(n) * sizeof(float));
  }
}

void load(const void* from, DType /*float64*/, double* to, std::int64_t n) {
  if (n > 0) std::memcpy(to, from, static_cast<std::size_t>(n) * sizeof(double));
}

void store(float factor, const float* from, void* to, DType dtype, std::int64_t n) {
  if (dtype == DType::bfloat16) {
    HWY_DYNAMIC_DISPATCH(store_bf16)(factor, from, static_cast<std::uint16_t*>(to), n);
  } else if (dtype == DType::float16) {
    HWY_DYNAMIC_DISPATCH(store_f16)(factor, from, static_cast<std::uint16_t*>(to), n);
  } else {
    scale(factor, from, static_cast<float*>(to), n);
  }
}

void store(double factor, const double* from, void* to, DType /*float64*/, std::int64_t n) {
  scale(factor, from, static_cast<double*>(to), n);
}

void soft_cap(double cap, double* x, std::int64_t n) { HWY_DYNAMIC_DISPATCH(soft_cap)(cap, x, n); }
void log(double* x, std::int64_t n) { HWY_DYNAMIC_DISPATCH(log)(x, n); }
void log_sigmoid(double* x, std::int64_t n) { HWY_DYNAMIC_DISPATCH(log_sigmoid)(x, n); }
const char* target_name() { return HWY_DYNAMIC_DISPATCH(target)(); }

#define TFLA_SIMD_DISPATCH(Real, suffix)                                                                            \
  HWY_EXPORT(exp_shifted_##suffix);                                                                                 \
  HWY_EXPORT(scale_##suffix);                                                                                       \
  HWY_EXPORT(stream_##suffix);                                                                                      \
  HWY_EXPORT(add_##suffix);                                                                                         \
  HWY_EXPORT(dot_##suffix);                                                                                         \
  HWY_EXPORT(weigh_##suffix);                                                                                       \
  HWY_EXPORT(multiply_##suffix);                                                                                    \
  HWY_EXPORT(add_product_##suffix);                                                                                 \
  HWY_EXPORT(silu_##suffix);                                                                                        \
  HWY_EXPORT(silu_gradient_##suffix);                                                                               \
  HWY_EXPORT(step_row_##suffix);                                                                                    \
  HWY_EXPORT(add_products_##suffix);                                                                                \
  HWY_EXPORT(step_vector_##suffix);                                                                                 \
  HWY_EXPORT(step_panel_##suffix);                                                                                  \
  HWY_EXPORT(weighted_rows_##suffix);                                                                               \
  void exp_shifted(Real factor, double shift, const double* x, Real* out, std::int64_t n) {                         \
    HWY_DYNAMIC_DISPATCH(exp_shifted_##suffix)(factor, shift, x, out, n);                                           \
  }                                                                                                                 \
  void scale(Real factor, const Real* x, Real* out, std::int64_t n) {                                               \
    HWY_DYNAMIC_DISPATCH(scale_##suffix)(factor, x, out, n);                                                        \
  }                                                                                                                 \
  void stream(Real factor, const Real* x, Real* out, std::int64_t n) {                                              \
    HWY_DYNAMIC_DISPATCH(stream_##suffix)(factor, x, out, n);                                                       \
  }                                                                                                                 \
  void add(Real factor, const Real* x, Real* out, std::int64_t n) {                                                 \
    HWY_DYNAMIC_DISPATCH(add_##suffix)(factor, x, out, n);                                                          \
  }                                                                                                                 \
  double dot(const Real* x, const Real* y, std::int64_t n) { return HWY_DYNAMIC_DISPATCH(dot_##suffix)(x, y, n); }  \
  double weigh(Real factor, const Real* weights, const Real* more, Real* x, std::int64_t n) {                       \
    return HWY_DYNAMIC_DISPATCH(weigh_##suffix)(factor, weights, more, x, n);                                       \
  }                                                                                                                 \
  void multiply(const Real* x, Real* out, std::int64_t n) { HWY_DYNAMIC_DISPATCH(multiply_##suffix)(x, out, n); }   \
  void add_product(const Real* x, const Real* y, Real* out, std::int64_t n) {                                       \
    HWY_DYNAMIC_DISPATCH(add_product_##suffix)(x, y, out, n);                                                       \
  }                                                                                                                 \
  void silu(Real* x, std::int64_t n) { HWY_DYNAMIC_DISPATCH(silu_##suffix)(x, n); }                                 \
  void silu_gradient(const Real* z, const Real* u, const Real* dy, Real* dz, std::int64_t n) {                      \
    HWY_DYNAMIC_DISPATCH(silu_gradient_##suffix)(z, u, dy, dz, n);                                                  \
  }                                                                                                                 \
  Real step_row(Decay<Real> decay, Real weight, const Real* k, const Real* q, Real* S, std::int64_t n) {            \
    return HWY_DYNAMIC_DISPATCH(step_row_##suffix)(decay, weight, k, q, S, n);                                      \
  }                                                                                                                 \
  double add_products(const Real* x, const Real* y, double* columns, std::int64_t n) {                              \
    return HWY_DYNAMIC_DISPATCH(add_products_##suffix)(x, y, columns, n);                                           \
  }                                                                                                                 \
  void step_vector(std::int64_t tokens, const double* decay, const double* weight, const Real* const* k,            \
                   const Real* const* q, double* n, std::int64_t count, double* sums) {                             \
    HWY_DYNAMIC_DISPATCH(step_vector_##suffix)(tokens, decay, weight, k, q, n, count, sums);                        \
  }                                                                                                                 \
  void step_panel(Decay<Real> decay, const Real* input, const Real* q, const Real* v, Real* C, std::int64_t stride, \
                  Real* h, std::int64_t rows, std::int64_t cols) {                                                  \
    HWY_DYNAMIC_DISPATCH(step_panel_##suffix)(decay, input, q, v, C, stride, h, rows, cols);                        \
  }                                                                                                                 \
  void weighted_rows(const Real* weights, const Real* C, std::int64_t stride, Real* out, std::int64_t rows,         \
                     std::int64_t cols) {                                                                           \
    HWY_DYNAMIC_DISPATCH(weighted_rows_##suffix)(weights, C, stride, out, rows, cols);                              \
  }
TFLA_SIMD_DISPATCH(float, f32)
TFLA_SIMD_DISPATCH(double, f64)
#undef TFLA_SIMD_DISPATCH

}  // namespace tfla::cpu::simd
#endif  // HWY_ONCE
