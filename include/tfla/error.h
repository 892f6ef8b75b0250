// What the library throws. Every message is one sentence that names the argument, what it was and what is accepted.
#pragma once

#include <stdexcept>
#include <string>

namespace tfla {

// The call cannot be carried out as written: a shape, dtype, stride, pointer, size or option is refused.
// Thrown before anything is written.
class InvalidArgument : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// The call is fine but this build or machine cannot run it.
class Unavailable : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace tfla
