// Stage `states` and its reverse-time twin on Hopper: the warps that move data.
#pragma once

#include "cuda/sm90/states/shared.cuh"

namespace tfla::cuda::sm90::states {

template <class T, Time Direction, Pass Which, int M, int Columns, bool Packed>
struct Movers : Block<T, Direction, Which, M, Columns, Packed> {
  using Base = Block<T, Direction, Which, M, Columns, Packed>;
  using Base::adds;
  using Base::blocks_per_chunk;
  using Base::call;
  using Base::each_item;
  using Base::empty;
  using Base::full;
  using Base::gates;
  using Base::half;
  using Base::maps;
  using Base::reverse;
  using Base::space;
  using Base::warpgroups;
  using typename Base::Item;
  using typename Base::Space;

  // See nothing_map.
  __device__ __forceinline__ const CUtensorMap* map_for(const CUtensorMap& map, int column, int columns) const {
    if constexpr (Packed) return column < columns ? &map : &maps.nothing;
    return &map;
  }

  __device__ void load_tokens() const {
    Ring<Space::slots> ring;
    each_item([&](const Item& it) {
      // Found once: the compiler puts the division between a slot's wait and its loads, which it then holds up.
      int x_head = 0;
      if (Packed) {
        x_head = it.head / call.dims.group;
        arch::forget(x_head);
      }
      for (BlockWalk<Direction, Item> walk(it, blocks_per_chunk()); walk.more() && adds(it, walk.chunk);
           walk.next(), ring.advance()) {
        const int token = it.map_token(call) + walk.chunk * call.dims.L + walk.block * block_tokens;
        const int batch = it.map_batch(call);
        const unsigned slot = space + ring.slot * Space::slot_bytes;
        arch::wait(empty(ring.slot), ring.phase ^ 1);
        arch::arrive_expecting(full(ring.slot), Space::slot_bytes);
        for (int p = 0; p < M; ++p)
          arch::load_box(slot + p * panel_bytes, map_for(maps.x, it.row + p * panel, call.dims.dqk), full(ring.slot),
                         it.row + p * panel, token, Packed ? x_head : it.head / call.dims.group, batch);
        for (int p = 0; p < Columns / panel; ++p)
          arch::load_box(slot + Space::x_bytes + p * panel_bytes, map_for(maps.y, it.column + p * panel, call.dims.dhv),
                         full(ring.slot), it.column + p * panel, token, it.head, batch);
      }
    });
  }

  __device__ void load_gates() const {
    const int lane = threadIdx.x % 32;
    Ring<Space::slots> ring;
    each_item([&](const Item& it) {
      const float* first = reverse ? call.gates.qbar : call.gates.abar;
      for (BlockWalk<Direction, Item> walk(it, blocks_per_chunk()); walk.more() && adds(it, walk.chunk);
           walk.next(), ring.advance()) {
        const std::int64_t token = static_cast<std::int64_t>(walk.chunk) * call.dims.L + walk.block * block_tokens;
        const std::int64_t at = it.head * call.dims.all_tokens() + it.first_token(call) + token;
        arch::wait(empty(ring.slot), ring.phase ^ 1);
        const unsigned to = gates(ring.slot);
        for (int t = lane; t < block_tokens; t += 32) {
          const bool valid = token + t < it.tokens(call);
          const std::int64_t from = valid ? at + t : at;
          arch::copy_small<4>(to + 4 * t, first + from, valid);
          if (reverse) arch::copy_small<4>(to + 4 * (block_tokens + t), call.gates.inverse + from, valid);
        }
        if (lane == 0) {
          const std::int64_t unit = (it.first_number + walk.chunk) * call.dims.heads + it.head;
          arch::copy_small<4>(to + 4 * 2 * block_tokens, call.gates.gbar + unit, true);
        }
        arch::arrive_after_copies(full(ring.slot));
      }
    });
  }

  __device__ void move_states() const {
    unsigned turns = 0;  // parity of each buffer
    const auto load_c = [&](const Item& it, int chunk, int buffer) {
      const unsigned barrier = space + Space::loaded + 8 * buffer;
      arch::arrive_expecting(barrier, warpgroups * Space::half_bytes);
      const auto unit = static_cast<int>((it.first_number + chunk) * call.dims.heads + it.head);
      for (int p = 0; p < Columns / panel; ++p)
        arch::load_box(half(buffer, 0) + p * M * panel_bytes, &maps.c, barrier, it.column + p * panel, it.row, unit);
    };
    each_item([&](const Item& it) {
      const int count = it.high - it.low;
      if (reverse)
        for (int k = 0; k < min(count, Space::buffers); ++k) load_c(it, it.high - 1 - k, k);
      for (int k = 0; k < count; ++k) {
        const int chunk = reverse ? it.high - 1 - k : it.low + k;
        const int buffer = k % Space::buffers;
        arch::wait(space + Space::staged + 8 * buffer, turns >> buffer & 1);
        turns ^= 1U << buffer;
        const auto unit = static_cast<int>((it.first_number + chunk) * call.dims.heads + it.head);
        for (int p = 0; p < Columns / panel; ++p)
          arch::store_box(half(buffer, 0) + p * M * panel_bytes, &maps.stored, it.column + p * panel, it.row, unit);
        arch::commit_stores();
        arch::wait_stores_read<0>();
        if (!reverse)
          arch::arrive(space + Space::drained);
        else if (k + Space::buffers < count)
          load_c(it, chunk - Space::buffers, buffer);
      }
    });
    arch::wait_stores<0>();
  }
};

}  // namespace tfla::cuda::sm90::states
