// From a row of the kernel table, which the plan picks at run time, to a kernel that is compiled for it.
#pragma once

#include <cstddef>
#include <type_traits>
#include <utility>

#include "cuda/common/types.h"
#include "cuda/run_plan.h"
#include "cuda/sm90/entry.h"
#include "plan/kernel_table.h"

namespace tfla::cuda::sm90 {

// A row of the table as a type.
template <std::size_t Index>
struct TableRow {
  static constexpr int rows = kernel_table[Index].rows, columns = kernel_table[Index].columns;
  static constexpr unsigned batches = kernel_table[Index].batches;
  static constexpr unsigned epilogues = kernel_table[Index].epilogues;
};

template <class T>
inline constexpr unsigned bit_of = std::is_same_v<T, __half> ? fp16 : bf16;

// Calls launch(TableRow) for the row of Hopper's kernel K that has this tile. A call of with_row compiles all rows of K
// that take T.
template <Kernel K, class T, class Launch>
void with_row(TileSize tile, const Launch& launch) {
  const auto is_launched = [&]<std::size_t Index>(std::integral_constant<std::size_t, Index> /*row*/) {
    constexpr KernelRow row = kernel_table[Index];
    if constexpr (row.kernel == K && row.needs == Needs::sm90a && (row.types & bit_of<T>) != 0) {
      if (row.rows != tile.rows || row.columns != tile.columns) return false;
      launch(TableRow<Index>{});
      return true;
    } else {
      return false;
    }
  };
  const bool found = [&]<std::size_t... Index>(std::index_sequence<Index...> /*rows*/) {
    return (is_launched(std::integral_constant<std::size_t, Index>{}) || ...);
  }
  (std::make_index_sequence<kernel_table.size()>{});
  if (!found) refuse_launch();
}

}  // namespace tfla::cuda::sm90
