#include "plan/cuda_plan.h"

#include <algorithm>
#include <limits>

#include "core/settings.h"
#include "plan/arithmetic.h"
#include "plan/cost/cuda_time.h"
#include "plan/cpu_plan.h"
#include "plan/hopper_sizes.h"

namespace tfla {

namespace {

// What is chosen before the launches are listed.
struct Choice {
  bool hopper_shape = false;   // Hopper's kernels take the shape, for forward and backward alike
  bool hopper = false;         // and they run
  bool grad_qkv = false;       // backward: the gradients of q, k, v by Hopper's kernels too
  bool grad_states_v = false;  // backward: dC and dV by one kernel
  bool on_chip = false;  // backward: dQ, dV and dK by a kernel each, with C or dC on the chip, which stores no states
  bool norms = false;    // backward: the exact gradient of the normalizer, or one of the last n
};

// Tokens of a packed sequence, on average.
std::int64_t mean_tokens(const MlstmShape& shape) { return shape.tokens / std::max<std::int64_t>(shape.sequences, 1); }

bool has_clusters(const Plan& plan) { return (plan.gpu.code > 0 ? plan.gpu.code : plan.gpu.capability) >= 90; }

constexpr auto most_int = static_cast<double>(std::numeric_limits<int>::max());  // kernels count in 32 bits

bool hopper_takes(const Plan& plan) {
  const MlstmShape& shape = plan.shape;
  const double token_blocks =
      static_cast<double>(shape.heads) *
      (static_cast<double>(shape.batch) * static_cast<double>(shape.tokens / hopper::token_block) +
       static_cast<double>(shape.sequences));
  return plan.gpu.capability == 90 && plan.gpu.shared_bytes >= most_shared_bytes(Needs::sm90a) &&
         plan.formulation == Formulation::chunkwise && find_row(Kernel::forward, Needs::sm90a, shape) != no_row &&
         shape.tokens > 0 && shape.batch > 0 && shape.sequences > 0 && shape.dqk % 8 == 0 && shape.dhv % 8 == 0 &&
         static_cast<double>(shape.batch) * static_cast<double>(shape.tokens) < most_int &&
         token_blocks * static_cast<double>(shape.dhv) < most_int;
}

bool has_groups(const MlstmShape& shape) { return shape.heads != shape.qk_heads; }

// A negative scale would turn the sign of what is rounded. Kernels of gradients of n read q and k of their own head.
bool hopper_takes_grad_qkv(const Plan& plan, bool norms) {
  const MlstmShape& shape = plan.shape;
  constexpr std::int64_t tile = 64, items_of_a_tile = 32;  // of the ring, which are counted over all tiles
  const std::int64_t chunks = shape.packed ? shape.tokens / hopper::chunk + shape.sequences
                                           : shape.batch * ceil_div(shape.tokens, hopper::chunk);
  const auto parts = static_cast<double>(ceil_div(std::max(shape.dqk, shape.dhv), tile));
  const double heads = static_cast<double>(shape.heads) * parts;
  const double tokens = static_cast<double>(shape.batch) * static_cast<double>(shape.tokens);
  return !(norms && has_groups(shape)) && resolve(plan.options, shape.dqk).scale > 0 && tokens * heads <= most_int &&
         static_cast<double>(chunks) * heads <= most_int / static_cast<double>(items_of_a_tile);
}

// Heads that do not fit into one CTA of grad_qkv take grad_v and grad_qk.
bool splits_grad_qkv(const MlstmShape& shape) { return find_row(Kernel::grad_qkv, Needs::sm90a, shape) == no_row; }

BackwardWalk walk_of(const Choice& choice) {
  if (choice.on_chip) return BackwardWalk::q_v_k;
  return choice.grad_states_v ? BackwardWalk::states_and_v : BackwardWalk::states;
}

// Hopper's forward keeps states 128 tokens apart; a longer chunk asks for less memory than that. States of float16 have
// scales, which portable kernels do not read, and backward may run either. Every packed sequence has a state of its own
// to keep, which takes more memory than the tokens of a short one; forward and backward know no more of them than how
// many there are.
Keep choose_keep(const Plan& plan, const Choice& choice) {
  constexpr std::int64_t short_sequence = 64;
  const MlstmShape& shape = plan.shape;
  const Keep asked = kept(plan.options);
  if (asked != Keep::states) return asked;
  if (shape.packed && mean_tokens(shape) < short_sequence) return Keep::denominators;
  if (!choice.hopper_shape) return asked;
  const std::size_t row = find_row(Kernel::forward, Needs::sm90a, shape);
  const unsigned batch = shape.packed ? packed : dense;
  const bool keeps =
      plan.chunk == hopper::chunk && shape.dtype == DType::bfloat16 && (kernel_table[row].keeps_states & batch) != 0;
  return keeps ? Keep::states : Keep::denominators;
}

// Runs of packed sequences: a short sequence of its own has a chunk, a state and CTAs of its own. States that a caller
// gives or takes are those of sequences, and so are kept ones, which forward leaves for a backward that may have other
// states. A run resets its gates where a sequence begins: in sums that far from zero float64 loses more digits than its
// results may.
void choose_run(Plan& plan) {
  constexpr std::int64_t long_sequence = 512, longest_run = 1024, shortest_run = 256;
  const MlstmShape& shape = plan.shape;
  plan.run = 0;
  if (!shape.packed || shape.states || plan.keep == Keep::states || shape.dtype == DType::float64) return;
  if (shape.sequences < 2 || shape.tokens == 0 || mean_tokens(shape) >= long_sequence) return;
  plan.run = longest_run;
  while (plan.run > shortest_run && kernel_sequences(plan) * shape.heads < 2 * plan.gpu.multiprocessors) plan.run /= 2;
}

// Portable kernels: by the cost model. Hopper's kernels compute in tiles of 64 and 128 tokens whatever the chunk is;
// its size says how much memory the states of backward may take. They are 128 tokens apart all the same, but only some
// heads, a slice, have theirs at a time.
void choose_ranges(Plan& plan, const Choice& choice) {
  constexpr std::int64_t tile = 64, longest_chunk = std::int64_t{1} << 30;
  const analysis::HeadDims dims{static_cast<double>(plan.shape.dqk), static_cast<double>(plan.shape.dhv)};
  const std::int64_t usual = choice.hopper_shape ? hopper::chunk : best_cuda_chunk(plan.shape.dtype, dims);
  const std::int64_t longest = std::clamp<std::int64_t>(plan.shape.longest, 1, longest_chunk);
  plan.tile = tile;
  plan.span = std::max<std::int64_t>(plan.shape.longest, 1);
  plan.chunk = std::min(plan.options.chunk_size > 0 ? plan.options.chunk_size : usual, longest);
  if (plan.formulation == Formulation::parallel) plan.chunk = longest;
  if (choice.hopper_shape) plan.chunk = std::max<std::int64_t>(power_of_two_above(plan.chunk), hopper::chunk);
  plan.keep = choose_keep(plan, choice);
  choose_run(plan);
  if (choice.hopper && plan.operation == Operation::backward && !choice.on_chip)
    plan.slices =
        std::clamp<std::int64_t>(plan.chunk / hopper::chunk, 1, std::max<std::int64_t>(plan.shape.qk_heads, 1));
  if (choice.hopper)
    choose_hopper_segments(plan, ceil_div(longest, hopper::chunk), walk_of(choice));
  else
    choose_segments(plan, ceil_div(longest, plan.chunk));
}

Choice choose(Plan& plan, bool portable) {
  const MlstmShape& shape = plan.shape;
  const bool backward = plan.operation == Operation::backward;
  Choice choice;
  choice.hopper_shape = !portable && hopper_takes(plan);
  choice.hopper = choice.hopper_shape && shape.aligned;
  choice.norms = backward && (resolve(plan.options, shape.dqk).exact || shape.dn_last);
  choice.grad_qkv = choice.hopper && backward && hopper_takes_grad_qkv(plan, choice.norms);
  const bool may_stay_on_chip = choice.grad_qkv && !choice.norms && !has_groups(shape) &&
                                find_row(Kernel::grad_k_reverse, Needs::sm90a, shape) != no_row;
  const bool has_grad_states_v = choice.grad_qkv && find_row(Kernel::grad_states_v, Needs::sm90a, shape) != no_row;
  choice.grad_states_v = has_grad_states_v && (splits_grad_qkv(shape) || choice.norms);
  // Portable gradients do not read the states of float16 that Hopper's kernels store, nor their gradients of n.
  if (choice.norms || (backward && shape.dtype == DType::float16)) choice.hopper = choice.grad_qkv;
  choose_ranges(plan, choice);
  // Where states are stored anyway, kernels that read them take no more time. In a run, df would miss the digits that a
  // sequence's own ends give it: grad_gates looks for <C, dC> at checkpoints, and a run has none where sequences meet.
  if (may_stay_on_chip && plan.keep == Keep::denominators && plan.run == 0) {
    choice.on_chip = true;
    choice.grad_states_v = false;
    choose_ranges(plan, choice);
    return choice;
  }
  // Heads that fit into grad_qkv have dV there, unless the sequence is cut: the CTAs of grad_states_v have fewer
  // columns, so that fewer segments fill the GPU.
  if (has_grad_states_v && !choice.grad_states_v && plan.segments > 1 && !shape.packed) {
    choice.grad_states_v = true;
    choose_ranges(plan, choice);
  }
  return choice;
}

// Lists launches in their order.
class Lister {
 public:
  Lister(Plan& plan, const Choice& choice)
      : plan_(plan), choice_(choice), batch_(plan.shape.packed ? variant::packed : 0) {}

