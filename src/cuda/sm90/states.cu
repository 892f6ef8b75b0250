// Stage `states` and its reverse-time twin (see portable/states.cu) on Hopper. A block owns up to 128 x 256 of a state:
// two warpgroups keep half of the columns each in registers over a whole segment of a sequence, while a third moves
// data.
//
//   warp 0      X (keys or queries) and Y (values or dH), 64 tokens at a time, into a ring
//   warp 1      weights of these tokens and the decay of their chunk
//   warp 2      rounded states from shared to global memory; in reverse time also the C of each chunk the other way
//   warps 4-11  the state
//
// In reverse time <C, dC> is taken with the C of two chunks. They lie in two buffers, and the one that has served twice
// is where dC is rounded to, on its way to global memory.
#include <algorithm>

#include "cuda/arch/barrier.cuh"
#include "cuda/arch/tma.cuh"
#include "cuda/launch.h"
#include "cuda/portable/device.cuh"
#include "cuda/sm90/ring.cuh"
#include "cuda/sm90/stages.h"
#include "cuda/sm90/state_tile.cuh"
#include "cuda/sm90/tensor_map.h"

namespace tfla::cuda::sm90 {

namespace {

enum class Pass { totals, proper };

constexpr int state_warpgroups = 2;
constexpr int states_threads = (1 + state_warpgroups) * warpgroup_threads;

// Shared memory, in bytes from a 1,024-byte boundary.
template <Time Direction, int M, int N>
struct StatesSpace {
  static constexpr bool reverse = Direction == Time::reverse;
  static constexpr int slots = reverse ? 2 : 3;
  static constexpr int x_bytes = M * panel_bytes;
  static constexpr int y_bytes = N / 64 * panel_bytes;  // of one warpgroup
  static constexpr int slot_bytes = x_bytes + state_warpgroups * y_bytes;
  static constexpr int half_bytes = M * N / 64 * panel_bytes;  // of a rounded state, the half of one warpgroup
  static constexpr int buffers = reverse ? 2 : 1;
  static constexpr int gate_floats = 2 * block_tokens + 4;  // two weights per token, the decay

  static constexpr int buffer = slots * slot_bytes;
  static constexpr int gates = buffer + buffers * state_warpgroups * half_bytes;
  static constexpr int barriers = gates + slots * gate_floats * 4;
  static constexpr int full = barriers, empty = full + 8 * slots;
  static constexpr int staged = empty + 8 * slots, drained = staged + 8, loaded = drained + 8;
  static constexpr int bytes = loaded + 8 * buffers + 1024;
};

// The blocks of 64 tokens of one segment, in the order of time, and the tile of the state.
struct StatesItem {
  int column, row, segment, head;
  std::int64_t sequence, first_number;  // number of the sequence's first chunk
  int chunks, low, high;                // of the sequence, of the segment
  int last_blocks;                      // blocks of the segment's last chunk

  template <class Real>
  __device__ StatesItem(const Call<Real>& call, unsigned unit, int row_tiles, int column_tiles, int row_step,
                        int column_step) {
    column = static_cast<int>(unit % column_tiles) * column_step;
    unit /= column_tiles;
    row = static_cast<int>(unit % row_tiles) * row_step;
    unit /= row_tiles;
    head = static_cast<int>(unit % call.heads);
    unit /= call.heads;
    sequence = unit % call.sequences;
    segment = static_cast<int>(unit / call.sequences);
    chunks = call.chunks_per_row;
    first_number = sequence * chunks;
    low = min(segment * call.chunks_per_segment, chunks);
    high = min(low + call.chunks_per_segment, chunks);
    const int last_length =
        high == chunks ? static_cast<int>(call.tokens - static_cast<std::int64_t>(chunks - 1) * call.L) : call.L;
    last_blocks = (last_length + block_tokens - 1) / block_tokens;
  }
  __device__ bool empty() const { return low >= high; }
};

// Walks the blocks of an item.
template <Time Direction>
struct BlockWalk {
  const StatesItem& item;
  int per_chunk;
  int chunk, block;  // chunk of the sequence, block of the chunk

