// The operators as XLA sees them: one FFI handler per operator, operation and platform. Nothing here but conversion;
// what is wrong with a call is found by tfla itself.
//
// Under vmap every tensor has further axes in front. Batch rows are independent, so they are merged into the batch;
// with cu_seqlens or slots, which belong to one call, the calls are made one after another (`separate` of the
// settings).
#include <xla/ffi/api/ffi.h>

#include <memory>
#include <new>
#include <optional>

#include "jax_delta.h"
#include "jax_mlstm.h"

namespace tfla::jax {
namespace {

namespace ffi = xla::ffi;

DType dtype_of(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::F32: return DType::float32;
    case ffi::DataType::F64: return DType::float64;
    case ffi::DataType::BF16: return DType::bfloat16;
    case ffi::DataType::F16: return DType::float16;
    case ffi::DataType::S32: return DType::int32;
    case ffi::DataType::S64: return DType::int64;
    default: break;
  }
  throw InvalidArgument("tfla: a tensor has a dtype other than float32, float64, bfloat16, float16, int32 and int64");
}

Array array_of(const ffi::AnyBuffer& buffer) {
  const ffi::AnyBuffer::Dimensions shape = buffer.dimensions();
  return {buffer.untyped_data(), dtype_of(buffer.element_type()), {shape.begin(), shape.size()}};
}

std::vector<Array> arrays_of(const ffi::RemainingArgs& buffers) {
  std::vector<Array> arrays;
  for (std::size_t index = 0; index < buffers.size(); ++index) {
    arrays.push_back(array_of(buffers.get<ffi::AnyBuffer>(index).value()));
  }
  return arrays;
}

std::vector<Array> arrays_of(const ffi::RemainingRets& buffers) {
  std::vector<Array> arrays;
  for (std::size_t index = 0; index < buffers.size(); ++index) {
    arrays.push_back(array_of(*buffers.get<ffi::AnyBuffer>(index).value()));
  }
  return arrays;
}

// Scratch memory. On a GPU it is XLA's own, which is free again for what comes later on the same stream. On the CPU XLA
// has none to give, and it comes from the heap.
class Scratch {
 public:
  explicit Scratch(ffi::ScratchAllocator* allocator) : allocator_(allocator) {}

  // For one call after another: what was taken before is given up.
  [[nodiscard]] std::span<std::byte> take(std::size_t bytes) {
    if (bytes > memory_.size()) memory_ = {allocate(bytes), bytes};
    return memory_.first(bytes);
  }

 private:
  struct Free {
    void operator()(std::byte* memory) const { ::operator delete[](memory, std::align_val_t{scratch_alignment}); }
  };

  [[nodiscard]] std::byte* allocate(std::size_t bytes) {
    if (allocator_ == nullptr) {
      heap_.reset(static_cast<std::byte*>(::operator new[](bytes, std::align_val_t{scratch_alignment})));
      return heap_.get();
    }
    // XLA aligns to 16 bytes at most; what is missing to 64 is asked for on top.
    std::size_t room = bytes + scratch_alignment;
    const std::optional<void*> memory = allocator_->Allocate(room);
    if (!memory) throw std::bad_alloc();
    void* aligned = *memory;
    return static_cast<std::byte*>(std::align(scratch_alignment, bytes, aligned, room));
  }

