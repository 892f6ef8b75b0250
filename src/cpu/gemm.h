// A product by the matrix library: the yardstick for the kernels of product.h. The only place that knows a BLAS exists.
#pragma once

#include "cpu/product.h"

namespace tfla::cpu {

// out = a b, on the calling thread.
void library_product(const Matrix<float>& out, const Matrix<const float>& a, const Matrix<const float>& b);

// Name and version of the matrix library, for reports.
[[nodiscard]] const char* blas_name();

}  // namespace tfla::cpu
