#include "cpu/stages/denominators.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>

#include "cpu/kernels/simd.h"
#include "cpu/tile.h"

namespace tfla::cpu {

namespace {

// Tokens whose decays and weights are computed at a time.
constexpr std::int64_t norm_block = 64;
// Tokens that pass over n together.
constexpr std::int64_t norm_group = 4;
// Tokens between asking for a row and reading it.
constexpr std::int64_t norm_ahead = 8;

// A row of q or k: where it is, or converted.
template <class Real>
const Real* norm_row(const TensorView& view, const Sequence& sequence, std::int64_t token, std::int64_t head,
                     Real* buffer) {
  const void* row = row_of(view, sequence, token, head);
  if (view.dtype == native<Real>) return static_cast<const Real*>(row);
  simd::load(row, view.dtype, buffer, view.shape[3]);
  return buffer;
}

// Rows of one head lie far apart, which hardware prefetchers do not follow.
void prefetch_row(const TensorView& view, const Sequence& sequence, std::int64_t token, std::int64_t head) {
  constexpr std::int64_t line = 64;
  const auto* row = static_cast<const std::byte*>(row_of(view, sequence, token, head));
  for (std::int64_t at = 0; at < view.shape[3] * item_size(view.dtype); at += line) __builtin_prefetch(row + at, 0, 2);
}

}  // namespace

template <class Real>
NormBuffers<Real>::NormBuffers(Arena& arena, const Plan& plan) {
  n = arena.take<double>(plan.shape.dqk);
  decay = arena.take<double>(norm_block);
  weight = arena.take<double>(norm_block);
  q = arena.take<Real>(norm_group * plan.shape.dqk);
  k = arena.take<Real>(norm_group * plan.shape.dqk);
}

Denominator denominator(const Settings& settings, double qn, double m) {
  if (!settings.normalized) return {};
  const double size = std::abs(qn);
  const double floor = std::exp(-m);
  // Written so that a NaN in q.n stays one.
  const double inverse = 1 / ((size < floor ? floor : size) + settings.eps);
  return {inverse, size > floor ? std::copysign(inverse, -qn) : 0.0};
}

template <class Real>
void start_norm(const Problem& problem, const Sequence& sequence, std::int64_t head, const NormBuffers<Real>& buffers) {
  const TensorView& n0 = problem.initial_state.n;
  const std::int64_t dqk = problem.plan.shape.dqk;
  if (!n0.given()) {  // its strides may be anything
    std::fill_n(buffers.n, dqk, 0.0);
    return;
  }
  const Real* from = static_cast<const Real*>(n0.data) + sequence.index * n0.strides[0] + head * n0.strides[1];
  std::copy_n(from, dqk, buffers.n);
}

template <class Real>
void gates_and_denominators(const Problem& problem, const GateVectors<Real>& vectors, const Sequence& sequence,
                            std::int64_t head, const NormBuffers<Real>& buffers) {
  gates(problem, vectors, sequence, head);
  start_norm(problem, sequence, head, buffers);
  denominators(problem, vectors, sequence, head, 0, sequence.length, buffers);
}

template <class Real>
void denominators(const Problem& problem, const GateVectors<Real>& vectors, const Sequence& sequence, std::int64_t head,
                  std::int64_t begin, std::int64_t end, const NormBuffers<Real>& buffers) {
  const GateVectors<Real> gates = vectors.at(problem, sequence, head);
  if (!problem.settings.normalized) {
    std::fill(gates.inverse + begin, gates.inverse + end, Real{1});
    return;
  }
  const std::int64_t dqk = problem.plan.shape.dqk;
  const std::int64_t qk_head = head / problem.group();
  for (std::int64_t block = begin; block < end; block += norm_block) {
    const std::int64_t count = std::min(norm_block, end - block);
    // n_t = exp(u_t - u_{t-1}) n_{t-1} + exp(u_t + c_t) k_t. u starts anew with each tile: from minus the m before it.
    for (std::int64_t t = 0; t < count; ++t) {
      const std::int64_t token = block + t;
      const bool starts_tile = token % problem.plan.chunk % problem.plan.tile == 0;
      const double m_before = token == 0 ? initial_max(problem, sequence, head) : -gates.minus_m[token - 1];
      buffers.decay[t] = gates.u[token] + (starts_tile ? m_before : -gates.u[token - 1]);
      buffers.weight[t] = gates.u[token] + gates.c[token];
    }
    simd::exp_shifted(1.0, 0.0, buffers.decay, buffers.decay, count);
    simd::exp_shifted(1.0, 0.0, buffers.weight, buffers.weight, count);
    for (std::int64_t t = 0; t < count; t += norm_group) {
      const std::int64_t members = std::min(norm_group, count - t);
      std::array<const Real*, norm_group> q{};
      std::array<const Real*, norm_group> k{};
      std::array<double, norm_group> qn{};
      for (std::int64_t member = 0; member < members; ++member) {
        const std::int64_t token = block + t + member;
        const std::int64_t ahead = std::min(token + norm_ahead, sequence.length - 1);
        const auto index = static_cast<std::size_t>(member);
        prefetch_row(problem.q, sequence, ahead, qk_head);
        prefetch_row(problem.k, sequence, ahead, qk_head);
        q[index] = norm_row(problem.q, sequence, token, qk_head, buffers.q + member * dqk);
        k[index] = norm_row(problem.k, sequence, token, qk_head, buffers.k + member * dqk);
      }
      simd::step_vector(members, buffers.decay + t, buffers.weight + t, k.data(), q.data(), buffers.n, dqk, qn.data());
      for (std::int64_t member = 0; member < members; ++member) {
        const std::int64_t token = block + t + member;
        const double scaled = problem.settings.scale * qn[static_cast<std::size_t>(member)];
        const Denominator den = denominator(problem.settings, scaled, -gates.minus_m[token]);
        gates.inverse[token] = static_cast<Real>(den.inverse);
        gates.slope[token] = static_cast<Real>(den.slope);
      }
    }
  }
}

#define TFLA_INSTANTIATE(Real)                                                                                      \
  template struct NormBuffers<Real>;                                                                                \
  template void start_norm(const Problem&, const Sequence&, std::int64_t, const NormBuffers<Real>&);                \
  template void gates_and_denominators(const Problem&, const GateVectors<Real>&, const Sequence&, std::int64_t,     \
                                       const NormBuffers<Real>&);                                                   \
  template void denominators(const Problem&, const GateVectors<Real>&, const Sequence&, std::int64_t, std::int64_t, \
                             std::int64_t, const NormBuffers<Real>&)
TFLA_INSTANTIATE(float);
TFLA_INSTANTIATE(double);
#undef TFLA_INSTANTIATE

}  // namespace tfla::cpu
