// Tensor-core products of a warpgroup (wgmma, sm_90a): 64 rows by N columns, summed in float32 in registers.
//
// A sum is float[N / 2]: thread t holds, of row 16 (t / 32) + (t % 32) / 4 + 8 r and columns 8 n + 2 (t % 4) + e, the
// element 4 n + 2 r + e. Operands lie in shared memory in panels of 64 columns of 128 bytes, swizzled as TMA does.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace tfla::cuda::arch {

// How an operand lies in shared memory: rows along the depth of the product, or across it.
enum class Major { depth, across };

// A tile of 8-row groups of 1,024 bytes. panel_bytes: from one panel of 64 columns to the next, where the product
// takes more than one of them (operands across the depth only). Adding bytes / 16 moves it.
__device__ __forceinline__ std::uint64_t tile_descriptor(unsigned shared_address, unsigned panel_bytes = 16) {
  return static_cast<std::uint64_t>(shared_address >> 4) | static_cast<std::uint64_t>(panel_bytes >> 4) << 16 |
         static_cast<std::uint64_t>(1024 >> 4) << 32 | std::uint64_t{1} << 62;
}

// The tile `offset` bytes after one. The upper half is a constant and the lower one a sum with a constant: descriptors
// in a loop over tiles then take one register each, and none where the offset is known.
__device__ __forceinline__ std::uint64_t tile_at(unsigned shared_address, unsigned offset, unsigned panel_bytes = 16) {
  const unsigned low = (shared_address >> 4) + ((offset >> 4) | (panel_bytes >> 4) << 16);
  return std::uint64_t{1024 >> 4 | 1U << 30} << 32 | low;
}

// An operand across the depth in groups of eight columns, not swizzled: the 16 bytes of a row follow on those of the
// row before. Any number of groups will do, where panels take 64 columns at a time.
__device__ __forceinline__ std::uint64_t groups_descriptor(unsigned shared_address, unsigned group_bytes) {
  return static_cast<std::uint64_t>(shared_address >> 4) | static_cast<std::uint64_t>(8 * 16 >> 4) << 16 |
         static_cast<std::uint64_t>(group_bytes >> 4) << 32;
}

// Before the first product of a batch: registers written by other instructions are ready.
__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Ends a batch of products.
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most `Pending` batches are in flight.
template <int Pending>
__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}
// Keeps the compiler from moving work on these registers over this line.
template <int R>
__device__ __forceinline__ void pin(float (&x)[R]) {
#pragma unroll
  for (int i = 0; i < R; ++i) asm volatile("" : "+f"(x[i])::"memory");
}
__device__ __forceinline__ void pin(float2& x) { asm volatile("" : "+f"(x.x), "+f"(x.y)::"memory"); }

#define TFLA_SUMS_4(x, i) "+f"(x[i]), "+f"(x[i + 1]), "+f"(x[i + 2]), "+f"(x[i + 3])
#define TFLA_SUMS_16(x, i) TFLA_SUMS_4(x, i), TFLA_SUMS_4(x, i + 4), TFLA_SUMS_4(x, i + 8), TFLA_SUMS_4(x, i + 12)
#define TFLA_SUMS_32(x) TFLA_SUMS_16(x, 0), TFLA_SUMS_16(x, 16)
#define TFLA_SUMS_64(x) TFLA_SUMS_32(x), TFLA_SUMS_16(x, 32), TFLA_SUMS_16(x, 48)
#define TFLA_SUMS_96(x) TFLA_SUMS_64(x), TFLA_SUMS_16(x, 64), TFLA_SUMS_16(x, 80)
#define TFLA_SUMS_128(x) TFLA_SUMS_96(x), TFLA_SUMS_16(x, 96), TFLA_SUMS_16(x, 112)
#define TFLA_NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define TFLA_NAMES_32                                                      \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define TFLA_NAMES_64                                                                \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define TFLA_NAMES_68 TFLA_NAMES_64 ", %64, %65, %66, %67"
#define TFLA_NAMES_96                                                                \
  TFLA_NAMES_64                                                                      \
  ", "                                                                               \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define TFLA_NAMES_128                                                                           \
  TFLA_NAMES_96                                                                                  \
  ", "                                                                                           \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define TFLA_SHARED_PRODUCT_4(TYPE)                                                                                \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %6, 0;\nwgmma.mma_async.sync.aligned.m64n8k16.f32." TYPE "." TYPE \
               " {%0, %1, %2, %3}, %4, %5, p, 1, 1, %7, %8;\n}\n"                                                  \
               : TFLA_SUMS_4(sum, 0)                                                                               \
               : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(A == Major::across), "n"(B == Major::across))
