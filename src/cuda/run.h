// The CUDA backend's door. In a build without CUDA every function throws Unavailable.
#pragma once

#include <cstddef>

#include "tfla/plan.h"

namespace tfla::cuda {

// Throws Unavailable in one sentence: no CUDA in this build, no driver, no GPU, or one that is too old.
void check_available();

// Whether the kernels of sm_90a take calls of this shape on the current device, as far as that depends on the shape.
[[nodiscard]] bool hopper_takes(const MlstmShape& shape, const MlstmOptions& options);
[[nodiscard]] bool hopper_takes_gradients(const Plan& plan, const MlstmOptions& options);
// Tiles of a state, each of which has a multiprocessor for itself, in stage states (as the plan's operation launches
// it) and in forward.
[[nodiscard]] std::int64_t hopper_tiles(const Plan& plan);
[[nodiscard]] std::int64_t hopper_forward_tiles(const MlstmShape& shape);
// Whether dC and dV are one kernel there, of shapes whose gradients it takes.
[[nodiscard]] bool hopper_takes_reverse(const MlstmShape& shape);
// Whether stage gradients is two kernels there: values and keys.
[[nodiscard]] bool hopper_splits_gradients(const MlstmShape& shape);
// And as far as it depends on the tensors: steps between rows that the tensor memory accelerator knows.
[[nodiscard]] bool hopper_fits(const MlstmForward& args);
[[nodiscard]] bool hopper_fits(const MlstmBackward& args);
// Whether a step of this shape is one launch on the current device, without scratch, and whether with this state.
[[nodiscard]] bool one_launch_takes(const MlstmShape& shape);
[[nodiscard]] bool one_launch_fits(const MlstmStep& args);

[[nodiscard]] std::size_t scratch_bytes(const Plan& plan);
[[nodiscard]] std::size_t saved_bytes(const Plan& plan);

// Enqueue on the stream and return. Scratch is device memory.
void forward(const MlstmForward& args, const Plan& plan, std::byte* scratch, void* stream);
void backward(const MlstmBackward& args, const Plan& plan, std::byte* scratch, void* stream);
void step(const MlstmStep& args, const Plan& plan, std::byte* scratch, void* stream);

// Device memory in stream order, for the calls that allocate their own scratch.
[[nodiscard]] std::byte* allocate(std::size_t bytes, void* stream);
void release(std::byte* memory, void* stream);

// Memory that host and device both see, and waiting until its results are in: for tests, not for speed.
[[nodiscard]] std::byte* allocate_shared(std::size_t bytes);
void release_shared(std::byte* memory);
void synchronize();

}  // namespace tfla::cuda
