// Bad arguments of forward and backward are refused with a sentence that names them, before anything is written.
#include "tests/support/validation.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

#include "testkit/tensor.h"

namespace tfla::test {
namespace {

using testkit::Case;
using testkit::gather;
using testkit::Problem;

constexpr double nan = std::numeric_limits<double>::quiet_NaN(), infinity = std::numeric_limits<double>::infinity();
constexpr std::int64_t huge = std::int64_t{1} << 62;

Case good_case() {
  Case c;
  c.shape = {.batch = 2, .tokens = 6, .qk_heads = 1, .heads = 2, .dqk = 4, .dhv = 3};
  c.initial_state = c.last_state_grad = true;
  return c;
}

Case packed_case() {
  Case c = good_case();
  c.shape.batch = 1;
  c.cu_seqlens = {0, 2, 6};
  return c;
}

Snapshot all_contents(Problem& problem) {
  Snapshot all = snapshot(problem.forward());
  all.merge(snapshot(problem.backward()));
  const MlstmBackward& b = problem.backward();
  for (const auto& [name, view] :
       {std::pair("q", b.q), std::pair("k", b.k), std::pair("v", b.v), std::pair("i", b.i), std::pair("f", b.f),
        std::pair("dh", b.dh), std::pair("initial C", b.initial_state.C), std::pair("initial n", b.initial_state.n),
        std::pair("initial m", b.initial_state.m), std::pair("dlast C", b.dlast_state.C)}) {
    all[name] = gather(view);
  }
  return all;
}

// Rows that hold for forward and backward alike.
template <class Args>
std::vector<BadRow<Args>> common_rows() {
  return {
      {"q not given", "q", [](Args& a) { a.q = {}; }},
      {"k not given", "k", [](Args& a) { a.k = {}; }},
      {"v not given", "v", [](Args& a) { a.v = {}; }},
      {"i not given", "i", [](Args& a) { a.i = {}; }},
      {"f not given", "f", [](Args& a) { a.f = {}; }},
      {"q of rank 3", "q", [](Args& a) { a.q.rank = 3; }},
      {"i of rank 4", "i", [](Args& a) { a.i.rank = 4; }},
      {"k with another head dimension", "k", [](Args& a) { a.k.shape[3] = 3; }},
      {"k with another number of heads", "k", [](Args& a) { a.k.shape[2] = 2; }},
      {"k with another batch", "k", [](Args& a) { a.k.shape[0] = 1; }},
      {"v with fewer tokens", "v", [](Args& a) { a.v.shape[1] = 5; }},
      {"i with fewer heads", "i", [](Args& a) { a.i.shape[2] = 1; }},
      {"f with fewer tokens", "f", [](Args& a) { a.f.shape[1] = 5; }},
      {"heads that are no multiple", "q|k|v", [](Args& a) { a.q.shape[2] = a.k.shape[2] = 4; }},
      {"head dimension 0", "q|k", [](Args& a) { a.q.shape[3] = a.k.shape[3] = 0; }},
      {"negative number of tokens", "q", [](Args& a) { a.q.shape[1] = -1; }},
      {"negative batch", "v", [](Args& a) { a.v.shape[0] = -2; }},
      {"overflowing tokens", "q", [](Args& a) { a.q.shape[1] = a.k.shape[1] = huge; }},
      {"overflowing stride", "q", [](Args& a) { a.q.strides[1] = huge; }},
      {"overflowing gate stride", "f", [](Args& a) { a.f.strides[0] = -huge; }},
      {"least stride there is", "v", [](Args& a) { a.v.strides[0] = std::numeric_limits<std::int64_t>::min(); }},
      {"q of integers", "q", [](Args& a) { a.q.dtype = DType::int32; }},
      {"k of another dtype", "k", [](Args& a) { a.k.dtype = DType::bfloat16; }},
      {"v of another dtype", "v", [](Args& a) { a.v.dtype = DType::float64; }},
      {"i of integers", "i", [](Args& a) { a.i.dtype = DType::int64; }},
      {"f of no dtype", "f", [](Args& a) { a.f.dtype = static_cast<DType>(99); }},
      {"q of no rank", "q", [](Args& a) { a.q.rank = 77; }},
      {"null q", "q", [](Args& a) { a.q.data = nullptr; }},
      {"null k", "k", [](Args& a) { a.k.data = nullptr; }},
      {"null v", "v", [](Args& a) { a.v.data = nullptr; }},
      {"null i", "i", [](Args& a) { a.i.data = nullptr; }},
      {"null f", "f", [](Args& a) { a.f.data = nullptr; }},
      {"misaligned q", "q", [](Args& a) { misalign(a.q); }},
      {"misaligned k", "k", [](Args& a) { misalign(a.k); }},
      {"misaligned f", "f", [](Args& a) { misalign(a.f); }},
      {"v off by half an element", "v", [](Args& a) { misalign(a.v, 2); }},
      {"q with a strided last axis", "q", [](Args& a) { a.q.strides[3] = 2; }},
      {"q with two elements apart", "contiguous",
       [](Args& a) {
         a.q.shape[3] = a.k.shape[3] = 2;
         a.q.strides[3] = 2;
       }},
      {"v with a reversed last axis", "v", [](Args& a) { a.v.strides[3] = -1; }},
      {"initial_state.C with a strided last axis", "initial_state\\.C",
       [](Args& a) { a.initial_state.C.strides[3] = 2; }},
      {"initial state without m", "initial_state", [](Args& a) { a.initial_state.m = {}; }},
      {"initial state without n", "initial_state", [](Args& a) { a.initial_state.n = {}; }},
      {"initial state without C", "initial_state", [](Args& a) { a.initial_state.C = {}; }},
      {"initial_state.C in bfloat16", "initial_state\\.C", [](Args& a) { a.initial_state.C.dtype = DType::bfloat16; }},
      {"initial_state.m in float64", "initial_state\\.m", [](Args& a) { a.initial_state.m.dtype = DType::float64; }},
      {"initial_state.C of another shape", "initial_state\\.C", [](Args& a) { a.initial_state.C.shape[2] = 3; }},
      {"initial_state.n of too few sequences", "initial_state\\.n", [](Args& a) { a.initial_state.n.shape[0] = 1; }},
      {"null initial_state.n", "initial_state\\.n", [](Args& a) { a.initial_state.n.data = nullptr; }},
      {"misaligned initial_state.C", "initial_state\\.C", [](Args& a) { misalign(a.initial_state.C); }},
      {"chunk size below zero", "chunk_size", [](Args& a) { a.options.chunk_size = -1; }},
      {"eps NaN", "eps", [](Args& a) { a.options.eps = nan; }},
      {"eps infinite", "eps", [](Args& a) { a.options.eps = infinity; }},
      {"eps negative", "eps", [](Args& a) { a.options.eps = -1e-6; }},
      {"qk_scale NaN", "qk_scale", [](Args& a) { a.options.qk_scale = nan; }},
      {"qk_scale infinite", "qk_scale", [](Args& a) { a.options.qk_scale = -infinity; }},
      {"soft_cap zero", "soft_cap", [](Args& a) { a.options.soft_cap = 0; }},
      {"soft_cap negative", "soft_cap", [](Args& a) { a.options.soft_cap = -15; }},
      {"soft_cap NaN", "soft_cap", [](Args& a) { a.options.soft_cap = nan; }},
      {"soft_cap infinite", "soft_cap", [](Args& a) { a.options.soft_cap = infinity; }},
      {"no such gate", "gate is not one of exponential, sigmoid and log",
       [](Args& a) { a.options.gate = static_cast<InputGate>(9); }},
      {"no such normalizer", "normalizer", [](Args& a) { a.options.normalizer = static_cast<Normalizer>(9); }},
      {"no such formulation", "formulation", [](Args& a) { a.options.formulation = static_cast<Formulation>(9); }},
      {"no such keep", "keep", [](Args& a) { a.options.keep = static_cast<Keep>(3); }},
  };
}

const std::vector<BadRow<MlstmForward>> forward_rows{
    {"h not given", "h", [](MlstmForward& a) { a.h = {}; }},
    {"h of another shape", "h", [](MlstmForward& a) { a.h.shape[3] = 2; }},
    {"h of another dtype", "h", [](MlstmForward& a) { a.h.dtype = DType::float16; }},
    {"null h", "h", [](MlstmForward& a) { a.h.data = nullptr; }},
    {"misaligned h", "h", [](MlstmForward& a) { misalign(a.h); }},
    {"h with a strided last axis", "h", [](MlstmForward& a) { a.h.strides[3] = 2; }},
    {"h on q", "h", [](MlstmForward& a) { move_onto(a.h, a.q); }},
    {"h on the gates", "h", [](MlstmForward& a) { move_onto(a.h, a.f); }},
    {"h on the initial state", "h", [](MlstmForward& a) { move_onto(a.h, a.initial_state.C); }},
    {"h on the last state", "h|last_state\\.C", [](MlstmForward& a) { move_onto(a.h, a.last_state.C); }},
    {"tokens of h all in one place", "h", [](MlstmForward& a) { a.h.strides[1] = 0; }},
    {"rows of h into one another", "h", [](MlstmForward& a) { a.h.strides[2] = 2; }},
    {"last state without n", "last_state", [](MlstmForward& a) { a.last_state.n = {}; }},
    {"last state without C", "last_state", [](MlstmForward& a) { a.last_state.C = {}; }},
    {"last_state.C in float16", "last_state\\.C", [](MlstmForward& a) { a.last_state.C.dtype = DType::float16; }},
    {"last_state.m of another shape", "last_state\\.m", [](MlstmForward& a) { a.last_state.m.shape[1] = 1; }},
    {"null last_state.m", "last_state\\.m", [](MlstmForward& a) { a.last_state.m.data = nullptr; }},
    {"misaligned last_state.n", "last_state\\.n", [](MlstmForward& a) { misalign(a.last_state.n); }},
    {"last state of a head in one place", "last_state\\.C", [](MlstmForward& a) { a.last_state.C.strides[1] = 0; }},
    {"last state on k", "last_state\\.n|k", [](MlstmForward& a) { move_onto(a.last_state.n, a.k); }},
    {"last state across the initial state", "last_state\\.C|initial_state\\.C",
     [](MlstmForward& a) {
       move_onto(a.last_state.C, a.initial_state.C);
       a.last_state.C.data = static_cast<std::byte*>(a.last_state.C.data) + 4;
     }},
    {"last state in place of the initial one, heads and sequences exchanged", "last_state\\.C|initial_state\\.C",
     [](MlstmForward& a) {
       move_onto(a.last_state.C, a.initial_state.C);
       std::swap(a.last_state.C.strides[0], a.last_state.C.strides[1]);
     }},
    {"last_state.n on initial_state.C", "last_state\\.n|initial_state\\.C",
     [](MlstmForward& a) { move_onto(a.last_state.n, a.initial_state.C); }}};

const std::vector<BadRow<MlstmBackward>> backward_rows{
    {"dh not given", "dh", [](MlstmBackward& a) { a.dh = {}; }},
    {"dh of another shape", "dh", [](MlstmBackward& a) { a.dh.shape[1] = 7; }},
    {"dh of another dtype", "dh", [](MlstmBackward& a) { a.dh.dtype = DType::float64; }},
    {"dh with a strided last axis", "dh", [](MlstmBackward& a) { a.dh.strides[3] = 3; }},
    {"dq not given", "dq", [](MlstmBackward& a) { a.dq = {}; }},
    {"dk of another shape", "dk", [](MlstmBackward& a) { a.dk.shape[3] = 5; }},
    {"dv of another dtype", "dv", [](MlstmBackward& a) { a.dv.dtype = DType::bfloat16; }},
    {"di of another dtype than i", "di", [](MlstmBackward& a) { a.di.dtype = DType::float64; }},
    {"df of another dtype than f", "df", [](MlstmBackward& a) { a.df.dtype = DType::bfloat16; }},
    {"df of the dtype of i", "df", [](MlstmBackward& a) { a.f.dtype = DType::bfloat16; }},
    {"null dq", "dq", [](MlstmBackward& a) { a.dq.data = nullptr; }},
    {"misaligned di", "di", [](MlstmBackward& a) { misalign(a.di); }},
    {"dq on dk", "dq|dk", [](MlstmBackward& a) { move_onto(a.dq, a.dk); }},
    {"dv on v", "dv|v", [](MlstmBackward& a) { move_onto(a.dv, a.v); }},
    {"dv on dh", "dv|dh", [](MlstmBackward& a) { move_onto(a.dv, a.dh); }},
    {"di on df", "di|df", [](MlstmBackward& a) { move_onto(a.di, a.df); }},
    {"heads of dv in one place", "dv", [](MlstmBackward& a) { a.dv.strides[2] = 0; }},
    {"batches of df in one place", "df", [](MlstmBackward& a) { a.df.strides[0] = 0; }},
    {"dlast_state.C of another shape", "dlast_state\\.C", [](MlstmBackward& a) { a.dlast_state.C.shape[0] = 3; }},
    {"dlast_state.n of another dtype", "dlast_state\\.n",
     [](MlstmBackward& a) { a.dlast_state.n.dtype = DType::float64; }},
    {"null dlast_state.n", "dlast_state\\.n", [](MlstmBackward& a) { a.dlast_state.n.data = nullptr; }},
    {"dinitial_state.C of another shape", "dinitial_state\\.C",
     [](MlstmBackward& a) { a.dinitial_state.C.shape[3] = 1; }},
    {"misaligned dinitial_state.n", "dinitial_state\\.n", [](MlstmBackward& a) { misalign(a.dinitial_state.n); }},
    {"dinitial_state.C on dlast_state.C", "dinitial_state\\.C|dlast_state\\.C",
     [](MlstmBackward& a) { move_onto(a.dinitial_state.C, a.dlast_state.C); }},
    {"dinitial_state.n on dq", "dinitial_state\\.n|dq", [](MlstmBackward& a) { move_onto(a.dinitial_state.n, a.dq); }},
    {"the recurrent formulation", "formulation",
     [](MlstmBackward& a) { a.options.formulation = Formulation::recurrent; }}};

TEST(ValidationSmall, ForwardRefuses) {
  Problem problem(good_case());
  expect_refused(problem.forward(), common_rows<MlstmForward>(), [&] { return all_contents(problem); });
  expect_refused(problem.forward(), forward_rows, [&] { return all_contents(problem); });
}

TEST(ValidationSmall, BackwardRefuses) {
  Problem problem(good_case());
  expect_refused(problem.backward(), common_rows<MlstmBackward>(), [&] { return all_contents(problem); });
  expect_refused(problem.backward(), backward_rows, [&] { return all_contents(problem); });
}

template <class Args>
std::vector<BadRow<Args>> boundary_rows() {
  static const std::int64_t falling[] = {0, 7, 6}, late[] = {1, 2, 6}, negative[] = {0, -1, 6};
  static const std::int64_t beyond[] = {0, 2, 7}, overflowing[] = {0, std::numeric_limits<std::int64_t>::max(), 6};
  static const std::int32_t falling_narrow[] = {0, 7, 6};
  static const double not_integers[] = {0, 2, 6};
  const auto given = [](const void* data, DType dtype, std::int64_t count) {
    return [=](Args& a) { a.cu_seqlens = TensorView(data, dtype, {count}); };
  };
  return {{"falling boundaries", "cu_seqlens", given(falling, DType::int64, 3)},
          {"falling int32 boundaries", "cu_seqlens", given(falling_narrow, DType::int32, 3)},
          {"first boundary not 0", "cu_seqlens", given(late, DType::int64, 3)},
          {"last boundary beyond T", "cu_seqlens", given(beyond, DType::int64, 3)},
          {"negative boundary", "cu_seqlens", given(negative, DType::int64, 3)},
          {"huge boundary", "cu_seqlens", given(overflowing, DType::int64, 3)},
          {"boundaries of floats", "cu_seqlens", given(not_integers, DType::float64, 3)},
          {"no boundaries", "cu_seqlens", given(falling, DType::int64, 0)},
          {"one boundary", "cu_seqlens", given(falling, DType::int64, 1)},
          {"null boundaries", "cu_seqlens", given(nullptr, DType::int64, 3)},
          {"misaligned boundaries", "cu_seqlens", [](Args& a) { misalign(a.cu_seqlens); }},
          {"boundaries of rank 2", "cu_seqlens",
           [](Args& a) {
             a.cu_seqlens = TensorView(a.cu_seqlens.data, DType::int64, {1, 3});
           }},
          {"states of another number of sequences", "initial_state\\.C|cu_seqlens", [](Args& a) {
             static const std::int64_t three[] = {0, 2, 2, 6};
             a.cu_seqlens = TensorView(three, DType::int64, {4});
           }}};
}

TEST(ValidationSmall, BoundariesAreChecked) {
  Problem packed(packed_case());
  expect_refused(packed.forward(), boundary_rows<MlstmForward>(), [&] { return all_contents(packed); });
  expect_refused(packed.backward(), boundary_rows<MlstmBackward>(), [&] { return all_contents(packed); });
  Problem batch(good_case());
  static const std::int64_t boundaries[] = {0, 2, 6};
  batch.forward().cu_seqlens = TensorView(boundaries, DType::int64, {3});
  expect_sentence(refusal([&] { forward(batch.forward()); }), "cu_seqlens|q");
}

// ---------------------------------------------------------------- execution, plan and scratch

TEST(ValidationSmall, ExecutionIsChecked) {
  Problem problem(good_case());
  const Snapshot before = all_contents(problem);
  expect_sentence(refusal([&] { forward(problem.forward(), {.threads = -1}); }), "threads");
  expect_sentence(refusal([&] { backward(problem.backward(), {.threads = -1}); }), "threads");
  expect_sentence(refusal([&] { forward(problem.forward(), {.device = static_cast<Device>(9)}); }), "device");
  EXPECT_TRUE(same_bits(all_contents(problem), before));
}

TEST(ValidationSmall, ADeviceThisMachineLacksIsUnavailable) {
  if (why_unavailable(Device::cuda).empty()) GTEST_SKIP() << "there is a GPU";
  Problem problem(good_case());
  const Snapshot before = all_contents(problem);
  for (const std::function<void()>& call :
       {std::function<void()>([&] { forward(problem.forward(), {.device = Device::cuda}); }),
        std::function<void()>([&] { backward(problem.backward(), {.device = Device::cuda}); }),
        std::function<void()>([&] { static_cast<void>(plan(problem.forward(), {.device = Device::cuda})); })}) {
    try {
      call();
      ADD_FAILURE() << "ran";
    } catch (const Unavailable& error) {
      expect_sentence(error.what(), "CUDA|cuda");
    }
  }
  EXPECT_TRUE(same_bits(all_contents(problem), before));
}

TEST(ValidationSmall, PlanAndScratchAreChecked) {
  Problem problem(good_case());
  MlstmForward& f = problem.forward();
  MlstmBackward& b = problem.backward();
  const Plan forward_plan = plan(f), backward_plan = plan(b);
  ASSERT_GT(forward_plan.scratch_bytes, 0U);
  ASSERT_GT(backward_plan.scratch_bytes, 0U);
  const testkit::Buffer memory(static_cast<std::int64_t>(forward_plan.scratch_bytes + backward_plan.scratch_bytes) +
                               64);
  const auto scratch = [&](std::size_t offset, std::size_t bytes) { return std::span(memory.data() + offset, bytes); };
  const std::size_t enough = forward_plan.scratch_bytes, enough_back = backward_plan.scratch_bytes;
  const Snapshot before = all_contents(problem);
  expect_sentence(refusal([&] { forward(f, forward_plan, scratch(0, enough - 1)); }), "scratch");
  expect_sentence(refusal([&] { backward(b, backward_plan, scratch(0, enough_back - 1)); }), "scratch");
  expect_sentence(refusal([&] { forward(f, forward_plan, {}); }), "scratch");
  expect_sentence(refusal([&] { forward(f, forward_plan, scratch(32, enough)); }), "scratch");
  expect_sentence(refusal([&] { backward(b, backward_plan, scratch(1, enough_back)); }), "scratch");
  expect_sentence(refusal([&] { forward(f, backward_plan, scratch(0, enough_back)); }), "plan");
  expect_sentence(refusal([&] { backward(b, forward_plan, scratch(0, enough + enough_back)); }), "plan");

  Case other = good_case();
  other.shape.tokens = 7;
  Problem longer(other);
  expect_sentence(refusal([&] { forward(f, plan(longer.forward()), scratch(0, enough)); }), "plan");
  other = good_case();
  other.shape.dtype = DType::bfloat16;
  Problem narrower(other);
  expect_sentence(refusal([&] { forward(f, plan(narrower.forward()), scratch(0, enough)); }), "plan");
  MlstmForward parallel = f;
  parallel.options.formulation = Formulation::parallel;
  expect_sentence(refusal([&] { forward(f, plan(parallel), scratch(0, enough)); }), "plan|scratch");
  for (const auto change :
       {+[](MlstmOptions& o) { o.exact_normalizer_grad = true; }, +[](MlstmOptions& o) { o.eps = 1e-3; },
        +[](MlstmOptions& o) { o.gate = InputGate::sigmoid; }, +[](MlstmOptions& o) { o.qk_scale = 0.25; }}) {
    MlstmBackward changed = b;
    change(changed.options);
    expect_sentence(refusal([&] { backward(b, plan(changed), scratch(0, enough_back)); }), "plan");
  }
  EXPECT_TRUE(same_bits(all_contents(problem), before));
  forward(f, forward_plan, scratch(0, enough));
  backward(b, backward_plan, scratch(0, enough_back));
}

// ---------------------------------------------------------------- what must be accepted

TEST(ValidationSmall, UnusualButGoodArgumentsAreAccepted) {
  Case c = good_case();
  c.layout = testkit::Layout::fused;  // dq, dk, dv interleave in one buffer: their ranges overlap, no element does
  Problem fused(c);
  EXPECT_NO_THROW(backward(fused.backward()));
  c.shape.batch = 1;
  Problem one_row(c);
  MlstmBackward apart = one_row.backward();  // the stride of an axis of extent 1 means nothing, however large
  for (MutableTensorView* view : {&apart.dq, &apart.dk, &apart.dv}) view->strides[0] = huge;
  apart.dh.strides[0] = std::numeric_limits<std::int64_t>::min();
  EXPECT_NO_THROW(backward(apart));

  Problem problem(good_case());
  MlstmForward f = problem.forward();
  f.q.strides[1] = f.i.strides[0] = f.i.strides[1] = f.i.strides[2] = 0;  // broadcast inputs
  EXPECT_NO_THROW(forward(f));
  f = problem.forward();
  f.k.data = static_cast<const float*>(f.k.data) + f.k.strides[0];
  f.k.strides[0] = -f.k.strides[0];
  EXPECT_NO_THROW(forward(f));
  f = problem.forward();
  f.k = f.q;  // two inputs may be one
  EXPECT_NO_THROW(forward(f));
  f = problem.forward();
  f.last_state = {};
  f.initial_state = {};
  EXPECT_NO_THROW(forward(f));

  MlstmBackward b = problem.backward();
  b.dlast_state.C = {};
  b.dinitial_state.n = {};
  EXPECT_NO_THROW(backward(b));
  b = problem.backward();
  b.dlast_state.n = {};
  b.dinitial_state.C = {};
  EXPECT_NO_THROW(backward(b));

  f = problem.forward();  // strides of axes of extent 1 or 0 mean nothing
  for (TensorView* view : {&f.q, &f.k, &f.v, &f.i, &f.f}) *view = slice(*view, 0, 0, 1);
  f.h = slice(f.h, 0, 0, 1);
  f.initial_state = {};
  f.last_state = {};
  f.h.strides[0] = 0;
  f.q.strides[0] = huge;
  EXPECT_NO_THROW(forward(f));
}

TEST(ValidationSmall, ViewsCheckTheirRank) {
  float x = 0;
  EXPECT_THROW(TensorView(&x, DType::float32, {1, 1, 1, 1, 1}), std::invalid_argument);
  EXPECT_THROW(TensorView(&x, DType::float32, {1, 1}, {1}), std::invalid_argument);
  EXPECT_FALSE(TensorView().given());
  const TensorView view(&x, DType::float32, {2, 3, 5});
  EXPECT_EQ(view.strides[0], 15);
  EXPECT_EQ(view.transposed(0, 2).strides[0], 1);
  EXPECT_EQ(view.transposed(0, 2).shape[0], 5);
}

// How much there is to save is the plan's to say, so it is the run that refuses. A CPU has nothing to save.
TEST(ValidationSmall, SavedIsAsLongAsThePlanSays) {
  Problem problem(good_case());
  alignas(64) std::byte room[128] = {};
  for (const bool keep : {false, true}) {
    MlstmForward f = problem.forward();
    MlstmBackward b = problem.backward();
    f.options.keep = b.options.keep = keep ? Keep::states : Keep::nothing;
    EXPECT_EQ(plan(f).saved_bytes, 0U);
    EXPECT_EQ(plan(b).saved_bytes, 0U);
    f.saved = room;
    b.saved = room;
    const Snapshot before = all_contents(problem);
    expect_sentence(refusal([&] { forward(f); }), "saved");
    expect_sentence(refusal([&] { backward(b); }), "saved");
    EXPECT_TRUE(same_bits(all_contents(problem), before));
    f.saved = {};
    b.saved = {};
    forward(f);
    backward(b);
  }
}

}  // namespace
}  // namespace tfla::test
