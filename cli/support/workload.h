// Tensors for timing: filled with fresh random numbers, every page touched before the clock starts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "tfla/tfla.h"

namespace tfla::cli {

// Tensors lie in the pages that a caller's allocator gives. Scratch asks for huge ones, as a call's own does.
enum class Pages : std::uint8_t { usual, huge };

// Aligned memory of a device, written once so that no page is mapped while something is timed.
class Buffer {
 public:
  explicit Buffer(std::size_t bytes, Device device = Device::cpu, Pages pages = Pages::usual);
  [[nodiscard]] std::byte* data() const { return data_.get(); }
  [[nodiscard]] std::size_t size() const { return bytes_; }
  [[nodiscard]] std::span<std::byte> span() const { return {data_.get(), bytes_}; }

 private:
  struct Free {
    Device device = Device::cpu;
    void operator()(std::byte* memory) const;
  };
  std::unique_ptr<std::byte, Free> data_;
  std::size_t bytes_;
};

// The tensors of a forward and, when asked for, a backward call on a dense (B,T,H,D) batch. The gates are those of a
// trained layer: i from N(-4, 1), f from N(4.5, 1).
class Workload {
 public:
  Workload(const MlstmShape& shape, bool with_backward, Device device);
  [[nodiscard]] MlstmForward forward(const MlstmOptions& options) const;
  [[nodiscard]] MlstmBackward backward(const MlstmOptions& options) const;
  [[nodiscard]] std::size_t bytes(bool with_backward) const;  // of all inputs and outputs

 private:
  MlstmShape shape_;
  Buffer q_, k_, v_, i_, f_, h_;
  Buffer dh_, dq_, dk_, dv_, di_, df_;  // empty without backward
};

// The tensors of a step, its state included.
class StepWorkload {
 public:
  StepWorkload(const MlstmShape& shape, Device device);
  [[nodiscard]] MlstmStep step(const MlstmOptions& options) const;
  [[nodiscard]] std::size_t state_bytes() const { return C_.size() + n_.size(); }

 private:
  MlstmShape shape_;
  Buffer q_, k_, v_, i_, f_, h_;
  Buffer C_, n_, m_;
};

// The tensors of the delta rule: of forward and backward on a dense batch, or of a step with its state. Keys are
// normalised by the operator, beta is a sigmoid, log decays come from N(-0.5, 0.1).
class DeltaWorkload {
 public:
  enum class Kind : std::uint8_t { forward, training, step };
  DeltaWorkload(const DeltaShape& shape, Kind kind);
  [[nodiscard]] DeltaForward forward(std::int64_t chunk_size) const;
  [[nodiscard]] DeltaBackward backward(std::int64_t chunk_size) const;
  [[nodiscard]] DeltaStep step() const;
  [[nodiscard]] std::size_t state_bytes() const { return C_.size(); }

 private:
  DeltaShape shape_;
  Buffer q_, k_, v_, beta_, g_, h_;
  Buffer dh_, dq_, dk_, dv_, dbeta_, dg_;  // empty unless for training
  Buffer C_;                               // empty unless for a step
};

}  // namespace tfla::cli
