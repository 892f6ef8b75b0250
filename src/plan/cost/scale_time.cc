// Times of docs/lm_scale.md: rings, and what hides beneath computation.
#include <algorithm>

#include "plan/cost/scale.h"

namespace tfla::scale {
namespace {

// Two operations of six per weight and token.
constexpr double forward_share = 1.0 / 3;

}  // namespace

double seconds(const Collective& collective, const Network& network) {
  const auto ranks = static_cast<double>(collective.ranks);
  const auto in_node = static_cast<double>(std::min(collective.ranks, network.node_gpus));
  const double rounds = collective.operation == Operation::all_reduce ? 2 : 1;
  const double leaving = rounds * (ranks / in_node - 1), inside = rounds * (ranks - 1) - leaving;
  double bandwidth = network.node_bandwidth;
  if (leaving > 0) bandwidth = std::min(bandwidth, in_node * network.bandwidth);
  return network.call_seconds + inside * network.node_step_seconds + leaving * network.step_seconds +
         sent(collective) / bandwidth;
}

Step step(const std::vector<Collective>& collectives, const Training& training, const Measured& measured,
          const Network& network) {
  Step result;
  double beneath_forward = 0, beneath_backward = 0, beneath_last = 0;
  for (const Collective& collective : collectives) {
    const auto calls = static_cast<double>(collective.calls);
    const double time = calls * seconds(collective, network);
    result.sent += calls * sent(collective);
    result.communication += time;
    switch (collective.beneath) {
      case Beneath::forward: beneath_forward += time; break;
      case Beneath::backward: beneath_backward += time; break;
      case Beneath::last_backward: beneath_last += time; break;
      case Beneath::nothing: break;
    }
  }
  // A rank needs the state before its stretch, and the gradient of the one after it, before it can begin in earnest.
  const double again = training.shares_sequences() ? measured.kernel_seconds : 0;
  result.computation = measured.step_seconds + again;
  const auto hidden = [&](double time, double room) { return std::min(network.overlap * time, room); };
  const double forward = forward_share * measured.step_seconds, backward = measured.step_seconds - forward;
  const double last = 1 / static_cast<double>(training.micro_batches);
  result.hidden = hidden(beneath_forward, forward) + hidden((1 - last) * beneath_backward, (1 - last) * backward) +
                  hidden(last * beneath_backward + beneath_last, last * backward);
  return result;
}

}  // namespace tfla::scale
