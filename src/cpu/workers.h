// The work space of every thread, side by side in scratch.
#pragma once

#include "core/arena.h"

namespace tfla::cpu {

// Worker: a struct of pointers that carves its arrays from an arena.
template <class Worker>
class Workers {
 public:
  Workers() = default;
  Workers(Arena& arena, const Plan& plan) {
    Arena counter;
    const Worker measured(counter, plan);
    size_ = static_cast<std::int64_t>(counter.used());
    memory_ = arena.take<std::byte>(plan.threads * size_);
  }

  [[nodiscard]] Worker at(const Plan& plan, int index) const {
    Arena arena(memory_ + index * size_);
    return Worker(arena, plan);
  }

 private:
  std::byte* memory_ = nullptr;
  std::int64_t size_ = 0;
};

}  // namespace tfla::cpu
