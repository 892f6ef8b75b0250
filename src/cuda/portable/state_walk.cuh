// A CTA of stage `states`: one tile of the state of one segment, in registers from the segment's first token to its
// last. Slabs of tokens stream through two buffers in shared memory.
#pragma once

#include "cuda/portable/state_flow.cuh"
#include "cuda/portable/state_tile.cuh"
#include "plan/kernel_table.h"

namespace tfla::cuda {

// totals: sums up each segment from zero. proper: starts from the state there, and stores that of every chunk.
enum class Pass { totals, proper };

// The shared memory: two buffers of each.
template <class T>
struct StatesShared {
  using Tile = Config<T>;
  using Real = typename Tile::Real;
  using Norm = typename Tile::Norm;
  using X = SharedTile<T, Tile::slab, tile_rows>;
  using Y = SharedTile<T, Tile::slab, Tile::width>;
  static constexpr int bytes = 2 * (X::size + Y::size) * static_cast<int>(sizeof(T)) +
                               2 * Tile::slab * static_cast<int>(sizeof(Real) + sizeof(Norm));
  static_assert(bytes <= most_shared_bytes(Needs::any_gpu), "what a CTA of every GPU may have");

  T* xs;
  T* ys;
  Norm* n_weights;
  Real* weights;

  __device__ explicit StatesShared(unsigned char* memory)
      : xs(reinterpret_cast<T*>(memory)),
        ys(xs + 2 * X::size),
        n_weights(reinterpret_cast<Norm*>(ys + 2 * Y::size)),
        weights(reinterpret_cast<Real*>(n_weights + 2 * Tile::slab)) {}
};

// Which tile of which state a CTA has.
struct StateUnit {
  int row, col;  // first ones of the tile
  int index;     // segment
  int head;
  int sequence;

  __device__ StateUnit(const Dims& dims, int width, int dqk_tiles, int dhv_tiles) {
    unsigned unit = blockIdx.x;
    col = static_cast<int>(unit % dhv_tiles) * width;
    unit /= dhv_tiles;
    row = static_cast<int>(unit % dqk_tiles) * tile_rows;
    unit /= dqk_tiles;
    index = static_cast<int>(unit % dims.segments);
    unit /= dims.segments;
    head = static_cast<int>(unit % dims.heads);
    sequence = static_cast<int>(unit / dims.heads);
  }
};

template <class T, Time Direction, Pass Which>
class StateWalk {
  using Tile = Config<T>;
  using Real = typename Tile::Real;
  using Norm = typename Tile::Norm;
  using Stored = typename Tile::Stored;
  using Shared = StatesShared<T>;
  static constexpr bool forward = Direction == Time::forward;

 public:
  __device__ __forceinline__ StateWalk(const Call<Real>& of, unsigned char* memory, int dqk_tiles, int dhv_tiles)
      : call(of),
        shared(memory),
        unit(of.dims, Tile::width, dqk_tiles, dhv_tiles),
        x_head(unit.head / of.dims.group),
        tiles_across(dhv_tiles),
        flow{of, unit.head},
        segment(of, unit.sequence, unit.index, of.dims.chunks_per_segment),
        ends_sequence(forward ? segment.high == segment.chunks : unit.index == 0),
        n_row(unit.row + static_cast<int>(threadIdx.x)),
        carries_n(unit.col == 0 && threadIdx.x < tile_rows && n_row < of.dims.dqk),
        slabs_per_chunk((of.dims.L + Tile::slab - 1) / Tile::slab) {}

  // Whether the CTA has anything to do. An empty sequence still passes its state on, and nothing needs the total of a
  // sequence's last segment.
  [[nodiscard]] __device__ __forceinline__ bool has_work() const {
    if (segment.low == segment.high && (unit.index > 0 || segment.chunks > 0)) return false;
    return Which == Pass::proper || !ends_sequence;
  }

  // The state before the first token.
  __device__ __forceinline__ void begin() {
    if (segment.low < segment.high) {
      const int last_length = call.packing.chunks[segment.first + segment.high - 1].length;
      slabs = (segment.high - segment.low - 1) * slabs_per_chunk + (last_length + Tile::slab - 1) / Tile::slab;
    }
    C.clear();
    own = call.dims.segments > 1 ? segment_state(call, unit.sequence, unit.head, unit.index) : nullptr;
    own_n = own == nullptr ? nullptr : segment_norm<T>(call, unit.sequence, unit.head, unit.index);
    if (Which == Pass::totals) return;
    const StridedState& from = flow.from_C();
    const StridedState& from_n = flow.from_n();
    if (own != nullptr || from.data != nullptr)
      each_inside(own != nullptr ? own : state_of(from), own != nullptr ? call.dims.padded_dhv() : from.row,
                  call.dims.dhv, [](Real& value, const Real& there) { value = there; });
    if (carries_n && own != nullptr)
      n = own_n[n_row];
    else if (carries_n && from_n.data != nullptr)
      n = state_element<Real>(from_n, unit.sequence, unit.head, 0, n_row);
  }

