// Tensors as the tensor memory accelerator sees them.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/call.h"

namespace tfla::cuda::sm90 {

// Columns of a box: with the 128-byte swizzle no more than 64 numbers of 16 bits.
inline constexpr int panel = 64;

// Whether boxes of `rows` can be copied: 16-byte steps between rows, heads and batches, below 2^40 bytes.
[[nodiscard]] bool has_map(const Rows& rows);

// A [B,T,H,D] tensor of 16-bit numbers as (column, token, head, batch) in boxes of 64 columns by box_tokens; columns
// beyond D and tokens beyond T read as zero.
[[nodiscard]] CUtensorMap token_map(const Rows& rows, std::int64_t batch, std::int64_t tokens, std::int64_t heads,
                                    std::int64_t columns, int box_tokens);

// A [rows, columns] matrix of 16-bit numbers as (column, row) in boxes of 64 columns by box_rows.
[[nodiscard]] CUtensorMap matrix_map(const void* data, std::int64_t rows, std::int64_t columns, int box_rows);

// [count, rows, columns] matrices one after the other, as (column, row, matrix): rows beyond the matrix read as zero,
// and never as those of the next one.
[[nodiscard]] CUtensorMap matrices_map(const void* data, std::int64_t count, std::int64_t rows, std::int64_t columns,
                                       int box_rows);

}  // namespace tfla::cuda::sm90
