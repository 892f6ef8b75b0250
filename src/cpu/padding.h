// Tokens that belong to no sequence: their rows of every output are zero.
#pragma once

#include <cstring>

#include "core/read_index.h"
#include "tfla/tensor_view.h"

namespace tfla::cpu {

// Zeros into the tokens [begin, end) of a row of the batch: of a [B,T,H,D] tensor, or of gates [B,T,H].
inline void clear_tokens(const MutableTensorView& view, std::int64_t batch, std::int64_t begin, std::int64_t end) {
  const std::int64_t item = item_size(view.dtype), width = view.rank == 4 ? view.shape[3] : 1;
  for (std::int64_t t = begin; t < end; ++t)
    for (std::int64_t head = 0; head < view.shape[2]; ++head) {
      const std::int64_t at = batch * view.strides[0] + t * view.strides[1] + head * view.strides[2];
      std::memset(static_cast<std::byte*>(view.data) + at * item, 0, static_cast<std::size_t>(width * item));
    }
}

// The tokens behind the last packed sequence.
inline void clear_padding(const TensorView& cu_seqlens, std::initializer_list<MutableTensorView> outputs) {
  if (!cu_seqlens.given()) return;
  const std::int64_t end = read_index(cu_seqlens, cu_seqlens.shape[0] - 1);
  for (const MutableTensorView& view : outputs) clear_tokens(view, 0, end, view.shape[1]);
}

}  // namespace tfla::cpu
