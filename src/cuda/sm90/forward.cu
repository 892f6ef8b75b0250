// Stages `states` and `outputs` in one kernel on Hopper: the state never leaves the chip. Chunks are blocks of 64
// tokens; a block owns N columns of dhv of one head over a segment of a sequence, and is persistent.
//
//   warp 0       Q, K, V of the next blocks into rings
//   warp 1       their gate vectors
//   warps 2, 3   H from shared to global memory, one for each warpgroup of outputs
//   warps 4-11   outputs: two warpgroups take blocks in turn. S = Q K^T, gates, O = Q C, O += P V; H goes where Q was
//   warps 12-15  the state: rounds C for the outputs, then adds the block's keys and values
//
// For training the rounded states of chunk starts go to global memory too, from where the outputs read them. Backward
// needs them to more digits than H does, so keys go in as the sum of two bfloat16.
//
// P of the first 16 keys of a block, which all of its rows see, goes into its product as the sum of two bfloat16: the
// rounding of P would be half of the error of H. Both terms of all keys would take 8 % longer.
#include <algorithm>

#include "cuda/arch/barrier.cuh"
#include "cuda/arch/math.cuh"
#include "cuda/arch/tma.cuh"
#include "cuda/launch.h"
#include "cuda/sm90/ring.cuh"
#include "cuda/sm90/stages.h"
#include "cuda/sm90/state_tile.cuh"
#include "cuda/sm90/tensor_map.h"

namespace tfla::cuda::sm90 {

namespace {

constexpr int forward_threads = 4 * warpgroup_threads;

// Shared memory, in bytes from a 1,024-byte boundary. M: 64-column panels of Q and K.
template <int M, int N>
struct ForwardSpace {
  static constexpr int slots = M > 2 ? 3 : 4, k_slots = M > 2 ? 2 : 3;  // of Q and of V with its gates; of K
  static constexpr int k_bytes = M * panel_bytes, v_bytes = N / 64 * panel_bytes;
  static constexpr int q_bytes = k_bytes > v_bytes ? k_bytes : v_bytes;  // H is staged there
  static constexpr int c_bytes = M * N / 64 * panel_bytes;
  // Gate vectors of a block.
  static constexpr int u = 0, c = u + 8 * block_tokens, qbar = c + 8 * block_tokens, abar = qbar + 4 * block_tokens;
  static constexpr int floor = abar + 4 * block_tokens, decay = floor + 4 * block_tokens, gate_bytes = decay + 16;

  static constexpr int q = 0, k = q + slots * q_bytes, v = k + k_slots * k_bytes, state = v + slots * v_bytes;
  static constexpr int n = state + c_bytes, n_part = 2 * 64 * M, n_bytes = 3 * n_part;  // twice
  static constexpr int gates = n + 2 * n_bytes, rows = gates + slots * gate_bytes;
  static constexpr int inverse = 0, slope = 4 * block_tokens, row_bytes = 8 * block_tokens;  // 1 / den and its slope
  static constexpr int barriers = rows + slots * row_bytes;
  static constexpr int q_full = barriers, q_empty = q_full + 8 * slots;
  static constexpr int k_full = q_empty + 8 * slots, k_empty = k_full + 8 * k_slots;
  static constexpr int v_full = k_empty + 8 * k_slots, v_empty = v_full + 8 * slots;
  static constexpr int c_full = v_empty + 8 * slots, c_empty = c_full + 16;  // c_full: one per outputs' warpgroup
  static constexpr int bytes = c_empty + 8 + 1024;
};

// Of a thread, by what it does: 512 for one thread of each warpgroup. Found by trial, so that nothing spills.
template <int M, int N, bool Normalized>
struct ForwardRegisters {
  static constexpr int outputs = N == 64 ? (Normalized ? 136 : 144) : M == 1 ? 160 : 144;
  static constexpr int state = N == 64 ? (Normalized ? 200 : 184) : M == 1 ? 152 : 184;
  static constexpr int movers = 512 - 2 * outputs - state;
};

struct ForwardMaps {
  CUtensorMap q, k, v, h, states;
};

struct ForwardShape {
  int column_tiles, items;
  int kept_shift, kept_chunks;  // log2 of the blocks between kept states, and how many of these a sequence has
};

// The blocks of 64 tokens of one segment, and the columns.
struct ForwardItem {
  int tile, head, segment, chunks, low, high;
  int sequence;

