#include "reference/delta.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>

namespace tfla::reference {
namespace {

using Vector = std::vector<double>;

double dot(const double* x, const double* y, std::size_t size) {
  double sum = 0;
  for (std::size_t at = 0; at < size; ++at) sum += x[at] * y[at];
  return sum;
}

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
double softplus(double x) { return x > 0 ? x + std::log1p(std::exp(-x)) : std::log1p(std::exp(x)); }

double written(double beta, WriteGate write) {
  return write == WriteGate::plain ? beta : (write == WriteGate::sigmoid ? 1 : 2) * sigmoid(beta);
}

double written_slope(double beta, WriteGate write) {
  return write == WriteGate::plain ? 1 : (write == WriteGate::sigmoid ? 1 : 2) * sigmoid(beta) * sigmoid(-beta);
}

// 1 / sqrt(|x|^2 + 1e-6), or 1 where rows are taken as they are.
double factor_of(const double* row, std::size_t size, bool normalize) {
  return normalize ? 1 / std::sqrt(dot(row, row, size) + 1e-6) : 1;
}

class DeltaRecurrence {
 public:
  DeltaRecurrence(const DeltaHead& head, const DeltaOptions& options)
      : head_(head),
        options_(options),
        T_(static_cast<std::size_t>(head.tokens)),
        dqk_(static_cast<std::size_t>(head.dqk)),
        dhv_(static_cast<std::size_t>(head.dhv)),
        scale_(options.qk_scale.value_or(1 / std::sqrt(static_cast<double>(head.dqk)))) {}

  DeltaHeadResult run() {
    read_tokens();
    forward();
    if (!head_.dh.empty() || T_ == 0) backward();
    return std::move(result_);
  }

 private:
  // Rows of q and k as the recurrence reads them, the write strength and the logarithm of the decay of every token.
  void read_tokens() {
    q_ = head_.q;
    k_ = head_.k;
    for (std::size_t t = 0; t < T_; ++t) {
      for (Vector* rows : {&q_, &k_}) {
        double* row = &(*rows)[t * dqk_];
        const double factor = factor_of(row, dqk_, options_.normalize_qk);
        for (std::size_t r = 0; r < dqk_; ++r) row[r] *= factor;
      }
      beta_.push_back(written(head_.beta[t], options_.write));
      const double g = head_.g.empty() ? 0 : head_.g[t];
      gamma_.push_back(head_.A_log ? -std::exp(*head_.A_log) * softplus(g + head_.dt_bias) : g);
    }
  }

  void forward() {
    Vector C = head_.C0.empty() ? Vector(dqk_ * dhv_) : head_.C0;
    result_.h.assign(T_ * dhv_, 0);
    for (std::size_t t = 0; t < T_; ++t) {
      states_.push_back(C);
      const double decay = std::exp(gamma_[t]);
      const double* q = &q_[t * dqk_];
      const double* k = &k_[t * dqk_];
      for (double& x : C) x *= decay;
      Vector residual(&head_.v[t * dhv_], &head_.v[t * dhv_] + dhv_);
      for (std::size_t r = 0; r < dqk_; ++r) {
        for (std::size_t c = 0; c < dhv_; ++c) residual[c] -= k[r] * C[r * dhv_ + c];
      }
      double* h = &result_.h[t * dhv_];
      for (std::size_t r = 0; r < dqk_; ++r) {
        double* row = &C[r * dhv_];
        for (std::size_t c = 0; c < dhv_; ++c) {
          row[c] += beta_[t] * k[r] * residual[c];
          h[c] += scale_ * q[r] * row[c];
        }
      }
      residuals_.push_back(std::move(residual));
    }
    states_.push_back(C);
    result_.C = std::move(C);
  }

  void backward() {
    result_.dq.assign(T_ * dqk_, 0);
    result_.dk.assign(T_ * dqk_, 0);
    result_.dv.assign(T_ * dhv_, 0);
    result_.dbeta.assign(T_, 0);
    result_.dg.assign(T_, 0);
    result_.dC0 = head_.dC_last.empty() ? Vector(dqk_ * dhv_) : head_.dC_last;
    for (std::size_t t = T_; t-- > 0;) token_grad(t);
  }

