#include "cpu/stages/outputs.h"

#include "cpu/kernels/simd.h"

namespace tfla::cpu {

template <class Real>
OutputBuffers<Real>::OutputBuffers(Arena& arena, const Plan& plan) {
  q = arena.take<Real>(plan.tile * padded(plan.shape.dqk));
  qb = arena.take<Real>(plan.tile * plan.shape.dqk);
  D = arena.take<Real>(plan.tile * plan.tile);
  S = arena.take<Real>(plan.tile * plan.tile);
  h = arena.take<Real>(plan.tile * plan.shape.dhv);
  epilogue = EpilogueRows<Real>(arena, plan);
}

template <class Real>
void tile_outputs(const Problem& problem, const Tile& tile, const TileKeys<Real>& keys, const GateVectors<Real>& gates,
                  const State<Real>& state, const OutputBuffers<Real>& buffers, const ForwardOutputs& outputs,
                  bool shares) {
  const MlstmShape& shape = problem.plan.shape;
  const std::int64_t rows = tile.size();
  const std::int64_t qk_head = tile.head / problem.group();
  const auto scale = static_cast<Real>(problem.settings.scale);
  const Matrix<const Real> Q = shares ? spread<const Real>(buffers.q, rows, shape.dqk)
                                      : load_tile(problem.q, tile, qk_head, buffers.q, 0, shape.dqk);
  const Matrix<Real> Qb = dense(buffers.qb, rows, shape.dqk);
  const Matrix<Real> D = dense(buffers.D, rows, rows);
  const Matrix<Real> S = dense(buffers.S, rows, rows);
  const Matrix<Real> H = dense(buffers.h, rows, shape.dhv);

  if (problem.group() == 1) {
    gate_matrix(gates, scale, D);
    gated_scores<Real>(Square::diagonal, Q, keys.K, D, S);
  } else {
    if (!shares) multiply(Product<Real>{.out = D, .a = Q, .b = keys.K.t(), .out_part = Part::lower});
    gate_matrix(gates, scale, S);
    for (std::int64_t t = 0; t < rows; ++t) simd::multiply(D.row(t), S.row(t), t + 1);
  }
  if (!state.zero) {
    scale_rows(scale, gates.qbar, Q, Qb);
    multiply(Product<Real>{.out = H, .a = Qb, .b = state.C});
  }
  multiply(Product<Real>{
      .out = H, .a = S, .b = keys.V, .beta = state.zero ? Real{0} : Real{1}, .added = H, .a_part = Part::lower});
  if (problem.epilogue.given()) {
    store_outputs<Real>(problem, tile, keys.V, H, buffers.epilogue, outputs);
  } else {
    store_tile<Real>(H, gates.inverse, outputs.h, tile, tile.head);
  }
}

#define TFLA_INSTANTIATE(Real)                                                                             \
  template struct OutputBuffers<Real>;                                                                     \
  template void tile_outputs(const Problem&, const Tile&, const TileKeys<Real>&, const GateVectors<Real>&, \
                             const State<Real>&, const OutputBuffers<Real>&, const ForwardOutputs&, bool)
TFLA_INSTANTIATE(float);
TFLA_INSTANTIATE(double);
#undef TFLA_INSTANTIATE

}  // namespace tfla::cpu
