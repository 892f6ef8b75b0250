// A call as the kernels see it: plain data, passed by value.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/decay.h"
#include "core/gate_family.h"

namespace tfla::cuda {

inline constexpr int largest_pieces = 64;  // of a sequence
inline constexpr int token_block = 64;     // tokens that Hopper's reverse-time kernel takes at a time: half a chunk

// A [B,T,H,D] tensor (D = 1 for gates). Strides in elements.
struct Strided {
  void* data = nullptr;
  std::int64_t batch = 0;
  std::int64_t token = 0;
  std::int64_t head = 0;
  bool wide = false;  // every row starts on 16 bytes, so that it can be copied in pieces of 16
};

// A [N,H,dqk,dhv] state tensor (n: dhv = 1, m: dqk = dhv = 1), in the type of states.
struct StridedState {
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
struct alignas(16) PackedSegment {
  int sequence, segment;
  int start, length;  // tokens before the sequence, and of all of it
};

enum class GateType : std::uint8_t { float32, float64, bfloat16, float16 };

// Sizes of a call, and how its tokens are cut.
struct Dims {
  std::int64_t batch, tokens, sequences;
  int qk_heads, heads, group;  // group = heads / qk_heads
  int dqk, dhv;
  int L;                             // chunk size
  int kept_chunk;                    // spacing of the states that Hopper's forward keeps; 0: it keeps none
  int chunks_per_row;                // one sequence per row of the batch: its chunks; 0: packed sequences
  int segments, chunks_per_segment;  // of a sequence, in stage states
  int pieces, chunks_per_piece;      // of a segment, each with a total of its own
  std::int64_t chunk_count;          // upper bound of the number of chunks

  [[nodiscard]] __host__ __device__ std::int64_t all_tokens() const { return batch * tokens; }
  // Where the vectors of (chunk, head) begin.
  [[nodiscard]] __host__ __device__ std::int64_t vector(const Chunk& chunk, int head) const {
    return head * all_tokens() + chunk.packed;
  }
  // Upper bounds of the number of kept states, and of blocks of 64 tokens.
  [[nodiscard]] __host__ std::int64_t kept_count() const { return parts_of(kept_chunk); }
  [[nodiscard]] __host__ std::int64_t token_block_count() const { return parts_of(token_block); }
  // Tokens of a segment, unless the sequence ends in it.
  [[nodiscard]] __host__ __device__ std::int64_t segment_tokens() const {
    return static_cast<std::int64_t>(chunks_per_segment) * L;
  }
  [[nodiscard]] __host__ __device__ std::int64_t most_packed_segments() const {
    return sequences + tokens / segment_tokens();
  }
  // Boundaries between neighbouring segments of packed sequences, on Hopper. `boundary` is the number of the one
  // between `segment` and the next one of the sequence that begins at `start`. The total of that segment lies there
  // first, then the state at the boundary.
  [[nodiscard]] __host__ std::int64_t boundaries() const { return tokens / segment_tokens() + 1; }
  [[nodiscard]] __device__ std::int64_t boundary(int start, int segment, int head) const {
    const auto first =
        static_cast<std::int64_t>(static_cast<unsigned>(start) / static_cast<unsigned>(segment_tokens()));
    return (first + segment) * heads + head;
  }
  // Checkpoints of Hopper's backward: at the start of a sequence, every `apart` tokens, and at its end. The number of
  // the first one of the sequence that begins at `start`.
  [[nodiscard]] __host__ __device__ std::int64_t first_checkpoint(int sequence, std::int64_t start, int apart) const {
    return chunks_per_row > 0 ? sequence * ((tokens + apart - 1) / apart + 1) : start / apart + 2 * sequence;
  }
  [[nodiscard]] __host__ __device__ int padded_dhv() const { return (dhv + 7) / 8 * 8; }
  [[nodiscard]] __host__ __device__ std::int64_t state(std::int64_t number, int head) const {
    return (number * heads + head) * dqk * padded_dhv();
  }

