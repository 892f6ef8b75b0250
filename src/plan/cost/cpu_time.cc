#include "plan/cost/cpu_time.h"

#include <algorithm>
#include <cmath>

#include "plan/cost/cpu_rates.h"

namespace tfla {

using analysis::HeadDims;
using analysis::Pass;
using analysis::Polynomial;

namespace {

const CpuRates& rates_of(Pass pass) { return pass == Pass::forward ? cpu_forward_rates : cpu_backward_rates; }

constexpr double item = 4;  // arithmetic is float32, unless the tensors are float64, which costs twice throughout

}  // namespace

Polynomial cpu_tile_seconds(Pass pass, const HeadDims& dims) {
  const CpuRates& rates = rates_of(pass);
  const analysis::Products needed = analysis::products(pass, Formulation::chunkwise);
  const double state = dims.dqk * dims.dhv;
  return {.constant = rates.state * state * item,
          .linear = rates.flop * 2 * needed.state * state + rates.row,
          // Half squares: most of what lies above the diagonal is left out; the blocks on it are in rates.square.
          .quadratic = rates.flop * (needed.square_qk * dims.dqk + needed.square_hv * dims.dhv) + rates.square};
}

double cpu_seconds(Pass pass, const HeadDims& dims, double tokens, double tile, double chunk) {
  const double rebuilt = pass == Pass::backward ? 1 - tile / chunk : 0;
  return tokens * (cpu_tile_seconds(pass, dims)(tile) / tile + rebuilt * rates_of(pass).flop * 2 * dims.dqk * dims.dhv);
}

std::int64_t best_cpu_tile(const HeadDims& dims) {
  const Polynomial training = cpu_tile_seconds(Pass::forward, dims) + cpu_tile_seconds(Pass::backward, dims);
  // Multiples of 16 are whole vectors; below 32 tokens the products are too small, above 128 a tile's buffers leave the
  // cache.
  constexpr std::int64_t step = 16, least = 32, most = 128;
  return std::clamp<std::int64_t>(std::lround(analysis::best_chunk(training) / step) * step, least, most);
}

}  // namespace tfla
