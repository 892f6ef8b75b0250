// Stages `states` and `outputs` in one kernel on Hopper: the warps that move data.
#pragma once

#include "cuda/arch/stream.cuh"
#include "cuda/sm90/forward/shared.cuh"

namespace tfla::cuda::sm90::forward {

template <class T, int M, int N, bool Normalized, bool Keep, bool Packed, Time Direction, Half Dqk>
struct Movers : Block<T, M, N, Normalized, Keep, Packed, Direction, Dqk> {
  using Base = Block<T, M, N, Normalized, Keep, Packed, Direction, Dqk>;
  using Base::at;
  using Base::call;
  using Base::each_block;
  using Base::each_item;
  using Base::first;
  using Base::is_kept;
  using Base::kept_unit;
  using Base::maps;
  using Base::reverse;
  using Base::shape;
  using Base::space;
  using Base::staged_barrier;
  using Base::step;
  using typename Base::Item;
  using typename Base::KeySlots;
  using typename Base::Slots;
  using typename Base::Space;
  // Of a number per token and head. The plan sees to it that columns of blocks of 64 tokens can be counted in 32 bits,
  // and a wide state has more than 64 columns.
  using Index = std::conditional_t<Space::wide, int, std::int64_t>;
  using Token = std::conditional_t<Base::lean, int, std::int64_t>;

  __device__ __forceinline__ Index first_of(const Item& it) const {
    const Index head = static_cast<Index>(it.head) * static_cast<Index>(call.dims.all_tokens());
    if constexpr (Packed) return head + it.start;
    return head + static_cast<Index>(it.sequence) * static_cast<Index>(call.dims.tokens);
  }

  // See nothing_map.
  __device__ __forceinline__ const CUtensorMap* map_for(const CUtensorMap& map, int column, int columns) const {
    if constexpr (Packed) return column < columns ? &map : &maps.nothing;
    return &map;
  }

  // Wide states: K by one thread, Q and V by another. K's ring has less room than theirs, and one that waits for it
  // would hold them up.
  template <bool Keys, bool Others>
  __device__ void load_tokens() const {
    Slots ring;
    KeySlots k;
    each_item([&](const Item& it) {
      const int qk_head = it.head / call.dims.group;
      // A block, in reverse time its first token: that takes fewer registers.
      const int last = reverse ? it.map_token(call) + it.low * block_tokens : 0;
#pragma unroll 1
      for (int place = reverse ? last + (it.high - 1 - it.low) * block_tokens : it.low;
           (reverse ? place >= last : place < it.high);
           place += reverse ? -block_tokens : 1, ring.advance(), k.advance(Space::parts)) {
        const int token = reverse ? place : it.map_token(call) + place * block_tokens;
        const auto load = [&](const CUtensorMap& map, int to, unsigned full, int panels, int column, int columns,
                              int head) {
          arch::arrive_expecting(full, panels * panel_bytes);
#pragma unroll 1
          for (int p = 0; p < panels; ++p)
            arch::load_box(space + to + p * panel_bytes, map_for(map, column + p * panel, columns), full,
                           column + p * panel, token, head, it.map_batch(call));
        };
        constexpr int parts = Space::parts, part_columns = Space::part_panels * panel;
        if (Keys)
#pragma unroll
          for (int p = 0; p < parts; ++p) {
            const KeySlots part = k.after(p);
            arch::wait(at(Space::k_empty, part.slot), part.phase ^ 1);
            load(maps.k, Space::k + part.slot * Space::part_bytes, at(Space::k_full, part.slot), Space::part_panels,
                 p * part_columns, call.dims.dqk, qk_head);
          }
        if constexpr (Keys && Dqk == Half::last)
          arch::prefetch(Base::left_by_half(it, place), Base::dqk_partial_floats * static_cast<int>(sizeof(float)));
        if (!Others) continue;
        arch::wait(at(Space::v_empty, ring.slot), ring.phase ^ 1);
        load(maps.v, Space::v + ring.slot * Space::v_bytes, at(Space::v_full, ring.slot), N / 64, it.tile * N,
             call.dims.dhv, it.head);
#pragma unroll
        for (int p = parts - 1; p >= 0; --p) {
          const int part = ring.slot * parts + p;
          arch::wait(at(Space::q_empty, part), ring.phase ^ 1);
          load(maps.q, Space::q + ring.slot * Space::q_bytes + p * Space::part_bytes, at(Space::q_full, part),
               Space::part_panels, p * part_columns, call.dims.dqk, qk_head);
        }
      }
    });
  }

  __device__ __forceinline__ Token first_chunk(const Item& it) const {
    if constexpr (Packed) return it.first_chunk_number(block_tokens);
    return static_cast<Token>(it.sequence) * it.chunks;
  }

