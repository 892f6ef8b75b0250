// Sizes that the kernels of Hopper share.
#pragma once

#include "cuda/call.h"
#include "plan/kernel_table.h"

namespace tfla::cuda::sm90 {

inline constexpr int warp_threads = 32, warpgroup_threads = 128;
inline constexpr int warpgroup_warps = warpgroup_threads / warp_threads;

// Tokens that backward takes at a time, and between the states that it reads.
inline constexpr int chunk_tokens = 2 * token_block;

// Operands lie in panels: rows of 64 numbers of 16 bits, the most that the 128-byte swizzle takes. A panel has the rows
// of a token block, as many as a warpgroup multiplies; a chunk panel has the rows of a chunk.
inline constexpr int panel = 64;  // columns
inline constexpr int panel_row_bytes = 2 * panel;
inline constexpr int panel_bytes = token_block * panel_row_bytes;
inline constexpr unsigned chunk_panel_bytes = chunk_tokens * panel_row_bytes;
inline constexpr int panel_alignment = 1024;  // of panels in shared memory: eight rows, after which the swizzle repeats

// Shared memory of compute capability 9.0: of one CTA, and of a multiprocessor, which keeps some for each of its CTAs.
inline constexpr int cta_shared_bytes = most_shared_bytes(Needs::sm90a);
inline constexpr int multiprocessor_shared_bytes = 228 * 1024, cta_reserved_bytes = 1024;
inline constexpr int multiprocessor_registers = 65536;

}  // namespace tfla::cuda::sm90
