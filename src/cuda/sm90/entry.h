// Hopper's kernels, as host functions that launch one each. The plan says which of them a call takes, in which tiles
// (plan/kernel_table.h). T: the type of q, k, v, bfloat16 or float16.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/call.h"
#include "cuda/epilogue.h"
#include "cuda/launch.h"
#include "cuda/sm90/common/limits.h"
#include "plan/hopper_sizes.h"

namespace tfla::cuda::sm90 {

// Compute capability 9.0, of the current device.
[[nodiscard]] bool supported_device();
[[nodiscard]] int multiprocessors();

static_assert(hopper::chunk == chunk_tokens && hopper::token_block == token_block);

// Rows and columns of a row of the kernel table.
struct TileSize {
  int rows, columns;
};

// C and n at the starts of chunks; in reverse time dC and <C, dC>.
template <class T>
void launch_states(const Call<float>& call, TileSize tile, cudaStream_t stream);
template <class T>
void launch_grad_states(const Call<float>& call, TileSize tile, cudaStream_t stream);

// What each segment adds to the state. one_term: of keys that are rounded once.
template <class T>
void launch_segment_totals(const Call<float>& call, TileSize tile, Time direction, bool one_term, cudaStream_t stream);
// The states that segments of packed sequences start from.
void launch_packed_segment_scan(const Call<float>& call, bool reverse, cudaStream_t stream);

// H, with the state on the chip, in blocks of 64 tokens.
template <class T>
void launch_forward(const Call<float>& call, TileSize tile, cudaStream_t stream);
// The same for dqk above 256, in bfloat16: the first 256 columns of q and k, then the rest. part_of_dqk is the call
// that the kernels of one of these passes see.
[[nodiscard]] Call<float> part_of_dqk(const Call<float>& call, bool rest);
void launch_forward_part(const Call<float>& call, bool rest, cudaStream_t stream);

// The same with the epilogue of the state space dual, in bfloat16.
void launch_forward_with_epilogue(const Call<float>& call, const Epilogue& epilogue, TileSize tile,
                                  cudaStream_t stream);

// dC and dV in blocks of 64 tokens: the reverse-time twin of forward, in bfloat16. grad_v_reverse stores no dC.
void launch_grad_states_v(const Call<float>& call, TileSize tile, cudaStream_t stream);
void launch_grad_v_reverse(const Call<float>& call, TileSize tile, cudaStream_t stream);

// dQ with C on the chip and dK with dC, and the row sums that grad_gates reads: twins of forward too.
void launch_grad_q_forward(const Call<float>& call, TileSize tile, cudaStream_t stream);
void launch_grad_k_reverse(const Call<float>& call, TileSize tile, cudaStream_t stream);

// dQ, dK, dV and the row sums that grad_gates reads, in chunks of 128 tokens.
template <class T>
void launch_grad_qkv(const Call<float>& call, TileSize tile, cudaStream_t stream);
void launch_grad_qkv_small(const Call<float>& call, TileSize tile, cudaStream_t stream);
template <class T>
void launch_grad_v(const Call<float>& call, TileSize tile, cudaStream_t stream);
// With call.sums.traces also <C, dC> of every chunk. grad_qk_norm reads deta and dn.
template <class T>
void launch_grad_qk(const Call<float>& call, cudaStream_t stream);
template <class T>
void launch_grad_qk_norm(const Call<float>& call, cudaStream_t stream);

// dh.h of every token to call.sums.rows, in parts of 128 columns of dqk.
template <class T>
void launch_row_dots(const Call<float>& call, cudaStream_t stream);
// deta, dn at the ends of chunks and dn0, from row_dots or from the gradient of the last n alone.
template <class T>
void launch_grad_n(const Call<float>& call, cudaStream_t stream);

}  // namespace tfla::cuda::sm90
