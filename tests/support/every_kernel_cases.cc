#include "tests/support/every_kernel_cases.h"

namespace tfla::test {

namespace {

using testkit::Case;
using testkit::Layout;

constexpr DType half_types[] = {DType::bfloat16, DType::float16};
constexpr DType all_types[] = {DType::bfloat16, DType::float16, DType::float32, DType::float64};

Case small_case(DType dtype, std::int64_t tokens, std::int64_t heads, std::int64_t dqk, std::int64_t dhv) {
  Case c;
  c.device = Device::cuda;
  c.shape = {.tokens = tokens, .qk_heads = heads, .heads = heads, .dqk = dqk, .dhv = dhv, .dtype = dtype};
  c.regime = reference::Regime::randn;
  return c;
}

InputGate gate_of(bool normalized) { return normalized ? InputGate::exponential : InputGate::sigmoid; }

// Forward of every width, gate, packing and with kept states or without; between them the widths of all kernels of
// backward. Rings go round more than once.
void add_widths(std::vector<SmallCase>& all) {
  constexpr std::int64_t tokens = 330;
  constexpr std::int64_t wide_dhv[] = {128, 200, 192, 264};  // without kept states: tiles of 64 columns and of 128
  for (const DType dtype : half_types)
    for (const bool packed : {false, true})
      for (const std::int64_t dqk : {56, 128, 256, 264})
        for (const bool wide : {false, true})
          for (int turn = 0; turn < 4; ++turn) {
            const bool half = dtype == DType::float16, normalized = turn % 2 == 0, keep = turn >= 2;
            if (half && dqk > 128 && !wide) continue;
            if (dqk > 256 && (half || packed)) continue;
            Case c = small_case(dtype, tokens, 1, dqk, wide ? wide_dhv[turn] : 64);
            if (packed) c.cu_seqlens = {0, 65, 65, 300, tokens - 7};
            c.index_stride = 2;
            c.options = {.gate = gate_of(normalized), .keep = keep ? Keep::states : Keep::nothing};
            c.layout = keep ? Layout::bhtd : Layout::fused;
            c.initial_state = c.last_state_grad = normalized;
            c.in_place = normalized && keep == packed;
            all.push_back({.c = c});
          }
}

// Gradients of n: the exact one of the normalizer and one of the last state.
void add_norms(std::vector<SmallCase>& all) {
  struct Row {
    std::int64_t dqk, dhv;
    bool exact;
  };
  for (const DType dtype : half_types)
    for (const bool packed : {false, true})
      for (const Row& row : {Row{64, 64, true}, {64, 128, false}, {128, 96, true}}) {
        Case c = small_case(dtype, 300, 2, row.dqk, row.dhv);
        if (packed) c.cu_seqlens = {0, 100, 300};
        c.options = {.exact_normalizer_grad = row.exact};
        c.initial_state = c.last_state_grad = true;
        all.push_back({.c = c, .norms = true});
      }
}

// Sequences in segments.
void add_segments(std::vector<SmallCase>& all) {
  for (const DType dtype : half_types)
    for (const bool packed : {false, true})
      for (const std::int64_t dqk : {8, 72})
        for (const std::int64_t dhv : {8, 72, 136})
          for (const bool keep : {false, true}) {
            if (dtype == DType::float16 && keep) continue;
            Case c = small_case(dtype, packed ? 1200 : 4096, 1, dqk, dhv);
            if (packed) c.cu_seqlens = {0, 1100, 1200};
            c.options = {.gate = gate_of(keep), .keep = keep ? Keep::states : Keep::nothing};
            c.initial_state = c.in_place = dqk == 72;
            all.push_back({.c = c, .segments = true});
          }
}

// Backward with C and dC on the chip: sequences of several checkpoints, at which <C, dC> is made, and of one; with and
// without states at their ends; in segments; more tiles than multiprocessors.
void add_on_chip(std::vector<SmallCase>& all) {
  struct Row {
    std::int64_t tokens, dqk, dhv;
    bool states, segments;
    std::int64_t heads = 2;
  };
  for (const bool packed : {false, true})
    for (const Row& row : {Row{1300, 64, 200, true, packed},
                           {1300, 128, 256, false, packed},
                           {1300, 72, 136, true, packed},
                           {330, 56, 136, false, false},
                           {330, 128, 192, true, false},
                           {4096, 128, 200, true, true},
                           {4096, 8, 136, false, true, 1},
                           {150, 72, 136, false, false, 140},
                           {190, 64, 136, false, false, 140}}) {
      Case c = small_case(DType::bfloat16, row.tokens, row.heads, row.dqk, row.dhv);
      if (packed) c.cu_seqlens = {0, row.tokens / 3, row.tokens / 3, row.tokens - 10};
      c.options = {.gate = gate_of(!packed), .keep = Keep::denominators};
      c.initial_state = c.last_state_grad = row.states;
      c.regime = packed ? reference::Regime::trained_like : reference::Regime::randn;
      all.push_back({.c = c, .segments = row.segments});
    }
}

// More tiles and states than multiprocessors: blocks have a second one, and rings go on from the first.
void add_second_turns(std::vector<SmallCase>& all) {
  for (const DType dtype : half_types)
    for (const bool packed : {false, true})
      for (const std::int64_t dqk : {64, 136}) {
        Case c = small_case(dtype, 130, 140, dqk, 72);
        if (packed) c.cu_seqlens = {0, 65, 130};
        all.push_back({.c = c});
      }
}

// Queries and keys shared by groups of heads: gradients of every width, which sum_groups adds up; kept states or not;
// padding, whose rows stay zero; segments; more tiles than multiprocessors.
void add_groups(std::vector<SmallCase>& all) {
  struct Row {
    std::int64_t tokens, group, dqk, dhv;
    Keep keep = Keep::nothing;
    bool segments = false;
    std::int64_t qk_heads = 2;
  };
  for (const DType dtype : half_types)
    for (const bool packed : {false, true})
      for (const Row& row : {Row{330, 2, 24, 32},
                             {330, 3, 64, 64, Keep::denominators},
                             {330, 16, 128, 64, Keep::denominators, false, 1},
                             {200, 2, 72, 8},
                             {330, 2, 128, 128, Keep::states},
                             {300, 3, 128, 256, Keep::denominators},
                             {300, 2, 200, 136},
                             {300, 2, 264, 72},
                             {packed ? 1300 : 4096, 2, 72, 64, Keep::denominators, true, 1},
                             {130, 14, 72, 64, Keep::denominators, false, 10}}) {
        if (row.dqk > 128 && (dtype == DType::float16 || packed)) continue;
        Case c = small_case(dtype, row.tokens, row.group * row.qk_heads, row.dqk, row.dhv);
        c.shape.qk_heads = row.qk_heads;
        if (packed) c.cu_seqlens = {3, row.tokens / 3, row.tokens / 3, row.tokens - 10};
        c.options = {.gate = gate_of(row.group % 2 == 0), .keep = row.keep};
        c.initial_state = c.last_state_grad = row.keep == Keep::denominators;
        c.layout = row.group == 3 ? Layout::bhtd : Layout::bthd;
        all.push_back({.c = c, .segments = row.segments});
      }
}

// Runs of short sequences, without a state given or asked for, some of them empty.
void add_runs(std::vector<SmallCase>& all) {
  std::vector<std::int64_t> boundaries{0};
  const auto add_sequence = [&](std::int64_t length) { boundaries.push_back(boundaries.back() + length); };
  for (int round = 0; round < 12; ++round)
    for (const std::int64_t length : {1, 2, 0, 3, 4, 5, 0, 32 * (round % 2)}) add_sequence(length);
  const auto add = [&](DType dtype, const MlstmOptions& options, bool segments, Kernels kernels, std::int64_t dqk = 64,
                       std::int64_t dhv = 128) {
    Case c = small_case(dtype, boundaries.back() + 5, 1, dqk, dhv);  // and padding
    c.cu_seqlens = boundaries;
    c.index_stride = 2;
    c.options = options;
    c.last_state = false;
    all.push_back({.c = c, .kernels = kernels, .segments = segments});
  };
  const MlstmOptions exponential{}, log{.gate = InputGate::log, .normalizer = Normalizer::none};
  for (const DType dtype : half_types) add(dtype, exponential, false, Kernels::hopper);
  const MlstmOptions on_chip{.keep = Keep::denominators};
  add(DType::bfloat16, on_chip, false, Kernels::hopper, 72, 136);
  for (const DType dtype : all_types) add(dtype, exponential, false, Kernels::portable);
  add_sequence(1100);  // in segments, in the middle of a run
  for (const std::int64_t length : {1, 70, 0, 3}) add_sequence(length);
  for (const DType dtype : half_types) add(dtype, log, true, Kernels::hopper);
  add(DType::bfloat16, on_chip, true, Kernels::hopper, 128, 200);
}

void add_portable(std::vector<SmallCase>& all) {
  for (const DType dtype : all_types) {
    const auto add = [&](const Case& c) { all.push_back({.c = c, .kernels = Kernels::portable}); };
    Case shared = small_case(dtype, 100, 2, 64, 136);  // two heads with the queries and keys of one
    shared.shape.qk_heads = 1;
    shared.options = {.exact_normalizer_grad = true, .chunk_size = 64};
    shared.initial_state = shared.in_place = shared.last_state_grad = true;
    add(shared);
    Case crooked = small_case(dtype, 300, 1, 20, 37);  // nothing on 16 bytes, chunks of more than one slab
    crooked.options = {.gate = InputGate::sigmoid, .chunk_size = 256, .keep = Keep::states};
    crooked.initial_state = true;
    add(crooked);
    Case tall = small_case(dtype, 100, 1, 264, 24);  // n in memory
    tall.options.chunk_size = 32;
    add(tall);
    Case cut = small_case(dtype, 1250, 1, 40, 24);  // segments, chunks of one slab, in three kernels of gates
    cut.options.chunk_size = 128;
    add(cut);
    cut.cu_seqlens = {0, 1, 1, 1200, 1231};
    cut.options = {.gate = InputGate::log, .normalizer = Normalizer::none, .chunk_size = 64};
    add(cut);
    Case unnormalized = small_case(dtype, 100, 1, 16, 16);  // no denominators to keep
    unnormalized.options.gate = InputGate::sigmoid;
    add(unnormalized);
  }
}

// Token by token: one state, some, so many that they take two launches, of few rows and of many; rows that do not lie
// on 16 bytes.
void add_steps(std::vector<SmallCase>& all) {
  struct Row {
    std::int64_t batch, tokens, dqk, dhv;
  };
  for (const DType dtype : all_types)
    for (const Row& row : {Row{1, 5, 40, 136},
                           {33, 2, 40, 136},
                           {2048, 1, 8, 64},
                           {2048, 1, 264, 4},
                           {2, 3, 20, 37},
                           {512, 2, 4, 129}}) {
      Case c = small_case(dtype, row.tokens, 1, row.dqk, row.dhv);
      c.shape.batch = row.batch;
      c.options.formulation = Formulation::recurrent;
      c.initial_state = row.tokens > 1;
      all.push_back({.c = c, .kernels = Kernels::portable});
    }
}

}  // namespace

std::vector<SmallCase> small_cases() {
  std::vector<SmallCase> all;
  for (const auto add : {add_widths, add_norms, add_segments, add_on_chip, add_groups, add_runs, add_second_turns,
                         add_portable, add_steps})
    add(all);
  return all;
}

}  // namespace tfla::test
