// Division by a number that only the host knows, in three instructions and without registers of its own: the compiler
// would keep the reciprocals of a division in registers over the whole kernel.
#pragma once

#include <bit>
#include <cstdint>

namespace tfla::cuda::sm90 {

class Divider {
 public:
  // For 1 <= divisor, and numbers below 2^31.
  explicit Divider(std::uint32_t divisor)
      : factor_(static_cast<std::uint32_t>(((std::uint64_t{1} << 31 << std::bit_width(divisor - 1)) + divisor - 1) /
                                           divisor)),
        shift_(static_cast<std::uint32_t>(std::bit_width(divisor - 1))) {}

  __device__ __forceinline__ std::uint32_t quotient(std::uint32_t number) const {
    return __umulhi(2 * number, factor_) >> shift_;
  }

 private:
  std::uint32_t factor_, shift_;  // factor_ = 2^(31 + shift_) / divisor, rounded up
};

}  // namespace tfla::cuda::sm90
