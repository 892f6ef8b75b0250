// Products of a few rows: a thread takes some rows of the weights, a stretch at a time, and multiplies it by all rows of x
// while it lies in the first-level cache.
#include <algorithm>
#include <array>
#include <cstddef>

#include "core/arena.h"
#include "cpu/kernels/simd.h"
#include "cpu/threads.h"
#include "cpu/with_real.h"
#include "cpu/workers.h"
#include "plan/linear_backend.h"

namespace tfla::cpu {

namespace {

constexpr std::int64_t stretch = 1024;       // numbers of a row of the weights that are widened at a time
constexpr std::int64_t outputs_at_once = 16;  // of a thread, which it stores together

template <class Real>
struct LinearScratch {
  Real* x;  // [R,I]
  struct Worker {
    Real* weights;  // [stretch]
    double* sums;   // [R]
    Real* y;        // [R,outputs_at_once]
  };
  std::byte* workers;
  std::int64_t worker_bytes;
  std::int64_t rows;

  LinearScratch(Arena& arena, const Linear& args, const LinearPlan& plan) : rows(args.x.shape[0]) {
    x = arena.take<Real>(rows * args.x.shape[1]);
    Arena counter;
    (void)carve(counter);
    worker_bytes = static_cast<std::int64_t>(counter.used());
    workers = arena.take<std::byte>(plan.threads * worker_bytes);
  }

  [[nodiscard]] Worker at(int index) const {
    Arena arena(workers + index * worker_bytes);
    return carve(arena);
  }

 private:
  [[nodiscard]] Worker carve(Arena& arena) const {
    auto* weights = arena.take<Real>(stretch);
    auto* sums = arena.take<double>(rows);
    return {weights, sums, arena.take<Real>(rows * outputs_at_once)};
  }
};

template <class View>
auto* row_of(const View& view, std::int64_t row, std::int64_t first = 0) {
  using Byte =
      std::conditional_t<std::is_const_v<std::remove_pointer_t<decltype(view.data)>>, const std::byte, std::byte>;
  return static_cast<Byte*>(view.data) + (row * view.strides[0] + first) * item_size(view.dtype);
}

template <class Real>
void run(const Linear& args, const LinearPlan& plan, const LinearScratch<Real>& scratch) {
  const std::int64_t rows = args.x.shape[0], inputs = args.x.shape[1], outputs = args.weight.shape[0];
  for (std::int64_t r = 0; r < rows; ++r) simd::load(row_of(args.x, r), args.x.dtype, scratch.x + r * inputs, inputs);
  const std::int64_t blocks = (outputs + outputs_at_once - 1) / outputs_at_once;
  parallel_for(blocks, plan.threads, [&](std::int64_t block, int index) {
    const auto worker = scratch.at(index);
    const std::int64_t first = block * outputs_at_once, count = std::min(outputs_at_once, outputs - first);
    for (std::int64_t o = 0; o < count; ++o) {
      std::fill_n(worker.sums, rows, 0.0);
      for (std::int64_t begin = 0; begin < inputs; begin += stretch) {
        const std::int64_t size = std::min(stretch, inputs - begin);
        simd::load(row_of(args.weight, first + o, begin), args.weight.dtype, worker.weights, size);
        for (std::int64_t r = 0; r < rows; ++r)
          worker.sums[r] += simd::dot(worker.weights, scratch.x + r * inputs + begin, size);
      }
      for (std::int64_t r = 0; r < rows; ++r) worker.y[r * outputs_at_once + o] = static_cast<Real>(worker.sums[r]);
    }
    std::array<Real, outputs_at_once> added{};
    for (std::int64_t r = 0; r < rows; ++r) {
      Real* y = worker.y + r * outputs_at_once;
      if (args.added.given()) {
        simd::load(row_of(args.added, r, first), args.added.dtype, added.data(), count);
        simd::add(Real{1}, added.data(), y, count);
      }
      simd::store(Real{1}, y, row_of(args.y, r, first), args.y.dtype, count);
    }
  });
}

}  // namespace

}  // namespace tfla::cpu

namespace tfla {

void cpu_linear(const Linear& args, const LinearPlan& plan, std::byte* scratch) {
  cpu::with_real(plan, [&](auto real) {
    Arena arena(scratch);
    cpu::run(args, plan, cpu::LinearScratch<decltype(real)>(arena, args, plan));
  });
}

std::size_t cpu_scratch_bytes(const Linear& args, const LinearPlan& plan) {
  Arena arena;
  cpu::with_real(plan, [&](auto real) { (void)cpu::LinearScratch<decltype(real)>(arena, args, plan); });
  return arena.used();
}

}  // namespace tfla