  __device__ __forceinline__ BlockWalk(const StatesItem& it, int blocks_per_chunk)
      : item(it), per_chunk(blocks_per_chunk) {
    chunk = Direction == Time::forward ? it.low : it.high - 1;
    block = Direction == Time::forward ? 0 : blocks_of(chunk) - 1;
  }
  __device__ __forceinline__ int blocks_of(int c) const { return c == item.high - 1 ? item.last_blocks : per_chunk; }
  __device__ __forceinline__ bool more() const {
    return Direction == Time::forward ? chunk < item.high : chunk >= item.low;
  }
  __device__ __forceinline__ bool enters_chunk() const {
    return block == (Direction == Time::forward ? 0 : blocks_of(chunk) - 1);
  }
  __device__ __forceinline__ void next() {
    if (Direction == Time::forward) {
      if (++block == blocks_of(chunk)) {
        block = 0;
        ++chunk;
      }
    } else if (--block < 0) {
      --chunk;
      block = per_chunk - 1;
    }
  }
};

struct StatesMaps {
  CUtensorMap x, y, stored, c;  // stored: where states go; c: the C of chunk starts, in reverse time
};

struct StatesShape {
  int row_tiles, column_tiles, items;
};

template <Time Direction, Pass Which, int M, int N>
struct States {
  using Space = StatesSpace<Direction, M, N>;
  using Tile = StateTile<M, N, Terms::two>;
  static constexpr bool reverse = Direction == Time::reverse;
  static constexpr bool proper = Which == Pass::proper;
  static constexpr int row_step = 64 * M, column_step = state_warpgroups * N;

  const Call<float>& call;
  const StatesMaps& maps;
  const StatesShape& shape;
  unsigned space;

  __device__ StatesItem item(unsigned unit) const {
    return {call, unit, shape.row_tiles, shape.column_tiles, row_step, column_step};
  }
  // Totals of the segment that ends the sequence are of no use.
  __device__ bool skips(const StatesItem& it) const {
    return it.empty() || (!proper && (reverse ? it.segment == 0 : it.high == it.chunks));
  }
  __device__ int blocks_per_chunk() const { return (call.L + block_tokens - 1) / block_tokens; }
  __device__ unsigned full(int slot) const { return space + Space::full + 8 * slot; }
  __device__ unsigned empty(int slot) const { return space + Space::empty + 8 * slot; }
  __device__ unsigned gates(int slot) const { return space + Space::gates + slot * Space::gate_floats * 4; }
  __device__ unsigned half(int buffer, int warpgroup) const {
    return space + Space::buffer + (buffer * state_warpgroups + warpgroup) * Space::half_bytes;
  }

  template <class Work>
  __device__ void each_item(const Work& work) const {
    for (int unit = blockIdx.x; unit < shape.items; unit += gridDim.x) {
      const StatesItem it = item(unit);
      if (!skips(it)) work(it);
    }
  }

  __device__ void load_tokens() const {
    Ring<Space::slots> ring;
    each_item([&](const StatesItem& it) {
      for (BlockWalk<Direction> walk(it, blocks_per_chunk()); walk.more(); walk.next(), ring.advance()) {
        const int token = walk.chunk * call.L + walk.block * block_tokens;
        const int batch = static_cast<int>(it.sequence);
        const unsigned slot = space + ring.slot * Space::slot_bytes;
        arch::wait(empty(ring.slot), ring.phase ^ 1);
        arch::arrive_expecting(full(ring.slot), Space::slot_bytes);
        for (int p = 0; p < M; ++p)
          arch::load_box(slot + p * panel_bytes, &maps.x, full(ring.slot), it.row + p * panel, token,
                         it.head / call.group, batch);
        for (int p = 0; p < state_warpgroups * N / panel; ++p)
          arch::load_box(slot + Space::x_bytes + p * panel_bytes, &maps.y, full(ring.slot), it.column + p * panel,
                         token, it.head, batch);
      }
    });
  }