  __device__ ForwardItem(const Call<float>& call, unsigned unit, int column_tiles) {
    tile = static_cast<int>(unit % column_tiles);
    unit /= column_tiles;
    head = static_cast<int>(unit % call.heads);
    unit /= call.heads;
    sequence = static_cast<int>(unit % call.sequences);
    segment = static_cast<int>(unit / call.sequences);
    chunks = call.chunks_per_row;
    low = min(segment * call.chunks_per_segment, chunks);
    high = min(low + call.chunks_per_segment, chunks);
  }
};

template <int M, int N, bool Normalized, bool Keep>
struct Forward {
  using Space = ForwardSpace<M, N>;
  using Tile = StateTile<M, N, Keep ? Terms::two_in_turn : Terms::one>;
  static constexpr auto depth = arch::Major::depth, across = arch::Major::across;
  using Slots = Ring<Space::slots>;  // of Q and of V, which go round together
  using KeySlots = Ring<Space::k_slots>;

  const Call<float>& call;
  const ForwardMaps& maps;
  const ForwardShape& shape;
  unsigned space;

  __device__ unsigned at(int offset, int slot = 0, int step = 8) const { return space + offset + slot * step; }

  template <class Work>
  __device__ void each_item(const Work& work) const {
#pragma unroll 1
    for (int unit = blockIdx.x; unit < shape.items; unit += gridDim.x) {
      const ForwardItem it(call, unit, shape.column_tiles);
      if (it.low < it.high) work(it);
    }
  }

  __device__ void load_tokens() const {
    Slots ring;
    KeySlots k;
    each_item([&](const ForwardItem& it) {
      const int qk_head = it.head / call.group;
#pragma unroll 1
      for (int block = it.low; block < it.high; ++block, ring.advance(), k.advance()) {
        const int token = block * block_tokens;
        const auto load = [&](const CUtensorMap& map, int to, unsigned full, int panels, int column, int head) {
          arch::arrive_expecting(full, panels * panel_bytes);
#pragma unroll 1
          for (int p = 0; p < panels; ++p)
            arch::load_box(space + to + p * panel_bytes, &map, full, column + p * panel, token, head, it.sequence);
        };
        arch::wait(at(Space::k_empty, k.slot), k.phase ^ 1);
        load(maps.k, Space::k + k.slot * Space::k_bytes, at(Space::k_full, k.slot), M, 0, qk_head);
        arch::wait(at(Space::v_empty, ring.slot), ring.phase ^ 1);
        load(maps.v, Space::v + ring.slot * Space::v_bytes, at(Space::v_full, ring.slot), N / 64, it.tile * N, it.head);
        arch::wait(at(Space::q_empty, ring.slot), ring.phase ^ 1);
        load(maps.q, Space::q + ring.slot * Space::q_bytes, at(Space::q_full, ring.slot), M, 0, qk_head);
      }
    });
  }

