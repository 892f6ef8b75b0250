#include <fmt/format.h>

#include <new>
#include <type_traits>

#include "core/checks.h"
#include "core/huge_pages.h"
#include "core/validate.h"
#include "cpu/run.h"
#include "cuda/run.h"
#include "tfla/tfla.h"

namespace tfla {

namespace {

void check_saved(const Plan& plan, std::span<const std::byte> saved) {
  if (saved.size() != plan.saved_bytes) {
    refuse(fmt::format("tfla: saved has {} bytes; the plan has {}{}", saved.size(), plan.saved_bytes,
                       plan.keeps_states ? "" : ", since options.keep_states and keep_rows are off"));
  }
  if (reinterpret_cast<std::uintptr_t>(saved.data()) % scratch_alignment != 0) {
    refuse(fmt::format("tfla: saved is not aligned to {} bytes", scratch_alignment));
  }
}

void check_plan(const Plan& plan, Operation operation, const MlstmShape& shape, const MlstmOptions& options,
                std::span<std::byte> scratch, std::span<const std::byte> saved = {}) {
  if (plan.operation != operation || plan.shape != shape || plan.options != options) {
    refuse("tfla: plan was made for another operation, shape or other options; plan these arguments again");
  }
  if (scratch.size() < plan.scratch_bytes) {
    refuse(fmt::format("tfla: scratch has {} bytes; the plan needs {}", scratch.size(), plan.scratch_bytes));
  }
  if (reinterpret_cast<std::uintptr_t>(scratch.data()) % scratch_alignment != 0) {
    refuse(fmt::format("tfla: scratch is not aligned to {} bytes", scratch_alignment));
  }
  check_saved(plan, saved);
}

// Scratch of a call that allocates its own, on the plan's device.
class OwnScratch {
 public:
  OwnScratch(const Plan& plan, void* stream) : cuda_(plan.device == Device::cuda), stream_(stream) {
    if (!cuda_) {
      memory_ = static_cast<std::byte*>(::operator new (plan.scratch_bytes, std::align_val_t{scratch_alignment}));
      ask_for_huge_pages(memory_, plan.scratch_bytes);
    } else if (plan.scratch_bytes > 0) {
      memory_ = cuda::allocate(plan.scratch_bytes, stream);
    }
  }
  ~OwnScratch() {
    if (!cuda_)
      ::operator delete (memory_, std::align_val_t{scratch_alignment});
    else if (memory_ != nullptr)
      cuda::release(memory_, stream_);
  }
  OwnScratch(const OwnScratch&) = delete;
  OwnScratch& operator=(const OwnScratch&) = delete;

  [[nodiscard]] std::byte* data() const { return memory_; }

 private:
  bool cuda_;
  void* stream_;
  std::byte* memory_ = nullptr;
};

void run(const MlstmForward& args, const Plan& plan, std::byte* scratch, void* stream) {
  if (plan.device == Device::cuda)
    cuda::forward(args, plan, scratch, stream);
  else
    cpu::forward(args, plan, scratch);
}

void run(const MlstmBackward& args, const Plan& plan, std::byte* scratch, void* stream) {
  if (plan.device == Device::cuda)
    cuda::backward(args, plan, scratch, stream);
  else
    cpu::backward(args, plan, scratch);
}

void run(const MlstmStep& args, const Plan& plan, std::byte* scratch, void* stream) {
  if (plan.device == Device::cuda)
    cuda::step(args, plan, scratch, stream);
  else
    cpu::step(args, plan, scratch);
}

template <class Args>
void check_fits(const Plan& plan, const Args& args) {
  if (!fits(plan, args)) {
    refuse("tfla: plan was made for tensors whose rows begin on 16 bytes, in a dense batch; plan these arguments");
  }
}

template <class Args>
void plan_and_run(const Args& args, const Execution& execution) {
  const Plan chosen = plan(args, execution);
  if constexpr (!std::is_same_v<Args, MlstmStep>) check_saved(chosen, args.saved);
  const OwnScratch scratch(chosen, execution.stream);
  run(args, chosen, scratch.data(), execution.stream);
}

}  // namespace

void forward(const MlstmForward& args, const Plan& plan, std::span<std::byte> scratch, void* stream) {
  check_plan(plan, Operation::forward, validate(args, plan.device), args.options, scratch, args.saved);
  check_fits(plan, args);
  run(args, plan, scratch.data(), stream);
}

void backward(const MlstmBackward& args, const Plan& plan, std::span<std::byte> scratch, void* stream) {
  check_plan(plan, Operation::backward, validate(args, plan.device), args.options, scratch, args.saved);
  check_fits(plan, args);
  run(args, plan, scratch.data(), stream);
}

void step(const MlstmStep& args, const Plan& plan, std::span<std::byte> scratch, void* stream) {
  check_plan(plan, Operation::step, validate(args, plan.device), args.options, scratch);
  check_fits(plan, args);
  run(args, plan, scratch.data(), stream);
}

void forward(const MlstmForward& args, const Execution& execution) { plan_and_run(args, execution); }
void backward(const MlstmBackward& args, const Execution& execution) { plan_and_run(args, execution); }
void step(const MlstmStep& args, const Execution& execution) { plan_and_run(args, execution); }

}  // namespace tfla
