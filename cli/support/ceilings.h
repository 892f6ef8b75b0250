// What this machine can do at best: how fast it copies, how fast it multiplies matrices. The yardsticks of `bench`.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include "cli/support/workload.h"
#include "plan/backend.h"

namespace tfla::cli {

// Copies `bytes` bytes, an equal part on each thread.
class Copy {
 public:
  Copy(std::size_t bytes, int threads, Device device);
  void operator()() const;
  [[nodiscard]] double traffic() const { return 2.0 * static_cast<double>(from_.size()); }  // read + written

 private:
  Buffer from_;
  Buffer to_;
  int threads_;
  std::unique_ptr<Recording> recorded_;  // on a GPU
};

struct ProductRate {
  std::string blas;
  int size = 0;             // rows and columns of each matrix
  double flops_per_second;  // of all threads together
};

// One large float32 product on each thread, all at the same time, by the matrix library.
[[nodiscard]] ProductRate measure_products(int threads, double min_time);

}  // namespace tfla::cli
