// What `python -m tfla` asks the library without torch or jax: a C interface for ctypes.
#include <exception>
#include <string>

#include "tfla/tfla.h"

extern "C" {

__attribute__((visibility("default"))) const char* tfla_version() { return tfla::version(); }

__attribute__((visibility("default"))) std::int64_t tfla_scratch_alignment() {
  return static_cast<std::int64_t>(tfla::scratch_alignment);
}

// The plan of a call in words; or, with a result other than 0, why there is none. The text lives until the next call.
__attribute__((visibility("default"))) int tfla_describe(int operation, int device, int dtype,
                                                         const std::int64_t* shape, const char** text) {
  static thread_local std::string answer;
  int status = 0;
  try {
    const tfla::MlstmShape call{.batch = shape[0],
                                .tokens = shape[1],
                                .qk_heads = shape[2],
                                .heads = shape[2],
                                .dqk = shape[3],
                                .dhv = shape[4],
                                .sequences = shape[0],
                                .longest = shape[1],
                                .dtype = static_cast<tfla::DType>(dtype)};
    answer = describe(
        tfla::plan(static_cast<tfla::Operation>(operation), call, {}, {.device = static_cast<tfla::Device>(device)}));
  } catch (const std::exception& error) {
    answer = error.what();
    status = 1;
  }
  *text = answer.c_str();
  return status;
}

}  // extern "C"
