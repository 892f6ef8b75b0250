// Carves typed arrays out of one block of scratch. Run on a null base it only counts, so that the plan's scratch_bytes
// and the pointers a call uses come from the same lines of code.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tfla/tfla.h"

namespace tfla {

class Arena {
 public:
  explicit Arena(std::byte* base = nullptr) : base_(base) {}

  template <class T>
  [[nodiscard]] T* take(std::int64_t count) {
    const std::size_t offset = used_;
    const std::size_t bytes = static_cast<std::size_t>(count) * sizeof(T);
    used_ += (bytes + scratch_alignment - 1) / scratch_alignment * scratch_alignment;
    return base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + offset);
  }

  [[nodiscard]] std::size_t used() const { return used_; }

 private:
  std::byte* base_;
  std::size_t used_ = 0;
};

}  // namespace tfla
