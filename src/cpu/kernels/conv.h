// Kernels of the causal convolution, with run-time dispatch (Google Highway).
//
// They work on tiles of two axes, of which the inner one lies side by side in memory: channels of one token after the
// other, or tokens of one channel after the other ("along tokens"). Channels have weights of their own, so that these
// are vectors in the first case and numbers in the second.
#pragma once

#include <cstdint>

namespace tfla::cpu {

// out(o,j) = bias + sum_k weight_k x(o,j,k), where x(o,j,k) is x[o x_outer + k x_tap + j], and then the activation.
template <class Real>
struct Correlation {
  const Real* x;
  std::int64_t x_outer, x_tap;
  const Real* weight;  // weight_k of channel c is weight[k weight_tap + c]
  std::int64_t weight_tap;
  const Real* bias;  // may be null
  Real* out;
  std::int64_t out_outer;
  std::int64_t outer, inner, width;
  bool along_tokens;
};

void correlate(const Correlation<float>& work, bool silu);
void correlate(const Correlation<double>& work, bool silu);
// out(o,j) = dy(o,j) silu'(the sum), with dy(o,j) at dy[o dy_outer + j].
void correlate_slope(const Correlation<float>& work, const float* dy, std::int64_t dy_outer);
void correlate_slope(const Correlation<double>& work, const double* dy, std::int64_t dy_outer);

// sums_k of a channel += sum over its tokens of dz x(k), for k < width, and sums_width += sum of dz. A tile is summed
// up in Real; tiles are small.
template <class Real>
struct TapSums {
  const Real* x;
  std::int64_t x_outer, x_tap;
  const Real* dz;
  std::int64_t dz_outer;
  double* sums;  // sums_k of channel c is sums[k sums_tap + c]
  std::int64_t sums_tap;
  std::int64_t outer, inner, width;
  bool along_tokens;
};

void add_tap_sums(const TapSums<float>& work);
void add_tap_sums(const TapSums<double>& work);

}  // namespace tfla::cpu
