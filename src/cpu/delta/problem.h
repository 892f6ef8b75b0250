// A call of the delta rule as the passes see it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "cpu/problem.h"
#include "tfla/delta.h"

namespace tfla::cpu::delta {

struct Problem {
  const DeltaPlan& plan;
  TensorView q;        // [B,T,Hqk,dqk]
  TensorView k;        // [B,T,Hqk,dqk]
  TensorView v;        // [B,T,H,dhv]
  TensorView beta;     // [B,T,H]
  TensorView g;        // [B,T,H]  optional
  TensorView A_log;    // [H]      optional
  TensorView dt_bias;  // [H]      optional
  TensorView initial_state = {};
  TensorView cu_seqlens = {};

  [[nodiscard]] std::int64_t heads() const { return plan.shape.heads; }
  [[nodiscard]] std::int64_t group() const { return plan.shape.heads / plan.shape.qk_heads; }
  [[nodiscard]] Sequence sequence(std::int64_t index) const { return sequence_of(plan.shape, cu_seqlens, index); }
  [[nodiscard]] double scale() const {
    return plan.options.qk_scale.value_or(1.0 / std::sqrt(static_cast<double>(plan.shape.dqk)));
  }
  // Tiles start at multiples of plan.tile within a chunk, chunks at multiples of plan.chunk within a sequence.
  [[nodiscard]] std::int64_t tile_end(std::int64_t begin, std::int64_t length) const {
    const std::int64_t chunk_end = (begin / plan.chunk + 1) * plan.chunk;
    return std::min({begin + plan.tile, chunk_end, length});
  }
};

}  // namespace tfla::cpu::delta
