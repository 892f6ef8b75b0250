// What stands in for the CUDA backend in a build without it.
#include "cuda/record.h"
#include "cuda/run.h"
#include "tfla/error.h"

namespace tfla::cuda {

void check_available() {
  throw Unavailable("tfla: this build has no CUDA backend; use the device cpu, or build with -DTFLA_CUDA=ON");
}

bool hopper_takes(const MlstmShape& /*shape*/, const MlstmOptions& /*options*/) { return false; }
bool hopper_takes_gradients(const Plan& /*plan*/, const MlstmOptions& /*options*/) { return false; }
std::int64_t hopper_tiles(const Plan& /*plan*/) { return 1; }
std::int64_t hopper_forward_tiles(const MlstmShape& /*shape*/) { return 1; }
bool hopper_takes_reverse(const MlstmShape& /*shape*/) { return false; }
bool hopper_splits_gradients(const MlstmShape& /*shape*/) { return false; }
bool hopper_fits(const MlstmForward& /*args*/) { return false; }
bool hopper_fits(const MlstmBackward& /*args*/) { return false; }
bool one_launch_takes(const MlstmShape& /*shape*/) { return false; }
bool one_launch_fits(const MlstmStep& /*args*/) { return false; }
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

Recording::Recording(const std::function<void(void*)>& /*calls*/) { check_available(); }
Recording::~Recording() = default;
void Recording::replay() const {}
double Recording::replay_seconds() const { return 0; }
void copy(void* /*to*/, const void* /*from*/, std::size_t /*bytes*/) { check_available(); }
void copy_on(void* /*stream*/, void* /*to*/, const void* /*from*/, std::size_t /*bytes*/) { check_available(); }
std::string device_name() { return check_available(), ""; }

}  // namespace tfla::cuda
