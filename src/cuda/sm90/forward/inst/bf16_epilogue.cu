// Forward of the state space dual in bfloat16: y = (H + D x) silu(z).
#include "cuda/sm90/forward/kernel.cuh"

namespace tfla::cuda::sm90 {

void launch_forward_with_epilogue(const Call<float>& call, const Epilogue& epilogue, TileSize tile,
                                  cudaStream_t stream) {
  with_row<Kernel::forward, __nv_bfloat16>(tile, [&](auto row) {
    using Row = decltype(row);
    static_assert(Row::epilogues == 0 || Row::epilogues == any_batch, "dense and packed batches are compiled together");
    if constexpr (Row::epilogues == any_batch) {
      constexpr forward::Options options{.dqk_panels = Row::rows / panel, .columns = Row::columns, .epilogue = true};
      return forward::launch_by_packing<__nv_bfloat16, options>(call, stream, {}, epilogue);
    } else {
      refuse_launch();
    }
  });
}

}  // namespace tfla::cuda::sm90
