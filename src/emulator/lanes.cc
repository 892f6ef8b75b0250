#include "emulator/lanes.h"

#include <algorithm>

namespace tfla::emulator {

namespace {

struct Vote {
  std::uint64_t own;
  unsigned result;
};

template <class Work>
void for_each(unsigned mask, const Work& work) {
  for (unsigned lane = 0; lane < warp_lanes; ++lane)
    if ((mask >> lane & 1) != 0) work(lane);
}

void run_ballot(Vote* const* lanes, unsigned mask) {
  unsigned bits = 0;
  for_each(mask, [&](unsigned lane) { bits |= static_cast<unsigned>(lanes[lane]->own) << lane; });
  for_each(mask, [&](unsigned lane) { lanes[lane]->result = bits; });
}

void run_equal(Vote* const* lanes, unsigned mask) {
  for_each(mask, [&](unsigned lane) {
    for_each(mask, [&](unsigned other) {
      lanes[lane]->result |= static_cast<unsigned>(lanes[lane]->own == lanes[other]->own) << other;
    });
  });
}

void run_largest(Vote* const* lanes, unsigned mask) {
  std::uint64_t most = 0;
  for_each(mask, [&](unsigned lane) { most = std::max(most, lanes[lane]->own); });
  for_each(mask, [&](unsigned lane) { lanes[lane]->result = static_cast<unsigned>(most); });
}

template <void (*Run)(Vote* const*, unsigned)>
unsigned vote(unsigned mask, std::uint64_t x) {
  Vote own{x, 0};
  together<Vote, Run>(mask, own);
  return own.result;
}

}  // namespace

unsigned ballot(unsigned mask, bool holds) { return vote<run_ballot>(mask, holds ? 1 : 0); }
unsigned equal_lanes(unsigned mask, std::uint64_t x) { return vote<run_equal>(mask, x); }
unsigned largest(unsigned mask, unsigned x) { return vote<run_largest>(mask, x); }

}  // namespace tfla::emulator
