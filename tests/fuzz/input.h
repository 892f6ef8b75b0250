// From bytes to a call: valid arguments, then a few of them spoilt. Shared by the libFuzzer target and a plain test.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>

namespace tfla::test {

// What must never happen: a write when refused, a write outside the outputs, an exception of another kind.
class FuzzFailure : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

enum class Outcome : std::uint8_t {
  refused,
  planned,  // accepted, but not run: a view leaves the arena, or the work is too large
  ran
};

// Deterministic. Throws FuzzFailure.
Outcome fuzz_call(const std::uint8_t* data, std::size_t size);

}  // namespace tfla::test
