// The step of the state space dual: every element of a state is read and written once per token. As many lanes as a row
// needs, up to a warp, have 16 bytes of it each, and four rows at a time, so that a CTA is all loads and little else.
#include "cuda/arch/cluster.cuh"
#include "cuda/device.h"
#include "cuda/ssd/tokens.cuh"
#include "cuda/step/portable.cuh"

namespace tfla::cuda::ssd {

namespace {

constexpr int threads = 128;
constexpr int rows_at_once = 4;  // of a thread
template <class State>
constexpr int ctas_per_multiprocessor = sizeof(State) == 8   ? 2
                                        : sizeof(State) == 4 ? 5
                                                             : 4;

// Columns of a row that a thread has at a time: 16 bytes, or one where rows are not aligned.
template <class State, bool Wide>
inline constexpr int piece_size = Wide ? 16 / static_cast<int>(sizeof(State)) : 1;

template <class T, int Size>
struct alignas(Size * sizeof(T) < 16 ? Size * sizeof(T) : 16) Piece {
  T x[Size];
};

// What a token does to the state of a head.
template <class Real>
struct TokenStep {
  tfla::Decay<Real> decay;
  Real weight;
};

// Lanes read dt, A and dt_bias side by side: one after the other, each would be waited for. By whole warps.
template <class Real>
__device__ __forceinline__ TokenStep<Real> token_step(const Call<Real>& call, int batch, std::int64_t t, int head) {
  const Tensors& tensors = call.tensors;
  const PerHead &A = tensors.A, &bias = tensors.dt_bias;
  const int lane = static_cast<int>(threadIdx.x) % warp_size;
  const bool of_A = lane == 1, of_bias = lane == 2;
  const Strided source{of_A ? A.data : of_bias ? bias.data : tensors.dt.data};
  const GateType type = of_A ? A.type : of_bias ? bias.type : call.rules.dt_type;
  const std::int64_t at = of_A ? head * A.head : of_bias ? head * bias.head : gate_at(tensors.dt, batch, t, head);
  Real own = 0;
  if (source.data != nullptr) with_gate(source, type, [&](const auto* data) { own = gate_as<Real>(data[at]); });
  const Real raw = __shfl_sync(0xFFFFFFFFU, own, 0) + __shfl_sync(0xFFFFFFFFU, own, 2);
  const Real dt = rule_of<Real>(call.rules).value(raw);
  return {decay_of<Real>(__shfl_sync(0xFFFFFFFFU, own, 1) * dt), dt};
}

template <class Real>
__device__ __forceinline__ std::int64_t slot_of(const StepCall<Real>& step, std::int64_t row) {
  if (step.slots == nullptr) return row;
  return step.slots_are_64_bit ? static_cast<const std::int64_t*>(step.slots)[row * step.slot_stride]
                               : static_cast<const std::int32_t*>(step.slots)[row * step.slot_stride];
}

// The rows of a thread: number k is first + k * apart. What they take and give besides the state, lane k does for row
// k.
struct Rows {
  int batch, head, first, apart, count;

  [[nodiscard]] __device__ __forceinline__ int row(int k) const { return first + k * apart; }
  [[nodiscard]] __device__ __forceinline__ bool exists(int k) const { return row(k) < count; }
};

// x, z and D of one row.
template <class Real>
struct RowInputs {
  Real x = 0, z = 0, D = 0;

