#include "tests/ssd/cases.h"

#include <algorithm>
#include <cstddef>
#include <string>

namespace tfla::test {
namespace {

using testkit::Layout;
using testkit::Numbers;

struct DTypes {
  DType dtype, dt, A, D;
};
constexpr DTypes dtypes[] = {{DType::float32, DType::float32, DType::float32, DType::float32},
                             {DType::float64, DType::float64, DType::float64, DType::float64},
                             {DType::bfloat16, DType::bfloat16, DType::float32, DType::float32},
                             {DType::float16, DType::float16, DType::float32, DType::float16},
                             {DType::bfloat16, DType::float32, DType::bfloat16, DType::bfloat16},
                             {DType::float16, DType::bfloat16, DType::float16, DType::float64},
                             {DType::float32, DType::bfloat16, DType::float64, DType::bfloat16},
                             {DType::float64, DType::float16, DType::bfloat16, DType::float32},
                             {DType::bfloat16, DType::float64, DType::float64, DType::float16}};

// whole: uneven sequences, one of them empty, one of one token. padded: the same with tokens behind the last, and
// boundaries that are a column of a table. single: one sequence with padding behind it.
enum class Packing : std::uint8_t { none, whole, padded, single };

struct Heads {
  std::int64_t batch, heads, groups;
  Packing packing;
};

struct Dims {
  std::int64_t P, S;
};

struct Factors {
  std::vector<std::int64_t> chunk_sizes, tokens;
  std::vector<Dims> dims;
  std::vector<Heads> heads;
};

const Factors& factors_of(SsdTable which) {
  static const Factors full{.chunk_sizes = {0, 16, 1, 64, 5, 1000},
                            .tokens = {65, 300, 1, 17, 2, 130},
                            .dims = {{64, 64}, {1, 7}, {64, 128}, {16, 1}, {33, 16}, {7, 33}, {128, 64}},
                            .heads = {{2, 2, 2, Packing::none},
                                      {1, 4, 2, Packing::none},
                                      {1, 4, 1, Packing::whole},
                                      {3, 2, 1, Packing::none},
                                      {1, 2, 2, Packing::padded},
                                      {1, 2, 1, Packing::single}}};
  static const Factors few{
      .chunk_sizes = {0, 16, 1, 5, 1000},
      .tokens = {65, 17, 1, 2, 40},
      .dims = {{16, 8}, {1, 3}, {5, 1}, {9, 24}},
      .heads = {
          {2, 2, 2, Packing::none}, {1, 4, 1, Packing::padded}, {1, 4, 2, Packing::whole}, {1, 2, 2, Packing::single}}};
  return which == SsdTable::full ? full : few;
}

std::vector<std::int64_t> boundaries(std::int64_t tokens, Packing packing) {
  const std::int64_t third = tokens / 3, end = packing == Packing::whole ? tokens : tokens - tokens / 5;
  if (packing == Packing::single) return {0, end};
  return {0, third, third, std::min(third + 1, end), end};
}

enum Factor : std::size_t {
  dtype,
  skip,
  z,
  bias,
  softplus,
  limits,
  numbers,
  chunk,
  tokens,
  dims,
  heads,
  layout,
  state,
  turned,
  grad,
  threads,
  factors
};

template <class Range>
auto pick(const Range& values, int index) {
  return *(std::begin(values) + index);
}

SsdCase make_case(const Factors& f, const Row& row) {
  const Heads h = pick(f.heads, row[heads]);
  const DTypes d = dtypes[row[dtype]];
  const Dims dim = pick(f.dims, row[dims]);
  SsdCase c;
  c.shape = {.batch = h.batch,
             .tokens = pick(f.tokens, row[tokens]),
             .qk_heads = h.groups,
             .heads = h.heads,
             .dqk = dim.S,
             .dhv = dim.P,
             .dtype = d.dtype,
             .gate_dtype = d.dt};
  c.A_dtype = d.A;
  c.D_dtype = d.D;
  c.skip = static_cast<Skip>(row[skip]);
  c.z = row[z] == 1;
  c.dt_bias = row[bias] == 1;
  c.seq_idx = static_cast<Numbers>(row[numbers]);
  if (h.packing != Packing::none) c.cu_seqlens = boundaries(c.shape.tokens, h.packing);
  if (h.packing == Packing::padded) c.index_stride = 3;
  c.options = {.dt_softplus = row[softplus] == 1, .chunk_size = pick(f.chunk_sizes, row[chunk])};
  if (row[limits] == 1) {  // dt lies below, between and above
    c.options.dt_min = 0.02;
    c.options.dt_max = 0.05;
  }
  c.layout = static_cast<Layout>(row[layout]);
  c.initial_state = row[state] == 1 || row[state] == 2;
  c.in_place = row[state] == 2;
  c.last_state = row[state] != 3;
  c.turned_states = row[turned] == 1;
  c.last_state_grad = row[grad] == 1;
  c.threads = row[threads] == 1 ? 3 : 1;
  return c;
}

}  // namespace

std::vector<int> ssd_levels(SsdTable which) {
  const Factors& f = factors_of(which);
  const auto size = [](const auto& x) { return static_cast<int>(std::size(x)); };
  std::vector<int> count(factors, 2);
  count[dtype] = size(dtypes);
  count[skip] = count[numbers] = count[layout] = 3;
  count[chunk] = size(f.chunk_sizes);
  count[tokens] = size(f.tokens);
  count[dims] = size(f.dims);
  count[heads] = size(f.heads);
  count[state] = 4;
  return count;
}

std::vector<Row> ssd_rows(SsdTable which) {
  return pairwise(ssd_levels(which), [](const Row&) { return true; });
}

std::vector<SsdCase> ssd_pairs(SsdTable which) {
  std::vector<SsdCase> all;
  for (const Row& row : ssd_rows(which)) all.push_back(make_case(factors_of(which), row));
  return all;
}

std::vector<SsdCase> ssd_regimes(std::int64_t tokens, std::int64_t dim, std::int64_t state_dim) {
  struct Variant {
    DTypes dtypes;
    bool softplus, bias, z;
    Numbers numbers;
    std::int64_t chunk_size;
  };
  constexpr Variant variants[] = {
      {dtypes[0], false, false, false, Numbers::none, 0},  {dtypes[0], true, true, true, Numbers::int32, 16},
      {dtypes[0], false, true, true, Numbers::none, 0},    {dtypes[1], false, false, false, Numbers::none, 0},
      {dtypes[1], true, false, false, Numbers::int64, 64}, {dtypes[2], true, true, true, Numbers::none, 0},
      {dtypes[3], false, false, true, Numbers::int64, 0}};
  std::vector<SsdCase> all;
  for (const SsdRegime regime : all_ssd_regimes) {
    for (const Variant& v : variants) {
      SsdCase c;
      c.regime = regime;
      c.shape = {.tokens = tokens,
                 .qk_heads = 1,
                 .heads = 2,
                 .dqk = state_dim,
                 .dhv = dim,
                 .dtype = v.dtypes.dtype,
                 .gate_dtype = v.dtypes.dt};
      c.A_dtype = v.dtypes.A;
      c.D_dtype = v.dtypes.D;
      c.skip = v.z ? Skip::per_head : Skip::none;
      c.z = v.z;
      c.dt_bias = v.bias;
      c.seq_idx = regime == SsdRegime::resets && v.numbers == Numbers::none ? Numbers::int32 : v.numbers;
      c.options = {.dt_softplus = v.softplus, .chunk_size = v.chunk_size};
      if (regime == SsdRegime::edges && !v.softplus) {
        c.options.dt_min = 0x1p-5;
        c.options.dt_max = 0x1p-4;
      }
      c.initial_state = c.last_state_grad = true;
      all.push_back(c);
    }
  }
  return all;
}

std::vector<SsdCase> ssd_long_cases() {
  std::vector<SsdCase> all;
  for (const SsdRegime regime : {SsdRegime::ordinary, SsdRegime::lasting, SsdRegime::kept, SsdRegime::still,
                                 SsdRegime::large, SsdRegime::brief}) {
    for (const DTypes& d : {dtypes[0], dtypes[1], dtypes[2]}) {
      SsdCase c;
      c.regime = regime;
      c.shape = {.tokens = 4096, .dqk = 12, .dhv = 9, .dtype = d.dtype, .gate_dtype = d.dt};
      c.A_dtype = d.A;
      c.D_dtype = d.D;
      c.dt_bias = regime == SsdRegime::ordinary;
      c.options.dt_softplus = regime == SsdRegime::ordinary;
      c.initial_state = c.last_state_grad = true;
      all.push_back(c);
    }
  }
  return all;
}

std::vector<SsdCase> ssd_hopper_cases() {
  struct Size {
    std::int64_t tokens, groups, heads, P, S;
  };
  struct End {
    Skip skip;
    bool z;
    Layout layout;
  };
  constexpr End ends[] = {{Skip::per_head, true, Layout::bthd},
                          {Skip::none, true, Layout::bhtd},
                          {Skip::per_channel, false, Layout::bhtd},
                          {Skip::per_channel, true, Layout::fused}};
  std::vector<SsdCase> all;
  const auto add = [&](DType dtype, bool packed, const Size& size, const End& end, bool states) {
    SsdCase c;
    c.shape = {.tokens = size.tokens,
               .qk_heads = size.groups,
               .heads = size.heads,
               .dqk = size.S,
               .dhv = size.P,
               .dtype = dtype,
               .gate_dtype = dtype};
    c.skip = end.skip;
    c.D_dtype = end.skip == Skip::per_head ? DType::float32 : dtype;
    c.z = end.z;
    c.layout = end.layout;
    c.hole = 8;
    if (packed) c.cu_seqlens = {3, size.tokens / 3, size.tokens / 3, size.tokens - 10};
    c.initial_state = c.last_state_grad = c.last_state = states;
    c.seq_idx = states ? Numbers::int32 : Numbers::none;
    c.options.dt_softplus = true;
    c.portable = false;
    all.push_back(c);
  };
  // Every tile; rings go round more than once. Rows of the fused layout lie on 16 bytes with eight heads.
  constexpr std::int64_t narrow[] = {64, 8, 40, 64}, wide[] = {128, 72, 200, 128};
  for (const DType dtype : {DType::bfloat16, DType::float16}) {
    for (const bool packed : {false, true}) {
      for (const std::int64_t S : {56, 128}) {
        for (const bool is_wide : {false, true}) {
          for (int turn = 0; turn < 4; ++turn) {
            const std::int64_t heads = ends[turn].layout == Layout::fused ? 8 : 2;
            add(dtype, packed, {330, 2, heads, is_wide ? wide[turn] : narrow[turn], S}, ends[turn], turn % 2 == 0);
          }
        }
      }
      // More tiles than multiprocessors; a sequence in segments.
      add(dtype, packed, {130, 10, 140, 64, 72}, ends[0], false);
      add(dtype, packed, {packed ? 1300 : 4096, 1, 2, 64, 128}, ends[0], true);
    }
  }
  return all;
}

std::vector<SsdCase> ssd_hopper_regimes() {
  std::vector<SsdCase> all;
  for (const std::int64_t P : {64, 128}) {
    for (SsdCase& c : ssd_regimes(300, P, 128)) {
      if (item_size(c.shape.dtype) != 2) continue;
      c.portable = false;
      all.push_back(c);
      if (!c.options.dt_softplus) continue;
      c.options.dt_softplus = c.dt_bias = false;  // time steps of exactly 0
      if (c.regime == SsdRegime::edges) {
        c.options.dt_min = 0x1p-5;
        c.options.dt_max = 0x1p-4;
      }
      all.push_back(c);
    }
  }
  return all;
}

std::string ssd_case_name(const ::testing::TestParamInfo<SsdCase>& info) {
  return std::to_string(info.index) + "_" + label(info.param);
}

}  // namespace tfla::test
