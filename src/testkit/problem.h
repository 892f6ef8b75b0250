// Random problems in every regime, dtype and layout. `tfla check`, the tests and the benchmarks share them.
#pragma once

#include <memory>

#include "testkit/case.h"
#include "tfla/tfla.h"

namespace tfla::testkit {

// Owns the tensors of a case: inputs drawn and rounded to their dtype, outputs poisoned with NaN. Not copyable,
// since the argument structs point into it.
class Problem {
 public:
  explicit Problem(const Case& description);
  ~Problem();
  Problem(const Problem&) = delete;
  Problem& operator=(const Problem&) = delete;

  [[nodiscard]] MlstmForward& forward();  // last_state is asked for as the case says, if there are sequences
  [[nodiscard]] MlstmBackward& backward();
  void poison();  // NaN into every output again

 private:
  friend class Judge;
  struct Storage;
  std::unique_ptr<Storage> storage_;
};

}  // namespace tfla::testkit
