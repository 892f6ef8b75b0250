// Gradients as calls of forward: with other names for what it reads and writes, the kernel of forward makes dV, dK and
// dQ.
#pragma once

#include <utility>

#include "cuda/call.h"

namespace tfla::cuda::sm90::forward {

// Forward counts in token blocks, two of which are a chunk of backward.
inline Call<float> in_token_blocks(const Call<float>& call) {
  Call<float> twin = call;
  twin.dims.L = token_block;
  const int blocks = call.dims.L / token_block;
  if (call.dims.chunks_per_row > 0)
    twin.dims.chunks_per_row = static_cast<int>((call.dims.tokens + token_block - 1) / token_block);
  twin.dims.chunks_per_segment *= blocks;
  twin.dims.chunks_per_piece *= blocks;
  twin.gates.gbar = call.gates.block_gbar;
  return twin;
}

// Reverse time: keys are the rows, and queries the columns, which have scale / den in their gate vectors.
inline Call<float> in_reverse_time(const Call<float>& call) {
  Call<float> twin = in_token_blocks(call);
  twin.carried.C0 = call.carried.dC_last;
  twin.gates.u = call.gates.log_c;
  twin.gates.log_c = call.gates.block_u;
  twin.gates.qbar = call.gates.block_abar;
  twin.gates.abar = call.gates.block_qbar;
  return twin;
}

// dV = abar K dC + P^T dH,   dC <- gbar dC + (qbar Q)^T dH
inline Call<float> twin_of_grad_v(const Call<float>& call) {
  Call<float> twin = in_reverse_time(call);
  twin.dims.kept_chunk = call.dims.L;
  twin.tensors.q = call.tensors.k;
  twin.tensors.k = call.tensors.q;
  twin.tensors.v = call.tensors.dh;
  twin.tensors.h = call.tensors.dv;
  twin.carried.C_last = call.carried.dC0;
  twin.carried.n_last = call.carried.dn0;
  twin.stored.C = call.stored.dC;
  return twin;
}

// dK = abar V dC^T + dS^T Q,   dC^T <- gbar dC^T + dH^T (qbar Q)
inline Call<float> twin_of_grad_k(const Call<float>& call) {
  Call<float> twin = in_reverse_time(call);
  std::swap(twin.dims.dqk, twin.dims.dhv);
  twin.tensors.q = call.tensors.v;
  twin.tensors.k = call.tensors.dh;
  twin.tensors.v = call.tensors.q;
  twin.tensors.h = call.tensors.dk;
  twin.carried.C_last = call.carried.C0;  // only whether there is one: <C, dC> of the initial state
  twin.sums.rows = call.sums.columns;
  return twin;
}

// dQ = qbar dH C^T + dS K,   C^T <- gbar C^T + V^T (abar K)
inline Call<float> twin_of_grad_q(const Call<float>& call) {
  Call<float> twin = in_token_blocks(call);
  std::swap(twin.dims.dqk, twin.dims.dhv);
  twin.tensors.q = call.tensors.dh;
  twin.tensors.k = call.tensors.v;
  twin.tensors.v = call.tensors.k;
  twin.tensors.h = call.tensors.dq;
  twin.gates.u = call.gates.block_u;
  twin.gates.qbar = call.gates.block_qbar;
  twin.gates.abar = call.gates.block_abar;
  return twin;
}

}  // namespace tfla::cuda::sm90::forward
