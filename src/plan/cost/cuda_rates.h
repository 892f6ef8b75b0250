// Constants of the cost model for the portable CUDA kernels. benchmarks/gpu/fit_chunk_model.py --write puts those here
// that fit docs/benchmarks/chunk_sizes_cuda.json best.
#pragma once

namespace tfla {

// Seconds on a GPU that has enough to do, per head.
struct CudaRates {
  double flop;    // per operation of the matrix products
  double square;  // per gated element of a chunk's squares: exponentials, masks, sums
  double state;   // per byte of C and chunk: states on their way between kernels
  double row;     // per byte of q, k and v and token
};

// Of the portable kernels, with states kept for backward in training.
struct CudaConstants {
  CudaRates forward;
  CudaRates training;
};

// bfloat16 and float16; fitted to times on NVIDIA H200, 2026-11-15.
inline constexpr CudaConstants cuda_half_constants = {{2.658e-15, 1.854e-12, 3.468e-13, 1.333e-12},
                                                      {2.533e-15, 1.953e-12, 1.735e-12, 3.583e-12}};
// float32 and float64; fitted to times on NVIDIA H200, 2026-11-15.
inline constexpr CudaConstants cuda_float_constants = {{3.076e-14, 3.683e-12, 9.859e-13, 1.333e-12},
                                                       {3.037e-14, 2.496e-12, 3.067e-12, 3.173e-12}};

}  // namespace tfla
