// Stage `states`: C = gbar C + (abar K)^T V over the chunks of a sequence, and its reverse-time twin
// dC = gbar dC + (scale qbar / den Q)^T dH. A block owns a tile of the state and keeps it in registers all the way.
#include "cuda/launch.h"
#include "cuda/portable/device.cuh"

namespace tfla::cuda {

namespace {

enum class Time { forward, reverse };

template <class T>
struct StatesPlan {
  using Tile = Config<T>;
  static constexpr int x_size = SharedTile<T, Tile::slab, tile_rows>::size;
  static constexpr int y_size = SharedTile<T, Tile::slab, Tile::width>::size;
  static constexpr int bytes =
      2 * (x_size + y_size) * static_cast<int>(sizeof(T)) + 2 * Tile::slab * static_cast<int>(sizeof(double));
};

// What differs between the two directions of time.
template <class T, Time Direction>
struct Flow {
  using Real = typename Config<T>::Real;
  const Call<Real>& call;
  int head;

  __device__ const Rows& x() const { return Direction == Time::forward ? call.k : call.q; }
  __device__ const Rows& y() const { return Direction == Time::forward ? call.v : call.dh; }
  __device__ const StateRows& from_C() const { return Direction == Time::forward ? call.C0 : call.dC_last; }
  __device__ const StateRows& from_n() const { return Direction == Time::forward ? call.n0 : call.dn_last; }
  __device__ const StateRows& to_C() const { return Direction == Time::forward ? call.C_last : call.dC0; }
  __device__ const StateRows& to_n() const { return Direction == Time::forward ? call.n_last : call.dn0; }
  __device__ void* stored_C() const { return Direction == Time::forward ? call.states : call.dstates; }
  __device__ Real* stored_n() const { return Direction == Time::forward ? call.n_states : call.dn_states; }
  // Weight of a token in C.
  __device__ Real weight(std::int64_t at) const {
    if (Direction == Time::forward) return call.abar[at];
    return static_cast<Real>(call.scale) * call.qbar[at] * call.inverse[at];
  }
  // And in n.
  __device__ Real n_weight(std::int64_t at) const {
    if (Direction == Time::forward) return call.abar[at];
    return call.exact ? static_cast<Real>(call.scale) * call.qbar[at] * call.deta[at] : Real{0};
  }
};

template <class T, Time Direction>
__global__ void __launch_bounds__(block_threads)
    states_kernel(Call<typename Config<T>::Real> call, int dqk_tiles, int dhv_tiles) {
  using Tile = Config<T>;
  using Real = typename Tile::Real;
  using Stored = typename Tile::Stored;
  using Plan = StatesPlan<T>;
  extern __shared__ __align__(16) unsigned char memory[];
  T* xs = reinterpret_cast<T*>(memory);
  T* ys = xs + 2 * Plan::x_size;
  Real* weights = reinterpret_cast<Real*>(ys + 2 * Plan::y_size);

  std::int64_t unit = blockIdx.x;
  const int col = static_cast<int>(unit % dhv_tiles) * Tile::width;
  unit /= dhv_tiles;
  const int row = static_cast<int>(unit % dqk_tiles) * tile_rows;
  unit /= dqk_tiles;
  const int head = static_cast<int>(unit % call.heads);
  const std::int64_t sequence = unit / call.heads;
  const Flow<T, Direction> flow{call, head};
  const int x_head = head / call.group;

  const std::int64_t start = sequence_start(call, sequence);
  const std::int64_t length = max(sequence_start(call, sequence + 1) - start, static_cast<std::int64_t>(0));
  const int chunks = chunks_of(call, length);
  const std::int64_t first = start / call.L + sequence;
  const int slabs_per_chunk = (call.L + Tile::slab - 1) / Tile::slab;
  const int last_length = static_cast<int>(length - static_cast<std::int64_t>(chunks - 1) * call.L);
  const int last_slabs = chunks == 0 ? 0 : (last_length + Tile::slab - 1) / Tile::slab;
  const int slabs = chunks == 0 ? 0 : (chunks - 1) * slabs_per_chunk + last_slabs;

  Accumulator<T, Tile::width> C;
  const bool carries_n = col == 0 && threadIdx.x < tile_rows && row + static_cast<int>(threadIdx.x) < call.dqk;
  const int n_row = row + static_cast<int>(threadIdx.x);
  Real n = 0;
  C.each([&](int, int r, int, int c, Real& value) {
    const StateRows& from = flow.from_C();
    const bool inside = from.data != nullptr && row + r < call.dqk && col + c < call.dhv;
    value = inside ? static_cast<const Real*>(
                         from.data)[sequence * from.sequence + head * from.head + (row + r) * from.row + col + c]
                   : Real{0};
  });
  if (carries_n && flow.from_n().data != nullptr) {
    const StateRows& from = flow.from_n();
    n = static_cast<const Real*>(from.data)[sequence * from.sequence + head * from.head + n_row];
  }

  // The slabs of the sequence in the order of time: number of the chunk, and the slab in it.
  const auto place = [&](int index, std::int64_t& number, int& slab) {
    if (Direction == Time::reverse) index = slabs - 1 - index;
    number = first + index / slabs_per_chunk;
    slab = index % slabs_per_chunk;
  };
  const auto load = [&](int index, int buffer) {
    std::int64_t number;
    int slab;
    place(index, number, slab);
    const Chunk chunk = call.chunks[number];
    const int token = slab * Tile::slab;
    const int rows = min(Tile::slab, chunk.length - token);
    load_tile<Tile::slab, tile_rows>(xs + buffer * Plan::x_size,
                                     row_of<T>(flow.x(), chunk.batch, chunk.token + token, x_head), flow.x().token,
                                     rows, row, call.dqk, flow.x().wide);
    load_tile<Tile::slab, Tile::width>(ys + buffer * Plan::y_size,
                                       row_of<T>(flow.y(), chunk.batch, chunk.token + token, head), flow.y().token,
                                       rows, col, call.dhv, flow.y().wide);
  };
  const auto multiply = [&](int index, int buffer) {
    std::int64_t number;
    int slab;
    place(index, number, slab);
    const Chunk chunk = call.chunks[number];
    const int token = slab * Tile::slab;
    const int chunk_slabs = (chunk.length + Tile::slab - 1) / Tile::slab;
    const bool enters_chunk = slab == (Direction == Time::forward ? 0 : chunk_slabs - 1);
    if (enters_chunk) {
      Stored* stored = static_cast<Stored*>(flow.stored_C()) + call.state(number, head);
      const Real decay = call.gbar[number * call.heads + head];
      C.each([&](int, int r, int, int c, Real& value) {
        if (row + r < call.dqk && col + c < call.padded_dhv()) {
          stored[static_cast<std::int64_t>(row + r) * call.padded_dhv() + col + c] = narrow<Stored>(value);
        }
        value *= decay;
      });
      if (carries_n) {
        flow.stored_n()[(number * call.heads + head) * call.dqk + n_row] = n;
        n *= decay;
      }
    }
    // Weights go onto X, which is the smaller operand; n takes the unrounded keys.
    T* x = xs + buffer * Plan::x_size;
    const std::int64_t at = call.vector(chunk, head) + token;
    const int rows = min(Tile::slab, chunk.length - token);
    if (threadIdx.x < Tile::slab) {
      const bool valid = static_cast<int>(threadIdx.x) < rows;
      weights[threadIdx.x] = valid ? flow.weight(at + threadIdx.x) : Real{0};
      weights[Tile::slab + threadIdx.x] = valid ? flow.n_weight(at + threadIdx.x) : Real{0};
    }
    __syncthreads();
    constexpr int stride = SharedTile<T, Tile::slab, tile_rows>::stride;
    if (carries_n) {
      for (int t = 0; t < rows; ++t) n += weights[Tile::slab + t] * widen<Real>(x[t * stride + threadIdx.x]);
      // Every thread below rewrites x.
    }
    __syncthreads();
    for (int e = threadIdx.x; e < Tile::slab * tile_rows; e += block_threads) {
      const int t = e / tile_rows, c = e % tile_rows;
      x[t * stride + c] = t < rows ? narrow<T>(weights[t] * widen<Real>(x[t * stride + c])) : narrow<T>(0.0F);
    }
    __syncthreads();
    block_product<Order::depth_first, Order::depth_first>(C, x, stride, ys + buffer * Plan::y_size,
                                                          SharedTile<T, Tile::slab, Tile::width>::stride, Tile::slab);
  };
  pipeline(slabs, load, multiply);

  C.each([&](int, int r, int, int c, Real& value) {
    const StateRows& to = flow.to_C();
    if (to.data != nullptr && row + r < call.dqk && col + c < call.dhv) {
      static_cast<Real*>(to.data)[sequence * to.sequence + head * to.head + (row + r) * to.row + col + c] = value;
    }
  });
  if (carries_n && flow.to_n().data != nullptr) {
    const StateRows& to = flow.to_n();
    static_cast<Real*>(to.data)[sequence * to.sequence + head * to.head + n_row] = n;
  }
}

template <class T, Time Direction>
void launch(const Call<typename Config<T>::Real>& call, cudaStream_t stream) {
  const int dqk_tiles = (call.dqk + tile_rows - 1) / tile_rows;
  const int dhv_tiles = (call.dhv + Config<T>::width - 1) / Config<T>::width;
  const std::int64_t blocks = call.sequences * call.heads * dqk_tiles * dhv_tiles;
  if (blocks == 0) return;
  launch_blocks("states", states_kernel<T, Direction>, blocks, block_threads, StatesPlan<T>::bytes, stream, call,
                dqk_tiles, dhv_tiles);
}

}  // namespace

template <class T>
void launch_states(const Call<typename Config<T>::Real>& call, cudaStream_t stream) {
  launch<T, Time::forward>(call, stream);
}

template <class T>
void launch_dstates(const Call<typename Config<T>::Real>& call, cudaStream_t stream) {
  launch<T, Time::reverse>(call, stream);
}

#define TFLA_INSTANTIATE(T)                                                            \
  template void launch_states<T>(const Call<typename Config<T>::Real>&, cudaStream_t); \
  template void launch_dstates<T>(const Call<typename Config<T>::Real>&, cudaStream_t)
TFLA_INSTANTIATE(__nv_bfloat16);
TFLA_INSTANTIATE(__half);
TFLA_INSTANTIATE(float);
TFLA_INSTANTIATE(double);
#undef TFLA_INSTANTIATE

}  // namespace tfla::cuda
