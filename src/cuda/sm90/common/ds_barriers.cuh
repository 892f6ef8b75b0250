// How two math warpgroups wait for each other where dS goes through shared memory and results leave from there.
#pragma once

#include "cuda/arch/barrier.cuh"
#include "cuda/sm90/common/limits.h"

namespace tfla::cuda::sm90::grad {

// For math warpgroup W. Keys of math warpgroup 0 have queries of both token blocks: it reads dS that it wrote alone,
// math warpgroup 1 what both wrote. The named barriers: own, of math warpgroup 0; written and read, by it, for the
// other.
template <int W, int Own, int Written, int Read>
struct DsBarriers {
  // The dS that this warpgroup reads is there.
  __device__ __forceinline__ static void wait_for_ds() {
    if constexpr (W == 0)
      arch::named_arrive(Written, 2 * warpgroup_threads);
    else
      arch::named_wait(Written, 2 * warpgroup_threads);
    meet_own_warps();
  }
  // The products of this warpgroup that read dS of the other's queries are done.
  __device__ __forceinline__ static void has_read() {
    if constexpr (W == 0) arch::named_arrive(Read, 2 * warpgroup_threads);
  }
  // All products have read what results go into.
  __device__ __forceinline__ static void wait_for_readers() {
    if constexpr (W == 1) arch::named_wait(Read, 2 * warpgroup_threads);
    meet_own_warps();
  }

 private:
  // The warps of math warpgroup 0 meet. racecheck loses track of warps some of which meet more often than others: there
  // those of both do.
  __device__ __forceinline__ static void meet_own_warps() {
    if constexpr (W == 0 || arch::for_racecheck)
      arch::named_wait(Own, arch::for_racecheck ? 2 * warpgroup_threads : warpgroup_threads);
  }
};

}  // namespace tfla::cuda::sm90::grad
