// Cases that properties are shown on, and parts of a call.
#pragma once

#include <cstdint>
#include <type_traits>
#include <vector>

#include "tests/ssd/problem.h"

namespace tfla::test {

// batch, tokens, groups, heads, P, S, chunk size, packed sequences
struct SsdSize {
  std::int64_t batch, tokens, groups, heads, P, S, chunk_size;
  std::vector<std::int64_t> cu_seqlens;
};

inline SsdCase ssd_case(const SsdSize& s, DType dtype) {
  SsdCase c;
  c.shape = {.batch = s.batch,
             .tokens = s.tokens,
             .qk_heads = s.groups,
             .heads = s.heads,
             .dqk = s.S,
             .dhv = s.P,
             .dtype = dtype,
             .gate_dtype = dtype};
  c.A_dtype = c.D_dtype = dtype;
  c.skip = Skip::per_channel;
  c.z = c.dt_bias = true;
  c.cu_seqlens = s.cu_seqlens;
  c.options = {.dt_softplus = true, .chunk_size = s.chunk_size};
  c.initial_state = c.last_state_grad = true;
  return c;
}

// Tokens [begin, begin + count) of a row of the batch.
template <class Args>
Args part(Args args, std::int64_t batch, std::int64_t begin, std::int64_t count) {
  const auto cut = [&](auto& view) {
    if (view.given()) view = slice(slice(view, 0, batch, 1), 1, begin, count);
  };
  for (TensorView* view : {&args.x, &args.dt, &args.B, &args.C, &args.z}) cut(*view);
  if constexpr (std::is_same_v<Args, SsdBackward>) {
    for (TensorView* view : {&args.dy, &args.ungated, &args.seq_idx}) cut(*view);
    for (MutableTensorView* view : {&args.dx, &args.ddt, &args.dB, &args.dC, &args.dz}) cut(*view);
  } else {
    cut(args.y);
  }
  if constexpr (std::is_same_v<Args, SsdForward>) {
    cut(args.ungated);
    cut(args.seq_idx);
  }
  if constexpr (!std::is_same_v<Args, SsdStep>) args.cu_seqlens = {};
  return args;
}

}  // namespace tfla::test
