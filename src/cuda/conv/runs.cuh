// Which tokens look at which: neighbouring tokens of one sequence are a run, in which no boundary is looked for.
#pragma once

#include "cuda/common/device.cuh"
#include "cuda/conv/call.h"

namespace tfla::cuda::conv {

__device__ __forceinline__ std::int64_t read_integer(const Integers& integers, std::int64_t offset) {
  return integers.are_64_bit ? static_cast<const std::int64_t*>(integers.data)[offset]
                             : static_cast<const std::int32_t*>(integers.data)[offset];
}

// Tokens [begin, end) of a row of the batch that are of one sequence, or padding.
struct Run {
  std::int64_t batch;
  std::int64_t first;  // the sequence's first token there; of seq_idx no more than W-1 before `begin`
  std::int64_t begin, end;
  std::int64_t last;  // one past the sequence's last token; of seq_idx no more than W-1 behind `end`
  std::int64_t sequence;
  bool padding;
};

// All tokens of a sequence: a row of the batch, or a packed one. The host cannot see cu_seqlens: what falls is empty.
template <class Real>
__device__ __forceinline__ Run whole_sequence(const Call<Real>& call, std::int64_t sequence) {
  const Dims& dims = call.dims;
  const Integers& cu = call.cu_seqlens;
  if (cu.data == nullptr) return {sequence, 0, 0, dims.tokens, dims.tokens, sequence, false};
  const auto boundary = [&](std::int64_t index) {
    return read_boundary(cu.data, index * cu.strides[0], cu.are_64_bit, dims.tokens);
  };
  const std::int64_t begin = boundary(sequence), end = boundary(sequence + 1);
  return {0, begin, begin, end, end < begin ? begin : end, sequence, false};
}

// The packed sequence that a token is in. Each step of a run takes a token at least, whatever cu_seqlens holds.
template <class Real>
__device__ __forceinline__ Run packed_run(const Call<Real>& call, std::int64_t token, std::int64_t limit) {
  const Integers& cu = call.cu_seqlens;
  std::int64_t low = 0, high = call.dims.sequences;  // the owner is in [low, high); before it lie those that are empty
  if (read_integer(cu, high * cu.strides[0]) <= token) return {0, token, token, limit, limit, 0, true};
  while (high - low > 1) {
    const std::int64_t middle = low + (high - low) / 2;
    (read_integer(cu, middle * cu.strides[0]) <= token ? low : high) = middle;
  }
  Run run = whole_sequence(call, low);
  if (token < run.first || token >= run.last) return {0, token, token, token + 1, token + 1, 0, true};
  run.begin = token;
  run.end = min(run.last, limit);
  return run;
}

// Tokens that have the number of `token`, from there to `limit`, and how far the sequence goes on around them.
template <class Real>
__device__ __forceinline__ Run numbered_run(const Call<Real>& call, std::int64_t batch, std::int64_t token,
                                            std::int64_t limit) {
  constexpr int at_once = 8;  // loads that do not wait for each other
  const Integers& numbers = call.seq_idx;
  const std::int64_t row = batch * numbers.strides[0], reach = call.dims.width - 1;
  const auto number_of = [&](std::int64_t t) { return read_integer(numbers, row + t * numbers.strides[1]); };
  const std::int64_t number = number_of(token);
  // The first token from `from` on that has another number, or `to`.
  const auto change = [&](std::int64_t from, std::int64_t to) {
    for (std::int64_t t = from; t < to; t += at_once) {
      unsigned others = 0;
#pragma unroll
      for (int j = 0; j < at_once; ++j) others |= t + j < to && number_of(t + j) != number ? 1U << j : 0U;
      if (others != 0) return t + __ffs(static_cast<int>(others)) - 1;
    }
    return to;
  };
  Run run{batch, token, token, 0, 0, batch, number < 0};
  run.end = run.last = change(token + 1, limit);
  if (run.padding) return run;
  if (run.end == limit) run.last = change(limit, min(limit + reach, call.dims.tokens));
  const std::int64_t earliest = token > reach ? token - reach : 0;
  while (run.first > earliest && number_of(run.first - 1) == number) --run.first;
  return run;
}

// A token: positions are counted over all rows of the batch.
struct Position {
  std::int64_t batch, token;

  // Without a division, which would be a call: rows are seldom shorter than what is skipped.
  __device__ __forceinline__ void advance(const Dims& dims, std::int64_t count) {
    for (token += count; token >= dims.tokens; token -= dims.tokens) ++batch;
  }
};

// Calls work(run) for so many positions from `at` on, and leaves `at` behind them.
template <class Real, class Work>
__device__ __forceinline__ void each_run(const Call<Real>& call, Position& at, std::int64_t count, const Work& work) {
  while (count > 0) {
    const std::int64_t limit = min(call.dims.tokens, at.token + count);
    const Run run = call.seq_idx.data != nullptr ? numbered_run(call, at.batch, at.token, limit)
                    : call.cu_seqlens.data != nullptr
                        ? packed_run(call, at.token, limit)
                        : Run{at.batch, 0, at.token, limit, call.dims.tokens, at.batch, false};
    work(run);
    count -= run.end - run.begin;
    at.advance(call.dims, run.end - run.begin);
  }
}

}  // namespace tfla::cuda::conv
