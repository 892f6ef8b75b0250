#include "core/overlap.h"

#include <algorithm>
#include <array>
#include <cstdlib>

namespace tfla {

namespace {

// Sums of several 64-bit products.
__extension__ using Wide = __int128;

// One term of the address difference: stride * x with x in [low, high].
struct Term {
  std::int64_t stride;
  std::int64_t low;
  std::int64_t high;
};

struct Search {
  std::array<Term, 2 * TensorView::max_rank> terms{};
  int count = 0;
  int nodes_left = 10000;

  // x and -x reach the same addresses, so every stride is made positive.
  void add(std::int64_t stride, std::int64_t low, std::int64_t high) {
    if (stride == 0) return;
    if (stride < 0) {
      stride = -stride;
      std::swap(low, high);
      low = -low;
      high = -high;
    }
    for (int t = 0; t < count; ++t) {
      if (terms[t].stride == stride) {
        terms[t].low += low;
        terms[t].high += high;
        return;
      }
    }
    terms[count++] = {stride, low, high};
  }

  // Is there a choice of the terms from `index` on whose sum lies strictly between low and high?
  bool reaches(int index, Wide low, Wide high) {
    if (index == count) return low < 0 && 0 < high;
    if (--nodes_left < 0) return true;
    Wide rest_low = 0;
    Wide rest_high = 0;
    for (int t = index + 1; t < count; ++t) {
      rest_low += static_cast<Wide>(terms[t].stride) * terms[t].low;
      rest_high += static_cast<Wide>(terms[t].stride) * terms[t].high;
    }
    const Term& term = terms[index];
    for (std::int64_t x = first_candidate(term, low - rest_high); x <= term.high; ++x) {
      const Wide value = static_cast<Wide>(term.stride) * x;
      if (value + rest_low >= high) return false;
      if (value + rest_high > low && reaches(index + 1, low - value, high - value)) return true;
    }
    return false;
  }

  // The least x of a term that can bring the sum above `bound`.
  static std::int64_t first_candidate(const Term& term, Wide bound) {
    const Wide quotient = bound / term.stride - 1;
    return static_cast<std::int64_t>(std::clamp<Wide>(quotient, term.low, term.high));
  }
};

bool decide(Search& search, std::int64_t low, std::int64_t high) {
  std::sort(search.terms.begin(), search.terms.begin() + search.count,
            [](const Term& a, const Term& b) { return a.stride > b.stride; });
  return search.reaches(0, low, high);
}

// Each axis steps over all that follow it, none of them backwards.
bool is_row_major(const TensorView& view) {
  std::int64_t reach = 1;  // as below
  for (int axis = view.rank - 1; axis >= 0; --axis) {
    if (view.shape[axis] <= 1) continue;
    std::int64_t more = 0;
    if (view.strides[axis] < reach || __builtin_mul_overflow(view.strides[axis], view.shape[axis] - 1, &more) ||
        __builtin_add_overflow(reach, more, &reach))
      return false;
  }
  return true;
}

}  // namespace

bool overlap(const TensorView& a, const TensorView& b) {
  if (is_empty(a) || is_empty(b)) return false;
  const auto address_a = reinterpret_cast<std::uintptr_t>(a.data);
  const auto address_b = reinterpret_cast<std::uintptr_t>(b.data);
  std::int64_t low_a = 0, high_a = 0, low_b = 0, high_b = 0;
  if (!byte_range(a, low_a, high_a) || !byte_range(b, low_b, high_b)) return true;
  const auto distance = static_cast<std::int64_t>(address_b - address_a);  // of b from a
  if (distance + low_b >= high_a || distance + high_b <= low_a) return false;
  Search search;
  for (int axis = 0; axis < a.rank; ++axis) {
    if (a.shape[axis] > 1) search.add(a.strides[axis] * item_size(a.dtype), 0, a.shape[axis] - 1);
  }
  for (int axis = 0; axis < b.rank; ++axis) {
    if (b.shape[axis] > 1) search.add(b.strides[axis] * item_size(b.dtype), 1 - b.shape[axis], 0);
  }
  // Elements at offsets s in a and s' in b meet if distance - item_a < s - s' < distance + item_b.
  return decide(search, distance - item_size(a.dtype), distance + item_size(b.dtype));
}

bool overlaps_itself(const TensorView& view) {
  // Sufficient and, for the layouts in use, necessary: sorted by stride, each axis steps over all smaller ones. Most
  // tensors are sorted.
  if (is_row_major(view)) return false;
  std::array<std::pair<std::int64_t, std::int64_t>, TensorView::max_rank> axes{};  // stride and extent
  for (int axis = 0; axis < view.rank; ++axis) {
    if (view.shape[axis] == 0) return false;
    if (view.shape[axis] > 1) axes[axis] = {std::abs(view.strides[axis]), view.shape[axis]};
  }
  std::sort(axes.begin(), axes.end());
  Wide reach = 1;  // elements from the first to one past the last of the smaller axes
  for (const auto& [stride, extent] : axes) {
    if (extent <= 1) continue;
    if (stride < reach) return true;
    reach += static_cast<Wide>(stride) * (extent - 1);
  }
  return false;
}

}  // namespace tfla
