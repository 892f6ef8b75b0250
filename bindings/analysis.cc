// The cost model for Python: a C interface for ctypes. Counts travel as the three coefficients of a polynomial.
#include "tfla/analysis.h"

#include <exception>
#include <string>

namespace {

namespace analysis = tfla::analysis;

thread_local std::string sentence;

// A model as numbers, in the order of its fields.
struct ModelNumbers {
  std::int32_t pass, formulation, gate, unused;
  double dqk, dhv;
  double exp, log, sig, max, abs, mask, causal;
  double qkv, gates, states;
};

analysis::Model model_of(const ModelNumbers& m) {
  return {.pass = static_cast<analysis::Pass>(m.pass),
          .formulation = static_cast<tfla::Formulation>(m.formulation),
          .gate = static_cast<tfla::InputGate>(m.gate),
          .dims = {m.dqk, m.dhv},
          .factors = {m.exp, m.log, m.sig, m.max, m.abs, m.mask, m.causal},
          .bytes = {m.qkv, m.gates, m.states}};
}

analysis::Polynomial polynomial(const double* c) { return {c[0], c[1], c[2]}; }

analysis::Accelerator machine(double flops, double bandwidth) {
  analysis::Accelerator one;
  one.flops = flops;
  one.bandwidth = bandwidth;
  return one;
}

// Runs `work`; 0, or 1 with the reason in `sentence`.
template <class Work>
int guarded(const Work& work) {
  try {
    work();
    return 0;
  } catch (const std::exception& error) {
    sentence = error.what();
    return 1;
  }
}

}  // namespace

extern "C" {

#define TFLA_EXPORTED __attribute__((visibility("default")))

TFLA_EXPORTED const char* tfla_analysis_error() { return sentence.c_str(); }

TFLA_EXPORTED int tfla_analysis_counts(const ModelNumbers* model, double* flops, double* bytes) {
  return guarded([&] {
    const auto copy = [](const analysis::Polynomial& from, double* to) {
      to[0] = from.constant;
      to[1] = from.linear;
      to[2] = from.quadratic;
    };
    copy(analysis::flops(model_of(*model)), flops);
    copy(analysis::bytes(model_of(*model)), bytes);
  });
}

// A count over a whole (batch, heads, T), cut into chunks.
TFLA_EXPORTED double tfla_analysis_total(const double* count, std::int32_t formulation, double batch, double heads,
                                         double tokens, double chunk) {
  const double unit = analysis::unit(static_cast<tfla::Formulation>(formulation), tokens, chunk);
  return analysis::total(polynomial(count), unit, {batch, heads, tokens});
}

TFLA_EXPORTED double tfla_analysis_best_chunk(const double* flops, const double* bytes, double machine_flops,
                                              double bandwidth, bool overlapped) {
  const analysis::Accelerator on = machine(machine_flops, bandwidth);
  return overlapped ? analysis::best_chunk_overlapped(polynomial(flops), polynomial(bytes), on)
                    : analysis::best_chunk(polynomial(flops), polynomial(bytes), on);
}

TFLA_EXPORTED double tfla_analysis_flop_optimal_chunk(const double* flops) {
  return analysis::best_chunk(polynomial(flops));
}

TFLA_EXPORTED double tfla_analysis_roofline(double flops, double bandwidth, double intensity) {
  return analysis::roofline(machine(flops, bandwidth), intensity);
}

TFLA_EXPORTED int tfla_analysis_accelerator(int index, const char** name, std::int32_t* year, double* flops,
                                            double* bandwidth, const char** source) {
  const auto& all = analysis::accelerators();
  if (index < 0 || index >= static_cast<int>(all.size())) return 1;
  const analysis::Accelerator& one = all[static_cast<std::size_t>(index)];
  *name = one.name.c_str();
  *year = one.year;
  *flops = one.flops;
  *bandwidth = one.bandwidth;
  *source = one.source.c_str();
  return 0;
}

}  // extern "C"
