#include "cpu/stages/epilogue.h"

#include <algorithm>
#include <cstddef>
#include <numeric>

#include "cpu/gate_tensor.h"
#include "cpu/kernels/simd.h"
#include "cpu/threads.h"

namespace tfla::cpu {

namespace {

// D of one head as a row.
template <class Real>
void load_skip(const TensorView& D, std::int64_t head, std::int64_t cols, Real* to) {
  const std::int64_t step = D.rank == 2 ? D.strides[1] : 0;
  for (std::int64_t c = 0; c < cols; ++c) to[c] = static_cast<Real>(read_gate(D, head * D.strides[0] + c * step));
}

template <class Real>
void load_row(const TensorView& view, const Tile& tile, std::int64_t row, std::int64_t first, std::int64_t cols,
              Real* to) {
  const auto* from = static_cast<const std::byte*>(row_of(view, tile.sequence, tile.begin + row, tile.head));
  simd::load(from + first * item_size(view.dtype), view.dtype, to, cols);
}

}  // namespace

template <class Real>
EpilogueRows<Real>::EpilogueRows(Arena& arena, const Plan& plan) {
  for (Real** row : {&skip, &gate}) *row = arena.take<Real>(plan.shape.dhv);
}

template <class Real>
void store_outputs(const Problem& problem, const Tile& tile, const Matrix<const Real>& V, const Matrix<Real>& H,
                   const EpilogueRows<Real>& rows, const ForwardOutputs& outputs) {
  const Epilogue& epilogue = problem.epilogue;
  if (epilogue.D.given()) {
    load_skip(epilogue.D, tile.head, H.cols, rows.skip);
    for (std::int64_t r = 0; r < H.rows; ++r) simd::add_product(rows.skip, V.row(r), H.row(r), H.cols);
  }
  if (outputs.ungated.given()) store_tile<Real>(H, nullptr, outputs.ungated, tile, tile.head);
  for (std::int64_t r = 0; epilogue.z.given() && r < H.rows; ++r) {
    load_row(epilogue.z, tile, r, 0, H.cols, rows.gate);
    simd::silu(rows.gate, H.cols);
    simd::multiply(rows.gate, H.row(r), H.cols);
  }
  store_tile<Real>(H, nullptr, outputs.h, tile, tile.head);
}

template <class Real>
Matrix<Real> load_output_gradients(const Problem& problem, const TensorView& dy, const Tile& tile, const Real* factors,
                                   const EpilogueRows<Real>& rows, Real* buffer, std::int64_t first,
                                   std::int64_t cols) {
  const Matrix<Real> dH = load_scaled(dy, tile, tile.head, factors, buffer, first, cols);
  const TensorView& z = problem.epilogue.z;
  for (std::int64_t r = 0; z.given() && r < dH.rows; ++r) {
    load_row(z, tile, r, first, cols, rows.gate);
    simd::silu(rows.gate, cols);
    simd::multiply(rows.gate, dH.row(r), cols);
  }
  return dH;
}

template <class Real>
void add_skip_gradients(const Problem& problem, const Tile& tile, const Matrix<Real>& dH,
                        const EpilogueRows<Real>& rows, const Matrix<Real>& dV) {
  if (!problem.epilogue.D.given()) return;
  load_skip(problem.epilogue.D, tile.head, dV.cols, rows.skip);
  for (std::int64_t r = 0; r < dV.rows; ++r) simd::add_product(rows.skip, dH.row(r), dV.row(r), dV.cols);
}

template <class Real>
EpilogueScratch<Real>::Worker::Worker(Arena& arena, const Plan& plan) : rows(arena, plan) {
  for (Real** row : {&dy, &other, &dz}) *row = arena.take<Real>(plan.shape.dhv);
  sums = arena.take<double>(plan.shape.dhv);
}

template <class Real>
void epilogue_gradients(const Problem& problem, const TensorView& dy, const MutableTensorView& dz,
                        const MutableTensorView& dD, const EpilogueScratch<Real>& scratch) {
  if (!problem.epilogue.given()) return;
  const Plan& plan = problem.plan;
  const std::int64_t dhv = plan.shape.dhv;
  // A head is one thread's, so that its sums do not depend on how many there are.
  parallel_for(problem.heads(), plan.threads, [&](std::int64_t head, int index) {
    const auto worker = scratch.workers.at(plan, index);
    std::fill_n(worker.sums, dhv, 0.0);
    for (std::int64_t number = 0; number < plan.shape.sequences; ++number) {
      const Sequence sequence = problem.sequence(number);
      const Tile tokens{sequence, head, 0, sequence.length};
      for (std::int64_t t = 0; t < sequence.length; ++t) {
        load_row(dy, tokens, t, 0, dhv, worker.dy);
        if (problem.epilogue.z.given()) {
          load_row(problem.epilogue.z, tokens, t, 0, dhv, worker.rows.gate);
          load_row(problem.epilogue.ungated, tokens, t, 0, dhv, worker.other);
          simd::silu_gradient(worker.rows.gate, worker.other, worker.dy, worker.dz, dhv);
          simd::store(Real{1}, worker.dz, row_of(dz, sequence, t, head), dz.dtype, dhv);
          simd::silu(worker.rows.gate, dhv);
          simd::multiply(worker.rows.gate, worker.dy, dhv);
        }
        if (!dD.given()) continue;
        load_row(problem.v, tokens, t, 0, dhv, worker.other);
        simd::add_products(worker.dy, worker.other, worker.sums, dhv);
      }
    }
    if (!dD.given()) return;
    if (dD.rank == 1) return write_gate(dD, head * dD.strides[0], std::accumulate(worker.sums, worker.sums + dhv, 0.0));
    for (std::int64_t c = 0; c < dhv; ++c) write_gate(dD, head * dD.strides[0] + c * dD.strides[1], worker.sums[c]);
  });
}

#define TFLA_INSTANTIATE(Real)                                                                                  \
  template struct EpilogueRows<Real>;                                                                           \
  template void store_outputs(const Problem&, const Tile&, const Matrix<const Real>&, const Matrix<Real>&,      \
                              const EpilogueRows<Real>&, const ForwardOutputs&);                                \
  template Matrix<Real> load_output_gradients(const Problem&, const TensorView&, const Tile&, const Real*,      \
                                              const EpilogueRows<Real>&, Real*, std::int64_t, std::int64_t);    \
  template void add_skip_gradients(const Problem&, const Tile&, const Matrix<Real>&, const EpilogueRows<Real>&, \
                                   const Matrix<Real>&);                                                        \
  template struct EpilogueScratch<Real>;                                                                        \
  template void epilogue_gradients(const Problem&, const TensorView&, const MutableTensorView&,                 \
                                   const MutableTensorView&, const EpilogueScratch<Real>&)
TFLA_INSTANTIATE(float);
TFLA_INSTANTIATE(double);
#undef TFLA_INSTANTIATE

}  // namespace tfla::cpu
