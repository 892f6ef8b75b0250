// Gate vectors of a tile in shared memory, for the kernels of gradients.
#pragma once

#include "cuda/arch/copy.cuh"
#include "cuda/arch/shared.cuh"
#include "cuda/arch/wgmma.cuh"
#include "cuda/common/device.cuh"
#include "cuda/sm90/common/chunks.cuh"

namespace tfla::cuda::sm90::grad {

// What math warpgroups know of their tile, in one int2 of shared memory.
struct TileInfo {
  static constexpr int last_flag = 2 * chunk_tokens;  // added to the tokens of the last tile of a CTA

  int2 words;

  __device__ __forceinline__ static TileInfo read(unsigned shared) { return {arch::read_int2(shared)}; }
  [[nodiscard]] __device__ __forceinline__ int tokens() const { return words.y % last_flag; }
  [[nodiscard]] __device__ __forceinline__ bool is_last() const { return words.y >= last_flag; }
  // Rows `row` and `row` + 8 of one of the tile's vectors in global memory. Nothing of the next head is written.
  __device__ __forceinline__ void write_rows(float* to, int row, float2 x) const {
    if (threadIdx.x % 4 != 0) return;
    if (row < tokens()) to[words.x + row] = x.x;
    if (row + 8 < tokens()) to[words.x + row + 8] = x.y;
  }
};

// Offsets in shared memory, from Start on. WithNorm: with room for what gradients of n and traces need.
template <unsigned Start, bool WithNorm = false>
struct GateShared {
  static constexpr unsigned u = Start;                      // float2 [chunk_tokens], with log2(scale / den) in it
  static constexpr unsigned c = u + chunk_tokens * 8;       // float2 [chunk_tokens]
  static constexpr unsigned inflow = c + chunk_tokens * 8;  // float2: qbar = exp_sum(u, inflow)
  static constexpr unsigned outflow = inflow + 8;           // float2: abar = exp_sum(c, outflow)
  static constexpr unsigned info = outflow + 8;             // TileInfo
  static constexpr bool with_norm = WithNorm;
  static constexpr unsigned deta = info + 8;                  // float [chunk_tokens]: den deta, which is added to dP
  static constexpr unsigned index = deta + chunk_tokens * 4;  // int2: number of the tile; <n, dn>, a float
  static constexpr unsigned end = WithNorm ? index + 8 : deta;
};

// What a kernel without column tiles and gradients of n adds to gate vectors.
struct NothingMore {
  __device__ static int vectors_before(unsigned /*tile*/) { return 0; }  // of other column tiles of the chunk
  __device__ static float norm_product(unsigned /*tile*/) { return 0; }  // <n, dn>
};

// One warp: loads the gate vectors of the CTA's tiles. u, which takes arithmetic, waits in registers until the tile
// before has left its room.
template <class C, class Gates, class Work, class More>
struct GateLoader {
  static constexpr int lane_tokens = chunk_tokens / warp_threads;

  const Work& work;
  const More& more;
  unsigned memory;
  int lane;

  // Of the tokens of a lane.
  struct Tokens {
    float2 u[lane_tokens];
    float deta[lane_tokens];
  };

  __device__ __forceinline__ void read(Tokens& tokens, const Tile<C::packed>& tile) const {
    const Chunks& chunks = work.chunks;
#pragma unroll
    for (int x = 0; x < lane_tokens; ++x) {
      const int t = lane + warp_threads * x;
      const bool valid = t < tile.length;
      if constexpr (C::norm) {
        tokens.deta[x] = 0;
        if (valid && chunks.deta != nullptr) tokens.deta[x] = chunks.deta[tile.at + t] / chunks.inverse[tile.at + t];
      }
      tokens.u[x] = valid ? chunks.u[tile.at + t] : float2{};
      // D is zero beyond the tokens.
      tokens.u[x].y += __log2f(chunks.scale * (valid ? chunks.inverse[tile.at + t] : 0));
      arch::pin(tokens.u[x]);
    }
  }
  __device__ __forceinline__ void write(const Tokens& tokens) const {
#pragma unroll
    for (int x = 0; x < lane_tokens; ++x) {
      const int t = lane + warp_threads * x;
      arch::write_float2(memory + Gates::u + 8 * t, tokens.u[x]);
      if constexpr (C::norm) arch::write_float(memory + Gates::deta + 4 * t, tokens.deta[x]);
    }
  }
  __device__ __forceinline__ void copy_c(const Tile<C::packed>& tile) const {
#pragma unroll 1
    for (int t = lane; t < chunk_tokens; t += warp_threads)
      arch::copy_small<8>(memory + Gates::c + 8 * t, work.chunks.c + tile.at + min(t, tile.length - 1),
                          t < tile.length);
  }

  // By one lane.
  __device__ __forceinline__ void write_flows(int state) const {
    const Chunks& chunks = work.chunks;
    float2 inflow, outflow;
    as_exponent(chunks.m_start[state], inflow);
    if constexpr (C::state_scales_in_gates) inflow.y += static_cast<float>(exponent_of(chunks.inverse_scale_C[state]));
    arch::write_float2(memory + Gates::inflow, inflow);
    as_exponent(chunks.b_last[state] - chunks.m_end[state], outflow);
    if constexpr (C::state_scales_in_gates)
      outflow.y += static_cast<float>(exponent_of(chunks.inverse_scale_dC[state]));
    arch::write_float2(memory + Gates::outflow, outflow);
  }

  // full: all lanes arrive there.
  __device__ __forceinline__ void run(unsigned full, unsigned empty) const {
    unsigned parity = 1, next = 0;
#pragma unroll 1
    for (unsigned index = first_tile<C::packed>(work); index < work.tiles.tiles;
         index = C::packed ? next : index + gridDim.x, parity ^= 1) {
      if (C::packed) next = tile_after<C::packed>(work, index);
      const Tile<C::packed> tile(work.chunks, work.tiles.chunk_of(index));
      Tokens tokens;
      read(tokens, tile);
      const float norm_product = more.norm_product(index);
      arch::wait(empty, parity);
      write(tokens);
      copy_c(tile);
      if (lane == 0) {
        write_flows(tile.state);
        if constexpr (Gates::with_norm)
          arch::write_int2(memory + Gates::index, {static_cast<int>(index), __float_as_int(norm_product)});
        const bool has_next = (C::packed ? next : index + gridDim.x) < work.tiles.tiles;
        arch::write_int2(memory + Gates::info,
                         {tile.at + more.vectors_before(index), tile.length + (has_next ? 0 : TileInfo::last_flag)});
      }
      arch::commit_copies();
      arch::wait_copies<0>();
      arch::arrive(full);
    }
  }
};
template <class C, class Gates, class Work, class More = NothingMore>
__device__ __forceinline__ void load_gates(const Work& work, unsigned memory, unsigned full, unsigned empty,
                                           const More& more = {}) {
  const int lane = threadIdx.x % warp_threads;
  GateLoader<C, Gates, Work, More>{work, more, memory, lane}.run(full, empty);
}

}  // namespace tfla::cuda::sm90::grad