  __device__ void load_gates() const {
    const int lane = threadIdx.x % 32;
    Slots ring;
    each_item([&](const Item& it) {
      const Index row = first_of(it);
#pragma unroll 1
      for (int block = first(it); (reverse ? block >= it.low : block < it.high); block += step, ring.advance()) {
        arch::wait(at(Space::v_empty, ring.slot), ring.phase ^ 1);
        const unsigned to = at(Space::gates, ring.slot, Space::gate_bytes);
#pragma unroll 1
        for (int t = lane; t < block_tokens; t += 32) {
          const Token token = static_cast<Token>(block) * block_tokens + t;
          // In reverse time all keys of a block see its last queries. Where it has fewer than 64 the last one's gates
          // are repeated: others might overflow, and no queries make nothing of them.
          const bool valid = reverse || token < it.tokens(call);
          Index from = valid ? row + token : row;
          if (reverse) from = row + static_cast<Index>(min(token, static_cast<Token>(it.tokens(call)) - 1));
          arch::forget(from);  // five pointers kept over the loop would not fit into the registers
          arch::copy_small<8>(to + Space::u + 8 * t, call.gates.u + from, valid);
          arch::copy_small<8>(to + Space::c + 8 * t, call.gates.log_c + from, valid);
          arch::copy_small<4>(to + Space::qbar + 4 * t, call.gates.qbar + from, valid);
          arch::copy_small<4>(to + Space::abar + 4 * t, call.gates.abar + from, valid);
          if (Normalized) arch::copy_small<4>(to + Space::floor + 4 * t, call.gates.floor + from, valid);
        }
        if (lane == 0) {
          Token unit = (first_chunk(it) + block) * call.dims.heads + it.head;
          arch::forget(unit);
          arch::copy_small<4>(to + Space::decay, call.gates.gbar + unit, true);
        }
        arch::arrive_after_copies(at(Space::v_full, ring.slot));
      }
    });
  }

  // One warp for each warpgroup of outputs: H out of Q's slot, which is free once that has been read.
  __device__ void store_outputs(int warpgroup) const {
    const int lane = threadIdx.x % 32;
    Slots ring(warpgroup);
    unsigned c_phase = 0;
    each_block(warpgroup, [&](const Item& it, int block) {
      if (Keep && !Space::wide) {
        arch::wait(at(Space::c_full, warpgroup), c_phase);
        c_phase ^= 1;
        if (!reverse && it.tile == 0 && is_kept(it, block)) keep_n(it, block, warpgroup);
        __syncwarp();
        if (lane == 0) keep_state(it, block);
        if (arch::for_racecheck && lane > 0) arch::arrive(at(Space::c_empty));
      }
      arch::named_wait(staged_barrier(ring.slot), warpgroup_threads + 32);
      if (!Base::lean && keeps_rows(it)) store_rows(it, block, at(Space::rows, ring.slot, Space::row_bytes));
      if (lane == 0 && Dqk != Half::first) {
#pragma unroll 1
        for (int p = 0; p < N / 64; ++p)
          arch::store_box(at(Space::q, ring.slot, Space::q_bytes) + p * panel_bytes, &maps.h, it.tile * N + p * panel,
                          it.map_token(call) + block * block_tokens, it.head, it.map_batch(call));
        arch::commit_stores();
      }
      if (Base::lean && keeps_rows(it)) store_rows(it, block, at(Space::rows, ring.slot, Space::row_bytes));
      if (lane == 0) arch::wait_stores_read<0>();
      __syncwarp();
      if (arch::arrives(lane == 0)) arch::arrive(at(Space::q_empty, ring.slot * Space::parts));
      ring.advance(Space::outputs);
    });
    if (lane == 0) arch::wait_stores<0>();
  }

 private:
  __device__ void keep_state(const Item& it, int block) const {
    if (is_kept(it, block)) {
#pragma unroll 1
      for (int p = 0; p < N / 64; ++p)
        arch::store_box(at(Space::state) + p * M * panel_bytes, &maps.states, it.tile * N + p * panel, 0,
                        kept_unit(it, block));
      arch::commit_stores();
      arch::wait_stores_read<0>();
    }
    arch::arrive(at(Space::c_empty));
  }

  // n is in shared memory, in three terms (publish_n).
  __device__ void keep_n(const Item& it, int block, int warpgroup) const {
    const unsigned from = at(Space::n, warpgroup, Space::n_bytes);
#pragma unroll 1
    for (int row = threadIdx.x % 32; row < call.dims.dqk; row += 32) {
      const auto place = [&](int part) {
        if (Space::n_rows)
          return from + row / panel * Space::n_panel + (row % panel / 8 ^ part) * 16 + row % 8 * 2 +
                 part * Space::n_part;
        return from + row / 16 * 32 + row % 8 / 2 * 8 + row % 16 / 8 * 4 + row % 2 * 2 + part * Space::n_part;
      };
      float sum = 0;
#pragma unroll
      for (int part = 2; part >= 0; --part) sum += from_bits<T>(arch::read_half_word(place(part)));
      static_cast<float*>(call.stored.n)[static_cast<std::int64_t>(kept_unit(it, block)) * call.dims.dqk + row] = sum;
    }
  }

  __device__ __forceinline__ bool keeps_rows(const Item& it) const {
    return Normalized && Dqk != Half::first && it.tile == 0 && call.gates.inverse != nullptr;
  }

  __device__ void store_rows(const Item& it, int block, unsigned rows) const {
#pragma unroll 1
    for (int t = threadIdx.x % 32; t < block_tokens; t += 32) {
      const Token token = static_cast<Token>(block) * block_tokens + t;
      if (token >= it.tokens(call)) continue;
      Index to = first_of(it) + token;
      arch::forget(to);  // as in load_gates
      call.gates.inverse[to] = arch::read_float(rows + Space::inverse + 4 * t);
      call.gates.slope[to] = arch::read_float(rows + Space::slope + 4 * t);
    }
  }
};

}  // namespace tfla::cuda::sm90::forward
