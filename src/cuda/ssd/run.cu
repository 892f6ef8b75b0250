// The state space dual on CUDA: runs the launches of a plan, among them those of the mLSTM inside.
#include <algorithm>
#include <cstddef>
#include <initializer_list>
#include <type_traits>

#include "cuda/epilogue.h"
#include "cuda/make_call.h"
#include "cuda/run_plan.h"
#include "cuda/ssd/call.h"
#include "plan/backend.h"
#include "plan/operators/ssd_backend.h"

namespace tfla::cuda::ssd {

namespace {

PerHead per_head(const TensorView& view) {
  if (!view.given()) return {};
  return {const_cast<void*>(view.data), view.strides[0], view.rank == 2 ? view.strides[1] : 0, gate_type(view)};
}

// Whether every row of the tensors that are given can be moved in pieces of 16 bytes.
bool all_wide(const SsdPlan& plan, std::initializer_list<Strided> tensors) {
  const MlstmShape& shape = plan.scan.shape;
  return shape.dhv * item_size(shape.dtype) % 16 == 0 &&
         std::ranges::all_of(tensors, [](const Strided& tensor) { return tensor.data == nullptr || tensor.wide; });
}

// Tensors of scratch.
template <class Real>
MutableTensorView gates_view(const SsdPlan& plan, Real* data) {
  const MlstmShape& shape = plan.scan.shape;
  return {data, plan.scan.compute, {shape.batch, shape.tokens, shape.heads}};
}
template <class Real>
MutableTensorView matrices_view(const SsdPlan& plan, Real* data) {
  const MlstmShape& shape = plan.scan.shape;
  if (data == nullptr) return {};
  return {data, plan.scan.compute, {shape.sequences, shape.heads, shape.dqk, shape.dhv}};
}
template <class Real>
MutableMlstmState state_view(const SsdPlan& plan, const SsdState<Real>& state) {
  const MlstmShape& shape = plan.scan.shape;
  if (state.C == nullptr) return {};
  return {matrices_view(plan, state.C),
          {state.n, plan.scan.compute, {shape.sequences, shape.heads, shape.dqk}},
          {state.m, plan.scan.compute, {shape.sequences, shape.heads}}};
}
MlstmState read_only(const MutableMlstmState& state) { return {state.C, state.n, state.m}; }

Matrices matrices(const TensorView& view) {
  return {const_cast<void*>(view.data), view.strides[0], view.strides[1], view.strides[2], view.strides[3]};
}

// A state of the caller, if it is given, goes to scratch; with zeros where the scan has n and m.
template <class Real>
void turn(const SsdPlan& plan, const TensorView& from, Real* to, Real* zeros, cudaStream_t stream) {
  if (!from.given()) return;
  const MlstmShape& shape = plan.scan.shape;
  const std::int64_t units = shape.sequences * shape.heads;
  launch_turn_states(Turn<Real>{.from = matrices(from),
                                .to = matrices(matrices_view(plan, to)),
                                .units = units,
                                .heads = static_cast<int>(shape.heads),
                                .rows = static_cast<int>(shape.dhv),
                                .columns = static_cast<int>(shape.dqk),
                                .zeros = zeros,
                                .zero_count = zeros == nullptr ? 0 : units * shape.dqk},
                     stream);
}
template <class Real>
void turn_back(const SsdPlan& plan, Real* from, const MutableTensorView& to, cudaStream_t stream) {
  const MlstmShape& shape = plan.scan.shape;
  launch_turn_states(Turn<Real>{.from = matrices(matrices_view(plan, from)),
                                .to = matrices(to),
                                .units = shape.sequences * shape.heads,
                                .heads = static_cast<int>(shape.heads),
                                .rows = static_cast<int>(shape.dqk),
                                .columns = static_cast<int>(shape.dhv),
                                .zeros = nullptr,
                                .zero_count = 0},
                     stream);
}

// What all three operations have.
template <class Real, class Args>
Call<Real> call_of(const Args& args, const SsdPlan& plan) {
  const MlstmShape& shape = plan.scan.shape;
  Call<Real> call{};
  call.dims = {.batch = shape.batch,
               .tokens = shape.tokens,
               .sequences = shape.sequences,
               .heads = static_cast<int>(shape.heads),
               .group = static_cast<int>(shape.heads / shape.qk_heads),
               .P = static_cast<int>(shape.dhv),
               .S = static_cast<int>(shape.dqk)};
  call.rules = {.time_step = {args.options.dt_softplus, args.options.dt_min, args.options.dt_max},
                .dt_type = gate_type(args.dt)};
  Tensors& tensors = call.tensors;
  tensors.x = strided(args.x);
  tensors.z = strided(args.z);
  tensors.dt = strided(args.dt);
  tensors.A = per_head(args.A);
  tensors.D = per_head(args.D);
  tensors.dt_bias = per_head(args.dt_bias);
  if constexpr (requires { args.ungated; }) {
    tensors.ungated = strided(args.ungated);
    call.sequences = {.cu_seqlens = args.cu_seqlens.data,
                      .cu_stride = args.cu_seqlens.strides[0],
                      .cu_is_64_bit = args.cu_seqlens.dtype == DType::int64,
                      .seq_idx = args.seq_idx.data,
                      .seq_idx_batch = args.seq_idx.strides[0],
                      .seq_idx_token = args.seq_idx.strides[1],
                      .seq_idx_is_64_bit = args.seq_idx.dtype == DType::int64};
  }
  return call;
}

template <class T>
void forward_as(const SsdForward& args, const SsdPlan& plan, std::byte* scratch, cudaStream_t stream) {
  using Real = typename Config<T>::Real;
  Arena arena(scratch);
  Call<Real> call = call_of<Real>(args, plan);
  const SsdScratch<Real>& own = call.scratch = SsdScratch<Real>(arena, plan);
  // What the epilogue reads lies where it writes.
  const MutableTensorView& h = args.ungated.given() ? args.ungated : args.y;
  Tensors& tensors = call.tensors;
  tensors.y = strided(args.y);
  tensors.h = strided(h);
  tensors.wide = all_wide(plan, {tensors.x, tensors.z, tensors.y, tensors.h});
  const bool fused = has_fused_epilogue(plan);
  const auto scan = [&] {
    const MlstmForward inside{.q = args.C,
                              .k = args.B,
                              .v = args.x,
                              .i = gates_view(plan, own.log_i),
                              .f = gates_view(plan, own.log_f),
                              .h = fused ? args.y : h,
                              .initial_state = read_only(state_view(plan, own.initial)),
                              .last_state = state_view(plan, own.last),
                              .cu_seqlens = args.cu_seqlens,
                              .options = plan.scan.options};
    if constexpr (std::is_same_v<Real, float>) {
      if (fused) return forward_with_epilogue(inside, plan.scan, {own.D, tensors.z, tensors.ungated}, own.scan, stream);
    }
    backend(Device::cuda).forward(inside, plan.scan, own.scan, stream);
  };
  for (const Launch& launch : plan.launches) {
    switch (static_cast<SsdKernel>(launch.kernel)) {
      case SsdKernel::turn_states: turn(plan, args.initial_state, own.initial.C, own.initial.n, stream); break;
      case SsdKernel::time_steps: launch_time_steps<T>(call, stream); break;
      case SsdKernel::scan: scan(); break;
      case SsdKernel::epilogue: launch_epilogue<T>(call, stream); break;
      case SsdKernel::turn_back: turn_back(plan, own.last.C, args.last_state, stream); break;
      default: refuse_launch();
    }
  }
}

template <class T>
void backward_as(const SsdBackward& args, const SsdPlan& plan, std::byte* scratch, cudaStream_t stream) {
  using Real = typename Config<T>::Real;
  Arena arena(scratch);
  Call<Real> call = call_of<Real>(args, plan);
  const SsdScratch<Real>& own = call.scratch = SsdScratch<Real>(arena, plan);
  const MlstmShape& shape = plan.scan.shape;
  const TensorView own_dh(own.dh, shape.dtype, {shape.batch, shape.tokens, shape.heads, shape.dhv});
  const TensorView dh = args.z.given() ? own_dh : args.dy;
  Tensors& tensors = call.tensors;
  tensors.dy = strided(args.dy);
  tensors.dh = strided(dh);
  tensors.dx = strided(args.dx);
  tensors.dz = strided(args.dz);
  tensors.wide =
      all_wide(plan, {tensors.x, tensors.z, tensors.ungated, tensors.dy, tensors.dh, tensors.dx, tensors.dz});
  tensors.ddt = strided(args.ddt);
  tensors.dA = per_head(args.dA);
  tensors.dD = per_head(args.dD);
  tensors.ddt_bias = per_head(args.ddt_bias);
  const auto scan = [&] {
    const MlstmBackward inside{.q = args.C,
                               .k = args.B,
                               .v = args.x,
                               .i = gates_view(plan, own.log_i),
                               .f = gates_view(plan, own.log_f),
                               .dh = dh,
                               .dq = args.dC,
                               .dk = args.dB,
                               .dv = args.dx,
                               .di = gates_view(plan, own.di),
                               .df = gates_view(plan, own.df),
                               .initial_state = read_only(state_view(plan, own.initial)),
                               .dlast_state = {.C = matrices_view(plan, own.dlast), .n = {}},
                               .dinitial_state = {.C = matrices_view(plan, own.dinitial), .n = {}},
                               .cu_seqlens = args.cu_seqlens,
                               .options = plan.scan.options};
    backend(Device::cuda).backward(inside, plan.scan, own.scan, stream);
  };
  for (const Launch& launch : plan.launches) {
    switch (static_cast<SsdKernel>(launch.kernel)) {
      case SsdKernel::turn_states:
        turn(plan, args.initial_state, own.initial.C, own.initial.n, stream);
        turn<Real>(plan, args.dlast_state, own.dlast, nullptr, stream);
        break;
      case SsdKernel::time_steps: launch_time_steps<T>(call, stream); break;
      case SsdKernel::epilogue_gradients: launch_epilogue_gradients<T>(call, stream); break;
      case SsdKernel::scan: scan(); break;
      case SsdKernel::skip_gradients: launch_skip_gradients<T>(call, stream); break;
      case SsdKernel::time_step_gradients: launch_time_step_gradients<T>(call, stream); break;
      case SsdKernel::sum_tokens: launch_sum_tokens(call, stream); break;
      case SsdKernel::turn_back: turn_back(plan, own.dinitial, args.dinitial_state, stream); break;
      default: refuse_launch();
    }
  }
}

template <class T>
void step_as(const SsdStep& args, const SsdPlan& plan, cudaStream_t stream) {
  using Real = typename Config<T>::Real;
  StepCall<Real> step{.call = call_of<Real>(args, plan),
                      .B = strided(args.B),
                      .C = strided(args.C),
                      .state = strided_state(args.state),
                      .wide = false,
                      .states = args.state.shape[0],
                      .slots = args.slots.data,
                      .slot_stride = args.slots.strides[0],
                      .slots_are_64_bit = args.slots.dtype == DType::int64};
  step.call.tensors.y = strided(args.y);
  step.wide = step.B.wide && step.C.wide && strided(args.state).wide &&
              plan.scan.shape.dqk * item_size(args.state.dtype) % 16 == 0;
  for (const Launch& launch : plan.launches) {
    if (static_cast<SsdKernel>(launch.kernel) != SsdKernel::step) refuse_launch();
    if constexpr (std::is_same_v<T, double>) {
      launch_step<T, double>(step, stream);
    } else {
      switch (args.state.dtype) {
        case DType::bfloat16: launch_step<T, __nv_bfloat16>(step, stream); break;
        case DType::float16: launch_step<T, __half>(step, stream); break;
        default: launch_step<T, float>(step, stream); break;
      }
    }
  }
}

void forward(const SsdForward& args, const SsdPlan& plan, std::byte* scratch, void* stream) {
  check_gpu(plan.scan.gpu);
  with_type(plan.scan.shape.dtype,
            [&](auto type) { forward_as<decltype(type)>(args, plan, scratch, static_cast<cudaStream_t>(stream)); });
}

void backward(const SsdBackward& args, const SsdPlan& plan, std::byte* scratch, void* stream) {
  check_gpu(plan.scan.gpu);
  with_type(plan.scan.shape.dtype,
            [&](auto type) { backward_as<decltype(type)>(args, plan, scratch, static_cast<cudaStream_t>(stream)); });
}

void step(const SsdStep& args, const SsdPlan& plan, std::byte* /*scratch*/, void* stream) {
  check_gpu(plan.scan.gpu);
  with_type(plan.scan.shape.dtype,
            [&](auto type) { step_as<decltype(type)>(args, plan, static_cast<cudaStream_t>(stream)); });
}

}  // namespace

}  // namespace tfla::cuda::ssd

namespace tfla {

const SsdBackend* cuda_ssd_backend() {
  static constexpr SsdBackend backend{
      .forward = cuda::ssd::forward, .backward = cuda::ssd::backward, .step = cuda::ssd::step};
  return &backend;
}

}  // namespace tfla
