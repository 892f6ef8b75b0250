// Vector loops with run-time dispatch to the best instruction set of this machine (Google Highway).
// Each function works on one row or vector; n = 0 is fine everywhere.
#pragma once

#include <cstdint>

#include "core/decay.h"
#include "tfla/tensor_view.h"

namespace tfla::cpu::simd {

// Rows in any storage type to and from the arithmetic type. Narrowing rounds to nearest, ties to even.
void load(const void* from, DType dtype, float* to, std::int64_t n);
void load(const void* from, DType dtype, double* to, std::int64_t n);
void store(float scale, const float* from, void* to, DType dtype, std::int64_t n);  // to = scale * from
void store(double scale, const double* from, void* to, DType dtype, std::int64_t n);

// Gates, always in double: their cumulative sums reach the hundreds, and float32 would lose five digits of exp.
void soft_cap(double cap, double* x, std::int64_t n);  // x = cap tanh(x / cap)
void log_sigmoid(double* x, std::int64_t n);           // x = log sigmoid(x)
void log(double* x, std::int64_t n);                   // x = log x of normal numbers

// out_j = scale exp(shift + x_j); the sum is taken in double, so only its result is rounded. In place is fine.
void exp_shifted(float scale, double shift, const double* x, float* out, std::int64_t n);
void exp_shifted(double scale, double shift, const double* x, double* out, std::int64_t n);

void scale(float factor, const float* x, float* out, std::int64_t n);  // out = factor x
void scale(double factor, const double* x, double* out, std::int64_t n);
// The same for results: past the cache where out begins at a whole vector, so that no line is fetched to be
// overwritten. Other threads see them after hwy::FlushStream (threads.h).
void stream(float factor, const float* x, float* out, std::int64_t n);
void stream(double factor, const double* x, double* out, std::int64_t n);
void add(float factor, const float* x, float* out, std::int64_t n);  // out += factor x
void add(double factor, const double* x, double* out, std::int64_t n);
double dot(const float* x, const float* y, std::int64_t n);
double dot(const double* x, const double* y, std::int64_t n);
// x = factor (x + more), a null `more` being zero; returns the sum of weights_j (x + more)_j.
double weigh(float factor, const float* weights, const float* more, float* x, std::int64_t n);
double weigh(double factor, const double* weights, const double* more, double* x, std::int64_t n);
void multiply(const float* x, float* out, std::int64_t n);  // out *= x elementwise
void multiply(const double* x, double* out, std::int64_t n);

void add_product(const float* x, const float* y, float* out, std::int64_t n);  // out += x y elementwise
void add_product(const double* x, const double* y, double* out, std::int64_t n);

// An output gate: x = silu(x), and the gradient of silu(z) u by z, where dy is that of the product.
void silu(float* x, std::int64_t n);
void silu(double* x, std::int64_t n);
void silu_gradient(const float* z, const float* u, const float* dy, float* dz, std::int64_t n);
void silu_gradient(const double* z, const double* u, const double* dy, double* dz, std::int64_t n);

// columns_j += x_j y_j and returns the sum of the x_j y_j, both in double.
double add_products(const float* x, const float* y, double* columns, std::int64_t n);
double add_products(const double* x, const double* y, double* columns, std::int64_t n);

// Consecutive tokens t of the normalizer state in double: n = decay_t n + weight_t k_t, sums_t = q_t.n.
void step_vector(std::int64_t tokens, const double* decay, const double* weight, const float* const* k,
                 const float* const* q, double* n, std::int64_t count, double* sums);
void step_vector(std::int64_t tokens, const double* decay, const double* weight, const double* const* k,
                 const double* const* q, double* n, std::int64_t count, double* sums);

// One token on a panel of the state, in place, and its part of the output:
//   C_r = decay C_r + input_r v     h = sum_r q_r C_r      C_r: row r of the panel, `stride` elements apart
void step_panel(Decay<float> decay, const float* input, const float* q, const float* v, float* C, std::int64_t stride,
                float* h, std::int64_t rows, std::int64_t cols);
void step_panel(Decay<double> decay, const double* input, const double* q, const double* v, double* C,
                std::int64_t stride, double* h, std::int64_t rows, std::int64_t cols);

// One token on a row of a state that has keys for columns, in place: S = decay S + weight k. Returns S.q.
float step_row(Decay<float> decay, float weight, const float* k, const float* q, float* S, std::int64_t n);
double step_row(Decay<double> decay, double weight, const double* k, const double* q, double* S, std::int64_t n);

// out = sum_r weights_r C_r, for the rows of a panel.
void weighted_rows(const float* weights, const float* C, std::int64_t stride, float* out, std::int64_t rows,
                   std::int64_t cols);
void weighted_rows(const double* weights, const double* C, std::int64_t stride, double* out, std::int64_t rows,
                   std::int64_t cols);

// The instruction set in use, for reports.
[[nodiscard]] const char* target_name();

}  // namespace tfla::cpu::simd
