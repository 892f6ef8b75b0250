// Which tokens look at which: a span of the batch cut into runs, each of tokens of one sequence.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/read_index.h"
#include "tfla/conv.h"

namespace tfla::cpu::conv {

// Neighbouring tokens of a row of the batch that are of one sequence, or padding.
struct Run {
  std::int64_t batch = 0;           // row of the tensors
  std::int64_t first = 0;           // the sequence's first token there; of seq_idx no more than W-1 before `begin`
  std::int64_t begin = 0, end = 0;  // tokens of the run
  std::int64_t last = 0;            // one past the sequence's last token; of seq_idx no more than W-1 behind `end`
  std::int64_t sequence = 0;        // which state
  bool padding = false;
};

struct Packing {
  const ConvShape& shape;
  TensorView cu_seqlens = {}, seq_idx = {};

  // All tokens of a sequence: a row of the batch, or a packed one.
  [[nodiscard]] Run whole(std::int64_t sequence) const {
    if (!cu_seqlens.given()) return {sequence, 0, 0, shape.tokens, shape.tokens, sequence, false};
    const std::int64_t begin = read_index(cu_seqlens, sequence), end = read_index(cu_seqlens, sequence + 1);
    return {0, begin, begin, end, end, sequence, false};
  }

  // Calls work(run) for the tokens [begin, end) of the batch, row after row.
  template <class Work>
  void for_runs(std::int64_t begin, std::int64_t end, const Work& work) const {
    while (begin < end) {
      const std::int64_t batch = begin / shape.tokens, token = begin % shape.tokens;
      const Run run = run_at(batch, token, std::min(shape.tokens, token + end - begin));
      work(run);
      begin += run.end - run.begin;
    }
  }

 private:
  // The run that begins with this token, and ends before `limit`.
  [[nodiscard]] Run run_at(std::int64_t batch, std::int64_t token, std::int64_t limit) const {
    if (seq_idx.given()) return numbered(batch, token, limit);
    if (!cu_seqlens.given()) return {batch, 0, token, limit, shape.tokens, batch, false};
    if (read_index(cu_seqlens, shape.sequences) <= token) return {batch, token, token, limit, limit, 0, true};
    std::int64_t low = 0, high = shape.sequences;  // the owner is in [low, high); before it lie those that are empty
    while (high - low > 1) {
      const std::int64_t middle = low + (high - low) / 2;
      (read_index(cu_seqlens, middle) <= token ? low : high) = middle;
    }
    Run run = whole(low);
    run.begin = token;
    run.end = std::min(run.last, limit);
    return run;
  }

  [[nodiscard]] Run numbered(std::int64_t batch, std::int64_t token, std::int64_t limit) const {
    const std::int64_t reach = shape.width - 1, number = number_of(batch, token);
    Run run{batch, token, token, token + 1, 0, batch, number < 0};
    while (run.end < limit && number_of(batch, run.end) == number) ++run.end;
    run.last = run.end;
    const std::int64_t earliest = std::max<std::int64_t>(token - reach, 0),
                       latest = std::min(run.end + reach, shape.tokens);
    while (run.first > earliest && number_of(batch, run.first - 1) == number) --run.first;
    while (run.last < latest && number_of(batch, run.last) == number) ++run.last;
    return run;
  }

  [[nodiscard]] std::int64_t number_of(std::int64_t batch, std::int64_t token) const {
    return read_integer(seq_idx, batch * seq_idx.strides[0] + token * seq_idx.strides[1]);
  }
};

}  // namespace tfla::cpu::conv
