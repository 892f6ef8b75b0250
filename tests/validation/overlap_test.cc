// Whether two strided tensors share memory, against counting every byte.
#include "core/overlap.h"

#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <set>

#include "reference/regimes.h"
#include "reference/values.h"
#include "tests/support/support.h"

namespace tfla::test {
namespace {

alignas(64) std::array<std::byte, 4096> arena;

class Draw {
 public:
  explicit Draw(std::uint64_t seed) : state_(seed << 20) {}
  std::int64_t below(std::int64_t limit) {
    return static_cast<std::int64_t>(reference::mix(++state_) % static_cast<std::uint64_t>(limit));
  }

 private:
  std::uint64_t state_;
};

TensorView random_view(Draw& draw) {
  TensorView view;
  view.dtype = draw.below(2) == 0 ? DType::float32 : DType::bfloat16;
  view.rank = static_cast<int>(1 + draw.below(3));
  view.data = arena.data() + 2048 + item_size(view.dtype) * (draw.below(64) - 32);
  for (int axis = 0; axis < view.rank; ++axis) {
    view.shape.at(static_cast<std::size_t>(axis)) = draw.below(5);
    view.strides.at(static_cast<std::size_t>(axis)) = draw.below(25) - 12;
  }
  return view;
}

// Every byte of a view, with repetitions.
std::multiset<const std::byte*> bytes_of(const TensorView& view) {
  std::multiset<const std::byte*> bytes;
  for (std::int64_t index = 0; index < reference::element_count(view); ++index) {
    const std::byte* element =
        static_cast<const std::byte*>(view.data) + reference::offset_of(view, index) * item_size(view.dtype);
    for (std::int64_t byte = 0; byte < item_size(view.dtype); ++byte) bytes.insert(element + byte);
  }
  return bytes;
}

TEST(OverlapSmall, OfTwoRandomViewsIsExact) {
  int met = 0, apart_but_interleaved = 0;
  for (std::uint64_t seed = 0; seed < 20000; ++seed) {
    Draw draw(seed);
    const TensorView a = random_view(draw), b = random_view(draw);
    const auto bytes_a = bytes_of(a), bytes_b = bytes_of(b);
    bool share = false;
    for (const std::byte* byte : bytes_a) share = share || bytes_b.contains(byte);
    ASSERT_EQ(overlap(a, b), share) << "seed " << seed;
    ASSERT_EQ(overlap(b, a), share) << "seed " << seed;
    met += share ? 1 : 0;
    apart_but_interleaved += !share && !bytes_a.empty() && !bytes_b.empty() && *bytes_a.begin() < *bytes_b.rbegin() &&
                                     *bytes_b.begin() < *bytes_a.rbegin()
                                 ? 1
                                 : 0;
  }
  EXPECT_GT(met, 1000);
  EXPECT_GT(apart_but_interleaved, 1000);
}

TEST(OverlapSmall, OfAViewWithItselfIsNeverMissed) {
  int clean = 0, refused_without_need = 0;
  for (std::uint64_t seed = 0; seed < 20000; ++seed) {
    Draw draw(seed);
    const TensorView view = random_view(draw);
    const auto bytes = bytes_of(view);
    const bool repeats = std::set<const std::byte*>(bytes.begin(), bytes.end()).size() != bytes.size();
    if (repeats) {
      ASSERT_TRUE(overlaps_itself(view)) << "seed " << seed;
    } else {
      ++clean;
      refused_without_need += overlaps_itself(view) ? 1 : 0;
    }
  }
  // Axes that interleave without meeting (extents 2 and 3 with strides 3 and 2) may be refused; nobody lays out so.
  EXPECT_LT(refused_without_need, clean / 4);
}

TEST(OverlapSmall, LargeLayoutsAreDecidedExactly) {
  const auto view = [](std::int64_t offset, std::initializer_list<std::int64_t> shape,
                       std::initializer_list<std::int64_t> strides) {
    // NOLINTNEXTLINE(performance-no-int-to-ptr): gigabytes that are nowhere; only their addresses matter
    const auto* data = reinterpret_cast<const void*>(0x100000 + 4 * offset);
    return TensorView(data, DType::float32, shape, strides);
  };
  // Slices of one projection [8, 65536, 3072]: q, k, v side by side in every row.
  const std::int64_t row = 3072, T = 65536;
  const TensorView q = view(0, {8, T, 4, 128}, {T * row, row, 128, 1});
  const TensorView k = view(512, {8, T, 4, 128}, {T * row, row, 128, 1});
  const TensorView v = view(1024, {8, T, 8, 256}, {T * row, row, 256, 1});
  const TensorView late = view(511, {8, T, 4, 128}, {T * row, row, 128, 1});
  EXPECT_FALSE(overlap(q, k));
  EXPECT_FALSE(overlap(k, v));
  EXPECT_FALSE(overlap(v, q));
  EXPECT_TRUE(overlap(late, q));
  EXPECT_TRUE(overlap(late, k));
  EXPECT_FALSE(overlaps_itself(q));
  // Heads of a (B,H,T,D) tensor, two halves of it.
  const TensorView first = view(0, {8, T, 2, 64}, {4 * T * 64, 64, T * 64, 1});
  const TensorView second = view(2 * T * 64, {8, T, 2, 64}, {4 * T * 64, 64, T * 64, 1});
  EXPECT_FALSE(overlap(first, second));
  EXPECT_FALSE(overlaps_itself(first));
  EXPECT_TRUE(overlap(first, view(T * 64 + 5, {1, 1, 1, 1}, {1, 1, 1, 1})));
  // Gates i and f interleaved element by element.
  EXPECT_FALSE(overlap(view(0, {8, T, 4}, {T * 8, 8, 2}), view(1, {8, T, 4}, {T * 8, 8, 2})));
}

// Strides so alike that each of a million choices has to be tried: whoever stops looking may not say "apart".
TEST(OverlapSmall, ASearchThatIsGivenUpSaysThatTheyMeet) {
  constexpr std::int64_t extent = 100, base = 1 << 21;
  const std::int64_t strides[] = {base, base + 1, base + 101, base + 10201};
  // NOLINTNEXTLINE(performance-no-int-to-ptr): as above
  const auto* data = reinterpret_cast<const std::byte*>(0x100000);
  const TensorView all(data, DType::float32, {extent, extent, extent, extent},
                       {strides[0], strides[1], strides[2], strides[3]});
  const std::int64_t offset = 50 * (strides[0] + strides[1] + strides[2] + strides[3]);
  const TensorView one(data + 4 * offset, DType::float32, {1}, {1});
  EXPECT_TRUE(overlap(all, one));
  EXPECT_TRUE(overlap(one, all));
}

}  // namespace
}  // namespace tfla::test
