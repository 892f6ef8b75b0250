#include "reference/ssd.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace tfla::reference {
namespace {

using Vector = std::vector<double>;

double squares(const double* x, std::size_t size) {
  double sum = 0;
  for (std::size_t at = 0; at < size; ++at) sum += x[at] * x[at];
  return sum;
}

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
double softplus(double x) { return std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x))); }
double silu(double x) { return x * sigmoid(x); }
double silu_slope(double x) { return sigmoid(x) * (1 + x * sigmoid(-x)); }

// dt as the recurrence has it, and its derivative in what is given.
struct TimeStepOf {
  double value, slope;

  TimeStepOf(double x, const SsdOptions& options) {
    const double free = options.dt_softplus ? softplus(x) : x;
    value = std::min(std::max(free, options.dt_min), options.dt_max);
    slope = options.dt_softplus ? sigmoid(x) : 1;
    if (free < options.dt_min || free > options.dt_max) slope = 0;
  }
};

class SsdRecurrence {
 public:
  SsdRecurrence(const SsdHead& head, const SsdOptions& options)
      : head_(head),
        T_(static_cast<std::size_t>(head.tokens)),
        P_(static_cast<std::size_t>(head.dim)),
        N_(static_cast<std::size_t>(head.state_dim)) {
    for (std::size_t t = 0; t < T_; ++t) {
      const TimeStepOf dt(head.dt[t] + head.dt_bias, options);
      dt_.push_back(dt);
      decay_.push_back(!head.afresh.empty() && head.afresh[t] ? 0 : std::exp(dt.value * head.A));
    }
  }

  SsdHeadResult run() {
    forward();
    if (!head_.dy.empty() || T_ == 0) backward();
    return std::move(result_);
  }

 private:
  void forward() {
    Vector S = head_.S0.empty() ? Vector(P_ * N_) : head_.S0;
    result_.y.assign(T_ * P_, 0);
    result_.ungated.assign(T_ * P_, 0);
    for (std::size_t t = 0; t < T_; ++t) {
      states_.push_back(S);
      const double *B = &head_.B[t * N_], *C = &head_.C[t * N_];
      for (std::size_t p = 0; p < P_; ++p) {
        const std::size_t at = t * P_ + p;
        double* row = &S[p * N_];
        double read = 0;
        for (std::size_t n = 0; n < N_; ++n) {
          row[n] = decay_[t] * row[n] + dt_[t].value * head_.x[at] * B[n];
          read += row[n] * C[n];
        }
        const double skip = head_.D.empty() ? 0 : head_.D[p] * head_.x[at];
        const double gate = head_.z.empty() ? 1 : silu(head_.z[at]);
        const double terms = squares(row, N_) * squares(C, N_) + skip * skip;
        result_.ungated[at] = read + skip;
        result_.y[at] = (read + skip) * gate;
        result_.terms.ungated += terms;
        result_.terms.y += terms * gate * gate;
        if (head_.z.empty() || head_.dy.empty()) continue;
        const double slope = head_.dy[at] * silu_slope(head_.z[at]);
        result_.terms.dz += terms * slope * slope;
      }
    }
    states_.push_back(S);
    result_.S = std::move(S);
  }

  void backward() {
    result_.dx.assign(T_ * P_, 0);
    result_.dz.assign(T_ * P_, 0);
    result_.dB.assign(T_ * N_, 0);
    result_.dC.assign(T_ * N_, 0);
    result_.ddt.assign(T_, 0);
    result_.dD.assign(P_, 0);
    result_.dS0 = head_.dS_last.empty() ? Vector(P_ * N_) : head_.dS_last;
    for (std::size_t t = T_; t-- > 0;) token_grad(t);
  }

  // dy before the gate, and what the token itself leaves in dz and dD.
  Vector ungated_grad(std::size_t t) {
    Vector du(&head_.dy[t * P_], &head_.dy[t * P_] + P_);
    for (std::size_t p = 0; p < P_; ++p) {
      const std::size_t at = t * P_ + p;
      if (!head_.z.empty()) {
        result_.dz[at] = du[p] * result_.ungated[at] * silu_slope(head_.z[at]);
        du[p] *= silu(head_.z[at]);
      }
      if (head_.D.empty()) continue;
      const double dD = du[p] * head_.x[at];
      result_.dD[p] += dD;
      result_.terms.dD += dD * dD;
    }
    return du;
  }

