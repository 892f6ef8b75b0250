// The tensors behind a Problem; the judge reads them too.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "reference/reference.h"
#include "testkit/problem.h"
#include "testkit/tensor.h"

namespace tfla::testkit {

struct Problem::Storage {
  Case description;
  std::vector<std::int64_t> cu_seqlens;
  Tensor q, k, v, i, f, dh;
  Tensor h, dq, dk, dv, di, df;
  Tensor C0, n0, m0, C, n, m;
  Tensor dC_last, dn_last, dC0, dn0;
  Tensor packing;  // cu_seqlens where the call can read it
  Tensor saved;    // what forward keeps for backward
  MlstmForward forward;
  MlstmBackward backward;

  explicit Storage(const Case& given);

  [[nodiscard]] std::vector<std::pair<const char*, const Tensor*>> forward_outputs() const {
    return {{"h", &h}, {"C", &C}, {"n", &n}, {"m", &m}};
  }
  [[nodiscard]] std::vector<std::pair<const char*, const Tensor*>> backward_outputs() const {
    return {{"dq", &dq}, {"dk", &dk}, {"dv", &dv}, {"di", &di}, {"df", &df}, {"dC0", &dC0}, {"dn0", &dn0}};
  }

  // First token, number of tokens and batch row of a sequence.
  struct Range {
    std::int64_t batch, begin, count;
  };
  [[nodiscard]] Range range(std::int64_t sequence) const {
    if (cu_seqlens.empty()) return {sequence, 0, description.shape.tokens};
    const auto s = static_cast<std::size_t>(sequence);
    return {0, cu_seqlens[s], cu_seqlens[s + 1] - cu_seqlens[s]};
  }

  [[nodiscard]] reference::Head head_inputs(std::int64_t sequence, std::int64_t head, bool with_backward) const;

  // In place: the initial state where forward looks for it and leaves the last one. Backward has it elsewhere.
  void start_last_state() const;

 private:
  void derive_sequences();
  void allocate_tokens();
  void allocate_states();
  void draw();
  void fill_arguments();
};

}  // namespace tfla::testkit