  // Adds the tokens of all slabs.
  __device__ __forceinline__ void run() {
    SlabPlace next = first_slab();
    if (slabs > 0) {
      load(next, 0);
      arch::commit_copies();
    }
    for (int index = 0; index < slabs; ++index) {
      const int buffer = index % 2;
      const SlabPlace place = next;
      if (threadIdx.x < Tile::slab) {
        shared.weights[buffer * Tile::slab + threadIdx.x] = weight;
        shared.n_weights[buffer * Tile::slab + threadIdx.x] = n_weight;
      }
      arch::wait_copies<0>();
      __syncthreads();  // the slab is there, and nobody reads the other buffer any more
      if (index + 1 < slabs) {
        advance(next);
        load(next, 1 - buffer);
      }
      arch::commit_copies();
      const bool enters = index == 0 || place.slab == (forward ? 0 : slabs_per_chunk - 1);
      if (enters) enter_chunk(place.number);
      multiply(buffer);
    }
  }

  // The state after the last token: the total of the segment, or the last state of the sequence.
  __device__ __forceinline__ void finish() {
    if (Which == Pass::totals) {
      each_inside(own, call.dims.padded_dhv(), call.dims.padded_dhv(), [](Real& value, Real& there) { there = value; });
      if (carries_n) own_n[n_row] = n;
      return;
    }
    if (!ends_sequence) return;
    if (flow.to_C().data != nullptr)
      each_inside(state_of(flow.to_C()), flow.to_C().row, call.dims.dhv,
                  [](Real& value, Real& there) { there = value; });
    if (carries_n && flow.to_n().data != nullptr)
      state_element<Real>(flow.to_n(), unit.sequence, unit.head, 0, n_row) = static_cast<Real>(n);
  }

 private:
  // This sequence's and head's matrix of a state that the caller gives or takes.
  [[nodiscard]] __device__ __forceinline__ Real* state_of(const StridedState& state) const {
    return static_cast<Real*>(state.data) + unit.sequence * state.sequence + unit.head * state.head;
  }

  // visit(value, there) for every element of the tile that lies inside the first `columns` columns of the state, and
  // its place in a matrix whose rows are `stride` elements apart.
  template <class Visit>
  __device__ __forceinline__ void each_inside(Real* matrix, std::int64_t stride, int columns, const Visit& visit) {
    const int rows = call.dims.dqk - unit.row, cols = columns - unit.col;
    Real* first = matrix + unit.row * stride + unit.col;
    C.each([first, stride, rows, cols, &visit](int, int r, int, int c, Real& value) {
      if (r < rows && c < cols) visit(value, first[r * stride + c]);
    });
  }

  // A slab's chunk, and its number there. Only the last chunk of a segment may have fewer slabs than the others.
  struct SlabPlace {
    int number;
    int slab;
  };
  [[nodiscard]] __device__ __forceinline__ SlabPlace first_slab() const {
    const int first = static_cast<int>(segment.first) + segment.low;
    if (forward) return {first, 0};
    return {first + (slabs - 1) / slabs_per_chunk, (slabs - 1) % slabs_per_chunk};
  }
  // Goes on to the slab that follows in the order of time. A division here would take registers all through the loop.
  __device__ __forceinline__ void advance(SlabPlace& place) const {
    const bool leaves = place.slab == (forward ? slabs_per_chunk - 1 : 0);
    if (forward) {
      place.slab = leaves ? 0 : place.slab + 1;
      place.number += leaves ? 1 : 0;
    } else {
      place.slab = leaves ? slabs_per_chunk - 1 : place.slab - 1;
      place.number -= leaves ? 1 : 0;
    }
  }

  // Starts the copy of a slab, and reads its weights.
  __device__ __forceinline__ void load(const SlabPlace& place, int buffer) {
    const Chunk chunk = call.packing.chunks[place.number];
    load_weights(place, chunk);
    const int token = place.slab * Tile::slab;
    const int rows = min(Tile::slab, chunk.length - token);
    load_tile<Tile::slab, tile_rows>(shared.xs + buffer * Shared::X::size,
                                     row_of<T>(flow.x(), chunk.batch, chunk.token + token, x_head), flow.x().token,
                                     rows, unit.row, call.dims.dqk, flow.x().wide);
    load_tile<Tile::slab, Tile::width>(shared.ys + buffer * Shared::Y::size,
                                       row_of<T>(flow.y(), chunk.batch, chunk.token + token, unit.head), flow.y().token,
                                       rows, unit.col, call.dims.dhv, flow.y().wide);
  }