#define TFLA_SHARED_PRODUCT_16(TYPE)                                                                                 \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\nwgmma.mma_async.sync.aligned.m64n32k16.f32." TYPE "." TYPE \
               " {" TFLA_NAMES_16 "}, %16, %17, p, 1, 1, %19, %20;\n}\n"                                             \
               : TFLA_SUMS_16(sum, 0)                                                                                \
               : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(A == Major::across), "n"(B == Major::across))
#define TFLA_REGISTER_PRODUCT_16(TYPE)                                                                               \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\nwgmma.mma_async.sync.aligned.m64n32k16.f32." TYPE "." TYPE \
               " {" TFLA_NAMES_16 "}, {%16, %17, %18, %19}, %20, p, 1, 1, %22;\n}\n"                                 \
               : TFLA_SUMS_16(sum, 0)                                                                                \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)),                     \
                 "n"(B == Major::across))
#define TFLA_SHARED_PRODUCT_32(TYPE)                                                                                 \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE \
               " {" TFLA_NAMES_32 "}, %32, %33, p, 1, 1, %35, %36;\n}\n"                                             \
               : TFLA_SUMS_32(sum)                                                                                   \
               : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(A == Major::across), "n"(B == Major::across))
#define TFLA_REGISTER_PRODUCT_32(TYPE)                                                                               \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE \
               " {" TFLA_NAMES_32 "}, {%32, %33, %34, %35}, %36, p, 1, 1, %38;\n}\n"                                 \
               : TFLA_SUMS_32(sum)                                                                                   \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)),                     \
                 "n"(B == Major::across))
#define TFLA_SHARED_PRODUCT_64(TYPE)                                                                                  \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE \
               " {" TFLA_NAMES_64 "}, %64, %65, p, 1, 1, %67, %68;\n}\n"                                              \
               : TFLA_SUMS_64(sum)                                                                                    \
               : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(A == Major::across), "n"(B == Major::across))
#define TFLA_SHARED_PRODUCT_68(TYPE)                                                                                  \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %70, 0;\nwgmma.mma_async.sync.aligned.m64n136k16.f32." TYPE "." TYPE \
               " {" TFLA_NAMES_68 "}, %68, %69, p, 1, 1, %71, %72;\n}\n"                                              \
               : TFLA_SUMS_64(sum), TFLA_SUMS_4(more, 0)                                                              \
               : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(A == Major::across), "n"(B == Major::across))
#define TFLA_REGISTER_PRODUCT_64(TYPE)                                                                                \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE \
               " {" TFLA_NAMES_64 "}, {%64, %65, %66, %67}, %68, p, 1, 1, %70;\n}\n"                                  \
               : TFLA_SUMS_64(sum)                                                                                    \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)),                      \
                 "n"(B == Major::across))
#define TFLA_SHARED_PRODUCT_96(TYPE)                                                                                  \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %98, 0;\nwgmma.mma_async.sync.aligned.m64n192k16.f32." TYPE "." TYPE \
               " {" TFLA_NAMES_96 "}, %96, %97, p, 1, 1, %99, %100;\n}\n"                                             \
               : TFLA_SUMS_96(sum)                                                                                    \
               : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(A == Major::across), "n"(B == Major::across))
#define TFLA_REGISTER_PRODUCT_96(TYPE)                                                                                 \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %101, 0;\nwgmma.mma_async.sync.aligned.m64n192k16.f32." TYPE "." TYPE \
               " {" TFLA_NAMES_96 "}, {%96, %97, %98, %99}, %100, p, 1, 1, %102;\n}\n"                                 \
               : TFLA_SUMS_96(sum)                                                                                     \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)),                       \
                 "n"(B == Major::across))
#define TFLA_SHARED_PRODUCT_128(TYPE)                                                                                  \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\nwgmma.mma_async.sync.aligned.m64n256k16.f32." TYPE "." TYPE \
               " {" TFLA_NAMES_128 "}, %128, %129, p, 1, 1, %131, %132;\n}\n"                                          \
               : TFLA_SUMS_128(sum)                                                                                    \
               : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(A == Major::across), "n"(B == Major::across))
#define TFLA_REGISTER_PRODUCT_128(TYPE)                                                                                \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %133, 0;\nwgmma.mma_async.sync.aligned.m64n256k16.f32." TYPE "." TYPE \
               " {" TFLA_NAMES_128 "}, {%128, %129, %130, %131}, %132, p, 1, 1, %134;\n}\n"                            \
               : TFLA_SUMS_128(sum)                                                                                    \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)),                       \
                 "n"(B == Major::across))

