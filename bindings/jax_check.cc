// What is wrong with a call, found while JAX traces it: there are shapes then, but no data.
#include <algorithm>

#include "jax_delta.h"
#include "jax_mlstm.h"

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
template <class Operator>
void check(Operation operation, std::span<const TracedTensor> tensors, const typename Operator::Settings& settings) {
  constexpr std::size_t v = 2;
  const bool head_first = settings[Operator::head_first];
  Addresses addresses;
  std::vector<Array> in;
  for (const TracedTensor& tensor : tensors) in.push_back(addresses.place(tensor));
  std::vector<Array> out{addresses.place(tensors[v])};
  for (std::size_t part = 0; operation == Operation::step && part < settings.state_parts; ++part) {
    out.push_back(in.at(settings.first_state() + part));
  }
  std::vector<std::int64_t> memory;
  if (settings[Operator::has_index]) {
    const std::span<const std::int64_t> q = in[0].shape;
    fill_index(in.back(), operation, q.size() < 3 ? 0 : q[head_first ? 2 : 1], memory);
  }
  typename Operator::Call call{settings, Arrays(std::move(in), head_first), Arrays(std::move(out), head_first)};
  if (operation == Operation::step) {
    static_cast<void>(Operator::make_plan(Operator::step_args(call), {}));
  } else {
    static_cast<void>(Operator::make_plan(Operator::forward_args(call), {}));
  }
}

// Null where the call is fine, else what is wrong with it, in memory that lasts until this thread's next check.
template <class Operator>
const char* sentence_about(std::int32_t operation, const TracedTensor* tensors, std::int64_t count,
                           const std::int64_t* flags, const double* numbers) {
  thread_local std::string sentence;
  try {
    std::array<std::int64_t, Operator::flag_count> h_alone;
    std::copy_n(flags, h_alone.size(), h_alone.begin());
    for (const auto flag : Operator::Settings::further_results) h_alone[flag] = 0;
    check<Operator>(static_cast<Operation>(operation), {tensors, static_cast<std::size_t>(count)},
                    typename Operator::Settings(h_alone, {numbers, Operator::number_count}));
    return nullptr;
  } catch (const std::exception& error) {
    sentence = error.what();
    return sentence.c_str();
  }
}

}  // namespace
}  // namespace tfla::jax

#define TFLA_CHECK(Operator, name)                                                                                \
  TFLA_EXPORT const char* tfla_jax_##name##_flag_names() { return tfla::jax::Operator::flag_names; }              \
  TFLA_EXPORT const char* tfla_jax_##name##_number_names() { return tfla::jax::Operator::number_names; }          \
  TFLA_EXPORT const char* tfla_jax_##name##_check(std::int32_t operation, const tfla::jax::TracedTensor* tensors, \
                                                  std::int64_t count, const std::int64_t* flags,                  \
                                                  const double* numbers) {                                        \
    return tfla::jax::sentence_about<tfla::jax::Operator>(operation, tensors, count, flags, numbers);             \
  }
TFLA_CHECK(Mlstm, mlstm)
TFLA_CHECK(Delta, delta_rule)
#undef TFLA_CHECK