  // Reads the weights of this thread's token, one slab ahead.
  __device__ __forceinline__ void load_weights(const SlabPlace& place, const Chunk& chunk) {
    const int token = place.slab * Tile::slab + static_cast<int>(threadIdx.x);
    const bool valid = threadIdx.x < Tile::slab && token < chunk.length;
    const std::int64_t at = call.dims.vector(chunk, unit.head);
    weight = valid ? flow.weight(at + token) : Real{0};
    if (unit.col == 0 && valid) {
      const std::int64_t chunk_at = of_chunk(place.number);
      n_weight = flow.n_weight(at + token, call.gates.b_last[chunk_at], call.gates.m_end[chunk_at]);
    } else {
      n_weight = 0;
    }
  }

  // Where a number of a chunk and this head lies.
  [[nodiscard]] __device__ __forceinline__ std::int64_t of_chunk(int number) const {
    return static_cast<std::int64_t>(number) * call.dims.heads + unit.head;
  }

  // Stores the state at the border of a chunk, and lets it decay over the chunk.
  __device__ __forceinline__ void enter_chunk(int number) {
    const std::int64_t at = of_chunk(number);
    const Real decay = call.gates.gbar[at];
    if (Which == Pass::proper) {
      store_chunk_state(C, static_cast<Stored*>(flow.stored_C()) + call.dims.state(number, unit.head), unit.row,
                        call.dims.dqk, unit.col, call.dims.padded_dhv());
      if (carries_n) flow.store_n(at * call.dims.dqk + n_row, n);
      if (!forward) store_product(number, decay);
    }
#pragma unroll
    for (Real& value : C.x) value *= decay;
    n *= flow.n_decay(decay, call.gates.b_last[at], call.gates.m_start[at], call.gates.m_end[at]);
  }

  // Stores this warp's share of <C, dC> + <n, dn>, with C and n of the chunk's start and dC and dn before its decay.
  // ChunkEnd of gates/grad_gates.cu says what it is for.
  __device__ __forceinline__ void store_product(int number, Real decay) {
    const std::int64_t at = of_chunk(number);
    double share = 0;
    if (carries_n) {
      share = static_cast<double>(n) *
              static_cast<double>(static_cast<const Norm*>(call.stored.n)[at * call.dims.dqk + n_row]);
    }
    const double product =
        state_product(C, static_cast<const Stored*>(call.stored.C) + call.dims.state(number, unit.head), unit.row,
                      call.dims.dqk, unit.col, call.dims.padded_dhv(), share) *
        static_cast<double>(decay);
    const int tile = unit.row / tile_rows * tiles_across + unit.col / Tile::width;
    const int part = tile * block_warps + threadIdx.x / warp_size;
    if (threadIdx.x % warp_size == 0) call.sums.through[at * call.sums.through_parts + part] = product;
  }

  // Adds a slab: C += (w X)^T Y, with the weights on X, the smaller operand, and n += X^T w.
  __device__ __forceinline__ void multiply(int buffer) {
    const T* x = shared.xs + buffer * Shared::X::size;
    const Real* slab_weights = shared.weights + buffer * Tile::slab;
    if (carries_n) {
#pragma unroll 16
      for (int t = 0; t < Tile::slab; ++t)
        n += shared.n_weights[buffer * Tile::slab + t] *
             static_cast<Norm>(widen<Real>(x[t * Shared::X::stride + threadIdx.x]));
    }
    const Real scale = slab_scale<T>(slab_weights);
    if (scale != 1) {
#pragma unroll
      for (Real& value : C.x) value *= scale;
    }
    weighted_product(C, x, Shared::X::stride, shared.ys + buffer * Shared::Y::size, Shared::Y::stride, Tile::slab,
                     slab_weights, scale);
    if (scale != 1) {
#pragma unroll
      for (Real& value : C.x) value /= scale;
    }
  }

  const Call<Real>& call;
  Shared shared;
  StateUnit unit;
  int x_head;  // this head's, in K or Q
  int tiles_across;
  Flow<T, Direction> flow;
  Segment<Real> segment;
  bool ends_sequence;
  int n_row;
  bool carries_n;
  int slabs_per_chunk;
  int slabs = 0;                  // of the segment
  Real* own = nullptr;            // this segment's place among the totals, if there are any
  Norm* own_n = nullptr;          // and its n
  Accumulator<T, Tile::width> C;  // the tile
  Norm n = 0;                     // element n_row of n, in the threads that carry it
  Real weight = 0;                // of this thread's token in the next slab
  Norm n_weight = 0;
};

}  // namespace tfla::cuda
