// Names of cases of the state space dual, and of what its calls leave.
#include <algorithm>
#include <cstddef>
#include <ostream>

#include "testkit/operators/ssd_problem.h"

namespace tfla::testkit {
namespace {

SsdOutputs given_only(SsdOutputs all) {
  std::erase_if(all, [](const auto& output) { return !output.second.given(); });
  return all;
}

const char* short_name(DType dtype) {
  switch (dtype) {
    case DType::float32: return "f32";
    case DType::float64: return "f64";
    case DType::bfloat16: return "bf16";
    default: return "f16";
  }
}

}  // namespace

const char* name(SsdRegime regime) {
  constexpr const char* names[] = {"ordinary", "lasting", "kept",  "growing", "brief",
                                   "gone",     "still",   "large", "resets",  "edges"};
  return names[static_cast<std::size_t>(regime)];
}

SsdOutputs outputs(const SsdForward& args) {
  return given_only({{"y", args.y}, {"ungated", args.ungated}, {"S", args.last_state}});
}

SsdOutputs outputs(const SsdBackward& args) {
  return given_only({{"dx", args.dx},
                     {"ddt", args.ddt},
                     {"dA", args.dA},
                     {"dB", args.dB},
                     {"dC", args.dC},
                     {"dD", args.dD},
                     {"dz", args.dz},
                     {"ddt_bias", args.ddt_bias},
                     {"dS0", args.dinitial_state}});
}

SsdOutputs outputs(const SsdStep& args) { return given_only({{"y", args.y}, {"S", args.state}}); }

std::string label(const SsdCase& c) {
  constexpr const char* layouts[] = {"bthd", "bhtd", "fused"};
  constexpr const char* skips[] = {"", "_D", "_DP"};
  constexpr const char* numbers[] = {"", "_seqidx32", "_seqidx64"};
  std::string text = name(c.regime);
  text += std::string("_") + short_name(c.shape.dtype) + "_dt" + short_name(c.shape.gate_dtype) + "_A" +
          short_name(c.A_dtype) + "_D" + short_name(c.D_dtype);
  for (const auto& [axis, value] :
       {std::pair("_B", c.shape.batch), std::pair("_T", c.shape.tokens), std::pair("_G", c.shape.qk_heads),
        std::pair("_H", c.shape.heads), std::pair("_P", c.shape.dhv), std::pair("_S", c.shape.dqk),
        std::pair("_L", c.options.chunk_size), std::pair("_threads", std::int64_t{c.threads})}) {
    text += axis + std::to_string(value);
  }
  if (!c.cu_seqlens.empty()) {
    text += "_packed" + std::to_string(c.cu_seqlens.size() - 1);
    if (c.cu_seqlens.back() < c.shape.tokens) text += "_padded";
  }
  text += std::string("_") + layouts[static_cast<int>(c.layout)] + skips[static_cast<int>(c.skip)] +
          numbers[static_cast<int>(c.seq_idx)];
  if (c.z) text += "_z";
  if (c.dt_bias) text += "_bias";
  if (c.options.dt_softplus) text += "_softplus";
  if (c.options.dt_min > 0) text += "_limits";
  if (c.initial_state) text += c.in_place ? "_inplace" : "_state";
  if (!c.last_state) text += "_nolaststate";
  if (c.last_state_grad) text += "_laststategrad";
  if (c.turned_states) text += "_turned";
  if (c.device == Device::cuda) text += "_cuda";
  if (c.seed != 1) text += "_seed" + std::to_string(c.seed);
  return text;
}

void PrintTo(const SsdCase& description, std::ostream* out) { *out << label(description); }

}  // namespace tfla::testkit