  ffi::ScratchAllocator* allocator_;
  std::unique_ptr<std::byte[], Free> heap_;
  std::span<std::byte> memory_;
};

// The plan, and no more of the memory for what is kept than it says. That memory was asked for while tracing, when
// neither the platform nor vmap was known: a CPU keeps nothing of it, a batch that vmap has made larger has some to
// spare, and where it does not suffice nothing is kept. Backward sees the same memory and decides alike.
template <class Operator, class Args>
auto plan_within_saved(Args& args, const Execution& execution) {
  const auto chosen = Operator::make_plan(args, execution);
  if constexpr (requires { args.saved; }) {
    if (chosen.saved_bytes > args.saved.size()) {
      args.options.keep = Keep::nothing;
      args.saved = {};
      return Operator::make_plan(args, execution);
    }
    args.saved = args.saved.first(chosen.saved_bytes);
  }
  return chosen;
}

template <class Operator, class Args>
void run(typename Operator::Call& call, std::span<const std::int64_t> outer, Args (*make)(typename Operator::Call&),
         ffi::ScratchAllocator* allocator, const Execution& execution) {
  std::int64_t count = 1;
  for (const std::int64_t extent : outer) count *= extent;
  const bool merged = !call.settings.separate();
  Scratch scratch(allocator);
  for (std::int64_t index = 0; index < (merged ? 1 : count); ++index) {
    const Arrays::Part part{.axes = outer.size(), .index = index, .count = count, .merged = merged};
    call.in.start(part);
    call.out.start(part);
    Args args = make(call);
    const auto chosen = plan_within_saved<Operator>(args, execution);
    Operator::run(args, chosen, scratch.take(chosen.scratch_bytes), execution.stream);
  }
}

template <class Operator>
ffi::Error handle(Operation operation, const Execution& execution, ffi::ScratchAllocator* allocator,
                  const ffi::RemainingArgs& args, const ffi::RemainingRets& results,
                  ffi::Span<const std::int64_t> flags, ffi::Span<const double> numbers) {
  try {
    constexpr std::size_t rank_of_q = 4;
    const typename Operator::Settings settings({flags.begin(), flags.size()}, {numbers.begin(), numbers.size()});
    const bool head_first = settings[Operator::head_first];
    std::vector<Array> in = arrays_of(args);
    const std::span<const std::int64_t> q = in.at(0).shape;
    const std::span<const std::int64_t> outer = q.first(q.size() < rank_of_q ? 0 : q.size() - rank_of_q);
    typename Operator::Call call{settings, Arrays(std::move(in), head_first), Arrays(arrays_of(results), head_first)};
    switch (operation) {
      case Operation::forward: run<Operator>(call, outer, Operator::forward_args, allocator, execution); break;
      case Operation::backward: run<Operator>(call, outer, Operator::backward_args, allocator, execution); break;
      case Operation::step: run<Operator>(call, outer, Operator::step_args, allocator, execution); break;
    }
    return ffi::Error::Success();
  } catch (const InvalidArgument& error) {
    return ffi::Error(ffi::ErrorCode::kInvalidArgument, error.what());
  } catch (const Unavailable& error) {
    return ffi::Error(ffi::ErrorCode::kUnimplemented, error.what());
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "tfla: there is not enough memory for scratch");
  } catch (const std::exception& error) {
    return ffi::Error(ffi::ErrorCode::kInternal, error.what());
  }
}

template <class Operator, Operation operation>
ffi::Error on_cpu(ffi::RemainingArgs args, ffi::RemainingRets results, ffi::Span<const std::int64_t> flags,
                  ffi::Span<const double> numbers) {
  return handle<Operator>(operation, {}, nullptr, args, results, flags, numbers);
}

template <class Operator, Operation operation>
ffi::Error on_cuda(void* stream, ffi::ScratchAllocator allocator, ffi::RemainingArgs args, ffi::RemainingRets results,
                   ffi::Span<const std::int64_t> flags, ffi::Span<const double> numbers) {
  return handle<Operator>(operation, {.device = Device::cuda, .stream = stream}, &allocator, args, results, flags,
                          numbers);
}

auto bind_cpu() {
  return ffi::Ffi::Bind()
      .RemainingArgs()
      .RemainingRets()
      .Attr<ffi::Span<const std::int64_t>>("flags")
      .Attr<ffi::Span<const double>>("numbers");
}

auto bind_cuda() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<void*>>()
      .Ctx<ffi::ScratchAllocator>()
      .RemainingArgs()
      .RemainingRets()
      .Attr<ffi::Span<const std::int64_t>>("flags")
      .Attr<ffi::Span<const double>>("numbers");
}

}  // namespace
}  // namespace tfla::jax

#define TFLA_HANDLERS(Operator, name, operation)                                                        \
  TFLA_EXPORT XLA_FFI_Error* tfla_jax_##name##_##operation##_cpu(XLA_FFI_CallFrame* frame) {            \
    using namespace tfla;                                                                               \
    static const auto handler = jax::bind_cpu().To(jax::on_cpu<jax::Operator, Operation::operation>);   \
    return handler->Call(frame);                                                                        \
  }                                                                                                     \
  TFLA_EXPORT XLA_FFI_Error* tfla_jax_##name##_##operation##_cuda(XLA_FFI_CallFrame* frame) {           \
    using namespace tfla;                                                                               \
    static const auto handler = jax::bind_cuda().To(jax::on_cuda<jax::Operator, Operation::operation>); \
    return handler->Call(frame);                                                                        \
  }
TFLA_HANDLERS(Mlstm, mlstm, forward)
TFLA_HANDLERS(Mlstm, mlstm, backward)
TFLA_HANDLERS(Mlstm, mlstm, step)
TFLA_HANDLERS(Delta, delta_rule, forward)
TFLA_HANDLERS(Delta, delta_rule, backward)
TFLA_HANDLERS(Delta, delta_rule, step)
#undef TFLA_HANDLERS
