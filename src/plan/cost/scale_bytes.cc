// Formulas of docs/lm_scale.md: parameters, collectives and memory.
#include <algorithm>
#include <iterator>

#include "plan/cost/scale.h"

namespace tfla::scale {
namespace {

constexpr std::int64_t float_bytes = 4;   // of weights, moments and states
constexpr std::int64_t double_bytes = 8;  // of the sum of log f

// DDP closes a bucket with the parameter that fills it. The first is small, so that something travels early.
constexpr std::int64_t first_bucket_bytes = std::int64_t{1} << 20;
constexpr std::int64_t bucket_bytes = std::int64_t{25} << 20;

std::int64_t divide_up(std::int64_t x, std::int64_t by) { return (x + by - 1) / by; }

std::vector<Parameter> root_parameters(const Model& model) {
  return {{model.vocab, model.dim}, {model.dim}, {model.vocab, model.dim}};  // embedding, norm, head
}

void add(std::vector<Collective>& all, Collective one) {
  const auto same = [&](const Collective& other) {
    return other.operation == one.operation && other.what == one.what && other.bytes == one.bytes;
  };
  const auto found = std::find_if(all.begin(), all.end(), same);
  if (found != all.end()) {
    found->calls += one.calls;
  } else if (one.calls > 0) {
    all.push_back(std::move(one));
  }
}

// The last bucket waits for the embedding's gradient, which is the end of backward.
void add_ddp(std::vector<Collective>& all, const Model& model, const Training& training) {
  std::vector<Parameter> parameters = all_parameters(model);
  std::reverse(parameters.begin(), parameters.end());
  std::int64_t held = 0, limit = first_bucket_bytes;
  for (std::size_t x = 0; x < parameters.size(); ++x) {
    held += parameters[x].count();
    const bool last = x + 1 == parameters.size();
    if (!last && held * float_bytes < limit) continue;
    add(all, {Operation::all_reduce, last ? "gradients of the last bucket" : "gradients",
              last ? Beneath::nothing : Beneath::last_backward, training.gpus, 1, held * training.item_bytes});
    held = 0;
    limit = bucket_bytes;
  }
}

// Blocks give their parameters back after forward, the root (embedding, norm, head) only after backward. What comes
// first and last has no computation to run beneath.
void add_fsdp(std::vector<Collective>& all, const Model& model, const Training& training) {
  const std::vector<Parameter> block_list = block_parameters(model), root_list = root_parameters(model);
  const std::int64_t gpus = training.gpus, times = training.micro_batches, others = model.layers - 1;
  const std::int64_t block = shard_count(block_list, gpus) * training.item_bytes;
  const std::int64_t root = shard_count(root_list, gpus) * training.item_bytes;
  const auto gather = [&](const char* what, Beneath beneath, std::int64_t calls, std::int64_t bytes) {
    add(all, {Operation::all_gather, what, beneath, gpus, calls, bytes});
  };
  const auto reduce = [&](const char* what, Beneath beneath, std::int64_t calls, std::int64_t bytes) {
    add(all, {Operation::reduce_scatter, what, beneath, gpus, calls, gpus * bytes});
  };
  gather("parameters of the root", Beneath::nothing, times, root);
  gather("parameters of the first block", Beneath::nothing, times, block);
  gather("parameters", Beneath::forward, others * times, block);
  gather("parameters again", Beneath::backward, model.layers * times, block);
  reduce("gradients", Beneath::last_backward, others, block);
  reduce("gradients of the first block", Beneath::nothing, 1, block);
  reduce("gradients of the root", Beneath::nothing, 1, root);
  const auto tensors = static_cast<std::int64_t>(all_parameters(model).size());
  add(all, {Operation::all_reduce, "norms", Beneath::nothing, gpus, 1, tensors * float_bytes});
}

// Tensors of one collective begin at multiples of 16 bytes.
std::int64_t packed(std::initializer_list<std::int64_t> sizes) {
  constexpr std::int64_t alignment = 16;
  std::int64_t sum = 0;
  for (const std::int64_t size : sizes) sum += alignment * divide_up(size, alignment);
  return sum;
}

// Every layer waits for (C, n, m, b) of all stretches in forward and for (dC, dn) in backward.
void add_context(std::vector<Collective>& all, const Model& model, const Training& training) {
  const std::int64_t heads = training.micro_batch * model.heads;
  const std::int64_t n = training.micro_batch * model.qk_dim * float_bytes, C = n * (model.v_dim / model.heads);
  const std::int64_t calls = model.layers * training.micro_batches;
  const std::int64_t forwards = training.checkpoint_activations ? 2 : 1;
  add(all, {Operation::all_gather, "states", Beneath::nothing, training.context_ranks, forwards * calls,
            packed({C, n, heads * float_bytes, heads * double_bytes})});
  add(all,
      {Operation::all_gather, "gradients of states", Beneath::nothing, training.context_ranks, calls, packed({C, n})});
}

}  // namespace

std::int64_t feed_forward_dim(std::int64_t dim) {
  constexpr double share = 2.6667;
  constexpr std::int64_t multiple = 64;
  return static_cast<std::int64_t>((static_cast<double>(dim) * share + (multiple - 1)) / multiple) * multiple;
}

std::vector<Parameter> block_parameters(const Model& model) {
  const std::int64_t dim = model.dim, heads = model.heads, ffn = model.ffn_dim;
  return {{dim},               // norm
          {heads, dim},        // forget gate
          {heads, dim},        // input gate
          {model.v_dim, dim},  // output gate
          {model.qk_dim, dim},
          {model.qk_dim, dim},
          {model.v_dim, dim},
          {heads},  // biases of input and forget gate
          {heads},
          {model.v_dim},  // norm of the cell
          {dim, model.v_dim},
          {dim},  // norm of the feed-forward layer: gate, up, down
          {ffn, dim},
          {ffn, dim},
          {dim, ffn}};
}

std::vector<Parameter> all_parameters(const Model& model) {
  const std::vector<Parameter> root = root_parameters(model), block = block_parameters(model);
  std::vector<Parameter> all = {root.front()};
  for (std::int64_t layer = 0; layer < model.layers; ++layer) all.insert(all.end(), block.begin(), block.end());
  all.insert(all.end(), std::next(root.begin()), root.end());
  return all;
}

std::int64_t count(const std::vector<Parameter>& parameters) { return shard_count(parameters, 1); }

std::int64_t shard_count(const std::vector<Parameter>& parameters, std::int64_t gpus) {
  std::int64_t sum = 0;
  for (const Parameter& parameter : parameters) sum += divide_up(parameter.rows, gpus) * parameter.columns;
  return sum;
}

double sent(const Collective& collective) {
  const auto bytes = static_cast<double>(collective.bytes), others = static_cast<double>(collective.ranks - 1);
  const double share = others / static_cast<double>(collective.ranks);
  switch (collective.operation) {
    case Operation::all_reduce: return 2 * share * bytes;
    case Operation::reduce_scatter: return share * bytes;
    case Operation::all_gather: break;
  }
  return others * bytes;
}

std::vector<Collective> collectives(const Model& model, const Training& training) {
  std::vector<Collective> all;
  if (training.gpus == 1) return all;
  if (training.shares_sequences()) add_context(all, model, training);
  if (training.sharded()) {
    add_fsdp(all, model, training);
  } else {
    add_ddp(all, model, training);
  }
  return all;
}

Memory memory(const Model& model, const Training& training) {
  constexpr std::int64_t moments = 2, blocks = 2;  // one block computes, the parameters of the next arrive
  const std::vector<Parameter> all = all_parameters(model);
  const std::int64_t whole = count(all) * float_bytes;
  if (training.gpus == 1) return {whole, whole, moments * whole, 0};
  if (!training.sharded()) return {whole, whole, moments * whole, whole};
  const std::int64_t shard = shard_count(all, training.gpus) * float_bytes;
  const std::int64_t gathered = count(root_parameters(model)) + blocks * count(block_parameters(model));
  // Gradients that do not travel after each micro-batch add up where they are made, whole.
  return {shard, training.micro_batches > 1 ? whole : shard, moments * shard, gathered * training.item_bytes};
}

}  // namespace tfla::scale
