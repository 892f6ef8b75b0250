// The independent float64 reference of the state space dual: its recurrence token by token, every state kept, and
// back-propagation through it. No chunk and no logarithm: it shares nothing with the code it judges.
#pragma once

#include <cstdint>
#include <vector>

#include "tfla/ssd.h"

namespace tfla::reference {

// Sizes of what results are sums of: in SsdHeadResult squares, in SsdResult roots of their sums over all heads. Norms
// of products are products of norms.
struct SsdTerms {
  double ungated = 0;    // S_p.C and D x
  double y = 0;          // the same times silu(z)
  double dz = 0;         // the same times dy and the slope of silu
  double dx = 0;         // dt dS B, and D dy silu(z)
  double dB = 0;         // dt x^T dS, head by head of a group
  double dC = 0;         // (dy silu(z))^T S, head by head
  double dD = 0;         // x dy silu(z) of every token
  double ddt = 0;        // A <decay S, dS> and <x B^T, dS>, times the slope of dt
  double dA = 0;         // dt <decay S, dS> of every token, of which dA is the sum
  double dA_sums = 0;    // dt ||decay S|| ||dS||
  double ddt_bias = 0;   // ddt of every token, of which ddt_bias is the sum
  double ddt_pairs = 0;  // <S C, dy silu(z)> and <dt x B^T, dS>, times A and the slope of dt
  double dA_pairs = 0;   // the same times dt

  template <class Visit>
  void visit(const Visit& each) {
    for (double* term : {&ungated, &y, &dz, &dx, &dB, &dC, &dD, &ddt, &dA, &dA_sums, &ddt_bias, &ddt_pairs, &dA_pairs})
      each(*term);
  }
};

// One head of one sequence. Dense, row-major.
struct SsdHead {
  std::int64_t tokens = 0;     // T
  std::int64_t dim = 1;        // P
  std::int64_t state_dim = 1;  // S
  std::vector<double> x;       // [T,P]
  std::vector<double> dt;      // [T] as given
  double A = 0;
  std::vector<double> B;        // [T,S]
  std::vector<double> C;        // [T,S]
  std::vector<double> D;        // [P], empty: none
  std::vector<double> z;        // [T,P], empty: none
  double dt_bias = 0;           //
  std::vector<bool> afresh;     // [T] where the state before is forgotten, empty: nowhere
  std::vector<double> S0;       // [P,S], empty: zero
  std::vector<double> dy;       // [T,P], empty: forward only
  std::vector<double> dS_last;  // [P,S], empty: zero
};

struct SsdHeadResult {
  std::vector<double> y, ungated;  // [T,P]
  std::vector<double> S;           // [P,S] last state
  std::vector<double> dx;          // [T,P], the gradients are empty when dy is
  std::vector<double> ddt;         // [T]
  std::vector<double> dB, dC;      // [T,S]
  std::vector<double> dD;          // [P], zero without D
  std::vector<double> dz;          // [T,P], zero without z
  double dA = 0, ddt_bias = 0;
  std::vector<double> dS0;  // [P,S]
  SsdTerms terms;
};

// Reads dt_softplus, dt_min and dt_max of the options.
[[nodiscard]] SsdHeadResult evaluate(const SsdHead& head, const SsdOptions& options);

// A whole call. Dense, row-major, with the shapes of tfla/ssd.h; what is not given is empty.
struct SsdCall {
  std::int64_t batch = 1, tokens = 0, groups = 1, heads = 1, dim = 1, state_dim = 1;
  std::vector<std::int64_t> cu_seqlens = {};  // empty: every row of the batch is a sequence
  std::vector<std::int64_t> seq_idx = {};     // [B,T]
  std::vector<double> x = {}, dt = {}, A = {}, B = {}, C = {};
  std::vector<double> D = {};  // [H] or [H,P], told apart by the count; the gradient is like it
  std::vector<double> z = {}, dt_bias = {};
  std::vector<double> initial_state = {}, dy = {}, dlast_state = {};

  [[nodiscard]] std::int64_t sequences() const {
    return cu_seqlens.empty() ? batch : static_cast<std::int64_t>(cu_seqlens.size()) - 1;
  }
};

struct SsdResult {
  std::vector<double> y, ungated, last_state;
  std::vector<double> dx, ddt, dA, dB, dC, dD, dz, ddt_bias, dinitial_state;  // empty when dy is
  SsdTerms terms;
};

[[nodiscard]] SsdResult evaluate(const SsdCall& call, const SsdOptions& options);

}  // namespace tfla::reference
