// In the place of cuda/arch/barrier.cuh.
#pragma once

#include <cstdint>

#include <cuda_runtime.h>

namespace tfla::cuda::arch {

inline void barrier_init(unsigned barrier, unsigned arrivals) { emulator::mbarrier_init(barrier, arrivals); }
inline void barriers_ready() {}
inline void arrive(unsigned barrier) { emulator::mbarrier_arrive(barrier, 1); }
inline constexpr bool for_racecheck = false;
inline constexpr unsigned warp_arrivals = 1;
inline constexpr bool arrives(bool leads) { return leads; }
inline void arrive_for_warp(unsigned barrier) { arrive(barrier); }
inline void arrive_expecting(unsigned barrier, unsigned bytes) {
  emulator::mbarrier_expect(barrier, bytes);
  arrive(barrier);
}
inline void arrive_after_copies(unsigned barrier) { emulator::arrive_after_copies(barrier); }
inline void wait(unsigned barrier, unsigned parity) { emulator::mbarrier_wait(barrier, parity); }

inline void named_wait(int barrier, int threads) {
  emulator::barrier_wait(static_cast<unsigned>(barrier), static_cast<unsigned>(threads));
}
inline void named_arrive(int barrier, int threads) {
  emulator::barrier_arrive(static_cast<unsigned>(barrier), static_cast<unsigned>(threads));
}
inline bool named_all(int barrier, int threads, bool holds) {
  return emulator::barrier_all(static_cast<unsigned>(barrier), static_cast<unsigned>(threads), holds);
}

template <int Count>
void fewer_registers() {
  static_assert(Count % 8 == 0 && Count >= 24 && Count <= 256);
}
template <int Count>
void more_registers() {
  static_assert(Count % 8 == 0 && Count >= 24 && Count <= 256);
}

inline void forget(std::int64_t&) {}
inline void forget(int&) {}
inline void forget(unsigned&) {}
inline unsigned grid_blocks() { return gridDim.x; }

}  // namespace tfla::cuda::arch
