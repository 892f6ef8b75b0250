// The independent float64 reference of the causal convolution: its formula token by token, and the chain rule term by
// term. It shares nothing with the code it judges.
#pragma once

#include <cstdint>
#include <vector>

namespace tfla::reference {

// A whole call. Dense, row-major, with the shapes of tfla/conv.h; what is not given is empty.
struct ConvCall {
  std::int64_t batch = 1, tokens = 0, channels = 1, width = 1;
  bool silu = false;
  std::vector<double> x = {}, weight = {}, bias = {};       // [B,T,D], [D,W], [D]
  std::vector<double> initial_state = {};                   // [N,W-1,D]
  std::vector<std::int64_t> cu_seqlens = {}, seq_idx = {};  // [N+1], [B,T]
  std::vector<double> dy = {}, dlast_state = {};            // [B,T,D], empty: forward only; [N,W-1,D]

  [[nodiscard]] std::int64_t sequences() const {
    return cu_seqlens.empty() ? batch : static_cast<std::int64_t>(cu_seqlens.size()) - 1;
  }
};

struct ConvResult {
  std::vector<double> y, last_state;
  std::vector<double> dx, dweight, dbias, dinitial_state;  // empty when dy is
  double dweight_terms = 0, dbias_terms = 0;               // roots of the sums of squares of what these are sums of
};

[[nodiscard]] ConvResult evaluate(const ConvCall& call);

}  // namespace tfla::reference
