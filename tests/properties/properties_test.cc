// What must hold whatever the numbers are: chunk sizes, cuts, packing, order and strides do not change results.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "reference/values.h"
#include "testkit/tensor.h"
#include "tests/support/support.h"

namespace tfla::test {
namespace {

using reference::Regime;
using testkit::Case;
using testkit::gather;
using testkit::Layout;
using testkit::Problem;
using testkit::Tensor;

struct Variant {
  InputGate gate;
  Normalizer normalizer;
  bool exact;
};
constexpr Variant variants[] = {
    {InputGate::exponential, Normalizer::max, false},  {InputGate::exponential, Normalizer::max, true},
    {InputGate::exponential, Normalizer::none, false}, {InputGate::sigmoid, Normalizer::none, false},
    {InputGate::sigmoid, Normalizer::max, true},       {InputGate::log, Normalizer::none, false}};

Case base_case(const Variant& v, std::int64_t batch, std::int64_t tokens, DType dtype) {
  Case c;
  c.shape = {.batch = batch,
             .tokens = tokens,
             .qk_heads = 2,
             .heads = 4,
             .dqk = 5,
             .dhv = 7,
             .dtype = dtype,
             .gate_dtype = dtype};
  c.options = {.gate = v.gate, .normalizer = v.normalizer, .exact_normalizer_grad = v.exact};
  c.initial_state = true;
  c.last_state_grad = true;
  return c;
}

TEST(PropertiesSmall, ChunkSizeAndFormulationDoNotMatter) {
  for (const Variant& v : variants) {
    for (const Regime regime : {Regime::randn, Regime::resets, Regime::trained_like}) {
      Case c = base_case(v, 1, 150, DType::float64);
      c.regime = regime;
      c.options.chunk_size = 64;
      Problem problem(c);
      const Snapshot expected = run_both(problem);
      for (const std::int64_t chunk_size : {0, 1, 3, 16, 50, 149, 150, 151, 1000}) {
        problem.forward().options.chunk_size = problem.backward().options.chunk_size = chunk_size;
        EXPECT_TRUE(close(run_both(problem), expected, c)) << label(c) << ", chunk size " << chunk_size;
      }
      problem.forward().options.formulation = problem.backward().options.formulation = Formulation::parallel;
      EXPECT_TRUE(close(run_both(problem), expected, c)) << label(c) << ", parallel";
      problem.forward().options.formulation = Formulation::recurrent;
      Snapshot forward_only = expected;
      std::erase_if(forward_only, [](const auto& tensor) { return tensor.first.starts_with('d'); });
      EXPECT_TRUE(close(run_forward(problem), forward_only, c)) << label(c) << ", recurrent";
    }
  }
}

// ---------------------------------------------------------------- parts of a call

MlstmForward part(MlstmForward args, std::int64_t batch, std::int64_t begin, std::int64_t count) {
  for (TensorView* view : {&args.q, &args.k, &args.v, &args.i, &args.f}) {
    *view = slice(slice(*view, 0, batch, 1), 1, begin, count);
  }
  args.h = slice(slice(args.h, 0, batch, 1), 1, begin, count);
  args.cu_seqlens = {};
  return args;
}

MlstmBackward part(MlstmBackward args, std::int64_t batch, std::int64_t begin, std::int64_t count) {
  for (TensorView* view : {&args.q, &args.k, &args.v, &args.i, &args.f, &args.dh}) {
    *view = slice(slice(*view, 0, batch, 1), 1, begin, count);
  }
  for (MutableTensorView* view : {&args.dq, &args.dk, &args.dv, &args.di, &args.df}) {
    *view = slice(slice(*view, 0, batch, 1), 1, begin, count);
  }
  args.cu_seqlens = {};
  return args;
}

template <class State>
State sequence_of(State state, std::int64_t sequence) {
  state.C = slice(state.C, 0, sequence, 1);
  state.n = slice(state.n, 0, sequence, 1);
  if constexpr (requires { state.m; }) state.m = slice(state.m, 0, sequence, 1);
  return state;
}

// One sequence of the problem on its own, through views of the same memory.
void run_alone(Problem& problem, std::int64_t sequence, std::int64_t batch, std::int64_t begin, std::int64_t count) {
  MlstmForward f = part(problem.forward(), batch, begin, count);
  f.initial_state = sequence_of(f.initial_state, sequence);
  f.last_state = sequence_of(f.last_state, sequence);
  forward(f);
  MlstmBackward b = part(problem.backward(), batch, begin, count);
  b.initial_state = sequence_of(b.initial_state, sequence);
  b.dlast_state = sequence_of(b.dlast_state, sequence);
  b.dinitial_state = sequence_of(b.dinitial_state, sequence);
  backward(b);
}

Snapshot both_snapshots(Problem& problem) {
  Snapshot both = snapshot(problem.forward());
  both.merge(snapshot(problem.backward()));
  return both;
}

TEST(PropertiesSmall, CutAnywhereAndResumedEqualsTheWhole) {
  constexpr std::int64_t T = 101;
  for (const Variant& v : variants) {
    for (const std::int64_t chunk_size : {0, 16}) {
      Case c = base_case(v, 1, T, DType::float64);
      c.options.chunk_size = chunk_size;
      Problem problem(c);
      const Snapshot whole = run_both(problem);
      const Tensor C(DType::float64, {1, 4, 5, 7}), n(DType::float64, {1, 4, 5}), m(DType::float64, {1, 4});
      const Tensor dC(DType::float64, {1, 4, 5, 7}), dn(DType::float64, {1, 4, 5});
      for (const std::int64_t cut : {0, 1, 2, 17, 64, 100, 101}) {
        problem.poison();
        MlstmForward first = part(problem.forward(), 0, 0, cut);
        first.last_state = {C.view, n.view, m.view};
        forward(first);
        MlstmForward second = part(problem.forward(), 0, cut, T - cut);
        second.initial_state = {C.view, n.view, m.view};
        forward(second);
        MlstmBackward later = part(problem.backward(), 0, cut, T - cut);
        later.initial_state = {C.view, n.view, m.view};
        later.dinitial_state = {dC.view, dn.view};
        backward(later);
        MlstmBackward earlier = part(problem.backward(), 0, 0, cut);
        earlier.dlast_state = {dC.view, dn.view};
        backward(earlier);
        EXPECT_TRUE(close(both_snapshots(problem), whole, c)) << label(c) << ", cut at " << cut;
      }
    }
  }
}

// ---------------------------------------------------------------- packing

TEST(PropertiesSmall, PackedEqualsSeparateBitForBit) {
  const std::vector<std::int64_t> boundaries{0, 0, 5, 6, 40, 40, 101};
  for (const DType dtype : {DType::float32, DType::float64, DType::bfloat16}) {
    for (const Variant& v : variants) {
      for (const Formulation formulation : {Formulation::chunkwise, Formulation::parallel}) {
        Case c = base_case(v, 1, 101, dtype);
        c.cu_seqlens = boundaries;
        c.options.chunk_size = 16;
        c.options.formulation = formulation;
        Problem problem(c);
        const Snapshot packed = run_both(problem);
        problem.poison();
        for (std::size_t s = 0; s + 1 < boundaries.size(); ++s) {
          run_alone(problem, static_cast<std::int64_t>(s), 0, boundaries[s], boundaries[s + 1] - boundaries[s]);
        }
        EXPECT_TRUE(same_bits(both_snapshots(problem), packed)) << label(c);
      }
    }
  }
}

TEST(PropertiesSmall, PackedEqualsSeparateAtTheDefaultChunkSize) {
  const std::vector<std::int64_t> boundaries{0, 0, 300, 301, 640};
  Case c = base_case(variants[1], 1, 640, DType::float64);
  c.cu_seqlens = boundaries;
  Problem problem(c);
  const Snapshot packed = run_both(problem);
  problem.poison();
  for (std::size_t s = 0; s + 1 < boundaries.size(); ++s) {
    run_alone(problem, static_cast<std::int64_t>(s), 0, boundaries[s], boundaries[s + 1] - boundaries[s]);
  }
  EXPECT_TRUE(close(both_snapshots(problem), packed, c));
}

TEST(PropertiesSmall, BatchEqualsItsRowsAndItsPackingBitForBit) {
  Case c = base_case(variants[1], 3, 37, DType::float32);
  c.options.chunk_size = 16;
  Problem problem(c);
  const Snapshot batch = run_both(problem);
  problem.poison();
  for (std::int64_t b = 0; b < 3; ++b) run_alone(problem, b, b, 0, 37);
  EXPECT_TRUE(same_bits(both_snapshots(problem), batch));

  Case as_packed = c;
  as_packed.shape.batch = 1;
  as_packed.shape.tokens = 3 * 37;
  as_packed.cu_seqlens = {0, 37, 74, 111};
  Problem packed(as_packed);  // the same draws: element for element the same memory
  EXPECT_TRUE(same_bits(run_both(packed), batch));
}

TEST(PropertiesSmall, BoundariesMayBeInt32OrAColumnOfATable) {
  Case c = base_case(variants[0], 1, 50, DType::float32);
  c.cu_seqlens = {0, 20, 20, 50};
  Problem problem(c);
  const Snapshot wide = run_both(problem);
  const std::int32_t narrow[] = {0, 20, 20, 50};
  problem.forward().cu_seqlens = problem.backward().cu_seqlens = TensorView(narrow, DType::int32, {4});
  EXPECT_TRUE(same_bits(run_both(problem), wide));
  const std::int64_t table[] = {0, 7, 20, 7, 20, 7, 50, 7};
  problem.forward().cu_seqlens = problem.backward().cu_seqlens = TensorView(table, DType::int64, {4}, {2});
  EXPECT_TRUE(same_bits(run_both(problem), wide));
}

// ---------------------------------------------------------------- order

using Order = std::vector<std::int64_t>;

// Runs a problem whose inputs are those of `original` with batch rows, heads and query/key heads reordered, and
// expects its outputs to be reordered alike.
void expect_permuted(const Case& c, const Order& batch, const Order& heads, const Order& qk_heads) {
  Problem original(c), permuted(c);
  const auto moved = [&](const TensorView& view, int head_axis, const Order& head_order) {
    return taken(taken(gather(view), view, 0, batch), view, head_axis, head_order);
  };
  MlstmForward &from = original.forward(), &to = permuted.forward();
  MlstmBackward &from_b = original.backward(), &to_b = permuted.backward();
  overwrite(to.q, moved(from.q, 2, qk_heads));
  overwrite(to.k, moved(from.k, 2, qk_heads));
  overwrite(to.v, moved(from.v, 2, heads));
  overwrite(to.i, moved(from.i, 2, heads));
  overwrite(to.f, moved(from.f, 2, heads));
  overwrite(to_b.dh, moved(from_b.dh, 2, heads));
  overwrite(to.initial_state.C, moved(from.initial_state.C, 1, heads));
  overwrite(to.initial_state.n, moved(from.initial_state.n, 1, heads));
  overwrite(to.initial_state.m, moved(from.initial_state.m, 1, heads));
  overwrite(to_b.dlast_state.C, moved(from_b.dlast_state.C, 1, heads));
  overwrite(to_b.dlast_state.n, moved(from_b.dlast_state.n, 1, heads));
  forward(from);
  forward(to);
  backward(from_b);
  backward(to_b);
  Snapshot expected;
  for (const auto& outs : {outputs(from), outputs(from_b)}) {
    for (const auto& [name, view] : outs) {
      const bool state = name == "C" || name == "n" || name == "m" || name == "dC0" || name == "dn0";
      expected[name] = moved(view, state ? 1 : 2, name == "dq" || name == "dk" ? qk_heads : heads);
    }
  }
  EXPECT_TRUE(same_bits(both_snapshots(permuted), expected)) << label(c);
}

TEST(PropertiesSmall, PermutingBatchOrHeadsPermutesResults) {
  for (const Variant& v : variants) {
    const Case c = base_case(v, 3, 45, DType::float32);
    expect_permuted(c, {2, 0, 1}, {0, 1, 2, 3}, {0, 1});
    expect_permuted(c, {0, 1, 2}, {2, 3, 0, 1}, {1, 0});
    Case own_heads = c;
    own_heads.shape.qk_heads = 4;
    expect_permuted(own_heads, {1, 0, 2}, {3, 1, 0, 2}, {3, 1, 0, 2});
  }
}

// ---------------------------------------------------------------- strides

TEST(PropertiesSmall, LayoutDoesNotMatter) {
  for (const DType dtype : {DType::float32, DType::bfloat16, DType::float16, DType::float64}) {
    Case c = base_case(variants[1], 2, 70, dtype);
    Problem rows(c);
    const Snapshot expected = run_both(rows);
    for (const Layout layout : {Layout::bhtd, Layout::fused}) {
      c.layout = layout;
      Problem other(c);
      EXPECT_TRUE(same_bits(run_both(other), expected)) << label(c);
    }
  }
}

// The same shape inside a larger tensor: a gap after every row of every axis.
Tensor spaced(const TensorView& like) {
  Tensor tensor;
  const auto& s = like.shape;
  switch (like.rank) {
    case 2: tensor = Tensor(like.dtype, {s[0] + 1, s[1] + 2}); break;
    case 3: tensor = Tensor(like.dtype, {s[0] + 1, s[1] + 2, s[2] + 3}); break;
    default: tensor = Tensor(like.dtype, {s[0] + 1, s[1] + 2, s[2] + 3, s[3] + 5}); break;
  }
  tensor.view.shape = like.shape;
  return tensor;
}

// Puts the poison back where the view is; if all else is poison still, nothing else was written.
bool gaps_intact(const Tensor& tensor) {
  const std::int64_t item = item_size(tensor.view.dtype);
  for (std::int64_t index = 0; index < reference::element_count(tensor.view); ++index) {
    auto* at = static_cast<std::byte*>(tensor.view.data) + reference::offset_of(tensor.view, index) * item;
    std::memset(at, 0xFF, static_cast<std::size_t>(item));
  }
  const std::byte* bytes = tensor.buffer->data();
  for (std::int64_t at = 0; at < tensor.buffer->size(); ++at) {
    if (bytes[at] != std::byte{0xFF}) return false;
  }
  return tensor.buffer->margins_intact();
}

TEST(PropertiesSmall, GapsBetweenRowsAreNeitherReadNorWritten) {
  for (const DType dtype : {DType::float32, DType::bfloat16, DType::float64}) {
    const Case c = base_case(variants[1], 2, 45, dtype);
    Problem problem(c);
    const Snapshot expected = run_both(problem);
    std::vector<Tensor> inputs, results;
    MlstmForward& f = problem.forward();
    MlstmBackward& b = problem.backward();
    const auto move_input = [&](std::initializer_list<TensorView*> views) {
      inputs.push_back(spaced(**views.begin()));
      testkit::scatter(inputs.back().view, gather(**views.begin()));
      for (TensorView* view : views) *view = inputs.back().view;
    };
    const auto move_output = [&](MutableTensorView& view) {
      results.push_back(spaced(view));
      view = results.back().view;
    };
    move_input({&f.q, &b.q});
    move_input({&f.k, &b.k});
    move_input({&f.v, &b.v});
    move_input({&f.i, &b.i});
    move_input({&f.f, &b.f});
    move_input({&b.dh});
    move_input({&f.initial_state.C, &b.initial_state.C});
    move_input({&f.initial_state.n, &b.initial_state.n});
    move_input({&f.initial_state.m, &b.initial_state.m});
    move_input({&b.dlast_state.C});
    move_input({&b.dlast_state.n});
    for (MutableTensorView* view : {&f.h, &f.last_state.C, &f.last_state.n, &f.last_state.m, &b.dq, &b.dk, &b.dv, &b.di,
                                    &b.df, &b.dinitial_state.C, &b.dinitial_state.n}) {
      move_output(*view);
    }
    EXPECT_TRUE(same_bits(run_both(problem), expected)) << label(c);
    for (std::size_t index = 0; index < results.size(); ++index) {
      EXPECT_TRUE(gaps_intact(results[index])) << "output " << index;
    }
  }
}

TEST(PropertiesSmall, NegativeAndZeroStridesOfInputs) {
  const Case c = base_case(variants[0], 2, 33, DType::float32);
  Problem plain(c), backwards(c);
  // Both batch rows read q of row 0, all heads the input gate of head 0: given once by stride 0, once copied.
  plain.forward().q.strides[0] = plain.backward().q.strides[0] = 0;
  plain.forward().i.strides[2] = plain.backward().i.strides[2] = 0;
  overwrite(backwards.forward().q, gather(plain.forward().q));
  overwrite(backwards.forward().i, gather(plain.forward().i));
  EXPECT_TRUE(same_bits(run_both(plain), run_both(backwards)));

  // v and f stored last token first, and read through a view that walks back.
  const auto reversed = [](const TensorView& view) {
    Order order;
    for (std::int64_t t = view.shape[1]; t-- > 0;) order.push_back(t);
    overwrite(view, taken(gather(view), view, 1, order));
    TensorView back = view;
    back.data =
        static_cast<const std::byte*>(view.data) + (view.shape[1] - 1) * view.strides[1] * item_size(view.dtype);
    back.strides[1] = -view.strides[1];
    return back;
  };
  const Snapshot expected = run_both(backwards);
  backwards.forward().v = backwards.backward().v = reversed(backwards.forward().v);
  backwards.forward().f = backwards.backward().f = reversed(backwards.forward().f);
  EXPECT_TRUE(same_bits(run_both(backwards), expected));
}

TEST(PropertiesSmall, StateMayBeUpdatedInPlace) {
  for (const Variant& v : variants) {
    for (const Formulation formulation : {Formulation::chunkwise, Formulation::parallel, Formulation::recurrent}) {
      Case c = base_case(v, 2, 45, DType::float32);
      c.options.formulation = formulation;
      c.options.chunk_size = 16;
      Problem problem(c);
      const Snapshot expected = run_forward(problem);
      MlstmForward& args = problem.forward();
      overwrite(args.last_state.C, gather(args.initial_state.C));
      overwrite(args.last_state.n, gather(args.initial_state.n));
      overwrite(args.last_state.m, gather(args.initial_state.m));
      args.initial_state = {args.last_state.C, args.last_state.n, args.last_state.m};
      forward(args);
      EXPECT_TRUE(same_bits(snapshot(args), expected)) << label(c);
    }
  }
}

}  // namespace
}  // namespace tfla::test