  // On entry dC0 holds the gradient of the state after token t, without what token t itself reads from it; on exit that
  // of the state before token t.
  void token_grad(std::size_t t) {
    const double decay = std::exp(gamma_[t]), beta = beta_[t];
    const double *q = &q_[t * dqk_], *k = &k_[t * dqk_], *dh = &head_.dh[t * dhv_], *residual = residuals_[t].data();
    const double *before = states_[t].data(), *after = states_[t + 1].data();
    Vector& dC = result_.dC0;
    Vector read(dhv_);  // dC^T k, the gradient of beta times the residual
    for (std::size_t r = 0; r < dqk_; ++r) {
      for (std::size_t c = 0; c < dhv_; ++c) {
        dC[r * dhv_ + c] += scale_ * q[r] * dh[c];
        read[c] += k[r] * dC[r * dhv_ + c];
      }
    }

    double* dq = &result_.dq[t * dqk_];
    double* dk = &result_.dk[t * dqk_];
    double* dv = &result_.dv[t * dhv_];
    double dbeta = 0, kept = 0, kept_squares = 0, grad_squares = 0;
    for (std::size_t c = 0; c < dhv_; ++c) {
      dv[c] = beta * read[c];
      dbeta += residual[c] * read[c];
    }
    for (std::size_t r = 0; r < dqk_; ++r) {
      double* row = &dC[r * dhv_];
      for (std::size_t c = 0; c < dhv_; ++c) {
        const double C = decay * before[r * dhv_ + c];
        dq[r] += scale_ * after[r * dhv_ + c] * dh[c];
        dk[r] += beta * row[c] * residual[c] - C * dv[c];
        row[c] -= k[r] * dv[c];
        kept += C * row[c];
        kept_squares += C * C;
        grad_squares += row[c] * row[c];
        row[c] *= decay;
      }
    }
    result_.dbeta[t] = dbeta * written_slope(head_.beta[t], options_.write);
    decay_grad(t, kept, kept_squares * grad_squares);
    result_.dq_terms += through_norm(&head_.q[t * dqk_], q, dq);
    result_.dk_terms += through_norm(&head_.k[t * dqk_], k, dk);
  }

  // What is kept of nothing does not change: a reset has the gradient 0.
  void decay_grad(std::size_t t, double dgamma, double terms) {
    if (head_.g.empty() || std::exp(gamma_[t]) == 0) return;
    const double slope = head_.A_log ? -std::exp(*head_.A_log) * sigmoid(head_.g[t] + head_.dt_bias) : 1;
    const double dg = dgamma * slope, dA_log = head_.A_log ? dgamma * gamma_[t] : 0;
    result_.dg[t] = dg;
    result_.dg_terms += terms * slope * slope;
    if (!head_.A_log) return;
    result_.dA_log += dA_log;
    result_.ddt_bias += dg;
    result_.dA_log_terms += dA_log * dA_log;
    result_.ddt_bias_terms += dg * dg;
    result_.dA_log_sums += terms * gamma_[t] * gamma_[t];
  }

  // From the gradient of x / sqrt(|x|^2 + 1e-6) to that of x. Returns the square of what is subtracted.
  double through_norm(const double* raw, const double* row, double* grad) const {
    if (!options_.normalize_qk) return 0;
    const double factor = factor_of(raw, dqk_, true), along = dot(row, grad, dqk_);
    for (std::size_t r = 0; r < dqk_; ++r) grad[r] = factor * (grad[r] - along * row[r]);
    return factor * factor * along * along * dot(row, row, dqk_);
  }

