#include "reference/reference.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>

namespace tfla::reference {
namespace {

using Vector = std::vector<double>;

// Eight partial sums: a chain of dependent additions would not vectorise.
double dot(const double* x, const double* y, std::size_t size) {
  double partial[8] = {};
  std::size_t at = 0;
  for (; at + 8 <= size; at += 8) {
    for (std::size_t lane = 0; lane < 8; ++lane) partial[lane] += x[at + lane] * y[at + lane];
  }
  double sum = 0;
  for (; at < size; ++at) sum += x[at] * y[at];
  for (double part : partial) sum += part;
  return sum;
}

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

// Whether a gate's logarithm is log sigmoid of its (capped) value, or the value itself.
bool input_is_sigmoid(const MlstmOptions& options) { return options.gate == InputGate::sigmoid; }
bool forget_is_sigmoid(const MlstmOptions& options) { return options.gate != InputGate::log; }

double capped(double x, const MlstmOptions& options) {
  return options.soft_cap ? *options.soft_cap * std::tanh(x / *options.soft_cap) : x;
}

double capped_slope(double x, const MlstmOptions& options) {
  if (!options.soft_cap) return 1;
  const double tanh = std::tanh(x / *options.soft_cap);
  return 1 - tanh * tanh;
}

bool uses_max(const MlstmOptions& options) {
  if (options.normalizer == Normalizer::automatic) return options.gate == InputGate::exponential;
  return options.normalizer == Normalizer::max;
}

// Decay and input weight of every token in the stabilised scale, and the max state after it.
struct Weights {
  Vector F, I, m;
};

Weights gate_weights(const Head& head, const MlstmOptions& options) {
  const auto T = static_cast<std::size_t>(head.tokens);
  const bool exponential = options.gate == InputGate::exponential;
  Weights w{Vector(T), Vector(T), Vector(T)};
  double m = head.m0;
  for (std::size_t t = 0; t < T; ++t) {
    const double f = capped(head.f[t], options), i = capped(head.i[t], options);
    const double log_f = forget_is_sigmoid(options) ? log_sigmoid(f) : f;
    const double log_i = input_is_sigmoid(options) ? log_sigmoid(i) : i;
    const double m_new = exponential ? std::max(log_f + m, log_i) : 0;
    w.F[t] = std::exp(log_f + m - m_new);
    w.I[t] = std::exp(log_i - m_new);
    w.m[t] = m = m_new;
  }
  return w;
}

// Rounds: see Roundings. Without them loops stay as simple as they look.
template <bool Rounds>
class Recurrence {
 public:
  Recurrence(const Head& head, const MlstmOptions& options, const Roundings& roundings)
      : head_(head),
        options_(options),
        roundings_(roundings),
        state_(roundings.seed),
        T_(static_cast<std::size_t>(head.tokens)),
        dqk_(static_cast<std::size_t>(head.dqk)),
        dhv_(static_cast<std::size_t>(head.dhv)),
        scale_(options.qk_scale.value_or(1 / std::sqrt(static_cast<double>(head.dqk)))),
        spacing_(std::max<std::size_t>(1, static_cast<std::size_t>(std::sqrt(static_cast<double>(T_))))),
        w_(gate_weights(head, options)),
        qn_(T_),
        den_(T_, 1) {}

  HeadResult run() {
    forward();
    if (!head_.dh.empty() || T_ == 0) backward();
    return std::move(result_);
  }

 private:
  // x, off by up to `unit` of its size.
  double rounded(double x, double unit) {
    if constexpr (!Rounds) return x;
    state_ = state_ * 6364136223846793005U + 1442695040888963407U;  // the upper bits are random enough
    return x * (1 + unit * (static_cast<double>(state_ >> 32) * 0x1p-31 - 1));
  }
  double operand(double x) { return rounded(x, roundings_.operands); }

  // sum of x y, with x rounded.
  double rounded_dot(const double* x, const double* y, std::size_t size, double unit) {
    if constexpr (!Rounds) return dot(x, y, size);
    double sum = 0;
    for (std::size_t at = 0; at < size; ++at) sum += rounded(x[at], unit) * y[at];
    return sum;
  }

