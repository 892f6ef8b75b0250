// step: token by token or several at once it equals forward; states live in slots of a pool.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <initializer_list>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "plan/kernel_table.h"
#include "reference/values.h"
#include "testkit/tensor.h"
#include "tests/support/support.h"
#include "tests/support/validation.h"

namespace tfla::test {
namespace {

using testkit::Case;
using testkit::gather;
using testkit::Layout;
using testkit::Problem;
using testkit::Tensor;

struct StepCase {
  InputGate gate;
  Normalizer normalizer;
  DType dtype, gate_dtype;
  std::int64_t batch, tokens, qk_heads, heads, dqk, dhv;
  Layout layout;
};

const StepCase small_cases[] = {
    {InputGate::exponential, Normalizer::max, DType::float32, DType::float32, 3, 9, 2, 4, 8, 12, Layout::bthd},
    {InputGate::exponential, Normalizer::none, DType::float64, DType::float64, 2, 7, 1, 1, 5, 3, Layout::bhtd},
    {InputGate::sigmoid, Normalizer::none, DType::float32, DType::bfloat16, 2, 6, 1, 3, 1, 17, Layout::fused},
    {InputGate::sigmoid, Normalizer::max, DType::float64, DType::float32, 1, 12, 2, 2, 33, 1, Layout::bthd},
    {InputGate::exponential, Normalizer::max, DType::bfloat16, DType::float32, 4, 11, 1, 2, 24, 40, Layout::fused},
    {InputGate::sigmoid, Normalizer::max, DType::float16, DType::float16, 2, 16, 2, 4, 16, 64, Layout::bhtd},
    {InputGate::log, Normalizer::none, DType::float32, DType::float32, 2, 8, 1, 2, 8, 12, Layout::bthd},
    {InputGate::exponential, Normalizer::max, DType::float32, DType::float32, 1, 1, 1, 1, 1, 1, Layout::bthd}};
const StepCase large_cases[] = {
    {InputGate::exponential, Normalizer::max, DType::float32, DType::float32, 4, 20, 8, 8, 256, 512, Layout::bthd},
    {InputGate::sigmoid, Normalizer::none, DType::bfloat16, DType::bfloat16, 2, 40, 2, 4, 128, 256, Layout::fused},
    {InputGate::exponential, Normalizer::max, DType::float64, DType::float64, 2, 30, 1, 2, 100, 130, Layout::bhtd}};

Case harness_case(const StepCase& s, Device device = Device::cpu) {
  Case c;
  c.device = device;
  c.shape = {.batch = s.batch,
             .tokens = s.tokens,
             .qk_heads = s.qk_heads,
             .heads = s.heads,
             .dqk = s.dqk,
             .dhv = s.dhv,
             .dtype = s.dtype,
             .gate_dtype = s.gate_dtype};
  c.options = {.gate = s.gate, .normalizer = s.normalizer, .eps = 1e-3, .qk_scale = 0.3, .soft_cap = 15};
  c.layout = s.layout;
  c.initial_state = true;
  return c;
}

MlstmStep step_args(const MlstmForward& f, const MutableMlstmState& state) {
  return {.q = f.q, .k = f.k, .v = f.v, .i = f.i, .f = f.f, .h = f.h, .state = state, .options = f.options};
}

MlstmStep tokens_of(MlstmStep args, std::int64_t begin, std::int64_t count) {
  for (TensorView* view : {&args.q, &args.k, &args.v, &args.i, &args.f}) *view = slice(*view, 1, begin, count);
  args.h = slice(args.h, 1, begin, count);
  return args;
}

// The state of a problem's outputs, set to its initial state.
MutableMlstmState started_state(Problem& problem) {
  const MlstmForward& f = problem.forward();
  overwrite(f.last_state.C, gather(f.initial_state.C));
  overwrite(f.last_state.n, gather(f.initial_state.n));
  overwrite(f.last_state.m, gather(f.initial_state.m));
  return f.last_state;
}

void expect_steps_equal_forward(const StepCase& s, Device device = Device::cpu) {
  const Case c = harness_case(s, device);
  const Execution execution{.device = device};
  Problem problem(c);
  const testkit::Judge judge(problem, false);
  // Two results may differ by the sum of their errors; the portable kernels have the smaller ones.
  forward(problem.forward(), {.device = device, .portable = true});
  const Snapshot expected = snapshot(problem.forward());
  for (const std::int64_t at_once : {std::int64_t{1}, std::int64_t{2}, s.tokens}) {
    problem.poison();
    const MlstmStep all = step_args(problem.forward(), started_state(problem));
    for (std::int64_t t = 0; t < s.tokens; t += at_once)
      step(tokens_of(all, t, std::min(at_once, s.tokens - t)), execution);
    EXPECT_TRUE(close(snapshot(problem.forward()), expected, c)) << label(c) << ", " << at_once << " at once";
    EXPECT_TRUE(within_bounds(judge.forward_errors(), c)) << label(c) << ", " << at_once << " at once";
  }
}

TEST(StepSmall, EqualsForward) {
  for (const StepCase& s : small_cases) expect_steps_equal_forward(s);
}

TEST(Step, EqualsForward) {
  for (const StepCase& s : large_cases) expect_steps_equal_forward(s);
}

#ifdef TFLA_TEST_CUDA
// So many states that the CUDA backend takes them in another way than the few above.
const StepCase many_states[] = {
    {InputGate::exponential, Normalizer::max, DType::bfloat16, DType::float32, 300, 2, 1, 7, 24, 128, Layout::fused},
    {InputGate::sigmoid, Normalizer::none, DType::float16, DType::float16, 130, 2, 4, 8, 40, 260, Layout::bthd},
    {InputGate::exponential, Normalizer::max, DType::float32, DType::float32, 260, 2, 4, 4, 33, 132, Layout::bhtd},
    {InputGate::exponential, Normalizer::max, DType::bfloat16, DType::float32, 256, 2, 2, 4, 261, 68, Layout::bthd}};

TEST(StepCuda, EqualsForward) {
  if (const std::string reason = why_unavailable(Device::cuda); !reason.empty()) GTEST_SKIP() << reason;
  for (const StepCase& s : small_cases) expect_steps_equal_forward(s, Device::cuda);
  for (const StepCase& s : large_cases) expect_steps_equal_forward(s, Device::cuda);
  for (const StepCase& s : many_states) expect_steps_equal_forward(s, Device::cuda);
}
#endif

// A decay halfway between two float32 numbers, thousands of times: rounded to either it would be off by 3e-8 each time,
// and by the sum of them in the end.
TEST(StepSmall, ForgetGatesNearOneKeepTheirDigits) {
  constexpr std::int64_t tokens = 4096;
  constexpr double log_decay = -100.5 * 0x1p-24;
  StepCase s = small_cases[6];  // gates in log space, where what is given is the logarithm of the decay
  s.tokens = tokens;
  s.layout = Layout::bthd;
  Case c = harness_case(s);
  c.options.soft_cap.reset();
  Problem problem(c);
  const MlstmForward& f = problem.forward();
  const Values gates(static_cast<std::size_t>(reference::element_count(f.f)), log_decay);
  overwrite(f.f, gates);
  overwrite(f.i, Values(gates.size(), -std::numeric_limits<double>::infinity()));
  overwrite(f.initial_state.m, Values(gather(f.initial_state.m).size(), 0));
  Snapshot expected{{"C", gather(f.initial_state.C)}, {"n", gather(f.initial_state.n)}};
  for (auto& [name, values] : expected) {
    for (double& x : values) x *= std::exp(log_decay * tokens);
  }
  for (const std::int64_t at_once : {std::int64_t{1}, tokens}) {
    const MlstmStep all = step_args(f, started_state(problem));
    for (std::int64_t t = 0; t < tokens; t += at_once) step(tokens_of(all, t, at_once));
    const double rounding = 0x1p-25 * tokens / 4;  // a quarter of that sum: states themselves are rounded each time
    EXPECT_TRUE(close(gather(all.state.C), expected.at("C"), rounding)) << at_once << " at once";
    EXPECT_TRUE(close(gather(all.state.n), expected.at("n"), rounding)) << at_once << " at once";
  }
}

TEST(StepSmall, NoTokensChangeNothing) {
  StepCase s = small_cases[0];
  s.tokens = 0;
  Problem problem(harness_case(s));
  const MlstmStep args = step_args(problem.forward(), started_state(problem));
  const Snapshot before = snapshot(args);
  step(args);
  EXPECT_TRUE(same_bits(snapshot(args), before));
}

// A pool of 7 states with something in every slot; each entry of the batch in a slot of its own.
struct Pool {
  static constexpr std::int64_t size = 7;
  Tensor C, n, m;

