// The delta rule on CUDA: runs the launches of a plan.
#include <cmath>
#include <cstddef>
#include <type_traits>

#include "cuda/delta/call.h"
#include "cuda/run_plan.h"
#include "cuda/sm90/delta/entry.h"
#include "cuda/views.h"
#include "plan/operators/delta_backend.h"

namespace tfla::cuda::delta {

namespace {

// A number per head.
Strided per_head(const TensorView& view) {
  if (!view.given()) return {};
  return {const_cast<void*>(view.data), 0, 0, view.strides[0]};
}
Dims dims_of(const DeltaPlan& plan) {
  const DeltaShape& shape = plan.shape;
  return {.batch = shape.batch,
          .tokens = shape.tokens,
          .sequences = shape.sequences,
          .qk_heads = static_cast<int>(shape.qk_heads),
          .heads = static_cast<int>(shape.heads),
          .group = static_cast<int>(shape.heads / shape.qk_heads),
          .dqk = static_cast<int>(shape.dqk),
          .dhv = static_cast<int>(shape.dhv),
          .tile = static_cast<int>(plan.tile),
          .panel = static_cast<int>(plan.panel),
          .tiles_per_row = shape.packed ? 0 : ceil_div(shape.tokens, plan.tile),
          .tiles = delta_tiles(plan)};
}

template <class Real, class Args>
Call<Real> call_of(const Args& args, const DeltaPlan& plan) {
  Call<Real> call{};
  call.dims = dims_of(plan);
  call.rules = {.write = args.options.write,
                .normalize_qk = args.options.normalize_qk,
                .beta_type = gate_type(args.beta),
                .g_type = gate_type(args.g),
                .A_log_type = gate_type(args.A_log),
                .dt_bias_type = gate_type(args.dt_bias),
                .scale = args.options.qk_scale.value_or(1.0 / std::sqrt(static_cast<double>(plan.shape.dqk)))};
  call.tensors.q = strided(args.q);
  call.tensors.k = strided(args.k);
  call.tensors.v = strided(args.v);
  call.tensors.beta = strided(args.beta);
  call.tensors.g = strided(args.g);
  call.tensors.A_log = per_head(args.A_log);
  call.tensors.dt_bias = per_head(args.dt_bias);
  if constexpr (requires { args.h; }) call.tensors.h = strided(args.h);
  if constexpr (requires { args.initial_state; }) {
    call.carried.initial = strided_state(args.initial_state);
    call.cu_seqlens = args.cu_seqlens.data;
    call.cu_stride = args.cu_seqlens.strides[0];
    call.cu_is_64_bit = args.cu_seqlens.dtype == DType::int64;
  }
  return call;
}

// Hopper's kernels, which take bfloat16 alone.
template <class T>
void run_on_hopper(DeltaKernel kernel, const Call<typename Config<T>::Real>& call, cudaStream_t stream) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    if (kernel == DeltaKernel::solve) return sm90::launch_delta_solve(call, stream);
    if (kernel == DeltaKernel::forward_on_chip) return sm90::launch_delta_forward(call, stream);
    if (kernel == DeltaKernel::states_on_chip) return sm90::launch_delta_states(call, stream);
    if (kernel == DeltaKernel::grad_states_on_chip) return sm90::launch_delta_grad_states(call, stream);
  }
  refuse_launch();
}

template <class T>
void run_launch(const Launch& launch, const Call<typename Config<T>::Real>& call, cudaStream_t stream) {
  switch (static_cast<DeltaKernel>(launch.kernel)) {
    case DeltaKernel::norms: return launch_norms<T>(call, stream);
    case DeltaKernel::padding: return launch_padding<T>(call, stream);
    case DeltaKernel::forward: return launch_forward<T>(call, stream);
    case DeltaKernel::solve:
    case DeltaKernel::forward_on_chip:
    case DeltaKernel::states_on_chip:
    case DeltaKernel::grad_states_on_chip:
      return run_on_hopper<T>(static_cast<DeltaKernel>(launch.kernel), call, stream);
    case DeltaKernel::states: return launch_states<T>(call, stream);
    case DeltaKernel::grad_states: return launch_grad_states<T>(call, stream);
    case DeltaKernel::gradients: return launch_gradients<T>(call, stream);
    case DeltaKernel::sum_heads: return launch_sum_heads<T>(call, stream);
    case DeltaKernel::sum_tokens: return launch_sum_tokens(call, stream);
    default: refuse_launch();
  }
}

// Heads [first, first + count) of q and k, and the value heads that go with them.
struct Slice {
  std::int64_t first, count, group;

