#include "api/validate_parts.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "core/read_index.h"

namespace tfla {

namespace {

void check_index_vector(const char* name, const TensorView& view, const char* axes) {
  check_rank(name, view, 1, axes);
  check_dtype(name, view, integers);
  check_tensor(name, view, {view.shape[0]}, axes, LastAxis::any);
}

}  // namespace

void check_keys(const char* name, const TensorView& view, const MlstmShape& shape) {
  check_tensor(name, view, {shape.batch, shape.tokens, shape.qk_heads, shape.dqk}, "(B,T,Hqk,dqk)",
               LastAxis::contiguous);
  check_same_dtype(name, view, "q", shape.dtype);
}

void check_values(const char* name, const TensorView& view, const MlstmShape& shape) {
  check_tensor(name, view, {shape.batch, shape.tokens, shape.heads, shape.dhv}, "(B,T,H,dhv)", LastAxis::contiguous);
  check_same_dtype(name, view, "q", shape.dtype);
}

void check_per_head(const char* name, const TensorView& view, const MlstmShape& shape) {
  check_tensor(name, view, {shape.heads}, "(H)", LastAxis::any);
  check_dtype(name, view, floats);
}

bool has_gradient(const char* name, const TensorView& gradient, const char* input_name, const TensorView& input) {
  if (gradient.given() != input.given()) {
    refuse(fmt::format("tfla: {} is {} and {} is {}; both must be given, or neither", name,
                       gradient.given() ? "given" : "missing", input_name, input.given() ? "given" : "missing"));
  }
  return gradient.given();
}

void check_state_part(std::string_view name, const TensorView& view, const MlstmShape& shape,
                      std::initializer_list<std::int64_t> extents, const char* axes, LastAxis last_axis) {
  check_tensor(name, view, extents, axes, last_axis);
  if (view.dtype == state_dtype(shape)) return;
  refuse(fmt::format("tfla: {} has dtype {}; states are {} when q is {}", name, tfla::name(view.dtype),
                     tfla::name(state_dtype(shape)), tfla::name(shape.dtype)));
}

void check_state_C(std::string_view name, const TensorView& C, std::int64_t states, const MlstmShape& shape) {
  check_state_part(name, C, shape, {states, shape.heads, shape.dqk, shape.dhv}, "(N,H,dqk,dhv)", LastAxis::contiguous);
}
void check_cu_seqlens(const TensorView& cu, Device device, MlstmShape& shape) {
  if (!cu.given()) return;
  check_index_vector("cu_seqlens", cu, "(N+1)");
  if (shape.batch != 1) {
    refuse(
        fmt::format("tfla: cu_seqlens is given with a batch of {}; packed sequences lie in a batch of 1", shape.batch));
  }
  if (cu.shape[0] == 0) refuse("tfla: cu_seqlens is empty; it must hold at least the 0 it begins with");
  if (cu.shape[0] == 1 && shape.tokens > 0) {
    refuse(fmt::format("tfla: cu_seqlens has 1 element for {} tokens; it must hold where each sequence begins and ends",
                       shape.tokens));
  }
  shape.packed = true;
  shape.sequences = cu.shape[0] - 1;
  if (device != Device::cpu) return;
  std::int64_t previous = read_index(cu, 0);
  if (previous != 0) refuse(fmt::format("tfla: cu_seqlens begins with {}; it must begin with 0", previous));
  shape.longest = 0;
  for (std::int64_t s = 1; s <= shape.sequences; ++s) {
    const std::int64_t next = read_index(cu, s);
    if (next < previous) {
      refuse(fmt::format("tfla: cu_seqlens falls from {} to {} at index {}; it must not decrease", previous, next, s));
    }
    shape.longest = std::max(shape.longest, next - previous);
    previous = next;
  }
  if (previous > shape.tokens) {
    refuse(fmt::format("tfla: cu_seqlens ends with {}; there are {} tokens", previous, shape.tokens));
  }
}

void check_slots(const TensorView& slots, Device device, const MlstmShape& shape, const char* state_name,
                 std::int64_t states) {
  if (!slots.given()) {
    if (states != shape.batch) {
      refuse(fmt::format("tfla: {} has {} states for a batch of {}; they must be equal unless slots is given",
                         state_name, states, shape.batch));
    }
    return;
  }
  check_index_vector("slots", slots, "(B)");
  check_tensor("slots", slots, {shape.batch}, "(B)", LastAxis::any);
  if (device != Device::cpu) return;
  std::vector<std::int64_t> used;
  used.reserve(static_cast<std::size_t>(shape.batch));
  for (std::int64_t b = 0; b < shape.batch; ++b) {
    const std::int64_t slot = read_index(slots, b);
    if (slot == padding_slot) continue;
    if (slot < 0 || slot >= states) {
      refuse(
          fmt::format("tfla: slots[{}] is {}; it must be at least 0 and below {}, the number of states, or {} for "
                      "padding",
                      b, slot, states, padding_slot));
    }
    used.push_back(slot);
  }
  std::sort(used.begin(), used.end());
  const auto twice = std::adjacent_find(used.begin(), used.end());
  if (twice != used.end()) {
    refuse(fmt::format("tfla: slots holds {} twice; every row of the batch needs a state of its own", *twice));
  }
}

}  // namespace tfla