  // <C, dC> of a row, both rounded.
  double kept_dot(const double* C, const double* dC) {
    if constexpr (!Rounds) return dot(C, dC, dhv_);
    double sum = 0;
    for (std::size_t c = 0; c < dhv_; ++c) sum += operand(C[c]) * operand(dC[c]);
    return sum;
  }

  void update(std::size_t t, double* C, double* n) {
    const double F = w_.F[t], I = w_.I[t];
    const double* k = &head_.k[t * dqk_];
    const double* v = &head_.v[t * dhv_];
    const double score = operand(1);  // inside a chunk a token goes into products as a score, which is rounded as one
    for (std::size_t r = 0; r < dqk_; ++r) {
      const double weight = I * k[r], in_C = score * operand(weight);
      double* row = C + r * dhv_;
      for (std::size_t c = 0; c < dhv_; ++c) row[c] = F * row[c] + in_C * v[c];
      n[r] = F * n[r] + rounded(weight, roundings_.norms);
    }
  }

  // Of h at one token. Only where q.n nearly cancels: elsewhere it is nothing next to the bounds, and takes time.
  double spread(std::size_t t, const double* C, const double* n) const {
    constexpr double cancels = 32;
    const double* q = &head_.q[t * dqk_];
    const double* h = &result_.h[t * dhv_];
    const double factor = scale_ / den_[t];
    if (factor * factor * dot(q, q, dqk_) * dot(n, n, dqk_) < cancels * cancels) return 0;
    const double size = dot(h, h, dhv_);
    double sum = 0;
    for (std::size_t r = 0; r < dqk_; ++r) {
      const double* row = C + r * dhv_;
      sum += q[r] * q[r] * (dot(row, row, dhv_) + n[r] * n[r] * size);
    }
    return factor * factor * sum;
  }

  void forward() {
    Vector C = head_.C0.empty() ? Vector(dqk_ * dhv_) : head_.C0;
    Vector n = head_.n0.empty() ? Vector(dqk_) : head_.n0;
    result_.h.assign(T_ * dhv_, 0);
    for (std::size_t t = 0; t < T_; ++t) {
      if (t % spacing_ == 0 && !head_.dh.empty()) {
        saved_C_.push_back(C);
        saved_n_.push_back(n);
      }
      update(t, C.data(), n.data());
      const double* q = &head_.q[t * dqk_];
      qn_[t] = scale_ * rounded_dot(n.data(), q, dqk_, roundings_.norms);
      if (uses_max(options_)) den_[t] = std::max(std::abs(qn_[t]), std::exp(-w_.m[t])) + options_.eps;
      double* h = &result_.h[t * dhv_];
      for (std::size_t r = 0; r < dqk_; ++r) {
        const double weight = scale_ * q[r];
        for (std::size_t c = 0; c < dhv_; ++c) h[c] += weight * operand(C[r * dhv_ + c]);
      }
      for (std::size_t c = 0; c < dhv_; ++c) h[c] /= den_[t];
      if (uses_max(options_)) result_.spread += spread(t, C.data(), n.data());
    }
    result_.C = std::move(C);
    result_.n = std::move(n);
    result_.m = T_ == 0 ? head_.m0 : w_.m.back();
  }

  // Gradient of scale q.n at token t; zero where exp(-m) is the larger, or where the denominator counts as constant.
  double denominator_grad(std::size_t t) {
    const bool active = std::abs(qn_[t]) > std::exp(-w_.m[t]);
    if (!options_.exact_normalizer_grad || !uses_max(options_) || !active) return 0;
    const double inner = rounded_dot(&result_.h[t * dhv_], &head_.dh[t * dhv_], dhv_, roundings_.operands);
    return (qn_[t] > 0 ? -inner : inner) / den_[t];
  }

  void backward() {
    result_.dq.assign(T_ * dqk_, 0);
    result_.dk.assign(T_ * dqk_, 0);
    result_.dv.assign(T_ * dhv_, 0);
    result_.di.assign(T_, 0);
    result_.df.assign(T_, 0);
    result_.dC0 = head_.dC_last.empty() ? Vector(dqk_ * dhv_) : head_.dC_last;
    result_.dn0 = head_.dn_last.empty() ? Vector(dqk_) : head_.dn_last;

    // States of one stretch between two saved ones: entry x is the state before token begin + x.
    std::vector<Vector> C(spacing_ + 1), n(spacing_ + 1);
    const std::size_t stretches = (T_ + spacing_ - 1) / spacing_;
    for (std::size_t s = stretches; s-- > 0;) {
      const std::size_t begin = s * spacing_, end = std::min(begin + spacing_, T_);
      C[0] = saved_C_[s];
      n[0] = saved_n_[s];
      for (std::size_t t = begin; t < end; ++t) {
        const std::size_t x = t - begin;
        C[x + 1] = C[x];
        n[x + 1] = n[x];
        update(t, C[x + 1].data(), n[x + 1].data());
      }
      for (std::size_t t = end; t-- > begin;) {
        const std::size_t x = t - begin;
        token_grad(t, C[x].data(), n[x].data(), C[x + 1].data(), n[x + 1].data());
      }
    }
  }

