// Owned memory with margins that no call may touch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "tfla/mlstm.h"

namespace tfla::testkit {

// Where buffers are made from now on: plain memory, or memory that a GPU sees too.
void place_buffers(Device device);
// Waits for whatever a GPU still writes into buffers.
void wait_for_buffers();

// Bytes aligned to 64, all 0xFF (a NaN in every float dtype), with a margin of 0xFF before and after.
class Buffer {
 public:
  explicit Buffer(std::int64_t bytes);

  [[nodiscard]] std::byte* data() const { return memory_.get() + margin; }
  [[nodiscard]] std::int64_t size() const { return size_; }
  void poison();  // the margins too
  [[nodiscard]] bool margins_intact() const;

 private:
  static constexpr std::int64_t margin = 256;
  struct Free {
    Device device = Device::cpu;
    void operator()(std::byte* memory) const;
  };
  std::int64_t size_;
  std::unique_ptr<std::byte[], Free> memory_;
};

// A view together with the memory it lies in. Several tensors may share one buffer (slices of a fused projection).
struct Tensor {
  std::shared_ptr<Buffer> buffer;
  MutableTensorView view;

  Tensor() = default;
  Tensor(DType dtype, std::initializer_list<std::int64_t> shape);  // dense, row-major, poisoned
  Tensor(std::shared_ptr<Buffer> buffer_, const MutableTensorView& view_) : buffer(std::move(buffer_)), view(view_) {}

  [[nodiscard]] bool given() const { return view.given(); }
};

// All elements in row-major order of the logical shape, whatever the strides. Waits for a GPU that still writes them.
[[nodiscard]] std::vector<double> gather(const TensorView& view);
void scatter(const MutableTensorView& view, std::span<const double> values);

}  // namespace tfla::testkit
