// A ring of slots in shared memory. Each role that uses it walks it by itself.
#pragma once

namespace tfla::cuda::sm90 {

template <int Slots>
struct Ring {
  int slot = 0;
  unsigned phase = 0;  // parity of the round

  __device__ __forceinline__ explicit Ring(int start = 0) : slot(start) {}
  // The ring after so many steps from the start: computed from the count, it takes no registers between steps.
  __device__ __forceinline__ static Ring after_steps(unsigned steps) {
    Ring ring(static_cast<int>(steps % Slots));
    ring.phase = steps / Slots & 1;
    return ring;
  }
  __device__ __forceinline__ void advance(int by = 1) {
    slot += by;
    if (slot >= Slots) {
      slot -= Slots;
      phase ^= 1;
    }
  }
  __device__ __forceinline__ Ring after(int by) const {
    Ring later = *this;
    later.advance(by);
    return later;
  }
};

}  // namespace tfla::cuda::sm90
