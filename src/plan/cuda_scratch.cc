#include "plan/cuda_scratch.h"

#include <algorithm>

#include "core/decay.h"
#include "plan/arithmetic.h"
#include "plan/cuda_plan.h"
#include "plan/hopper_sizes.h"
#include "tfla/tfla.h"

namespace tfla {

namespace {

// Bytes of the numbers of a call, by the type of its tensors.
struct Items {
  std::int64_t real;     // sums and gate vectors
  std::int64_t stored;   // C and dC
  std::int64_t norm;     // n
  std::int64_t log = 8;  // a double, or two floats
};

Items items_of(DType dtype) {
  switch (dtype) {
    case DType::float64: return {.real = 8, .stored = 8, .norm = 8};
    case DType::float32: return {.real = 4, .stored = 4, .norm = 8};
    default: return {.real = 4, .stored = 2, .norm = 4};
  }
}

// The tile of portable kernels that leave sums: its columns of dqk or dhv, and the numbers that add up to a sum.
std::int64_t tile_columns(DType dtype) { return item_size(dtype) == 2 ? 128 : 64; }
std::int64_t sum_terms(DType dtype) { return item_size(dtype) == 2 ? 1 : 2; }

// Adds the buffers of a call one after the other.
class Writer {
 public:
  explicit Writer(const Plan& plan)
      : plan_(plan),
        shape_(plan.shape),
        items_(items_of(plan.shape.dtype)),
        cut_(plan.formulation == Formulation::recurrent ? TokenCut{} : cut_tokens(plan)),
        sequences_(kernel_sequences(plan)),
        vectors_(shape_.batch * shape_.tokens * shape_.heads),
        chunks_(cut_.chunk_count * shape_.heads),
        hopper_(runs_on_hopper(plan)),
        on_chip_(launches(plan, Kernel::forward, Needs::sm90a)),
        transposed_(launches(plan, Kernel::grad_k_reverse, Needs::sm90a)) {}

  [[nodiscard]] Layout stages() {
    denominators();
    states();
    gates();
    segments();
    if (plan_.operation == Operation::backward) gradients();
    return layout_;
  }

  // Tokens on states in place. The states of the recurrent formulation lie here where the caller wants none.
  [[nodiscard]] Layout step() {
    real(Buffer::inverse, vectors_);
    layout_.add(Buffer::decay, vectors_, 2 * items_.real);
    real(Buffer::weight, vectors_);
    if (plan_.operation == Operation::step) return layout_;
    const std::int64_t states = shape_.sequences * shape_.heads;
    real(Buffer::step_C, states * shape_.dqk * shape_.dhv);
    real(Buffer::step_n, states * shape_.dqk);
    real(Buffer::step_m, states);
    return layout_;
  }

 private:
  void real(Buffer buffer, std::int64_t elements, bool saved = false) {
    layout_.add(buffer, elements, items_.real, saved);
  }

  [[nodiscard]] std::int64_t padded_dhv() const { return round_up(shape_.dhv, 8); }
  [[nodiscard]] std::int64_t state_elements() const { return shape_.dqk * padded_dhv(); }

  // Of all heads, as Dims::first_checkpoint counts them.
  [[nodiscard]] std::int64_t checkpoints() const {
    const std::int64_t count = shape_.packed ? shape_.tokens / hopper::checkpoint + 2 * sequences_
                                             : shape_.sequences * (ceil_div(shape_.tokens, hopper::checkpoint) + 1);
    return count * shape_.heads;
  }

  void denominators() {
    if (on_chip_ && plan_.keep == Keep::nothing) return;  // forward divides on the chip
    const bool saved = plan_.keep != Keep::nothing;
    real(Buffer::inverse, vectors_, saved);
    real(Buffer::slope, vectors_, saved);
  }

  void states() {
    const bool keeps = plan_.keep == Keep::states;
    if (on_chip_ ? keeps : !transposed_) {
      const std::int64_t states = on_chip_ ? TokenCut::count(plan_, cut_.kept_chunk) * shape_.heads : chunks_;
      layout_.add(Buffer::C, states * state_elements(), items_.stored, keeps);
      layout_.add(Buffer::n, states * shape_.dqk, items_.norm, keeps);
    }
    if (on_chip_ && shape_.dqk > hopper::dqk_of_a_pass)
      real(Buffer::dqk_partials,
           sequences_ * shape_.heads * plan_.segments * cut_.chunks_per_segment * hopper::partial_floats(shape_.dhv));
  }

