// The stages that Hopper has kernels of its own for: bfloat16 and float16, dense or packed sequences. The plan says
// which calls they take. T: the type of q, k, v.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/call.h"

namespace tfla::cuda::sm90 {

// Tokens between the states that backward reads.
inline constexpr int stored_chunk = 128;

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
void launch_dstates(const Call<float>& call, cudaStream_t stream);

// The states that segments of a sequence start from, alone; and in reverse time the dC they end with.
template <class T>
void launch_segment_starts(const Call<float>& call, cudaStream_t stream);
template <class T>
void launch_segment_ends(const Call<float>& call, cudaStream_t stream);

// What totals of segments of packed sequences add up to.
void launch_packed_scan(const Call<float>& call, bool reverse, cudaStream_t stream);

// States and outputs in one, in chunks of 64 tokens; the state stays on the chip. Of heads of more than kernel_dqk
// columns (bfloat16, not packed) two such kernels, which take half_floats numbers of scratch for every head and chunk
// of all segments.
inline constexpr int kernel_dqk = 256, most_dqk = 2 * kernel_dqk;
[[nodiscard]] std::int64_t half_floats(int dhv);
template <class T>
void launch_forward(const Call<float>& call, cudaStream_t stream);
void launch_halves(const Call<float>& call, cudaStream_t stream);

// dQ, dK, dV and the row sums that launch_gate_gradients reads, in chunks of 128 tokens. Wide heads take two kernels.
[[nodiscard]] bool takes_gradients(const Call<float>& call);
[[nodiscard]] bool wide_gradients(std::int64_t dqk, std::int64_t dhv);
template <class T>
void launch_gradients(const Call<float>& call, cudaStream_t stream);
// The same of heads of dqk and dhv to 64, in bfloat16.
void launch_narrow_gradients(const Call<float>& call, cudaStream_t stream);
// dQ, dK and the row sums of heads of any width. With call.traces also <C, dC> of every chunk, in trace_parts parts.
[[nodiscard]] int trace_parts(int dqk);
template <class T>
void launch_keys(const Call<float>& call, cudaStream_t stream);
template <class T>
void launch_keys_with_norms(const Call<float>& call, cudaStream_t stream);
// dC and dV in one, in blocks of 64 tokens: the reverse-time twin of launch_forward, for bfloat16 and one kernel's dqk.
// In place of launch_dstates, but for <C, dC>, and of launch_values.
[[nodiscard]] bool has_reverse(std::int64_t dqk, std::int64_t dhv);
void launch_reverse(const Call<float>& call, cudaStream_t stream);
// dV of wide heads.
template <class T>
void launch_values(const Call<float>& call, cudaStream_t stream);
// Gradients of n, for launch_keys_with_norms: the exact one of the normalizer, or one of the last state. deta, dn at
// the ends of chunks, and dn0. After launch_dstates or launch_reverse, which know of none.
template <class T>
void launch_norm_gradients(const Call<float>& call, cudaStream_t stream);
// dh.h of every token to row_sums, in parts of 128 columns of dqk.
template <class T>
void launch_dots(const Call<float>& call, cudaStream_t stream);

}  // namespace tfla::cuda::sm90
