// Timing with care: warm-up, samples long enough for the clock, many of them, the median and the quartiles.
#pragma once

#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <vector>

namespace tfla::cli {

struct Timing {
  double median = 0;  // seconds per call, as are the next three
  double lower = 0;   // first quartile
  double upper = 0;   // third quartile
  double fastest = 0;
  int samples = 0;
  int calls_per_sample = 1;

  // Of one of several calls that were timed as one.
  [[nodiscard]] Timing per(int calls) const {
    return {median / calls, lower / calls, upper / calls, fastest / calls, samples, calls_per_sample * calls};
  }

  // The interquartile range as a share of the median.
  [[nodiscard]] double spread() const { return (upper - lower) / median; }
};

[[nodiscard]] nlohmann::ordered_json to_json(const Timing& timing);

struct MeasureTimes {    // seconds
  double all = 0;        // for each of the calls, at least
  double sample = 5e-3;  // a sample is so many calls as take at least that long: here far above the clock's resolution
                         // and a thread's wake-up
};

// Times each of the calls, taking their samples in turn, so that whatever else the machine does in the meantime meets
// all of them. finish() waits for calls that return before they are done.
[[nodiscard]] std::vector<Timing> measure(
    const std::vector<std::function<void()>>& calls, MeasureTimes times, const std::function<void()>& finish = [] {});

// A dozen calls after a rest, each timed by itself. A GPU that is busy for longer than some ten milliseconds lowers its
// clock to stay within its power; what a call takes before that is what it takes among others that need less.
[[nodiscard]] Timing measure_burst(const std::function<double()>& timed_call);

}  // namespace tfla::cli
