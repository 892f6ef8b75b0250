// libFuzzer target: random argument structs into plan and the operations of all operators. See fuzz_input.h for what
// is checked.
#include <cstddef>
#include <cstdint>

#include "tests/fuzz/input.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  tfla::test::fuzz_call(data, size);  // a FuzzFailure ends the program
  return 0;
}
