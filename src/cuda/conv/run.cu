// The convolution on CUDA: runs the launches of a plan.
#include <cstddef>

#include "cuda/conv/call.h"
#include "cuda/run_plan.h"
#include "cuda/views.h"
#include "plan/operators/conv_backend.h"

namespace tfla::cuda::conv {

namespace {

Rows rows(const TensorView& view) {
  return {const_cast<void*>(view.data), view.strides[0], view.strides[1], view.strides[2]};
}
// A dimension that is not there has the stride 0.
Numbers numbers(const TensorView& view) {
  if (!view.given()) return {};
  return {const_cast<void*>(view.data), {view.strides[0], view.strides[1], view.strides[2]}, gate_type(view)};
}
Integers integers(const TensorView& view) {
  return {view.data, {view.strides[0], view.strides[1]}, view.dtype == DType::int64};
}

Dims dims_of(const ConvPlan& plan) {
  const ConvShape& shape = plan.shape;
  return {.batch = shape.batch,
          .tokens = shape.tokens,
          .channels = shape.channels,
          .sequences = shape.sequences,
          .span = plan.span,
          .tile = plan.tile,
          .spans = plan.spans(),
          .width = static_cast<int>(shape.width),
          .lanes = conv_lanes(shape),
          .silu = plan.options.activation == ConvActivation::silu};
}

// What forward and backward have.
template <class Real, class Args>
Call<Real> call_of(const Args& args, const ConvPlan& plan, std::byte* memory) {
  Arena arena(memory);
  Call<Real> call{};
  call.dims = dims_of(plan);
  call.tensors.x = rows(args.x);
  call.tensors.weight = numbers(args.weight);
  call.tensors.bias = numbers(args.bias);
  call.tensors.initial = numbers(args.initial_state);
  call.cu_seqlens = integers(args.cu_seqlens);
  call.seq_idx = integers(args.seq_idx);
  call.scratch = ConvScratch<Real>(arena, plan);
  return call;
}

template <class T>
void run_launches(const Call<typename Config<T>::Real>& call, const ConvPlan& plan, cudaStream_t stream) {
  for (const Launch& launch : plan.launches) {
    switch (static_cast<ConvKernel>(launch.kernel)) {
      case ConvKernel::forward: launch_forward<T>(call, plan.panel, stream); break;
      case ConvKernel::last_state: launch_last_state<T>(call, stream); break;
      case ConvKernel::gradients: launch_gradients<T>(call, plan.panel, stream); break;
      case ConvKernel::initial_state: launch_initial_state<T>(call, stream); break;
      case ConvKernel::sum_spans: launch_sum_spans(call, stream); break;
      default: refuse_launch();
    }
  }
}

void forward(const ConvForward& args, const ConvPlan& plan, std::byte* scratch, void* stream) {
  check_gpu(plan.gpu);
  with_type(plan.shape.dtype, [&](auto type) {
    using T = decltype(type);
    auto call = call_of<typename Config<T>::Real>(args, plan, scratch);
    call.tensors.y = rows(args.y);
    call.tensors.last = numbers(args.last_state);
    run_launches<T>(call, plan, static_cast<cudaStream_t>(stream));
  });
}

void backward(const ConvBackward& args, const ConvPlan& plan, std::byte* scratch, void* stream) {
  check_gpu(plan.gpu);
  with_type(plan.shape.dtype, [&](auto type) {
    using T = decltype(type);
    auto call = call_of<typename Config<T>::Real>(args, plan, scratch);
    call.tensors.dy = rows(args.dy);
    call.tensors.dx = rows(args.dx);
    call.tensors.dweight = numbers(args.dweight);
    call.tensors.dbias = numbers(args.dbias);
    call.tensors.dlast = numbers(args.dlast_state);
    call.tensors.dinitial = numbers(args.dinitial_state);
    run_launches<T>(call, plan, static_cast<cudaStream_t>(stream));
  });
}

void step(const ConvStep& args, const ConvPlan& plan, std::byte* /*scratch*/, void* stream) {
  check_gpu(plan.gpu);
  const StepCall step{
      .dims = dims_of(plan),
      .tensors = {.x = rows(args.x), .y = rows(args.y), .weight = numbers(args.weight), .bias = numbers(args.bias)},
      .state = numbers(args.state),
      .states = args.state.shape[0],
      .length = args.state.shape[1],
      .slots = integers(args.slots),
      .cache_seqlens = integers(args.cache_seqlens)};
  with_type(plan.shape.dtype, [&](auto type) {
    for (const Launch& launch : plan.launches) {
      if (static_cast<ConvKernel>(launch.kernel) != ConvKernel::step) refuse_launch();
      launch_step<decltype(type)>(step, static_cast<cudaStream_t>(stream));
    }
  });
}

}  // namespace

}  // namespace tfla::cuda::conv

namespace tfla {

const ConvBackend* cuda_conv_backend() {
  static constexpr ConvBackend backend{
      .forward = cuda::conv::forward, .backward = cuda::conv::backward, .step = cuda::conv::step};
  return &backend;
}

}  // namespace tfla