  void forward() {
    const Settings settings = resolve(plan_.options, plan_.shape.dqk);
    if (!choice_.hopper) {
      gates();
      cut(Kernel::segment_totals, Kernel::segment_scan, Needs::any_gpu);
      add(Kernel::states, Needs::any_gpu);
      // Outputs of 16-bit types make their own.
      if (item_size(plan_.shape.dtype) > 2) add(Kernel::denominators, Needs::any_gpu);
      return add(Kernel::outputs, Needs::any_gpu);
    }
    if (plan_.shape.in_place) add(Kernel::copy_state, Needs::sm90a);
    gates();
    const bool keeps = plan_.keep == Keep::states;
    const unsigned normalized = settings.normalized ? variant::normalized : 0;
    const unsigned totals = keeps || plan_.shape.dtype == DType::float16 ? 0 : variant::one_term;
    cut(Kernel::segment_totals, Kernel::segment_scan, Needs::sm90a, totals);
    add(Kernel::forward, Needs::sm90a, normalized | (keeps ? variant::keeps_states : 0));
    if (plan_.shape.dqk <= hopper::dqk_of_a_pass) return;
    cut(Kernel::segment_totals, Kernel::segment_scan, Needs::sm90a, totals | variant::rest_of_dqk);
    add(Kernel::forward, Needs::sm90a, normalized | variant::rest_of_dqk);
  }

