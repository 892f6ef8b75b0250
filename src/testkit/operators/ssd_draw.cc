// The numbers in the inputs of random calls of the state space dual.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>

#include "reference/regimes.h"
#include "reference/values.h"
#include "testkit/operators/ssd_problem.h"

namespace tfla::testkit {
namespace {

using reference::Stream;
using Values = std::vector<double>;

double rate(SsdRegime regime, double noise) {
  switch (regime) {
    case SsdRegime::lasting: return -1e-3 * std::exp(noise / 2);
    case SsdRegime::kept: return -17.5 * 0x1p-14;
    case SsdRegime::growing: return 0.3 * noise;
    case SsdRegime::brief: return -500 - 100 * std::abs(noise);
    case SsdRegime::gone: return -2500 - 500 * std::abs(noise);
    case SsdRegime::large: return -1e-2 * std::exp(noise / 2);
    default: return -std::exp(1.4 + 0.7 * noise);
  }
}

double time_step(SsdRegime regime, double noise, std::int64_t token, std::int64_t head) {
  constexpr double edges[] = {0x1p-5, 0x3p-6, 0x1p-4, 0x1p-5};
  const double usual = 0.03 * std::exp(0.7 * noise);
  switch (regime) {
    case SsdRegime::ordinary: return (token + head) % 11 == 5 ? -usual : usual;
    case SsdRegime::lasting: return 1e-3 * std::exp(0.3 * noise);
    case SsdRegime::kept: return 0x1p-10;
    case SsdRegime::brief:
    case SsdRegime::gone: return 0.04 + 0.02 * std::abs(noise);
    case SsdRegime::still: return (token + head) % 3 == 0 ? usual : 0;
    case SsdRegime::large: return 20 + noise;
    case SsdRegime::edges: return edges[(token + head) % 4];
    default: return usual;
  }
}

// softplus of the result is y, as far as finite numbers reach: what is not above 0 becomes nearly 0.
double softplus_inverse(double y) { return y > 30 ? y : std::max(std::log(std::expm1(std::max(y, 0.0))), -80.0); }

void fill(const Tensor& tensor, const std::function<double(std::int64_t)>& value) {
  const std::int64_t count = tensor.given() ? reference::element_count(tensor.view) : 0;
  for (std::int64_t index = 0; index < count; ++index)
    reference::store(tensor.view.data, tensor.view.dtype, reference::offset_of(tensor.view, index), value(index));
}

}  // namespace

void SsdProblem::draw() {
  const std::uint64_t seed = description.seed;
  const auto normals = [&](const Tensor& tensor, Stream stream, double size = 1, double center = 0) {
    fill(tensor, [=](std::int64_t index) { return center + size * reference::normal(seed, stream, index); });
  };
  normals(x_, Stream::v);
  normals(B_, Stream::k);
  normals(C_, Stream::q, 1 / std::sqrt(static_cast<double>(description.shape.dqk)));
  normals(z_, Stream::f);
  normals(dy_, Stream::dh);
  normals(D_, Stream::dn_last, 0.5, 1);
  normals(S0_, Stream::C0);
  normals(dS_last_, Stream::dC_last);
  fill(A_, [&](std::int64_t head) { return rate(description.regime, reference::normal(seed, Stream::n0, head)); });
}

void SsdProblem::draw_time_steps() {
  const MlstmShape& s = description.shape;
  const std::uint64_t seed = description.seed;
  const bool softplus = description.options.dt_softplus;
  // A sum that has to be an exact number has a bias that both dtypes hold.
  const bool exact = description.regime == SsdRegime::still || description.regime == SsdRegime::edges ||
                     description.regime == SsdRegime::kept;
  fill(dt_bias_, [=](std::int64_t head) {
    const double noise = reference::normal(seed, Stream::m0, head);
    return exact ? 0.25 : softplus ? noise - 3 : 0.01 * noise;
  });
  const Values bias = dt_bias_.given() ? gather(dt_bias_.view) : Values{};
  fill(dt_, [&](std::int64_t index) {
    const std::int64_t head = index % s.heads, token = index / s.heads % s.tokens;
    const double value = time_step(description.regime, reference::normal(seed, Stream::i, index), token, head);
    return (softplus ? softplus_inverse(value) : value) - (bias.empty() ? 0 : bias[static_cast<std::size_t>(head)]);
  });
}

// Numbers that go up and come back. Those of 64 bits differ in the upper half alone.
void SsdProblem::draw_numbers() {
  if (!seq_idx_.given()) return;
  const MlstmShape& s = description.shape;
  const std::uint64_t one_in = description.regime == SsdRegime::resets ? 2 : 7;
  std::int64_t number = 0;
  for (std::int64_t index = 0; index < s.batch * s.tokens; ++index) {
    if (index % s.tokens == 0) number = index / s.tokens % 2;  // not 0: the first token starts afresh too
    const std::uint64_t bits = reference::mix(description.seed + 1000 * static_cast<std::uint64_t>(index));
    if (bits % one_in == 0) number = number == 0 || bits % 3 == 0 ? number + 1 : number - 1;
    const std::int64_t at = reference::offset_of(seq_idx_.view, index);
    if (description.seq_idx == Numbers::int32) {
      static_cast<std::int32_t*>(seq_idx_.view.data)[at] = static_cast<std::int32_t>(number);
    } else {
      static_cast<std::int64_t*>(seq_idx_.view.data)[at] = number << 32;
    }
  }
}

}  // namespace tfla::testkit