  __device__ void load_gates() const {
    const int lane = threadIdx.x % 32;
    Ring<Space::slots> ring;
    each_item([&](const StatesItem& it) {
      const float* first = reverse ? call.qbar : call.abar;
      for (BlockWalk<Direction> walk(it, blocks_per_chunk()); walk.more(); walk.next(), ring.advance()) {
        const std::int64_t token = static_cast<std::int64_t>(walk.chunk) * call.L + walk.block * block_tokens;
        const std::int64_t at = it.head * call.all_tokens() + it.sequence * call.tokens + token;
        arch::wait(empty(ring.slot), ring.phase ^ 1);
        const unsigned to = gates(ring.slot);
        for (int t = lane; t < block_tokens; t += 32) {
          const bool valid = token + t < call.tokens;
          const std::int64_t from = valid ? at + t : at;
          arch::copy_small<4>(to + 4 * t, first + from, valid);
          if (reverse) arch::copy_small<4>(to + 4 * (block_tokens + t), call.inverse + from, valid);
        }
        if (lane == 0) {
          const std::int64_t unit = (it.first_number + walk.chunk) * call.heads + it.head;
          arch::copy_small<4>(to + 4 * 2 * block_tokens, call.gbar + unit, true);
        }
        arch::arrive_after_copies(full(ring.slot));
      }
    });
  }

  __device__ void move_states() const {
    unsigned turn = 0;
    const auto load_c = [&](const StatesItem& it, int chunk, int buffer) {
      const unsigned barrier = space + Space::loaded + 8 * buffer;
      arch::arrive_expecting(barrier, state_warpgroups * Space::half_bytes);
      const auto unit = static_cast<int>((it.first_number + chunk) * call.heads + it.head);
      for (int p = 0; p < state_warpgroups * N / panel; ++p)
        arch::load_box(half(buffer, 0) + p * M * panel_bytes, &maps.c, barrier, it.column + p * panel, it.row, unit);
    };
    each_item([&](const StatesItem& it) {
      const int count = it.high - it.low;
      if (reverse) {
        load_c(it, it.high - 1, 0);
        if (it.high < it.chunks) load_c(it, it.high, 1);
      }
      for (int k = 0; k < count; ++k, turn ^= 1) {
        const int chunk = reverse ? it.high - 1 - k : it.low + k;
        const int buffer = reverse ? (k + 1) % 2 : 0;
        arch::wait(space + Space::staged, turn);
        const auto unit = static_cast<int>((it.first_number + chunk) * call.heads + it.head);
        for (int p = 0; p < state_warpgroups * N / panel; ++p)
          arch::store_box(half(buffer, 0) + p * M * panel_bytes, &maps.stored, it.column + p * panel, it.row, unit);
        arch::commit_stores();
        arch::wait_stores_read<0>();
        if (!reverse)
          arch::arrive(space + Space::drained);
        else if (k + 1 < count)
          load_c(it, chunk - 1, buffer);
      }
    });
    arch::wait_stores<0>();
  }

  // Element-wise between the tile and float32 in global memory.
  template <class Move>
  __device__ void each_inside(const StatesItem& it, int column, const Lane& at, Tile& tile, const Move& move) const {
    tile.each(at, [&](int r, int c, float& value, float& next) {
      if (it.row + r >= call.dqk) return;
      if (column + c < call.dhv) move(it.row + r, column + c, value);
      if (column + c + 1 < call.dhv) move(it.row + r, column + c + 1, next);
    });
  }

