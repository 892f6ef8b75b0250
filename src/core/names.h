// The words for the choices of a call, for people and reports. name(DType) is in tfla/tensor_view.h.
#pragma once

#include "core/gate_family.h"
#include "tfla/plan.h"

namespace tfla {

[[nodiscard]] constexpr const char* name(Operation operation) {
  switch (operation) {
    case Operation::forward: return "forward";
    case Operation::backward: return "backward";
    case Operation::step: return "step";
  }
  return "unknown";
}

[[nodiscard]] constexpr const char* name(Formulation formulation) {
  switch (formulation) {
    case Formulation::chunkwise: return "chunkwise";
    case Formulation::parallel: return "parallel";
    case Formulation::recurrent: return "recurrent";
  }
  return "unknown";
}

[[nodiscard]] constexpr const char* name(InputGate gate) {
  return is_known(gate) ? gate_table[static_cast<std::size_t>(gate)].short_name : "unknown";
}

[[nodiscard]] constexpr const char* name(Normalizer normalizer) {
  switch (normalizer) {
    case Normalizer::automatic: return "automatic";
    case Normalizer::none: return "none";
    case Normalizer::max: return "max";
  }
  return "unknown";
}

[[nodiscard]] constexpr const char* name(Device device) { return device == Device::cpu ? "cpu" : "cuda"; }

}  // namespace tfla