  explicit Pool(const Case& c) {
    const DType dtype = c.shape.dtype == DType::float64 ? DType::float64 : DType::float32;
    C = Tensor(dtype, {size, c.shape.heads, c.shape.dqk, c.shape.dhv});
    n = Tensor(dtype, {size, c.shape.heads, c.shape.dqk});
    m = Tensor(dtype, {size, c.shape.heads});
    for (const Tensor* tensor : {&C, &n, &m}) {
      Values values(static_cast<std::size_t>(reference::element_count(tensor->view)));
      for (std::size_t index = 0; index < values.size(); ++index)
        values[index] = 0.25 * static_cast<double>(index % 97);
      testkit::scatter(tensor->view, values);
    }
  }

  [[nodiscard]] MutableMlstmState state() const { return {C.view, n.view, m.view}; }
  [[nodiscard]] MutableMlstmState slot(std::int64_t index) const {
    return {slice(C.view, 0, index, 1), slice(n.view, 0, index, 1), slice(m.view, 0, index, 1)};
  }
};

Snapshot state_values(const MutableMlstmState& state) {
  return {{"C", gather(state.C)}, {"n", gather(state.n)}, {"m", gather(state.m)}};
}

// stride: of the slots, with other slots between them. padding: the second row has no state.
template <class Integer>
void expect_slots_work(const StepCase& s, DType slot_dtype, Device device, std::int64_t stride, bool padding) {
  const Case c = harness_case(s, device);
  const Execution execution{.device = device};
  Problem problem(c);
  const MlstmStep plain = step_args(problem.forward(), started_state(problem));
  step(plain, execution);
  Snapshot expected = snapshot(plain);

  Pool pool(c);
  const std::vector<Integer> slots{5, static_cast<Integer>(padding && s.batch > 1 ? -1 : 0), 3, 6};
  const Tensor slot_tensor(slot_dtype, {4 * stride});
  std::fill_n(static_cast<Integer*>(slot_tensor.view.data), 4 * stride, Integer{1});
  for (std::size_t b = 0; b < slots.size(); ++b)
    static_cast<Integer*>(slot_tensor.view.data)[static_cast<std::int64_t>(b) * stride] = slots[b];
  std::vector<Snapshot> before;
  for (std::int64_t index = 0; index < Pool::size; ++index) before.push_back(state_values(pool.slot(index)));
  const MlstmState& initial = problem.forward().initial_state;
  for (std::int64_t b = 0; b < s.batch; ++b) {
    if (slots[static_cast<std::size_t>(b)] < 0) continue;
    const MutableMlstmState at = pool.slot(slots[static_cast<std::size_t>(b)]);
    testkit::scatter(at.C, gather(slice(initial.C, 0, b, 1)));
    testkit::scatter(at.n, gather(slice(initial.n, 0, b, 1)));
    testkit::scatter(at.m, gather(slice(initial.m, 0, b, 1)));
  }
  problem.poison();
  const MutableMlstmState reached = started_state(problem);
  for (const auto& [view, name] : {std::pair(&reached.C, "C"), {&reached.n, "n"}, {&reached.m, "m"}})
    testkit::scatter(*view, expected.at(name));
  MlstmStep pooled = step_args(problem.forward(), pool.state());
  pooled.slots = TensorView(slot_tensor.view.data, slot_dtype, {s.batch}, {stride});
  step(pooled, execution);

  if (padding && s.batch > 1) {
    Values& h = expected.at("h");
    const auto row = static_cast<std::ptrdiff_t>(h.size()) / s.batch;
    std::fill_n(h.begin() + row, row, 0.0);
  }
  EXPECT_TRUE(same_bits(gather(pooled.h), expected.at("h"))) << label(c);
  for (std::int64_t index = 0; index < Pool::size; ++index) {
    const auto used = std::find(slots.begin(), slots.begin() + s.batch, static_cast<Integer>(index));
    const auto b = static_cast<std::int64_t>(used - slots.begin());
    const Snapshot want =
        b == s.batch ? before[static_cast<std::size_t>(index)]
                     : state_values({slice(reached.C, 0, b, 1), slice(reached.n, 0, b, 1), slice(reached.m, 0, b, 1)});
    EXPECT_TRUE(same_bits(state_values(pool.slot(index)), want)) << label(c) << ", slot " << index;
  }
  for (const Tensor* tensor : {&pool.C, &pool.n, &pool.m}) EXPECT_TRUE(tensor->buffer->margins_intact());
}

void expect_all_slots_work(Device device) {
  for (const StepCase& s : small_cases)
    for (const std::int64_t stride : {1, 3})
      for (const bool padding : {false, true}) {
        expect_slots_work<std::int32_t>(s, DType::int32, device, stride, padding);
        expect_slots_work<std::int64_t>(s, DType::int64, device, stride, padding);
      }
}

TEST(StepSmall, SlotsPickStatesAndLeaveTheOthers) { expect_all_slots_work(Device::cpu); }

#ifdef TFLA_TEST_CUDA
TEST(StepCuda, SlotsPickStatesAndLeaveTheOthers) {
  if (const std::string reason = why_unavailable(Device::cuda); !reason.empty()) GTEST_SKIP() << reason;
  expect_all_slots_work(Device::cuda);
}
#endif

#ifdef TFLA_TEST_CUDA
// A plan from the shape alone, as a front end makes one for every token: right for states with rows on 16 bytes.
TEST(StepCuda, FewStatesNeedNoScratch) {
  if (const std::string reason = why_unavailable(Device::cuda); !reason.empty()) GTEST_SKIP() << reason;
  const StepCase& s = small_cases[0];
  const Execution execution{.device = Device::cuda};
  Problem problem(harness_case(s, Device::cuda));
  MlstmStep args = step_args(problem.forward(), started_state(problem));
  step(args, execution);
  const Snapshot expected = snapshot(args);

  MlstmShape shape = plan(args, execution).shape;
  const Plan chosen = plan(Operation::step, shape, args.options, execution);
  if (!launches(chosen, Kernel::step, Needs::clusters)) GTEST_SKIP() << "this GPU has no clusters";
  EXPECT_EQ(chosen.scratch_bytes, 0U);
  problem.poison();
  args.state = started_state(problem);
  step(args, chosen, {});
  EXPECT_TRUE(same_bits(snapshot(args), expected));

  const Tensor shifted(DType::float32, {s.batch, s.heads, s.dqk, s.dhv + 1});
  args.state.C = slice(shifted.view, 3, 1, s.dhv);
  EXPECT_FALSE(fits(chosen, args));
  expect_sentence(refusal([&] { step(args, chosen, {}); }), "plan");
  EXPECT_GT(plan(args, execution).scratch_bytes, 0U);

  shape.batch = shape.sequences = 4096;  // two launches, with numbers of every state between them
  shape.tokens = shape.longest = 1;
  EXPECT_GT(plan(Operation::step, shape, args.options, execution).scratch_bytes, 0U);
}
#endif

#ifdef TFLA_TEST_CUDA
// Rows of C with a gap behind each, in slots, two of which do not exist: these leave all states as they were, and h is
// zero.
TEST(StepCuda, ManyStatesInSlotsOfASlice) {
  if (const std::string reason = why_unavailable(Device::cuda); !reason.empty()) GTEST_SKIP() << reason;
  constexpr std::int64_t gap = 4, spare = 2;
  for (StepCase s : many_states) {
    s.tokens = 1;
    const Case c = harness_case(s, Device::cuda);
    const Execution execution{.device = Device::cuda};
    Problem problem(c);
    const MlstmStep plain = step_args(problem.forward(), started_state(problem));
    step(plain, execution);
    const Snapshot expected = snapshot(plain);
    problem.poison();

    const std::int64_t size = s.batch + spare;
    const Tensor C(DType::float32, {size, s.heads, s.dqk, s.dhv + gap}), n(DType::float32, {size, s.heads, s.dqk}),
        m(DType::float32, {size, s.heads}), slot_tensor(DType::int32, {s.batch});
    const MutableMlstmState pool{slice(C.view, 3, 0, s.dhv), n.view, m.view};
    auto* slots = static_cast<std::int32_t*>(slot_tensor.view.data);
    const MlstmState& initial = problem.forward().initial_state;
    for (std::int64_t b = 0; b < s.batch; ++b) {
      const std::int64_t at = s.batch - 1 - b;
      slots[b] = static_cast<std::int32_t>(at);
      testkit::scatter(slice(pool.C, 0, at, 1), gather(slice(initial.C, 0, b, 1)));
      testkit::scatter(slice(pool.n, 0, at, 1), gather(slice(initial.n, 0, b, 1)));
      testkit::scatter(slice(pool.m, 0, at, 1), gather(slice(initial.m, 0, b, 1)));
    }
    slots[0] = -1;
    slots[s.batch / 2] = static_cast<std::int32_t>(size);
    const MutableTensorView behind = slice(C.view, 3, s.dhv, gap);
    const Values kept = gather(behind);
    const Snapshot before = state_values(pool);
    MlstmStep pooled = step_args(problem.forward(), pool);
    pooled.slots = TensorView(slots, DType::int32, {s.batch});
    step(pooled, execution);

    const Values h = gather(pooled.h);
    const auto width = static_cast<std::ptrdiff_t>(s.heads * s.dhv);
    const auto row = [&](const Values& values, std::int64_t b) {
      return Values(values.begin() + b * width, values.begin() + (b + 1) * width);
    };
    for (std::int64_t b = 0; b < s.batch; ++b) {
      const bool bad = slots[b] < 0 || slots[b] >= size;
      const Values zeros(static_cast<std::size_t>(width));
      EXPECT_TRUE(same_bits(row(h, b), bad ? zeros : row(expected.at("h"), b))) << label(c) << ", row " << b;
    }
    const Snapshot after = state_values(pool);
    for (const char* name : {"C", "n", "m"}) {
      Values want = before.at(name);
      const Values& reached = expected.at(name);
      const auto entry = static_cast<std::ptrdiff_t>(reached.size()) / s.batch;
      for (std::int64_t b = 0; b < s.batch; ++b)
        if (slots[b] >= 0 && slots[b] < size)
          std::copy_n(reached.begin() + b * entry, entry, want.begin() + slots[b] * entry);
      EXPECT_TRUE(same_bits(after.at(name), want)) << label(c) << ", " << name;
    }
    EXPECT_TRUE(same_bits(gather(behind), kept)) << label(c);
    for (const Tensor* tensor : {&C, &n, &m}) EXPECT_TRUE(tensor->buffer->margins_intact());
  }
}
#endif

TEST(StepSmall, StatesOfALargerPoolMayBeASlice) {
  const StepCase& s = small_cases[0];
  const Case c = harness_case(s);
  Problem problem(c);
  const MlstmStep plain = step_args(problem.forward(), started_state(problem));
  step(plain);
  const Snapshot expected = snapshot(plain);
  const Pool pool(c);
  const MutableMlstmState inner{slice(pool.C.view, 0, 2, s.batch), slice(pool.n.view, 0, 2, s.batch),
                                slice(pool.m.view, 0, 2, s.batch)};
  const MlstmState& initial = problem.forward().initial_state;
  testkit::scatter(inner.C, gather(initial.C));
  testkit::scatter(inner.n, gather(initial.n));
  testkit::scatter(inner.m, gather(initial.m));
  const MlstmStep sliced = step_args(problem.forward(), inner);
  step(sliced);
  EXPECT_TRUE(same_bits(snapshot(sliced), expected));
}

void expect_same_for_all_threads(const StepCase& s) {
  const Case c = harness_case(s);
  Problem problem(c);
  Snapshot expected;
  for (const int threads : {1, 1, 2, 3, 5, 8}) {
    problem.poison();
    const MlstmStep args = step_args(problem.forward(), started_state(problem));
    step(args, {.threads = threads});
    if (expected.empty()) expected = snapshot(args);
    EXPECT_TRUE(same_bits(snapshot(args), expected)) << label(c) << ", threads " << threads;
  }
}

TEST(StepSmall, ThreadsDoNotMatter) {
  for (const StepCase& s : small_cases) expect_same_for_all_threads(s);
}

TEST(Step, ThreadsDoNotMatter) {
  for (const StepCase& s : large_cases) expect_same_for_all_threads(s);
}

TEST(StepSmall, DirtyScratchAndAReusedPlanDoNotMatter) {
  for (const StepCase& s : small_cases) {
    const Case c = harness_case(s);
    Problem problem(c);
    MlstmStep args = step_args(problem.forward(), started_state(problem));
    step(args);
    const Snapshot expected = snapshot(args);
    const Plan chosen = plan(args);
    const testkit::Buffer scratch(static_cast<std::int64_t>(chosen.scratch_bytes));  // all NaN
    for (int repeat = 0; repeat < 2; ++repeat) {
      args.state = started_state(problem);
      step(args, chosen, std::span(scratch.data(), chosen.scratch_bytes));
      EXPECT_TRUE(same_bits(snapshot(args), expected)) << label(c);
      EXPECT_TRUE(scratch.margins_intact()) << label(c);
    }
  }
}

TEST(StepSmall, PoisonStaysInItsRowAndHead) {
  const Case c = harness_case(small_cases[0]);
  Problem problem(c);
  MlstmStep args = step_args(problem.forward(), started_state(problem));
  step(args);
  const Snapshot clean = snapshot(args);
  const MlstmForward& f = problem.forward();
  constexpr std::int64_t row = 1, head = 2;  // the query/key head of value head 2 is 1, shared with head 3
  const struct {
    const char* name;
    TensorView view;
    int head_axis;
    std::int64_t at_head, first_head, heads;
  } rows[] = {{"q", f.q, 2, 1, 2, 2},
              {"k", f.k, 2, 1, 2, 2},
              {"v", f.v, 2, head, head, 1},
              {"i", f.i, 2, head, head, 1},
              {"f", f.f, 2, head, head, 1},
              {"C", f.initial_state.C, 1, head, head, 1},
              {"n", f.initial_state.n, 1, head, head, 1}};
  for (const auto& hit : rows) {
    const TensorView poisoned = slice(slice(hit.view, 0, row, 1), hit.head_axis, hit.at_head, 1);
    const Values saved = gather(poisoned);
    overwrite(poisoned, Values(saved.size(), std::numeric_limits<double>::quiet_NaN()));
    args.state = started_state(problem);
    step(args);
    Snapshot hurt = snapshot(args), kept = clean;
    EXPECT_FALSE(same_bits(hurt, clean)) << hit.name;
    for (const auto& [name, view] : outputs(args)) {
      const int axis = name == "h" ? 2 : 1;
      for (std::int64_t index = 0; index < reference::element_count(view); ++index) {
        std::int64_t inner = 1;
        for (int later = axis + 1; later < view.rank; ++later) inner *= view.shape.at(static_cast<std::size_t>(later));
        const std::int64_t per_row = reference::element_count(view) / view.shape[0];
        const std::int64_t at = index / inner % view.shape.at(static_cast<std::size_t>(axis));
        if (index / per_row != row || at < hit.first_head || at >= hit.first_head + hit.heads) continue;
        hurt.at(name)[static_cast<std::size_t>(index)] = kept.at(name)[static_cast<std::size_t>(index)] = 0;
      }
    }
    EXPECT_TRUE(same_bits(hurt, kept)) << hit.name;
    overwrite(poisoned, saved);
  }
}

}  // namespace
}  // namespace tfla::test
