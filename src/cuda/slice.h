// Parts of the heads that backward works through one after the other, so that chunks longer than the kernels' own ask
// for less scratch.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "tfla/tfla.h"

namespace tfla::cuda {

// Heads [first, first + count) of q and k, and those of v that go with them.
struct Slice {
  std::int64_t first, count, group;

  [[nodiscard]] Plan of(Plan plan) const {
    plan.shape.qk_heads = count;
    plan.shape.heads = count * group;
    return plan;
  }
  [[nodiscard]] MlstmBackward of(MlstmBackward args) const {
    for (TensorView* view : {&args.q, &args.k}) cut(*view, 2, 1);
    for (TensorView* view : {&args.v, &args.i, &args.f, &args.dh}) cut(*view, 2, group);
    for (MutableTensorView* view : {&args.dq, &args.dk}) cut(*view, 2, 1);
    for (MutableTensorView* view : {&args.dv, &args.di, &args.df}) cut(*view, 2, group);
    for (TensorView* view : {&args.initial_state.C, &args.initial_state.n, &args.initial_state.m, &args.dlast_state.C,
                             &args.dlast_state.n})
      cut(*view, 1, group);
    for (MutableTensorView* view : {&args.dinitial_state.C, &args.dinitial_state.n}) cut(*view, 1, group);
    return args;
  }

 private:
  template <class View>
  void cut(View& view, int dimension, std::int64_t heads) const {
    if (!view.given()) return;
    using Byte =
        std::conditional_t<std::is_const_v<std::remove_pointer_t<decltype(view.data)>>, const std::byte, std::byte>;
    view.data = static_cast<Byte*>(view.data) + first * heads * view.strides[dimension] * item_size(view.dtype);
    view.shape[dimension] = count * heads;
  }
};

template <class Work>
void each_slice(const Plan& plan, const Work& work) {
  const std::int64_t heads = plan.shape.qk_heads, most = (heads + plan.slices - 1) / plan.slices;
  for (std::int64_t first = 0; first < heads; first += most)
    work(Slice{first, std::min(most, heads - first), plan.shape.heads / heads});
}

}  // namespace tfla::cuda
