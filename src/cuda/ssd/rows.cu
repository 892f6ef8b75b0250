// What surrounds the scan, one pass over memory each: D x and silu(z) behind h; the gradients of both; what D leaves to
// dx, and sums for dD.
#include "cuda/arch/cluster.cuh"
#include "cuda/device.h"
#include "cuda/ssd/rows.cuh"

namespace tfla::cuda::ssd {

namespace {

constexpr int few_tokens = 16;  // of a CTA that sums nothing up

template <class T, bool Wide>
__global__ void __launch_bounds__(row_threads) epilogue_kernel(Call<typename Config<T>::Real> call, int ctas) {
  using Real = typename Config<T>::Real;
  constexpr int size = piece_size<T, Wide>;
  arch::after_previous_kernel();
  arch::let_next_kernel_start();
  const Columns<size> own(call.dims, blockIdx.x % ctas);
  if (!own.exist) return;
  const Tensors& tensors = call.tensors;
  const bool has_D = tensors.D.data != nullptr, has_z = tensors.z.data != nullptr;
  Real D[size];
  load_skip(tensors.D, own, D);
  each_token(call.sequences, call.dims, blockIdx.x / ctas, few_tokens, [&](const Position& position, bool inside) {
    Real y[size] = {}, x[size] = {}, z[size] = {};
    if (inside) {
      load<T>(tensors.h, position, own, y);
      if (has_D) load<T>(tensors.x, position, own, x);
      if (has_z) load<T>(tensors.z, position, own, z);
    }
#pragma unroll
    for (int e = 0; e < size; ++e) y[e] = has_D && inside ? fma(D[e], x[e], y[e]) : y[e];
    if (tensors.ungated.data != nullptr) store<T>(tensors.ungated, position, own, y);
#pragma unroll
    for (int e = 0; e < size; ++e) y[e] = has_z ? y[e] * (z[e] * sigmoid_of<T>(z[e])) : y[e];
    store<T>(tensors.y, position, own, y);
  });
}

template <class T, bool Wide>
__global__ void __launch_bounds__(row_threads)
    epilogue_gradients_kernel(Call<typename Config<T>::Real> call, int ctas) {
  using Real = typename Config<T>::Real;
  constexpr int size = piece_size<T, Wide>;
  arch::after_previous_kernel();
  arch::let_next_kernel_start();
  const Columns<size> own(call.dims, blockIdx.x % ctas);
  if (!own.exist) return;
  const Tensors& tensors = call.tensors;
  each_token(call.sequences, call.dims, blockIdx.x / ctas, few_tokens, [&](const Position& position, bool inside) {
    Real dy[size] = {}, z[size] = {}, y[size] = {};
    if (inside) {
      load<T>(tensors.dy, position, own, dy);
      load<T>(tensors.z, position, own, z);
      load<T>(tensors.ungated, position, own, y);
    }
#pragma unroll
    for (int e = 0; e < size; ++e) {
      const Real gate = sigmoid_of<T>(z[e]);
      y[e] *= dy[e] * (gate * fma(z[e], 1 - gate, Real{1}));
      dy[e] *= z[e] * gate;
    }
    store<T>(tensors.dz, position, own, y);
    store<T>(tensors.dh, position, own, dy);
  });
}

template <class T, bool Wide>
__global__ void __launch_bounds__(row_threads) skip_gradients_kernel(Call<typename Config<T>::Real> call, int ctas) {
  using Real = typename Config<T>::Real;
  using Sum = typename Config<T>::Norm;
  constexpr int size = piece_size<T, Wide>;
  arch::after_previous_kernel();
  arch::let_next_kernel_start();
  const Columns<size> own(call.dims, blockIdx.x % ctas);
  if (!own.exist) return;
  const Tensors& tensors = call.tensors;
  const std::int64_t block = blockIdx.x / ctas;
  Real D[size];
  Sum sums[size] = {};
  load_skip(tensors.D, own, D);
  // The scan has cleared dx of tokens that are in no sequence.
  each_token(call.sequences, call.dims, block, ssd_token_block, [&](const Position& position, bool inside) {
    if (!inside) return;
    Real dh[size], x[size], dx[size];
    load<T>(tensors.dh, position, own, dh);
    load<T>(tensors.x, position, own, x);
    load<T>(tensors.dx, position, own, dx);
#pragma unroll
    for (int e = 0; e < size; ++e) {
      sums[e] += static_cast<Sum>(dh[e]) * static_cast<Sum>(x[e]);
      dx[e] = fma(D[e], dh[e], dx[e]);
    }
    store<T>(tensors.dx, position, own, dx);
  });
  Real* to = call.scratch.dD + (block * call.dims.heads + own.head) * call.dims.P + own.first;
#pragma unroll
  for (int e = 0; e < size; ++e) to[e] = static_cast<Real>(sums[e]);
}

// Launches a kernel on blocks of so many tokens.
template <class T, class Kernel>
void launch_rows(const char* name, Kernel wide, Kernel narrow, const Call<typename Config<T>::Real>& call, int tokens,
                 cudaStream_t stream) {
  const std::int64_t blocks = ceil_div(call.dims.positions(), tokens);
  if (blocks == 0) return;
  const RowGrid grid(call.dims, call.tensors.wide ? piece_size<T, true> : piece_size<T, false>);
  launch_chained(name, call.tensors.wide ? wide : narrow, blocks * grid.ctas, grid.threads, 0, stream, call, grid.ctas);
}

}  // namespace

template <class T>
void launch_epilogue(const Call<typename Config<T>::Real>& call, cudaStream_t stream) {
  launch_rows<T>("ssd epilogue", epilogue_kernel<T, true>, epilogue_kernel<T, false>, call, few_tokens, stream);
}
template <class T>
void launch_epilogue_gradients(const Call<typename Config<T>::Real>& call, cudaStream_t stream) {
  launch_rows<T>("ssd epilogue_gradients", epilogue_gradients_kernel<T, true>, epilogue_gradients_kernel<T, false>,
                 call, few_tokens, stream);
}
template <class T>
void launch_skip_gradients(const Call<typename Config<T>::Real>& call, cudaStream_t stream) {
  launch_rows<T>("ssd skip_gradients", skip_gradients_kernel<T, true>, skip_gradients_kernel<T, false>, call,
                 ssd_token_block, stream);
}

#define TFLA_INSTANTIATE(T)                                                                        \
  template void launch_epilogue<T>(const Call<typename Config<T>::Real>&, cudaStream_t);           \
  template void launch_epilogue_gradients<T>(const Call<typename Config<T>::Real>&, cudaStream_t); \
  template void launch_skip_gradients<T>(const Call<typename Config<T>::Real>&, cudaStream_t)
TFLA_FOR_EACH_TYPE(TFLA_INSTANTIATE);
#undef TFLA_INSTANTIATE

}  // namespace tfla::cuda::ssd
