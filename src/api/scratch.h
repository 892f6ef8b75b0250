// Scratch of a call: the caller's, or its own.
#pragma once

#include <fmt/format.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/checks.h"
#include "plan/backend.h"
#include "tfla/tfla.h"

namespace tfla {

inline void check_scratch(std::size_t needed, std::span<std::byte> scratch) {
  if (scratch.size() < needed) {
    refuse(fmt::format("tfla: scratch has {} bytes; the plan needs {}", scratch.size(), needed));
  }
  if (reinterpret_cast<std::uintptr_t>(scratch.data()) % scratch_alignment != 0) {
    refuse(fmt::format("tfla: scratch is not aligned to {} bytes", scratch_alignment));
  }
}

// Scratch of a call that allocates its own, on its device.
class OwnScratch {
 public:
  OwnScratch(Device device, std::size_t bytes, void* stream) : backend_(backend(device)), stream_(stream) {
    if (bytes > 0) memory_ = backend_.allocate(bytes, stream);
  }
  ~OwnScratch() {
    if (memory_ != nullptr) backend_.release(memory_, stream_);
  }
  OwnScratch(const OwnScratch&) = delete;
  OwnScratch& operator=(const OwnScratch&) = delete;

  [[nodiscard]] std::byte* data() const { return memory_; }

 private:
  const Backend& backend_;
  void* stream_;
  std::byte* memory_ = nullptr;
};

}  // namespace tfla
