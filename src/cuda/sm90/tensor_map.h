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

// [matrices, rows, columns] of 16-bit numbers as (column, row, matrix) in boxes of 64 columns by box_rows; rows beyond
// those of the matrix read as zero too.
[[nodiscard]] CUtensorMap matrix_map(const void* data, std::int64_t matrices, std::int64_t rows, std::int64_t columns,
                                     int box_rows);

}  // namespace tfla::cuda::sm90
