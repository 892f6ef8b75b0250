// The plan: pure, nested, frugal, readable, and refused where a call would be.
#include <gtest/gtest.h>

#include <string>

#include "plan/cost/cuda_time.h"
#include "plan/cost/plan_cost.h"
#include "tests/support/support.h"
#include "tests/support/validation.h"

namespace tfla::test {
namespace {

using testkit::Case;
using testkit::Problem;

MlstmShape documented_shape(std::int64_t tokens, DType dtype = DType::float32) {
  return {.tokens = tokens, .qk_heads = 4, .heads = 4, .dqk = 128, .dhv = 256, .longest = tokens, .dtype = dtype};
}

TEST(PlanSmall, SameInSameOut) {
  for (const Operation operation : {Operation::forward, Operation::backward, Operation::step}) {
    const MlstmShape shape = documented_shape(777);
    const Plan first = plan(operation, shape, {}, {.threads = 3});
    const Plan between = plan(operation, documented_shape(12), {.chunk_size = 5}, {.threads = 7});
    EXPECT_EQ(plan(operation, shape, {}, {.threads = 3}), first);
    EXPECT_NE(between, first);
  }
}

// A front end plans from the shape it reads off its tensors; tests plan from arguments. Both have to run the same.
TEST(PlanSmall, OfArgumentsIsThatOfTheirShape) {
  Case c;
  c.shape = {.batch = 2, .tokens = 50, .qk_heads = 1, .heads = 2, .dqk = 3, .dhv = 5, .dtype = DType::bfloat16};
  c.options.chunk_size = 16;
  Problem problem(c);
  MlstmShape shape = c.shape;
  shape.sequences = 2;
  shape.longest = 50;
  const Execution execution{.threads = 2};
  EXPECT_EQ(plan(problem.forward(), execution), plan(Operation::forward, shape, c.options, execution));
  EXPECT_EQ(plan(problem.backward(), execution), plan(Operation::backward, shape, c.options, execution));

  c.last_state_grad = true;
  Problem with_gradients(c);
  shape.dn_last = true;
  EXPECT_EQ(plan(with_gradients.backward(), execution), plan(Operation::backward, shape, c.options, execution));
  with_gradients.backward().dlast_state.n = {};
  shape.dn_last = false;
  EXPECT_EQ(plan(with_gradients.backward(), execution), plan(Operation::backward, shape, c.options, execution));
  c.last_state_grad = false;

  c.shape.batch = 1;
  c.cu_seqlens = {0, 30, 30, 50};
  Problem packed(c);
  shape.batch = 1;
  shape.sequences = 3;
  shape.longest = 30;
  shape.packed = true;
  EXPECT_EQ(plan(packed.forward(), execution), plan(Operation::forward, shape, c.options, execution));
}

TEST(PlanSmall, SequencesAreRowsUnlessTheyArePacked) {
  MlstmShape shape = documented_shape(100);
  shape.sequences = 3;
  expect_sentence(refusal([&] { static_cast<void>(plan(Operation::forward, shape, {})); }), "sequences");
  shape.packed = true;
  EXPECT_EQ(plan(Operation::forward, shape, {}).shape, shape);
}

TEST(PlanSmall, TilesChunksAndSpansNest) {
  for (const std::int64_t tokens : {1, 2, 63, 64, 65, 1000, 4096, 100000}) {
    for (const std::int64_t chunk_size : {0, 1, 7, 16, 100, 256, 5000}) {
      for (const int threads : {1, 2, 8, 64}) {
        for (const Operation operation : {Operation::forward, Operation::backward}) {
          for (const std::int64_t dim : {1, 64, 256, 512}) {
            MlstmShape shape = documented_shape(tokens);
            shape.dqk = shape.dhv = dim;
            const Plan p = plan(operation, shape, {.chunk_size = chunk_size}, {.threads = threads});
            const std::string what = describe(p);
            ASSERT_GE(p.tile, 1) << what;
            ASSERT_GE(p.chunk, p.tile) << what;
            ASSERT_GE(p.span, p.chunk) << what;
            // Each a whole number of the one before it, unless it spans the sequence anyway.
            EXPECT_TRUE(p.chunk % p.tile == 0 || p.chunk == chunk_size || p.chunk >= tokens) << what;
            EXPECT_TRUE(p.span % p.chunk == 0 || p.span >= tokens) << what;
            if (chunk_size > 0) {
              EXPECT_EQ(p.chunk, std::min(chunk_size, tokens)) << what;
            }
            EXPECT_EQ(p.threads, threads);
            EXPECT_EQ(p.compute, DType::float32);
            EXPECT_GT(p.useful_flops, 0);
            EXPECT_GE(p.flops, p.useful_flops) << what;
          }
        }
      }
    }
  }
}

TEST(PlanSmall, HeadsGoAbreastWhereNoThreadWaitsForThat) {
  const auto abreast = [](std::int64_t heads, std::int64_t batch, int threads, std::int64_t dim = 64) {
    MlstmShape shape = documented_shape(4096);
    shape.batch = shape.sequences = batch;
    shape.heads = shape.qk_heads = heads;
    shape.dqk = shape.dhv = dim;
    return plan(Operation::forward, shape, {}, {.threads = threads}).abreast;
  };
  EXPECT_EQ(abreast(4, 1, 1), 4);
  EXPECT_EQ(abreast(4, 1, 2), 2);
  EXPECT_EQ(abreast(4, 1, 4), 1);
  EXPECT_EQ(abreast(4, 4, 4), 4);
  EXPECT_EQ(abreast(6, 1, 2), 3);
  EXPECT_EQ(abreast(5, 1, 1), 1);       // no group of equal size
  EXPECT_EQ(abreast(4, 1, 1, 512), 1);  // a state alone fills the cache
  MlstmShape packed = documented_shape(4096);
  packed.packed = true;
  packed.sequences = 4;
  EXPECT_EQ(plan(Operation::forward, packed, {}, {.threads = 4}).abreast, 1);  // one of them may be nearly all
  EXPECT_EQ(plan(Operation::backward, documented_shape(4096), {}, {.threads = 1}).abreast, 1);
}

// Bytes of q, k, v, h, i, f, and for backward of dh and the gradients as well; no states.
double own_tensor_bytes(Operation operation, const MlstmShape& s) {
  const double row = static_cast<double>(2 * s.qk_heads * s.dqk + 2 * s.heads * s.dhv);
  const double gates = static_cast<double>(2 * s.heads * item_size(s.gate_dtype));
  const double values = row * static_cast<double>(item_size(s.dtype));
  const double passes = operation == Operation::backward ? 2 : 1;
  const double dv = operation == Operation::backward ? static_cast<double>(s.heads * s.dhv * item_size(s.dtype)) : 0;
  return static_cast<double>(s.batch * s.tokens) * (passes * (values + gates) - dv);
}

TEST(PlanSmall, ScratchStaysBelowAQuarterOfTheTensors) {
  for (std::int64_t tokens = 2048; tokens <= 65536; tokens *= 2) {
    for (const Operation operation : {Operation::forward, Operation::backward}) {
      MlstmShape narrow = documented_shape(tokens);
      narrow.qk_heads = narrow.heads = 1;
      narrow.dqk = narrow.dhv = 64;
      for (const MlstmShape& shape : {documented_shape(tokens), narrow}) {
        const Plan p = plan(operation, shape, {}, {.threads = shape.heads == 1 ? 1 : 2});
        EXPECT_LT(static_cast<double>(p.scratch_bytes), 0.25 * own_tensor_bytes(operation, shape)) << describe(p);
      }
    }
  }
}

TEST(PlanSmall, CostsGrowWithTheSequenceAsTheyShould) {
  const auto flops = [](Formulation formulation, std::int64_t tokens) {
    return plan(Operation::forward, documented_shape(tokens), {.formulation = formulation}, {.threads = 2})
        .useful_flops;
  };
  EXPECT_NEAR(flops(Formulation::chunkwise, 16384) / flops(Formulation::chunkwise, 8192), 2, 0.1);
  EXPECT_NEAR(flops(Formulation::parallel, 16384) / flops(Formulation::parallel, 8192), 4, 0.2);
  for (const DType dtype : {DType::float32, DType::bfloat16}) {
    for (const Operation operation : {Operation::forward, Operation::backward}) {
      const Plan p = plan(operation, documented_shape(8192, dtype), {}, {.threads = 2});
      EXPECT_GE(p.bytes, own_tensor_bytes(operation, p.shape));
    }
  }
}

TEST(PlanSmall, CostsOnAGpuCountTheBlocksBelowTheDiagonal) {
  Plan whole{.device = Device::cuda,
             .shape = {.tokens = 512, .dqk = 3, .dhv = 5, .longest = 512},
             .options = {},
             .tile = 64,
             .chunk = 128,
             .span = 512};
  // Four chunks of three 64 x 64 squares; all chunks but the first meet a state, all but the last make one.
  const double squares = 4 * 3 * 64.0 * 64.0, state_tokens = 2 * 384.0;
  EXPECT_EQ(cost(whole).flops, 2 * (squares * (3 + 5) + state_tokens * 3 * 5));
  whole.chunk = 512;
  EXPECT_EQ(cost(whole).flops, 2 * (36 * 64.0 * 64.0) * (3 + 5));
}

TEST(PlanSmall, ChunkOfThePortableKernelsIsTheCostModels) {
  const DeviceFacts h200{.capability = 90, .multiprocessors = 132, .shared_bytes = 232448};
  for (const DType dtype : {DType::bfloat16, DType::float16, DType::float32, DType::float64}) {
    for (const auto& [dqk, dhv] : {std::pair<std::int64_t, std::int64_t>{16, 16}, {64, 64}, {128, 256}, {512, 512}}) {
      MlstmShape shape = documented_shape(8192, dtype);
      shape.dqk = dqk;
      shape.dhv = dhv;
      const std::int64_t best = best_cuda_chunk(dtype, {static_cast<double>(dqk), static_cast<double>(dhv)});
      for (const Operation operation : {Operation::forward, Operation::backward}) {
        const Execution portable{.device = Device::cuda, .portable = true, .gpu = h200};
        EXPECT_EQ(plan(operation, shape, {}, portable).chunk, best);
        EXPECT_EQ(plan(operation, shape, {.chunk_size = 96}, portable).chunk, 96);
        MlstmShape brief = shape;
        brief.tokens = brief.longest = 50;
        EXPECT_EQ(plan(operation, brief, {}, portable).chunk, 50);
        const Plan usual = plan(operation, shape, {}, {.device = Device::cuda, .gpu = h200});
        EXPECT_EQ(usual.chunk, item_size(dtype) == 2 && (dqk <= 256 || dtype == DType::bfloat16) ? 128 : best)
            << describe(usual);
      }
    }
  }
}

TEST(PlanSmall, DescriptionSaysWhatWasChosen) {
  const Plan p = plan(Operation::backward, documented_shape(3000), {.chunk_size = 96}, {.threads = 2});
  const std::string page = describe(p);
  for (const std::string& word :
       {std::string("backward"), std::string("chunk"), std::string("96"), std::string("scratch"),
        std::to_string(p.scratch_bytes), std::string("kernels"), std::string("gates"), std::string("gradients"),
        std::string("FLOPs"), std::string("float32")}) {
    EXPECT_NE(page.find(word), std::string::npos) << word << " is missing in\n" << page;
  }
}

TEST(PlanSmall, BadShapesAreRefused) {
  const struct {
    const char* named;
    void (*spoil)(MlstmShape&);
  } rows[] = {{"B|batch", [](MlstmShape& s) { s.batch = -1; }},
              {"T|tokens", [](MlstmShape& s) { s.tokens = -1; }},
              {"H|heads", [](MlstmShape& s) { s.heads = 0; }},
              {"Hqk|heads", [](MlstmShape& s) { s.qk_heads = 3; }},
              {"dqk", [](MlstmShape& s) { s.dqk = 0; }},
              {"dhv", [](MlstmShape& s) { s.dhv = -4; }},
              {"N|sequences", [](MlstmShape& s) { s.sequences = -1; }},
              {"longest", [](MlstmShape& s) { s.longest = -1; }},
              {"dtype", [](MlstmShape& s) { s.dtype = DType::int32; }},
              {"gate_dtype|dtype", [](MlstmShape& s) { s.gate_dtype = static_cast<DType>(50); }},
              {"overflows", [](MlstmShape& s) { s.tokens = s.longest = std::int64_t{1} << 62; }}};
  for (const auto& row : rows) {
    SCOPED_TRACE(row.named);
    MlstmShape shape = documented_shape(100);
    row.spoil(shape);
    for (const Operation operation : {Operation::forward, Operation::backward, Operation::step}) {
      expect_sentence(refusal([&] { static_cast<void>(plan(operation, shape, {})); }), row.named);
    }
  }
  expect_sentence(
      refusal([&] { static_cast<void>(plan(Operation::forward, documented_shape(9), {.chunk_size = -1})); }),
      "chunk_size");
  expect_sentence(refusal([&] { static_cast<void>(plan(static_cast<Operation>(9), documented_shape(9), {})); }),
                  "operation");
}

// Where scratch comes near what 64 bits count, and not long before.
TEST(PlanSmall, ScratchBeyondAllMemoryIsRefused) {
  const struct {
    Operation operation;
    Formulation formulation;
    int fits, refused;  // powers of two of the tokens
  } rows[] = {{Operation::forward, Formulation::chunkwise, 40, 48},
              {Operation::backward, Formulation::chunkwise, 40, 48},
              {Operation::forward, Formulation::parallel, 24, 28},
              {Operation::backward, Formulation::parallel, 24, 28},
              {Operation::step, Formulation::chunkwise, 36, 43}};
  for (const auto& row : rows) {
    const auto planned = [&](int power) {
      const MlstmShape shape = documented_shape(std::int64_t{1} << power);
      return plan(row.operation, shape, {.formulation = row.formulation}, {.threads = 2});
    };
    EXPECT_LT(planned(row.fits).scratch_bytes, std::size_t{1} << 60);
    expect_sentence(refusal([&] { static_cast<void>(planned(row.refused)); }), "scratch");
  }
}

TEST(PlanSmall, NothingToDoIsFine) {
  for (const Operation operation : {Operation::forward, Operation::backward, Operation::step}) {
    MlstmShape shape = documented_shape(0);
    EXPECT_NO_THROW(static_cast<void>(describe(plan(operation, shape, {}))));
    shape.batch = shape.sequences = 0;
    EXPECT_NO_THROW(static_cast<void>(describe(plan(operation, shape, {}))));
  }
}

}  // namespace
}  // namespace tfla::test
