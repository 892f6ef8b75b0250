// An mLSTM forward pass through an installed tfla, checked by hand where the answer has a closed form.
//
// The first token meets no state (C = 0, n = 0, m = 0), so with s = q.k / sqrt(dqk)
//   m = max(log sigmoid(f), i)      w = exp(i - m) s      h = v w / (max(|w|, exp(-m)) + eps)
#include <tfla/tfla.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <random>
#include <vector>

namespace {

constexpr std::int64_t batch = 1;
constexpr std::int64_t tokens = 100;
constexpr std::int64_t heads = 2;
constexpr std::int64_t dqk = 8;
constexpr std::int64_t dhv = 16;

std::vector<float> random_values(std::int64_t count, std::uint32_t seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& value : values) value = normal(generator);
  return values;
}

}  // namespace

int main() {
  const std::vector<float> q = random_values(batch * tokens * heads * dqk, 1);
  const std::vector<float> k = random_values(batch * tokens * heads * dqk, 2);
  const std::vector<float> v = random_values(batch * tokens * heads * dhv, 3);
  const std::vector<float> i = random_values(batch * tokens * heads, 4);
  const std::vector<float> f = random_values(batch * tokens * heads, 5);
  std::vector<float> h(v.size());

  using tfla::DType;
  tfla::MlstmForward args{
      .q = {q.data(), DType::float32, {batch, tokens, heads, dqk}},
      .k = {k.data(), DType::float32, {batch, tokens, heads, dqk}},
      .v = {v.data(), DType::float32, {batch, tokens, heads, dhv}},
      .i = {i.data(), DType::float32, {batch, tokens, heads}},
      .f = {f.data(), DType::float32, {batch, tokens, heads}},
      .h = {h.data(), DType::float32, {batch, tokens, heads, dhv}},
  };
  tfla::forward(args);

  std::printf("tfla %s\n", tfla::version());
  double worst = 0;
  for (std::int64_t head = 0; head < heads; ++head) {
    double s = 0;
    for (std::int64_t d = 0; d < dqk; ++d) s += double{q[head * dqk + d]} * k[head * dqk + d];
    s /= std::sqrt(double{dqk});
    const double m = std::max(-std::log1p(std::exp(-double{f[head]})), double{i[head]});
    const double w = std::exp(i[head] - m) * s;
    const double weight = w / (std::max(std::abs(w), std::exp(-m)) + args.options.eps);
    for (std::int64_t d = 0; d < dhv; ++d) {
      worst = std::max(worst, std::abs(h[head * dhv + d] - v[head * dhv + d] * weight));
    }
    std::printf("head %d: first token %9.6f, last token %9.6f\n", static_cast<int>(head), h[head * dhv],
                h[((tokens - 1) * heads + head) * dhv]);
  }
  std::printf("largest difference from the closed form: %.1e\n", worst);
  if (!(worst < 1e-5)) return 1;

  // What cannot be right is refused by an exception that names it.
  args.k = {k.data(), DType::float32, {batch, tokens, heads, dqk - 1}};
  try {
    tfla::forward(args);
  } catch (const tfla::InvalidArgument& error) {
    std::printf("refused: %s\n", error.what());
    return 0;
  }
  return 1;
}
