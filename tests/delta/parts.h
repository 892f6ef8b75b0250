// Cases that properties are shown on, and parts of a call.
#pragma once

#include <cstdint>
#include <type_traits>
#include <vector>

#include "tests/delta/problem.h"

namespace tfla::test {

// batch, tokens, query/key heads, value heads, head dimensions, chunk size, packed sequences
struct DeltaSize {
  std::int64_t batch, tokens, qk_heads, heads, dqk, dhv, chunk_size;
  std::vector<std::int64_t> cu_seqlens;
};

inline DeltaCase delta_case(const DeltaSize& s, DType dtype, Decay decay = Decay::biased) {
  DeltaCase c;
  c.shape = {.batch = s.batch,
             .tokens = s.tokens,
             .qk_heads = s.qk_heads,
             .heads = s.heads,
             .dqk = s.dqk,
             .dhv = s.dhv,
             .dtype = dtype,
             .gate_dtype = dtype};
  c.g_dtype = dtype;
  c.decay = decay;
  c.cu_seqlens = s.cu_seqlens;
  c.options = {.write = WriteGate::twice_sigmoid, .normalize_qk = true, .chunk_size = s.chunk_size};
  c.initial_state = c.last_state_grad = true;
  return c;
}

// Tokens [begin, begin + count) of a row of the batch.
template <class Args>
Args part(Args args, std::int64_t batch, std::int64_t begin, std::int64_t count) {
  const auto cut = [&](auto& view) { view = slice(slice(view, 0, batch, 1), 1, begin, count); };
  for (TensorView* view : {&args.q, &args.k, &args.v, &args.beta, &args.g}) cut(*view);
  if constexpr (std::is_same_v<Args, DeltaBackward>) {
    cut(args.dh);
    for (MutableTensorView* view : {&args.dq, &args.dk, &args.dv, &args.dbeta, &args.dg}) cut(*view);
  } else {
    cut(args.h);
  }
  if constexpr (!std::is_same_v<Args, DeltaStep>) args.cu_seqlens = {};
  return args;
}

}  // namespace tfla::test
