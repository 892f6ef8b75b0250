// What lanes of a warp do together.
#pragma once

#include <cstdint>

#include "emulator/machine.h"

namespace tfla::emulator {

template <class T>
struct FromLane {
  T own;
  unsigned from;
  T result;
};
template <class T>
void take_from_lanes(FromLane<T>* const* lanes, unsigned members) {
  for (unsigned lane = 0; lane < warp_lanes; ++lane) {
    if ((members >> lane & 1) == 0) continue;
    const unsigned source = lanes[lane]->from;
    if ((members >> source & 1) == 0) fail("a lane reads one that is not in its mask");
    lanes[lane]->result = lanes[source]->own;
  }
}
template <class T>
T of_lane(unsigned mask, T x, int from) {
  FromLane<T> own{x, static_cast<unsigned>(from), x};
  together<FromLane<T>, take_from_lanes<T>>(mask, own);
  return own.result;
}

[[nodiscard]] unsigned ballot(unsigned mask, bool holds);
// Lanes that have the same number.
[[nodiscard]] unsigned equal_lanes(unsigned mask, std::uint64_t x);
[[nodiscard]] unsigned largest(unsigned mask, unsigned x);

}  // namespace tfla::emulator
