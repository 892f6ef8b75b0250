// What stands in for the CUDA backend in a build without it.
#include "cuda/run.h"
#include "tfla/error.h"

namespace tfla::cuda {

void check_available() {
  throw Unavailable("tfla: this build has no CUDA backend; use the device cpu, or build with -DTFLA_CUDA=ON");
}

std::size_t scratch_bytes(const Plan& /*plan*/) { return check_available(), 0; }
std::size_t saved_bytes(const Plan& /*plan*/) { return check_available(), 0; }
void forward(const MlstmForward& /*args*/, const Plan& /*plan*/, std::byte* /*scratch*/, void* /*stream*/) {
  check_available();
}
void backward(const MlstmBackward& /*args*/, const Plan& /*plan*/, std::byte* /*scratch*/, void* /*stream*/) {
  check_available();
}
void step(const MlstmStep& /*args*/, const Plan& /*plan*/, std::byte* /*scratch*/, void* /*stream*/) {
  check_available();
}
std::byte* allocate(std::size_t /*bytes*/, void* /*stream*/) { return check_available(), nullptr; }
void release(std::byte* /*memory*/, void* /*stream*/) {}

std::byte* allocate_shared(std::size_t /*bytes*/) { return check_available(), nullptr; }
void release_shared(std::byte* /*memory*/) {}
void synchronize() {}

}  // namespace tfla::cuda
