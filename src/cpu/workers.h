// The work space of every thread, side by side in scratch.
#pragma once

#include "core/arena.h"

namespace tfla::cpu {

// Worker: a struct of pointers that carves its arrays from an arena, as the plan of its operator says.
template <class Worker>
class Workers {
 public:
  Workers() = default;
  template <class AnyPlan>
  Workers(Arena& arena, const AnyPlan& plan) {
    Arena counter;
    const Worker measured(counter, plan);
    size_ = static_cast<std::int64_t>(counter.used());
    memory_ = arena.take<std::byte>(plan.threads * size_);
  }

  template <class AnyPlan>
  [[nodiscard]] Worker at(const AnyPlan& plan, int index) const {
    Arena arena(memory_ + index * size_);
    return Worker(arena, plan);
  }

 private:
  std::byte* memory_ = nullptr;
  std::int64_t size_ = 0;
};

}  // namespace tfla::cpu
