// Every error a caller can make is found here, before anything is written, and said in one sentence.
#pragma once

#include <string_view>

#include "tfla/plan.h"

namespace tfla {

// Throw InvalidArgument, or return what the plan needs to know of the arguments. What lies on a GPU is not read: there
// `longest` is the length of the packed axis, and bad numbers in cu_seqlens or slots are kept in bounds by the kernels.
[[nodiscard]] MlstmShape validate(const MlstmForward& args, Device device);
[[nodiscard]] MlstmShape validate(const MlstmBackward& args, Device device);
[[nodiscard]] MlstmShape validate(const MlstmStep& args, Device device);

// MlstmShape::aligned of these arguments.
[[nodiscard]] bool is_aligned(const MlstmForward& args);
[[nodiscard]] bool is_aligned(const MlstmBackward& args);
[[nodiscard]] bool is_aligned(const MlstmStep& args);

void validate_shape(const MlstmShape& shape);
void validate_options(const MlstmOptions& options, Operation operation);
void validate_execution(const Execution& execution);
// The same for an operator, by its name in a sentence, whose CUDA kernels no GPU has run: only calls that ask for such
// kernels reach them, those of the tests.
void validate_untested(const Execution& execution, std::string_view operator_name);

}  // namespace tfla
