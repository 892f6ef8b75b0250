#include "testkit/tensor.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "plan/backend.h"
#include "reference/values.h"

namespace tfla::testkit {
namespace {

constexpr std::align_val_t alignment{64};
constexpr int poison_byte = 0xFF;

std::int64_t byte_count(DType dtype, std::initializer_list<std::int64_t> shape) {
  std::int64_t bytes = item_size(dtype);
  for (std::int64_t extent : shape) bytes *= extent;
  return bytes;
}

Device place = Device::cpu;

std::byte* allocate(std::int64_t bytes) {
  const auto size = static_cast<std::size_t>(bytes);
  if (place == Device::cuda) return gpu_instruments().allocate_shared(size);
  return static_cast<std::byte*>(::operator new[](size, alignment));
}

}  // namespace

void place_buffers(Device device) { place = device; }

void wait_for_buffers() {
  if (place == Device::cuda) gpu_instruments().synchronize();
}

void Buffer::Free::operator()(std::byte* memory) const {
  if (device == Device::cuda) {
    gpu_instruments().release_shared(memory);
  } else {
    ::operator delete[](memory, alignment);
  }
}

Buffer::Buffer(std::int64_t bytes) : size_(bytes), memory_(allocate(bytes + 2 * margin), Free{place}) { poison(); }

void Buffer::poison() { std::memset(memory_.get(), poison_byte, static_cast<std::size_t>(size_ + 2 * margin)); }

bool Buffer::margins_intact() const {
  const auto intact = [](std::byte byte) { return byte == std::byte{poison_byte}; };
  return std::all_of(memory_.get(), data(), intact) && std::all_of(data() + size_, data() + size_ + margin, intact);
}

Tensor::Tensor(DType dtype, std::initializer_list<std::int64_t> shape)
    : buffer(std::make_shared<Buffer>(byte_count(dtype, shape))), view(buffer->data(), dtype, shape) {}

std::vector<double> gather(const TensorView& view) {
  wait_for_buffers();
  std::vector<double> values(static_cast<std::size_t>(reference::element_count(view)));
  for (std::size_t index = 0; index < values.size(); ++index) {
    values[index] =
        reference::load(view.data, view.dtype, reference::offset_of(view, static_cast<std::int64_t>(index)));
  }
  return values;
}

void scatter(const MutableTensorView& view, std::span<const double> values) {
  for (std::size_t index = 0; index < values.size(); ++index) {
    reference::store(view.data, view.dtype, reference::offset_of(view, static_cast<std::int64_t>(index)),
                     values[index]);
  }
}

}  // namespace tfla::testkit