  void backward() {
    const Needs states = choice_.hopper ? Needs::sm90a : Needs::any_gpu;
    const bool has_denominators = plan_.keep != Keep::nothing;
    const bool by_token_blocks = choice_.grad_states_v || choice_.on_chip;
    const unsigned token_blocks = by_token_blocks ? variant::token_blocks : 0;
    gates(has_denominators ? token_blocks : 0);
    if (plan_.keep != Keep::states) {
      cut(Kernel::segment_totals, Kernel::segment_scan, states, choice_.on_chip ? variant::one_term : 0);
      if (!choice_.on_chip) add(Kernel::states, states);
    }
    if (!has_denominators) {
      add(Kernel::denominators, Needs::any_gpu);
      if (by_token_blocks) gates(token_blocks);  // these have denominators in them
    }
    if (!choice_.grad_qkv && resolve(plan_.options, plan_.shape.dqk).exact)
      add(Kernel::grad_denominators, Needs::any_gpu);
    if (choice_.on_chip) add(Kernel::grad_q_forward, Needs::sm90a);
    cut(Kernel::grad_segment_totals, Kernel::grad_segment_scan, states);
    if (!choice_.on_chip) add(choice_.grad_states_v ? Kernel::grad_states_v : Kernel::grad_states, states);
    choice_.grad_qkv ? hopper_grad_qkv() : add(Kernel::grad_qkv, Needs::any_gpu);
    if (choice_.grad_qkv && has_groups(plan_.shape)) add(Kernel::sum_groups, Needs::any_gpu);
    add(Kernel::grad_gates, Needs::any_gpu);
  }

