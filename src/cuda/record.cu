#include "cuda/record.h"

#include "cuda/device.h"

namespace tfla::cuda {

namespace {

class GraphRecording : public Recording {
 public:
  explicit GraphRecording(const std::function<void(void* stream)>& calls);
  ~GraphRecording() override;
  GraphRecording(const GraphRecording&) = delete;
  GraphRecording& operator=(const GraphRecording&) = delete;

  void replay() const override;
  [[nodiscard]] double replay_seconds() const override;

 private:
  void* stream_ = nullptr;
  void* graph_ = nullptr;
  void* begin_ = nullptr;
  void* end_ = nullptr;
};

GraphRecording::GraphRecording(const std::function<void(void* stream)>& calls) {
  cudaStream_t stream{};
  cudaGraph_t graph{};
  cudaGraphExec_t ready{};
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  stream_ = stream;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  calls(stream);
  check(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
  check(cudaGraphInstantiate(&ready, graph, 0), "cudaGraphInstantiate");
  graph_ = ready;
  cudaGraphDestroy(graph);
  for (void** event : {&begin_, &end_}) {
    cudaEvent_t made{};
    check(cudaEventCreate(&made), "cudaEventCreate");
    *event = made;
  }
}

GraphRecording::~GraphRecording() {
  cudaEventDestroy(static_cast<cudaEvent_t>(begin_));
  cudaEventDestroy(static_cast<cudaEvent_t>(end_));
  cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph_));
  cudaStreamDestroy(static_cast<cudaStream_t>(stream_));
}

void GraphRecording::replay() const {
  check(cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph_), static_cast<cudaStream_t>(stream_)), "cudaGraphLaunch");
}

double GraphRecording::replay_seconds() const {
  constexpr double milliseconds = 1e-3;
  const auto stream = static_cast<cudaStream_t>(stream_);
  const auto begin = static_cast<cudaEvent_t>(begin_), end = static_cast<cudaEvent_t>(end_);
  float taken = 0;
  check(cudaEventRecord(begin, stream), "cudaEventRecord");
  replay();
  check(cudaEventRecord(end, stream), "cudaEventRecord");
  check(cudaEventSynchronize(end), "cudaEventSynchronize");
  check(cudaEventElapsedTime(&taken, begin, end), "cudaEventElapsedTime");
  return taken * milliseconds;
}

}  // namespace

std::unique_ptr<Recording> record(const std::function<void(void* stream)>& calls) {
  return std::make_unique<GraphRecording>(calls);
}

void copy(void* to, const void* from, std::size_t bytes) {
  check(cudaMemcpy(to, from, bytes, cudaMemcpyDefault), "cudaMemcpy");
}

void copy_on(void* stream, void* to, const void* from, std::size_t bytes) {
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, static_cast<cudaStream_t>(stream)), "cudaMemcpyAsync");
}

std::string device_name() {
  int device = 0;
  cudaDeviceProp properties{};
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
  return properties.name;
}

}  // namespace tfla::cuda