  __device__ void carry(int warpgroup) const {
    const Lane at;
    Ring<Space::slots> ring;
    unsigned turn = 0, loads = 0;  // loads: parity of what came into each buffer
    const auto scale = static_cast<float>(call.scale);
    each_item([&](const StatesItem& it) {
      const int column = it.column + warpgroup * N;
      Tile tile;
      float n[M][2];
      start(it, column, at, tile, n);
      int k = 0;
      for (BlockWalk<Direction> walk(it, blocks_per_chunk()); walk.more(); walk.next(), ring.advance()) {
        const bool enters = walk.enters_chunk();
        const std::int64_t unit = (it.first_number + walk.chunk) * call.heads + it.head;
        if (proper && enters) {
          if (reverse) {
            const bool has_next = walk.chunk + 1 < it.chunks;
            if (k == 0 && has_next) await_c(1, loads);
            await_c(k % 2, loads);
            const int stale = (k + 1) % 2;
            const float with_own = tile.product_with(half(k % 2, warpgroup), at);
            const float with_next = has_next ? tile.product_with(half(stale, warpgroup), at) : 0.0F;
            store_through(unit, it, warpgroup, at, with_own, with_next, has_next);
            tile.publish(half(stale, warpgroup), at);
          } else {
            arch::wait(space + Space::drained, turn ^ 1);
            turn ^= 1;
            tile.publish(half(0, warpgroup), at);
          }
          arch::writes_before_copies();
          __syncwarp();
          if (at.lane == 0) arch::arrive(space + Space::staged);
          if (column == 0) store_n(unit, it, at, n);
          ++k;
        }
        arch::wait(full(ring.slot), ring.phase);
        const unsigned weights = gates(ring.slot);
        if (enters) {
          const float decay = arch::read_float(weights + 4 * 2 * block_tokens);
          tile.scale(decay);
#pragma unroll
          for (int m = 0; m < M; ++m) n[m][0] *= decay, n[m][1] *= decay;
        }
        const unsigned slot = space + ring.slot * Space::slot_bytes;
        tile.add(
            slot, slot + Space::x_bytes + warpgroup * Space::y_bytes, at,
            [&](int t) {
              const float2 w = arch::read_float2(weights + 4 * t);
              if (!reverse) return w;
              const float2 inverse = arch::read_float2(weights + 4 * (block_tokens + t));
              return float2{scale * w.x * inverse.x, scale * w.y * inverse.y};
            },
            n);
        arch::products_wait<0>();
        tile.hold();
        if (at.lane == 0) arch::arrive(empty(ring.slot));
      }
      finish(it, column, at, tile, n);
    });
  }

 private:
  __device__ void await_c(int buffer, unsigned& loads) const {
    arch::wait(space + Space::loaded + 8 * buffer, loads >> buffer & 1);
    loads ^= 1U << buffer;
  }

  __device__ const StateRows& from_C() const { return reverse ? call.dC_last : call.C0; }
  __device__ const StateRows& to_C() const { return reverse ? call.dC0 : call.C_last; }
  __device__ float* segment_state(const StatesItem& it) const {
    const std::int64_t size = static_cast<std::int64_t>(call.dqk) * call.padded_dhv();
    return call.segment_states + ((it.sequence * call.heads + it.head) * call.segments + it.segment) * size;
  }
  __device__ float* segment_norm(const StatesItem& it) const {
    return static_cast<float*>(call.segment_norms) +
           ((it.sequence * call.heads + it.head) * call.segments + it.segment) * call.dqk;
  }
  // The rows of n that this thread's quad holds parts of.
  template <class Read>
  __device__ void read_n(const StatesItem& it, const Lane& at, float (&n)[M][2], const Read& read) const {
    if (at.pair != 0) return;  // one lane has it all, the others of the quad begin at zero
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = it.row + 64 * m + at.row + 8 * h;
        if (row < call.dqk) n[m][h] = read(row);
      }
  }
  template <class Write>
  __device__ void write_n(const StatesItem& it, const Lane& at, const float (&n)[M][2], const Write& write) const {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = it.row + 64 * m + at.row + 8 * h;
        const float sum = reverse ? 0.0F : over_row(n[m][h]);  // dn is zero where these kernels are used
        if (at.pair == 0 && row < call.dqk) write(row, sum);
      }
  }

