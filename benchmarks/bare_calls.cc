// The calls of python_overhead.py without Python and torch around them: plan from shapes, run, nothing else.
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>

#include "tfla/tfla.h"

namespace {

struct Buffers {
  void *q, *k, *v, *i, *f, *h, *dq, *dk, *dv, *di, *df, *C, *n, *m, *scratch;
};

}  // namespace

// Host seconds per call. operation: 0 forward, 1 backward, 2 forward then backward, 3 step. shape: B, T, H, dqk, dhv,
// with float32 tensors; the scratch is large enough for each.
extern "C" __attribute__((visibility("default"))) double tfla_bare_calls(int operation, int device, int threads,
                                                                         const std::int64_t* shape,
                                                                         const Buffers* buffers,
                                                                         std::int64_t scratch_bytes, void* stream,
                                                                         int count) {
  using tfla::MutableTensorView;
  constexpr auto type = tfla::DType::float32;
  const auto [B, T, H, dqk, dhv] = std::array{shape[0], shape[1], shape[2], shape[3], shape[4]};
  const auto keys = [&](void* data) { return MutableTensorView(data, type, {B, T, H, dqk}); };
  const auto values = [&](void* data) { return MutableTensorView(data, type, {B, T, H, dhv}); };
  const auto gates = [&](void* data) { return MutableTensorView(data, type, {B, T, H}); };
  const Buffers& b = *buffers;
  const tfla::MlstmForward forward{
      .q = keys(b.q), .k = keys(b.k), .v = values(b.v), .i = gates(b.i), .f = gates(b.f), .h = values(b.h)};
  const tfla::MlstmBackward backward{.q = keys(b.q),
                                     .k = keys(b.k),
                                     .v = values(b.v),
                                     .i = gates(b.i),
                                     .f = gates(b.f),
                                     .dh = values(b.h),
                                     .dq = keys(b.dq),
                                     .dk = keys(b.dk),
                                     .dv = values(b.dv),
                                     .di = gates(b.di),
                                     .df = gates(b.df)};
  const tfla::MlstmStep step{
      .q = keys(b.q),
      .k = keys(b.k),
      .v = values(b.v),
      .i = gates(b.i),
      .f = gates(b.f),
      .h = values(b.h),
      .state = {MutableTensorView(b.C, type, {B, H, dqk, dhv}), MutableTensorView(b.n, type, {B, H, dqk}),
                MutableTensorView(b.m, type, {B, H})}};
  const tfla::MlstmShape sizes{
      .batch = B, .tokens = T, .qk_heads = H, .heads = H, .dqk = dqk, .dhv = dhv, .sequences = B, .longest = T};
  const tfla::Execution execution{.device = static_cast<tfla::Device>(device), .threads = threads, .stream = stream};
  const std::span scratch(static_cast<std::byte*>(b.scratch), static_cast<std::size_t>(scratch_bytes));
  const auto plan = [&](tfla::Operation what) { return tfla::plan(what, sizes, {}, execution); };

  const auto begin = std::chrono::steady_clock::now();
  for (int call = 0; call < count; ++call) {
    if (operation == 0 || operation == 2) tfla::forward(forward, plan(tfla::Operation::forward), scratch, stream);
    if (operation == 1 || operation == 2) tfla::backward(backward, plan(tfla::Operation::backward), scratch, stream);
    if (operation == 3) tfla::step(step, plan(tfla::Operation::step), scratch, stream);
  }
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() / count;
}
