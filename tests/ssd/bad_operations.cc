// Rows of bad arguments of one operation each.
#include <cstdint>

#include "tests/ssd/validation.h"

namespace tfla::test {

const std::vector<BadRow<SsdForward>>& ssd_forward_rows() {
  static const std::vector<BadRow<SsdForward>> rows{
      {"y not given", "y", [](SsdForward& a) { a.y = {}; }},
      {"y of another shape", "y", [](SsdForward& a) { a.y.shape[3] = 2; }},
      {"y of another dtype", "y", [](SsdForward& a) { a.y.dtype = DType::float16; }},
      {"null y", "y", [](SsdForward& a) { a.y.data = nullptr; }},
      {"misaligned y", "y", [](SsdForward& a) { misalign(a.y); }},
      {"y with a strided last axis", "y", [](SsdForward& a) { a.y.strides[3] = 2; }},
      {"y on x", "y.*x", [](SsdForward& a) { move_onto(a.y, a.x); }},
      {"y on dt", "y.*dt", [](SsdForward& a) { move_onto(a.y, a.dt); }},
      {"y on A", "y.*A", [](SsdForward& a) { move_onto(a.y, a.A); }},
      {"y on B", "y.*B", [](SsdForward& a) { move_onto(a.y, a.B); }},
      {"y on C", "y.*C", [](SsdForward& a) { move_onto(a.y, a.C); }},
      {"y on D", "y.*D", [](SsdForward& a) { move_onto(a.y, a.D); }},
      {"y on z", "y.*z", [](SsdForward& a) { move_onto(a.y, a.z); }},
      {"y on dt_bias", "y.*dt_bias", [](SsdForward& a) { move_onto(a.y, a.dt_bias); }},
      {"y on seq_idx", "y.*seq_idx", [](SsdForward& a) { move_onto(a.y, a.seq_idx); }},
      {"y on the initial state", "y.*initial_state", [](SsdForward& a) { move_onto(a.y, a.initial_state); }},
      {"y on the last state", "y.*last_state|last_state.*y", [](SsdForward& a) { move_onto(a.y, a.last_state); }},
      {"y on ungated", "y.*ungated|ungated.*y", [](SsdForward& a) { move_onto(a.y, a.ungated); }},
      {"tokens of y all in one place", "y", [](SsdForward& a) { a.y.strides[1] = 0; }},
      {"rows of y into one another", "y", [](SsdForward& a) { a.y.strides[2] = 2; }},
      {"ungated without z", "ungated is given without z", [](SsdForward& a) { a.z = {}; }},
      {"ungated of another shape", "ungated", [](SsdForward& a) { a.ungated.shape[1] = 5; }},
      {"ungated of another dtype", "ungated", [](SsdForward& a) { a.ungated.dtype = DType::float64; }},
      {"ungated on z", "ungated.*z", [](SsdForward& a) { move_onto(a.ungated, a.z); }},
      {"heads of ungated in one place", "ungated", [](SsdForward& a) { a.ungated.strides[2] = 0; }},
      {"last_state in float16", "last_state", [](SsdForward& a) { a.last_state.dtype = DType::float16; }},
      {"last_state of another shape", "last_state", [](SsdForward& a) { a.last_state.shape[1] = 1; }},
      {"null last_state", "last_state", [](SsdForward& a) { a.last_state.data = nullptr; }},
      {"misaligned last_state", "last_state", [](SsdForward& a) { misalign(a.last_state); }},
      {"rows of the last state in one place", "last_state", [](SsdForward& a) { a.last_state.strides[2] = 0; }},
      {"last state on B", "last_state.*B", [](SsdForward& a) { move_onto(a.last_state, a.B); }},
      {"last state across the initial state", "last_state.*initial_state",
       [](SsdForward& a) {
         move_onto(a.last_state, a.initial_state);
         misalign(a.last_state, 4);
       }},
      {"last state in place of the initial one, turned", "last_state.*initial_state", [](SsdForward& a) {
         move_onto(a.last_state, a.initial_state);
         a.last_state.strides[2] = 1;
         a.last_state.strides[3] = 3;
       }}};
  return rows;
}

const std::vector<BadRow<SsdBackward>>& ssd_backward_rows() {
  static const std::vector<BadRow<SsdBackward>> rows{
      {"dy not given", "dy", [](SsdBackward& a) { a.dy = {}; }},
      {"dy of another shape", "dy", [](SsdBackward& a) { a.dy.shape[1] = 7; }},
      {"dy of another dtype", "dy", [](SsdBackward& a) { a.dy.dtype = DType::float64; }},
      {"dy with a strided last axis", "dy", [](SsdBackward& a) { a.dy.strides[3] = 3; }},
      {"dx not given", "dx", [](SsdBackward& a) { a.dx = {}; }},
      {"ddt not given", "ddt", [](SsdBackward& a) { a.ddt = {}; }},
      {"dA not given", "dA", [](SsdBackward& a) { a.dA = {}; }},
      {"dB not given", "dB", [](SsdBackward& a) { a.dB = {}; }},
      {"dC not given", "dC", [](SsdBackward& a) { a.dC = {}; }},
      {"D without dD", "dD is missing and D is given", [](SsdBackward& a) { a.dD = {}; }},
      {"dD without D", "dD is given and D is missing", [](SsdBackward& a) { a.D = {}; }},
      {"z without dz", "dz is missing and z is given", [](SsdBackward& a) { a.dz = {}; }},
      {"dz without z", "dz is given and z is missing", [](SsdBackward& a) { a.z = {}; }},
      {"z without ungated", "ungated", [](SsdBackward& a) { a.ungated = {}; }},
      {"ungated without z", "ungated is given without z", [](SsdBackward& a) { a.z = a.dz = {}; }},
      {"ungated of another shape", "ungated", [](SsdBackward& a) { a.ungated.shape[3] = 2; }},
      {"ungated of another dtype", "ungated", [](SsdBackward& a) { a.ungated.dtype = DType::bfloat16; }},
      {"dt_bias without ddt_bias", "ddt_bias is missing and dt_bias is given", [](SsdBackward& a) { a.ddt_bias = {}; }},
      {"ddt_bias without dt_bias", "ddt_bias is given and dt_bias is missing", [](SsdBackward& a) { a.dt_bias = {}; }},
      {"dx of another shape", "dx", [](SsdBackward& a) { a.dx.shape[3] = 5; }},
      {"ddt of another shape", "ddt", [](SsdBackward& a) { a.ddt.shape[2] = 1; }},
      {"dA of another shape", "dA", [](SsdBackward& a) { a.dA.shape[0] = 1; }},
      {"dB of another shape", "dB", [](SsdBackward& a) { a.dB.shape[2] = 2; }},
      {"dC of another shape", "dC", [](SsdBackward& a) { a.dC.shape[3] = 3; }},
      {"dD of another shape", "dD", [](SsdBackward& a) { a.dD.shape[1] = 2; }},
      {"dD per head of a D per channel", "dD and D have different numbers of axes",
       [](SsdBackward& a) { a.dD = MutableTensorView(a.dD.data, a.dD.dtype, {2}); }},
      {"dD per channel of a D per head", "dD and D have different numbers of axes",
       [](SsdBackward& a) { a.D = TensorView(a.D.data, a.D.dtype, {2}); }},
      {"dz of another shape", "dz", [](SsdBackward& a) { a.dz.shape[2] = 1; }},
      {"ddt_bias of another rank", "ddt_bias",
       [](SsdBackward& a) {
         a.ddt_bias = MutableTensorView(a.ddt_bias.data, a.ddt_bias.dtype, {1, 2});
       }},
      {"dx of another dtype", "dx", [](SsdBackward& a) { a.dx.dtype = DType::bfloat16; }},
      {"dz of another dtype", "dz", [](SsdBackward& a) { a.dz.dtype = DType::float64; }},
      {"dB of another dtype", "dB", [](SsdBackward& a) { a.dB.dtype = DType::bfloat16; }},
      {"dC of another dtype", "dC", [](SsdBackward& a) { a.dC.dtype = DType::bfloat16; }},
      {"ddt of another dtype than dt", "ddt has.*dt", [](SsdBackward& a) { a.ddt.dtype = DType::float64; }},
      {"dA of another dtype than A", "dA has.*A", [](SsdBackward& a) { a.dA.dtype = DType::float64; }},
      {"dD of another dtype than D", "dD has.*D", [](SsdBackward& a) { a.dD.dtype = DType::bfloat16; }},
      {"ddt_bias of another dtype than dt_bias", "ddt_bias has.*dt_bias",
       [](SsdBackward& a) { a.ddt_bias.dtype = DType::float16; }},
      {"null dx", "dx", [](SsdBackward& a) { a.dx.data = nullptr; }},
      {"null dA", "dA", [](SsdBackward& a) { a.dA.data = nullptr; }},
      {"null dz", "dz", [](SsdBackward& a) { a.dz.data = nullptr; }},
      {"misaligned ddt", "ddt", [](SsdBackward& a) { misalign(a.ddt); }},
      {"misaligned ddt_bias", "ddt_bias", [](SsdBackward& a) { misalign(a.ddt_bias); }},
      {"misaligned dD", "dD", [](SsdBackward& a) { misalign(a.dD); }},
      {"dx on dz", "dx.*dz|dz.*dx", [](SsdBackward& a) { move_onto(a.dx, a.dz); }},
      {"dx on x", "dx.*x", [](SsdBackward& a) { move_onto(a.dx, a.x); }},
      {"dx on dy", "dx.*dy", [](SsdBackward& a) { move_onto(a.dx, a.dy); }},
      {"dz on ungated", "dz.*ungated", [](SsdBackward& a) { move_onto(a.dz, a.ungated); }},
      {"dB on dC", "dB.*dC|dC.*dB", [](SsdBackward& a) { move_onto(a.dB, a.dC); }},
      {"ddt on dA", "ddt.*dA|dA.*ddt", [](SsdBackward& a) { move_onto(a.ddt, a.dA); }},
      {"ddt on seq_idx", "ddt.*seq_idx", [](SsdBackward& a) { move_onto(a.ddt, a.seq_idx); }},
      {"dA on A", "dA.*A", [](SsdBackward& a) { move_onto(a.dA, a.A); }},
      {"dD on D", "dD.*D", [](SsdBackward& a) { move_onto(a.dD, a.D); }},
      {"ddt_bias on dx", "ddt_bias.*dx|dx.*ddt_bias", [](SsdBackward& a) { move_onto(a.ddt_bias, a.dx); }},
      {"heads of dx in one place", "dx", [](SsdBackward& a) { a.dx.strides[2] = 0; }},
      {"batches of ddt in one place", "ddt", [](SsdBackward& a) { a.ddt.strides[0] = 0; }},
      {"heads of dA in one place", "dA", [](SsdBackward& a) { a.dA.strides[0] = 0; }},
      {"channels of dD in one place", "dD", [](SsdBackward& a) { a.dD.strides[1] = 0; }},
      {"tokens of dz in one place", "dz", [](SsdBackward& a) { a.dz.strides[1] = 0; }},
      {"dlast_state of another shape", "dlast_state", [](SsdBackward& a) { a.dlast_state.shape[0] = 3; }},
      {"dlast_state of another dtype", "dlast_state", [](SsdBackward& a) { a.dlast_state.dtype = DType::float64; }},
      {"null dlast_state", "dlast_state", [](SsdBackward& a) { a.dlast_state.data = nullptr; }},
      {"dinitial_state of another shape", "dinitial_state", [](SsdBackward& a) { a.dinitial_state.shape[3] = 1; }},
      {"dinitial_state of another dtype", "dinitial_state",
       [](SsdBackward& a) { a.dinitial_state.dtype = DType::bfloat16; }},
      {"misaligned dinitial_state", "dinitial_state", [](SsdBackward& a) { misalign(a.dinitial_state); }},
      {"dinitial_state on dlast_state", "dinitial_state.*dlast_state",
       [](SsdBackward& a) { move_onto(a.dinitial_state, a.dlast_state); }},
      {"dinitial_state on initial_state", "dinitial_state.*initial_state",
       [](SsdBackward& a) { move_onto(a.dinitial_state, a.initial_state); }}};
  return rows;
}

namespace {

constexpr std::int64_t in_order[] = {0, 1, 2}, below[] = {0, -2}, beyond[] = {0, 2}, twice[] = {1, 1};
constexpr std::int32_t twice_narrow[] = {1, 1};
constexpr float not_integers[] = {0, 1};

auto slots(const void* data, DType dtype, std::int64_t count) {
  return [=](SsdStep& a) { a.slots = TensorView(data, dtype, {count}); };
}

}  // namespace

const std::vector<BadRow<SsdStep>>& ssd_step_rows() {
  static const std::vector<BadRow<SsdStep>> rows{
      {"y not given", "y", [](SsdStep& a) { a.y = {}; }},
      {"y of another shape", "y", [](SsdStep& a) { a.y.shape[2] = 1; }},
      {"y on z", "y.*z", [](SsdStep& a) { move_onto(a.y, a.z); }},
      {"y on the state", "y.*state|state.*y", [](SsdStep& a) { move_onto(a.y, a.state); }},
      {"state not given", "state", [](SsdStep& a) { a.state = {}; }},
      {"state of rank 3", "state", [](SsdStep& a) { a.state.rank = 3; }},
      {"state of another shape", "state", [](SsdStep& a) { a.state.shape[3] = 3; }},
      {"state with P and S exchanged", "state", [](SsdStep& a) { a.state = a.state.transposed(2, 3); }},
      {"state with other heads", "state", [](SsdStep& a) { a.state.shape[1] = 1; }},
      {"fewer states than rows", "state has 1 states", [](SsdStep& a) { a.state.shape[0] = 1; }},
      {"state in float64", "state", [](SsdStep& a) { a.state.dtype = DType::float64; }},
      {"state of integers", "state", [](SsdStep& a) { a.state.dtype = DType::int32; }},
      {"null state", "state", [](SsdStep& a) { a.state.data = nullptr; }},
      {"misaligned state", "state", [](SsdStep& a) { misalign(a.state); }},
      {"state with a strided last axis", "state", [](SsdStep& a) { a.state.strides[3] = 2; }},
      {"slots of the state in one place", "state", [](SsdStep& a) { a.state.strides[0] = 0; }},
      {"state on x", "state.*x", [](SsdStep& a) { move_onto(a.state, a.x); }},
      {"state on A", "state.*A", [](SsdStep& a) { move_onto(a.state, a.A); }},
      {"slot below -1", "slots\\[1\\] is -2", slots(below, DType::int64, 2)},
      {"slot beyond the pool", "slots\\[1\\] is 2", slots(beyond, DType::int64, 2)},
      {"one slot twice", "slots holds 1 twice", slots(twice, DType::int64, 2)},
      {"one int32 slot twice", "slots", slots(twice_narrow, DType::int32, 2)},
      {"slots of floats", "slots", slots(not_integers, DType::float32, 2)},
      {"too few slots", "slots", slots(in_order, DType::int64, 1)},
      {"null slots", "slots", slots(nullptr, DType::int64, 2)},
      {"slots on the state", "slots|state", [](SsdStep& a) {
         a.slots = {a.state.data, DType::int64, {2}};
       }}};
  return rows;
}

}  // namespace tfla::test
