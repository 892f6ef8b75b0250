#include "cpu/kernels/conv.h"

// Sums in arrays of vectors need vectors of a size known to the compiler.
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/kernels/conv-inl.h"
#include <hwy/foreach_target.h>
// After foreach_target, by Highway's rule.
#include "cpu/kernels/conv-inl.h"

#if HWY_ONCE
namespace tfla::cpu {

#define TFLA_CONV_DISPATCH(Real, suffix)                                                                             \
  HWY_EXPORT(correlate_##suffix);                                                                                    \
  HWY_EXPORT(correlate_slope_##suffix);                                                                              \
  HWY_EXPORT(add_tap_sums_##suffix);                                                                                 \
  void correlate(const Correlation<Real>& work, bool silu) { HWY_DYNAMIC_DISPATCH(correlate_##suffix)(work, silu); } \
  void correlate_slope(const Correlation<Real>& work, const Real* dy, std::int64_t dy_outer) {                       \
    HWY_DYNAMIC_DISPATCH(correlate_slope_##suffix)(work, dy, dy_outer);                                              \
  }                                                                                                                  \
  void add_tap_sums(const TapSums<Real>& work) { HWY_DYNAMIC_DISPATCH(add_tap_sums_##suffix)(work); }
TFLA_CONV_DISPATCH(float, f32)
TFLA_CONV_DISPATCH(double, f64)
#undef TFLA_CONV_DISPATCH

}  // namespace tfla::cpu
#endif  // HWY_ONCE