  void step() {
    const MlstmShape& shape = plan_.shape;
    constexpr std::int64_t vector = 4;          // columns of a thread
    constexpr std::int64_t enough_ctas = 2048;  // of step_many: then two launches take less time than one
    constexpr std::int64_t few_states = 32;     // H200, 8 heads of 256/512: 5.2 us by tiles of 64 columns, 8.6 by 128
    constexpr std::int64_t many_ctas = 512;
    const std::int64_t states = shape.sequences * shape.heads;
    if (plan_.operation == Operation::forward) add(Kernel::start_state, Needs::any_gpu);
    if (has_clusters(plan_) && shape.aligned && shape.dhv % vector == 0 && states > 0) {
      const bool many = !shape.packed && shape.tokens == 1 && states * ceil_div(shape.dhv, 64) >= enough_ctas;
      if (many && find_row(Kernel::step_many, Needs::clusters, shape) != no_row)
        return add(Kernel::step_many, Needs::clusters);
      const int columns = states <= few_states && shape.dhv <= 512 ? 64 : 128;
      if (find_row(Kernel::step, Needs::clusters, shape, columns) != no_row)
        return add(Kernel::step, Needs::clusters, 0, columns);
    }
    add(Kernel::step, Needs::any_gpu, 0, states * (shape.dhv / 128) >= many_ctas ? 128 : 32);
  }

 private:
  void add(Kernel kernel, Needs needs, unsigned bits = 0, int columns = 0) {
    add(kernel, needs, plan_.shape, bits, columns);
  }
  void add(Kernel kernel, Needs needs, const MlstmShape& shape, unsigned bits, int columns = 0) {
    const std::size_t row = find_row(kernel, needs, shape, columns);
    plan_.launches.add({.kernel = static_cast<std::uint8_t>(row), .variant = static_cast<std::uint8_t>(batch_ | bits)});
  }

  // A cluster has eight CTAs, each of which takes 128 tokens: one chunk, of 16-bit tensors in short ones two.
  void gates(unsigned bits = 0) {
    constexpr std::int64_t ctas = 8, tokens = 128;
    const MlstmShape& shape = plan_.shape;
    const std::int64_t own = plan_.operation == Operation::forward ? hopper::token_block : hopper::chunk;
    const std::int64_t chunk = choice_.hopper ? own : plan_.chunk;
    const std::int64_t chunks = item_size(shape.dtype) == 2 && 2 * chunk <= tokens ? 2 : 1;
    const bool by_clusters = has_clusters(plan_) && !shape.packed && shape.tokens > 0 && chunk <= tokens &&
                             ceil_div(shape.tokens, chunk) <= ctas * chunks;
    add(Kernel::gates, by_clusters ? Needs::clusters : Needs::any_gpu, bits);
  }

  // The states that segments start from.
  void cut(Kernel totals, Kernel scan, Needs needs, unsigned bits = 0) {
    if (plan_.segments == 1) return;
    add(totals, needs, shape_of_pass(bits), bits);
    add(scan, plan_.shape.packed ? needs : Needs::any_gpu, bits & variant::rest_of_dqk);
  }

  // Forward of dqk above 256 has a pass over the first 256, and one over the rest.
  [[nodiscard]] MlstmShape shape_of_pass(unsigned bits) const {
    MlstmShape shape = plan_.shape;
    if (choice_.hopper && plan_.operation == Operation::forward && shape.dqk > hopper::dqk_of_a_pass)
      shape.dqk = (bits & variant::rest_of_dqk) != 0 ? shape.dqk - hopper::dqk_of_a_pass : hopper::dqk_of_a_pass;
    return shape;
  }

  void hopper_grad_qkv() {
    if (choice_.on_chip) {
      add(Kernel::grad_v_reverse, Needs::sm90a);
      return add(Kernel::grad_k_reverse, Needs::sm90a);
    }
    if (choice_.norms) {
      if (resolve(plan_.options, plan_.shape.dqk).exact) add(Kernel::row_dots, Needs::sm90a);
      add(Kernel::grad_n, Needs::sm90a);
    }
    const bool small = find_row(Kernel::grad_qkv_small, Needs::sm90a, plan_.shape) != no_row;
    const bool splits = choice_.norms || choice_.grad_states_v || (!small && splits_grad_qkv(plan_.shape));
    if (!splits) return add(small ? Kernel::grad_qkv_small : Kernel::grad_qkv, Needs::sm90a);
    if (!choice_.grad_states_v) add(Kernel::grad_v, Needs::sm90a, 0, grad_v_columns());
    add(choice_.norms ? Kernel::grad_qk_norm : Kernel::grad_qk, Needs::sm90a);
  }

