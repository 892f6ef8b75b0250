// The matrix library that `bench --gemm` compares with. It is no part of tfla: only this program knows of it, and a
// build where it was not found does without (blas_unavailable.cc).
#pragma once

#include <string>

namespace tfla::cli {

// Throws Unavailable where this build has none, as the other functions do then.
void check_blas();

// Name and version, for reports.
[[nodiscard]] std::string blas_name();

// out = a b of size x size matrices, row by row in memory, on the calling thread.
void blas_product(int size, const float* a, const float* b, float* out);

}  // namespace tfla::cli
