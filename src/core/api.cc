#include <fmt/format.h>

#include <memory>
#include <new>

#include "core/checks.h"
#include "core/validate.h"
#include "cpu/run.h"
#include "tfla/tfla.h"

namespace tfla {

namespace {

struct AlignedDelete {
  void operator()(std::byte* memory) const { ::operator delete(memory, std::align_val_t{scratch_alignment}); }
};
using Scratch = std::unique_ptr<std::byte, AlignedDelete>;

Scratch allocate(std::size_t bytes) {
  return Scratch(static_cast<std::byte*>(::operator new(bytes, std::align_val_t{scratch_alignment})));
}

void check_plan(const Plan& plan, Operation operation, const MlstmShape& shape, Formulation formulation,
                std::span<std::byte> scratch) {
  if (plan.operation != operation || plan.shape != shape || plan.formulation != formulation) {
    refuse("tfla: plan was made for another operation, shape or formulation; plan these arguments again");
  }
  if (scratch.size() < plan.scratch_bytes) {
    refuse(fmt::format("tfla: scratch has {} bytes; the plan needs {}", scratch.size(), plan.scratch_bytes));
  }
  if (reinterpret_cast<std::uintptr_t>(scratch.data()) % scratch_alignment != 0) {
    refuse(fmt::format("tfla: scratch is not aligned to {} bytes", scratch_alignment));
  }
}

}  // namespace

void forward(const MlstmForward& args, const Plan& plan, std::span<std::byte> scratch) {
  check_plan(plan, Operation::forward, validate(args), args.options.formulation, scratch);
  cpu::forward(args, plan, scratch.data());
}

void backward(const MlstmBackward& args, const Plan& plan, std::span<std::byte> scratch) {
  check_plan(plan, Operation::backward, validate(args), args.options.formulation, scratch);
  cpu::backward(args, plan, scratch.data());
}

void step(const MlstmStep& args, const Plan& plan, std::span<std::byte> scratch) {
  check_plan(plan, Operation::step, validate(args), Formulation::recurrent, scratch);
  cpu::step(args, plan, scratch.data());
}

void forward(const MlstmForward& args, const Execution& execution) {
  const Plan chosen = plan(args, execution);
  const Scratch scratch = allocate(chosen.scratch_bytes);
  cpu::forward(args, chosen, scratch.get());
}

void backward(const MlstmBackward& args, const Execution& execution) {
  const Plan chosen = plan(args, execution);
  const Scratch scratch = allocate(chosen.scratch_bytes);
  cpu::backward(args, chosen, scratch.get());
}

void step(const MlstmStep& args, const Execution& execution) {
  const Plan chosen = plan(args, execution);
  const Scratch scratch = allocate(chosen.scratch_bytes);
  cpu::step(args, chosen, scratch.get());
}

}  // namespace tfla
