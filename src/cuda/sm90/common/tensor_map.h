// Tensors as the tensor memory accelerator sees them.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/call.h"
#include "cuda/sm90/common/limits.h"

namespace tfla::cuda::sm90 {

// A [B,T,H,D] tensor of 16-bit numbers as (column, token, head, batch) in boxes of 64 columns by box_tokens; columns
// beyond D and tokens beyond T read as zero, and are not written.
//
// Packed sequences end inside of the tensor, at places that the host does not know, and the accelerator has to stop
// there too. In their map the fourth axis steps along the tokens as the second one does, and both begin T tokens before
// the tensor: token t of a sequence is at (column, T - length + t, head, end of the sequence), and what lies beyond its
// end lies beyond the second axis.
struct TokenAxes {
  std::int64_t batch, tokens;
  bool packed;
};
[[nodiscard]] CUtensorMap token_map(const TokenAxes& axes, const Strided& tensor, std::int64_t heads,
                                    std::int64_t columns, int box_tokens);
[[nodiscard]] inline CUtensorMap token_map(const Call<float>& call, const Strided& tensor, std::int64_t heads,
                                           std::int64_t columns, int box_tokens) {
  return token_map(TokenAxes{call.dims.batch, call.dims.tokens, call.packing.cu_seqlens != nullptr}, tensor, heads,
                   columns, box_tokens);
}

// A map of which every box is zeros; `readable` begins with 16 bytes of a tensor. Boxes that lie outside of a tensor of
// packed sequences are loaded through it: through the tensor's own map they fault where the memory before the tensor is
// not mapped (docs/cuda/packed.md).
[[nodiscard]] CUtensorMap nothing_map(const void* readable, int box_tokens);

// [matrices, rows, columns] of 16-bit numbers as (column, row, matrix) in boxes of 64 columns by box_rows; rows beyond
// those of the matrix read as zero too.
[[nodiscard]] CUtensorMap matrix_map(const void* data, std::int64_t matrices, std::int64_t rows, std::int64_t columns,
                                     int box_rows);

}  // namespace tfla::cuda::sm90
