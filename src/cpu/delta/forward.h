// Forward of the delta rule: tile by tile, the state in the thread's cache. Columns of a state do not depend on each
// other, so a head is worked on by several threads where there are few heads.
#pragma once

#include "cpu/delta/tile.h"
#include "cpu/workers.h"

namespace tfla::cpu::delta {

template <class Real>
struct ForwardScratch {
  struct Worker {
    TileBuffers<Real> tile;
    Real* r = nullptr;      // [tile,panel]
    Real* w = nullptr;      // [tile,panel]
    Real* h = nullptr;      // [tile,panel]
    Real* state = nullptr;  // [dqk,panel]

    Worker(Arena& arena, const DeltaPlan& plan);
  };
  Workers<Worker> workers;

  ForwardScratch(Arena& arena, const DeltaPlan& plan) : workers(arena, plan) {}
};

template <class Real>
void run_forward(const Problem& problem, const MutableTensorView& h, const MutableTensorView& last_state,
                 const ForwardScratch<Real>& scratch);

}  // namespace tfla::cpu::delta
