// Bad arguments of step, in the same form as those of forward and backward.
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

#include "reference/values.h"
#include "testkit/tensor.h"
#include "tests/support/validation.h"

namespace tfla::test {
namespace {

using testkit::gather;
using testkit::Problem;

constexpr double nan = std::numeric_limits<double>::quiet_NaN();

testkit::Case good_case() {
  testkit::Case c;
  c.shape = {.batch = 3, .tokens = 2, .qk_heads = 1, .heads = 2, .dqk = 4, .dhv = 3};
  c.initial_state = true;
  return c;
}

MlstmStep step_args(const MlstmForward& f) {
  return {.q = f.q, .k = f.k, .v = f.v, .i = f.i, .f = f.f, .h = f.h, .state = f.last_state, .options = f.options};
}

TensorView int64_slots(const std::int64_t* slots) { return {slots, DType::int64, {3}}; }

constexpr std::int64_t in_order[] = {0, 1, 2}, below[] = {0, -2, 2}, beyond[] = {0, 3, 2}, twice[] = {0, 2, 2},
                       far_beyond[] = {0, 1, std::numeric_limits<std::int64_t>::max()};
constexpr std::int32_t below_narrow[] = {0, -2, 2}, twice_narrow[] = {1, 0, 1};
constexpr float not_integers[] = {0, 1, 2};

const std::vector<BadRow<MlstmStep>> rows{
    {"q not given", "q", [](MlstmStep& a) { a.q = {}; }},
    {"h not given", "h", [](MlstmStep& a) { a.h = {}; }},
    {"state not given", "state", [](MlstmStep& a) { a.state = {}; }},
    {"state without m", "state", [](MlstmStep& a) { a.state.m = {}; }},
    {"state without C", "state", [](MlstmStep& a) { a.state.C = {}; }},
    {"k with another head dimension", "k", [](MlstmStep& a) { a.k.shape[3] = 5; }},
    {"v with another batch", "v", [](MlstmStep& a) { a.v.shape[0] = 2; }},
    {"i with more tokens", "i", [](MlstmStep& a) { a.i.shape[1] = 3; }},
    {"h of another shape", "h", [](MlstmStep& a) { a.h.shape[2] = 1; }},
    {"state.C of another shape", "state\\.C", [](MlstmStep& a) { a.state.C.shape[3] = 4; }},
    {"state.n with other heads", "state\\.n", [](MlstmStep& a) { a.state.n.shape[1] = 1; }},
    {"state.m with fewer slots than state.C", "state\\.(m|C)", [](MlstmStep& a) { a.state.m.shape[0] = 2; }},
    {"fewer states than rows", "state(\\.C)?",
     [](MlstmStep& a) { a.state.C.shape[0] = a.state.n.shape[0] = a.state.m.shape[0] = 2; }},
    {"v of another dtype", "v", [](MlstmStep& a) { a.v.dtype = DType::float16; }},
    {"f of integers", "f", [](MlstmStep& a) { a.f.dtype = DType::int32; }},
    {"state.C in bfloat16", "state\\.C", [](MlstmStep& a) { a.state.C.dtype = DType::bfloat16; }},
    {"state.m in float64", "state\\.m", [](MlstmStep& a) { a.state.m.dtype = DType::float64; }},
    {"null state.n", "state\\.n", [](MlstmStep& a) { a.state.n.data = nullptr; }},
    {"null h", "h", [](MlstmStep& a) { a.h.data = nullptr; }},
    {"misaligned state.C", "state\\.C", [](MlstmStep& a) { misalign(a.state.C); }},
    {"misaligned i", "i", [](MlstmStep& a) { misalign(a.i); }},
    {"state.C with a strided last axis", "state\\.C", [](MlstmStep& a) { a.state.C.strides[3] = 2; }},
    {"h on v", "h|v", [](MlstmStep& a) { move_onto(a.h, a.v); }},
    {"h on state.C", "h|state\\.C", [](MlstmStep& a) { move_onto(a.h, a.state.C); }},
    {"state.n on q", "state\\.n|q", [](MlstmStep& a) { move_onto(a.state.n, a.q); }},
    {"slots of the state in one place", "state\\.C", [](MlstmStep& a) { a.state.C.strides[0] = 0; }},
    {"slots of m in one place", "state\\.m", [](MlstmStep& a) { a.state.m.strides[0] = 0; }},
    {"negative slot", "slots", [](MlstmStep& a) { a.slots = int64_slots(below); }},
    {"slot beyond the pool", "slots", [](MlstmStep& a) { a.slots = int64_slots(beyond); }},
    {"slot far beyond the pool", "slots", [](MlstmStep& a) { a.slots = int64_slots(far_beyond); }},
    {"one slot twice", "slots", [](MlstmStep& a) { a.slots = int64_slots(twice); }},
    {"negative int32 slot", "slots",
     [](MlstmStep& a) {
       a.slots = {below_narrow, DType::int32, {3}};
     }},
    {"one int32 slot twice", "slots",
     [](MlstmStep& a) {
       a.slots = {twice_narrow, DType::int32, {3}};
     }},
    {"slots of floats", "slots",
     [](MlstmStep& a) {
       a.slots = {not_integers, DType::float32, {3}};
     }},
    {"too few slots", "slots",
     [](MlstmStep& a) {
       a.slots = {in_order, DType::int64, {2}};
     }},
    {"slots of rank 2", "slots",
     [](MlstmStep& a) {
       a.slots = {in_order, DType::int64, {3, 1}};
     }},
    {"null slots", "slots", [](MlstmStep& a) { a.slots = int64_slots(nullptr); }},
    {"misaligned slots", "slots",
     [](MlstmStep& a) {
       a.slots = int64_slots(in_order);
       misalign(a.slots);
     }},
    {"slots on the state", "slots|state\\.C",
     [](MlstmStep& a) {
       a.slots = {a.state.C.data, DType::int64, {3}};
     }},
    {"eps NaN", "eps", [](MlstmStep& a) { a.options.eps = nan; }},
    {"qk_scale NaN", "qk_scale", [](MlstmStep& a) { a.options.qk_scale = nan; }},
    {"soft_cap zero", "soft_cap", [](MlstmStep& a) { a.options.soft_cap = 0; }},
    {"chunk size below zero", "chunk_size", [](MlstmStep& a) { a.options.chunk_size = -5; }}};

Snapshot all_contents(Problem& problem) {
  Snapshot all = snapshot(problem.forward());
  const MlstmForward& f = problem.forward();
  for (const auto& [name, view] :
       {std::pair("q", f.q), std::pair("k", f.k), std::pair("v", f.v), std::pair("i", f.i), std::pair("f", f.f)}) {
    all[name] = gather(view);
  }
  return all;
}

TEST(ValidationSmall, StepRefuses) {
  Problem problem(good_case());
  const MlstmForward& f = problem.forward();
  // Zero bits in the state: "slots on the state" then reads slots that would all be 0, had the overlap been missed.
  for (const MutableTensorView* view : {&f.last_state.C, &f.last_state.n, &f.last_state.m}) {
    overwrite(*view, Values(static_cast<std::size_t>(reference::element_count(*view)), 0));
  }
  expect_refused(step_args(f), rows, [&] { return all_contents(problem); });
}

TEST(ValidationSmall, StepChecksExecutionPlanAndScratch) {
  Problem problem(good_case());
  const MlstmStep args = step_args(problem.forward());
  const Snapshot before = all_contents(problem);
  expect_sentence(refusal([&] { step(args, {.threads = -3}); }), "threads");
  if (!why_unavailable(Device::cuda).empty()) {
    EXPECT_THROW(step(args, {.device = Device::cuda}), Unavailable);
  }
  const Plan chosen = plan(args);
  const testkit::Buffer memory(static_cast<std::int64_t>(chosen.scratch_bytes) + 64);
  if (chosen.scratch_bytes > 0) {
    expect_sentence(refusal([&] { step(args, chosen, std::span(memory.data(), chosen.scratch_bytes - 1)); }),
                    "scratch");
    expect_sentence(refusal([&] { step(args, chosen, std::span(memory.data() + 8, chosen.scratch_bytes)); }),
                    "scratch");
  }
  MlstmStep first = args;
  for (TensorView* view : {&first.q, &first.k, &first.v, &first.i, &first.f}) *view = slice(*view, 1, 0, 1);
  first.h = slice(first.h, 1, 0, 1);
  expect_sentence(refusal([&] { step(first, chosen, std::span(memory.data(), chosen.scratch_bytes)); }), "plan");
  EXPECT_TRUE(same_bits(all_contents(problem), before));
}

TEST(ValidationSmall, StepAcceptsSlotsInAnyOrderAndASharedInput) {
  Problem problem(good_case());
  const MlstmForward& f = problem.forward();
  for (const MutableTensorView* view : {&f.last_state.C, &f.last_state.n, &f.last_state.m}) {
    overwrite(*view, Values(static_cast<std::size_t>(reference::element_count(*view)), 0));
  }
  MlstmStep args = step_args(f);
  const std::int32_t slots[] = {2, 0, 1};
  args.slots = {slots, DType::int32, {3}};
  args.k = args.q;
  args.f.strides[2] = 0;
  EXPECT_NO_THROW(step(args));
}

}  // namespace
}  // namespace tfla::test
