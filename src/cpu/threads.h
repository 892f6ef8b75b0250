// Threads: one loop shape, work units handed out one by one.
#pragma once

#include <hwy/cache_control.h>
#include <omp.h>

#include <cstdint>

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace tfla::cpu {

// Decaying states pass through subnormal numbers, on which many CPUs are a hundred times slower and which carry no
// weight in any result. Each worker flushes them to zero and restores the caller's setting afterwards.
class FlushSubnormals {
 public:
#if defined(__SSE__)
  FlushSubnormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040U); }
  ~FlushSubnormals() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#else
  FlushSubnormals() {}  // NOLINT(modernize-use-equals-default): a user-provided constructor keeps the guard "used"
#endif
 public:
  FlushSubnormals(const FlushSubnormals&) = delete;
  FlushSubnormals& operator=(const FlushSubnormals&) = delete;
};

// Results leave by stores that other threads may see late; this ends the wait, and whoever is told that the call is
// done sees them all.
inline void finish_streams() { hwy::FlushStream(); }

// Calls work(unit, worker) for every unit in [0, units); worker is in [0, threads). No result may depend on which
// worker takes a unit: that is what makes results identical for any number of threads.
template <class Work>
void parallel_for(std::int64_t units, int threads, const Work& work) {
  if (threads == 1 || units <= 1) {  // a team of one costs several system calls in libgomp
    const FlushSubnormals flush;
    for (std::int64_t unit = 0; unit < units; ++unit) work(unit, 0);
    finish_streams();
    return;
  }
#pragma omp parallel num_threads(threads)
  {
    const FlushSubnormals flush;
    const int worker = omp_get_thread_num();
#pragma omp for schedule(dynamic, 1) nowait
    for (std::int64_t unit = 0; unit < units; ++unit) work(unit, worker);
    finish_streams();
  }
}

}  // namespace tfla::cpu
