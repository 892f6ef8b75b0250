// A call as the kernels see it: plain data, passed by value.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/decay.h"

namespace tfla::cuda {

inline constexpr int largest_pieces = 64;  // of a sequence
inline constexpr int reverse_block = 64;   // tokens that Hopper's reverse-time kernel takes at a time: half a chunk

// A [B,T,H,D] tensor (D = 1 for gates). Strides in elements.
struct Rows {
  void* data = nullptr;
  std::int64_t batch = 0;
  std::int64_t token = 0;
  std::int64_t head = 0;
  bool wide = false;  // every row starts on 16 bytes, so that it can be copied in pieces of 16
};

// A [N,H,dqk,dhv] state tensor (n: dhv = 1, m: dqk = dhv = 1), in the type of states.
struct StateRows {
  void* data = nullptr;
  std::int64_t sequence = 0;
  std::int64_t head = 0;
  std::int64_t row = 0;
};

// One chunk of one sequence. Chunks are numbered over all sequences; a sequence owns at least as many numbers as it has
// chunks, and unused ones have length 0.
struct Chunk {
  std::int64_t token;   // first token, in its row of the batch
  std::int64_t packed;  // tokens of all sequences before that token
  int batch;
  int sequence;
  int length;
  int first;  // number of the sequence's first chunk
};

// A segment of a packed sequence. The first of a list holds counts: `sequence` of all, `segment` of those that another
// one of their sequence follows. These come first, then the last ones of every sequence, the longest first.
struct alignas(16) Part {
  int sequence, segment;
  int start, length;  // tokens before the sequence, and of all of it
};

enum class GateType : std::uint8_t { float32, float64, bfloat16, float16 };

// Real: float, or double for float64 tensors. Everything below `// scratch` lies in the caller's scratch memory.
template <class Real>
struct Call {
  // A number that keeps its digits when another of its size is subtracted: float32 work carries the sum of two floats.
  using Log = std::conditional_t<std::is_same_v<Real, double>, double, float2>;

  std::int64_t batch, tokens, sequences;
  int qk_heads, heads, group;  // group = heads / qk_heads
  int dqk, dhv;
  int L;                             // chunk size
  int kept_chunk;                    // spacing of the states that Hopper's forward keeps; 0: it keeps none
  int chunks_per_row;                // one sequence per row of the batch: its chunks; 0: packed sequences
  int segments, chunks_per_segment;  // of a sequence, in stage states
  int pieces, chunks_per_piece;      // of a segment, each with a total of its own
  bool exponential, log_space, normalized, exact, capped;
  bool tensors_16_bit;
  double eps, scale, cap;

  Rows q, k, v, h, dh, dq, dk, dv;
  Rows i, f, di, df;
  GateType i_type, f_type;
  StateRows C0, n0, m0, C_last, n_last, m_last, dC_last, dn_last, dC0, dn0;
  const void* cu_seqlens;  // null: dense
  std::int64_t cu_stride;
  bool cu_is_64_bit;

  // scratch
  Chunk* chunks;         // [numbers]
  std::int64_t numbers;  // upper bound of the number of chunks
  double* c;             // [H,tokens] log i - b, b being the sum of log f inside the chunk; not for 16-bit types
  Log* u;                // [H,tokens] b - m, an exponent of exp_sum
  Log* log_c;            // [H,tokens] c, the other
  Real* qbar;            // [H,tokens] weight of the incoming state in row t
  Real* abar;            // [H,tokens] weight of token j in the outgoing state
  Real* floor;           // [H,tokens] exp(-m), the least denominator; only in forward of 16-bit types
  Real* slope;           // [H,tokens] derivative of den by q.n, times -1 / den
  double* norm_work;     // [numbers,H,dqk] n in progress; only for dqk above 256
  Real* inverse;         // [H,tokens] 1 / den
  Real* deta;            // [H,tokens] gradient of q.n; exact normalizer gradient only
  double* b_last;        // [numbers,H] sum of log f over each chunk
  double* m_start;       // [numbers,H] max state at the start of each chunk
  double* m_end;         // [numbers,H] and at its end
  Real* gbar;            // [numbers,H] decay of the state over the chunk
  void* states;          // [numbers,H,dqk,padded dhv] C at chunk starts, in the stored type
  void* dstates;         // the same for dC at chunk ends
  Real* segment_states;  // [N,H,segments * pieces,dqk,padded dhv]; only with several segments. Or [boundaries(),...]
  void* segment_norms;   // [N,H,segments * pieces,dqk] in the type of n_states
  void* n_states;        // [numbers,H,dqk] double, float for 16-bit types
  Real* dn_states;       // [numbers,H,dqk]

