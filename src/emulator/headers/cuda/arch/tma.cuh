// In the place of cuda/arch/tma.cuh.
#pragma once

#include <cuda.h>

#include <cstdint>

#include <cuda_runtime.h>
#include "emulator/boxes.h"

namespace tfla::cuda::arch {

inline void writes_before_copies() {}

inline void load_box(unsigned shared, const CUtensorMap* tensor, unsigned barrier, int column, int token, int head,
                     int batch) {
  emulator::load_box(shared, *tensor, barrier, {column, token, head, batch});
}
inline void prefetch_box(const CUtensorMap*, int, int, int, int) {}
inline void load_box(unsigned shared, const CUtensorMap* tensor, unsigned barrier, int column, int row, int matrix) {
  emulator::load_box(shared, *tensor, barrier, {column, row, matrix, 0});
}
inline void store_box(unsigned shared, const CUtensorMap* tensor, int column, int token, int head, int batch) {
  emulator::store_box(shared, *tensor, {column, token, head, batch});
}
inline void store_box(unsigned shared, const CUtensorMap* tensor, int column, int row, int matrix) {
  emulator::store_box(shared, *tensor, {column, row, matrix, 0});
}
inline void commit_stores() { emulator::self().stores.commit(); }
template <int Pending>
void wait_stores_read() {
  emulator::self().stores.finish(Pending);
}
template <int Pending>
void wait_stores() {
  emulator::self().stores.finish(Pending);
}

}  // namespace tfla::cuda::arch
