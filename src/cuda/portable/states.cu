// Stage `states`: C = gbar C + (abar K)^T V over the chunks of a sequence, and its reverse-time twin
// dC = gbar dC + (scale qbar / den Q)^T dH. A block owns a tile of the state and keeps it in registers all the way.
//
// Where sequences x heads x tiles do not fill the GPU, sequences are cut into segments. A first pass sums each segment
// up from zero, a scan over these totals gives the state at every segment's start, and the pass proper begins there.
// The gate scan is global, so this is exact: every segment works in the final scale.
#include <algorithm>

#include "cuda/common/device.cuh"
#include "cuda/launch.h"

namespace tfla::cuda {

namespace {

template <class T>
struct StatesPlan {
  using Tile = Config<T>;
  static constexpr int x_size = SharedTile<T, Tile::slab, tile_rows>::size;
  static constexpr int y_size = SharedTile<T, Tile::slab, Tile::width>::size;
  static constexpr int bytes =
      2 * (x_size + y_size) * static_cast<int>(sizeof(T)) +
      2 * Tile::slab * static_cast<int>(sizeof(typename Tile::Real) + sizeof(typename Tile::Norm));
};

// What differs between the two directions of time.
template <class T, Time Direction>
struct Flow {
  using Real = typename Config<T>::Real;
  using Norm = typename Config<T>::Norm;
  const Call<Real>& call;
  int head;

  __device__ const Strided& x() const { return Direction == Time::forward ? call.tensors.k : call.tensors.q; }
  __device__ const Strided& y() const { return Direction == Time::forward ? call.tensors.v : call.tensors.dh; }
  __device__ const StridedState& from_C() const {
    return Direction == Time::forward ? call.carried.C0 : call.carried.dC_last;
  }
  __device__ const StridedState& from_n() const {
    return Direction == Time::forward ? call.carried.n0 : call.carried.dn_last;
  }
  __device__ const StridedState& to_C() const {
    return Direction == Time::forward ? call.carried.C_last : call.carried.dC0;
  }
  __device__ const StridedState& to_n() const {
    return Direction == Time::forward ? call.carried.n_last : call.carried.dn0;
  }
  __device__ void* stored_C() const { return Direction == Time::forward ? call.stored.C : call.stored.dC; }
  __device__ void store_n(std::int64_t at, Norm value) const {
    if (Direction == Time::forward)
      static_cast<Norm*>(call.stored.n)[at] = value;
    else
      call.stored.dn[at] = static_cast<Real>(value);
  }
  // Weight of a token in C.
  __device__ Real weight(std::int64_t at) const {
    if (Direction == Time::forward) return call.gates.abar[at];
    return static_cast<Real>(call.rules.scale) * call.gates.qbar[at] * call.gates.inverse[at];
  }
  // And in n, from the gate scan itself: abar is rounded, and q.n would show it.
  __device__ Norm n_weight(std::int64_t at, double b_last, double m_end) const {
    if (Direction == Time::reverse) {
      return call.rules.exact ? static_cast<Norm>(call.rules.scale) * static_cast<Norm>(call.gates.qbar[at]) *
                                    static_cast<Norm>(call.gates.deta[at])
                              : Norm{0};
    }
    if constexpr (is_16_bit<T>)
      return call.gates.abar[at];
    else
      return exp(b_last + call.gates.c[at] - m_end);
  }
  __device__ Norm n_decay(Real decay, double b_last, double m_start, double m_end) const {
    if constexpr (is_16_bit<T>)
      return decay;
    else
      return exp(b_last + m_start - m_end);
  }
};

// float16 has no room for weights far from 1: a power of two brings the largest of a slab there, and the state with it
// while the slab is added.
template <class T>
__device__ __forceinline__ typename Config<T>::Real half_lift(const typename Config<T>::Real* weights) {
  if constexpr (std::is_same_v<T, __half>) {
    float largest = 0;
    for (int t = 0; t < Config<T>::slab; ++t) largest = fmaxf(largest, fabsf(weights[t]));
    if (largest > 0 && isfinite(largest) && (largest < 0x1p-6F || largest > 4))
      return exp2f(fminf(fmaxf(-ceilf(log2f(largest)), -60.0F), 60.0F));
  }
  return 1;
}

template <class Real>
__device__ __forceinline__ Real& state_element(const StridedState& rows, std::int64_t sequence, int head,
                                               std::int64_t r, std::int64_t c) {
  return static_cast<Real*>(rows.data)[sequence * rows.sequence + head * rows.head + r * rows.row + c];
}

// A tile of C, rounded to the stored type, at its place in a chunk's state; neighbours in one store.
template <class T, int N>
__device__ __forceinline__ void store_chunk_state(Accumulator<T, N>& C, typename Config<T>::Stored* stored, int row,
                                                  int rows, int col, int cols) {
  using Sums = Accumulator<T, N>;
  using Stored = typename Config<T>::Stored;
  constexpr int step = is_16_bit<T> ? 2 : 1;
#pragma unroll
  for (int r = 0; r < Sums::rows; ++r) {
    const int i = row + Sums::row_of(r);
    if (i >= rows) continue;
    Stored* line = stored + static_cast<std::int64_t>(i) * cols;
#pragma unroll
    for (int c = 0; c < Sums::cols; c += step) {
      const int j = col + Sums::col_of(c);
      if (j >= cols) continue;
      if constexpr (step == 2) {
        const Stored pair[2] = {narrow<Stored>(C.at(r, c)), narrow<Stored>(C.at(r, c + 1))};
        *reinterpret_cast<uint32_t*>(line + j) = *reinterpret_cast<const uint32_t*>(pair);
      } else {
        line[j] = narrow<Stored>(C.at(r, c));
      }
    }
  }
}

// <C, dC> of a tile of dC, as this warp's share, with the C that is stored at the chunk's start.
template <class T, int N>
__device__ __forceinline__ double state_product(Accumulator<T, N>& dC, const typename Config<T>::Stored* stored,
                                                int row, int rows, int col, int cols, double share) {
  using Sums = Accumulator<T, N>;
  using Stored = typename Config<T>::Stored;
  using Wide = typename Config<T>::Norm;
  Wide sum = 0;
#pragma unroll
  for (int r = 0; r < Sums::rows; ++r) {
    const int i = row + Sums::row_of(r);
    if (i >= rows) continue;
    const Stored* line = stored + static_cast<std::int64_t>(i) * cols;
#pragma unroll
    for (int c = 0; c < Sums::cols; c += is_16_bit<T> ? 2 : 1) {
      const int j = col + Sums::col_of(c);
      if (j >= cols) continue;
      if constexpr (is_16_bit<T>) {
        const float2 pair = arch::unpack(*reinterpret_cast<const uint32_t*>(line + j), Stored{});
        sum += dC.at(r, c) * pair.x + dC.at(r, c + 1) * pair.y;
      } else {
        sum += static_cast<Wide>(dC.at(r, c)) * static_cast<Wide>(line[j]);
      }
    }
  }
  double total = share + static_cast<double>(sum);
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) total += __shfl_xor_sync(0xFFFFFFFFU, total, offset);
  return total;
}

enum class Pass { totals, proper };

// The chunks of one segment of a sequence.
template <class Real>
struct Segment {
  std::int64_t first;  // number of the first chunk of the sequence
  int chunks;          // of the sequence
  int low, high;       // chunks [low, high) of the segment