  void gates() {
    layout_.add(Buffer::chunks, cut_.chunk_count, chunk_bytes);
    if (plan_.run > 0) {
      layout_.add(Buffer::run_starts, sequences_ + 1, sizeof(std::int64_t));
      layout_.add(Buffer::first_tokens, first_token_words(shape_.tokens), sizeof(std::uint32_t));
    }
    if (hopper_) {
      const std::int64_t segments = sequences_ + shape_.tokens / (cut_.chunks_per_segment * cut_.chunk);
      layout_.add(Buffer::packed_segments, 1 + segments, packed_segment_bytes);
    }
    if (item_size(shape_.dtype) > 2) layout_.add(Buffer::c, vectors_, sizeof(double));
    for (const Buffer buffer : {Buffer::u, Buffer::log_c}) layout_.add(buffer, vectors_, items_.log);
    for (const Buffer buffer : {Buffer::qbar, Buffer::abar}) real(buffer, vectors_);
    if (item_size(shape_.dtype) == 2 && plan_.operation == Operation::forward) real(Buffer::floor, vectors_);
    for (const Buffer buffer : {Buffer::b_last, Buffer::m_start, Buffer::m_end})
      layout_.add(buffer, chunks_, sizeof(double));
    real(Buffer::gbar, chunks_);
    constexpr std::int64_t dqk_in_registers = 256;
    layout_.add(Buffer::n_work, shape_.dqk > dqk_in_registers ? chunks_ * shape_.dqk : 0, sizeof(double));
  }

  void segments() {
    if (plan_.segments > 1) {
      // Hopper's kernels keep what lies between segments of packed sequences.
      const std::int64_t places = hopper_ && shape_.packed ? shape_.tokens / (cut_.chunks_per_segment * cut_.chunk) + 1
                                                           : sequences_ * plan_.segments * plan_.pieces;
      real(Buffer::segment_C, places * shape_.heads * state_elements());
      layout_.add(Buffer::segment_n, places * shape_.heads * shape_.dqk, items_.norm);
    }
    if (!launches(plan_, Kernel::copy_state, Needs::sm90a)) return;
    const std::int64_t norms = shape_.sequences * shape_.heads * shape_.dqk;
    real(Buffer::own_n0, norms);
    if (shape_.packed && plan_.segments > 1) real(Buffer::own_C0, norms * shape_.dhv);
  }

  void gradients() {
    real(Buffer::deta, vectors_);
    if (transposed_) {
      layout_.add(Buffer::checkpoints, checkpoints() * hopper::checkpoint_numbers(shape_.dqk), items_.stored);
    } else {
      layout_.add(Buffer::dC, chunks_ * state_elements(), items_.stored);
      real(Buffer::dn, chunks_ * shape_.dqk);
    }
    if (launches(plan_, Kernel::sum_groups, Needs::any_gpu))
      for (const Buffer buffer : {Buffer::dq_heads, Buffer::dk_heads})
        layout_.add(buffer, vectors_ * shape_.dqk, item_size(shape_.dtype));
    for (const Buffer buffer : {Buffer::row_sums, Buffer::column_sums})
      real(buffer, sum_terms(shape_.dtype) * sum_parts(plan_) * vectors_);
    if (!transposed_) real(Buffer::outflow, sum_parts(plan_) * vectors_);
    layout_.add(Buffer::through, (transposed_ ? checkpoints() : chunks_) * through_parts(plan_), sizeof(double));
    if (transposed_ || launches(plan_, Kernel::grad_states_v, Needs::sm90a)) {
      layout_.add(Buffer::block_u, vectors_, items_.log);
      for (const Buffer buffer : {Buffer::block_qbar, Buffer::block_abar}) real(buffer, vectors_);
      real(Buffer::block_gbar, TokenCut::count(plan_, hopper::token_block) * shape_.heads);
    }
    if (trace_parts(plan_) > 0) layout_.add(Buffer::traces, chunks_ * trace_parts(plan_), sizeof(double));
    if (!hopper_ || shape_.dtype != DType::float16) return;
    for (const Buffer buffer : {Buffer::inverse_scale_C, Buffer::inverse_scale_dC})
      real(buffer, chunks_ * hopper::state_tiles(shape_.dqk, shape_.dhv));
  }

