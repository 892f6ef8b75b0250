// What the package asks the library without torch or jax: a C interface for ctypes.
#include <algorithm>
#include <exception>
#include <string>
#include <string_view>

#include "tfla/tfla.h"

#define TFLA_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

// A call to plan. python/tfla/info.py has the same fields in the same order; numbers are those of the enumerations.
struct Request {
  std::int64_t batch, tokens, heads, dqk, dhv;
  std::int64_t sequences;  // packed into one row; -1: a dense batch
  std::int64_t chunk_size;
  std::int32_t operation, device, dtype, keep;
  const char* gpu;  // a name of known_gpus; null: the current one
};

tfla::DeviceFacts facts_of(std::string_view name) {
  const auto known = tfla::known_gpus();
  const auto found = std::ranges::find(known, name, &tfla::KnownGpu::name);
  if (found != known.end()) return found->facts;
  std::string names;
  for (const tfla::KnownGpu& gpu : known) names.append(names.empty() ? "" : ", ").append(gpu.name);
  throw tfla::InvalidArgument("tfla: gpu is " + std::string(name) + "; it must be one of " + names);
}

tfla::Plan plan_of(const Request& request) {
  const bool packed = request.sequences >= 0;
  const tfla::MlstmShape shape{.batch = request.batch,
                               .tokens = request.tokens,
                               .qk_heads = request.heads,
                               .heads = request.heads,
                               .dqk = request.dqk,
                               .dhv = request.dhv,
                               .sequences = packed ? request.sequences : request.batch,
                               .longest = request.tokens,
                               .dtype = static_cast<tfla::DType>(request.dtype),
                               .packed = packed};
  tfla::Execution execution{.device = static_cast<tfla::Device>(request.device)};
  if (request.gpu != nullptr) execution.gpu = facts_of(request.gpu);
  const tfla::MlstmOptions options{.chunk_size = request.chunk_size, .keep = static_cast<tfla::Keep>(request.keep)};
  return tfla::plan(static_cast<tfla::Operation>(request.operation), shape, options, execution);
}

// Runs `work`, which returns a text; a result other than 0 says that the text is why it could not. The text lives until
// the next call of this thread.
template <class Work>
int answer(const char** text, Work work) {
  static thread_local std::string kept;
  int status = 0;
  try {
    kept = work();
  } catch (const std::exception& error) {
    kept = error.what();
    status = 1;
  }
  *text = kept.c_str();
  return status;
}

}  // namespace

TFLA_EXPORT const char* tfla_version() { return tfla::version(); }

TFLA_EXPORT std::int64_t tfla_scratch_alignment() { return static_cast<std::int64_t>(tfla::scratch_alignment); }

// The plan of a call in words.
TFLA_EXPORT int tfla_describe(const Request* request, const char** text) {
  return answer(text, [&] { return describe(plan_of(*request)); });
}

// What forward leaves for backward.
struct Saved {
  std::int64_t bytes;
  std::int64_t chunk;  // tokens between states
  std::int64_t keep;   // which may be less than was asked for
};

TFLA_EXPORT int tfla_saved(const Request* request, Saved* saved, const char** text) {
  return answer(text, [&] {
    const tfla::Plan plan = plan_of(*request);
    *saved = {static_cast<std::int64_t>(plan.saved_bytes), plan.chunk, static_cast<std::int64_t>(plan.keep)};
    return std::string();
  });
}
