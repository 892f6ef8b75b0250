// Stage `outputs`: h of one tile from the state at its beginning.
#pragma once

#include "cpu/stages/epilogue.h"
#include "cpu/stages/states.h"

namespace tfla::cpu {

// Work space of a thread for one tile, besides its keys and values.
template <class Real>
struct OutputBuffers {
  Real* q = nullptr;   // [tile,dqk] converted queries
  Real* qb = nullptr;  // [tile,dqk] scale qbar Q
  Real* D = nullptr;   // [tile,tile] gate matrix; Q K^T where heads share queries and keys
  Real* S = nullptr;   // [tile,tile] gated scores
  Real* h = nullptr;   // [tile,dhv] numerator
  EpilogueRows<Real> epilogue;

  OutputBuffers() = default;
  OutputBuffers(Arena& arena, const Plan& plan);
};

// den H = (scale qbar Q) C + (D . Q K^T) V, and the epilogue. `gates` are the tile's. shares: the buffers have Q and Q
// K^T of these tokens from a head that has the same queries and keys.
template <class Real>
void tile_outputs(const Problem& problem, const Tile& tile, const TileKeys<Real>& keys, const GateVectors<Real>& gates,
                  const State<Real>& state, const OutputBuffers<Real>& buffers, const ForwardOutputs& outputs,
                  bool shares);

}  // namespace tfla::cpu