  // On entry dS0 holds the gradient of the state after token t, without what token t itself reads from it; on exit that
  // of the state before token t.
  void token_grad(std::size_t t) {
    const Vector du = ungated_grad(t);
    const double *x = &head_.x[t * P_], *B = &head_.B[t * N_], *C = &head_.C[t * N_];
    const Vector &before = states_[t], &after = states_[t + 1];
    const double dt = dt_[t].value;
    Vector& dS = result_.dS0;
    double written = 0, kept = 0, read = 0;
    SsdTerms& terms = result_.terms;
    for (std::size_t p = 0; p < P_; ++p) {
      double* row = &dS[p * N_];
      double weighed = 0;
      for (std::size_t n = 0; n < N_; ++n) {
        const std::size_t at = p * N_ + n;
        row[n] += du[p] * C[n];
        weighed += row[n] * B[n];
        result_.dB[t * N_ + n] += dt * row[n] * x[p];
        result_.dC[t * N_ + n] += after[at] * du[p];
        kept += decay_[t] * before[at] * row[n];
        read += after[at] * du[p] * C[n];
      }
      const double skip = head_.D.empty() ? 0 : head_.D[p] * du[p];
      result_.dx[t * P_ + p] = dt * weighed + skip;
      terms.dx += dt * dt * squares(row, N_) * squares(B, N_) + skip * skip;
      written += weighed * x[p];
    }
    const double size = squares(dS.data(), P_ * N_);
    terms.dB += dt * dt * squares(x, P_) * size;
    terms.dC += squares(after.data(), P_ * N_) * squares(du.data(), P_);
    time_step_grad(t, kept, written, size * squares(before.data(), P_ * N_) * decay_[t] * decay_[t],
                   size * squares(x, P_) * squares(B, N_), read * read + dt * dt * written * written);
    for (double& d : dS) d *= decay_[t];
  }

  // From the gradients of the logarithm of the decay and of dt, with the squares of what they are made of. Where the
  // state starts afresh, `kept` is 0.
  void time_step_grad(std::size_t t, double kept, double written, double kept_terms, double written_terms,
                      double pairs) {
    const double dt = dt_[t].value, slope = dt_[t].slope, A = head_.A;
    const double ddt = (A * kept + written) * slope, dA = kept * dt;
    SsdTerms& terms = result_.terms;
    result_.ddt[t] = ddt;
    result_.ddt_bias += ddt;
    result_.dA += dA;
    terms.ddt += (A * A * kept_terms + written_terms) * slope * slope;
    terms.ddt_bias += ddt * ddt;
    terms.dA += dA * dA;
    terms.dA_sums += kept_terms * dt * dt;
    terms.ddt_pairs += pairs * A * A * slope * slope;
    terms.dA_pairs += pairs * dt * dt;
  }

  const SsdHead& head_;
  std::size_t T_, P_, N_;
  std::vector<TimeStepOf> dt_;
  Vector decay_;
  std::vector<Vector> states_;  // the state before every token, and the last one
  SsdHeadResult result_;
};

struct Range {
  std::int64_t batch, begin, count;  // where a sequence lies in a call
};

Range range_of(const SsdCall& call, std::int64_t sequence) {
  if (call.cu_seqlens.empty()) return {sequence, 0, call.tokens};
  const auto s = static_cast<std::size_t>(sequence);
  return {0, call.cu_seqlens[s], call.cu_seqlens[s + 1] - call.cu_seqlens[s]};
}

// Rows of one head of a [B,T,heads,width] array.
Vector rows_of(const Vector& all, const SsdCall& call, const Range& range, std::int64_t heads, std::int64_t width,
               std::int64_t head) {
  Vector rows;
  for (std::int64_t t = range.begin; !all.empty() && t < range.begin + range.count; ++t) {
    const auto from = all.begin() + ((range.batch * call.tokens + t) * heads + head) * width;
    rows.insert(rows.end(), from, from + width);
  }
  return rows;
}

