// The chunkwise forward pass: states and outputs by turns, tile by tile. The state stays with the thread that needs it
// next.
#pragma once

#include <array>

#include "cpu/stages/denominators.h"
#include "cpu/stages/outputs.h"
#include "cpu/workers.h"

namespace tfla::cpu {

// Scratch of a chunkwise forward call.
template <class Real>
struct ForwardScratch {
  struct Worker {
    // What a head takes along from tile to tile.
    struct Carried {
      Real* state = nullptr;  // C and n
      NormBuffers<Real> norm;
    };
    StateBuffers<Real> operands;
    OutputBuffers<Real> tile;
    std::array<Carried, most_abreast> heads;  // the first plan.abreast of them

    Worker(Arena& arena, const Plan& plan);
  };

  GateVectors<Real> gates;
  Real* span_states = nullptr;  // one per span number and head; none when spans are whole sequences
  Workers<Worker> workers;

  ForwardScratch(Arena& arena, const Plan& plan);
};

template <class Real>
void run_forward(const Problem& problem, const ForwardOutputs& outputs, const ForwardScratch<Real>& scratch);

}  // namespace tfla::cpu
