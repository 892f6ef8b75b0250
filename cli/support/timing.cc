#include "cli/support/timing.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <nlohmann/json.hpp>
#include <thread>

namespace tfla::cli {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int fewest_rounds = 5;
constexpr int fewest_slow_rounds = 3;  // when a single call takes longer than the whole time asked for
constexpr int most_calls_per_sample = 100000;

using Call = std::function<void()>;

double seconds_of(const Call& call, const Call& finish, int times) {
  finish();
  const auto begin = Clock::now();
  for (int x = 0; x < times; ++x) call();
  finish();
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// Warms caches and threads up, and finds how many calls fill a sample. The first call may be slower than all others;
// one that is longer than the time asked for needs no second to know that a sample is one call.
int warm_up(const Call& call, const Call& finish, MeasureTimes times) {
  double once = seconds_of(call, finish, 1);
  if (once < times.all) once = seconds_of(call, finish, 1);
  for (double spent = once; spent < times.all / 10;) {
    const double seconds = seconds_of(call, finish, 1);
    once = std::min(once, seconds);
    spent += seconds;
  }
  const double calls = std::ceil(times.sample / std::max(once, 1e-9));
  return static_cast<int>(std::clamp(calls, 1.0, static_cast<double>(most_calls_per_sample)));
}

// Linear interpolation between the order statistics, as numpy does.
double quantile(const std::vector<double>& sorted, double share) {
  const double position = share * static_cast<double>(sorted.size() - 1);
  const auto below = static_cast<std::size_t>(position);
  const std::size_t above = std::min(below + 1, sorted.size() - 1);
  return sorted[below] + (position - static_cast<double>(below)) * (sorted[above] - sorted[below]);
}

Timing summarize(std::vector<double> samples, int calls_per_sample) {
  std::sort(samples.begin(), samples.end());
  return {.median = quantile(samples, 0.5),
          .lower = quantile(samples, 0.25),
          .upper = quantile(samples, 0.75),
          .fastest = samples.front(),
          .samples = static_cast<int>(samples.size()),
          .calls_per_sample = calls_per_sample};
}

}  // namespace

nlohmann::ordered_json to_json(const Timing& timing) {
  return {{"median", timing.median},   {"lower_quartile", timing.lower}, {"upper_quartile", timing.upper},
          {"fastest", timing.fastest}, {"samples", timing.samples},      {"calls_per_sample", timing.calls_per_sample}};
}

Timing measure_burst(const std::function<double()>& timed_call) {
  constexpr int calls = 12, warm_up_calls = 2;
  constexpr auto rest = std::chrono::milliseconds(600);
  for (int x = 0; x < warm_up_calls; ++x) (void)timed_call();
  std::this_thread::sleep_for(rest);
  std::vector<double> samples;
  for (int x = 0; x < calls; ++x) samples.push_back(timed_call());
  return summarize(std::move(samples), 1);
}

std::vector<Timing> measure(const std::vector<Call>& calls, MeasureTimes times, const Call& finish) {
  std::vector<int> per_sample;
  for (const auto& call : calls) per_sample.push_back(warm_up(call, finish, times));
  std::vector<std::vector<double>> samples(calls.size());
  const double wanted = times.all * static_cast<double>(calls.size());
  double spent = 0;
  for (int round = 0;; ++round) {
    const int fewest = spent > 4 * wanted ? fewest_slow_rounds : fewest_rounds;
    if (round >= fewest && spent >= wanted) break;
    for (std::size_t x = 0; x < calls.size(); ++x) {
      // Another call has just had the caches: one untimed call takes them back.
      if (calls.size() > 1) calls[x]();
      const double seconds = seconds_of(calls[x], finish, per_sample[x]);
      samples[x].push_back(seconds / per_sample[x]);
      spent += seconds;
    }
  }
  std::vector<Timing> timings;
  for (std::size_t x = 0; x < calls.size(); ++x) timings.push_back(summarize(samples[x], per_sample[x]));
  return timings;
}

}  // namespace tfla::cli