  const Plan& plan_;
  const MlstmShape& shape_;
  Items items_;
  TokenCut cut_;
  std::int64_t sequences_;  // as kernels see them
  std::int64_t vectors_;    // numbers in a vector of all tokens and heads
  std::int64_t chunks_;     // and of all chunks and heads
  bool hopper_;
  bool on_chip_;     // forward has the states on the chip
  bool transposed_;  // so has backward: grad_q_forward, grad_v_reverse, grad_k_reverse
  Layout layout_;
};

}  // namespace

void Layout::add(Buffer buffer, std::int64_t elements, std::int64_t item, bool saved) {
  std::size_t& used = saved ? saved_bytes_ : scratch_bytes_;
  offsets_[static_cast<std::size_t>(buffer)] = used;
  saved_[static_cast<std::size_t>(buffer)] = saved;
  const auto bytes = static_cast<std::size_t>(elements) * static_cast<std::size_t>(item);
  used += (bytes + scratch_alignment - 1) / scratch_alignment * scratch_alignment;
}

std::int64_t TokenCut::count(const Plan& plan, std::int64_t tokens) {
  const MlstmShape& shape = plan.shape;
  return shape.packed ? shape.tokens / tokens + kernel_sequences(plan)
                      : shape.sequences * ceil_div(shape.tokens, tokens);
}

TokenCut cut_tokens(const Plan& plan) {
  const MlstmShape& shape = plan.shape;
  TokenCut cut{};
  cut.chunk = kernel_chunk(plan);
  const bool on_chip = launches(plan, Kernel::forward, Needs::sm90a);
  cut.kept_chunk = on_chip && plan.keep == Keep::states ? hopper::chunk : 0;
  // Sequences of a dense batch all have the same chunks. Packed ones may each have one that is not full.
  cut.chunks_per_row = shape.packed ? 0 : std::max<std::int64_t>(ceil_div(shape.tokens, cut.chunk), 1);
  cut.chunk_count = shape.packed ? TokenCut::count(plan, cut.chunk) : shape.batch * cut.chunks_per_row;
  const std::int64_t chunks = std::max<std::int64_t>(ceil_div(shape.longest, cut.chunk), 1);
  cut.chunks_per_piece = ceil_div(chunks, plan.segments * plan.pieces);
  cut.chunks_per_segment = plan.pieces * cut.chunks_per_piece;
  return cut;
}

std::int64_t through_parts(const Plan& plan) {
  const MlstmShape& shape = plan.shape;
  if (launches(plan, Kernel::grad_k_reverse, Needs::sm90a)) return hopper::checkpoint_parts(shape.dqk);
  if (runs_on_hopper(plan)) return hopper::through_parts(shape.dqk, shape.dhv);
  constexpr std::int64_t tile_rows = 64, warps_of_a_cta = 4;
  return ceil_div(shape.dqk, tile_rows) * ceil_div(shape.dhv, tile_columns(shape.dtype)) * warps_of_a_cta;
}

std::int64_t sum_parts(const Plan& plan) { return ceil_div(plan.shape.dqk, tile_columns(plan.shape.dtype)); }

std::int64_t trace_parts(const Plan& plan) {
  const bool from_grad_qk =
      launches(plan, Kernel::grad_states_v, Needs::sm90a) || launches(plan, Kernel::grad_qk_norm, Needs::sm90a);
  return from_grad_qk ? hopper::trace_parts(plan.shape.dqk) : 0;
}

Plan largest_slice(Plan plan) {
  const std::int64_t group = plan.shape.heads / std::max<std::int64_t>(plan.shape.qk_heads, 1);
  plan.shape.qk_heads = ceil_div(plan.shape.qk_heads, plan.slices);
  plan.shape.heads = plan.shape.qk_heads * group;
  return plan;
}

Layout lay_out(const Plan& plan) {
  return plan.formulation == Formulation::recurrent ? Writer(plan).step() : Writer(plan).stages();
}

}  // namespace tfla
