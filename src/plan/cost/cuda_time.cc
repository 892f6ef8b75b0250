#include "plan/cost/cuda_time.h"

#include <cmath>

#include "plan/cost/cuda_rates.h"

namespace tfla {

using analysis::HeadDims;
using analysis::Pass;
using analysis::Polynomial;

namespace {

constexpr double tile = 64;

double state_products(CudaWork work) {
  const double forward = analysis::products(Pass::forward, Formulation::chunkwise).state;
  if (work == CudaWork::forward) return forward;
  return forward + analysis::products(Pass::backward, Formulation::chunkwise).state;
}

// Products per element of the squares, by head dimension, and how often an element is gated. A block has `width`
// columns of its output, so squares are made again for every such part: S for H and dV, dP for dQ and dK.
struct Squares {
  double qk, hv, gated;

  Squares(CudaWork work, const HeadDims& dims, double width) {
    const double qk_parts = std::ceil(dims.dqk / width), hv_parts = std::ceil(dims.dhv / width);
    if (work == CudaWork::forward) {
      qk = gated = hv_parts;
      hv = 1;
      return;
    }
    qk = 2 * hv_parts + 2;
    hv = 2 * qk_parts + 2;
    gated = 2 * hv_parts + 2 * qk_parts;
  }
};

}  // namespace

Polynomial cuda_chunk_seconds(CudaWork work, DType dtype, const HeadDims& dims) {
  const bool half = dtype == DType::bfloat16 || dtype == DType::float16;
  const CudaConstants& constants = half ? cuda_half_constants : cuda_float_constants;
  const CudaRates& rates = work == CudaWork::forward ? constants.forward : constants.training;
  const double item = half ? 2 : 4;
  const Squares squares(work, dims, half ? 128 : 64);
  const double state = dims.dqk * dims.dhv;
  const double square = rates.flop * 2 * (squares.qk * dims.dqk + squares.hv * dims.dhv) + rates.square * squares.gated;
  // Squares on and below the diagonal hold x (x + tile) / 2 elements.
  return {.constant = rates.state * state * item,
          .linear = rates.flop * 2 * state_products(work) * state + rates.row * (2 * dims.dqk + dims.dhv) * item +
                    square * tile / 2,
          .quadratic = square / 2};
}

std::int64_t best_cuda_chunk(DType dtype, const HeadDims& dims) {
  constexpr std::int64_t least = 64, most = 1024;  // one square; beyond, training is slow for little memory
  const Polynomial training = cuda_chunk_seconds(CudaWork::training, dtype, dims);
  const auto per_token = [&training](std::int64_t chunk) {
    return training(static_cast<double>(chunk)) / static_cast<double>(chunk);
  };
  // There is one valley, so the first step up ends the search.
  std::int64_t best = least;
  while (best < most && per_token(2 * best) < per_token(best)) best *= 2;
  return best;
}

}  // namespace tfla
