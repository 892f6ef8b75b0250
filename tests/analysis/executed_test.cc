// The operations a plan announces are those its kernels execute, product by product; and what the model says a method
// needs is what remains of them when nothing is done twice.
#include <gtest/gtest.h>

#include <fmt/format.h>

#include "testkit/problem.h"
#include "tests/analysis/products.h"
#include "tfla/analysis.h"
#include "tfla/tfla.h"

namespace tfla::test {
namespace {

struct Row {
  MlstmShape shape;
  MlstmOptions options = {};
  int threads = 1;
};

MlstmShape shape(std::int64_t batch, std::int64_t tokens, std::int64_t heads, std::int64_t dqk, std::int64_t dhv) {
  return {.batch = batch, .tokens = tokens, .qk_heads = heads, .heads = heads, .dqk = dqk, .dhv = dhv};
}

std::vector<Row> rows() {
  MlstmShape shared = shape(1, 200, 4, 24, 40);
  shared.qk_heads = 2;
  MlstmShape precise = shape(1, 150, 2, 16, 24);
  precise.dtype = precise.gate_dtype = DType::float64;
  std::vector<Row> table;
  for (const InputGate gate : {InputGate::exponential, InputGate::sigmoid}) {
    for (const std::int64_t chunk : {0, 1, 32, 50, 64, 96, 1000}) {
      for (const std::int64_t tokens : {1, 31, 64, 100, 300}) {
        table.push_back({shape(2, tokens, 2, 24, 40), {.gate = gate, .chunk_size = chunk}});
      }
    }
    // Groups that are more heads, or fewer, than lie abreast, and end among them.
    for (const auto& [heads, groups] : {std::pair{4, 2}, {4, 1}, {12, 2}, {12, 4}, {6, 3}}) {
      shared.heads = heads;
      shared.qk_heads = groups;
      table.push_back({shared, {.gate = gate, .chunk_size = 48}});
    }
    table.push_back({precise, {.gate = gate}});
    // One head and four threads: the sequence is cut into spans, with a pass over the states before.
    table.push_back({shape(1, 600, 1, 16, 130), {.gate = gate}, 4});
    table.push_back({shape(1, 599, 1, 16, 150), {.gate = gate, .chunk_size = 50}, 8});
    for (const std::int64_t tokens : {1, 63, 64, 65, 200})
      table.push_back({shape(1, tokens, 2, 24, 40), {.gate = gate, .formulation = Formulation::parallel}});
  }
  return table;
}

// A plain training call: no states in, none out.
template <class Args>
double executed(const Args& args, const Execution& execution, void (*run)(const Args&, const Execution&)) {
  reset_product_count();
  run(args, execution);
  return counted_flops();
}

TEST(ExecutedSmall, PlansAnnounceTheProductsTheyDo) {
  int with_spans = 0;
  for (const Row& row : rows()) {
    testkit::Case description;
    description.shape = row.shape;
    description.options = row.options;
    testkit::Problem problem(description);
    MlstmForward ahead = problem.forward();
    ahead.last_state = {};
    const Execution execution{.threads = row.threads};
    const Plan forward_plan = plan(ahead, execution);
    EXPECT_EQ(executed<MlstmForward>(ahead, execution, forward), forward_plan.flops) << describe(forward_plan);
    EXPECT_LE(forward_plan.useful_flops, forward_plan.flops) << describe(forward_plan);

    const MlstmBackward& back = problem.backward();
    const Plan backward_plan = plan(back, execution);
    EXPECT_EQ(executed<MlstmBackward>(back, execution, backward), backward_plan.flops) << describe(backward_plan);
    EXPECT_LE(backward_plan.useful_flops, backward_plan.flops) << describe(backward_plan);
    if (!forward_plan.fused() || !backward_plan.fused()) ++with_spans;
  }
  EXPECT_GE(with_spans, 2) << "no row of the table cuts a sequence into spans any more";
}

// One chunk of one tile does nothing twice, so there the count is the model's: the table's products with whole squares
// (causal = 1), less the state that neither comes in nor goes out.
TEST(ExecutedSmall, TablesCountTheProductsOfOurKernels) {
  for (const InputGate gate : {InputGate::exponential, InputGate::sigmoid}) {
    for (const auto pass : {analysis::Pass::forward, analysis::Pass::backward}) {
      constexpr std::int64_t chunks = 5, length = 32, dqk = 24, dhv = 40;
      analysis::Model model{.pass = pass, .gate = gate, .dims = {dqk, dhv}, .factors = {.causal = 1}};
      analysis::Polynomial products;
      for (const analysis::Term& term : analysis::flop_terms(model)) products = products + term.products;

      testkit::Case description;
      description.shape = shape(1, chunks * length, 1, dqk, dhv);
      description.options = {.gate = gate, .chunk_size = length};
      testkit::Problem problem(description);
      MlstmForward ahead = problem.forward();
      ahead.last_state = {};
      ASSERT_EQ(plan(ahead).tile, length);
      const double counted = pass == analysis::Pass::forward
                                 ? executed<MlstmForward>(ahead, {.threads = 1}, forward)
                                 : executed<MlstmBackward>(problem.backward(), {.threads = 1}, backward);
      const double states = products.linear * length;  // the products with a state, per chunk
      const double squares = products.quadratic * length * length;
      EXPECT_EQ(counted, (chunks - 1) * states + chunks * squares);
    }
  }
}

}  // namespace
}  // namespace tfla::test
