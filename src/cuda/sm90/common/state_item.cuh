// Items of work of kernels that hold a tile of the state in registers over a segment of a sequence.
#pragma once

#include "cuda/sm90/common/segment.cuh"

namespace tfla::cuda::sm90 {

// A tile of the state over a segment of a sequence, or over a piece of a segment.
struct DenseItem {
  int column, row, segment, head;       // segment: or piece
  std::int64_t sequence, first_number;  // number of the sequence's first chunk
  int chunks, low, high;                // of the sequence; of the segment [low, high)
  int last_blocks;                      // token blocks of the segment's last chunk

  template <class Real>
  __device__ DenseItem(const Call<Real>& call, unsigned unit, int row_tiles, int column_tiles, int row_step,
                       int column_step, int segment_chunks) {
    column = static_cast<int>(unit % column_tiles) * column_step;
    unit /= column_tiles;
    row = static_cast<int>(unit % row_tiles) * row_step;
    unit /= row_tiles;
    head = static_cast<int>(unit % call.dims.heads);
    unit /= call.dims.heads;
    sequence = unit % call.dims.sequences;
    segment = static_cast<int>(unit / call.dims.sequences);
    chunks = call.dims.chunks_per_row;
    first_number = sequence * chunks;
    low = min(segment * segment_chunks, chunks);
    high = min(low + segment_chunks, chunks);
    const int last_length =
        high == chunks ? static_cast<int>(call.dims.tokens - static_cast<std::int64_t>(chunks - 1) * call.dims.L)
                       : call.dims.L;
    last_blocks = (last_length + token_block - 1) / token_block;
  }
  __device__ bool empty() const { return low >= high; }
  // As Segment has them.
  __device__ int map_token(const Call<float>& /*call*/) const { return 0; }
  __device__ int map_batch(const Call<float>& /*call*/) const { return static_cast<int>(sequence); }
  __device__ std::int64_t tokens(const Call<float>& call) const { return call.dims.tokens; }
  __device__ std::int64_t first_token(const Call<float>& call) const { return sequence * call.dims.tokens; }
};

// The same for packed sequences, whose segments have no pieces.
struct PackedItem : Segment {
  int column, row, head;
  int first_number;
  int last_blocks;

  __device__ PackedItem(const Call<float>& call, const Segment& segment, int at_column, int at_row, int of_head)
      : Segment(segment), column(at_column), row(at_row), head(of_head), first_number(first_chunk_number(call.dims.L)) {
    const int last_length = high == chunks ? length - (chunks - 1) * call.dims.L : call.dims.L;
    last_blocks = (last_length + token_block - 1) / token_block;
  }
  __device__ int first_token(const Call<float>& /*call*/) const { return start; }
};

}  // namespace tfla::cuda::sm90
