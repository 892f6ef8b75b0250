// What the functions of the C API have in common: errors, structs that may grow, views.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <exception>
#include <new>
#include <type_traits>

#include "tfla/tfla.h"
#include "tfla/tfla_c.h"

namespace tfla::c_api {

// ---------------------------------------------------------------- errors

// Keeps the sentence for tfla_last_error.
tfla_status fail(tfla_status status, const char* sentence) noexcept;

template <class Call>
tfla_status guarded(const Call& call) noexcept {
  try {
    call();
    return TFLA_OK;
  } catch (const InvalidArgument& error) {
    return fail(TFLA_INVALID_ARGUMENT, error.what());
  } catch (const Unavailable& error) {
    return fail(TFLA_UNAVAILABLE, error.what());
  } catch (const std::bad_alloc&) {
    return fail(TFLA_OUT_OF_MEMORY, "tfla: there is not enough memory for this call");
  } catch (const std::exception& error) {
    return fail(TFLA_FAILED, error.what());
  } catch (...) {
    return fail(TFLA_FAILED, "tfla: this call failed for a reason that is not known");
  }
}

// ---------------------------------------------------------------- structs that may grow

// Sizes of the first version: no caller has less. A field that is added later leaves them as they are.
template <class Struct>
inline constexpr std::size_t first_size = 0;
template <>
inline constexpr std::size_t first_size<tfla_execution> = 32;

template <class Struct>
Struct read(const Struct* given, const char* name) {
  static_assert(sizeof(Struct) >= first_size<Struct> && first_size<Struct> != 0 && std::is_trivial_v<Struct>);
  if (given == nullptr) throw InvalidArgument(fmt::format("tfla: {} is NULL", name));
  const std::size_t size = given->struct_size;
  if (size < first_size<Struct>) {
    throw InvalidArgument(fmt::format("tfla: {}->struct_size is {}; it must be sizeof *{}, which is {} here", name,
                                      size, name, sizeof(Struct)));
  }
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  if (std::any_of(bytes + std::min(size, sizeof(Struct)), bytes + size, [](unsigned char byte) { return byte != 0; })) {
    throw InvalidArgument(
        fmt::format("tfla: {} sets fields that tfla {} does not know; its struct_size is {}, here it is {}", name,
                    version(), size, sizeof(Struct)));
  }
  Struct known{};
  std::memcpy(&known, given, std::min(size, sizeof(Struct)));
  return known;
}

// A number that is none of the enumeration's stays none of them, for validation to refuse.
template <class Enumeration>
Enumeration enumerator(std::int32_t value) {
  return static_cast<Enumeration>(value < 0 || value > 255 ? 255 : value);
}

template <class View>
View view(const tfla_tensor& tensor) {
  View view;
  view.data = tensor.data;
  view.dtype = enumerator<DType>(tensor.dtype);
  view.rank = tensor.rank;
  std::copy_n(std::begin(tensor.shape), View::max_rank, view.shape.begin());
  std::copy_n(std::begin(tensor.strides), View::max_rank, view.strides.begin());
  return view;
}
inline TensorView in(const tfla_tensor& tensor) { return view<TensorView>(tensor); }
inline MutableTensorView out(const tfla_tensor& tensor) { return view<MutableTensorView>(tensor); }
inline Execution execution_of(const tfla_execution* given) {
  if (given == nullptr) return {};
  const tfla_execution e = read(given, "execution");
  return {
      .device = enumerator<Device>(e.device), .threads = e.threads, .stream = e.stream, .portable = e.portable != 0};
}

}  // namespace tfla::c_api
