// What is wrong with a call, found while JAX traces it: there are shapes then, but no data.
#include <algorithm>

#include "jax_call.h"

namespace tfla::jax {
namespace {

constexpr std::size_t largest_rank = 8;

// As _ffi.py lays it out.
struct TracedTensor {
  std::int32_t dtype;
  std::int32_t rank;
  std::int64_t shape[largest_rank];
};

// Addresses that no one reads or writes: validation looks at where tensors lie, not at what is in them.
class Addresses {
 public:
  [[nodiscard]] Array place(const TracedTensor& tensor) {
    const Array array{reinterpret_cast<void*>(next_),
                      static_cast<DType>(tensor.dtype),
                      {tensor.shape, static_cast<std::size_t>(tensor.rank)}};
    auto bytes = static_cast<std::uintptr_t>(item_size(array.dtype));
    for (const std::int64_t extent : array.shape) bytes *= static_cast<std::uintptr_t>(extent);
    next_ += (bytes / scratch_alignment + 1) * scratch_alignment;
    return array;
  }

 private:
  std::uintptr_t next_ = std::uintptr_t{1} << 32;
};

// The values of cu_seqlens and slots are read, so these get memory, and values that are right: 0, ..., 0, T and
// 0, 1, 2, ... What they really hold is checked when the call runs.
void fill_index(Array& index, Operation operation, std::int64_t tokens, std::vector<std::int64_t>& memory) {
  const std::int64_t count = index.shape.size() == 1 ? index.shape[0] : 0;
  memory.assign(static_cast<std::size_t>(count) + 1, 0);
  index.data = memory.data();
  for (std::int64_t at = 0; at < count; ++at) {
    const std::int64_t value = operation == Operation::step ? at : at + 1 == count ? tokens : 0;
    if (index.dtype == DType::int64) static_cast<std::int64_t*>(index.data)[at] = value;
    if (index.dtype == DType::int32) static_cast<std::int32_t*>(index.data)[at] = static_cast<std::int32_t>(value);
  }
}

// For forward and step. Results have the shapes the arguments call for, so only h, which is like v, takes part; the
// last state of a step is the given one.
void check(Operation operation, std::span<const TracedTensor> tensors, const Settings& settings) {
  constexpr std::size_t v = 2, first_state = 5;
  Addresses addresses;
  std::vector<Array> in;
  for (const TracedTensor& tensor : tensors) in.push_back(addresses.place(tensor));
  std::vector<Array> out{addresses.place(tensors[v])};
  if (operation == Operation::step)
    out.insert(out.end(), {in.at(first_state), in.at(first_state + 1), in.at(first_state + 2)});
  std::vector<std::int64_t> memory;
  if (settings[has_index]) {
    const std::span<const std::int64_t> q = in[0].shape;
    fill_index(in.back(), operation, q.size() < 3 ? 0 : q[settings[head_first] ? 2 : 1], memory);
  }
  Call call{settings, Arrays(std::move(in), settings[head_first]), Arrays(std::move(out), settings[head_first])};
  if (operation == Operation::step) {
    static_cast<void>(plan(step_args(call)));
  } else {
    static_cast<void>(plan(forward_args(call)));
  }
}

}  // namespace
}  // namespace tfla::jax

TFLA_EXPORT const char* tfla_jax_flag_names() { return tfla::jax::flag_names; }
TFLA_EXPORT const char* tfla_jax_number_names() { return tfla::jax::number_names; }

// Null where the call is fine, else what is wrong with it, in memory that lasts until this thread's next check.
TFLA_EXPORT const char* tfla_jax_check(std::int32_t operation, const tfla::jax::TracedTensor* tensors,
                                       std::int64_t count, const std::int64_t* flags, const double* numbers) {
  using namespace tfla::jax;
  thread_local std::string sentence;
  try {
    std::array<std::int64_t, flag_count> h_alone;
    std::copy_n(flags, flag_count, h_alone.begin());
    h_alone[has_C] = h_alone[has_saved] = 0;
    check(static_cast<tfla::Operation>(operation), {tensors, static_cast<std::size_t>(count)},
          Settings(h_alone, {numbers, number_count}));
    return nullptr;
  } catch (const std::exception& error) {
    sentence = error.what();
    return sentence.c_str();
  }
}