void add_rows(Vector& all, const Vector& rows, const SsdCall& call, const Range& range, std::int64_t heads,
              std::int64_t width, std::int64_t head) {
  for (std::int64_t at = 0; at < std::ssize(rows); ++at) {
    const std::int64_t row = (range.batch * call.tokens + range.begin + at / width) * heads + head;
    all[static_cast<std::size_t>(row * width + at % width)] += rows[static_cast<std::size_t>(at)];
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

bool skips_differ(const SsdCall& call) { return std::ssize(call.D) == call.heads * call.dim && call.dim > 1; }

SsdHead head_of(const SsdCall& call, std::int64_t sequence, std::int64_t head) {
  const Range range = range_of(call, sequence);
  const std::int64_t H = call.heads, G = call.groups, state = call.dim * call.state_dim, group = head / (H / G);
  SsdHead in;
  in.tokens = range.count;
  in.dim = call.dim;
  in.state_dim = call.state_dim;
  in.x = rows_of(call.x, call, range, H, call.dim, head);
  in.dt = rows_of(call.dt, call, range, H, 1, head);
  in.A = call.A[static_cast<std::size_t>(head)];
  in.B = rows_of(call.B, call, range, G, call.state_dim, group);
  in.C = rows_of(call.C, call, range, G, call.state_dim, group);
  if (skips_differ(call)) {
    in.D = entry_of(call.D, head, call.dim);
  } else if (!call.D.empty()) {
    in.D.assign(static_cast<std::size_t>(call.dim), call.D[static_cast<std::size_t>(head)]);
  }
  in.z = rows_of(call.z, call, range, H, call.dim, head);
  if (!call.dt_bias.empty()) in.dt_bias = call.dt_bias[static_cast<std::size_t>(head)];
  for (std::int64_t t = range.begin; !call.seq_idx.empty() && t < range.begin + range.count; ++t) {
    const auto at = static_cast<std::size_t>(range.batch * call.tokens + t);
    in.afresh.push_back(call.seq_idx[at] != (t == 0 ? 0 : call.seq_idx[at - 1]));
  }
  in.S0 = entry_of(call.initial_state, sequence * H + head, state);
  in.dy = rows_of(call.dy, call, range, H, call.dim, head);
  in.dS_last = entry_of(call.dlast_state, sequence * H + head, state);
  return in;
}

void add_gradients(SsdResult& all, const SsdHeadResult& r, const SsdCall& call, std::int64_t sequence,
                   std::int64_t head) {
  const Range range = range_of(call, sequence);
  const std::int64_t H = call.heads, G = call.groups, group = head / (H / G);
  const auto at = static_cast<std::size_t>(head), P = static_cast<std::size_t>(call.dim);
  add_rows(all.dx, r.dx, call, range, H, call.dim, head);
  if (!call.z.empty()) add_rows(all.dz, r.dz, call, range, H, call.dim, head);
  add_rows(all.ddt, r.ddt, call, range, H, 1, head);
  add_rows(all.dB, r.dB, call, range, G, call.state_dim, group);
  add_rows(all.dC, r.dC, call, range, G, call.state_dim, group);
  place_entry(all.dinitial_state, r.dS0, sequence * H + head);
  all.dA[at] += r.dA;
  if (!call.dt_bias.empty()) all.ddt_bias[at] += r.ddt_bias;
  for (std::size_t p = 0; !call.D.empty() && p < P; ++p) all.dD[skips_differ(call) ? at * P + p : at] += r.dD[p];
}

}  // namespace

SsdHeadResult evaluate(const SsdHead& head, const SsdOptions& options) { return SsdRecurrence(head, options).run(); }

SsdResult evaluate(const SsdCall& call, const SsdOptions& options) {
  const std::int64_t N = call.sequences(), T = call.tokens, H = call.heads, tokens = call.batch * T;
  const bool with_backward = !call.dy.empty() || tokens == 0;
  const auto zeros = [](std::int64_t count) { return Vector(static_cast<std::size_t>(count)); };
  SsdResult all;
  all.y = all.ungated = zeros(tokens * H * call.dim);
  all.last_state = zeros(N * H * call.dim * call.state_dim);
  if (with_backward) {
    all.dx = all.y;
    all.dz.resize(call.z.size());
    all.dD.resize(call.D.size());
    all.ddt_bias.resize(call.dt_bias.size());
    all.ddt = zeros(tokens * H);
    all.dA = zeros(H);
    all.dB = all.dC = zeros(tokens * call.groups * call.state_dim);
    all.dinitial_state = all.last_state;
  }
  for (std::int64_t index = 0; index < N * H; ++index) {
    const std::int64_t sequence = index / H, head = index % H;
    SsdHeadResult r = evaluate(head_of(call, sequence, head), options);
    const Range range = range_of(call, sequence);
    add_rows(all.y, r.y, call, range, H, call.dim, head);
    add_rows(all.ungated, r.ungated, call, range, H, call.dim, head);
    place_entry(all.last_state, r.S, index);
    if (with_backward) add_gradients(all, r, call, sequence, head);
    Vector terms;
    r.terms.visit([&](double& term) { terms.push_back(term); });
    auto term = terms.begin();
    all.terms.visit([&](double& sum) { sum += *term++; });
  }
  all.terms.visit([](double& sum) { sum = std::sqrt(sum); });
  return all;
}

}  // namespace tfla::reference