// sum (+)= A B with A [64, 16] and B [16, 2 R], both in shared memory.
template <class T, Major A, Major B, int R>
__device__ __forceinline__ void multiply(float (&sum)[R], std::uint64_t a, std::uint64_t b, bool add) {
  static_assert(R == 4 || R == 16 || R == 32 || R == 64 || R == 96 || R == 128, "8, 32, 64, 128, 192 or 256 columns");
  constexpr bool bf16 = std::is_same_v<T, __nv_bfloat16>;
  if constexpr (R == 4 && bf16) TFLA_SHARED_PRODUCT_4("bf16");
  if constexpr (R == 4 && !bf16) TFLA_SHARED_PRODUCT_4("f16");
  if constexpr (R == 16 && bf16) TFLA_SHARED_PRODUCT_16("bf16");
  if constexpr (R == 16 && !bf16) TFLA_SHARED_PRODUCT_16("f16");
  if constexpr (R == 32 && bf16) TFLA_SHARED_PRODUCT_32("bf16");
  if constexpr (R == 32 && !bf16) TFLA_SHARED_PRODUCT_32("f16");
  if constexpr (R == 64 && bf16) TFLA_SHARED_PRODUCT_64("bf16");
  if constexpr (R == 64 && !bf16) TFLA_SHARED_PRODUCT_64("f16");
  if constexpr (R == 96 && bf16) TFLA_SHARED_PRODUCT_96("bf16");
  if constexpr (R == 96 && !bf16) TFLA_SHARED_PRODUCT_96("f16");
  if constexpr (R == 128 && bf16) TFLA_SHARED_PRODUCT_128("bf16");
  if constexpr (R == 128 && !bf16) TFLA_SHARED_PRODUCT_128("f16");
}

// The same with 136 columns, the last eight of them in sums of their own.
template <class T, Major A, Major B>
__device__ __forceinline__ void multiply(float (&sum)[64], float (&more)[4], std::uint64_t a, std::uint64_t b,
                                         bool add) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>)
    TFLA_SHARED_PRODUCT_68("bf16");
  else
    TFLA_SHARED_PRODUCT_68("f16");
}

// The same with A in registers, as mma.sync holds a 16 x 16 tile per warp.
template <class T, Major B, int R>
__device__ __forceinline__ void multiply(float (&sum)[R], const std::uint32_t (&a)[4], std::uint64_t b, bool add) {
  static_assert(R == 16 || R == 32 || R == 64 || R == 96 || R == 128, "32, 64, 128, 192 or 256 columns");
  constexpr bool bf16 = std::is_same_v<T, __nv_bfloat16>;
  if constexpr (R == 16 && bf16) TFLA_REGISTER_PRODUCT_16("bf16");
  if constexpr (R == 16 && !bf16) TFLA_REGISTER_PRODUCT_16("f16");
  if constexpr (R == 32 && bf16) TFLA_REGISTER_PRODUCT_32("bf16");
  if constexpr (R == 32 && !bf16) TFLA_REGISTER_PRODUCT_32("f16");
  if constexpr (R == 64 && bf16) TFLA_REGISTER_PRODUCT_64("bf16");
  if constexpr (R == 64 && !bf16) TFLA_REGISTER_PRODUCT_64("f16");
  if constexpr (R == 96 && bf16) TFLA_REGISTER_PRODUCT_96("bf16");
  if constexpr (R == 96 && !bf16) TFLA_REGISTER_PRODUCT_96("f16");
  if constexpr (R == 128 && bf16) TFLA_REGISTER_PRODUCT_128("bf16");
  if constexpr (R == 128 && !bf16) TFLA_REGISTER_PRODUCT_128("f16");
}

#undef TFLA_REGISTER_PRODUCT_128
#undef TFLA_SHARED_PRODUCT_128
#undef TFLA_REGISTER_PRODUCT_96
#undef TFLA_SHARED_PRODUCT_96
#undef TFLA_SHARED_PRODUCT_68
#undef TFLA_REGISTER_PRODUCT_64
#undef TFLA_SHARED_PRODUCT_64
#undef TFLA_REGISTER_PRODUCT_32
#undef TFLA_SHARED_PRODUCT_32
#undef TFLA_REGISTER_PRODUCT_16
#undef TFLA_SHARED_PRODUCT_16
#undef TFLA_SHARED_PRODUCT_4
#undef TFLA_NAMES_128
#undef TFLA_NAMES_96
#undef TFLA_NAMES_68
#undef TFLA_NAMES_64
#undef TFLA_NAMES_32
#undef TFLA_NAMES_16
#undef TFLA_SUMS_128
#undef TFLA_SUMS_96
#undef TFLA_SUMS_64
#undef TFLA_SUMS_32
#undef TFLA_SUMS_16
#undef TFLA_SUMS_4

}  // namespace tfla::cuda::arch
