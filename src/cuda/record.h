// Calls recorded once and replayed without the host: what `tfla bench` times on a GPU.
#pragma once

#include <cstddef>
#include <functional>
#include <string>

namespace tfla::cuda {

class Recording {
 public:
  // calls(stream) enqueues on the stream it is given.
  explicit Recording(const std::function<void(void* stream)>& calls);
  ~Recording();  // NOLINT(performance-trivially-destructible): trivial only in a build without CUDA
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

  void replay() const;  // returns at once
  // Replays once and waits; the time on the GPU.
  [[nodiscard]] double replay_seconds() const;

 private:
  void* stream_ = nullptr;
  void* graph_ = nullptr;
  void* begin_ = nullptr;
  void* end_ = nullptr;
};

// Between host and device in either direction, or inside the device; returns when done, or, on a stream, at once.
void copy(void* to, const void* from, std::size_t bytes);
void copy_on(void* stream, void* to, const void* from, std::size_t bytes);

[[nodiscard]] std::string device_name();

}  // namespace tfla::cuda