  template <class View>
  void cut(View& view, int axis, std::int64_t heads) const {
    if (!view.given()) return;
    using Byte =
        std::conditional_t<std::is_const_v<std::remove_pointer_t<decltype(view.data)>>, const std::byte, std::byte>;
    view.data = static_cast<Byte*>(view.data) + first * heads * view.strides[axis] * item_size(view.dtype);
    view.shape[axis] = count * heads;
  }
  [[nodiscard]] DeltaBackward of(DeltaBackward args) const {
    for (TensorView* view : {&args.q, &args.k}) cut(*view, 2, 1);
    for (MutableTensorView* view : {&args.dq, &args.dk}) cut(*view, 2, 1);
    for (TensorView* view : {&args.v, &args.beta, &args.g, &args.dh}) cut(*view, 2, group);
    for (MutableTensorView* view : {&args.dv, &args.dbeta, &args.dg}) cut(*view, 2, group);
    for (TensorView* view : {&args.A_log, &args.dt_bias}) cut(*view, 0, group);
    for (MutableTensorView* view : {&args.dA_log, &args.ddt_bias}) cut(*view, 0, group);
    for (TensorView* view : {&args.initial_state, &args.dlast_state}) cut(*view, 1, group);
    cut(args.dinitial_state, 1, group);
    return args;
  }
  [[nodiscard]] DeltaPlan of(DeltaPlan plan) const {
    plan.shape.qk_heads = count;
    plan.shape.heads = count * group;
    plan.slices = 1;
    return plan;
  }
};

template <class T>
void backward_as(const DeltaBackward& args, const DeltaPlan& plan, std::byte* scratch, cudaStream_t stream) {
  using Real = typename Config<T>::Real;
  Call<Real> call = call_of<Real>(args, plan);
  Arena arena(scratch);
  call.scratch = DeltaScratch<Real>(arena, plan);
  call.tensors.dh = strided(args.dh);
  call.tensors.dq = strided(args.dq);
  call.tensors.dk = strided(args.dk);
  call.tensors.dv = strided(args.dv);
  call.tensors.dbeta = strided(args.dbeta);
  call.tensors.dg = strided(args.dg);
  call.tensors.dA_log = per_head(args.dA_log);
  call.tensors.ddt_bias = per_head(args.ddt_bias);
  call.carried.dlast = strided_state(args.dlast_state);
  call.carried.dinitial = strided_state(args.dinitial_state);
  for (const Launch& launch : plan.launches) run_launch<T>(launch, call, stream);
}

void forward(const DeltaForward& args, const DeltaPlan& plan, std::byte* scratch, void* stream) {
  check_gpu(plan.gpu);
  with_type(plan.shape.dtype, [&](auto type) {
    using T = decltype(type);
    using Real = typename Config<T>::Real;
    Call<Real> call = call_of<Real>(args, plan);
    Arena arena(scratch);
    call.scratch = DeltaScratch<Real>(arena, plan);
    call.carried.last = strided_state(args.last_state);
    for (const Launch& launch : plan.launches) run_launch<T>(launch, call, static_cast<cudaStream_t>(stream));
  });
}

void backward(const DeltaBackward& args, const DeltaPlan& plan, std::byte* scratch, void* stream) {
  check_gpu(plan.gpu);
  const std::int64_t heads = plan.shape.qk_heads, most = ceil_div(heads, plan.slices);
  with_type(plan.shape.dtype, [&](auto type) {
    for (std::int64_t first = 0; first < heads; first += most) {
      const Slice slice{first, std::min(most, heads - first), plan.shape.heads / heads};
      backward_as<decltype(type)>(slice.of(args), slice.of(plan), scratch, static_cast<cudaStream_t>(stream));
    }
  });
}

void step(const DeltaStep& args, const DeltaPlan& plan, std::byte* /*scratch*/, void* stream) {
  check_gpu(plan.gpu);
  with_type(plan.shape.dtype, [&](auto type) {
    using T = decltype(type);
    using Real = typename Config<T>::Real;
    const StepCall<Real> step{.call = call_of<Real>(args, plan),
                              .state = strided_state(args.state),
                              .states = args.state.shape[0],
                              .slots = args.slots.data,
                              .slot_stride = args.slots.strides[0],
                              .slots_are_64_bit = args.slots.dtype == DType::int64};
    launch_step<T>(step, static_cast<cudaStream_t>(stream));
  });
}

}  // namespace

}  // namespace tfla::cuda::delta

namespace tfla {

const DeltaBackend* cuda_delta_backend() {
  static constexpr DeltaBackend backend{
      .forward = cuda::delta::forward, .backward = cuda::delta::backward, .step = cuda::delta::step};
  return &backend;
}

}  // namespace tfla