  // On entry dC0, dn0 hold the gradient of the state after token t, without what token t itself reads from it; on
  // exit that of the state before token t.
  void token_grad(std::size_t t, const double* C_before, const double* n_before, const double* C, const double* n) {
    const double F = w_.F[t], I = w_.I[t], deta = denominator_grad(t);
    const double* q = &head_.q[t * dqk_];
    const double* k = &head_.k[t * dqk_];
    const double* v = &head_.v[t * dhv_];
    double* dq = &result_.dq[t * dqk_];
    double* dk = &result_.dk[t * dqk_];
    double* dv = &result_.dv[t * dhv_];
    Vector numerator_grad(&head_.dh[t * dhv_], &head_.dh[t * dhv_] + dhv_);
    for (double& x : numerator_grad) x /= den_[t];

    double kept = 0;                  // <C_{t-1}, dC_t> + <n_{t-1}, dn_t>
    const double score = operand(1);  // see update
    for (std::size_t r = 0; r < dqk_; ++r) {
      double* dC = &result_.dC0[r * dhv_];
      double& dn = result_.dn0[r];
      const double weight = scale_ * q[r], in_dC = score * operand(weight), unit = roundings_.operands;
      for (std::size_t c = 0; c < dhv_; ++c) dC[c] += in_dC * numerator_grad[c];
      dn += operand(weight) * deta;

      dq[r] = scale_ * (rounded_dot(C + r * dhv_, numerator_grad.data(), dhv_, unit) + deta * operand(n[r]));
      dk[r] = I * (rounded_dot(dC, v, dhv_, unit) + operand(dn));
      for (std::size_t c = 0; c < dhv_; ++c) dv[c] += I * k[r] * operand(dC[c]);
      kept += kept_dot(C_before + r * dhv_, dC) + operand(n_before[r]) * operand(dn);

      for (std::size_t c = 0; c < dhv_; ++c) dC[c] *= F;
      dn *= F;
    }
    const double dlog_f = F * kept, dlog_i = dot(k, dk, dqk_), row = dot(q, dq, dqk_);
    result_.gate_terms += dlog_i * dlog_i + row * row;
    const double f = capped(head_.f[t], options_), i = capped(head_.i[t], options_);
    const double log_f_slope = forget_is_sigmoid(options_) ? sigmoid(-f) : 1;
    const double log_i_slope = input_is_sigmoid(options_) ? sigmoid(-i) : 1;
    result_.df[t] = dlog_f * log_f_slope * capped_slope(head_.f[t], options_);
    result_.di[t] = dlog_i * log_i_slope * capped_slope(head_.i[t], options_);
  }

  const Head& head_;
  const MlstmOptions& options_;
  Roundings roundings_;
  std::uint64_t state_;  // of the random numbers
  std::size_t T_, dqk_, dhv_;
  double scale_;
  std::size_t spacing_;  // of the saved states: about sqrt(T), so that memory grows as sqrt(T) states
  Weights w_;
  Vector qn_;   // scale q.n
  Vector den_;  // denominator
  std::vector<Vector> saved_C_, saved_n_;
  HeadResult result_;
};

}  // namespace

double log_sigmoid(double x) { return x >= 0 ? -std::log1p(std::exp(-x)) : x - std::log1p(std::exp(x)); }

HeadResult evaluate(const Head& head, const MlstmOptions& options, const Roundings& roundings) {
  const bool rounds = roundings.operands != 0 || roundings.norms != 0;
  return rounds ? Recurrence<true>(head, options, roundings).run() : Recurrence<false>(head, options, roundings).run();
}

}  // namespace tfla::reference