  const DeltaHead& head_;
  const DeltaOptions& options_;
  std::size_t T_, dqk_, dhv_;
  double scale_;
  Vector q_, k_, beta_, gamma_;
  std::vector<Vector> states_, residuals_;  // the state before every token and the last one; v - C^T k of every token
  DeltaHeadResult result_;
};

// Rows [begin, begin + count) of one head of a [B,T,heads,width] array.
Vector rows_of(const Vector& all, std::int64_t T, std::int64_t heads, std::int64_t width, std::int64_t batch,
               std::int64_t begin, std::int64_t count, std::int64_t head) {
  if (all.empty()) return {};
  Vector rows;
  for (std::int64_t t = begin; t < begin + count; ++t) {
    const auto from = all.begin() + ((batch * T + t) * heads + head) * width;
    rows.insert(rows.end(), from, from + width);
  }
  return rows;
}

void add_rows(Vector& all, const Vector& rows, std::int64_t T, std::int64_t heads, std::int64_t width,
              std::int64_t batch, std::int64_t begin, std::int64_t head) {
  for (std::int64_t at = 0; at < std::ssize(rows); ++at) {
    const std::int64_t t = begin + at / width;
    all[static_cast<std::size_t>(((batch * T + t) * heads + head) * width + at % width)] +=
        rows[static_cast<std::size_t>(at)];
  }
}

// Entry number `index` of an array of equal entries, and back.
Vector entry_of(const Vector& all, std::int64_t index, std::int64_t size) {
  if (all.empty()) return {};
  return {all.begin() + index * size, all.begin() + (index + 1) * size};
}

void place_entry(Vector& all, const Vector& entry, std::int64_t index) {
  std::copy(entry.begin(), entry.end(), all.begin() + index * std::ssize(entry));
}

}  // namespace

DeltaHeadResult evaluate(const DeltaHead& head, const DeltaOptions& options) {
  return DeltaRecurrence(head, options).run();
}

DeltaResult evaluate(const DeltaCall& call, const DeltaOptions& options) {
  const std::int64_t N = call.sequences(), T = call.tokens, H = call.heads, Hqk = call.qk_heads;
  const std::int64_t tokens = call.batch * T, state = call.dqk * call.dhv;
  const bool with_backward = !call.dh.empty();
  const auto zeros = [](std::int64_t count) { return Vector(static_cast<std::size_t>(count)); };
  DeltaResult all;
  all.h = zeros(tokens * H * call.dhv);
  all.last_state = zeros(N * H * state);
  if (with_backward) {
    all.dq = all.dk = zeros(tokens * Hqk * call.dqk);
    all.dv = all.h;
    all.dbeta = all.dg = zeros(tokens * H);
    all.dA_log = all.ddt_bias = zeros(H);
    all.dinitial_state = all.last_state;
  }
  for (std::int64_t index = 0; index < N * H; ++index) {
    const std::int64_t sequence = index / H, head = index % H, qk_head = head / (H / Hqk);
    const auto s = static_cast<std::size_t>(sequence), at_head = static_cast<std::size_t>(head);
    const bool packed = !call.cu_seqlens.empty();
    const std::int64_t batch = packed ? 0 : sequence, begin = packed ? call.cu_seqlens[s] : 0;
    const std::int64_t count = packed ? call.cu_seqlens[s + 1] - begin : T;
    const auto rows = [&](const Vector& x, std::int64_t heads, std::int64_t width, std::int64_t at) {
      return rows_of(x, T, heads, width, batch, begin, count, at);
    };
    DeltaHead in;
    in.tokens = count;
    in.dqk = call.dqk;
    in.dhv = call.dhv;
    in.q = rows(call.q, Hqk, call.dqk, qk_head);
    in.k = rows(call.k, Hqk, call.dqk, qk_head);
    in.v = rows(call.v, H, call.dhv, head);
    in.beta = rows(call.beta, H, 1, head);
    in.g = rows(call.g, H, 1, head);
    if (!call.A_log.empty()) in.A_log = call.A_log[at_head];
    if (!call.dt_bias.empty()) in.dt_bias = call.dt_bias[at_head];
    in.C0 = entry_of(call.initial_state, index, state);
    in.dh = rows(call.dh, H, call.dhv, head);
    in.dC_last = entry_of(call.dlast_state, index, state);
    const DeltaHeadResult r = evaluate(in, options);

    add_rows(all.h, r.h, T, H, call.dhv, batch, begin, head);
    place_entry(all.last_state, r.C, index);
    if (!with_backward) continue;
    add_rows(all.dq, r.dq, T, Hqk, call.dqk, batch, begin, qk_head);
    add_rows(all.dk, r.dk, T, Hqk, call.dqk, batch, begin, qk_head);
    add_rows(all.dv, r.dv, T, H, call.dhv, batch, begin, head);
    add_rows(all.dbeta, r.dbeta, T, H, 1, batch, begin, head);
    add_rows(all.dg, r.dg, T, H, 1, batch, begin, head);
    place_entry(all.dinitial_state, r.dC0, index);
    all.dA_log[at_head] += r.dA_log;
    all.ddt_bias[at_head] += r.ddt_bias;
    all.dg_terms += r.dg_terms;
    all.dA_log_terms += r.dA_log_terms;
    all.ddt_bias_terms += r.ddt_bias_terms;
    all.dA_log_sums += r.dA_log_sums;
    all.dq_terms += r.dq_terms;
    all.dk_terms += r.dk_terms;
  }
  for (double* squares :
       {&all.dg_terms, &all.dA_log_terms, &all.ddt_bias_terms, &all.dA_log_sums, &all.dq_terms, &all.dk_terms})
    *squares = std::sqrt(*squares);
  return all;
}

}  // namespace tfla::reference
