#include "core/cost/cuda_time.h"

#include "core/cost/cuda_rates.h"

namespace tfla {

using analysis::HeadDims;
using analysis::Pass;
using analysis::Polynomial;
using analysis::Products;

namespace {

constexpr double tile = 64;

Products products_of(CudaWork work) {
  const Products forward = analysis::products(Pass::forward, Formulation::chunkwise);
  if (work == CudaWork::forward) return forward;
  const Products backward = analysis::products(Pass::backward, Formulation::chunkwise);
  return {.state = forward.state + backward.state,
          .square_qk = forward.square_qk + backward.square_qk,
          .square_hv = forward.square_hv + backward.square_hv};
}

}  // namespace

Polynomial cuda_chunk_seconds(CudaWork work, DType dtype, const HeadDims& dims) {
  const bool half = dtype == DType::bfloat16 || dtype == DType::float16;
  const CudaConstants& constants = half ? cuda_half_constants : cuda_float_constants;
  const CudaRates& rates = work == CudaWork::forward ? constants.forward : constants.training;
  const double item = half ? 2 : 4;
  const Products needed = products_of(work);
  const double state = dims.dqk * dims.dhv;
  const double square = rates.flop * 2 * (needed.square_qk * dims.dqk + needed.square_hv * dims.dhv) + rates.square;
  // Squares on and below the diagonal hold x (x + tile) / 2 elements.
  return {.constant = rates.state * state * item,
          .linear =
              rates.flop * 2 * needed.state * state + rates.row * (2 * dims.dqk + dims.dhv) * item + square * tile / 2,
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
