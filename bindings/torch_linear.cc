// Products of a few rows on the CPU, for decoders. They have no derivative.
#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <utility>

#include "tfla/tfla.h"
#include "torch_call.h"
#include "torch_tensor.h"

namespace {

using tfla::binding::Arguments;
using tfla::binding::give;
using tfla::binding::Owned;
using tfla::binding::Place;
using tfla::binding::run;
using tfla::binding::Views;

void linear(StableIValue* stack, std::uint64_t /*inputs*/, std::uint64_t /*outputs*/) {
  Arguments given(stack);
  const Owned x = given.tensor("x"), weight = given.tensor("weight");
  given.refuse_missing();
  const Place place(x, "x");
  const Views views(place, false);
  tfla::Linear args{.x = views.input("x", x), .weight = views.input("weight", weight), .added = {}, .y = {}};
  Owned y = place.empty(tfla::binding::TensorRef(x).dtype(), {args.x.shape[0], args.weight.shape[0]});
  args.y = views.output("y", y);
  run<tfla::Linear>(tfla::linear_plan(args, place.execution()), args, place, tfla::linear);
  give(stack, std::move(y));
}

// y += x W^T
void add_linear(StableIValue* stack, std::uint64_t /*inputs*/, std::uint64_t /*outputs*/) {
  Arguments given(stack);
  const Owned y = given.tensor("y"), x = given.tensor("x"), weight = given.tensor("weight");
  given.refuse_missing();
  const Place place(x, "x");
  const Views views(place, false);
  const tfla::Linear args{.x = views.input("x", x),
                          .weight = views.input("weight", weight),
                          .added = views.input("y", y),
                          .y = views.in_place("y", y)};
  run<tfla::Linear>(tfla::linear_plan(args, place.execution()), args, place, tfla::linear);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(tfla, library) {
  library.def("linear(Tensor x, Tensor weight) -> Tensor");
  library.def("add_linear(Tensor(a!) y, Tensor x, Tensor weight) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(tfla, CPU, library) {
  library.impl("linear", linear);
  library.impl("add_linear", add_linear);
}
