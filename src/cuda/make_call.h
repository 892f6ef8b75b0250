// Arguments and their plan as the Call that kernels see.
#pragma once

#include <utility>

#include "core/settings.h"
#include "cuda/launch.h"
#include "cuda/views.h"
#include "plan/cuda_plan.h"
#include "plan/cuda_scratch.h"

namespace tfla::cuda {

static_assert(sizeof(Chunk) == chunk_bytes && sizeof(PackedSegment) == packed_segment_bytes, "plan/cuda_scratch.h");
static_assert(sizeof(Log<float>) == 8 && sizeof(Decay<float>) == 8, "plan/cuda_scratch.h");

// Where the buffers of a layout lie.
class Buffers {
 public:
  Buffers(const Layout& layout, std::byte* scratch, std::byte* saved)
      : layout_(layout), scratch_(scratch), saved_(saved) {}

  template <class T>
  void set(T*& pointer, Buffer buffer) const {
    pointer = layout_.has(buffer)
                  ? reinterpret_cast<T*>((layout_.is_saved(buffer) ? saved_ : scratch_) + layout_.at(buffer))
                  : nullptr;
  }
  void set(void*& pointer, Buffer buffer) const {
    auto* bytes = static_cast<std::byte*>(pointer);
    set(bytes, buffer);
    pointer = bytes;
  }

 private:
  const Layout& layout_;
  std::byte* scratch_;
  std::byte* saved_;
};

// All but the kernels of gates see the boundaries of runs in the place of those of sequences.
template <class Real>
void set_runs(Call<Real>& call, const Buffers& at) {
  at.set(call.runs.starts, Buffer::run_starts);
  at.set(call.runs.first_tokens, Buffer::first_tokens);
  if (call.runs.starts == nullptr) return;
  call.runs.cu_seqlens = std::exchange(call.packing.cu_seqlens, call.runs.starts);
  call.runs.cu_stride = std::exchange(call.packing.cu_stride, 1);
  call.runs.cu_is_64_bit = std::exchange(call.packing.cu_is_64_bit, true);
}

template <class Real>
void set_buffers(Call<Real>& call, const Buffers& at) {
  at.set(call.packing.chunks, Buffer::chunks);
  at.set(call.packing.segments, Buffer::packed_segments);
  set_runs(call, at);
  GateVectors<Real>& gates = call.gates;
  at.set(gates.c, Buffer::c);
  at.set(gates.u, Buffer::u);
  at.set(gates.log_c, Buffer::log_c);
  at.set(gates.qbar, Buffer::qbar);
  at.set(gates.abar, Buffer::abar);
  at.set(gates.floor, Buffer::floor);
  at.set(gates.slope, Buffer::slope);
  at.set(gates.inverse, Buffer::inverse);
  at.set(gates.deta, Buffer::deta);
  at.set(gates.b_last, Buffer::b_last);
  at.set(gates.m_start, Buffer::m_start);
  at.set(gates.m_end, Buffer::m_end);
  at.set(gates.gbar, Buffer::gbar);
  at.set(gates.block_u, Buffer::block_u);
  at.set(gates.block_qbar, Buffer::block_qbar);
  at.set(gates.block_abar, Buffer::block_abar);
  at.set(gates.block_gbar, Buffer::block_gbar);
  StoredStates<Real>& stored = call.stored;
  at.set(stored.C, Buffer::C);
  at.set(stored.dC, Buffer::dC);
  at.set(stored.checkpoints, Buffer::checkpoints);
  at.set(stored.n, Buffer::n);
  at.set(stored.dn, Buffer::dn);
  at.set(stored.n_work, Buffer::n_work);
  at.set(stored.segment_C, Buffer::segment_C);
  at.set(stored.segment_n, Buffer::segment_n);
  at.set(stored.inverse_scale_C, Buffer::inverse_scale_C);
  at.set(stored.inverse_scale_dC, Buffer::inverse_scale_dC);
  at.set(stored.own_C0, Buffer::own_C0);
  at.set(stored.own_n0, Buffer::own_n0);
  at.set(stored.dqk_partials, Buffer::dqk_partials);
  GradientSums<Real>& sums = call.sums;
  at.set(sums.rows, Buffer::row_sums);
  at.set(sums.columns, Buffer::column_sums);
  at.set(sums.outflow, Buffer::outflow);
  at.set(sums.through, Buffer::through);
  at.set(sums.traces, Buffer::traces);
}

inline Dims dims_of(const Plan& plan) {
  const MlstmShape& shape = plan.shape;
  Dims dims{};
  dims.batch = shape.batch;
  dims.tokens = shape.tokens;
  dims.sequences = kernel_sequences(plan);
  dims.qk_heads = static_cast<int>(shape.qk_heads);
  dims.heads = static_cast<int>(shape.heads);
  dims.group = static_cast<int>(shape.heads / shape.qk_heads);
  dims.dqk = static_cast<int>(shape.dqk);
  dims.dhv = static_cast<int>(shape.dhv);
  const TokenCut cut = cut_tokens(plan);
  dims.L = static_cast<int>(cut.chunk);
  dims.kept_chunk = static_cast<int>(cut.kept_chunk);
  dims.chunks_per_row = static_cast<int>(cut.chunks_per_row);
  dims.chunk_count = cut.chunk_count;
  dims.segments = static_cast<int>(plan.segments);
  dims.pieces = static_cast<int>(plan.pieces);
  dims.chunks_per_piece = static_cast<int>(cut.chunks_per_piece);
  dims.chunks_per_segment = static_cast<int>(cut.chunks_per_segment);
  return dims;
}

template <class Args>
Rules rules_of(const Args& args, const Plan& plan) {
  const Settings settings = resolve(args.options, plan.shape.dqk);
  return {.family = settings.family,
          .may_exceed_one = settings.family.may_exceed_one,
          .normalized = settings.normalized,
          .exact = settings.exact,
          .capped = settings.capped,
          .tensors_16_bit = item_size(plan.shape.dtype) == 2,
          .i_type = gate_type(args.i),
          .f_type = gate_type(args.f),
          .eps = settings.eps,
          .scale = settings.scale,
          .cap = settings.cap};
}

template <class Real, class Args>
Call<Real> call_of(const Args& args, const Plan& plan) {
  Call<Real> call{};
  call.dims = dims_of(plan);
  call.rules = rules_of(args, plan);
  call.tensors.q = strided(args.q);
  call.tensors.k = strided(args.k);
  call.tensors.v = strided(args.v);
  call.tensors.i = strided(args.i);
  call.tensors.f = strided(args.f);
  if constexpr (requires { args.h; }) call.tensors.h = strided(args.h);
  if constexpr (requires { args.initial_state; }) {
    call.carried.C0 = strided_state(args.initial_state.C);
    call.carried.n0 = strided_state(args.initial_state.n);
    call.carried.m0 = strided_state(args.initial_state.m);
    call.packing.cu_seqlens = args.cu_seqlens.data;
    call.packing.cu_stride = args.cu_seqlens.strides[0];
    call.packing.cu_is_64_bit = args.cu_seqlens.dtype == DType::int64;
    call.runs.sequences = plan.shape.sequences;
    call.runs.window = plan.run;
  }
  return call;
}

}  // namespace tfla::cuda