  __device__ void load_gates() const {
    const int lane = threadIdx.x % 32;
    Slots ring;
    each_item([&](const ForwardItem& it) {
      const std::int64_t row = it.head * call.all_tokens() + it.sequence * call.tokens;
#pragma unroll 1
      for (int block = it.low; block < it.high; ++block, ring.advance()) {
        arch::wait(at(Space::v_empty, ring.slot), ring.phase ^ 1);
        const unsigned to = at(Space::gates, ring.slot, Space::gate_bytes);
#pragma unroll 1
        for (int t = lane; t < block_tokens; t += 32) {
          const std::int64_t token = static_cast<std::int64_t>(block) * block_tokens + t;
          const bool valid = token < call.tokens;
          std::int64_t from = valid ? row + token : row;
          asm volatile("" : "+l"(from));  // five pointers kept over the loop would not fit into the registers
          arch::copy_small<8>(to + Space::u + 8 * t, call.u + from, valid);
          arch::copy_small<8>(to + Space::c + 8 * t, call.log_c + from, valid);
          arch::copy_small<4>(to + Space::qbar + 4 * t, call.qbar + from, valid);
          arch::copy_small<4>(to + Space::abar + 4 * t, call.abar + from, valid);
          if (Normalized) arch::copy_small<4>(to + Space::floor + 4 * t, call.floor + from, valid);
        }
        if (lane == 0) {
          std::int64_t unit = (static_cast<std::int64_t>(it.sequence) * it.chunks + block) * call.heads + it.head;
          asm volatile("" : "+l"(unit));
          arch::copy_small<4>(to + Space::decay, call.gbar + unit, true);
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
    each_block(warpgroup, [&](const ForwardItem& it, int block) {
      if (Keep) {
        arch::wait(at(Space::c_full, warpgroup), c_phase);
        c_phase ^= 1;
        if (it.tile == 0 && is_kept(block)) keep_n(it, block, warpgroup);
        __syncwarp();
        if (lane == 0) keep_state(it, block);
      }
      arch::named_wait(staged_barrier(warpgroup), warpgroup_threads + 32);
      if (Normalized && it.tile == 0) store_rows(it, block, at(Space::rows, ring.slot, Space::row_bytes));
      if (lane == 0) {
#pragma unroll 1
        for (int p = 0; p < N / 64; ++p)
          arch::store_box(at(Space::q, ring.slot, Space::q_bytes) + p * panel_bytes, &maps.h, it.tile * N + p * panel,
                          block * block_tokens, it.head, it.sequence);
        arch::commit_stores();
      }
      if (lane == 0) arch::wait_stores_read<0>();
      __syncwarp();
      if (lane == 0) arch::arrive(at(Space::q_empty, ring.slot));
      ring.advance(2);
    });
    if (lane == 0) arch::wait_stores<0>();
  }

  // Compiled for each warpgroup: slots and descriptors are then known to be the same in all lanes.
  template <int Warpgroup>
  __device__ void make_outputs() const {
    const Lane lane;
    Slots ring(Warpgroup);
    KeySlots k(Warpgroup);
    unsigned c_phase = 0;
    each_block(Warpgroup, [&](const ForwardItem& /*it*/, int /*block*/) {
      output_block<Warpgroup>(lane, ring, k, c_phase);
      ring.advance(2);
      k.advance(2);
      c_phase ^= 1;
    });
  }

  __device__ void carry_state() const {
    const Lane lane;
    Slots ring;
    KeySlots k;
    unsigned turn = 0;  // parity of the block: whose outputs it goes to, and the phase of the state's buffer
    each_item([&](const ForwardItem& it) {
      Tile tile;
      float n[M][2];
      start(it, lane, tile, n);
#pragma unroll 1
      for (int block = it.low; block < it.high; ++block, k.advance(), ring.advance(), turn ^= 1) {
        arch::wait(at(Space::c_empty), turn ^ 1);
        tile.publish(at(Space::state), lane);
        if (Normalized || Keep) publish_n(turn, lane, n);
        arch::writes_before_copies();
        __syncwarp();
        if (lane.lane == 0) arch::arrive(at(Space::c_full, static_cast<int>(turn)));
        arch::wait(at(Space::k_full, k.slot), k.phase);
        arch::wait(at(Space::v_full, ring.slot), ring.phase);
        const unsigned gates = at(Space::gates, ring.slot, Space::gate_bytes);
        const float decay = arch::read_float(gates + Space::decay);
        tile.scale(decay);
#pragma unroll
        for (int m = 0; m < M; ++m) {
          n[m][0] *= decay;
          n[m][1] *= decay;
        }
        tile.add(
            at(Space::k, k.slot, Space::k_bytes), at(Space::v, ring.slot, Space::v_bytes), lane,
            [&](int t) { return arch::read_float2(gates + Space::abar + 4 * t); }, n);
        if (lane.lane == 0) arch::arrive(at(Space::k_empty, k.slot));
        arch::products_wait<0>();
        tile.hold();
        if (lane.lane == 0) arch::arrive(at(Space::v_empty, ring.slot));
      }
      finish(it, lane, tile, n);
    });
  }

 private:
  __device__ static int staged_barrier(int warpgroup) { return 3 + warpgroup; }
  __device__ static int warps_barrier(int warpgroup) { return 1 + warpgroup; }

  __device__ __forceinline__ bool is_kept(int block) const { return (block & ((1 << shape.kept_shift) - 1)) == 0; }
  __device__ __forceinline__ int kept_unit(const ForwardItem& it, int block) const {
    return (it.sequence * shape.kept_chunks + (block >> shape.kept_shift)) * call.heads + it.head;
  }

  __device__ void keep_state(const ForwardItem& it, int block) const {
    if (is_kept(block)) {
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
  __device__ void keep_n(const ForwardItem& it, int block, int warpgroup) const {
    const unsigned from = at(Space::n, warpgroup, Space::n_bytes);
#pragma unroll 1
    for (int row = threadIdx.x % 32; row < call.dqk; row += 32) {
      const unsigned place = from + row / 16 * 32 + row % 8 / 2 * 8 + row % 16 / 8 * 4 + row % 2 * 2;
      float sum = 0;
#pragma unroll
      for (int part = 2; part >= 0; --part)
        sum += __bfloat162float(__ushort_as_bfloat16(arch::read_half_word(place + part * Space::n_part)));
      static_cast<float*>(call.n_states)[static_cast<std::int64_t>(kept_unit(it, block)) * call.dqk + row] = sum;
    }
  }

  __device__ void store_rows(const ForwardItem& it, int block, unsigned rows) const {
#pragma unroll 1
    for (int t = threadIdx.x % 32; t < block_tokens; t += 32) {
      const std::int64_t token = static_cast<std::int64_t>(block) * block_tokens + t;
      if (token >= call.tokens) continue;
      std::int64_t to = it.head * call.all_tokens() + it.sequence * call.tokens + token;
      asm volatile("" : "+l"(to));  // as in load_gates
      call.inverse[to] = arch::read_float(rows + Space::inverse + 4 * t);
      call.slope[to] = arch::read_float(rows + Space::slope + 4 * t);
    }
  }

  // The blocks of one warpgroup of outputs: every other one, counted over all items.
  template <class Work>
  __device__ void each_block(int warpgroup, const Work& work) const {
    int turn = 0;
    each_item([&](const ForwardItem& it) {
#pragma unroll 1
      for (int block = it.low + ((warpgroup ^ turn) & 1); block < it.high; block += 2) work(it, block);
      turn += it.high - it.low;
    });
  }

  template <int Warpgroup>
  __device__ __forceinline__ void output_block(const Lane& lane, const Slots& ring, const KeySlots& k,
                                               unsigned c_phase) const {
    const unsigned q_tile = at(Space::q, ring.slot, Space::q_bytes), k_tile = at(Space::k, k.slot, Space::k_bytes);
    const unsigned gates = at(Space::gates, ring.slot, Space::gate_bytes);
    float s[32], o[N / 2];

    arch::wait(at(Space::q_full, ring.slot), ring.phase);
    arch::wait(at(Space::k_full, k.slot), k.phase);
    const std::uint64_t q_rows = arch::tile_descriptor(q_tile), k_rows = arch::tile_descriptor(k_tile);
    arch::products_begin();
#pragma unroll
    for (int d = 0; d < 4 * M; ++d) {
      constexpr int panel_step = panel_bytes / 16, depth_step = 32 / 16;
      const int offset = d / 4 * panel_step + d % 4 * depth_step;
      arch::multiply<__nv_bfloat16, depth, depth>(s, q_rows + offset, k_rows + offset, d > 0);
    }
    arch::products_commit();
    arch::wait(at(Space::v_full, ring.slot), ring.phase);
    float2 u[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      u[h] = arch::read_float2(gates + Space::u + 8 * (lane.row + 8 * h));
    }
    arch::products_wait<0>();
    arch::pin(s);
    if (lane.lane == 0) arch::arrive(at(Space::k_empty, k.slot));
    float sums[2] = {0, 0};
    gate_scores(s, u, gates, lane, sums);

    arch::wait(at(Space::c_full, Warpgroup), c_phase);
    const std::uint64_t state = arch::tile_descriptor(at(Space::state), M * panel_bytes);
    arch::products_begin();
#pragma unroll
    for (int d = 0; d < 4 * M; ++d) {
      constexpr int panel_step = panel_bytes / 16, depth_step = 32 / 16, state_step = 16 * 128 / 16;
      arch::multiply<__nv_bfloat16, depth, across>(o, q_rows + d / 4 * panel_step + d % 4 * depth_step,
                                                   state + d * state_step, d > 0);
    }
    arch::products_commit();
    float qn[2] = {0, 0};
    if (Normalized) dots_with_n(q_tile, at(Space::n, Warpgroup, Space::n_bytes), lane, qn);
    arch::products_wait<0>();
    arch::pin(o);
    if (lane.lane == 0) arch::arrive(at(Space::c_empty));

    // What a row is multiplied by: scale / den, in the part of the state times qbar.
    float factor[2], weight[2];
    const auto scale = static_cast<float>(call.scale);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      factor[h] = scale;
      weight[h] = arch::read_float(gates + Space::qbar + 4 * (lane.row + 8 * h));
      if (Normalized) {
        const float least = arch::read_float(gates + Space::floor + 4 * (lane.row + 8 * h));
        const float sum = scale * over_row(sums[h] + weight[h] * qn[h]), size = fabsf(sum);
        const float inverse = __fdividef(1, fmaxf(size, least) + static_cast<float>(call.eps));
        factor[h] *= inverse;
        if (lane.pair == 0) {
          const unsigned row = at(Space::rows, ring.slot, Space::row_bytes) + 4 * (lane.row + 8 * h);
          arch::write_float(row + Space::inverse, inverse);
          arch::write_float(row + Space::slope, size > least ? copysignf(inverse, -sum) : 0.0F);
        }
      }
      weight[h] *= factor[h];
    }
#pragma unroll
    for (int e = 0; e < N / 2; ++e) o[e] *= weight[e / 2 % 2];
    uint32_t high[4][4], low[4];
#pragma unroll
    for (int e = 0; e < 32; e += 2) {
      const float by = factor[e / 2 % 2];
      const float2 value{s[e] * by, s[e + 1] * by};
      if (e < 8)
        high[0][e / 2] = split(value, low[e / 2]);
      else
        high[e / 8][e / 2 % 4] = arch::pack(value, __nv_bfloat16{});
    }
    arch::pin(o);
    const std::uint64_t values = arch::tile_descriptor(at(Space::v, ring.slot, Space::v_bytes), panel_bytes);
    arch::products_begin();
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      constexpr int token_step = 16 * 128 / 16;
      arch::multiply<__nv_bfloat16, across>(o, high[t], values + t * token_step, true);
    }
    arch::multiply<__nv_bfloat16, across>(o, low, values, true);
    arch::products_commit();
    arch::products_wait<0>();
    arch::pin(o);
    if (lane.lane == 0) arch::arrive(at(Space::v_empty, ring.slot));

    arch::named_wait(warps_barrier(Warpgroup), warpgroup_threads);  // nobody reads Q any more
#pragma unroll
    for (int n = 0; n < N / 16; ++n) {
      const float* x = o + 8 * n;
      const auto pack = [&](int e) { return arch::pack(float2{x[e], x[e + 1]}, __nv_bfloat16{}); };
      arch::store_tiles((q_tile + n / 4 * panel_bytes + lane.tile_row()) ^ (n % 4 * 32), pack(0), pack(2), pack(4),
                        pack(6));
    }
    arch::writes_before_copies();
    arch::named_arrive(staged_barrier(Warpgroup), warpgroup_threads + 32);
  }

  // S becomes P before the denominator; sums of its rows too. 16-key parts right of a warp's rows are masked whole.
  __device__ __forceinline__ void gate_scores(float (&s)[32], const float2 (&u)[2], unsigned gates, const Lane& lane,
                                              float (&sums)[2]) const {
    const auto gate_part = [&](int part, bool masked) {
#pragma unroll
      for (int n = 2 * part; n < 2 * part + 2; ++n) {
        const float4 c = arch::read_float4(gates + Space::c + 8 * (8 * n + lane.pair));
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int h = e / 2, column = 8 * (n % 2) + lane.pair + e % 2;
          const float exponent = (u[h].x + (e % 2 ? c.z : c.x)) + (u[h].y + (e % 2 ? c.w : c.y));
          s[4 * n + e] *= arch::exp2(exponent);
          if (masked && column > lane.row % 16 + 8 * h) s[4 * n + e] = 0;
          if (Normalized) sums[h] += s[4 * n + e];
        }
      }
    };
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      if (part < lane.warp) {
        gate_part(part, false);
      } else if (part == lane.warp) {
        gate_part(part, true);
      } else {
#pragma unroll
        for (int e = 8 * part; e < 8 * part + 8; ++e) s[e] = 0;
      }
    }
  }

  // q.n of this thread's rows, in parts that add up over the row. n has all its digits: it goes in as the sum of three
  // bfloat16, in three columns of a product with eight.
  __device__ __forceinline__ void dots_with_n(unsigned q_tile, unsigned n, const Lane& lane, float (&sums)[2]) const {
    float product[4] = {0, 0, 0, 0};
    const int part = lane.lane / 4;
    const unsigned from = n + min(part, 2) * Space::n_part + lane.pair * 4;
#pragma unroll
    for (int d = 0; d < 4 * M; ++d) {
      uint32_t tiles[4];
      arch::load_tiles(tiles, (q_tile + d / 4 * panel_bytes + lane.tile_row()) ^ (d % 4 * 32));
      uint2 column = arch::read_words(from + 32 * d);
      if (part > 2) column = {0, 0};
      arch::multiply_add(product, tiles, column.x, column.y, __nv_bfloat16{});
    }
    sums[0] = product[0] + product[1];
    sums[1] = product[2] + product[3];
  }

  // In the order in which the lanes of a product read it: rows 2 i, 2 i + 1, 2 i + 8, 2 i + 9 of every 16.
  __device__ __forceinline__ void publish_n(unsigned turn, const Lane& lane, const float (&n)[M][2]) const {
    const int part = lane.pair / 2, k = lane.lane / 4;
    const unsigned to = at(Space::n, static_cast<int>(turn), Space::n_bytes) + part * Space::n_part + lane.warp * 32 +
                        k / 2 * 8 + k % 2 * 2;
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float rest = over_row(n[m][h]);
        if (part > 0) rest -= __bfloat162float(__float2bfloat16_rn(rest));
        if (part > 1) rest -= __bfloat162float(__float2bfloat16_rn(rest));
        if (part < 3) arch::write_half_word(to + m * 128 + h * 4, __bfloat16_as_ushort(__float2bfloat16_rn(rest)));
      }
  }

  template <class Move>
  __device__ void each_inside(const ForwardItem& it, const Lane& lane, Tile& tile, const Move& move) const {
    tile.each(lane, [&](int r, int c, float& value, float& next) {
      if (r >= call.dqk) return;
      if (it.tile * N + c < call.dhv) move(r, it.tile * N + c, value);
      if (it.tile * N + c + 1 < call.dhv) move(r, it.tile * N + c + 1, next);
    });
  }

  // From the totals of the segments before, or the initial state.
  __device__ void start(const ForwardItem& it, const Lane& lane, Tile& tile, float (&n)[M][2]) const {
#pragma unroll
    for (int m = 0; m < M; ++m) {
      n[m][0] = n[m][1] = 0;
#pragma unroll
      for (float& x : tile.c[m]) x = 0;
    }
    const float* C = static_cast<const float*>(call.C0.data);
    const float* n0 = static_cast<const float*>(call.n0.data);
    std::int64_t row = call.C0.row;
    if (C != nullptr) {
      C += it.sequence * call.C0.sequence + it.head * call.C0.head;
      n0 += it.sequence * call.n0.sequence + it.head * call.n0.head;
    }
    if (call.segments > 1) {
      const std::int64_t unit =
          (static_cast<std::int64_t>(it.sequence) * call.heads + it.head) * call.segments + it.segment;
      C = call.segment_states + unit * call.dqk * call.padded_dhv();
      n0 = static_cast<const float*>(call.segment_norms) + unit * call.dqk;
      row = call.padded_dhv();
    }
    if (C == nullptr) return;
    each_inside(it, lane, tile, [&](int r, int c, float& value) { value = C[r * row + c]; });
    if (lane.pair != 0) return;  // one lane of a quad has n, the others begin at zero
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        if (64 * m + lane.row + 8 * h < call.dqk) n[m][h] = n0[64 * m + lane.row + 8 * h];
  }

  __device__ void finish(const ForwardItem& it, const Lane& lane, Tile& tile, const float (&n)[M][2]) const {
    if (call.C_last.data == nullptr || it.high != it.chunks) return;
    float* C = static_cast<float*>(call.C_last.data) + it.sequence * call.C_last.sequence + it.head * call.C_last.head;
    each_inside(it, lane, tile, [&](int r, int c, float& value) { C[r * call.C_last.row + c] = value; });
    if (it.tile != 0) return;
    float* to = static_cast<float*>(call.n_last.data) + it.sequence * call.n_last.sequence + it.head * call.n_last.head;
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float sum = over_row(n[m][h]);
        const int row = 64 * m + lane.row + 8 * h;
        if (lane.pair == 0 && row < call.dqk) to[row] = sum;
      }
  }
};

template <int M, int N, bool Normalized, bool Keep>
__global__ void __launch_bounds__(forward_threads, 1)
    forward_kernel(const __grid_constant__ ForwardMaps maps, const __grid_constant__ Call<float> call,
                   const __grid_constant__ ForwardShape shape) {
  using Space = ForwardSpace<M, N>;
  using Registers = ForwardRegisters<M, N, Normalized>;
  extern __shared__ unsigned char memory[];
  const unsigned space = (arch::shared_address(memory) + 1023U) & ~1023U;
  if (threadIdx.x == 0) {
    const auto make = [&](int offset, int count, unsigned arrivals) {
      for (int s = 0; s < count; ++s) arch::barrier_init(space + offset + 8 * s, arrivals);
    };
    make(Space::q_full, Space::slots, 1);
    make(Space::q_empty, Space::slots, 1);
    make(Space::k_full, Space::k_slots, 1);
    make(Space::k_empty, Space::k_slots, 8);  // four warps of outputs, four of the state
    make(Space::v_full, Space::slots, 1 + 32);
    make(Space::v_empty, Space::slots, 8);
    make(Space::c_full, 2, 4);
    make(Space::c_empty, 1, Keep ? 5 : 4);
    arch::barriers_ready();
  }
  __syncthreads();
  const Forward<M, N, Normalized, Keep> forward{call, maps, shape, space};
  const int warp = static_cast<int>(threadIdx.x) / 32, warpgroup = warp / 4;
  if (warpgroup == 0) {
    arch::fewer_registers<Registers::movers>();
    if (threadIdx.x == 0) forward.load_tokens();
    if (warp == 1) forward.load_gates();
    if (warp >= 2) forward.store_outputs(warp - 2);
  } else if (warpgroup == 1) {
    arch::more_registers<Registers::outputs>();
    forward.template make_outputs<0>();
  } else if (warpgroup == 2) {
    arch::more_registers<Registers::outputs>();
    forward.template make_outputs<1>();
  } else {
    arch::more_registers<Registers::state>();
    forward.carry_state();
  }
}

template <int M, int N, bool Normalized, bool Keep>
void launch_kernel(const Call<float>& call, cudaStream_t stream) {
  ForwardShape shape{};
  shape.column_tiles = (call.dhv + N - 1) / N;
  shape.items = static_cast<int>(call.sequences) * call.heads * call.segments * shape.column_tiles;
  ForwardMaps maps{};
  if (Keep) {
    while (block_tokens << shape.kept_shift < call.kept_chunk) ++shape.kept_shift;
    shape.kept_chunks = static_cast<int>((call.tokens + call.kept_chunk - 1) / call.kept_chunk);
    maps.states =
        matrix_map(call.states, call.sequences * shape.kept_chunks * call.heads, call.dqk, call.padded_dhv(), 64 * M);
  }
  maps.q = token_map(call.q, call.batch, call.tokens, call.qk_heads, call.dqk, block_tokens);
  maps.k = token_map(call.k, call.batch, call.tokens, call.qk_heads, call.dqk, block_tokens);
  maps.v = token_map(call.v, call.batch, call.tokens, call.heads, call.dhv, block_tokens);
  maps.h = token_map(call.h, call.batch, call.tokens, call.heads, call.dhv, block_tokens);
  launch_blocks("forward", forward_kernel<M, N, Normalized, Keep>, std::min(shape.items, multiprocessors()),
                forward_threads, ForwardSpace<M, N>::bytes, stream, maps, call, shape);
}

template <int M, int N>
void launch(const Call<float>& call, cudaStream_t stream) {
  if (call.kept_chunk > 0)
    call.normalized ? launch_kernel<M, N, true, true>(call, stream) : launch_kernel<M, N, false, true>(call, stream);
  else
    call.normalized ? launch_kernel<M, N, true, false>(call, stream) : launch_kernel<M, N, false, false>(call, stream);
}

}  // namespace

void launch_forward(const Call<float>& call, cudaStream_t stream) {
  launch_segment_starts(call, stream);
  if (call.dqk > 128) return launch<4, 64>(call, stream);
  if (call.dqk > 64) return call.dhv > 64 ? launch<2, 128>(call, stream) : launch<2, 64>(call, stream);
  return call.dhv > 64 ? launch<1, 128>(call, stream) : launch<1, 64>(call, stream);
}

}  // namespace tfla::cuda::sm90