  RowInputs() = default;
  template <class T>
  __device__ __forceinline__ RowInputs(const Tensors& tensors, const Rows& rows, std::int64_t t, int row, T /*type*/) {
    x = widen<Real>(row_of<T>(tensors.x, rows.batch, t, rows.head)[row]);
    if (tensors.z.data != nullptr) z = widen<Real>(row_of<T>(tensors.z, rows.batch, t, rows.head)[row]);
    if (tensors.D.data != nullptr) D = read_number<Real>(tensors.D, rows.head, row);
  }
};

// One token. `state` is where the first row of the thread begins.
template <class T, class State, bool Wide>
__device__ __forceinline__ void take_token(const StepCall<typename Config<T>::Real>& step, const Rows& rows,
                                           State* state, int lane, int lanes, std::int64_t t) {
  using Real = typename Config<T>::Real;
  constexpr int size = piece_size<State, Wide>;
  using Stored = Piece<State, size>;
  using Token = Piece<T, size>;
  const Call<Real>& call = step.call;
  const T* B = row_of<T>(step.B, rows.batch, t, rows.head / call.dims.group);
  const T* C = row_of<T>(step.C, rows.batch, t, rows.head / call.dims.group);
  const std::int64_t apart = rows.apart * step.state.row;
  const bool has_row = lane < rows_at_once && rows.exists(lane);
  RowInputs<Real> inputs;
  Real weights[rows_at_once] = {}, y[rows_at_once] = {};
  tfla::Decay<Real> decay{};
#pragma unroll 1
  for (int base = 0; base < call.dims.S; base += lanes * size) {
    const int column = base + lane * size;
    const bool inside = column < call.dims.S;
    Stored own[rows_at_once] = {};
    Token key{}, query{};
    if (inside) {
#pragma unroll
      for (int k = 0; k < rows_at_once; ++k)
        if (rows.exists(k)) own[k] = *reinterpret_cast<const Stored*>(state + k * apart + column);
      key = *reinterpret_cast<const Token*>(B + column);
      query = *reinterpret_cast<const Token*>(C + column);
    }
    if (base == 0) {  // the state is on its way before anything is waited for
      if (has_row) inputs = RowInputs<Real>(call.tensors, rows, t, rows.row(lane), T{});
      const TokenStep<Real> token = token_step(call, rows.batch, t, rows.head);
      decay = token.decay;
#pragma unroll
      for (int k = 0; k < rows_at_once; ++k) weights[k] = token.weight * __shfl_sync(0xFFFFFFFFU, inputs.x, k, lanes);
    }
    if (!inside) continue;
#pragma unroll
    for (int k = 0; k < rows_at_once; ++k) {
      if (!rows.exists(k)) continue;
#pragma unroll
      for (int e = 0; e < size; ++e) {
        const Real updated = decayed(decay, widen<Real>(own[k].x[e]), weights[k] * widen<Real>(key.x[e]));
        y[k] += widen<Real>(query.x[e]) * updated;
        own[k].x[e] = narrow<State>(updated);
      }
      *reinterpret_cast<Stored*>(state + k * apart + column) = own[k];
    }
  }
  Real out = 0;
#pragma unroll
  for (int k = 0; k < rows_at_once; ++k) {
    for (int offset = lanes / 2; offset > 0; offset /= 2) y[k] += __shfl_xor_sync(0xFFFFFFFFU, y[k], offset);
    if (lane == k) out = y[k];
  }
  if (!has_row) return;
  out = fma(inputs.D, inputs.x, out);
  if (call.tensors.z.data != nullptr) out *= inputs.z * sigmoid(inputs.z);
  row_of<T>(call.tensors.y, rows.batch, t, rows.head)[rows.row(lane)] = narrow<T>(out);
}

template <class T, class State, bool Wide>
__global__ void __launch_bounds__(threads, ctas_per_multiprocessor<State>)
    step_kernel(StepCall<typename Config<T>::Real> step, int lanes, int row_tiles) {
  arch::after_previous_kernel();
  arch::let_next_kernel_start();
  const Dims& dims = step.call.dims;
  const int lane = static_cast<int>(threadIdx.x) % lanes, groups = threads / lanes;
  const int tile = static_cast<int>(blockIdx.x % row_tiles);
  const unsigned unit = blockIdx.x / row_tiles;
  const Rows rows{.batch = static_cast<int>(unit / dims.heads),
                  .head = static_cast<int>(unit % dims.heads),
                  .first = tile * groups * rows_at_once + static_cast<int>(threadIdx.x) / lanes,
                  .apart = groups,
                  .count = dims.P};
  const std::int64_t slot = slot_of(step, rows.batch);
  // The host cannot see slots: any that does not exist is padding.
  if (slot < 0 || slot >= step.states) {
    for (std::int64_t t = 0; lane < rows_at_once && rows.exists(lane) && t < dims.tokens; ++t)
      row_of<T>(step.call.tensors.y, rows.batch, t, rows.head)[rows.row(lane)] = narrow<T>(0.0F);
    return;
  }
  State* state = static_cast<State*>(step.state.data) + slot * step.state.sequence + rows.head * step.state.head +
                 rows.first * step.state.row;
#pragma unroll 1
  for (std::int64_t t = 0; t < dims.tokens; ++t) take_token<T, State, Wide>(step, rows, state, lane, lanes, t);
}

}  // namespace

template <class T, class State>
void launch_step(const StepCall<typename Config<T>::Real>& step, cudaStream_t stream) {
  const int size = step.wide ? piece_size<State, true> : piece_size<State, false>;
  const Dims& dims = step.call.dims;
  int lanes = rows_at_once;
  while (lanes < warp_size && lanes * size < dims.S) lanes *= 2;
  const int tile = threads / lanes * rows_at_once, row_tiles = static_cast<int>(ceil_div(dims.P, tile));
  const std::int64_t ctas = dims.batch * dims.heads * row_tiles;
  if (ctas == 0) return;
  launch_chained("ssd step", step.wide ? step_kernel<T, State, true> : step_kernel<T, State, false>, ctas, threads, 0,
                 stream, step, lanes, row_tiles);
}

#define TFLA_INSTANTIATE(T, State) \
  template void launch_step<T, State>(const StepCall<typename Config<T>::Real>&, cudaStream_t)
#define TFLA_FOR_EACH_STATE(T)        \
  TFLA_INSTANTIATE(T, float);         \
  TFLA_INSTANTIATE(T, __nv_bfloat16); \
  TFLA_INSTANTIATE(T, __half)
TFLA_FOR_EACH_STATE(__nv_bfloat16);
TFLA_FOR_EACH_STATE(__half);
TFLA_FOR_EACH_STATE(float);
TFLA_INSTANTIATE(double, double);
#undef TFLA_FOR_EACH_STATE
#undef TFLA_INSTANTIATE

}  // namespace tfla::cuda::ssd
