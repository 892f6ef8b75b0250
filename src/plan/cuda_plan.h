// The GPU's part of a plan.
#pragma once

#include "plan/kernel_table.h"
#include "tfla/plan.h"

namespace tfla {

// Kernels, ranges and launches. plan.gpu says for which GPU.
void plan_cuda(Plan& plan, bool portable);

// What walks through a sequence in backward on Hopper: grad_states; grad_states_v; grad_q_forward, grad_v_reverse and
// grad_k_reverse.
enum class BackwardWalk : std::uint8_t { states, states_and_v, q_v_k };

// Chooses segments and their pieces. Portable kernels, and Hopper's.
void choose_segments(Plan& plan, std::int64_t chunks);
void choose_hopper_segments(Plan& plan, std::int64_t chunks, BackwardWalk walk);

// Whether Hopper's kernels make states: sm_90a.
[[nodiscard]] bool runs_on_hopper(const Plan& plan);

// Tokens of the chunks that the kernels of a plan work in: gates, states, sums.
[[nodiscard]] std::int64_t kernel_chunk(const Plan& plan);

// Sequences that the kernels of a plan see: those of the call, or runs of them.
[[nodiscard]] std::int64_t kernel_sequences(const Plan& plan);

// Whether the plan launches rows that want tensors whose rows begin on 16 bytes.
[[nodiscard]] bool needs_alignment(const Plan& plan);

}  // namespace tfla
