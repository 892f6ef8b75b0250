#include "cli/support/ceilings.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cli/support/blas.h"
#include "cli/support/timing.h"
#include "cpu/threads.h"
#include "reference/regimes.h"

namespace tfla::cli {
namespace {

constexpr int product_size = 2048;

struct Operands {
  std::vector<float> a, b, out;
};

Operands random_operands(int worker) {
  constexpr std::int64_t count = std::int64_t{product_size} * product_size;
  Operands operands{std::vector<float>(count), std::vector<float>(count), std::vector<float>(count)};
  const auto seed = static_cast<std::uint64_t>(worker);
  for (std::int64_t x = 0; x < count; ++x) {
    operands.a[x] = static_cast<float>(reference::normal(seed, reference::Stream::q, x));
    operands.b[x] = static_cast<float>(reference::normal(seed, reference::Stream::k, x));
  }
  return operands;
}

}  // namespace

Copy::Copy(std::size_t bytes, int threads, Device device)
    : from_(bytes, device), to_(bytes, device), threads_(threads) {
  if (device == Device::cuda)
    recorded_ = gpu_instruments().record([&](void* stream) {
      // In pieces: a single copy of a GB runs at two thirds of their rate on an H200.
      constexpr std::size_t piece = std::size_t{1} << 27;
      for (std::size_t at = 0; at < bytes; at += piece)
        gpu_instruments().copy_on(stream, to_.data() + at, from_.data() + at, std::min(piece, bytes - at));
    });
  else
    std::memset(from_.data(), 1, bytes);
}

void Copy::operator()() const {
  if (recorded_) {
    recorded_->replay();
    return;
  }
  const auto parts = static_cast<std::size_t>(threads_);
  cpu::parallel_for(threads_, threads_, [&](std::int64_t unit, int) {
    const auto part = static_cast<std::size_t>(unit);
    const std::size_t begin = from_.size() * part / parts;
    const std::size_t end = from_.size() * (part + 1) / parts;
    std::memcpy(to_.data() + begin, from_.data() + begin, end - begin);
  });
}

ProductRate measure_products(int threads, double min_time) {
  std::vector<Operands> operands;
  for (int worker = 0; worker < threads; ++worker) operands.push_back(random_operands(worker));
  const auto multiply = [&] {
    cpu::parallel_for(threads, threads, [&](std::int64_t unit, int) {
      Operands& mine = operands[static_cast<std::size_t>(unit)];
      blas_product(product_size, mine.a.data(), mine.b.data(), mine.out.data());
    });
  };
  const Timing timing = measure({multiply}, {min_time}).front();
  constexpr double size = product_size;
  return {blas_name(), product_size, threads * 2 * size * size * size / timing.median};
}

}  // namespace tfla::cli
