#include "cuda/run.h"

#include <algorithm>
#include <limits>
#include <string>

#include "core/arena.h"
#include "core/settings.h"
#include "cuda/launch.h"
#include "cuda/slice.h"
#include "cuda/sm90/common/tensor_map.h"
#include "cuda/sm90/entry.h"
#include "tfla/error.h"

namespace tfla::cuda {

namespace {

constexpr int oldest_capability = 80;  // Ampere

template <class Work>
void with_type(const Plan& plan, const Work& work) {
  switch (plan.shape.dtype) {
    case DType::bfloat16: work(__nv_bfloat16{}); break;
    case DType::float16: work(__half{}); break;
    case DType::float64: work(double{}); break;
    default: work(float{}); break;
  }
}

Strided strided(const TensorView& view) {
  if (!view.given()) return {};
  const std::int64_t item = item_size(view.dtype);
  const bool wide = reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0 && view.strides[0] * item % 16 == 0 &&
                    view.strides[1] * item % 16 == 0 && view.strides[2] * item % 16 == 0;
  return {const_cast<void*>(view.data), view.strides[0], view.strides[1], view.strides[2], wide};
}

StridedState strided_state(const TensorView& view) {
  if (!view.given()) return {};
  return {const_cast<void*>(view.data), view.strides[0], view.strides[1], view.strides[2]};
}

GateType gate_type(const TensorView& view) {
  switch (view.dtype) {
    case DType::float64: return GateType::float64;
    case DType::bfloat16: return GateType::bfloat16;
    case DType::float16: return GateType::float16;
    default: return GateType::float32;
  }
}

// The scratch of each operation, carved in one place: counted on a null base, used on the real one. What forward can
// keep for backward comes from an arena of its own, which is the same one where nothing is kept.
template <class T>
void carve(Arena& arena, Arena& kept, const Plan& plan, Call<typename Config<T>::Real>& call) {
  using Real = typename Config<T>::Real;
  const std::int64_t vectors = call.dims.all_tokens() * call.dims.heads;
  const std::int64_t chunks = call.dims.chunk_count * call.dims.heads;
  // Needs neither states nor 1 / den, but can keep them.
  const bool fused = plan.hopper && plan.operation == Operation::forward;
  const bool has_rows = !fused || plan.keeps_states;
  if (has_rows) call.gates.inverse = kept.take<Real>(vectors);
  if (plan.formulation == Formulation::recurrent) return;
  if (has_rows) call.gates.slope = kept.take<Real>(vectors);
  if (!fused || call.dims.kept_chunk > 0) {
    const std::int64_t states = fused ? call.dims.kept_count() * call.dims.heads : chunks;
    Arena& place = plan.keeps_rows ? arena : kept;
    call.stored.C = place.take<typename Config<T>::Stored>(states * call.dims.dqk * call.dims.padded_dhv());
    call.stored.n = place.take<typename Config<T>::Norm>(states * call.dims.dqk);
  }
  if (fused && call.dims.dqk > sm90::kernel_dqk)
    call.stored.dqk_partials =
        arena.take<float>(call.dims.sequences * call.dims.heads * call.dims.segments * call.dims.chunks_per_segment *
                          sm90::dqk_partial_floats(call.dims.dhv));
  call.packing.chunks = arena.take<Chunk>(call.dims.chunk_count);
  if (plan.hopper) call.packing.segments = arena.take<PackedSegment>(1 + call.dims.most_packed_segments());
  if (!is_16_bit<T>) call.gates.c = arena.take<double>(vectors);
  call.gates.u = arena.take<Log<Real>>(vectors);
  call.gates.log_c = arena.take<Log<Real>>(vectors);
  for (Real** vector : {&call.gates.qbar, &call.gates.abar}) *vector = arena.take<Real>(vectors);
  if (is_16_bit<T> && plan.operation == Operation::forward) call.gates.floor = arena.take<Real>(vectors);
  call.gates.b_last = arena.take<double>(chunks);
  call.gates.m_start = arena.take<double>(chunks);
  call.gates.m_end = arena.take<double>(chunks);
  call.gates.gbar = arena.take<Real>(chunks);
  call.stored.n_work = arena.take<double>(call.dims.dqk > 256 ? chunks * call.dims.dqk : 0);
  if (call.dims.segments > 1) {
    // Hopper's kernels keep what lies between segments of packed sequences.
    const std::int64_t places = plan.hopper && call.dims.chunks_per_row == 0
                                    ? call.dims.boundaries()
                                    : call.dims.sequences * call.dims.segments * call.dims.pieces;
    const std::int64_t rows = places * call.dims.heads * call.dims.dqk;
    call.stored.segment_C = arena.take<Real>(rows * call.dims.padded_dhv());
    call.stored.segment_n = arena.take<typename Config<T>::Norm>(rows);
  }
  if (fused && plan.shape.in_place) {
    const std::int64_t norms = call.dims.sequences * call.dims.heads * call.dims.dqk;
    call.stored.own_n0 = arena.take<float>(norms);
    if (plan.shape.packed && call.dims.segments > 1) call.stored.own_C0 = arena.take<float>(norms * call.dims.dhv);
  }
  if (plan.operation != Operation::backward) return;
  const std::int64_t dqk_tiles = (call.dims.dqk + Config<T>::width - 1) / Config<T>::width;
  call.gates.deta = arena.take<Real>(vectors);
  call.stored.dC = arena.take<typename Config<T>::Stored>(chunks * call.dims.dqk * call.dims.padded_dhv());
  call.stored.dn = arena.take<Real>(chunks * call.dims.dqk);
  for (Real** vector : {&call.sums.rows, &call.sums.columns})
    *vector = arena.take<Real>(Config<T>::sum_terms * dqk_tiles * vectors);
  call.sums.outflow = arena.take<Real>(dqk_tiles * vectors);
  call.sums.through_parts =
      static_cast<int>(plan.hopper ? sm90::state_parts(call.dims.dqk, call.dims.dhv) : through_parts<T>(call));
  call.sums.through = arena.take<double>(chunks * call.sums.through_parts);
  if (plan.hopper_reverse) {
    call.gates.block_u = arena.take<Log<Real>>(vectors);
    for (Real** vector : {&call.gates.block_qbar, &call.gates.block_abar}) *vector = arena.take<Real>(vectors);
    call.gates.block_gbar = arena.take<Real>(call.dims.token_block_count() * call.dims.heads);
  }
  call.sums.trace_parts = plan.hopper_gradients ? sm90::trace_parts(call.dims.dqk) : 0;
  call.sums.traces = arena.take<double>(chunks * call.sums.trace_parts);
  if (!plan.hopper || !std::is_same_v<T, __half>) return;
  for (float** lowers : {&call.stored.inverse_scale_C, &call.stored.inverse_scale_dC})
    *lowers = arena.take<float>(chunks * sm90::state_tiles(call.dims.dqk, call.dims.dhv));
}

template <class T>
StepCall<typename Config<T>::Real> carve_step(Arena& arena, const Plan& plan,
                                              const Call<typename Config<T>::Real>& shape) {
  using Real = typename Config<T>::Real;
  StepCall<Real> step{};
  step.call = shape;
  carve<T>(arena, arena, plan, step.call);
  const std::int64_t vectors = shape.dims.all_tokens() * shape.dims.heads;
  step.decay = arena.take<Decay<Real>>(vectors);
  step.weight = arena.take<Real>(vectors);
  return step;
}

template <class Real>
Call<Real> call_of_shape(const Plan& plan) {
  const MlstmShape& shape = plan.shape;
  Call<Real> call{};
  call.dims.batch = shape.batch;
  call.dims.tokens = shape.tokens;
  call.dims.sequences = shape.sequences;
  call.dims.qk_heads = static_cast<int>(shape.qk_heads);
  call.dims.heads = static_cast<int>(shape.heads);
  call.dims.group = static_cast<int>(shape.heads / shape.qk_heads);
  call.dims.dqk = static_cast<int>(shape.dqk);
  call.dims.dhv = static_cast<int>(shape.dhv);
  const bool fused = plan.hopper && plan.operation == Operation::forward;  // states on the chip, in chunks of a tile
  const std::int64_t chunk = fused ? plan.tile : plan.hopper ? sm90::stored_chunk : plan.chunk;
  call.dims.L = static_cast<int>(chunk);
  call.dims.kept_chunk = fused && plan.keeps_states && !plan.keeps_rows ? sm90::stored_chunk : 0;
  // One sequence per row of the batch: all have the same chunks. Packed ones may each have one that is not full.
  call.dims.chunks_per_row =
      shape.packed ? 0 : static_cast<int>(std::max<std::int64_t>((shape.tokens + chunk - 1) / chunk, 1));
  call.dims.chunk_count =
      shape.packed ? shape.tokens / chunk + shape.sequences : shape.batch * call.dims.chunks_per_row;
  call.dims.segments = static_cast<int>(plan.segments);
  const std::int64_t chunks = std::max<std::int64_t>((shape.longest + chunk - 1) / chunk, 1);
  call.dims.pieces = static_cast<int>(plan.pieces);
  const std::int64_t pieces = plan.segments * plan.pieces;
  call.dims.chunks_per_piece = static_cast<int>((chunks + pieces - 1) / pieces);
  call.dims.chunks_per_segment = call.dims.pieces * call.dims.chunks_per_piece;
  return call;
}

template <class Real, class Args>
Call<Real> call_of(const Args& args, const Plan& plan) {
  const Settings settings = resolve(args.options, plan.shape.dqk);
  Call<Real> call = call_of_shape<Real>(plan);
  call.rules.exponential = settings.exponential;
  call.rules.tensors_16_bit = item_size(plan.shape.dtype) == 2;
  call.rules.log_space = settings.log_space;
  call.rules.normalized = settings.normalized;
  call.rules.exact = settings.exact;
  call.rules.capped = settings.capped;
  call.rules.eps = settings.eps;
  call.rules.scale = settings.scale;
  call.rules.cap = settings.cap;
  call.tensors.q = strided(args.q);
  call.tensors.k = strided(args.k);
  call.tensors.v = strided(args.v);
  call.tensors.i = strided(args.i);
  call.tensors.f = strided(args.f);
  call.rules.i_type = gate_type(args.i);
  call.rules.f_type = gate_type(args.f);
  return call;
}

template <class Real, class Args>
void add_sequences(Call<Real>& call, const Args& args) {
  call.carried.C0 = strided_state(args.initial_state.C);
  call.carried.n0 = strided_state(args.initial_state.n);
  call.carried.m0 = strided_state(args.initial_state.m);
  call.packing.cu_seqlens = args.cu_seqlens.data;
  call.packing.cu_stride = args.cu_seqlens.strides[0];
  call.packing.cu_is_64_bit = args.cu_seqlens.dtype == DType::int64;
}

// States of the recurrent formulation that the caller did not ask for lie in scratch.
template <class Real>
void carve_recurrent_states(Arena& arena, StepCall<Real>& step) {
  const Call<Real>& call = step.call;
  const std::int64_t dqk = call.dims.dqk, dhv = call.dims.dhv, heads = call.dims.heads;
  step.C = {arena.take<Real>(call.dims.sequences * heads * dqk * dhv), heads * dqk * dhv, dqk * dhv, dhv};
  step.n = {arena.take<Real>(call.dims.sequences * heads * dqk), heads * dqk, dqk, 1};
  step.m = {arena.take<Real>(call.dims.sequences * heads), heads, 1, 0};
  step.states = call.dims.sequences;
}

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

template <class T>
void forward_as(const MlstmForward& args, const Plan& plan, std::byte* scratch, cudaStream_t stream) {
  using Real = typename Config<T>::Real;
  Arena arena(scratch);
  Call<Real> call = call_of<Real>(args, plan);
  add_sequences(call, args);
  call.tensors.h = strided(args.h);
  if (plan.formulation == Formulation::recurrent) {
    StepCall<Real> step = carve_step<T>(arena, plan, call);
    carve_recurrent_states(arena, step);
    if (args.last_state.C.given()) {
      step.C = strided_state(args.last_state.C);
      step.n = strided_state(args.last_state.n);
      step.m = strided_state(args.last_state.m);
    }
    launch_start_states(step, stream);
    launch_step<T>(step, stream);
    return;
  }
  Arena saved(args.saved.data());
  carve<T>(arena, plan.keeps_states ? saved : arena, plan, call);
  call.carried.C_last = strided_state(args.last_state.C);
  call.carried.n_last = strided_state(args.last_state.n);
  call.carried.m_last = strided_state(args.last_state.m);
  if constexpr (is_16_bit<T>) {
    if (call.stored.own_n0 != nullptr && call.carried.n0.data != nullptr) copy_initial_state(call, stream);
  }
  launch_gates(call, stream);
  if constexpr (is_16_bit<T>) {
    if (plan.hopper) return sm90::launch_forward<T>(call, stream);
  }
  launch_states<T>(call, stream);
  if (!is_16_bit<T>) launch_denominators<T>(call, stream);  // outputs makes its own for 16-bit types
  launch_outputs<T>(call, stream);
}

// What forward kept, of all heads.
template <class T>
Call<typename Config<T>::Real> kept_call(const MlstmBackward& args, const Plan& plan) {
  Call<typename Config<T>::Real> call = call_of_shape<typename Config<T>::Real>(plan);
  Arena rest, saved(const_cast<std::byte*>(args.saved.data()));  // only read
  carve<T>(rest, saved, plan, call);
  return call;
}

// dQ, dK and dV without gradients of n.
template <class T>
void launch_sm90_gradients(const Call<float>& call, cudaStream_t stream) {
  using sm90::GradKernels;
  switch (sm90::choose(std::is_same_v<T, __half>, call.dims.dqk, call.dims.dhv)) {
    case GradKernels::grad_qkv_small: return sm90::launch_grad_qkv_small(call, stream);
    case GradKernels::grad_qkv: return sm90::launch_grad_qkv<T>(call, stream);
    case GradKernels::grad_v_and_grad_qk:
      sm90::launch_grad_v<T>(call, stream);
      return sm90::launch_grad_qk<T>(call, stream);
  }
}

// first_head: of those in args, among the heads of which something was kept.
template <class T>
void backward_as(const MlstmBackward& args, const Plan& plan, const Call<typename Config<T>::Real>& kept,
                 std::int64_t first_head, std::byte* scratch, cudaStream_t stream) {
  using Real = typename Config<T>::Real;
  Arena arena(scratch), elsewhere;
  Call<Real> call = call_of<Real>(args, plan);
  add_sequences(call, args);
  carve<T>(arena, plan.keeps_states ? elsewhere : arena, plan, call);
  if (plan.keeps_states) {
    call.gates.inverse = kept.gates.inverse + first_head * call.dims.all_tokens();
    call.gates.slope = kept.gates.slope + first_head * call.dims.all_tokens();
  }
  if (plan.keeps_states && !plan.keeps_rows) {
    call.stored.C = kept.stored.C;
    call.stored.n = kept.stored.n;
  }
  call.tensors.dh = strided(args.dh);
  call.tensors.dq = strided(args.dq);
  call.tensors.dk = strided(args.dk);
  call.tensors.dv = strided(args.dv);
  call.tensors.di = strided(args.di);
  call.tensors.df = strided(args.df);
  call.carried.dC_last = strided_state(args.dlast_state.C);
  call.carried.dn_last = strided_state(args.dlast_state.n);
  call.carried.dC0 = strided_state(args.dinitial_state.C);
  call.carried.dn0 = strided_state(args.dinitial_state.n);
  Call<Real> chunks = call;  // without kept denominators there are no vectors of blocks yet
  if (!plan.keeps_states) chunks.gates.block_u = nullptr;
  launch_gates(chunks, stream);
  const bool hopper = plan.hopper && is_16_bit<T>;
  if (!plan.keeps_states || plan.keeps_rows) {
    if constexpr (is_16_bit<T>) {
      if (hopper) sm90::launch_states<T>(call, stream);
    }
    if (!hopper) launch_states<T>(call, stream);
  }
  if (!plan.keeps_states) launch_denominators<T>(call, stream);
  if (!plan.keeps_states && plan.hopper_reverse) launch_gates(call, stream);
  if (!plan.hopper_gradients) launch_grad_denominators<T>(call, stream);
  if constexpr (is_16_bit<T>) {
    if (plan.hopper_reverse)
      sm90::launch_grad_states_v(call, stream);
    else if (hopper)
      sm90::launch_grad_states<T>(call, stream);
  }
  if (!hopper) launch_grad_states<T>(call, stream);
  if constexpr (is_16_bit<T>) {
    if (plan.hopper_gradients) {
      const bool norms = plan.norm_gradients;
      if (norms) sm90::launch_grad_n<T>(call, stream);
      if (norms || plan.hopper_reverse) {
        if (!plan.hopper_reverse) sm90::launch_grad_v<T>(call, stream);
        norms ? sm90::launch_grad_qk_norm<T>(call, stream) : sm90::launch_grad_qk<T>(call, stream);
        call.sums.through = call.sums.traces;
        call.sums.through_parts = call.sums.trace_parts;
      } else {
        call.sums.traces = nullptr;  // nobody asks for them
        launch_sm90_gradients<T>(call, stream);
      }
    }
  }
  if (!plan.hopper_gradients) launch_grad_qkv<T>(call, stream);
  launch_grad_gates<T>(call, stream);
}

}  // namespace

void check(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  throw Unavailable(std::string("tfla: CUDA refused ") + call + ": " + cudaGetErrorString(status));
}

void check_launch(const char* kernel) { check(cudaGetLastError(), kernel); }

const DeviceFacts& device_facts() {
  thread_local DeviceFacts facts;
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  if (device == facts.device) return facts;
  const auto attribute = [&](cudaDeviceAttr which) {
    int value = 0;
    check(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
    return value;
  };
  facts = {
      .device = device,
      .capability = 10 * attribute(cudaDevAttrComputeCapabilityMajor) + attribute(cudaDevAttrComputeCapabilityMinor),
      .multiprocessors = attribute(cudaDevAttrMultiProcessorCount)};
  return facts;
}

bool runs_sm90_code() {
  constexpr int compiled[] = {__CUDA_ARCH_LIST__};  // 10 times the capability
  const int own = 10 * device_facts().capability;
  int best = 0;
  for (const int code : compiled)
    if (code <= own) best = std::max(best, code);
  return best >= 900;
}

void check_available() {
  thread_local int available = -1;  // the device that was found to be, last
  int device = 0;
  if (cudaGetDevice(&device) == cudaSuccess && device == available) return;
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess || count == 0) {
    throw Unavailable(std::string("tfla: no GPU can be used here (") +
                      (status == cudaSuccess ? "none was found" : cudaGetErrorString(status)) +
                      "); use the device cpu");
  }
  const int own = device_facts().capability;
  if (own < oldest_capability) {
    throw Unavailable("tfla: the GPU has compute capability " + std::to_string(own / 10) + "." +
                      std::to_string(own % 10) + "; 8.0 or newer is needed");
  }
  available = device;
}

namespace {

template <class Args, class... Views>
bool all_mapped(const Args& args, const Views&... views) {
  const std::int64_t packed_tokens = args.cu_seqlens.given() ? args.q.shape[1] : 0;
  return (sm90::has_map(strided(views), packed_tokens) && ...);
}

// What a call takes of its scratch and of what is saved.
void count(const Plan& plan, Arena& arena, Arena& saved) {
  with_type(plan, [&](auto type) {
    using T = decltype(type);
    using Real = typename Config<T>::Real;
    Call<Real> call = call_of_shape<Real>(plan);
    if (plan.slices > 1) {  // all of them in the scratch of the first
      Arena rest, kept;
      if (plan.keeps_states) carve<T>(rest, saved, plan, call);
      const std::int64_t heads = plan.shape.qk_heads;
      const Plan part = Slice{0, (heads + plan.slices - 1) / plan.slices, plan.shape.heads / heads}.of(plan);
      Call<Real> part_call = call_of_shape<Real>(part);
      carve<T>(arena, plan.keeps_states ? kept : arena, part, part_call);
      return;
    }
    if (plan.formulation != Formulation::recurrent) {
      carve<T>(arena, plan.keeps_states ? saved : arena, plan, call);
      return;
    }
    StepCall<Real> step = carve_step<T>(arena, plan, call);
    if (plan.operation == Operation::forward) carve_recurrent_states(arena, step);
  });
}

// Forward of tall and narrow states in float16 has no room for what it needs besides.
bool takes_dqk(const MlstmShape& shape) {
  if (shape.dtype == DType::float16) return shape.dqk <= (shape.dhv <= 64 ? 128 : sm90::kernel_dqk);
  return shape.dqk <= (shape.packed ? sm90::kernel_dqk : sm90::most_dqk);
}

}  // namespace

bool hopper_takes(const MlstmShape& shape, const MlstmOptions& options) {
  constexpr std::int64_t fewest_tokens = 64;
  constexpr auto most = static_cast<double>(std::numeric_limits<int>::max());  // of what kernels count in 32 bits
  const double blocks = static_cast<double>(shape.heads) *
                        (static_cast<double>(shape.batch) * static_cast<double>(shape.tokens / fewest_tokens) +
                         static_cast<double>(shape.sequences));
  return options.formulation == Formulation::chunkwise && item_size(shape.dtype) == 2 && takes_dqk(shape) &&
         shape.tokens > 0 && shape.batch > 0 && shape.sequences > 0 && shape.dqk % 8 == 0 && shape.dhv % 8 == 0 &&
         static_cast<double>(shape.batch) * static_cast<double>(shape.tokens) < most &&
         blocks * static_cast<double>(shape.dhv) < most && sm90::supported_device();
}

bool hopper_takes_gradients(const Plan& plan, const MlstmOptions& options) {
  if (plan.operation != Operation::backward) return false;
  Call<float> call = call_of_shape<float>(plan);
  call.rules.scale = resolve(options, plan.shape.dqk).scale;
  return sm90::takes_grad_qkv(call);
}

std::int64_t hopper_tiles(const Plan& plan) {
  const bool parts = plan.operation == Operation::forward;
  const std::int64_t dqk = parts ? std::min<std::int64_t>(plan.shape.dqk, sm90::kernel_dqk) : plan.shape.dqk;
  return sm90::state_tiles(static_cast<int>(dqk), static_cast<int>(plan.shape.dhv));
}

std::int64_t hopper_forward_tiles(const MlstmShape& shape) { return sm90::forward_tiles(static_cast<int>(shape.dhv)); }

bool hopper_takes_reverse(const MlstmShape& shape) {
  return shape.dtype == DType::bfloat16 && sm90::takes_grad_states_v(shape.dqk, shape.dhv);
}

bool hopper_splits_gradients(const MlstmShape& shape) { return sm90::splits_grad_qkv(shape.dqk, shape.dhv); }

bool hopper_fits(const MlstmForward& args) { return all_mapped(args, args.q, args.k, args.v, args.h); }

bool hopper_fits(const MlstmBackward& args) {
  return all_mapped(args, args.q, args.k, args.v, args.dh, args.dq, args.dk, args.dv);
}

bool one_launch_fits(const MlstmStep& args) { return strided(args.state.C).wide; }

std::size_t scratch_bytes(const Plan& plan) {
  if (plan.one_launch) return 0;
  Arena arena, saved;
  count(plan, arena, saved);
  return arena.used();
}

std::size_t saved_bytes(const Plan& plan) {
  Arena arena, saved;
  count(plan, arena, saved);
  return saved.used();
}

void forward(const MlstmForward& args, const Plan& plan, std::byte* scratch, void* stream) {
  with_type(plan,
            [&](auto type) { forward_as<decltype(type)>(args, plan, scratch, static_cast<cudaStream_t>(stream)); });
}

void backward(const MlstmBackward& args, const Plan& plan, std::byte* scratch, void* stream) {
  with_type(plan, [&](auto type) {
    using T = decltype(type);
    const auto kept = kept_call<T>(args, plan);
    each_slice(plan, [&](const Slice& slice) {
      backward_as<T>(slice.of(args), slice.of(plan), kept, slice.first * slice.group, scratch,
                     static_cast<cudaStream_t>(stream));
    });
  });
}

void step(const MlstmStep& args, const Plan& plan, std::byte* scratch, void* stream) {
  with_type(plan, [&](auto type) {
    using T = decltype(type);
    using Real = typename Config<T>::Real;
    Arena arena(scratch);
    Call<Real> call = call_of<Real>(args, plan);
    call.tensors.h = strided(args.h);
    StepCall<Real> step = plan.one_launch ? StepCall<Real>{call} : carve_step<T>(arena, plan, call);
    step.C = strided_state(args.state.C);
    step.n = strided_state(args.state.n);
    step.m = strided_state(args.state.m);
    step.states = args.state.C.shape[0];
    step.slots = args.slots.data;
    step.slot_stride = args.slots.strides[0];
    step.slots_are_64_bit = args.slots.dtype == DType::int64;
    if (!plan.one_launch) return launch_step<T>(step, static_cast<cudaStream_t>(stream));
    if (launch_step_cluster<T>(step, static_cast<cudaStream_t>(stream))) return;
    throw InvalidArgument("tfla: plan was made for another GPU; plan these arguments again");
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

}  // namespace tfla::cuda
