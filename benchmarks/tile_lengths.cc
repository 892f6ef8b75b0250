// CPU time of forward and backward over the length of a tile, on one thread: where the rule in src/core/plan.cc comes
// from.
//   cmake --build build/release --target tfla_tile_lengths && build/release/tfla_tile_lengths
#include <fmt/format.h>

#include <algorithm>
#include <ctime>
#include <utility>

#include "cpu/run.h"
#include "reference/harness.h"
#include "reference/tensor.h"

namespace {

using namespace tfla;

constexpr std::int64_t lengths[] = {16, 32, 48, 64, 96, 128, 192, 256};
constexpr std::pair<std::int64_t, std::int64_t> head_dims[] = {{32, 32},   {64, 64},   {64, 128},  {128, 128},
                                                               {128, 256}, {256, 256}, {256, 512}, {512, 512}};

double cpu_seconds() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// The best of five samples, in milliseconds per call.
template <class Args, class Run>
double milliseconds(const Args& args, std::int64_t length, const Run& run) {
  Plan forced = plan(args, {.threads = 1});
  forced.tile = forced.chunk = length;
  forced.scratch_bytes = cpu::scratch_bytes(forced);
  const reference::Buffer scratch(static_cast<std::int64_t>(forced.scratch_bytes));
  const int calls = std::max(1, static_cast<int>(2e8 / forced.flops));
  double best = 1e9;
  for (int sample = 0; sample < 5; ++sample) {
    const double begin = cpu_seconds();
    for (int call = 0; call < calls; ++call) run(args, forced, std::span(scratch.data(), forced.scratch_bytes));
    best = std::min(best, (cpu_seconds() - begin) / calls);
  }
  return 1e3 * best;
}

}  // namespace

int main() {
  fmt::print("forward/backward in ms, T 768, 2 heads, by tile length\ndqk/dhv ");
  for (std::int64_t length : lengths) fmt::print("{:>12}", length);
  for (const auto& [dqk, dhv] : head_dims) {
    reference::Case description;
    description.regime = reference::Regime::trained_like;
    description.shape = {.tokens = 768, .qk_heads = 2, .heads = 2, .dqk = dqk, .dhv = dhv};
    reference::Problem problem(description);
    fmt::print("\n{:<8}", fmt::format("{}/{}", dqk, dhv));
    for (std::int64_t length : lengths) {
      const double ahead = milliseconds(problem.forward(), length,
                                        [](auto& args, auto& chosen, auto memory) { forward(args, chosen, memory); });
      const double back = milliseconds(problem.backward(), length,
                                       [](auto& args, auto& chosen, auto memory) { backward(args, chosen, memory); });
      fmt::print("{:>12}", fmt::format("{:.2f}/{:.2f}", ahead, back));
    }
  }
  fmt::print("\n");
}
