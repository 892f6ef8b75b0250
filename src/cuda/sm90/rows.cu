// Stage `rows` on Hopper: dh.h of every token, for the exact gradient of the normalizer. See keys/rows.cuh.
#include "cuda/sm90/keys/kernel.cuh"
#include "cuda/sm90/keys/rows.cuh"

namespace tfla::cuda::sm90 {

namespace keys {

template <class T, bool Packed>
__global__ void __launch_bounds__(threads, 1)
    rows_kernel(const __grid_constant__ MapsOf<Packed> maps, const __grid_constant__ Work work) {
#if __CUDA_ARCH__ == 900
  extern __shared__ __align__(1024) unsigned char shared[];
  const unsigned memory = arch::shared_address(shared);
  const Barriers barriers{memory + Plan::barriers};
  if (threadIdx.x == 0) barriers.init<true>();
  __syncthreads();
  arch::after_previous_kernel();
  arch::let_next_kernel_start();
  if (Packed && first_tile<Packed>(work.chunks, work.parts) >= work.parts.tiles) return;
  switch (static_cast<Role>(threadIdx.x / warpgroup)) {
    case Role::producers: {
      arch::fewer_registers<producer_registers<false>>();
      const bool first_lane = threadIdx.x % 32 == 0;
      switch (static_cast<Producer>(threadIdx.x / 32)) {
        case Producer::panels:
          if (first_lane) load_panels<Packed, true>(maps, work, memory);
          break;
        case Producer::resident:
          if (first_lane) load_resident<Packed>(maps, work, memory);
          break;
        case Producer::results: break;
        case Producer::gates:
          load_gates<Plan::Gates, Packed>(
              work.chunks, work.parts, memory, barriers.gates_full(), barriers.gates_empty(),
              [&](unsigned tile) { return static_cast<int>(work.parts.part_of(tile)) * work.vectors; });
          break;
      }
      break;
    }
    case Role::consumer_0:
      arch::more_registers<consumer_registers>();
      RowConsumer<T, 0, Packed>(work, memory).run();
      break;
    case Role::consumer_1:
      arch::more_registers<second_consumer_registers<false>>();
      RowConsumer<T, 1, Packed>(work, memory).run();
      break;
  }
#endif
}

}  // namespace keys

template <class T>
void launch_dots(const Call<float>& call, cudaStream_t stream) {
  const keys::Work work = keys::work_of(call);
  const keys::Maps maps = keys::maps_of(call);
  const std::int64_t blocks = keys::blocks_of(call);
  if (call.cu_seqlens != nullptr)
    return launch_chained("rows", keys::rows_kernel<T, true>, blocks, keys::threads, keys::shared_bytes, stream,
                          keys::PackedMaps{maps, nothing_map(call, keys::chunk)}, work);
  launch_chained("rows", keys::rows_kernel<T, false>, blocks, keys::threads, keys::shared_bytes, stream, maps, work);
}

template void launch_dots<__nv_bfloat16>(const Call<float>&, cudaStream_t);
template void launch_dots<__half>(const Call<float>&, cudaStream_t);

}  // namespace tfla::cuda::sm90
