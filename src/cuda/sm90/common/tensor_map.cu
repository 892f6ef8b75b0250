#include "cuda/sm90/common/tensor_map.h"

#include <algorithm>
#include <string>

#include "cuda/launch.h"
#include "tfla/error.h"

namespace tfla::cuda::sm90 {

namespace {

constexpr std::int64_t item = 2;  // bytes of a number

// The driver's function, found at run time: the library does not link the driver.
auto encoder() {
  using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                              const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                              CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  static const Encode encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found{};
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found),
          "cuTensorMapEncodeTiled");
    return reinterpret_cast<Encode>(function);
  }();
  return encode;
}

CUtensorMap map_of(const void* data, int rank, const cuuint64_t* sizes, const cuuint64_t* strides,
                   const cuuint32_t* box) {
  constexpr cuuint32_t steps[4] = {1, 1, 1, 1};
  CUtensorMap map;
  const CUresult result =
      encoder()(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, static_cast<cuuint32_t>(rank), const_cast<void*>(data), sizes,
                strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    throw Unavailable("tfla: CUDA refused cuTensorMapEncodeTiled: error " + std::to_string(static_cast<int>(result)));
  return map;
}

// The step of an axis of length 1 is never taken, but must still be valid.
cuuint64_t stride_bytes(std::int64_t stride, std::int64_t size) {
  return static_cast<cuuint64_t>(size > 1 ? stride * item : 16);
}

}  // namespace

CUtensorMap token_map(const TokenAxes& axes, const Strided& tensor, std::int64_t heads, std::int64_t columns,
                      int box_tokens) {
  const bool packed = axes.packed;
  const std::int64_t last = packed ? axes.tokens + 1 : axes.batch;
  const cuuint64_t sizes[4] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(axes.tokens),
                               static_cast<cuuint64_t>(heads), static_cast<cuuint64_t>(last)};
  const cuuint64_t strides[3] = {stride_bytes(tensor.token, axes.tokens), stride_bytes(tensor.head, heads),
                                 stride_bytes(packed ? tensor.token : tensor.batch, last)};
  const cuuint32_t box[4] = {panel, static_cast<cuuint32_t>(box_tokens), 1, 1};
  const std::uintptr_t before = packed ? static_cast<std::uintptr_t>(axes.tokens * tensor.token * item) : 0;
  return map_of(reinterpret_cast<const void*>(reinterpret_cast<std::uintptr_t>(tensor.data) - before), 4, sizes,
                strides, box);
}

// Zeros but for its first eight numbers, in the first panel of the first token: boxes outside of a tensor are
// never there.
CUtensorMap nothing_map(const void* readable, int box_tokens) {
  constexpr cuuint64_t sizes[4] = {8, 1, 1, 1}, strides[3] = {16, 16, 16};
  const cuuint32_t box[4] = {panel, static_cast<cuuint32_t>(box_tokens), 1, 1};
  return map_of(readable, 4, sizes, strides, box);
}

CUtensorMap matrix_map(const void* data, std::int64_t matrices, std::int64_t rows, std::int64_t columns, int box_rows) {
  const cuuint64_t sizes[3] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows),
                               static_cast<cuuint64_t>(matrices)};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(columns * item),
                                 static_cast<cuuint64_t>(rows * columns * item)};
  const cuuint32_t box[3] = {panel, static_cast<cuuint32_t>(box_rows), 1};
  return map_of(data, 3, sizes, strides, box);
}

}  // namespace tfla::cuda::sm90
