#include "testkit/bounds.h"

#include <algorithm>
#include <cstddef>

namespace tfla::testkit {

double unit_of_rounding(DType dtype) {
  return dtype == DType::bfloat16 ? 0x1p-8 : dtype == DType::float16 ? 0x1p-11 : 0.0;
}

bool on_tensor_cores(const Case& description) {
  return description.device == Device::cuda && unit_of_rounding(description.shape.dtype) > 0;
}

namespace {

// Errors of mlstm_kernels 2.0.6 (mLSTMexp, xl_chunk 128) in bfloat16 on an H200, in the order of all_regimes.
struct Published {
  double h, dq, dk, dv, di, df;
};
constexpr Published published[] = {
    {2.3e-3, 3.6e-3, 4.0e-3, 3.5e-3, 4.2e-3, 1.2e-1}, {2.9e-3, 7.5e-3, 7.8e-3, 7.8e-3, 7.7e-3, 1.7e-2},
    {1.1e-2, 1.4e-2, 1.5e-2, 1.2e-2, 1.7e-2, 4.2e-2}, {5.4e-2, 7.4e-2, 7.2e-2, 4.7e-2, 3.8e-2, 6.6e-2},
    {3.4e-3, 3.8e-3, 4.4e-3, 7.6e-3, 4.6e-2, 8.2e-1}, {6.0e-3, 6.3e-3, 6.6e-3, 6.6e-3, 6.8e-3, 1.2e-2},
    {2.6e-3, 3.1e-3, 3.5e-3, 3.6e-3, 4.0e-3, 1.0e-1}};

double tensor_core_bound(const std::string& tensor, Regime regime) {
  const Published& row = published[static_cast<std::size_t>(regime)];
  if (tensor == "dq") return row.dq;
  if (tensor == "dk") return row.dk;
  if (tensor == "dv") return row.dv;
  if (tensor == "di") return row.di;
  if (tensor == "df") return row.df > 1e-2 ? row.df / 5 : row.df;
  return tensor == "dC0" || tensor == "dn0" ? row.dq : row.h;
}

}  // namespace

double bound(const std::string& tensor, Regime regime, DType dtype, Device device) {
  if (dtype == DType::float64) return 1e-10;
  if (device == Device::cuda && dtype != DType::float32) return tensor_core_bound(tensor, regime);
  const bool gradient = tensor.starts_with('d');
  const double arithmetic = (gradient ? 1e-4 : 1e-5) * (regime == Regime::large_i ? 10 : 1);
  const bool state = tensor == "C" || tensor == "n" || tensor == "dC0" || tensor == "dn0";
  if (state) return arithmetic;
  // Rounding the result: the error is uniform within half a unit of the last place, so its root mean square is about
  // 1.7e-3 of the value in bfloat16 and 2.1e-4 in float16. The bound leaves room for few elements dominating a norm.
  if (dtype == DType::bfloat16) return std::max(2.5e-3, arithmetic);
  if (dtype == DType::float16) return std::max(4e-4, arithmetic);
  return arithmetic;
}

namespace {

DType stored_dtype(const std::string& tensor, const Case& description) {
  return tensor == "di" || tensor == "df" ? description.shape.gate_dtype : description.shape.dtype;
}

}  // namespace

// The bounds take the rounding of a 16-bit number as its root mean square over many elements. Where few elements make
// up the norm, each may be off by the whole unit of rounding: of its own dtype, and on a GPU, where 16-bit products
// read states in bfloat16, of that as well.
double allowed_error(const std::string& tensor, const Case& description) {
  const DType dtype = stored_dtype(tensor, description);
  const MlstmShape& s = description.shape;
  const bool tensor_cores = on_tensor_cores(description);
  double allowed = bound(tensor, description.regime, dtype, description.device);
  if (dtype != s.dtype && description.device == Device::cuda) {
    // Gradients of gates: rounded to the gates' own dtype, but on a GPU made of products in the dtype of q.
    const double products = bound(tensor, description.regime, s.dtype, Device::cuda);
    allowed = std::max(bound(tensor, description.regime, dtype), products);
  }
  const double rounding = unit_of_rounding(dtype) + (tensor_cores ? unit_of_rounding(DType::bfloat16) : 0.0);
  const bool gate = tensor == "di" || tensor == "df", shared = tensor == "dq" || tensor == "dk";
  const std::int64_t row = gate ? s.heads : shared ? s.qk_heads * s.dqk : s.heads * s.dhv;
  // On tensor cores the forget gate's gradients share the error of one rounded state per chunk and head. Few of those
  // make a relative error that scatters: for four, one in forty lies above three times its usual size (F distribution).
  constexpr std::int64_t few_states = 16;
  if (tensor == "df" && tensor_cores) {
    const std::int64_t sequences = description.cu_seqlens.empty() ? s.batch : std::ssize(description.cu_seqlens) - 1;
    MlstmShape one = s;  // a sequence of average length
    one.batch = one.sequences = 1;
    one.tokens = one.longest = s.batch * s.tokens / std::max<std::int64_t>(sequences, 1);
    const std::int64_t chunk = plan(Operation::backward, one, description.options, {.device = Device::cuda}).chunk;
    const std::int64_t chunks = (one.tokens + chunk - 1) / chunk;
    if (sequences * s.heads * chunks < few_states) allowed *= 3;
  }
  if (rounding == 0 || s.batch * s.tokens * row >= many_numbers) return allowed;
  return std::max(allowed, bound(tensor, description.regime, DType::float32) + rounding);
}

double allowed_error(const TensorError& error, const Case& description) {
  const double allowed = allowed_error(error.tensor, description);
  const bool rounds = description.options.formulation == Formulation::recurrent;
  const double unit = description.shape.dtype == DType::float64 ? 0x1p-53 : 0x1p-24;  // of the state
  return std::max(rounds ? std::max(allowed, 4 * unit * error.spread) : allowed, 4 * error.explained);
}

}  // namespace tfla::testkit
