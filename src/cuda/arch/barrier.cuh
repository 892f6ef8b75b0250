// Barriers in shared memory that count arrivals and bytes, named barriers, and the registers of warpgroups (sm_90).
#pragma once

#include <cstdint>

namespace tfla::cuda::arch {

__device__ __forceinline__ void barrier_init(unsigned barrier, unsigned arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// After the last barrier_init, before a __syncthreads.
__device__ __forceinline__ void barriers_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void arrive(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// A warp at a barrier: by one lane, which is in order with the others by then. racecheck of compute-sanitizer does not
// see such an order; code that is compiled for it lets all lanes arrive (docs/cuda/sanitizer.md).
#ifdef TFLA_RACECHECK
inline constexpr bool for_racecheck = true;
#else
inline constexpr bool for_racecheck = false;
#endif
inline constexpr unsigned warp_arrivals = for_racecheck ? 32 : 1;
// Whether this lane is one of those. leads: true in one lane.
__device__ __forceinline__ constexpr bool arrives(bool leads) { return for_racecheck || leads; }
// A thread in the place of a warp.
__device__ __forceinline__ void arrive_for_warp(unsigned barrier) {
  if constexpr (!for_racecheck)
    arrive(barrier);
  else
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(warp_arrivals) : "memory");
}
// Arrives, and makes the barrier wait for that many bytes of asynchronous copies too.
__device__ __forceinline__ void arrive_expecting(unsigned barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Arrives when this thread's cp.async copies so far are done. Counts as one of the barrier's arrivals.
__device__ __forceinline__ void arrive_after_copies(unsigned barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
// Waits for the end of the phase of that parity; the phase before the first one counts as ended with parity 1.
__device__ __forceinline__ void wait(unsigned barrier, unsigned parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@done bra over;\n"
      "bra again;\nover:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Barriers 1 to 15 among `threads` threads: wait for all, or only be counted. racecheck loses track of those that are
// only counted from the second round on: there they wait.
__device__ __forceinline__ void named_wait(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_arrive(int barrier, int threads) {
  if constexpr (for_racecheck)
    named_wait(barrier, threads);
  else
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
// Waits for all. Whether `holds` does in every one of them.
__device__ __forceinline__ bool named_all(int barrier, int threads, bool holds) {
  int all;
  asm volatile(
      "{\n.reg .pred own, every;\nsetp.ne.s32 own, %3, 0;\nbarrier.cta.red.and.pred every, %1, %2, own;\n"
      "selp.s32 %0, 1, 0, every;\n}"
      : "=r"(all)
      : "r"(barrier), "r"(threads), "r"(static_cast<int>(holds))
      : "memory");
  return all != 0;
}

// Registers that this warpgroup gives back, or takes.
template <int Count>
__device__ __forceinline__ void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
}
template <int Count>
__device__ __forceinline__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
}

// The compiler forgets what it knows of x: what follows from it is computed where it is used, and not kept in
// registers.
__device__ __forceinline__ void forget(std::int64_t& x) { asm volatile("" : "+l"(x)); }
__device__ __forceinline__ void forget(int& x) { asm volatile("" : "+r"(x)); }
__device__ __forceinline__ void forget(unsigned& x) { asm volatile("" : "+r"(x)); }

// gridDim.x, read where it is used and not kept in a register.
__device__ __forceinline__ unsigned grid_blocks() {
  unsigned blocks;
  asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(blocks));
  return blocks;
}

}  // namespace tfla::cuda::arch