 private:
  [[nodiscard]] __host__ std::int64_t parts_of(std::int64_t size) const {
    return chunks_per_row > 0 ? sequences * ((tokens + size - 1) / size) : tokens / size + sequences;
  }
};

// The resolved options of a call.
struct Rules {
  GateFamily family;
  bool may_exceed_one;  // as the family says: all that matrix kernels have to know of it
  bool normalized, exact, capped;
  bool tensors_16_bit;
  GateType i_type, f_type;
  double eps, scale, cap;
};

struct Tensors {
  Strided q, k, v, h, dh, dq, dk, dv;
  Strided dq_heads, dk_heads;  // [B,T,H,dqk] of every head of v: dq and dk themselves, or what sum_groups adds up
  Strided i, f, di, df;
};

// The states that a caller gives and takes, and their gradients.
struct CarriedStates {
  StridedState C0, n0, m0, C_last, n_last, m_last, dC_last, dn_last, dC0, dn0;
};

// Where sequences begin and end, and what is listed of it in scratch. Where sequences are merged, these are runs.
struct Packing {
  const void* cu_seqlens;  // null: dense
  std::int64_t cu_stride;
  bool cu_is_64_bit;
  Chunk* chunks;            // [chunk_count]
  PackedSegment* segments;  // [1 + most_packed_segments()]; only for Hopper's kernels and packed sequences
};

// Short packed sequences merged into runs, which all kernels but those of gates take for sequences. A sequence that
// begins inside of a run resets the gates there (common/runs.cuh).
struct Runs {
  const void* cu_seqlens;  // of the sequences
  std::int64_t cu_stride;
  bool cu_is_64_bit;
  std::int64_t sequences;       // how many
  std::int64_t window;          // a run has the sequences that begin in so many tokens
  std::int64_t* starts;         // [runs + 1] where runs begin and end; null: nothing is merged
  std::uint32_t* first_tokens;  // [first_token_words] a bit for each token: whether a sequence begins there; or null
};

// A number that keeps its digits when another of its size is subtracted: float32 work carries the sum of two floats.
template <class Real>
using Log = std::conditional_t<std::is_same_v<Real, double>, double, float2>;

// Scratch of stage gates: scalars of tokens and of chunks.
template <class Real>
struct GateVectors {
  double* c;         // [H,tokens] log i - b, b being the sum of log f inside the chunk; not for 16-bit types
  Log<Real>* u;      // [H,tokens] b - m, an exponent of exp_sum
  Log<Real>* log_c;  // [H,tokens] c, the other
  Real* qbar;        // [H,tokens] weight of the incoming state in row t
  Real* abar;        // [H,tokens] weight of token j in the outgoing state
  Real* floor;       // [H,tokens] exp(-m), the least denominator; only in forward of 16-bit types
  Real* slope;       // [H,tokens] derivative of den by q.n, times -1 / den
  Real* inverse;     // [H,tokens] 1 / den
  Real* deta;        // [H,tokens] gradient of q.n; exact normalizer gradient only
  double* b_last;    // [chunk_count,H] sum of log f over each chunk
  double* m_start;   // [chunk_count,H] max state at the start of each chunk
  double* m_end;     // [chunk_count,H] and at its end
  Real* gbar;        // [chunk_count,H] decay of the state over the chunk
  // As u, qbar, abar and gbar, of the two token blocks of each chunk, with scale / den of a row in u and qbar. u goes
  // with log_c. Null: nothing reads them.
  Log<Real>* block_u;
  Real* block_qbar;
  Real* block_abar;
  Real* block_gbar;  // [token_block_count(),H]
};

// Scratch that holds states, or what becomes of them.
template <class Real>
struct StoredStates {
  void* C;            // [chunk_count,H,dqk,padded dhv] C at chunk starts, in the stored type
  void* dC;           // the same for dC at chunk ends
  void* checkpoints;  // [checkpoints,H,...] C of Hopper's grad_q_forward, in the order of its threads
  void* n;            // [chunk_count,H,dqk] double, float for 16-bit types
  Real* dn;           // [chunk_count,H,dqk]
  double* n_work;     // [chunk_count,H,dqk] n in progress; only for dqk above 256
  Real* segment_C;    // [N,H,segments * pieces,dqk,padded dhv]; only with several segments. Or [boundaries(),...]
  void* segment_n;    // [N,H,segments * pieces,dqk] in the type of n
  // [chunk_count,H,tiles of a state] what Hopper's kernels multiply C and dC of float16 by to undo their scale
  float* inverse_scale_C;
  float* inverse_scale_dC;
  // [N,H,dqk,dhv] and [N,H,dqk] copies of the initial state; only where the last one takes its place and CTAs of
  // Hopper's forward could read what others have written there
  float* own_C0;
  float* own_n0;
  float* dqk_partials;  // what the first 256 columns of a larger dqk give in Hopper's forward: forward/shared.cuh
};

// Scratch of sums from which stage grad_gates makes di and df.
template <class Real>
struct GradientSums {
  Real* rows;       // [Config::sum_terms,parts,H,tokens] q.dq
  Real* columns;    // [Config::sum_terms,parts,H,tokens] k.dk
  Real* outflow;    // [parts,H,tokens] k.dk through the outgoing state
  int parts;        // tiles of dqk
  double* through;  // [chunk_count,H,through_parts] <C, dC> + <n, dn> past the chunk; or [checkpoints,H,through_parts]
  int through_parts;
  double* traces;  // [chunk_count,H,trace_parts] <C, dC> of both as they are stored, times gbar; null: not made
  int trace_parts;
};

// Real: float, or double for float64 tensors.
template <class Real>
struct Call {
  Dims dims;
  Rules rules;
  Tensors tensors;
  CarriedStates carried;
  Packing packing;
  GateVectors<Real> gates;
  StoredStates<Real> stored;
  GradientSums<Real> sums;
  Runs runs;
};

// Tokens on states in place: step, and the recurrent formulation.
template <class Real>
struct StepCall {
  Call<Real> call;
  StridedState C, n, m;  // the states to update
  std::int64_t states;   // how many there are
  const void* slots;     // [B] which state a row uses; null: its own number
  std::int64_t slot_stride;
  bool slots_are_64_bit;

  // scratch
  Decay<Real>* decay;  // [H,tokens]
  Real* weight;        // [H,tokens]
};

}  // namespace tfla::cuda