  __device__ Segment(const Call<Real>& call, std::int64_t sequence, int index, int chunks_per_segment) {
    const std::int64_t start = sequence_start(call, sequence);
    const std::int64_t length = max(sequence_start(call, sequence + 1) - start, static_cast<std::int64_t>(0));
    chunks = chunks_of(call, length);
    first = first_chunk(call, sequence);
    low = min(index * chunks_per_segment, chunks);
    high = min(low + chunks_per_segment, chunks);
  }
};

// Where the C and n of a piece lie among the totals.
template <class Real>
__device__ __forceinline__ Real* segment_state(const Call<Real>& call, std::int64_t sequence, int head, int piece) {
  const std::int64_t size = static_cast<std::int64_t>(call.dims.dqk) * call.dims.padded_dhv();
  return call.stored.segment_C +
         ((sequence * call.dims.heads + head) * call.dims.segments * call.dims.pieces + piece) * size;
}
template <class T>
__device__ __forceinline__ typename Config<T>::Norm* segment_norm(const Call<typename Config<T>::Real>& call,
                                                                  std::int64_t sequence, int head, int piece) {
  return static_cast<typename Config<T>::Norm*>(call.stored.segment_n) +
         ((sequence * call.dims.heads + head) * call.dims.segments * call.dims.pieces + piece) * call.dims.dqk;
}

template <class T, Time Direction, Pass Which>
__global__ void __launch_bounds__(block_threads, Config<T>::blocks + (is_16_bit<T> ? 1 : 0))
    states_kernel(Call<typename Config<T>::Real> call, int dqk_tiles, int dhv_tiles) {
  using Tile = Config<T>;
  using Real = typename Tile::Real;
  using Stored = typename Tile::Stored;
  using Plan = StatesPlan<T>;
  using Norm = typename Tile::Norm;
  using Sums = Accumulator<T, Tile::width>;
  extern __shared__ __align__(16) unsigned char memory[];
  T* xs = reinterpret_cast<T*>(memory);
  T* ys = xs + 2 * Plan::x_size;
  Norm* n_weights = reinterpret_cast<Norm*>(ys + 2 * Plan::y_size);  // [2][slab]
  Real* weights = reinterpret_cast<Real*>(n_weights + 2 * Tile::slab);

  unsigned unit = blockIdx.x;
  const int col = static_cast<int>(unit % dhv_tiles) * Tile::width;
  unit /= dhv_tiles;
  const int row = static_cast<int>(unit % dqk_tiles) * tile_rows;
  unit /= dqk_tiles;
  const int index = static_cast<int>(unit % call.dims.segments);
  unit /= call.dims.segments;
  const int head = static_cast<int>(unit % call.dims.heads);
  const std::int64_t sequence = unit / call.dims.heads;
  const Flow<T, Direction> flow{call, head};
  const int x_head = head / call.dims.group;
  const Segment<Real> segment(call, sequence, index, call.dims.chunks_per_segment);
  // An empty sequence still passes its state on.
  if (segment.low == segment.high && (index > 0 || segment.chunks > 0)) return;
  const bool ends_sequence = Direction == Time::forward ? segment.high == segment.chunks : index == 0;
  if (Which == Pass::totals && ends_sequence) return;  // nothing follows

  const int slabs_per_chunk = (call.dims.L + Tile::slab - 1) / Tile::slab;
  int slabs = 0;
  if (segment.low < segment.high) {
    const int last_length = call.packing.chunks[segment.first + segment.high - 1].length;
    slabs = (segment.high - segment.low - 1) * slabs_per_chunk + (last_length + Tile::slab - 1) / Tile::slab;
  }

  Sums C;
  C.clear();
  const int n_row = row + static_cast<int>(threadIdx.x);
  const bool carries_n = col == 0 && threadIdx.x < tile_rows && n_row < call.dims.dqk;
  Norm n = 0;
  Real* own = call.dims.segments > 1 ? segment_state(call, sequence, head, index) : nullptr;
  Norm* own_n = own == nullptr ? nullptr : segment_norm<T>(call, sequence, head, index);
  if (Which == Pass::proper) {
    const StridedState& from = flow.from_C();
    const StridedState& from_n = flow.from_n();
    C.each([&](int, int r, int, int c, Real& value) {
      if (row + r >= call.dims.dqk || col + c >= call.dims.dhv) return;
      if (own != nullptr)
        value = own[static_cast<std::int64_t>(row + r) * call.dims.padded_dhv() + col + c];
      else if (from.data != nullptr)
        value = state_element<Real>(from, sequence, head, row + r, col + c);
    });
    if (carries_n && own != nullptr)
      n = own_n[n_row];
    else if (carries_n && from_n.data != nullptr)
      n = state_element<Real>(from_n, sequence, head, 0, n_row);
  }

  // The slabs of the segment in the order of time: number of the chunk, and the slab in it.
  const auto place = [&](int slab_index, std::int64_t& number, int& slab) {
    if (Direction == Time::reverse) slab_index = slabs - 1 - slab_index;
    number = segment.first + segment.low + slab_index / slabs_per_chunk;
    slab = slab_index % slabs_per_chunk;
  };
  const auto load = [&](int slab_index, int buffer) {
    std::int64_t number;
    int slab;
    place(slab_index, number, slab);
    const Chunk chunk = call.packing.chunks[number];
    const int token = slab * Tile::slab;
    const int rows = min(Tile::slab, chunk.length - token);
    load_tile<Tile::slab, tile_rows>(xs + buffer * Plan::x_size,
                                     row_of<T>(flow.x(), chunk.batch, chunk.token + token, x_head), flow.x().token,
                                     rows, row, call.dims.dqk, flow.x().wide);
    load_tile<Tile::slab, Tile::width>(ys + buffer * Plan::y_size,
                                       row_of<T>(flow.y(), chunk.batch, chunk.token + token, head), flow.y().token,
                                       rows, col, call.dims.dhv, flow.y().wide);
  };
  // The weight of this thread's token of a slab, read one slab ahead.
  Real weight = 0;
  Norm n_weight = 0;
  const auto load_weights = [&](int slab_index) {
    std::int64_t number;
    int slab;
    place(slab_index, number, slab);
    const Chunk chunk = call.packing.chunks[number];
    const int token = slab * Tile::slab + static_cast<int>(threadIdx.x);
    const bool valid = threadIdx.x < Tile::slab && token < chunk.length;
    const std::int64_t at = call.dims.vector(chunk, head);
    weight = valid ? flow.weight(at + token) : Real{0};
    if (col == 0 && valid) {
      n_weight = flow.n_weight(at + token, call.gates.b_last[number * call.dims.heads + head],
                               call.gates.m_end[number * call.dims.heads + head]);
    } else {
      n_weight = 0;
    }
  };
  // This warp's share of <C, dC> + <n, dn>, with the C and n stored for the start of a chunk.
  const auto product_with = [&](std::int64_t number) {
    const std::int64_t unit = number * call.dims.heads + head;
    double share = 0;
    if (carries_n) {
      share = static_cast<double>(n) *
              static_cast<double>(static_cast<const Norm*>(call.stored.n)[unit * call.dims.dqk + n_row]);
    }
    return state_product(C, static_cast<const Stored*>(call.stored.C) + call.dims.state(number, head), row,
                         call.dims.dqk, col, call.dims.padded_dhv(), share);
  };
  const auto enter_chunk = [&](std::int64_t number, const Chunk& chunk) {
    const std::int64_t unit = number * call.dims.heads + head;
    const Real decay = call.gates.gbar[unit];
    if (Which == Pass::proper) {
      store_chunk_state(C, static_cast<Stored*>(flow.stored_C()) + call.dims.state(number, head), row, call.dims.dqk,
                        col, call.dims.padded_dhv());
      if (carries_n) flow.store_n(unit * call.dims.dqk + n_row, n);
      if (Direction == Time::reverse) {
        // See gate_gradients.cu for what it is for.
        const double product = product_with(number) * static_cast<double>(decay);
        const int part = (row / tile_rows * dhv_tiles + col / Tile::width) * block_warps + threadIdx.x / 32;
        if (threadIdx.x % 32 == 0) call.sums.through[unit * call.sums.through_parts + part] = product;
      }
    }
#pragma unroll
    for (Real& value : C.x) value *= decay;
    n *= flow.n_decay(decay, call.gates.b_last[unit], call.gates.m_start[unit], call.gates.m_end[unit]);
  };
  // Weights go onto X, which is the smaller operand.
  const auto multiply = [&](int buffer) {
    constexpr int stride = SharedTile<T, Tile::slab, tile_rows>::stride;
    const T* x = xs + buffer * Plan::x_size;
    const Real* slab_weights = weights + buffer * Tile::slab;
    if (carries_n) {
#pragma unroll 16
      for (int t = 0; t < Tile::slab; ++t)
        n += n_weights[buffer * Tile::slab + t] * static_cast<Norm>(widen<Real>(x[t * stride + threadIdx.x]));
    }
    const Real lift = half_lift<T>(slab_weights);
    if (lift != 1) {
#pragma unroll
      for (Real& value : C.x) value *= lift;
    }
    weighted_product(C, x, stride, ys + buffer * Plan::y_size, SharedTile<T, Tile::slab, Tile::width>::stride,
                     Tile::slab, slab_weights, lift);
    if (lift != 1) {
#pragma unroll
      for (Real& value : C.x) value /= lift;
    }
  };

  if (slabs > 0) {
    load(0, 0);
    arch::commit_copies();
    load_weights(0);
  }
  for (int index = 0; index < slabs; ++index) {
    const int buffer = index % 2;
    if (threadIdx.x < Tile::slab) {
      weights[buffer * Tile::slab + threadIdx.x] = weight;
      n_weights[buffer * Tile::slab + threadIdx.x] = n_weight;
    }
    arch::wait_copies<0>();
    __syncthreads();  // the slab is there, and nobody reads the other buffer any more
    if (index + 1 < slabs) {
      load(index + 1, 1 - buffer);
      load_weights(index + 1);
    }
    arch::commit_copies();
    std::int64_t number;
    int slab;
    place(index, number, slab);
    const Chunk chunk = call.packing.chunks[number];
    const int chunk_slabs = (chunk.length + Tile::slab - 1) / Tile::slab;
    if (slab == (Direction == Time::forward ? 0 : chunk_slabs - 1)) enter_chunk(number, chunk);
    multiply(buffer);
  }

  if (Which == Pass::totals) {
    C.each([&](int, int r, int, int c, Real& value) {
      if (row + r < call.dims.dqk && col + c < call.dims.padded_dhv())
        own[static_cast<std::int64_t>(row + r) * call.dims.padded_dhv() + col + c] = value;
    });
    if (carries_n) own_n[n_row] = n;
    return;
  }
  if (!ends_sequence) return;
  const StridedState& to = flow.to_C();
  C.each([&](int, int r, int, int c, Real& value) {
    if (to.data != nullptr && row + r < call.dims.dqk && col + c < call.dims.dhv)
      state_element<Real>(to, sequence, head, row + r, col + c) = value;
  });
  if (carries_n && flow.to_n().data != nullptr)
    state_element<Real>(flow.to_n(), sequence, head, 0, n_row) = static_cast<Real>(n);
}

// Elements of a state that a thread of the scan takes together. Rows are padded to eight.
template <class Real>
constexpr int scan_width = 16 / static_cast<int>(sizeof(Real));

// Numbers that lie side by side and go through memory together.
template <class Number, int Count>
struct alignas(Count * sizeof(Number)) Group {
  static constexpr int count = Count;
  Number x[Count];
};

// Totals of the pieces become the states that segments start from: the total of a segment's first piece is replaced by
// the sum of those before it, each decayed by what lies between. `parts` blocks share a state.
template <class T, Time Direction>
__global__ void __launch_bounds__(block_threads) segment_scan_kernel(Call<typename Config<T>::Real> call, int parts) {
  using Real = typename Config<T>::Real;
  using Norm = typename Config<T>::Norm;
  arch::after_previous_kernel();
  arch::let_next_kernel_start();
  const unsigned unit = blockIdx.x / parts;
  const int head = static_cast<int>(unit % call.dims.heads);
  const std::int64_t sequence = unit / call.dims.heads;
  const Flow<T, Direction> flow{call, head};
  __shared__ Norm decays[largest_pieces];
  const int pieces = call.dims.pieces;
  for (int p = static_cast<int>(threadIdx.x) / warp_size; p < call.dims.segments * pieces; p += block_warps) {
    const Segment<Real> piece(call, sequence, p, call.dims.chunks_per_piece);
    const auto unit_of = [&](int chunk) { return (piece.first + chunk) * call.dims.heads + head; };
    const int lane = threadIdx.x % warp_size;
    double b = 0;
#pragma unroll 8
    for (int x = piece.low + lane; x < piece.high; x += warp_size) b += call.gates.b_last[unit_of(x)];
#pragma unroll
    for (int offset = warp_size / 2; offset > 0; offset /= 2) b += __shfl_xor_sync(0xFFFFFFFFU, b, offset);
    if (lane == 0 && piece.low < piece.high)
      decays[p] = exp(b + call.gates.m_start[unit_of(piece.low)] - call.gates.m_end[unit_of(piece.high - 1)]);
  }
  __syncthreads();
  const Segment<Real> whole(call, sequence, 0, call.dims.chunks_per_piece);
  const int used = (whole.chunks + call.dims.chunks_per_piece - 1) / call.dims.chunks_per_piece;
  // In the order of time, up to the piece that the last segment begins with; nothing needs totals from there on.
  const int count = used == 0 ? 0 : Direction == Time::forward ? (used - 1) / pieces * pieces : max(used - pieces, 0);
  const auto scan = [&](auto running, const auto& totals) {
    using Number = decltype(running);
    constexpr int ahead = 8;  // loads that are under way together
    if (used == 0) totals(0) = running;
    for (int first = 0; first <= count && used > 0; first += ahead) {
      Number sums[ahead];
      const auto index = [&](int x) { return Direction == Time::forward ? first + x : used - 1 - first - x; };
#pragma unroll
      for (int x = 0; x < ahead; ++x)
        if (first + x < count) sums[x] = totals(index(x));
#pragma unroll
      for (int x = 0; x < ahead; ++x) {
        if (first + x > count) break;
        const int begun = Direction == Time::forward ? index(x) : index(x) + 1;  // of pieces before it
        if (begun % pieces == 0 || first + x == 0) totals(index(x)) = running;
        if (first + x >= count) continue;
        const auto decay = static_cast<decltype(running.x[0] + 0)>(decays[index(x)]);
#pragma unroll
        for (int e = 0; e < Number::count; ++e) running.x[e] = decay * running.x[e] + sums[x].x[e];
      }
    }
  };
  using Wide = Group<Real, scan_width<Real>>;
  const std::int64_t columns = call.dims.padded_dhv(), matrix = call.dims.dqk * columns / Wide::count;
  const std::int64_t step = static_cast<std::int64_t>(parts) * block_threads;
  for (std::int64_t group = blockIdx.x % parts * block_threads + threadIdx.x; group < matrix + call.dims.dqk;
       group += step) {
    if (group >= matrix) {
      const std::int64_t r = group - matrix;
      Group<Norm, 1> first{};
      if (flow.from_n().data != nullptr) first.x[0] = state_element<Real>(flow.from_n(), sequence, head, 0, r);
      scan(first, [&](int index) -> Group<Norm, 1>& {
        return reinterpret_cast<Group<Norm, 1>&>(segment_norm<T>(call, sequence, head, index)[r]);
      });
    } else {
      const std::int64_t element = group * Wide::count, r = element / columns, c = element % columns;
      Wide first{};
      if (flow.from_C().data != nullptr)
#pragma unroll
        for (int e = 0; e < Wide::count; ++e)
          if (c + e < call.dims.dhv) first.x[e] = state_element<Real>(flow.from_C(), sequence, head, r, c + e);
      scan(first, [&](int index) -> Wide& {
        return reinterpret_cast<Wide&>(segment_state(call, sequence, head, index)[element]);
      });
    }
  }
}

template <class T, Time Direction, Pass Which>
void launch(const Call<typename Config<T>::Real>& call, cudaStream_t stream) {
  const int dqk_tiles = (call.dims.dqk + tile_rows - 1) / tile_rows;
  const int dhv_tiles = (call.dims.dhv + Config<T>::width - 1) / Config<T>::width;
  const std::int64_t blocks = call.dims.sequences * call.dims.heads * call.dims.segments * dqk_tiles * dhv_tiles;
  if (blocks == 0) return;
  launch_blocks(Which == Pass::totals ? "segment_totals" : "states", states_kernel<T, Direction, Which>, blocks,
                block_threads, StatesPlan<T>::bytes, stream, call, dqk_tiles, dhv_tiles);
}

}  // namespace

