// Backward of the delta rule. One thread takes a query/key head of a sequence, and its value heads in turn: the states
// at the starts of chunks, then from the last chunk to the first its residuals and the states of its tiles once more,
// and tile by tile backwards the gradients.
//
//   dw  = P^T dH + (abar K) dC       dX_j = dw_j - sum over t > j of L_tj dV_t       dV = beta dX      dbeta = dX . r
//   dS  = scale D . (dH w^T)         dQ  = (scale qbar dH) C^T + dS K                E = -D . (dV w^T), strictly lower
//   dKr = -(qbar dV) C^T + E K       dKw = (abar w) dC^T + dS^T Q + E^T K            dK = dKr + dKw
//   dC  <- gbar dC + (scale qbar Q)^T dH - (qbar K)^T dV
//
// dKr is the gradient of keys as they are read, dKw as they are written. A log decay weighs what is read from its token
// on of what was written before it. Its gradient is the sum of just these: pairs of tokens on either side of it, reads
// of C from it on, writes to C' before it, and C in C'. The difference of all reads and all writes, q.dq + k.dKr -
// k.dKw summed up, is the same number, but under strong decay it would be rounding of terms that cancel.
#pragma once

#include "cpu/delta/tile.h"
#include "cpu/workers.h"

namespace tfla::cpu::delta {

struct BackwardTensors {
  TensorView dh;                     // [B,T,H,dhv]
  TensorView dlast_state;            // [N,H,dqk,dhv]  optional
  MutableTensorView dq;              // [B,T,Hqk,dqk]
  MutableTensorView dk;              // [B,T,Hqk,dqk]
  MutableTensorView dv;              // [B,T,H,dhv]
  MutableTensorView dbeta;           // [B,T,H]
  MutableTensorView dg;              // [B,T,H]        optional
  MutableTensorView dA_log;          // [H]            optional
  MutableTensorView ddt_bias;        // [H]            optional
  MutableTensorView dinitial_state;  // [N,H,dqk,dhv]  optional
};

template <class Real>
struct BackwardScratch {
  struct Worker {
    TileBuffers<Real> tile;
    Real* residuals = nullptr;   // [chunk,dhv] r
    Real* w = nullptr;           // [tile,dhv]
    Real* dh = nullptr;          // [tile,dhv]
    Real* dX = nullptr;          // [tile,dhv]
    Real* dV = nullptr;          // [tile,dhv]
    Real* scaled = nullptr;      // [tile,dhv] rows of dh, dV or w, each times a factor
    Real* dS = nullptr;          // [tile,tile]
    Real* E = nullptr;           // [tile,tile]
    Real* dq = nullptr;          // [tile,dqk]
    Real* dk_read = nullptr;     // [tile,dqk]
    Real* dk_written = nullptr;  // [tile,dqk]
    // What decays weigh, in double.
    double* columns = nullptr;     // [tile] of pairs of tokens, by the earlier one
    double* across = nullptr;      // [tile] of pairs of tokens, by the decay between them
    double* read = nullptr;        // [tile] of reads of C
    double* written = nullptr;     // [tile] of writes to the next C
    Real* dC = nullptr;            // [dqk,dhv]
    Real* chunk_states = nullptr;  // [chunks,dqk,dhv] at the starts of chunks
    Real* tile_states = nullptr;   // [tiles,dqk,dhv] at the starts of a chunk's tiles
    Real* dq_sum = nullptr;        // [T,dqk] over the value heads of a group, where there are several
    Real* dk_sum = nullptr;        // [T,dqk]

    Worker(Arena& arena, const DeltaPlan& plan);
  };
  double* dA_log = nullptr;    // [N,H] sums over the tokens of a sequence
  double* ddt_bias = nullptr;  // [N,H]
  Workers<Worker> workers;

  BackwardScratch(Arena& arena, const DeltaPlan& plan);
};

template <class Real>
void run_backward(const Problem& problem, const BackwardTensors& tensors, const BackwardScratch<Real>& scratch);

}  // namespace tfla::cpu::delta
