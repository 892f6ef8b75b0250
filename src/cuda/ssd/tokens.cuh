// What the kernels of the state space dual share: positions of tokens, numbers of heads, where a state starts afresh.
#pragma once

#include "cuda/common/device.cuh"
#include "cuda/ssd/call.h"

namespace tfla::cuda::ssd {

// A token: the positions of a call are counted over all rows of the batch.
struct Position {
  int batch;
  std::int64_t token;

  __device__ Position(const Dims& dims, std::int64_t position)
      : batch(static_cast<int>(position / dims.tokens)), token(position % dims.tokens) {}
  __device__ __forceinline__ void advance(const Dims& dims, int count) {
    token += count;
    if (token < dims.tokens) return;
    batch += static_cast<int>(token / dims.tokens);
    token %= dims.tokens;
  }
};

template <class Work>
__device__ __forceinline__ Work read_number(const PerHead& numbers, int head, int column = 0) {
  const std::int64_t at = head * numbers.head + column * numbers.column;
  Work x = 0;
  with_gate({numbers.data}, numbers.type, [&](const auto* data) { x = gate_as<Work>(data[at]); });
  return x;
}
__device__ __forceinline__ void write_number(const PerHead& numbers, int head, int column, double value) {
  const std::int64_t at = head * numbers.head + column * numbers.column;
  with_gate({numbers.data}, numbers.type, [&](auto* data) { data[at] = narrow<std::decay_t<decltype(*data)>>(value); });
}

// The packed tokens that are in a sequence: [begin, end).
struct Packed {
  std::int64_t begin, end;

  __device__ Packed(const Sequences& sequences, const Dims& dims) : begin(0), end(dims.tokens) {
    if (sequences.cu_seqlens == nullptr) return;
    const auto boundary = [&](std::int64_t index) {
      return read_boundary(sequences.cu_seqlens, index * sequences.cu_stride, sequences.cu_is_64_bit, dims.tokens);
    };
    begin = boundary(0);
    end = boundary(dims.sequences);
  }
  [[nodiscard]] __device__ __forceinline__ bool has(std::int64_t token) const { return token >= begin && token < end; }
};

// Whether the number of a token's sequence is another than that of the token before it in the row; before the first
// token it is 0.
__device__ __forceinline__ bool starts_afresh(const Sequences& sequences, const Position& position) {
  if (sequences.seq_idx == nullptr) return false;
  const std::int64_t at = position.batch * sequences.seq_idx_batch + position.token * sequences.seq_idx_token;
  const auto differs = [&](const auto* numbers) {
    return numbers[at] != (position.token == 0 ? 0 : numbers[at - sequences.seq_idx_token]);
  };
  return sequences.seq_idx_is_64_bit ? differs(static_cast<const std::int64_t*>(sequences.seq_idx))
                                     : differs(static_cast<const std::int32_t*>(sequences.seq_idx));
}

template <class Work>
__device__ __forceinline__ TimeStepRule<Work> rule_of(const Rules& rules) {
  const TimeStepRule<double>& rule = rules.time_step;
  return {rule.softplus, static_cast<Work>(rule.least), static_cast<Work>(rule.most)};
}

}  // namespace tfla::cuda::ssd
