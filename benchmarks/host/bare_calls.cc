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

// Host seconds per call. operation: 0 forward, 1 backward, 2 forward then backward, 3 step. part: 0 all of it, 1 only
// the plan, 2 the plan after validation of the arguments. shape: B, T, H, dqk, dhv, with float32 tensors; the scratch
// is large enough for each.
extern "C" __attribute__((visibility("default"))) double tfla_bare_calls(int operation, int part, int device,
                                                                         int threads, const std::int64_t* shape,
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
  const auto call = [&](tfla::Operation what, const auto& args, auto run) {
    const tfla::Plan plan = part == 2 ? tfla::plan(args, execution) : tfla::plan(what, sizes, {}, execution);
    if (part == 0) run(args, plan);
  };
  const auto run_forward = [&](const auto& args, const auto& plan) { tfla::forward(args, plan, scratch, stream); };
  const auto run_backward = [&](const auto& args, const auto& plan) { tfla::backward(args, plan, scratch, stream); };
  const auto run_step = [&](const auto& args, const auto& plan) { tfla::step(args, plan, scratch, stream); };

  const auto begin = std::chrono::steady_clock::now();
  for (int done = 0; done < count; ++done) {
    if (operation == 0 || operation == 2) call(tfla::Operation::forward, forward, run_forward);
    if (operation == 1 || operation == 2) call(tfla::Operation::backward, backward, run_backward);
    if (operation == 3) call(tfla::Operation::step, step, run_step);
  }
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() / count;
}