  __device__ void start(const StatesItem& it, int column, const Lane& at, Tile& tile, float (&n)[M][2]) const {
#pragma unroll
    for (int m = 0; m < M; ++m) {
      n[m][0] = n[m][1] = 0;
#pragma unroll
      for (float& x : tile.c[m]) x = 0;
    }
    if (!proper) return;
    if (call.segments > 1) {
      const float* from = segment_state(it);
      each_inside(it, column, at, tile, [&](int r, int c, float& value) {
        value = from[static_cast<std::int64_t>(r) * call.padded_dhv() + c];
      });
      const float* from_n = segment_norm(it);
      read_n(it, at, n, [&](int r) { return from_n[r]; });
      return;
    }
    const auto read = [&](const StateRows& rows, int r, int c) {
      return static_cast<const float*>(rows.data)[it.sequence * rows.sequence + it.head * rows.head + r * rows.row + c];
    };
    if (from_C().data != nullptr)
      each_inside(it, column, at, tile, [&](int r, int c, float& value) { value = read(from_C(), r, c); });
    if (!reverse && call.n0.data != nullptr) read_n(it, at, n, [&](int r) { return read(call.n0, 0, r); });
  }

  __device__ void store_n(std::int64_t unit, const StatesItem& it, const Lane& at, float (&n)[M][2]) const {
    float* to = (reverse ? call.dn_states : static_cast<float*>(call.n_states)) + unit * call.dqk;
    write_n(it, at, n, [&](int r, float value) { to[r] = value; });
  }

  // See portable/states.cu for why two products.
  __device__ void store_through(std::int64_t unit, const StatesItem& it, int warpgroup, const Lane& at, float with_own,
                                float with_next, bool has_next) const {
    const double decay = call.gbar[unit];
    double product = has_next ? 0.5 * (decay * with_own + with_next) : decay * with_own;
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) product += __shfl_xor_sync(0xFFFFFFFFU, product, offset);
    const int tile = it.row / row_step * shape.column_tiles + it.column / column_step;
    const int part = (tile * state_warpgroups + warpgroup) * 4 + at.warp;
    if (at.lane == 0) call.through[unit * call.through_parts + part] = product;
  }

  __device__ void finish(const StatesItem& it, int column, const Lane& at, Tile& tile, float (&n)[M][2]) const {
    if (!proper) {
      float* to = segment_state(it);
      each_inside(it, column, at, tile, [&](int r, int c, float& value) {
        to[static_cast<std::int64_t>(r) * call.padded_dhv() + c] = value;
      });
      if (column != 0) return;
      float* to_n = segment_norm(it);
      write_n(it, at, n, [&](int r, float value) { to_n[r] = value; });
      return;
    }
    if (reverse ? it.segment != 0 : it.high != it.chunks) return;
    const auto write = [&](const StateRows& rows, int r, int c, float value) {
      static_cast<float*>(rows.data)[it.sequence * rows.sequence + it.head * rows.head + r * rows.row + c] = value;
    };
    if (to_C().data != nullptr)
      each_inside(it, column, at, tile, [&](int r, int c, float& value) { write(to_C(), r, c, value); });
    const StateRows& to_n = reverse ? call.dn0 : call.n_last;
    if (column == 0 && to_n.data != nullptr) write_n(it, at, n, [&](int r, float value) { write(to_n, 0, r, value); });
  }
};

