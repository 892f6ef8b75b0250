// In the place of cuda/arch/copy.cuh.
#pragma once

#include <cstdint>

#include <cuda_runtime.h>

namespace tfla::cuda::arch {

inline unsigned shared_address(const void* pointer) { return emulator::shared_address(pointer); }

inline void copy_16(void* shared, const void* global, int valid) { emulator::copy(shared, global, 16, valid); }
inline void commit_copies() { emulator::self().copies.commit(); }
template <int Pending>
void wait_copies() {
  emulator::self().copies.finish(Pending);
}

}  // namespace tfla::cuda::arch
