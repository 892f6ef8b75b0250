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

// What a copy brings into L2 at least: where the columns beside a box are for another block, lines of 128 bytes.
inline constexpr CUtensorMapL2promotion whole_rows = CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                        parts_of_rows = CU_TENSOR_MAP_L2_PROMOTION_L2_128B;

// A [B,T,H,D] tensor of 16-bit numbers as (column, token, head, batch) in boxes of 64 columns by box_tokens; columns
// beyond D and tokens beyond T read as zero.
[[nodiscard]] CUtensorMap token_map(const Rows& rows, std::int64_t batch, std::int64_t tokens, std::int64_t heads,
                                    std::int64_t columns, int box_tokens, CUtensorMapL2promotion copies = whole_rows);

// [matrices, rows, columns] of 16-bit numbers as (column, row, matrix) in boxes of 64 columns by box_rows; rows beyond
// those of the matrix read as zero too.
[[nodiscard]] CUtensorMap matrix_map(const void* data, std::int64_t matrices, std::int64_t rows, std::int64_t columns,
                                     int box_rows, CUtensorMapL2promotion copies = whole_rows);

}  // namespace tfla::cuda::sm90
