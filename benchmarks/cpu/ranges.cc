// CPU time of forward and backward over the length of a tile and over the chunk size, on one thread: the measurement
// behind the plan's choice of both. CPU time, because other processes may have part of the machine; the least of
// several rounds, each of which takes every length in turn.
//   usage: tfla_cpu_ranges FILE.json [ROUNDS]     benchmarks/cpu/ranges.py builds and runs it
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fstream>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "cli/support/blas.h"
#include "cli/support/json.h"
#include "plan/backend.h"
#include "testkit/judge.h"
#include "testkit/tensor.h"

namespace {

using namespace tfla;

struct Ranges {
  std::int64_t tile = 0;
  std::int64_t chunk = 0;
};

struct Times {
  double forward = 1e9;
  double backward = 1e9;
};

constexpr std::pair<std::int64_t, std::int64_t> head_dims[] = {{32, 32},   {64, 64},   {64, 128},  {128, 128},
                                                               {128, 256}, {256, 256}, {256, 512}, {512, 512}};

double cpu_seconds() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// Seconds per call, over as many calls as make 20 ms.
template <class Args, class Run>
double seconds(const Args& args, Ranges ranges, const Run& run) {
  Plan forced = plan(args, {.threads = 1});
  forced.tile = ranges.tile;
  forced.chunk = ranges.chunk;
  forced.scratch_bytes = cpu_scratch_bytes(forced);
  const testkit::Buffer scratch(static_cast<std::int64_t>(forced.scratch_bytes));
  const auto once = [&] { run(args, forced, std::span(scratch.data(), forced.scratch_bytes)); };
  once();
  constexpr double sample = 20e-3;
  const double begin = cpu_seconds();
  int calls = 0;
  do {
    once();
    ++calls;
  } while (cpu_seconds() - begin < sample);
  return (cpu_seconds() - begin) / calls;
}

testkit::Problem make_problem(std::int64_t tokens, std::int64_t heads, std::int64_t dqk, std::int64_t dhv) {
  testkit::Case description;
  description.regime = reference::Regime::trained_like;
  description.shape = {.tokens = tokens, .qk_heads = heads, .heads = heads, .dqk = dqk, .dhv = dhv};
  return testkit::Problem(description);
}

std::vector<Times> measure(testkit::Problem& problem, const std::vector<Ranges>& ranges, int rounds) {
  std::vector<Times> best(ranges.size());
  for (int round = 0; round < rounds; ++round) {
    for (std::size_t x = 0; x < ranges.size(); ++x) {
      best[x].forward = std::min(best[x].forward,
                                 seconds(problem.forward(), ranges[x],
                                         [](auto& args, auto& chosen, auto memory) { forward(args, chosen, memory); }));
      best[x].backward = std::min(
          best[x].backward, seconds(problem.backward(), ranges[x],
                                    [](auto& args, auto& chosen, auto memory) { backward(args, chosen, memory); }));
    }
  }
  return best;
}

nlohmann::ordered_json rows(std::int64_t tokens, std::int64_t heads, std::int64_t dqk, std::int64_t dhv,
                            const std::vector<Ranges>& ranges, int rounds) {
  fmt::print(stderr, "tfla_cpu_ranges: T {}, dqk {}, dhv {}\n", tokens, dqk, dhv);
  testkit::Problem problem = make_problem(tokens, heads, dqk, dhv);
  const std::vector<Times> times = measure(problem, ranges, rounds);
  nlohmann::ordered_json out = nlohmann::ordered_json::array();
  for (std::size_t x = 0; x < ranges.size(); ++x) {
    out.push_back({{"tokens", tokens},
                   {"heads", heads},
                   {"dqk", dqk},
                   {"dhv", dhv},
                   {"tile", ranges[x].tile},
                   {"chunk", ranges[x].chunk},
                   {"forward_seconds", times[x].forward},
                   {"backward_seconds", times[x].backward}});
  }
  return out;
}

// Every tile length, a state stored at each.
nlohmann::ordered_json tile_lengths(int rounds) {
  constexpr std::int64_t tokens = 4096;  // more than caches hold, as in use
  nlohmann::ordered_json out = nlohmann::ordered_json::array();
  for (const auto& [dqk, dhv] : head_dims) {
    std::vector<Ranges> ranges;
    for (const std::int64_t length : {16, 32, 48, 64, 96, 128, 192, 256}) ranges.push_back({length, length});
    for (auto& row : rows(tokens, 2, dqk, dhv, ranges, rounds)) out.push_back(row);
  }
  return out;
}

// Every chunk size a caller may ask for, at the tile that the plan makes of it, and the plan's own: the benchmark
// shapes, planned for two threads.
nlohmann::ordered_json chunk_sizes(int rounds) {
  constexpr std::int64_t tokens = 8192, heads = 4;
  nlohmann::ordered_json out = nlohmann::ordered_json::array();
  for (const auto& [dqk, dhv] : {std::pair<std::int64_t, std::int64_t>{64, 64}, {128, 256}, {256, 512}}) {
    const MlstmShape shape{
        .tokens = tokens, .qk_heads = heads, .heads = heads, .dqk = dqk, .dhv = dhv, .longest = tokens};
    std::vector<Ranges> ranges;
    for (const std::int64_t chunk : {0, 64, 128, 256, 512, 1024, 2048, 4096}) {
      const Plan p = plan(Operation::backward, shape, {.chunk_size = chunk}, {.threads = 2});
      ranges.push_back({p.tile, p.chunk});
    }
    nlohmann::ordered_json measured = rows(tokens, heads, dqk, dhv, ranges, rounds);
    for (std::size_t x = 0; x < measured.size(); ++x) {
      measured[x]["default"] = x == 0;
      out.push_back(measured[x]);
    }
  }
  return out;
}

// What the core can do at best: one large product, one copy between buffers far larger than its caches.
nlohmann::ordered_json ceilings(int rounds) {
  constexpr int size = 1024;
  constexpr std::int64_t bytes = std::int64_t{256} << 20;
  std::vector<float> a(size * size, 1.5F), b(size * size, 0.5F), c(size * size);
  const std::vector<char> from(bytes, 1);
  std::vector<char> to(bytes);
  double product_seconds = 1e9;
  double copy_seconds = 1e9;
  for (int round = 0; round < rounds + 1; ++round) {
    double begin = cpu_seconds();
    cli::blas_product(size, a.data(), b.data(), c.data());
    product_seconds = std::min(product_seconds, cpu_seconds() - begin);
    begin = cpu_seconds();
    std::memcpy(to.data(), from.data(), from.size());
    copy_seconds = std::min(copy_seconds, cpu_seconds() - begin);
  }
  return {{"flops_per_second", 2.0 * size * size * size / product_seconds},
          {"bytes_per_second", 2.0 * bytes / copy_seconds}};
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 7;
  if (argc < 2 || rounds < 1) {
    fmt::print(stderr, "usage: tfla_cpu_ranges FILE.json [ROUNDS]\n");
    return 2;
  }
  nlohmann::ordered_json report = cli::describe_run(Device::cpu, 1);
  report["blas"] = cli::blas_name();
  report["rounds"] = rounds;
  report["ceilings"] = ceilings(rounds);
  report["tiles"] = tile_lengths(rounds);
  report["chunks"] = chunk_sizes(rounds);
  std::ofstream file(argv[1]);
  file << report.dump(1) << '\n';
  file.flush();
  if (!file) {
    fmt::print(stderr, "tfla: {} cannot be written\n", argv[1]);
    return 2;
  }
}