template <class T>
void launch_segment_totals(const Call<typename Config<T>::Real>& call, Time direction, cudaStream_t stream) {
  direction == Time::forward ? launch<T, Time::forward, Pass::totals>(call, stream)
                             : launch<T, Time::reverse, Pass::totals>(call, stream);
}

template <class T>
void launch_segment_scan(const Call<typename Config<T>::Real>& call, Time direction, cudaStream_t stream) {
  const std::int64_t states = call.dims.sequences * call.dims.heads;
  if (states == 0) return;
  const std::int64_t groups =
      static_cast<std::int64_t>(call.dims.dqk) * (call.dims.padded_dhv() / scan_width<typename Config<T>::Real> + 1);
  constexpr std::int64_t wanted_blocks = 1056;  // eight to a multiprocessor of a large GPU, all at once
  const std::int64_t parts =
      std::clamp<std::int64_t>(wanted_blocks / states, 1, (groups + block_threads - 1) / block_threads);
  launch_chained(
      "segment_scan",
      direction == Time::forward ? segment_scan_kernel<T, Time::forward> : segment_scan_kernel<T, Time::reverse>,
      states * parts, block_threads, 0, stream, call, static_cast<int>(parts));
}

template <class T>
void launch_states(const Call<typename Config<T>::Real>& call, cudaStream_t stream) {
  launch<T, Time::forward, Pass::proper>(call, stream);
}

template <class T>
void launch_grad_states(const Call<typename Config<T>::Real>& call, cudaStream_t stream) {
  launch<T, Time::reverse, Pass::proper>(call, stream);
}

#define TFLA_INSTANTIATE(T)                                                                          \
  template void launch_segment_totals<T>(const Call<typename Config<T>::Real>&, Time, cudaStream_t); \
  template void launch_segment_scan<T>(const Call<typename Config<T>::Real>&, Time, cudaStream_t);   \
  template void launch_states<T>(const Call<typename Config<T>::Real>&, cudaStream_t);               \
  template void launch_grad_states<T>(const Call<typename Config<T>::Real>&, cudaStream_t)
TFLA_INSTANTIATE(__nv_bfloat16);
TFLA_INSTANTIATE(__half);
TFLA_INSTANTIATE(float);
TFLA_INSTANTIATE(double);
#undef TFLA_INSTANTIATE

}  // namespace tfla::cuda