  // As few tiles of dV as possible; of float16 as wide as each other: 320 columns are two tiles of 192.
  [[nodiscard]] int grad_v_columns() const {
    constexpr std::int64_t panel = 64, widest = 4;
    const std::int64_t panels = ceil_div(plan_.shape.dhv, panel);
    if (plan_.shape.dtype == DType::bfloat16) return static_cast<int>(panel * (panels == 1 ? 1 : widest));
    return static_cast<int>(panel * ceil_div(panels, ceil_div(panels, widest)));
  }

  Plan& plan_;
  Choice choice_;
  unsigned batch_;
};

}  // namespace

bool launches(const Plan& plan, Kernel kernel, Needs needs) {
  return std::ranges::any_of(plan.launches, [&](const Launch& launch) {
    return row_of(launch).kernel == kernel && row_of(launch).needs == needs;
  });
}

std::int64_t kernel_chunk(const Plan& plan) {
  if (launches(plan, Kernel::forward, Needs::sm90a)) return hopper::token_block;
  return runs_on_hopper(plan) ? hopper::chunk : plan.chunk;
}

std::int64_t kernel_sequences(const Plan& plan) {
  return plan.run > 0 ? ceil_div(plan.shape.tokens, plan.run) : plan.shape.sequences;
}

bool runs_on_hopper(const Plan& plan) {
  return std::ranges::any_of(plan.launches, [](const Launch& launch) { return row_of(launch).needs == Needs::sm90a; });
}

bool needs_alignment(const Plan& plan) {
  return plan.device == Device::cuda && std::ranges::any_of(plan.launches, [](const Launch& launch) {
           const KernelRow& row = row_of(launch);
           return row.needs == Needs::sm90a || (row.needs == Needs::clusters && row.kernel != Kernel::gates);
         });
}

void plan_cuda(Plan& plan, bool portable) {
  if (plan.formulation == Formulation::recurrent) {
    choose_recurrent_ranges(plan);
    return Lister(plan, {}).step();
  }
  const Choice choice = choose(plan, portable);
  Lister lister(plan, choice);
  plan.operation == Operation::forward ? lister.forward() : lister.backward();
}

std::string_view name(Kernel kernel) {
  switch (kernel) {
    case Kernel::gates: return "gates";
    case Kernel::copy_state: return "copy_state";
    case Kernel::segment_totals: return "segment_totals";
    case Kernel::segment_scan: return "segment_scan";
    case Kernel::states: return "states";
    case Kernel::denominators: return "denominators";
    case Kernel::outputs: return "outputs";
    case Kernel::forward: return "forward";
    case Kernel::grad_denominators: return "grad_denominators";
    case Kernel::grad_segment_totals: return "grad_segment_totals";
    case Kernel::grad_segment_scan: return "grad_segment_scan";
    case Kernel::grad_states: return "grad_states";
    case Kernel::grad_states_v: return "grad_states_v";
    case Kernel::row_dots: return "row_dots";
    case Kernel::grad_n: return "grad_n";
    case Kernel::grad_v: return "grad_v";
    case Kernel::grad_qk: return "grad_qk";
    case Kernel::grad_qk_norm: return "grad_qk_norm";
    case Kernel::grad_q_forward: return "grad_q_forward";
    case Kernel::grad_v_reverse: return "grad_v_reverse";
    case Kernel::grad_k_reverse: return "grad_k_reverse";
    case Kernel::grad_qkv: return "grad_qkv";
    case Kernel::grad_qkv_small: return "grad_qkv_small";
    case Kernel::sum_groups: return "sum_groups";
    case Kernel::grad_gates: return "grad_gates";
    case Kernel::start_state: return "start_state";
    case Kernel::step: return "step";
    case Kernel::step_many: return "step_many";
  }
  return "";
}

}  // namespace tfla
