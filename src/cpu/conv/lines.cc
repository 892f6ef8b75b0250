#include "cpu/conv/lines.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "cpu/kernels/simd.h"

namespace tfla::cpu::conv {

namespace {

constexpr std::int64_t gathered = 64;  // elements that are brought together before they are converted

template <class Item>
void gather_items(const Item* from, std::int64_t stride, Item* to, std::int64_t n) {
  for (std::int64_t j = 0; j < n; ++j) to[j] = from[j * stride];
}

template <class Item>
void scatter_items(const Item* from, Item* to, std::int64_t stride, std::int64_t n) {
  for (std::int64_t j = 0; j < n; ++j) to[j * stride] = from[j];
}

// Side by side in memory.
template <class Real>
void load_items(const void* from, DType dtype, Real* to, std::int64_t n) {
  if (dtype == DType::float64) {
    const auto* items = static_cast<const double*>(from);
    for (std::int64_t j = 0; j < n; ++j) to[j] = static_cast<Real>(items[j]);
    return;
  }
  if constexpr (sizeof(Real) == sizeof(float)) {
    simd::load(from, dtype, to, n);
  } else {
    float narrow[gathered];
    for (std::int64_t j = 0; j < n; j += gathered) {
      const std::int64_t count = std::min(gathered, n - j);
      simd::load(static_cast<const std::byte*>(from) + j * item_size(dtype), dtype, narrow, count);
      std::copy(narrow, narrow + count, to + j);
    }
  }
}

template <class Real>
void store_items(const Real* from, void* to, DType dtype, std::int64_t n) {
  if (dtype == DType::float64) {
    std::copy(from, from + n, static_cast<double*>(to));
    return;
  }
  if constexpr (sizeof(Real) == sizeof(float)) {
    simd::store(1.0F, from, to, dtype, n);
  } else {
    float narrow[gathered];
    for (std::int64_t j = 0; j < n; j += gathered) {
      const std::int64_t count = std::min(gathered, n - j);
      for (std::int64_t i = 0; i < count; ++i) narrow[i] = static_cast<float>(from[j + i]);
      simd::store(1.0F, narrow, static_cast<std::byte*>(to) + j * item_size(dtype), dtype, count);
    }
  }
}

template <class Item, class Real>
void load_apart(const void* from, DType dtype, std::int64_t stride, Real* to, std::int64_t n) {
  Item items[gathered];
  for (std::int64_t j = 0; j < n; j += gathered) {
    const std::int64_t count = std::min(gathered, n - j);
    gather_items(static_cast<const Item*>(from) + j * stride, stride, items, count);
    load_items(items, dtype, to + j, count);
  }
}

template <class Item, class Real>
void store_apart(const Real* from, void* to, DType dtype, std::int64_t stride, std::int64_t n) {
  Item items[gathered];
  for (std::int64_t j = 0; j < n; j += gathered) {
    const std::int64_t count = std::min(gathered, n - j);
    store_items(from + j, items, dtype, count);
    scatter_items(items, static_cast<Item*>(to) + j * stride, stride, count);
  }
}

template <class Real>
void load(const TensorView& view, std::int64_t at, std::int64_t stride, Real* to, std::int64_t n) {
  const auto* from = static_cast<const std::byte*>(view.data) + at * item_size(view.dtype);
  if (stride == 1 || n == 1) return load_items(from, view.dtype, to, n);
  switch (item_size(view.dtype)) {
    case 2: return load_apart<std::uint16_t>(from, view.dtype, stride, to, n);
    case 4: return load_apart<float>(from, view.dtype, stride, to, n);
    default: return load_apart<double>(from, view.dtype, stride, to, n);
  }
}

template <class Real>
void store(const Real* from, const MutableTensorView& view, std::int64_t at, std::int64_t stride, std::int64_t n) {
  auto* to = static_cast<std::byte*>(view.data) + at * item_size(view.dtype);
  if (stride == 1 || n == 1) return store_items(from, to, view.dtype, n);
  switch (item_size(view.dtype)) {
    case 2: return store_apart<std::uint16_t>(from, to, view.dtype, stride, n);
    case 4: return store_apart<float>(from, to, view.dtype, stride, n);
    default: return store_apart<double>(from, to, view.dtype, stride, n);
  }
}

}  // namespace

void load_line(const TensorView& view, std::int64_t at, std::int64_t stride, float* to, std::int64_t n) {
  load(view, at, stride, to, n);
}
void load_line(const TensorView& view, std::int64_t at, std::int64_t stride, double* to, std::int64_t n) {
  load(view, at, stride, to, n);
}
void store_line(const float* from, const MutableTensorView& view, std::int64_t at, std::int64_t stride,
                std::int64_t n) {
  store(from, view, at, stride, n);
}
void store_line(const double* from, const MutableTensorView& view, std::int64_t at, std::int64_t stride,
                std::int64_t n) {
  store(from, view, at, stride, n);
}

void clear_line(const MutableTensorView& view, std::int64_t at, std::int64_t stride, std::int64_t n) {
  const std::int64_t item = item_size(view.dtype);
  auto* to = static_cast<std::byte*>(view.data) + at * item;
  if (stride == 1) {
    std::memset(to, 0, static_cast<std::size_t>(n * item));
  } else {
    for (std::int64_t j = 0; j < n; ++j) std::memset(to + j * stride * item, 0, static_cast<std::size_t>(item));
  }
}

void copy_line(const TensorView& view, std::int64_t at, std::int64_t stride, const MutableTensorView& to,
               std::int64_t to_at, std::int64_t to_stride, std::int64_t n) {
  double values[gathered];
  for (std::int64_t j = 0; j < n; j += gathered) {
    const std::int64_t count = std::min(gathered, n - j);
    load(view, at + j * stride, stride, values, count);
    store(values, to, to_at + j * to_stride, to_stride, count);
  }
}

void move_line(const MutableTensorView& view, std::int64_t from, std::int64_t to, std::int64_t stride, std::int64_t n) {
  const std::int64_t item = item_size(view.dtype);
  auto* data = static_cast<std::byte*>(view.data);
  if (stride == 1) {
    std::memmove(data + to * item, data + from * item, static_cast<std::size_t>(n * item));
    return;
  }
  for (std::int64_t j = 0; j < n; ++j) {
    std::memcpy(data + (to + j * stride) * item, data + (from + j * stride) * item, static_cast<std::size_t>(item));
  }
}

}  // namespace tfla::cpu::conv
