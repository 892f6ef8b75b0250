// The checks that validation is made of: single tensors, and tensors among each other.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

#include "tfla/tensor_view.h"

namespace tfla {

[[noreturn]] void refuse(const std::string& sentence);  // throws InvalidArgument

[[nodiscard]] std::string shape_text(const TensorView& view);

enum class LastAxis : std::uint8_t { contiguous, any };

// Rank, extents, pointer, alignment, strides, range of addresses. `axes` is how the message writes the shape.
void check_tensor(std::string_view name, const TensorView& view, std::initializer_list<std::int64_t> shape,
                  std::string_view axes, LastAxis last_axis);
// The same when the extents are not known yet.
void check_rank(std::string_view name, const TensorView& view, int rank, std::string_view axes);

void check_dtype(std::string_view name, const TensorView& view, std::initializer_list<DType> accepted);
void check_same_dtype(std::string_view name, const TensorView& view, std::string_view other_name, DType other);

// Collects the tensors of a call; every output must be apart from every other tensor.
class OverlapCheck {
 public:
  void input(std::string_view name, const TensorView& view);
  void output(std::string_view name, const TensorView& view);
  // An output that may be the very same view as an input of this name.
  void output_in_place_of(std::string_view name, const TensorView& view, std::string_view input_name);

 private:
  struct Entry {
    std::string_view name;
    TensorView view;
    bool written;
    std::uintptr_t begin, end;  // its range of addresses; all of them where that cannot be counted
  };
  // An entry, or nothing yet: to begin with thirty of them would take longer than to check the ten of a call.
  union Slot {
    Slot() {}  // NOLINT(modernize-use-equals-default): leaves the entry alone
    Entry entry;
  };
  void add(std::string_view name, const TensorView& view, bool written, std::string_view twin);

  std::array<Slot, 32> entries_;
  std::size_t count_ = 0;
  bool any_written_ = false;
};

}  // namespace tfla
