#include "cpu/kernels/product.h"

// Blocks of vectors in arrays need vectors of a size known to the compiler.
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/kernels/product-inl.h"
#include <hwy/foreach_target.h>
// After foreach_target, by Highway's rule.
#include "cpu/kernels/product-inl.h"

#if HWY_ONCE
namespace tfla::cpu {

HWY_EXPORT(multiply_f32);
HWY_EXPORT(multiply_f64);

void multiply(const Product<float>& product) { HWY_DYNAMIC_DISPATCH(multiply_f32)(product); }
void multiply(const Product<double>& product) { HWY_DYNAMIC_DISPATCH(multiply_f64)(product); }

}  // namespace tfla::cpu
#endif  // HWY_ONCE
