// The fully parallel formulation: the whole sequence is one tile, walked through in square blocks. Quadratic in T.
#pragma once

#include "cpu/stages/denominators.h"
#include "cpu/stages/gradients.h"
#include "cpu/workers.h"

namespace tfla::cpu {

[[nodiscard]] inline std::int64_t blocks_of(std::int64_t length) {
  return (length + parallel_block - 1) / parallel_block;
}

// Two blocks of tokens of one head, and the square of the gate matrix where they meet.
struct BlockPair {
  Tile rows;
  Tile columns;  // not after the rows

  [[nodiscard]] Square square() const { return rows.begin == columns.begin ? Square::diagonal : Square::below; }
};

// D_tj = scale exp(u_t + c_j) on that square. Below the diagonal it is an outer product, exp(u_t + r) exp(c_j - r) with
// r = max c: both are at most 1, and no element needs an exponential of its own. `gates` starts at the sequence.
template <class Real>
void gate_square(const GateVectors<Real>& gates, Real scale, const BlockPair& pair, Real* weights,
                 const Matrix<Real>& D);

template <class Real>
struct ParallelScratch {
  struct Worker {
    GradientBuffers<Real> block;  // buffers of [block, ...]; its rows are tokens of the row or of the column block
    Real* state = nullptr;        // C and n of the initial state
    Real* dstate = nullptr;       // their gradients at the end
    Real* weights = nullptr;      // [block]
    NormBuffers<Real> norm;

    Worker(Arena& arena, const Plan& plan);
  };

  GateVectors<Real> gates;
  // Backward only, [H,tokens] each:
  Real* deta = nullptr;
  double* row = nullptr;
  double* column = nullptr;
  double* inflow = nullptr;
  double* outflow = nullptr;
  Workers<Worker> workers;

  ParallelScratch(Arena& arena, const Plan& plan);
};

template <class Real>
void run_parallel_forward(const Problem& problem, const ForwardOutputs& outputs, const ParallelScratch<Real>& scratch);

template <class Real>
void run_parallel_backward(const Problem& problem, const BackwardTensors& tensors,
                           const ParallelScratch<Real>& scratch);

}  // namespace tfla::cpu
