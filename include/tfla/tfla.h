// tfla: Tiled Flash Linear Attention. Include this one header.
#pragma once

#include <cstddef>
#include <span>

#include "tfla/conv.h"
#include "tfla/delta.h"
#include "tfla/error.h"
#include "tfla/mlstm.h"
#include "tfla/plan.h"
#include "tfla/ssd.h"
#include "tfla/tensor_view.h"

namespace tfla {

[[nodiscard]] const char* version();

// Validate, plan, allocate scratch, run.
void forward(const MlstmForward& args, const Execution& execution = {});
void backward(const MlstmBackward& args, const Execution& execution = {});
void step(const MlstmStep& args, const Execution& execution = {});

// The same without allocation: `scratch` holds at least plan.scratch_bytes, in any state, aligned to 64 bytes, on the
// plan's device. `stream` is for the device cuda. `saved` of the arguments, where options.keep asks for it, is
// plan.saved_bytes long and aligned in the same way.
inline constexpr std::size_t scratch_alignment = 64;
void forward(const MlstmForward& args, const Plan& plan, std::span<std::byte> scratch, void* stream = nullptr);
void backward(const MlstmBackward& args, const Plan& plan, std::span<std::byte> scratch, void* stream = nullptr);
void step(const MlstmStep& args, const Plan& plan, std::span<std::byte> scratch, void* stream = nullptr);

}  // namespace tfla
