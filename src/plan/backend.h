// A backend as the API sees it: a struct of functions. A build without CUDA has a null pointer in the place of one.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "tfla/plan.h"

namespace tfla {

// Calls recorded once and replayed without the host: what `tfla bench` times on a GPU.
class Recording {
 public:
  Recording() = default;
  virtual ~Recording() = default;
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

  virtual void replay() const = 0;  // returns at once
  // Replays once and waits; the time on the GPU.
  [[nodiscard]] virtual double replay_seconds() const = 0;
};

// What tests and benchmarks need of a GPU.
struct Instruments {
  // Memory that host and device both see, and waiting until results are in.
  std::byte* (*allocate_shared)(std::size_t bytes);
  void (*release_shared)(std::byte* memory);
  void (*synchronize)();
  // Between host and device in either direction, or inside the device; returns when done, or, on a stream, at once.
  void (*copy)(void* to, const void* from, std::size_t bytes);
  void (*copy_on)(void* stream, void* to, const void* from, std::size_t bytes);
  // calls(stream) enqueues on the stream it is given.
  std::unique_ptr<Recording> (*record)(const std::function<void(void* stream)>& calls);
  std::string (*device_name)();
};

struct Backend {
  void (*check_available)();  // throws Unavailable in one sentence that says why it is not
  DeviceFacts (*facts)();     // of the current device

  void (*forward)(const MlstmForward& args, const Plan& plan, std::byte* scratch, void* stream);
  void (*backward)(const MlstmBackward& args, const Plan& plan, std::byte* scratch, void* stream);
  void (*step)(const MlstmStep& args, const Plan& plan, std::byte* scratch, void* stream);

  // Scratch of calls that allocate their own, in stream order.
  std::byte* (*allocate)(std::size_t bytes, void* stream);
  void (*release)(std::byte* memory, void* stream);

  const Instruments* instruments;  // null on the CPU
};

[[nodiscard]] const Backend& cpu_backend();
[[nodiscard]] const Backend* cuda_backend();  // null in a build without CUDA

// Throw Unavailable where the build has no such backend.
[[nodiscard]] const Backend& backend(Device device);
[[nodiscard]] const Instruments& gpu_instruments();

// Of the CPU: threads that it uses by default, and the scratch of a call, whose layout its passes know.
[[nodiscard]] int cpu_threads();
[[nodiscard]] std::size_t cpu_scratch_bytes(const Plan& plan);

}  // namespace tfla
