// What several GPUs that train a language model of tfla.lm send each other in a step, how long that takes by a stated
// model of their network, and what each keeps. docs/lm_scale.md has the formulas; a test of tfla.lm counts what two
// processes hand to their collectives.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tfla::scale {

// Fields as tfla.lm names them; qk and v are all heads together.
struct Model {
  std::int64_t layers = 0;
  std::int64_t dim = 0;
  std::int64_t heads = 0;
  std::int64_t vocab = 0;
  std::int64_t ffn_dim = 0;
  std::int64_t qk_dim = 0;
  std::int64_t v_dim = 0;
};

// 8/3 of dim to a multiple of 64, as tfla.lm rounds it.
[[nodiscard]] std::int64_t feed_forward_dim(std::int64_t dim);

struct Parameter {
  std::int64_t rows = 0;  // what FSDP deals out
  std::int64_t columns = 1;

  [[nodiscard]] std::int64_t count() const { return rows * columns; }
};

// In the order in which forward uses them: gradients arrive in the reverse one.
[[nodiscard]] std::vector<Parameter> block_parameters(const Model& model);
[[nodiscard]] std::vector<Parameter> all_parameters(const Model& model);
[[nodiscard]] std::int64_t count(const std::vector<Parameter>& parameters);
// Of one GPU's shards: rows of each parameter are filled up to a multiple of the GPUs.
[[nodiscard]] std::int64_t shard_count(const std::vector<Parameter>& parameters, std::int64_t gpus);

enum class Strategy : std::uint8_t { ddp, fsdp, context, context_fsdp };

struct Training {
  Strategy strategy = Strategy::ddp;
  std::int64_t gpus = 1;
  std::int64_t context_ranks = 1;  // that share a sequence; neighbours
  std::int64_t micro_batch = 1;    // sequences at a time on one GPU
  std::int64_t micro_batches = 1;  // of a step
  std::int64_t item_bytes = 4;     // of parameters and gradients as they travel
  bool checkpoint_activations = false;

  [[nodiscard]] bool sharded() const { return strategy == Strategy::fsdp || strategy == Strategy::context_fsdp; }
  [[nodiscard]] bool shares_sequences() const { return context_ranks > 1; }
};

enum class Operation : std::uint8_t { all_reduce, all_gather, reduce_scatter };
// The computation that a collective may run beneath. Gradients travel with the last micro-batch of a step only.
enum class Beneath : std::uint8_t { nothing, forward, backward, last_backward };

// Collectives of the same kind and size.
struct Collective {
  Operation operation = Operation::all_reduce;
  std::string what;
  Beneath beneath = Beneath::nothing;
  std::int64_t ranks = 1;
  std::int64_t calls = 0;  // in a step
  std::int64_t bytes = 0;  // that each rank hands to a call
};
// Bytes that a rank sends in one call, by a ring.
[[nodiscard]] double sent(const Collective& collective);

// What a step sends, from the third one on: DDP learns in the first in which order gradients arrive, and the ranks
// agree on their buckets in the second.
[[nodiscard]] std::vector<Collective> collectives(const Model& model, const Training& training);

// Bytes on a GPU, the one with the largest shards. Weights, gradients and moments of AdamW are float32.
struct Memory {
  std::int64_t parameters = 0;
  std::int64_t gradients = 0;
  std::int64_t optimizer = 0;
  std::int64_t buffers = 0;  // DDP's buckets; what FSDP has gathered
};
[[nodiscard]] Memory memory(const Model& model, const Training& training);

// ---------------------------------------------------------------- times

// Rings as NCCL lays them: so many as a node has GPUs, each of which leaves the node at another GPU's adapter.
struct Network {
  std::int64_t node_gpus = 8;
  double node_bandwidth = 450e9;  // bytes per second of a GPU in each direction, inside a node
  double bandwidth = 50e9;        // of a GPU's adapter, between nodes
  double call_seconds = 8.4e-6;
  double node_step_seconds = 3.4e-6;  // of a step of the ring
  double step_seconds = 14e-6;        // of one that leaves the node
  double overlap = 1;                 // the share of a collective beneath computation that it hides there
};
[[nodiscard]] double seconds(const Collective& collective, const Network& network);

// On one GPU, for all micro-batches of a step.
struct Measured {
  double step_seconds = 0;
  double kernel_seconds = 0;  // of the operator, forward and backward
};

struct Step {
  double sent = 0;           // bytes of each GPU
  double communication = 0;  // seconds of all collectives
  double hidden = 0;         // of these, beneath computation
  double computation = 0;    // with what context parallel computes twice

  [[nodiscard]] double seconds() const { return computation + communication - hidden; }
};
[[nodiscard]] Step step(const std::vector<Collective>& collectives, const Training& training, const Measured& measured,
                        const Network& network);

}  // namespace tfla::scale
