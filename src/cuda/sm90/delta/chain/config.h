// Kernels that go along the chain of states: what they are compiled for, and what follows from it.
#pragma once

#include <cstdint>

#include "cuda/sm90/delta/solved.cuh"

namespace tfla::cuda::sm90::delta_rule {

// forward_on_chip: H and the last state. states_on_chip: residuals, and C at the starts of tiles. grad_states_on_chip,
// from the last tile to the first: dX and dV, and dC at the ends of tiles.
enum class Pass : std::uint8_t { outputs, states, gradients };

struct ChainOptions {
  Pass pass;
  int key_panels;  // of dqk
  int chains;      // warpgroups that have 64 columns of a state each
  bool packed;
};

template <ChainOptions O>
struct ChainConfig {
  static constexpr Pass pass = O.pass;
  static constexpr int key_panels = O.key_panels, chains = O.chains;
  static constexpr bool packed = O.packed;
  static constexpr int columns = chains * panel;
  static constexpr int slots = 3;  // tiles in shared memory
  static constexpr bool reverse = pass == Pass::gradients;
  static constexpr bool reads_queries = pass != Pass::states, makes_scores = reads_queries;

  // One warpgroup loads, one makes the scores, the others go along the chain of states.
  static constexpr int threads = (2 + chains) * warpgroup_threads;
  static constexpr int load_registers = 24;
  static constexpr int score_registers = chains == 1 ? 128 : 104;
  static constexpr int chain_registers = chains == 1 ? 240 : 192;
  static_assert(warpgroup_threads * (load_registers + score_registers + chains * chain_registers) <=
                multiprocessor_registers);
};

}  // namespace tfla::cuda::sm90::delta_rule
