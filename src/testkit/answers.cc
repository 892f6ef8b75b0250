#include "testkit/answers.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "reference/regimes.h"
#include "testkit/storage.h"

namespace tfla::testkit {
namespace {

// Adds the rows of one head to their place in a [B,T,heads,width] array.
void add_rows(std::vector<double>& all, const std::vector<double>& part, std::int64_t T, std::int64_t heads,
              std::int64_t width, std::int64_t batch, std::int64_t begin, std::int64_t head) {
  for (std::size_t index = 0; index < part.size(); ++index) {
    const auto t = begin + static_cast<std::int64_t>(index) / width, c = static_cast<std::int64_t>(index) % width;
    all[static_cast<std::size_t>(((batch * T + t) * heads + head) * width + c)] += part[index];
  }
}

void place_entry(std::vector<double>& all, const std::vector<double>& part, std::int64_t index) {
  std::copy(part.begin(), part.end(), all.begin() + index * static_cast<std::int64_t>(part.size()));
}

}  // namespace

Judge::Answers Judge::Answers::of(const Problem& problem, bool with_backward, const reference::Roundings& roundings) {
  const Problem::Storage& storage = *problem.storage_;
  const MlstmShape& s = storage.description.shape;
  const std::int64_t heads = s.sequences * s.heads;
  std::vector<reference::HeadResult> results(static_cast<std::size_t>(heads));
#pragma omp parallel for schedule(dynamic)
  for (std::int64_t index = 0; index < heads; ++index) {
    const reference::Head inputs = storage.head_inputs(index / s.heads, index % s.heads, with_backward);
    reference::Roundings own = roundings;
    own.seed = reference::mix(roundings.seed + static_cast<std::uint64_t>(index));
    results[static_cast<std::size_t>(index)] = reference::evaluate(inputs, storage.forward.options, own);
  }

  Answers a;
  const auto zeros = [](std::int64_t count) { return std::vector<double>(static_cast<std::size_t>(count)); };
  const std::int64_t tokens = s.batch * s.tokens, group = s.heads / s.qk_heads;
  a.h = zeros(tokens * s.heads * s.dhv);
  a.C = zeros(heads * s.dqk * s.dhv);
  a.n = zeros(heads * s.dqk);
  a.m = zeros(heads);
  if (with_backward) {
    a.dv = zeros(tokens * s.heads * s.dhv);
    a.dq = a.dk = zeros(tokens * s.qk_heads * s.dqk);
    a.di = a.df = zeros(tokens * s.heads);
    a.dC0 = zeros(heads * s.dqk * s.dhv);
    a.dn0 = zeros(heads * s.dqk);
  }
  for (std::int64_t index = 0; index < heads; ++index) {
    const auto [batch, begin, count] = storage.range(index / s.heads);
    const std::int64_t head = index % s.heads;
    const reference::HeadResult& r = results[static_cast<std::size_t>(index)];
    add_rows(a.h, r.h, s.tokens, s.heads, s.dhv, batch, begin, head);
    place_entry(a.C, r.C, index);
    place_entry(a.n, r.n, index);
    a.m[static_cast<std::size_t>(index)] = r.m;
    a.spread += r.spread;
    if (!with_backward) continue;
    a.gate_terms += r.gate_terms;
    add_rows(a.dq, r.dq, s.tokens, s.qk_heads, s.dqk, batch, begin, head / group);
    add_rows(a.dk, r.dk, s.tokens, s.qk_heads, s.dqk, batch, begin, head / group);
    add_rows(a.dv, r.dv, s.tokens, s.heads, s.dhv, batch, begin, head);
    add_rows(a.di, r.di, s.tokens, s.heads, 1, batch, begin, head);
    add_rows(a.df, r.df, s.tokens, s.heads, 1, batch, begin, head);
    place_entry(a.dC0, r.dC0, index);
    place_entry(a.dn0, r.dn0, index);
  }
  return a;
}

}  // namespace tfla::testkit