  Real* row_sums;     // [Config::sum_terms,dqk tiles,H,tokens] q.dq
  Real* column_sums;  // [Config::sum_terms,dqk tiles,H,tokens] k.dk
  Real* outflow;      // [dqk tiles,H,tokens] k.dk through the outgoing state
  double* through;    // [numbers,H,through_parts] <C, dC> + <n, dn> past the chunk
  int through_parts;
  double* traces;  // [numbers,H,trace_parts] <C, dC> of both as they are stored, times gbar; null: keys makes none
  int trace_parts;
  Part* parts;  // [1 + most_parts()]; only for Hopper's kernels and packed sequences
  // [numbers,H,tiles of a state] what Hopper's kernels multiply states and dstates of float16 by to have C and dC
  float* state_lowers;
  float* dstate_lowers;
  // [N,H,dqk,dhv] and [N,H,dqk] copies of the initial state; only where the last one takes its place and blocks of
  // Hopper's forward could read what others have written there
  float* own_C0;
  float* own_n0;
  float* halves;  // what the first 256 columns of a larger dqk give in Hopper's forward: see forward/plan.cuh
  // As u, qbar, abar and gbar, of the two blocks of each chunk (reverse_block), with scale / den of a row in u and
  // qbar. u goes with log_c. Null: nobody wants them.
  Log* block_u;
  Real* block_qbar;
  Real* block_abar;
  Real* block_gbar;  // [block_numbers(),H]

  // Tokens of all sequences, and where the vectors of (chunk, head) begin.
  __host__ __device__ std::int64_t all_tokens() const { return batch * tokens; }
  __host__ __device__ std::int64_t vector(const Chunk& chunk, int head) const {
    return head * all_tokens() + chunk.packed;
  }
  // As `numbers`, for the states that are kept.
  __host__ std::int64_t kept_numbers() const {
    return chunks_per_row > 0 ? sequences * ((tokens + kept_chunk - 1) / kept_chunk) : tokens / kept_chunk + sequences;
  }
  // As `numbers`, of such blocks.
  __host__ std::int64_t block_numbers() const {
    return chunks_per_row > 0 ? sequences * ((tokens + reverse_block - 1) / reverse_block)
                              : tokens / reverse_block + sequences;
  }
  // Tokens of a segment, unless the sequence ends in it.
  __host__ __device__ std::int64_t segment_tokens() const { return static_cast<std::int64_t>(chunks_per_segment) * L; }
  __host__ __device__ std::int64_t most_parts() const { return sequences + tokens / segment_tokens(); }
  // Of neighbouring segments of packed sequences on Hopper, and the number of that between `segment` and the next one
  // of the sequence that begins at `start`. A total of one of them lies there first, then the state at the boundary.
  __host__ std::int64_t boundaries() const { return tokens / segment_tokens() + 1; }
  __device__ std::int64_t boundary(int start, int segment, int head) const {
    const auto first =
        static_cast<std::int64_t>(static_cast<unsigned>(start) / static_cast<unsigned>(segment_tokens()));
    return (first + segment) * heads + head;
  }
  __host__ __device__ int padded_dhv() const { return (dhv + 7) / 8 * 8; }
  __host__ __device__ std::int64_t state(std::int64_t number, int head) const {
    return (number * heads + head) * dqk * padded_dhv();
  }
};

// Tokens on states in place: step, and the recurrent formulation.
template <class Real>
struct StepCall {
  Call<Real> call;
  StateRows C, n, m;    // the states to update
  std::int64_t states;  // how many there are
  const void* slots;    // [B] which state a row uses; null: its own number
  std::int64_t slot_stride;
  bool slots_are_64_bit;

  // scratch
  Decay<Real>* decay;  // [H,tokens]
  Real* weight;        // [H,tokens]
};

}  // namespace tfla::cuda
