#include <cstddef>
#include <cstdint>
#include <limits>

#include "tests/ssd/validation.h"

namespace tfla::test {
namespace {

constexpr double nan = std::numeric_limits<double>::quiet_NaN(), infinity = std::numeric_limits<double>::infinity();
constexpr std::int64_t huge = std::int64_t{1} << 62;

}  // namespace

// Every optional tensor given: B 2, T 6, H 2, P 3, G 1, S 4.
SsdCase good_ssd_case() {
  SsdCase c;
  c.shape = {.batch = 2, .tokens = 6, .qk_heads = 1, .heads = 2, .dqk = 4, .dhv = 3};
  c.skip = Skip::per_channel;
  c.z = c.dt_bias = true;
  c.seq_idx = testkit::Numbers::int32;
  c.initial_state = c.last_state_grad = true;
  return c;
}

Snapshot all_contents(const SsdProblem& problem) {
  const SsdBackward& b = problem.backward;
  Snapshot all = snapshot(outputs(problem.forward));
  all.merge(snapshot(outputs(b)));
  for (const auto& [name, view] :
       {std::pair("x", b.x), std::pair("dt", b.dt), std::pair("A", b.A), std::pair("B", b.B), std::pair("C", b.C),
        std::pair("D", b.D), std::pair("z", b.z), std::pair("dt_bias", b.dt_bias), std::pair("dy", b.dy),
        std::pair("seq_idx", b.seq_idx), std::pair("initial_state", b.initial_state),
        std::pair("dlast_state", b.dlast_state)}) {
    if (view.given()) all[name] = testkit::gather(view);
  }
  return all;
}

template <class Args>
std::vector<BadRow<Args>> common_ssd_rows() {
  return {
      {"x not given", "x", [](Args& a) { a.x = {}; }},
      {"dt not given", "dt", [](Args& a) { a.dt = {}; }},
      {"A not given", "A", [](Args& a) { a.A = {}; }},
      {"B not given", "B", [](Args& a) { a.B = {}; }},
      {"C not given", "C", [](Args& a) { a.C = {}; }},
      {"x of rank 3", "x must|x has", [](Args& a) { a.x.rank = 3; }},
      {"x of no rank", "x", [](Args& a) { a.x.rank = 77; }},
      {"B of rank 3", "B", [](Args& a) { a.B.rank = 3; }},
      {"C of rank 3", "C", [](Args& a) { a.C.rank = 3; }},
      {"dt of rank 4", "dt", [](Args& a) { a.dt.rank = 4; }},
      {"A of rank 2", "A",
       [](Args& a) {
         a.A = TensorView(a.A.data, a.A.dtype, {2, 1});
       }},
      {"D of rank 3", "D has 3 axes.*H,P",
       [](Args& a) {
         a.D = TensorView(a.D.data, a.D.dtype, {2, 3, 1});
       }},
      {"D of no rank", "D", [](Args& a) { a.D.rank = -1; }},
      {"z of rank 3", "z", [](Args& a) { a.z.rank = 3; }},
      {"dt_bias of rank 2", "dt_bias",
       [](Args& a) {
         a.dt_bias = TensorView(a.dt_bias.data, a.dt_bias.dtype, {1, 2});
       }},
      {"C with another state dimension", "C", [](Args& a) { a.C.shape[3] = 3; }},
      {"C with another number of groups", "C", [](Args& a) { a.C.shape[2] = 2; }},
      {"B with another batch", "B", [](Args& a) { a.B.shape[0] = 1; }},
      {"B with fewer tokens", "B", [](Args& a) { a.B.shape[1] -= 1; }},
      {"C with fewer tokens", "C", [](Args& a) { a.C.shape[1] -= 1; }},
      {"dt with fewer heads", "dt", [](Args& a) { a.dt.shape[2] = 1; }},
      {"dt with fewer tokens", "dt", [](Args& a) { a.dt.shape[1] -= 1; }},
      {"A of another number of heads", "A", [](Args& a) { a.A.shape[0] = 1; }},
      {"D of another number of heads", "D", [](Args& a) { a.D.shape[0] = 1; }},
      {"D of another dimension", "D", [](Args& a) { a.D.shape[1] = 2; }},
      {"D per head of another number of heads", "D", [](Args& a) { a.D = slice(a.A, 0, 0, 1); }},
      {"z with another dimension", "z", [](Args& a) { a.z.shape[3] = 2; }},
      {"dt_bias of another number of heads", "dt_bias", [](Args& a) { a.dt_bias.shape[0] = 3; }},
      {"heads that are no multiple", "2 heads.*4 groups", [](Args& a) { a.B.shape[2] = a.C.shape[2] = 4; }},
      {"no heads", "heads H", [](Args& a) { a.x.shape[2] = 0; }},
      {"head dimension 0", "head dimension P", [](Args& a) { a.x.shape[3] = 0; }},
      {"no groups", "groups G", [](Args& a) { a.B.shape[2] = a.C.shape[2] = 0; }},
      {"state dimension 0", "state dimension S", [](Args& a) { a.B.shape[3] = a.C.shape[3] = 0; }},
      {"negative number of tokens", "x|tokens", [](Args& a) { a.x.shape[1] = -1; }},
      {"negative batch", "z", [](Args& a) { a.z.shape[0] = -2; }},
      {"overflowing tokens", "x|tokens|B", [](Args& a) { a.x.shape[1] = a.B.shape[1] = huge; }},
      {"overflowing stride", "x", [](Args& a) { a.x.strides[1] = huge; }},
      {"overflowing stride of dt", "dt", [](Args& a) { a.dt.strides[0] = -huge; }},
      {"overflowing stride of D", "D", [](Args& a) { a.D.strides[0] = huge; }},
      {"least stride there is", "C", [](Args& a) { a.C.strides[0] = std::numeric_limits<std::int64_t>::min(); }},
      {"x of integers", "x", [](Args& a) { a.x.dtype = DType::int32; }},
      {"B of another dtype", "B", [](Args& a) { a.B.dtype = DType::bfloat16; }},
      {"C of another dtype", "C", [](Args& a) { a.C.dtype = DType::float64; }},
      {"z of another dtype", "z", [](Args& a) { a.z.dtype = DType::float16; }},
      {"dt of integers", "dt", [](Args& a) { a.dt.dtype = DType::int64; }},
      {"A of no dtype", "A", [](Args& a) { a.A.dtype = static_cast<DType>(99); }},
      {"D of integers", "D", [](Args& a) { a.D.dtype = DType::int32; }},
      {"D per head of integers", "D", [](Args& a) { a.D = TensorView(a.D.data, DType::int32, {2}); }},
      {"dt_bias of integers", "dt_bias", [](Args& a) { a.dt_bias.dtype = DType::int32; }},
      {"null x", "x", [](Args& a) { a.x.data = nullptr; }},
      {"null dt", "dt", [](Args& a) { a.dt.data = nullptr; }},
      {"null A", "A", [](Args& a) { a.A.data = nullptr; }},
      {"null B", "B", [](Args& a) { a.B.data = nullptr; }},
      {"null C", "C", [](Args& a) { a.C.data = nullptr; }},
      {"null D", "D", [](Args& a) { a.D.data = nullptr; }},
      {"null z", "z", [](Args& a) { a.z.data = nullptr; }},
      {"null dt_bias", "dt_bias", [](Args& a) { a.dt_bias.data = nullptr; }},
      {"misaligned x", "x", [](Args& a) { misalign(a.x); }},
      {"misaligned dt", "dt", [](Args& a) { misalign(a.dt); }},
      {"misaligned A", "A", [](Args& a) { misalign(a.A); }},
      {"B off by half an element", "B", [](Args& a) { misalign(a.B, 2); }},
      {"misaligned D", "D", [](Args& a) { misalign(a.D); }},
      {"misaligned z", "z", [](Args& a) { misalign(a.z); }},
      {"misaligned dt_bias", "dt_bias", [](Args& a) { misalign(a.dt_bias); }},
      {"x with a strided last axis", "x", [](Args& a) { a.x.strides[3] = 2; }},
      {"B with a strided last axis", "B", [](Args& a) { a.B.strides[3] = 0; }},
      {"C with a reversed last axis", "C", [](Args& a) { a.C.strides[3] = -1; }},
      {"z with a strided last axis", "z", [](Args& a) { a.z.strides[3] = 2; }},
      {"chunk size below zero", "chunk_size is -1", [](Args& a) { a.options.chunk_size = -1; }},
      {"dt_min below zero", "dt_min is -0.5", [](Args& a) { a.options.dt_min = -0.5; }},
      {"dt_min NaN", "dt_min is nan", [](Args& a) { a.options.dt_min = nan; }},
      {"dt_max below dt_min", "dt_max is 0.1",
       [](Args& a) {
         a.options.dt_min = 0.2;
         a.options.dt_max = 0.1;
       }},
      {"dt_max NaN", "dt_max is nan", [](Args& a) { a.options.dt_max = nan; }},
      {"dt_max below every number", "dt_max is -inf", [](Args& a) { a.options.dt_max = -infinity; }},
  };
}

template <class Args>
std::vector<BadRow<Args>> sequence_ssd_rows() {
  static const std::int64_t boundaries[] = {0, 2, 6};
  return {
      {"initial_state of rank 3", "initial_state", [](Args& a) { a.initial_state.rank = 3; }},
      {"initial_state in bfloat16", "initial_state has dtype bfloat16; states are float32 when x is float32",
       [](Args& a) { a.initial_state.dtype = DType::bfloat16; }},
      {"initial_state in float64", "initial_state", [](Args& a) { a.initial_state.dtype = DType::float64; }},
      {"initial_state of another shape", "initial_state", [](Args& a) { a.initial_state.shape[2] = 2; }},
      {"initial_state with P and S exchanged", "initial_state",
       [](Args& a) { a.initial_state = a.initial_state.transposed(2, 3); }},
      {"initial_state of too few sequences", "initial_state", [](Args& a) { a.initial_state.shape[0] = 1; }},
      {"null initial_state", "initial_state", [](Args& a) { a.initial_state.data = nullptr; }},
      {"misaligned initial_state", "initial_state", [](Args& a) { misalign(a.initial_state); }},
      {"overflowing stride of a state", "initial_state", [](Args& a) { a.initial_state.strides[3] = huge; }},
      {"seq_idx of floats", "seq_idx", [](Args& a) { a.seq_idx.dtype = DType::float32; }},
      {"seq_idx of rank 1", "seq_idx", [](Args& a) { a.seq_idx.rank = 1; }},
      {"seq_idx of fewer tokens", "seq_idx", [](Args& a) { a.seq_idx.shape[1] = 5; }},
      {"seq_idx of another batch", "seq_idx", [](Args& a) { a.seq_idx.shape[0] = 3; }},
      {"null seq_idx", "seq_idx", [](Args& a) { a.seq_idx.data = nullptr; }},
      {"misaligned seq_idx", "seq_idx", [](Args& a) { misalign(a.seq_idx); }},
      {"packed sequences in a batch of 2", "cu_seqlens is given with a batch of 2",
       [](Args& a) { a.cu_seqlens = TensorView(boundaries, DType::int64, {3}); }},
  };
}

template std::vector<BadRow<SsdForward>> common_ssd_rows();
template std::vector<BadRow<SsdBackward>> common_ssd_rows();
template std::vector<BadRow<SsdStep>> common_ssd_rows();
template std::vector<BadRow<SsdForward>> sequence_ssd_rows();
template std::vector<BadRow<SsdBackward>> sequence_ssd_rows();

}  // namespace tfla::test
