// The stages that Hopper has kernels of its own for: bfloat16 and float16, dense or packed sequences. The plan says
// which calls they take. T: the type of q, k, v.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/call.h"
#include "cuda/sm90/common/limits.h"

namespace tfla::cuda::sm90 {

// Tokens between the states that backward reads.
inline constexpr int stored_chunk = chunk_tokens;

// Compute capability 9.0, of the current device.
[[nodiscard]] bool supported_device();
[[nodiscard]] int multiprocessors();

// Chunk states and, in reverse time, their gradients with <C, dC>, which comes in state_parts parts per chunk and head.
// A state is in state_tiles tiles, one to a multiprocessor; in forward, where they are narrower, in forward_tiles.
[[nodiscard]] int state_tiles(int dqk, int dhv);
[[nodiscard]] int state_columns(int dhv);  // of them, side by side
[[nodiscard]] int forward_tiles(int dhv);
[[nodiscard]] int state_parts(int dqk, int dhv);
template <class T>
void launch_states(const Call<float>& call, cudaStream_t stream);
template <class T>
void launch_grad_states(const Call<float>& call, cudaStream_t stream);

// The states that segments of a sequence start from, alone; and in reverse time the dC they end with.
template <class T>
void launch_segment_starts(const Call<float>& call, cudaStream_t stream);
template <class T>
void launch_segment_ends(const Call<float>& call, cudaStream_t stream);

// What totals of segments of packed sequences add up to.
void launch_packed_segment_scan(const Call<float>& call, bool reverse, cudaStream_t stream);

// States and outputs in one, in chunks of 64 tokens; the state stays on the chip. Of heads of more than kernel_dqk
// columns (bfloat16, not packed) two such kernels, which take dqk_partial_floats numbers of scratch for every head and
// chunk of all segments.
inline constexpr int kernel_dqk = 256, most_dqk = 2 * kernel_dqk;
[[nodiscard]] std::int64_t dqk_partial_floats(int dhv);
template <class T>
void launch_forward(const Call<float>& call, cudaStream_t stream);
void launch_forward_dqk512(const Call<float>& call, cudaStream_t stream);

// dQ, dK, dV and the row sums that launch_grad_gates reads, in chunks of 128 tokens.
[[nodiscard]] bool takes_grad_qkv(const Call<float>& call);
// Which kernels make them, where there are no gradients of n.
enum class GradKernels : std::uint8_t { grad_qkv_small, grad_qkv, grad_v_and_grad_qk };
[[nodiscard]] GradKernels choose(bool float16, std::int64_t dqk, std::int64_t dhv);
[[nodiscard]] bool splits_grad_qkv(std::int64_t dqk, std::int64_t dhv);
// All of them, of heads of dqk to 128 and dhv to 256.
template <class T>
void launch_grad_qkv(const Call<float>& call, cudaStream_t stream);
// All of them, of heads of dqk and dhv to 64, in bfloat16.
void launch_grad_qkv_small(const Call<float>& call, cudaStream_t stream);
// dQ, dK and the row sums, of heads of any size. With call.sums.traces also <C, dC> of every chunk, in trace_parts
// parts.
[[nodiscard]] int trace_parts(int dqk);
template <class T>
void launch_grad_qk(const Call<float>& call, cudaStream_t stream);
template <class T>
void launch_grad_qk_norm(const Call<float>& call, cudaStream_t stream);
// dC and dV in one, in blocks of 64 tokens: the reverse-time twin of launch_forward, for bfloat16 and one kernel's dqk.
// In place of launch_grad_states, but for <C, dC>, and of launch_grad_v.
[[nodiscard]] bool takes_grad_states_v(std::int64_t dqk, std::int64_t dhv);
void launch_grad_states_v(const Call<float>& call, cudaStream_t stream);
// dV, of heads of any size.
template <class T>
void launch_grad_v(const Call<float>& call, cudaStream_t stream);
// Gradients of n, for launch_grad_qk_norm: the exact one of the normalizer, or one of the last state. Makes deta, dn at
// the ends of chunks, and dn0. Runs after launch_grad_states or launch_grad_states_v, which do not make them.
template <class T>
void launch_grad_n(const Call<float>& call, cudaStream_t stream);
// dh.h of every token to row_sums, in parts of 128 columns of dqk; launch_grad_n launches it.
template <class T>
void launch_row_dots(const Call<float>& call, cudaStream_t stream);

}  // namespace tfla::cuda::sm90