template <Time Direction, Pass Which, int M, int N>
__global__ void __launch_bounds__(states_threads, 1)
    states_kernel(const __grid_constant__ StatesMaps maps, const __grid_constant__ Call<float> call,
                  const __grid_constant__ StatesShape shape) {
  using Space = StatesSpace<Direction, M, N>;
  extern __shared__ unsigned char memory[];
  const unsigned space = (arch::shared_address(memory) + 1023U) & ~1023U;
  if (threadIdx.x == 0) {
    for (int s = 0; s < Space::slots; ++s) {
      arch::barrier_init(space + Space::full + 8 * s, 1 + 32);
      arch::barrier_init(space + Space::empty + 8 * s, 4 * state_warpgroups);
    }
    arch::barrier_init(space + Space::staged, 4 * state_warpgroups);
    arch::barrier_init(space + Space::drained, 1);
    for (int b = 0; b < Space::buffers; ++b) arch::barrier_init(space + Space::loaded + 8 * b, 1);
    arch::barriers_ready();
  }
  __syncthreads();
  const States<Direction, Which, M, N> states{call, maps, shape, space};
  const int warpgroup = static_cast<int>(threadIdx.x) / warpgroup_threads;
  if (warpgroup == 0) {
    arch::fewer_registers<40>();
    if (threadIdx.x == 0) states.load_tokens();
    if (threadIdx.x / 32 == 1) states.load_gates();
    if (threadIdx.x == 64 && Which == Pass::proper) states.move_states();
  } else {
    arch::more_registers<232>();
    states.carry(warpgroup - 1);
  }
}

template <Time Direction, Pass Which, int M, int N>
void launch_pass(const Call<float>& call, cudaStream_t stream) {
  constexpr bool reverse = Direction == Time::reverse;
  const auto tiles = [](int size, int step) { return (size + step - 1) / step; };
  StatesShape shape{};
  shape.row_tiles = tiles(call.dqk, 64 * M);
  shape.column_tiles = tiles(call.dhv, state_warpgroups * N);
  shape.items = static_cast<int>(call.sequences) * call.heads * call.segments * shape.row_tiles * shape.column_tiles;
  StatesMaps maps{};
  maps.x = token_map(reverse ? call.q : call.k, call.batch, call.tokens, call.qk_heads, call.dqk, block_tokens);
  maps.y = token_map(reverse ? call.dh : call.v, call.batch, call.tokens, call.heads, call.dhv, block_tokens);
  const std::int64_t units = call.numbers * call.heads;
  maps.stored = matrix_map(reverse ? call.dstates : call.states, units, call.dqk, call.padded_dhv(), 64 * M);
  maps.c = matrix_map(call.states, units, call.dqk, call.padded_dhv(), 64 * M);
  launch_blocks("states", states_kernel<Direction, Which, M, N>, std::min(shape.items, multiprocessors()),
                states_threads, StatesSpace<Direction, M, N>::bytes, stream, maps, call, shape);
}

// Which: totals alone, with the states they add up to, or what comes after.
template <Time Direction, Pass Which, int M, int N>
void launch_step(const Call<float>& call, cudaStream_t stream) {
  launch_pass<Direction, Which, M, N>(call, stream);
  if (Which == Pass::totals) launch_segment_scan<__nv_bfloat16>(call, Direction, stream);
}

template <Time Direction, Pass Which>
void launch(const Call<float>& call, cudaStream_t stream) {
  if (call.dqk <= 64 && call.dhv <= 128) return launch_step<Direction, Which, 1, 64>(call, stream);
  if (call.dqk <= 64) return launch_step<Direction, Which, 1, 128>(call, stream);
  if (call.dhv <= 128) return launch_step<Direction, Which, 2, 64>(call, stream);
  launch_step<Direction, Which, 2, 128>(call, stream);
}

}  // namespace

int state_parts(int dqk, int dhv) {
  const auto tiles = [](int size, int step) { return (size + step - 1) / step; };
  return tiles(dqk, dqk <= 64 ? 64 : 128) * tiles(dhv, dhv <= 128 ? 128 : 256) * state_warpgroups * 4;
}

void launch_segment_starts(const Call<float>& call, cudaStream_t stream) {
  if (call.segments > 1) launch<Time::forward, Pass::totals>(call, stream);
}

void launch_states(const Call<float>& call, cudaStream_t stream) {
  launch_segment_starts(call, stream);
  launch<Time::forward, Pass::proper>(call, stream);
}

void launch_dstates(const Call<float>& call, cudaStream_t stream) {
  if (call.segments > 1) launch<Time::reverse, Pass::totals>(call, stream);
  launch<Time::reverse, Pass::proper>(call, stream);
}

}  // namespace tfla::cuda::sm90
