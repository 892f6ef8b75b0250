// Stage `outputs`, fused with `states`: the state stays with the thread that needs it next.
#pragma once

#include <array>

#include "cpu/stages/denominators.h"
#include "cpu/stages/states.h"
#include "cpu/workers.h"

namespace tfla::cpu {

struct ForwardOutputs {
  MutableTensorView h;           // [B,T,H,dhv]
  MutableMlstmState last_state;  // optional
};

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
    Real* q = nullptr;   // [tile,dqk] converted queries
    Real* qb = nullptr;  // [tile,dqk] scale qbar Q
    Real* D = nullptr;   // [tile,tile] gate matrix
    Real* S = nullptr;   // [tile,tile] gated scores
    Real* h = nullptr;   // [tile,dhv] numerator

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

// m of a last state, from the gate scan.
template <class Real>
void store_max_states(const Problem& problem, const GateVectors<Real>& gates, const MutableTensorView& m);

}  // namespace tfla::cpu
