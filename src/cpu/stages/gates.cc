#include "cpu/stages/gates.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>

#include "cpu/gate_tensor.h"
#include "cpu/kernels/simd.h"
#include "cpu/stages/time_step.h"

namespace tfla::cpu {

namespace {

// See reset_margin.
void limit_resets(double m, double* log_f, const double* log_i, std::int64_t length) {
  double low = m;
  double high = m;
  for (std::int64_t t = 0; t < length; ++t) {
    if (!std::isfinite(log_i[t])) continue;
    low = std::min(low, log_i[t]);
    high = std::max(high, log_i[t]);
  }
  const double least = low - high - reset_margin;
  for (std::int64_t t = 0; t < length; ++t) {
    if (log_f[t] < least) log_f[t] = least;
  }
}

// One tile of the scan: log f in u and log i in c on entry, u, c and -m on exit. Any m near the running maximum serves
// as a scale; it is rounded to the type in which states keep it, so that a state says exactly what it was scaled by.
template <class Real>
void scan_tile(bool has_max_state, double m_previous, double* u, double* c, double* minus_m, std::int64_t count) {
  double b = 0;
  double highest = m_previous;  // max(m_prev, c_j for j <= t)
  for (std::int64_t t = 0; t < count; ++t) {
    b += u[t];
    c[t] -= b;
    highest = std::max(highest, c[t]);
    const double m = has_max_state ? static_cast<double>(static_cast<Real>(b + highest)) : 0.0;
    u[t] = b - m;
    minus_m[t] = -m;
  }
}

// log_gate of a vector, in place.
void take_logs(GateLog log, double* x, std::int64_t count) {
  switch (log) {
    case GateLog::log_sigmoid: simd::log_sigmoid(x, count); break;
    case GateLog::identity: break;
  }
}

}  // namespace

template <class Real>
GateVectors<Real>::GateVectors(Arena& arena, const Plan& plan) {
  const std::int64_t count = plan.shape.batch * plan.shape.tokens * plan.shape.heads;
  u = arena.take<double>(count);
  c = arena.take<double>(count);
  minus_m = arena.take<double>(count);
  qbar = arena.take<Real>(count);
  abar = arena.take<Real>(count);
  inverse = arena.take<Real>(count);
  slope = arena.take<Real>(count);
  m_last = arena.take<double>(plan.shape.sequences * plan.shape.heads);
}

template <class Real>
GateVectors<Real> GateVectors<Real>::at(const Problem& problem, const Sequence& sequence, std::int64_t head,
                                        std::int64_t begin) const {
  const std::int64_t offset = head * problem.tokens() + sequence.packed + begin;
  GateVectors view = *this;
  view.u += offset;
  view.c += offset;
  view.minus_m += offset;
  view.qbar += offset;
  view.abar += offset;
  view.inverse += offset;
  view.slope += offset;
  view.m_last += sequence.index * problem.heads() + head;
  return view;
}

double initial_max(const Problem& problem, const Sequence& sequence, std::int64_t head) {
  const TensorView& m = problem.initial_state.m;
  return m.given() ? finite_max_state(read_gate(m, sequence.index * m.strides[0] + head * m.strides[1])) : 0.0;
}

void read_gates(const TensorView& view, const Sequence& sequence, std::int64_t head, double* to) {
  for (std::int64_t t = 0; t < sequence.length; ++t) to[t] = read_gate(view, gate_offset(view, sequence, t, head));
}

void log_gates(const Problem& problem, const Sequence& sequence, std::int64_t head, double m, double* log_f,
               double* log_i) {
  const Settings& settings = problem.settings;
  const std::int64_t length = sequence.length;
  if (problem.time_step != nullptr) {
    time_step_gates(problem, sequence, head, log_f, log_i);
    limit_resets(m, log_f, log_i, length);
    return;
  }
  read_gates(problem.f, sequence, head, log_f);
  read_gates(problem.i, sequence, head, log_i);
  if (settings.capped) {
    simd::soft_cap(settings.cap, log_f, length);
    simd::soft_cap(settings.cap, log_i, length);
  }
  take_logs(settings.family.forget, log_f, length);
  take_logs(settings.family.input, log_i, length);
  limit_resets(m, log_f, log_i, length);
}

template <class Real>
void gates(const Problem& problem, const GateVectors<Real>& vectors, const Sequence& sequence, std::int64_t head) {
  const Settings& settings = problem.settings;
  const GateVectors<Real> out = vectors.at(problem, sequence, head);
  const std::int64_t length = sequence.length;
  double m = initial_max(problem, sequence, head);
  log_gates(problem, sequence, head, m, out.u, out.c);
  for (std::int64_t begin = 0; begin < length;) {
    const std::int64_t end = tile_end(problem.plan, begin, length);
    scan_tile<Real>(settings.family.has_max_state, m, out.u + begin, out.c + begin, out.minus_m + begin, end - begin);
    simd::exp_shifted(Real{1}, m, out.u + begin, out.qbar + begin, end - begin);
    simd::exp_shifted(Real{1}, out.u[end - 1], out.c + begin, out.abar + begin, end - begin);
    m = -out.minus_m[end - 1];
    begin = end;
  }
  *out.m_last = m;
}

template <class Real>
void store_max_states(const Problem& problem, const double* m_last, const MutableTensorView& m) {
  if (!m.given()) return;
  const std::int64_t heads = problem.heads();
  for (std::int64_t unit = 0; unit < problem.plan.shape.sequences * heads; ++unit) {
    static_cast<Real*>(m.data)[unit / heads * m.strides[0] + unit % heads * m.strides[1]] =
        static_cast<Real>(m_last[unit]);
  }
}

void store_gate_gradients(const Problem& problem, const Sequence& sequence, std::int64_t head, std::int64_t begin,
                          std::int64_t count, const double* dlogi, const double* dlogf, const MutableTensorView& di,
                          const MutableTensorView& df) {
  if (problem.time_step != nullptr) {
    store_time_step_gradients(problem, sequence, head, begin, count, dlogi, dlogf, di);
    return;
  }
  const Settings& settings = problem.settings;
  for (std::int64_t t = 0; t < count; ++t) {
    const double i = read_gate(problem.i, gate_offset(problem.i, sequence, begin + t, head));
    const double f = read_gate(problem.f, gate_offset(problem.f, sequence, begin + t, head));
    const double i_slope = raw_gate_slope(settings.family.input, settings.capped, settings.cap, i);
    const double f_slope = raw_gate_slope(settings.family.forget, settings.capped, settings.cap, f);
    write_gate(di, gate_offset(di, sequence, begin + t, head), dlogi[t] * i_slope);
    write_gate(df, gate_offset(df, sequence, begin + t, head), dlogf[t] * f_slope);
  }
}

#define TFLA_INSTANTIATE(Real)                                                                  \
  template struct GateVectors<Real>;                                                            \
  template void gates(const Problem&, const GateVectors<Real>&, const Sequence&, std::int64_t); \
  template void store_max_states<Real>(const Problem&, const double*, const MutableTensorView&)
TFLA_INSTANTIATE(float);
TFLA_INSTANTIATE(double);
#undef TFLA_INSTANTIATE

}  // namespace tfla::cpu
