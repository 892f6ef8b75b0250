// The fuzz target without a fuzzer: a few thousand pseudo-random inputs in every test run.
#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <vector>

#include "reference/regimes.h"
#include "tests/fuzz/input.h"

namespace tfla::test {
namespace {

void expect_no_failure(std::uint64_t inputs) {
  std::map<Outcome, int> count;
  for (std::uint64_t seed = 0; seed < inputs; ++seed) {
    std::vector<std::uint8_t> bytes(96);
    for (std::size_t at = 0; at < bytes.size(); ++at) {
      bytes[at] = static_cast<std::uint8_t>(reference::mix(seed * bytes.size() + at));
    }
    try {
      ++count[fuzz_call(bytes.data(), bytes.size())];
    } catch (const FuzzFailure& failure) {
      ADD_FAILURE() << "seed " << seed << ": " << failure.what();
    }
  }
  // Inputs that are all refused, or all accepted, would test little.
  EXPECT_GT(count[Outcome::refused], static_cast<int>(inputs / 10));
  EXPECT_GT(count[Outcome::ran], static_cast<int>(inputs / 10));
}

TEST(FuzzSmall, RandomArgumentsDoNoHarm) { expect_no_failure(4000); }
TEST(Fuzz, RandomArgumentsDoNoHarm) { expect_no_failure(80000); }

}  // namespace
}  // namespace tfla::test
