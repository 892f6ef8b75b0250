// The chunkwise backward pass: states forward, gradients in reverse, over spans.
#pragma once

#include "cpu/stages/denominators.h"
#include "cpu/stages/gradients.h"
#include "cpu/workers.h"

namespace tfla::cpu {

template <class Real>
struct BackwardScratch {
  struct Worker {
    GradientBuffers<Real> tile;
    NormBuffers<Real> norm;
    Real* stored = nullptr;   // states at the chunk starts of a span
    Real* inner = nullptr;    // states at the tile starts of a chunk, but its first
    Real* carried = nullptr;  // the state of the walk forward in time, then the gradient of the one in reverse
    Real* dq_sum = nullptr;   // [span,dqk] over the heads that share a query/key head; only where they do
    Real* dk_sum = nullptr;

    Worker(Arena& arena, const Plan& plan);
  };

  GateVectors<Real> gates;
  // Only when spans are shorter than sequences:
  Real* span_states = nullptr;   // at the beginning of each span, per head
  Real* span_dstates = nullptr;  // at the end of each span, per head
  Real* deta = nullptr;          // [H,tokens] with the exact normalizer gradient
  Workers<Worker> workers;

  BackwardScratch(Arena& arena, const Plan& plan);
};

template <class Real>
void run_backward(const Problem& problem, const BackwardTensors& tensors, const BackwardScratch<Real>& scratch);

}  // namespace tfla::cpu
