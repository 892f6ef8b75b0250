#include "core/checks.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <limits>
#include <memory>

#include "core/overlap.h"
#include "tfla/error.h"

namespace tfla {

namespace {

template <class Range>
std::string parenthesized(const Range& begin, int count) {
  return fmt::format("({})", fmt::join(begin, begin + count, ","));
}

bool same_view(const TensorView& a, const TensorView& b) {
  return a.data == b.data && a.dtype == b.dtype && a.rank == b.rank && a.shape == b.shape && a.strides == b.strides;
}

void check_memory(std::string_view name, const TensorView& view, LastAxis last_axis) {
  if (is_empty(view)) return;
  const int last = view.rank - 1;
  if (last_axis == LastAxis::contiguous && view.shape[last] > 1 && view.strides[last] != 1) {
    refuse(fmt::format("tfla: {} has a stride of {} along its last axis, which must be contiguous (stride 1)", name,
                       view.strides[last]));
  }
  std::int64_t low = 0;
  std::int64_t high = 0;
  const auto address = reinterpret_cast<std::uintptr_t>(view.data);
  const bool countable = byte_range(view, low, high);
  const bool addressable = countable && address >= static_cast<std::uintptr_t>(-low) &&
                           static_cast<std::uintptr_t>(high) <= std::numeric_limits<std::uintptr_t>::max() - address;
  if (view.data == nullptr) refuse(fmt::format("tfla: {} is a null pointer, but has shape {}", name, shape_text(view)));
  if (!addressable) {
    refuse(fmt::format("tfla: {} has shape {} and strides {}, which do not fit in the address space", name,
                       shape_text(view), parenthesized(view.strides.begin(), view.rank)));
  }
  if ((address & static_cast<std::uintptr_t>(item_size(view.dtype) - 1)) != 0) {  // a power of two
    refuse(fmt::format("tfla: {} is not aligned to its {} elements ({} bytes each)", name, tfla::name(view.dtype),
                       item_size(view.dtype)));
  }
}

}  // namespace

void refuse(const std::string& sentence) { throw InvalidArgument(sentence); }

std::string shape_text(const TensorView& view) { return parenthesized(view.shape.begin(), view.rank); }

void check_rank(std::string_view name, const TensorView& view, int rank, std::string_view axes) {
  if (!view.given()) refuse(fmt::format("tfla: {} is missing; a tensor of shape {} is needed", name, axes));
  if (view.rank != rank) {
    refuse(fmt::format("tfla: {} has {} axes; a tensor of shape {} is needed", name, view.rank, axes));
  }
  if (item_size(view.dtype) == 0) {
    refuse(fmt::format("tfla: {} has the unknown dtype {}", name, static_cast<int>(view.dtype)));
  }
  for (int axis = 0; axis < view.rank; ++axis) {
    if (view.shape[axis] < 0) {
      refuse(
          fmt::format("tfla: {} has the negative extent {} in its shape {}", name, view.shape[axis], shape_text(view)));
    }
  }
}

void check_tensor(std::string_view name, const TensorView& view, std::initializer_list<std::int64_t> shape,
                  std::string_view axes, LastAxis last_axis) {
  check_rank(name, view, static_cast<int>(shape.size()), axes);
  if (!std::equal(shape.begin(), shape.end(), view.shape.begin())) {
    refuse(fmt::format("tfla: {} has shape {}; it must be {} = ({})", name, shape_text(view), axes,
                       fmt::join(shape, ",")));
  }
  check_memory(name, view, last_axis);
}

void check_dtype(std::string_view name, const TensorView& view, std::initializer_list<DType> accepted) {
  if (std::find(accepted.begin(), accepted.end(), view.dtype) != accepted.end()) return;
  std::string names;
  for (DType dtype : accepted) names += fmt::format("{}{}", names.empty() ? "" : " or ", tfla::name(dtype));
  refuse(fmt::format("tfla: {} has dtype {}; it must be {}", name, tfla::name(view.dtype), names));
}

void check_same_dtype(std::string_view name, const TensorView& view, std::string_view other_name, DType other) {
  if (view.dtype == other) return;
  refuse(fmt::format("tfla: {} has dtype {}; it must be {}, the dtype of {}", name, tfla::name(view.dtype),
                     tfla::name(other), other_name));
}

void OverlapCheck::input(std::string_view name, const TensorView& view) { add(name, view, false, {}); }
void OverlapCheck::output(std::string_view name, const TensorView& view) { add(name, view, true, {}); }
void OverlapCheck::output_in_place_of(std::string_view name, const TensorView& view, std::string_view input_name) {
  add(name, view, true, input_name);
}

void OverlapCheck::add(std::string_view name, const TensorView& view, bool written, std::string_view twin) {
  if (!view.given()) return;
  std::int64_t low = 0;
  std::int64_t high = 0;
  const bool countable = byte_range(view, low, high);
  const auto address = reinterpret_cast<std::uintptr_t>(view.data);
  const Entry& entry = *std::construct_at(
      &entries_.at(count_).entry,
      Entry{name, view, written, countable ? address + static_cast<std::uintptr_t>(low) : 0,
            countable ? address + static_cast<std::uintptr_t>(high) : std::numeric_limits<std::uintptr_t>::max()});
  if (entry.written && overlaps_itself(entry.view)) {
    refuse(fmt::format("tfla: {} overlaps itself: its strides {} reach some element twice", entry.name,
                       parenthesized(entry.view.strides.begin(), entry.view.rank)));
  }
  any_written_ |= written;
  for (std::size_t e = 0; any_written_ && e < count_; ++e) {
    const Entry& other = entries_[e].entry;
    if (!entry.written && !other.written) continue;
    if (entry.begin >= other.end || other.begin >= entry.end) continue;  // nearly always: the rest is for the others
    if (other.name == twin && same_view(entry.view, other.view)) continue;
    if (overlap(entry.view, other.view)) {
      refuse(fmt::format("tfla: {} overlaps {} in memory; outputs must be apart from all other tensors", entry.name,
                         other.name));
    }
  }
  ++count_;
}

}  // namespace tfla
