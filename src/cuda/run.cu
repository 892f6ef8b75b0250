// The CUDA backend: runs the launches of a plan.
#include <algorithm>
#include <string>

#include "cuda/epilogue.h"
#include "cuda/make_call.h"
#include "cuda/record.h"
#include "cuda/run_plan.h"
#include "cuda/slice.h"
#include "cuda/sm90/entry.h"
#include "plan/backend.h"

namespace tfla::cuda {

namespace {

// Reads the initial state from a copy of it. In Hopper's forward the blocks of all columns of a head read n and one of
// them writes it, and the segments of a packed sequence are of different blocks, which read and write C.
void copy_initial_state(Call<float>& call, cudaStream_t stream) {
  const std::int64_t dqk = call.dims.dqk, dhv = call.dims.dhv, heads = call.dims.heads;
  StepCall<float> copy{call};
  copy.call.packing.cu_seqlens = nullptr;
  copy.n = {call.stored.own_n0, heads * dqk, dqk, 1};
  if (call.stored.own_C0 != nullptr) copy.C = {call.stored.own_C0, heads * dqk * dhv, dqk * dhv, dhv};
  launch_start_states(copy, stream);
  call.carried.n0 = copy.n;
  if (call.stored.own_C0 != nullptr) call.carried.C0 = copy.C;
}

// Kernels that every GPU has.
template <class T>
void launch_portable(const Launch& launch, const Plan& plan, const Call<typename Config<T>::Real>& call,
                     cudaStream_t stream) {
  switch (row_of(launch).kernel) {
    case Kernel::segment_totals: return launch_segment_totals<T>(call, Time::forward, stream);
    case Kernel::segment_scan: return launch_segment_scan<T>(call, Time::forward, plan.gpu.multiprocessors, stream);
    case Kernel::states: return launch_states<T>(call, stream);
    case Kernel::denominators: return launch_denominators<T>(call, stream);
    case Kernel::outputs: return launch_outputs<T>(call, stream);
    case Kernel::grad_denominators: return launch_grad_denominators<T>(call, stream);
    case Kernel::grad_segment_totals: return launch_segment_totals<T>(call, Time::reverse, stream);
    case Kernel::grad_segment_scan:
      return launch_segment_scan<T>(call, Time::reverse, plan.gpu.multiprocessors, stream);
    case Kernel::grad_states: return launch_grad_states<T>(call, stream);
    case Kernel::grad_qkv: return launch_grad_qkv<T>(call, stream);
    case Kernel::sum_groups:
      if constexpr (is_16_bit<T>) return launch_sum_groups<T>(call, stream);
      [[fallthrough]];
    default: refuse_launch();
  }
}

// Hopper's. T: bfloat16 or float16.
template <class T>
void launch_hopper(const Launch& launch, const Call<float>& call, const Epilogue& epilogue, cudaStream_t stream) {
  const bool rest = is(launch, variant::rest_of_dqk);
  const KernelRow& row = row_of(launch);
  const sm90::TileSize tile{row.rows, row.columns};
  switch (row.kernel) {
    case Kernel::segment_totals:
      return sm90::launch_segment_totals<T>(call, tile, Time::forward, is(launch, variant::one_term), stream);
    case Kernel::segment_scan: return sm90::launch_packed_segment_scan(call, false, stream);
    case Kernel::states: return sm90::launch_states<T>(call, tile, stream);
    case Kernel::forward:
      if (is(launch, variant::epilogue)) return sm90::launch_forward_with_epilogue(call, epilogue, tile, stream);
      return row.rows > hopper::dqk_of_a_pass ? sm90::launch_forward_part(call, rest, stream)
                                              : sm90::launch_forward<T>(call, tile, stream);
    case Kernel::grad_segment_totals: return sm90::launch_segment_totals<T>(call, tile, Time::reverse, false, stream);
    case Kernel::grad_segment_scan: return sm90::launch_packed_segment_scan(call, true, stream);
    case Kernel::grad_states: return sm90::launch_grad_states<T>(call, tile, stream);
    case Kernel::grad_states_v: return sm90::launch_grad_states_v(call, tile, stream);
    case Kernel::row_dots: return sm90::launch_row_dots<T>(call, stream);
    case Kernel::grad_n: return sm90::launch_grad_n<T>(call, stream);
    case Kernel::grad_v: return sm90::launch_grad_v<T>(call, tile, stream);
    case Kernel::grad_qk: return sm90::launch_grad_qk<T>(call, stream);
    case Kernel::grad_qk_norm: return sm90::launch_grad_qk_norm<T>(call, stream);
    case Kernel::grad_q_forward: return sm90::launch_grad_q_forward(call, tile, stream);
    case Kernel::grad_v_reverse: return sm90::launch_grad_v_reverse(call, tile, stream);
    case Kernel::grad_k_reverse: return sm90::launch_grad_k_reverse(call, tile, stream);
    case Kernel::grad_qkv: return sm90::launch_grad_qkv<T>(call, tile, stream);
    case Kernel::grad_qkv_small: return sm90::launch_grad_qkv_small(call, tile, stream);
    default: refuse_launch();
  }
}

// Whether a launch sees one of the two parts of a dqk above 256 (sm90::part_of_dqk).
bool takes_part_of_dqk(const Launch& launch, const Plan& plan) {
  const Kernel kernel = row_of(launch).kernel;
  return plan.operation == Operation::forward && plan.shape.dqk > hopper::dqk_of_a_pass && runs_on_hopper(plan) &&
         (kernel == Kernel::segment_totals || kernel == Kernel::segment_scan);
}

template <class T>
void run_launch(const Launch& launch, const Plan& plan, Call<typename Config<T>::Real>& call, cudaStream_t stream,
                const Epilogue& epilogue = {}) {
  using Real = typename Config<T>::Real;
  const KernelRow& row = row_of(launch);
  if (row.kernel == Kernel::gates) {
    Call<Real> own = call;
    if (!is(launch, variant::token_blocks)) own.gates.block_u = nullptr;
    if (epilogue.ungated.data != nullptr) own.tensors.dv = epilogue.ungated;  // padding has rows of zeros there too
    return launch_gates(own, row.needs == Needs::clusters, stream);
  }
  if (row.kernel == Kernel::grad_gates) {
    Call<Real> own = call;
    if (own.sums.trace_parts > 0) {  // grad_qk has made <C, dC>
      own.sums.through = own.sums.traces;
      own.sums.through_parts = own.sums.trace_parts;
    }
    return launch_grad_gates<T>(own, stream);
  }
  if constexpr (is_16_bit<T>) {
    if (row.kernel == Kernel::copy_state) return copy_initial_state(call, stream);
    if (takes_part_of_dqk(launch, plan)) {
      const Call<float> part = sm90::part_of_dqk(call, is(launch, variant::rest_of_dqk));
      return row.needs == Needs::sm90a ? launch_hopper<T>(launch, part, epilogue, stream)
                                       : launch_portable<T>(launch, plan, part, stream);
    }
    if (row.needs == Needs::sm90a) return launch_hopper<T>(launch, call, epilogue, stream);
  }
  launch_portable<T>(launch, plan, call, stream);
}

template <class T>
void run_step(const Launch& launch, const StepCall<typename Config<T>::Real>& step, cudaStream_t stream) {
  const KernelRow& row = row_of(launch);
  if (row.kernel == Kernel::start_state) return launch_start_states(step, stream);
  if constexpr (!std::is_same_v<T, double>) {
    if (row.kernel == Kernel::step_many) return launch_step_many<T>(step, stream);
  }
  row.needs == Needs::clusters ? launch_step_cluster<T>(step, row.columns, stream)
                               : launch_step<T>(step, row.columns, stream);
}

// States of the recurrent formulation that the caller did not ask for lie in scratch.
template <class Real>
void set_own_states(StepCall<Real>& step, const Buffers& at) {
  const Dims& dims = step.call.dims;
  const std::int64_t dqk = dims.dqk, dhv = dims.dhv, heads = dims.heads;
  at.set(step.C.data, Buffer::step_C);
  at.set(step.n.data, Buffer::step_n);
  at.set(step.m.data, Buffer::step_m);
  step.C = {step.C.data, heads * dqk * dhv, dqk * dhv, dhv};
  step.n = {step.n.data, heads * dqk, dqk, 1};
  step.m = {step.m.data, heads, 1, 0};
  step.states = dims.sequences;
}

template <class Real, class State>
void set_states(StepCall<Real>& step, const State& state) {
  step.C = strided_state(state.C);
  step.n = strided_state(state.n);
  step.m = strided_state(state.m);
  step.states = state.C.shape[0];
}

template <class T, class Args>
StepCall<typename Config<T>::Real> step_of(const Args& args, const Plan& plan, const Buffers& at) {
  StepCall<typename Config<T>::Real> step{};
  step.call = call_of<typename Config<T>::Real>(args, plan);
  at.set(step.call.gates.inverse, Buffer::inverse);
  at.set(step.decay, Buffer::decay);
  at.set(step.weight, Buffer::weight);
  return step;
}

template <class T>
void forward_as(const MlstmForward& args, const Plan& plan, const Epilogue& epilogue, std::byte* scratch,
                cudaStream_t stream) {
  using Real = typename Config<T>::Real;
  const Layout layout = lay_out(plan);
  const Buffers at(layout, scratch, args.saved.data());
  if (plan.formulation == Formulation::recurrent) {
    StepCall<Real> step = step_of<T>(args, plan, at);
    args.last_state.C.given() ? set_states(step, args.last_state) : set_own_states(step, at);
    for (const Launch& launch : plan.launches) run_step<T>(launch, step, stream);
    return;
  }
  Call<Real> call = call_of<Real>(args, plan);
  set_buffers(call, at);
  call.carried.C_last = strided_state(args.last_state.C);
  call.carried.n_last = strided_state(args.last_state.n);
  call.carried.m_last = strided_state(args.last_state.m);
  for (const Launch& launch : plan.launches) run_launch<T>(launch, plan, call, stream, epilogue);
}

// Where Hopper's kernels leave dq and dk of every head.
template <class Real>
void set_grad_heads(Call<Real>& call, const Buffers& at) {
  const Dims& dims = call.dims;
  call.tensors.dq_heads = call.tensors.dq;
  call.tensors.dk_heads = call.tensors.dk;
  void* dq = nullptr;
  at.set(dq, Buffer::dq_heads);
  if (dq == nullptr) return;
  const std::int64_t row = static_cast<std::int64_t>(dims.heads) * dims.dqk;
  call.tensors.dq_heads = {dq, dims.tokens * row, row, dims.dqk, true};
  call.tensors.dk_heads = call.tensors.dq_heads;
  at.set(call.tensors.dk_heads.data, Buffer::dk_heads);
}

// One slice of the heads. `saved` is of all of them, and first_head is the first of these.
template <class T>
void backward_as(const MlstmBackward& args, const Plan& plan, const Call<typename Config<T>::Real>& kept,
                 std::int64_t first_head, std::byte* scratch, cudaStream_t stream) {
  using Real = typename Config<T>::Real;
  const Layout layout = lay_out(plan);
  Call<Real> call = call_of<Real>(args, plan);
  set_buffers(call, {layout, scratch, nullptr});
  if (plan.keep != Keep::nothing) {
    call.gates.inverse = kept.gates.inverse + first_head * call.dims.all_tokens();
    call.gates.slope = kept.gates.slope + first_head * call.dims.all_tokens();
  }
  if (plan.keep == Keep::states) {
    call.stored.C = kept.stored.C;
    call.stored.n = kept.stored.n;
  }
  call.tensors.dh = strided(args.dh);
  call.tensors.dq = strided(args.dq);
  call.tensors.dk = strided(args.dk);
  call.tensors.dv = strided(args.dv);
  set_grad_heads(call, {layout, scratch, nullptr});
  call.tensors.di = strided(args.di);
  call.tensors.df = strided(args.df);
  call.carried.dC_last = strided_state(args.dlast_state.C);
  call.carried.dn_last = strided_state(args.dlast_state.n);
  call.carried.dC0 = strided_state(args.dinitial_state.C);
  call.carried.dn0 = strided_state(args.dinitial_state.n);
  call.sums.parts = static_cast<int>(sum_parts(plan));
  call.sums.through_parts = static_cast<int>(through_parts(plan));
  call.sums.trace_parts = static_cast<int>(trace_parts(plan));
  for (const Launch& launch : plan.launches) run_launch<T>(launch, plan, call, stream);
}

void forward(const MlstmForward& args, const Plan& plan, std::byte* scratch, void* stream) {
  forward_with_epilogue(args, plan, {}, scratch, stream);
}

void backward(const MlstmBackward& args, const Plan& plan, std::byte* scratch, void* stream) {
  check_gpu(plan.gpu);
  with_type(plan.shape.dtype, [&](auto type) {
    using T = decltype(type);
    Call<typename Config<T>::Real> kept{};  // of all heads; only read
    const Layout layout = lay_out(plan);
    set_buffers(kept, {layout, nullptr, const_cast<std::byte*>(args.saved.data())});
    each_slice(plan, [&](const Slice& slice) {
      backward_as<T>(slice.of(args), slice.of(plan), kept, slice.first * slice.group, scratch,
                     static_cast<cudaStream_t>(stream));
    });
  });
}

void step(const MlstmStep& args, const Plan& plan, std::byte* scratch, void* stream) {
  check_gpu(plan.gpu);
  with_type(plan.shape.dtype, [&](auto type) {
    using T = decltype(type);
    const Layout layout = plan.scratch_bytes > 0 ? lay_out(plan) : Layout{};
    StepCall<typename Config<T>::Real> step = step_of<T>(args, plan, {layout, scratch, nullptr});
    set_states(step, args.state);
    step.slots = args.slots.data;
    step.slot_stride = args.slots.strides[0];
    step.slots_are_64_bit = args.slots.dtype == DType::int64;
    for (const Launch& launch : plan.launches) run_step<T>(launch, step, static_cast<cudaStream_t>(stream));
  });
}

std::byte* allocate(std::size_t bytes, void* stream) {
  void* memory = nullptr;
  check(cudaMallocAsync(&memory, std::max<std::size_t>(bytes, 1), static_cast<cudaStream_t>(stream)),
        "cudaMallocAsync");
  return static_cast<std::byte*>(memory);
}

void release(std::byte* memory, void* stream) { cudaFreeAsync(memory, static_cast<cudaStream_t>(stream)); }

std::byte* allocate_shared(std::size_t bytes) {
  void* memory = nullptr;
  check(cudaHostAlloc(&memory, bytes, cudaHostAllocMapped), "cudaHostAlloc");
  return static_cast<std::byte*>(memory);
}

void release_shared(std::byte* memory) { cudaFreeHost(memory); }

void synchronize() { check(cudaDeviceSynchronize(), "cudaDeviceSynchronize"); }

}  // namespace

void forward_with_epilogue(const MlstmForward& args, const Plan& plan, const Epilogue& epilogue, std::byte* scratch,
                           void* stream) {
  check_gpu(plan.gpu);
  with_type(plan.shape.dtype, [&](auto type) {
    forward_as<decltype(type)>(args, plan, epilogue, scratch, static_cast<cudaStream_t>(stream));
  });
}

}  // namespace tfla::cuda

namespace tfla {

const Backend* cuda_backend() {
  static constexpr Instruments instruments{.allocate_shared = cuda::allocate_shared,
                                           .release_shared = cuda::release_shared,
                                           .synchronize = cuda::synchronize,
                                           .copy = cuda::copy,
                                           .copy_on = cuda::copy_on,
                                           .record = cuda::record,
                                           .device_name = cuda::device_name};
  static constexpr Backend backend{.check_available = cuda::check_available,
                                   .facts = cuda::current_facts,
                                   .forward = cuda::forward,
                                   .backward = cuda::backward,
                                   .step = cuda::step,
                                   .allocate = cuda::allocate,
                                   .release = cuda::release,
                                   .instruments = &instruments};
  return &backend;
}

}  // namespace tfla
