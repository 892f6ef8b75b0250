// forward_on_chip: what it is compiled for, and what follows from it.
#pragma once

#include "cuda/sm90/delta/solved.cuh"

namespace tfla::cuda::sm90::delta_rule {

struct ForwardOptions {
  int key_panels;  // of dqk
  int chains;      // warpgroups that have 64 columns of a state each
  bool packed;
};

template <ForwardOptions O>
struct ForwardConfig {
  static constexpr int key_panels = O.key_panels, chains = O.chains;
  static constexpr bool packed = O.packed;
  static constexpr int columns = chains * panel;
  static constexpr int slots = 3;  // tiles in shared memory

  // One warpgroup loads, one makes the scores, the others go along the chain of states.
  static constexpr int threads = (2 + chains) * warpgroup_threads;
  static constexpr int load_registers = 24;
  static constexpr int score_registers = chains == 1 ? 128 : 104;
  static constexpr int chain_registers = chains == 1 ? 240 : 192;
  static_assert(warpgroup_threads * (load_registers + score_registers + chains * chain_registers) <=
                multiprocessor_registers);
};

}  // namespace tfla::cuda::sm90::delta_rule
