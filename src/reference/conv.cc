#include "reference/conv.h"

#include <cmath>
#include <cstddef>

namespace tfla::reference {
namespace {

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

class Convolution {
 public:
  explicit Convolution(const ConvCall& call) : call_(call), D_(call.channels), W_(call.width) {
    const auto zeros = [](std::int64_t count) { return std::vector<double>(static_cast<std::size_t>(count)); };
    const std::int64_t state = call.sequences() * (W_ - 1) * D_;
    result_.y = zeros(call.batch * call.tokens * D_);
    result_.last_state = zeros(state);
    backward_ = !call.dy.empty() || result_.y.empty();
    if (!backward_) return;
    result_.dx = zeros(call.batch * call.tokens * D_);
    result_.dweight = zeros(D_ * W_);
    result_.dbias = zeros(D_);
    result_.dinitial_state = zeros(state);
  }

  ConvResult run() {
    for (std::int64_t b = 0; b < call_.batch; ++b) {
      for (std::int64_t t = 0; t < call_.tokens; ++t) token(b, t);
    }
    for (std::int64_t s = 0; s < call_.sequences(); ++s) last_state(s);
    result_.dweight_terms = std::sqrt(result_.dweight_terms);
    result_.dbias_terms = std::sqrt(result_.dbias_terms);
    return result_;
  }

 private:
  struct Place {
    std::int64_t sequence, begin, row;  // which sequence, its first token, and its row of the batch
  };

  // False for padding.
  bool place_of(std::int64_t b, std::int64_t t, Place& place) const {
    if (call_.cu_seqlens.empty()) {
      place = {b, 0, b};
      return call_.seq_idx.empty() || call_.seq_idx[at(b * call_.tokens + t)] >= 0;
    }
    for (std::int64_t s = 0; s < call_.sequences(); ++s) {
      if (t < call_.cu_seqlens[at(s)] || t >= call_.cu_seqlens[at(s + 1)]) continue;
      place = {s, call_.cu_seqlens[at(s)], 0};
      return true;
    }
    return false;
  }

  static std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }

  // The input that a token at `t` of its row sees in the token `from`, and where its gradient goes; null: it sees
  // nothing.
  const double* seen(const Place& place, std::int64_t t, std::int64_t from, std::int64_t c, double** gradient) {
    if (from >= place.begin) {
      const std::int64_t row = place.row * call_.tokens;
      if (!call_.seq_idx.empty() && call_.seq_idx[at(row + from)] != call_.seq_idx[at(row + t)]) return nullptr;
      const std::size_t index = at((row + from) * D_ + c);
      *gradient = backward_ ? &result_.dx[index] : nullptr;
      return &call_.x[index];
    }
    const std::size_t index = at((place.sequence * (W_ - 1) + from - place.begin + W_ - 1) * D_ + c);
    *gradient = backward_ ? &result_.dinitial_state[index] : nullptr;
    static const double zero = 0;
    return call_.initial_state.empty() ? &zero : &call_.initial_state[index];
  }

  void token(std::int64_t b, std::int64_t t) {
    Place place{};
    if (!place_of(b, t, place)) return;
    for (std::int64_t c = 0; c < D_; ++c) {
      const std::size_t index = at((b * call_.tokens + t) * D_ + c);
      double z = call_.bias.empty() ? 0 : call_.bias[at(c)];
      double* gradient = nullptr;
      for (std::int64_t w = 0; w < W_; ++w) {
        const double* x = seen(place, t, t - W_ + 1 + w, c, &gradient);
        if (x != nullptr) z += call_.weight[at(c * W_ + w)] * *x;
      }
      result_.y[index] = call_.silu ? z * sigmoid(z) : z;
      if (!backward_) continue;
      const double s = sigmoid(z), dz = call_.dy[index] * (call_.silu ? s * (1 + z * (1 - s)) : 1);
      result_.dbias[at(c)] += dz;
      result_.dbias_terms += dz * dz;
      for (std::int64_t w = 0; w < W_; ++w) {
        const double* x = seen(place, t, t - W_ + 1 + w, c, &gradient);
        if (x == nullptr) continue;
        *gradient += dz * call_.weight[at(c * W_ + w)];
        result_.dweight[at(c * W_ + w)] += dz * *x;
        result_.dweight_terms += dz * *x * dz * *x;
      }
    }
  }

  void last_state(std::int64_t s) {
    const bool packed = !call_.cu_seqlens.empty();
    const Place place{s, packed ? call_.cu_seqlens[at(s)] : 0, packed ? 0 : s};
    const std::int64_t end = packed ? call_.cu_seqlens[at(s + 1)] : call_.tokens;
    if (!call_.seq_idx.empty()) return;
    for (std::int64_t i = 0; i < W_ - 1; ++i) {
      for (std::int64_t c = 0; c < D_; ++c) {
        double* gradient = nullptr;
        const std::size_t index = at((s * (W_ - 1) + i) * D_ + c);
        result_.last_state[index] = *seen(place, end - 1, end - W_ + 1 + i, c, &gradient);
        if (gradient != nullptr && !call_.dlast_state.empty()) *gradient += call_.dlast_state[index];
      }
    }
  }

  const ConvCall& call_;
  std::int64_t D_, W_;
  bool backward_ = false;
  ConvResult result_;
};

}  // namespace

ConvResult evaluate(const ConvCall& call) { return Convolution(call).run(); }

}  // namespace tfla::reference
