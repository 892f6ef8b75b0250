// Stage `epilogue`: what follows the outputs of a scan that has no denominator, y = (h + D v) silu(z), and its
// gradients.
#pragma once

#include "cpu/tile.h"
#include "cpu/workers.h"

namespace tfla::cpu {

// Work space of a thread: rows of one head.
template <class Real>
struct EpilogueRows {
  Real* skip = nullptr;  // [dhv] D
  Real* gate = nullptr;  // [dhv] z, or silu(z)

  EpilogueRows() = default;
  EpilogueRows(Arena& arena, const Plan& plan);
};

// H of a tile becomes y, in the caller's tensor, and what it was before the gate in `ungated` where that is given.
template <class Real>
void store_outputs(const Problem& problem, const Tile& tile, const Matrix<const Real>& V, const Matrix<Real>& H,
                   const EpilogueRows<Real>& rows, const ForwardOutputs& outputs);

// dy silu(z), each row times its factor: columns [first, first + cols) of a tile.
template <class Real>
[[nodiscard]] Matrix<Real> load_output_gradients(const Problem& problem, const TensorView& dy, const Tile& tile,
                                                 const Real* factors, const EpilogueRows<Real>& rows, Real* buffer,
                                                 std::int64_t first, std::int64_t cols);

// dV += D dH
template <class Real>
void add_skip_gradients(const Problem& problem, const Tile& tile, const Matrix<Real>& dH,
                        const EpilogueRows<Real>& rows, const Matrix<Real>& dV);

// The gradients of z and D; either may be left out.
template <class Real>
struct EpilogueScratch {
  struct Worker {
    EpilogueRows<Real> rows;
    Real* dy = nullptr;      // [dhv]
    Real* other = nullptr;   // [dhv] ungated outputs, or values
    Real* dz = nullptr;      // [dhv]
    double* sums = nullptr;  // [dhv]

    Worker(Arena& arena, const Plan& plan);
  };
  Workers<Worker> workers;

  EpilogueScratch(Arena& arena, const Plan& plan) : workers(arena, plan) {}
};

template <class Real>
void epilogue_gradients(const Problem& problem, const TensorView& dy, const MutableTensorView& dz,
                        const MutableTensorView& dD, const EpilogueScratch<Real>& scratch);

}  // namespace tfla::cpu
