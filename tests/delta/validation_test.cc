// Bad arguments of the delta rule are refused with a sentence that names them, before anything is written.
#include "tests/support/validation.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <span>

#include "tests/delta/problem.h"

namespace tfla::test {
namespace {

using testkit::gather;

constexpr double nan = std::numeric_limits<double>::quiet_NaN(), infinity = std::numeric_limits<double>::infinity();
constexpr std::int64_t huge = std::int64_t{1} << 62;

DeltaCase good_case() {
  DeltaCase c;
  c.shape = {.batch = 2, .tokens = 6, .qk_heads = 1, .heads = 2, .dqk = 4, .dhv = 3};
  c.decay = Decay::biased;
  c.initial_state = c.last_state_grad = true;
  return c;
}

DeltaCase packed_case() {
  DeltaCase c = good_case();
  c.shape.batch = 1;
  c.cu_seqlens = {0, 2, 6};
  return c;
}

Snapshot all_contents(const DeltaProblem& problem) {
  const DeltaBackward& b = problem.backward;
  Snapshot all = snapshot(outputs(problem.forward));
  all.merge(snapshot(outputs(b)));
  for (const auto& [name, view] :
       {std::pair("q", b.q), std::pair("k", b.k), std::pair("v", b.v), std::pair("beta", b.beta), std::pair("g", b.g),
        std::pair("A_log", b.A_log), std::pair("dt_bias", b.dt_bias), std::pair("dh", b.dh),
        std::pair("initial_state", b.initial_state), std::pair("dlast_state", b.dlast_state)}) {
    if (view.given()) all[name] = gather(view);
  }
  return all;
}

// Rows that hold for forward, backward and step alike.
template <class Args>
std::vector<BadRow<Args>> common_rows() {
  return {
      {"q not given", "q", [](Args& a) { a.q = {}; }},
      {"k not given", "k", [](Args& a) { a.k = {}; }},
      {"v not given", "v", [](Args& a) { a.v = {}; }},
      {"beta not given", "beta", [](Args& a) { a.beta = {}; }},
      {"dt_bias without A_log", "dt_bias|A_log", [](Args& a) { a.A_log = {}; }},
      {"A_log without g", "A_log|g", [](Args& a) { a.g = {}; }},
      {"q of rank 3", "q", [](Args& a) { a.q.rank = 3; }},
      {"q of no rank", "q", [](Args& a) { a.q.rank = 77; }},
      {"v of rank 2", "v", [](Args& a) { a.v.rank = 2; }},
      {"beta of rank 4", "beta", [](Args& a) { a.beta.rank = 4; }},
      {"g of rank 2", "g", [](Args& a) { a.g.rank = 2; }},
      {"A_log of rank 2", "A_log",
       [](Args& a) {
         a.A_log = TensorView(a.A_log.data, a.A_log.dtype, {2, 1});
       }},
      {"dt_bias of rank 3", "dt_bias",
       [](Args& a) {
         a.dt_bias = TensorView(a.dt_bias.data, a.dt_bias.dtype, {1, 1, 2});
       }},
      {"k with another head dimension", "k", [](Args& a) { a.k.shape[3] = 3; }},
      {"k with another number of heads", "k", [](Args& a) { a.k.shape[2] = 2; }},
      {"k with another batch", "k", [](Args& a) { a.k.shape[0] = 1; }},
      {"v with fewer tokens", "v", [](Args& a) { a.v.shape[1] -= 1; }},
      {"beta with fewer heads", "beta", [](Args& a) { a.beta.shape[2] = 1; }},
      {"g with fewer tokens", "g", [](Args& a) { a.g.shape[1] -= 1; }},
      {"g with another batch", "g", [](Args& a) { a.g.shape[0] = 1; }},
      {"A_log of another number of heads", "A_log", [](Args& a) { a.A_log.shape[0] = 1; }},
      {"dt_bias of another number of heads", "dt_bias", [](Args& a) { a.dt_bias.shape[0] = 3; }},
      {"heads that are no multiple", "q|k|v", [](Args& a) { a.q.shape[2] = a.k.shape[2] = 4; }},
      {"head dimension 0", "q|k", [](Args& a) { a.q.shape[3] = a.k.shape[3] = 0; }},
      {"negative number of tokens", "q", [](Args& a) { a.q.shape[1] = -1; }},
      {"negative batch", "v", [](Args& a) { a.v.shape[0] = -2; }},
      {"overflowing tokens", "q", [](Args& a) { a.q.shape[1] = a.k.shape[1] = huge; }},
      {"overflowing stride", "q", [](Args& a) { a.q.strides[1] = huge; }},
      {"overflowing gate stride", "g", [](Args& a) { a.g.strides[0] = -huge; }},
      {"overflowing stride of a rate", "A_log", [](Args& a) { a.A_log.strides[0] = huge; }},
      {"least stride there is", "v", [](Args& a) { a.v.strides[0] = std::numeric_limits<std::int64_t>::min(); }},
      {"q of integers", "q", [](Args& a) { a.q.dtype = DType::int32; }},
      {"k of another dtype", "k", [](Args& a) { a.k.dtype = DType::bfloat16; }},
      {"v of another dtype", "v", [](Args& a) { a.v.dtype = DType::float64; }},
      {"beta of integers", "beta", [](Args& a) { a.beta.dtype = DType::int64; }},
      {"g of no dtype", "g", [](Args& a) { a.g.dtype = static_cast<DType>(99); }},
      {"A_log of integers", "A_log", [](Args& a) { a.A_log.dtype = DType::int32; }},
      {"dt_bias of integers", "dt_bias", [](Args& a) { a.dt_bias.dtype = DType::int32; }},
      {"null q", "q", [](Args& a) { a.q.data = nullptr; }},
      {"null k", "k", [](Args& a) { a.k.data = nullptr; }},
      {"null v", "v", [](Args& a) { a.v.data = nullptr; }},
      {"null beta", "beta", [](Args& a) { a.beta.data = nullptr; }},
      {"null g", "g", [](Args& a) { a.g.data = nullptr; }},
      {"null A_log", "A_log", [](Args& a) { a.A_log.data = nullptr; }},
      {"null dt_bias", "dt_bias", [](Args& a) { a.dt_bias.data = nullptr; }},
      {"misaligned q", "q", [](Args& a) { misalign(a.q); }},
      {"misaligned k", "k", [](Args& a) { misalign(a.k); }},
      {"v off by half an element", "v", [](Args& a) { misalign(a.v, 2); }},
      {"misaligned beta", "beta", [](Args& a) { misalign(a.beta); }},
      {"misaligned g", "g", [](Args& a) { misalign(a.g); }},
      {"misaligned A_log", "A_log", [](Args& a) { misalign(a.A_log); }},
      {"misaligned dt_bias", "dt_bias", [](Args& a) { misalign(a.dt_bias); }},
      {"q with a strided last axis", "q", [](Args& a) { a.q.strides[3] = 2; }},
      {"k with a strided last axis", "k", [](Args& a) { a.k.strides[3] = 0; }},
      {"v with a reversed last axis", "v", [](Args& a) { a.v.strides[3] = -1; }},
      {"chunk size below zero", "chunk_size", [](Args& a) { a.options.chunk_size = -1; }},
      {"qk_scale NaN", "qk_scale", [](Args& a) { a.options.qk_scale = nan; }},
      {"qk_scale infinite", "qk_scale", [](Args& a) { a.options.qk_scale = -infinity; }},
      {"no such write gate", "write", [](Args& a) { a.options.write = static_cast<WriteGate>(3); }},
  };
}

// Rows of forward and backward, which have an initial state.
template <class Args>
std::vector<BadRow<Args>> initial_state_rows() {
  return {
      {"initial_state of rank 3", "initial_state", [](Args& a) { a.initial_state.rank = 3; }},
      {"initial_state with a strided last axis", "initial_state", [](Args& a) { a.initial_state.strides[3] = 2; }},
      {"initial_state in bfloat16", "initial_state", [](Args& a) { a.initial_state.dtype = DType::bfloat16; }},
      {"initial_state in float64", "initial_state", [](Args& a) { a.initial_state.dtype = DType::float64; }},
      {"initial_state of another shape", "initial_state", [](Args& a) { a.initial_state.shape[2] = 3; }},
      {"initial_state of too few sequences", "initial_state", [](Args& a) { a.initial_state.shape[0] = 1; }},
      {"null initial_state", "initial_state", [](Args& a) { a.initial_state.data = nullptr; }},
      {"misaligned initial_state", "initial_state", [](Args& a) { misalign(a.initial_state); }},
  };
}

const std::vector<BadRow<DeltaForward>> forward_rows{
    {"h not given", "h", [](DeltaForward& a) { a.h = {}; }},
    {"h of another shape", "h", [](DeltaForward& a) { a.h.shape[3] = 2; }},
    {"h of another dtype", "h", [](DeltaForward& a) { a.h.dtype = DType::float16; }},
    {"null h", "h", [](DeltaForward& a) { a.h.data = nullptr; }},
    {"misaligned h", "h", [](DeltaForward& a) { misalign(a.h); }},
    {"h with a strided last axis", "h", [](DeltaForward& a) { a.h.strides[3] = 2; }},
    {"h on q", "h", [](DeltaForward& a) { move_onto(a.h, a.q); }},
    {"h on v", "h", [](DeltaForward& a) { move_onto(a.h, a.v); }},
    {"h on beta", "h", [](DeltaForward& a) { move_onto(a.h, a.beta); }},
    {"h on g", "h", [](DeltaForward& a) { move_onto(a.h, a.g); }},
    {"h on A_log", "h|A_log", [](DeltaForward& a) { move_onto(a.h, a.A_log); }},
    {"h on dt_bias", "h|dt_bias", [](DeltaForward& a) { move_onto(a.h, a.dt_bias); }},
    {"h on the initial state", "h", [](DeltaForward& a) { move_onto(a.h, a.initial_state); }},
    {"h on the last state", "h|last_state", [](DeltaForward& a) { move_onto(a.h, a.last_state); }},
    {"tokens of h all in one place", "h", [](DeltaForward& a) { a.h.strides[1] = 0; }},
    {"rows of h into one another", "h", [](DeltaForward& a) { a.h.strides[2] = 2; }},
    {"last_state in float16", "last_state", [](DeltaForward& a) { a.last_state.dtype = DType::float16; }},
    {"last_state of another shape", "last_state", [](DeltaForward& a) { a.last_state.shape[1] = 1; }},
    {"null last_state", "last_state", [](DeltaForward& a) { a.last_state.data = nullptr; }},
    {"misaligned last_state", "last_state", [](DeltaForward& a) { misalign(a.last_state); }},
    {"last states of the heads in one place", "last_state", [](DeltaForward& a) { a.last_state.strides[1] = 0; }},
    {"last state on k", "last_state|k", [](DeltaForward& a) { move_onto(a.last_state, a.k); }},
    {"last state across the initial state", "last_state|initial_state",
     [](DeltaForward& a) {
       move_onto(a.last_state, a.initial_state);
       misalign(a.last_state, 4);
     }},
    {"last state in place of the initial one, heads and sequences exchanged", "last_state|initial_state",
     [](DeltaForward& a) {
       move_onto(a.last_state, a.initial_state);
       std::swap(a.last_state.strides[0], a.last_state.strides[1]);
     }}};

const std::vector<BadRow<DeltaBackward>> backward_rows{
    {"dh not given", "dh", [](DeltaBackward& a) { a.dh = {}; }},
    {"dh of another shape", "dh", [](DeltaBackward& a) { a.dh.shape[1] = 7; }},
    {"dh of another dtype", "dh", [](DeltaBackward& a) { a.dh.dtype = DType::float64; }},
    {"dh with a strided last axis", "dh", [](DeltaBackward& a) { a.dh.strides[3] = 3; }},
    {"dq not given", "dq", [](DeltaBackward& a) { a.dq = {}; }},
    {"dk not given", "dk", [](DeltaBackward& a) { a.dk = {}; }},
    {"dv not given", "dv", [](DeltaBackward& a) { a.dv = {}; }},
    {"dbeta not given", "dbeta", [](DeltaBackward& a) { a.dbeta = {}; }},
    {"g without dg", "dg", [](DeltaBackward& a) { a.dg = {}; }},
    {"A_log without dA_log", "dA_log", [](DeltaBackward& a) { a.dA_log = {}; }},
    {"dt_bias without ddt_bias", "ddt_bias", [](DeltaBackward& a) { a.ddt_bias = {}; }},
    {"dg without g", "dg",
     [](DeltaBackward& a) {
       a.g = a.A_log = a.dt_bias = {};
       a.dA_log = a.ddt_bias = {};
     }},
    {"dA_log without A_log", "dA_log",
     [](DeltaBackward& a) {
       a.A_log = a.dt_bias = {};
       a.ddt_bias = {};
     }},
    {"ddt_bias without dt_bias", "ddt_bias", [](DeltaBackward& a) { a.dt_bias = {}; }},
    {"dk of another shape", "dk", [](DeltaBackward& a) { a.dk.shape[3] = 5; }},
    {"dg of another shape", "dg", [](DeltaBackward& a) { a.dg.shape[2] = 1; }},
    {"dA_log of another shape", "dA_log", [](DeltaBackward& a) { a.dA_log.shape[0] = 1; }},
    {"ddt_bias of another rank", "ddt_bias",
     [](DeltaBackward& a) {
       a.ddt_bias = MutableTensorView(a.ddt_bias.data, a.ddt_bias.dtype, {1, 2});
     }},
    {"dv of another dtype", "dv", [](DeltaBackward& a) { a.dv.dtype = DType::bfloat16; }},
    {"dbeta of another dtype than beta", "dbeta", [](DeltaBackward& a) { a.dbeta.dtype = DType::float64; }},
    {"dg of another dtype than g", "dg", [](DeltaBackward& a) { a.dg.dtype = DType::bfloat16; }},
    {"dg of the dtype of beta", "dg", [](DeltaBackward& a) { a.g.dtype = DType::bfloat16; }},
    {"dA_log of another dtype than A_log", "dA_log", [](DeltaBackward& a) { a.dA_log.dtype = DType::float64; }},
    {"ddt_bias of another dtype than dt_bias", "ddt_bias", [](DeltaBackward& a) { a.ddt_bias.dtype = DType::float16; }},
    {"null dq", "dq", [](DeltaBackward& a) { a.dq.data = nullptr; }},
    {"null dA_log", "dA_log", [](DeltaBackward& a) { a.dA_log.data = nullptr; }},
    {"misaligned dbeta", "dbeta", [](DeltaBackward& a) { misalign(a.dbeta); }},
    {"misaligned ddt_bias", "ddt_bias", [](DeltaBackward& a) { misalign(a.ddt_bias); }},
    {"dq on dk", "dq|dk", [](DeltaBackward& a) { move_onto(a.dq, a.dk); }},
    {"dv on v", "dv|v", [](DeltaBackward& a) { move_onto(a.dv, a.v); }},
    {"dv on dh", "dv|dh", [](DeltaBackward& a) { move_onto(a.dv, a.dh); }},
    {"dbeta on dg", "dbeta|dg", [](DeltaBackward& a) { move_onto(a.dbeta, a.dg); }},
    {"dA_log on A_log", "dA_log|A_log", [](DeltaBackward& a) { move_onto(a.dA_log, a.A_log); }},
    {"ddt_bias on dA_log", "ddt_bias|dA_log", [](DeltaBackward& a) { move_onto(a.ddt_bias, a.dA_log); }},
    {"ddt_bias on dq", "ddt_bias|dq", [](DeltaBackward& a) { move_onto(a.ddt_bias, a.dq); }},
    {"heads of dv in one place", "dv", [](DeltaBackward& a) { a.dv.strides[2] = 0; }},
    {"batches of dg in one place", "dg", [](DeltaBackward& a) { a.dg.strides[0] = 0; }},
    {"heads of dA_log in one place", "dA_log", [](DeltaBackward& a) { a.dA_log.strides[0] = 0; }},
    {"dlast_state of another shape", "dlast_state", [](DeltaBackward& a) { a.dlast_state.shape[0] = 3; }},
    {"dlast_state of another dtype", "dlast_state", [](DeltaBackward& a) { a.dlast_state.dtype = DType::float64; }},
    {"null dlast_state", "dlast_state", [](DeltaBackward& a) { a.dlast_state.data = nullptr; }},
    {"dinitial_state of another shape", "dinitial_state", [](DeltaBackward& a) { a.dinitial_state.shape[3] = 1; }},
    {"dinitial_state of another dtype", "dinitial_state",
     [](DeltaBackward& a) { a.dinitial_state.dtype = DType::bfloat16; }},
    {"misaligned dinitial_state", "dinitial_state", [](DeltaBackward& a) { misalign(a.dinitial_state); }},
    {"dinitial_state on dlast_state", "dinitial_state|dlast_state",
     [](DeltaBackward& a) { move_onto(a.dinitial_state, a.dlast_state); }},
    {"dinitial_state on dq", "dinitial_state|dq", [](DeltaBackward& a) { move_onto(a.dinitial_state, a.dq); }}};

TEST(DeltaValidationSmall, ForwardRefuses) {
  const DeltaProblem problem(good_case());
  const auto contents = [&] { return all_contents(problem); };
  expect_refused(problem.forward, common_rows<DeltaForward>(), contents);
  expect_refused(problem.forward, initial_state_rows<DeltaForward>(), contents);
  expect_refused(problem.forward, forward_rows, contents);
}

TEST(DeltaValidationSmall, BackwardRefuses) {
  const DeltaProblem problem(good_case());
  const auto contents = [&] { return all_contents(problem); };
  expect_refused(problem.backward, common_rows<DeltaBackward>(), contents);
  expect_refused(problem.backward, initial_state_rows<DeltaBackward>(), contents);
  expect_refused(problem.backward, backward_rows, contents);
}

// ---------------------------------------------------------------- step

DeltaStep step_args(const DeltaForward& f) {
  return {.q = f.q,
          .k = f.k,
          .v = f.v,
          .beta = f.beta,
          .g = f.g,
          .A_log = f.A_log,
          .dt_bias = f.dt_bias,
          .h = f.h,
          .state = f.last_state,
          .options = f.options};
}

constexpr std::int64_t in_order[] = {0, 1, 2}, below[] = {0, -2}, beyond[] = {0, 2}, twice[] = {1, 1},
                       far_beyond[] = {0, std::numeric_limits<std::int64_t>::max()};
constexpr std::int32_t below_narrow[] = {0, -2}, twice_narrow[] = {1, 1};
constexpr float not_integers[] = {0, 1};

auto slots(const void* data, DType dtype, std::int64_t count) {
  return [=](DeltaStep& a) { a.slots = TensorView(data, dtype, {count}); };
}

const std::vector<BadRow<DeltaStep>> step_rows{
    {"h not given", "h", [](DeltaStep& a) { a.h = {}; }},
    {"h of another shape", "h", [](DeltaStep& a) { a.h.shape[2] = 1; }},
    {"null h", "h", [](DeltaStep& a) { a.h.data = nullptr; }},
    {"h on v", "h|v", [](DeltaStep& a) { move_onto(a.h, a.v); }},
    {"h on the state", "h|state", [](DeltaStep& a) { move_onto(a.h, a.state); }},
    {"state not given", "state", [](DeltaStep& a) { a.state = {}; }},
    {"state of another shape", "state", [](DeltaStep& a) { a.state.shape[3] = 4; }},
    {"state with other heads", "state", [](DeltaStep& a) { a.state.shape[1] = 1; }},
    {"fewer states than rows", "state", [](DeltaStep& a) { a.state.shape[0] = 1; }},
    {"state in bfloat16", "state", [](DeltaStep& a) { a.state.dtype = DType::bfloat16; }},
    {"state in float64", "state", [](DeltaStep& a) { a.state.dtype = DType::float64; }},
    {"null state", "state", [](DeltaStep& a) { a.state.data = nullptr; }},
    {"misaligned state", "state", [](DeltaStep& a) { misalign(a.state); }},
    {"state with a strided last axis", "state", [](DeltaStep& a) { a.state.strides[3] = 2; }},
    {"slots of the state in one place", "state", [](DeltaStep& a) { a.state.strides[0] = 0; }},
    {"state on q", "state|q", [](DeltaStep& a) { move_onto(a.state, a.q); }},
    {"state on A_log", "state|A_log", [](DeltaStep& a) { move_onto(a.state, a.A_log); }},
    {"slot below -1", "slots", slots(below, DType::int64, 2)},
    {"int32 slot below -1", "slots", slots(below_narrow, DType::int32, 2)},
    {"slot beyond the pool", "slots", slots(beyond, DType::int64, 2)},
    {"slot far beyond the pool", "slots", slots(far_beyond, DType::int64, 2)},
    {"one slot twice", "slots", slots(twice, DType::int64, 2)},
    {"one int32 slot twice", "slots", slots(twice_narrow, DType::int32, 2)},
    {"slots of floats", "slots", slots(not_integers, DType::float32, 2)},
    {"too few slots", "slots", slots(in_order, DType::int64, 1)},
    {"too many slots", "slots", slots(in_order, DType::int64, 3)},
    {"null slots", "slots", slots(nullptr, DType::int64, 2)},
    {"slots of rank 2", "slots",
     [](DeltaStep& a) {
       a.slots = {in_order, DType::int64, {2, 1}};
     }},
    {"misaligned slots", "slots",
     [](DeltaStep& a) {
       a.slots = {in_order, DType::int64, {2}};
       misalign(a.slots);
     }},
    {"slots on the state", "slots|state", [](DeltaStep& a) {
       a.slots = {a.state.data, DType::int64, {2}};
     }}};

TEST(DeltaValidationSmall, StepRefuses) {
  const DeltaProblem problem(good_case());
  const auto contents = [&] { return all_contents(problem); };
  const DeltaStep good = step_args(problem.forward);
  // Zero bits in the state: "slots on the state" then reads slots that would all be 0, had the overlap been missed.
  overwrite(good.state, Values(gather(good.state).size(), 0));
  expect_refused(good, common_rows<DeltaStep>(), contents);
  expect_refused(good, step_rows, contents);
}

// ---------------------------------------------------------------- packed sequences

template <class Args>
std::vector<BadRow<Args>> boundary_rows() {
  static const std::int64_t falling[] = {0, 7, 6}, late[] = {1, 2, 6}, negative[] = {0, -1, 6};
  static const std::int64_t past[] = {0, 2, 7}, overflowing[] = {0, std::numeric_limits<std::int64_t>::max(), 6};
  static const std::int32_t falling_narrow[] = {0, 7, 6};
  static const double floats[] = {0, 2, 6};
  const auto given = [](const void* data, DType dtype, std::int64_t count) {
    return [=](Args& a) { a.cu_seqlens = TensorView(data, dtype, {count}); };
  };
  return {{"falling boundaries", "cu_seqlens", given(falling, DType::int64, 3)},
          {"falling int32 boundaries", "cu_seqlens", given(falling_narrow, DType::int32, 3)},
          {"first boundary not 0", "cu_seqlens", given(late, DType::int64, 3)},
          {"last boundary beyond T", "cu_seqlens", given(past, DType::int64, 3)},
          {"negative boundary", "cu_seqlens", given(negative, DType::int64, 3)},
          {"huge boundary", "cu_seqlens", given(overflowing, DType::int64, 3)},
          {"boundaries of floats", "cu_seqlens", given(floats, DType::float64, 3)},
          {"no boundaries", "cu_seqlens", given(falling, DType::int64, 0)},
          {"one boundary", "cu_seqlens", given(falling, DType::int64, 1)},
          {"null boundaries", "cu_seqlens", given(nullptr, DType::int64, 3)},
          {"misaligned boundaries", "cu_seqlens", [](Args& a) { misalign(a.cu_seqlens); }},
          {"boundaries of rank 2", "cu_seqlens",
           [](Args& a) {
             a.cu_seqlens = TensorView(a.cu_seqlens.data, DType::int64, {1, 3});
           }},
          {"states of another number of sequences", "initial_state|cu_seqlens", [](Args& a) {
             static const std::int64_t three[] = {0, 2, 2, 6};
             a.cu_seqlens = TensorView(three, DType::int64, {4});
           }}};
}

TEST(DeltaValidationSmall, BoundariesAreChecked) {
  const DeltaProblem packed(packed_case());
  expect_refused(packed.forward, boundary_rows<DeltaForward>(), [&] { return all_contents(packed); });
  expect_refused(packed.backward, boundary_rows<DeltaBackward>(), [&] { return all_contents(packed); });
  DeltaProblem batch(good_case());
  static const std::int64_t boundaries[] = {0, 2, 6};
  batch.forward.cu_seqlens = TensorView(boundaries, DType::int64, {3});
  expect_sentence(refusal([&] { delta_forward(batch.forward); }), "cu_seqlens|q");
}

// ---------------------------------------------------------------- execution, plan and scratch

// Each way to run or plan the three operations of a problem.
std::vector<std::function<void(const Execution&)>> every_call(const DeltaProblem& problem) {
  const DeltaStep stepped = step_args(problem.forward);
  return {[&](const Execution& e) { delta_forward(problem.forward, e); },
          [&](const Execution& e) { delta_backward(problem.backward, e); },
          [stepped](const Execution& e) { delta_step(stepped, e); },
          [&](const Execution& e) { static_cast<void>(delta_plan(problem.forward, e)); },
          [&](const Execution& e) { static_cast<void>(delta_plan(problem.backward, e)); },
          [stepped](const Execution& e) { static_cast<void>(delta_plan(stepped, e)); },
          [&](const Execution& e) {
            static_cast<void>(delta_plan(Operation::forward, problem.description.shape, problem.forward.options, e));
          }};
}

TEST(DeltaValidationSmall, ExecutionIsChecked) {
  const DeltaProblem problem(good_case());
  const Snapshot before = all_contents(problem);
  for (const auto& call : every_call(problem)) {
    expect_sentence(refusal([&] { call({.threads = -1}); }), "threads");
    expect_sentence(refusal([&] { call({.device = static_cast<Device>(9)}); }), "device");
  }
  EXPECT_TRUE(same_bits(all_contents(problem), before));
}

TEST(DeltaValidationSmall, ThereAreNoCudaKernels) {
  const DeltaProblem problem(good_case());
  const Snapshot before = all_contents(problem);
  for (const auto& call : every_call(problem)) {
    try {
      call({.device = Device::cuda});
      ADD_FAILURE() << "ran";
    } catch (const Unavailable& error) {
      expect_sentence(error.what(), "CUDA|cuda");
    }
  }
  EXPECT_TRUE(same_bits(all_contents(problem), before));
}

TEST(DeltaValidationSmall, PlanAndScratchAreChecked) {
  const DeltaProblem problem(good_case());
  const DeltaForward& f = problem.forward;
  const DeltaBackward& b = problem.backward;
  const DeltaStep s = step_args(f);
  const DeltaPlan forward_plan = delta_plan(f), backward_plan = delta_plan(b), step_plan = delta_plan(s);
  const std::size_t enough =
      std::max({forward_plan.scratch_bytes, backward_plan.scratch_bytes, step_plan.scratch_bytes});
  const testkit::Buffer memory(static_cast<std::int64_t>(enough) + 64);
  const auto scratch = [&](std::size_t offset, std::size_t bytes) { return std::span(memory.data() + offset, bytes); };
  const Snapshot before = all_contents(problem);
  ASSERT_GT(forward_plan.scratch_bytes, 0U);
  ASSERT_GT(backward_plan.scratch_bytes, 0U);
  for (const std::size_t offset : {0, 1, 32}) {
    const std::size_t missing = offset == 0 ? 1 : 0;
    const auto bad = [&](const DeltaPlan& plan) { return scratch(offset, plan.scratch_bytes - missing); };
    expect_sentence(refusal([&] { delta_forward(f, forward_plan, bad(forward_plan)); }), "scratch");
    expect_sentence(refusal([&] { delta_backward(b, backward_plan, bad(backward_plan)); }), "scratch");
    if (step_plan.scratch_bytes > 0) {
      expect_sentence(refusal([&] { delta_step(s, step_plan, bad(step_plan)); }), "scratch");
    }
  }
  expect_sentence(refusal([&] { delta_forward(f, forward_plan, {}); }), "scratch");
  expect_sentence(refusal([&] { delta_forward(f, backward_plan, scratch(0, enough)); }), "plan");
  expect_sentence(refusal([&] { delta_backward(b, forward_plan, scratch(0, enough)); }), "plan");
  expect_sentence(refusal([&] { delta_step(s, forward_plan, scratch(0, enough)); }), "plan");

  for (const auto change :
       {+[](DeltaCase& c) { c.shape.tokens = 7; }, +[](DeltaCase& c) { c.shape.dqk = 5; },
        +[](DeltaCase& c) { c.shape.batch = 3; }, +[](DeltaCase& c) { c.shape.qk_heads = 2; },
        +[](DeltaCase& c) { c.shape.dtype = DType::bfloat16; }, +[](DeltaCase& c) { c.options.qk_scale = 0.25; },
        +[](DeltaCase& c) { c.options.normalize_qk = true; }, +[](DeltaCase& c) { c.options.chunk_size = 3; },
        +[](DeltaCase& c) { c.options.write = WriteGate::sigmoid; }}) {
    DeltaCase changed = good_case();
    change(changed);
    const DeltaProblem other(changed);
    expect_sentence(refusal([&] { delta_forward(f, delta_plan(other.forward), scratch(0, enough)); }), "plan");
    expect_sentence(refusal([&] { delta_backward(b, delta_plan(other.backward), scratch(0, enough)); }), "plan");
    expect_sentence(refusal([&] { delta_step(s, delta_plan(step_args(other.forward)), scratch(0, enough)); }), "plan");
  }
  EXPECT_TRUE(same_bits(all_contents(problem), before));
  delta_forward(f, forward_plan, scratch(0, forward_plan.scratch_bytes));
  delta_backward(b, backward_plan, scratch(0, backward_plan.scratch_bytes));
}

// ---------------------------------------------------------------- what must be accepted

TEST(DeltaValidationSmall, UnusualButGoodArgumentsAreAccepted) {
  const DeltaProblem problem(good_case());
  const auto accepted = [](auto args, const auto& change) {
    change(args);
    EXPECT_NO_THROW(run_operation(args));
  };
  accepted(problem.forward, [](DeltaForward& a) {  // broadcast inputs
    a.q.strides[1] = a.beta.strides[0] = a.beta.strides[1] = a.beta.strides[2] = a.A_log.strides[0] = 0;
  });
  accepted(problem.forward, [](DeltaForward& a) {
    a.k.data = static_cast<const float*>(a.k.data) + a.k.strides[0];
    a.k.strides[0] = -a.k.strides[0];
  });
  accepted(problem.forward, [](DeltaForward& a) { a.k = a.q; });     // two inputs may be one
  accepted(problem.forward, [](DeltaForward& a) { a.g = a.beta; });  // of the gates too
  accepted(problem.forward, [](DeltaForward& a) { a.initial_state = {}; });
  accepted(problem.forward, [](DeltaForward& a) { a.last_state = {}; });
  accepted(problem.backward, [](DeltaBackward& a) { a.dlast_state = {}; });
  accepted(problem.backward, [](DeltaBackward& a) { a.dinitial_state = {}; });
  accepted(problem.backward, [](DeltaBackward& a) { a.initial_state = {}; });  // a gradient of a state of zeros
  accepted(problem.forward, [](DeltaForward& a) {  // strides of axes of extent 1 mean nothing
    for (TensorView* view : {&a.q, &a.k, &a.v, &a.beta, &a.g}) *view = slice(*view, 0, 0, 1);
    a.h = slice(a.h, 0, 0, 1);
    a.initial_state = {};
    a.last_state = {};
    a.h.strides[0] = 0;
    a.q.strides[0] = huge;
  });
  // Slots in any order, and a last axis of one element, whose stride means nothing.
  overwrite(problem.forward.last_state, Values(gather(problem.forward.last_state).size(), 0));
  accepted(step_args(problem.forward), [](DeltaStep& a) {
    static const std::int32_t order[] = {1, 0};
    a.slots = {order, DType::int32, {2}};
  });
  DeltaCase narrow = good_case();
  narrow.shape.dhv = narrow.shape.dqk = 1;
  const DeltaProblem thin(narrow);
  accepted(thin.backward, [](DeltaBackward& a) { a.v.strides[3] = a.dq.strides[3] = 5; });
}

TEST(DeltaValidationSmall, NothingToDoIsDone) {
  for (const auto change : {+[](DeltaCase& c) { c.shape.tokens = 0; }, +[](DeltaCase& c) { c.shape.batch = 0; }}) {
    DeltaCase c = good_case();
    change(c);
    DeltaProblem problem(c);
    const Snapshot results = run_both(problem);
    EXPECT_EQ(results.at("dA_log"), Values(2, 0));
    EXPECT_EQ(results.at("ddt_bias"), Values(2, 0));
    if (c.shape.batch == 0) continue;
    EXPECT_TRUE(same_bits(results.at("C"), gather(problem.forward.initial_state)));
    EXPECT_TRUE(same_bits(results.at("dC0"), gather(problem.backward.dlast_state)));
  }
}

}  // namespace
}  // namespace tfla::test
