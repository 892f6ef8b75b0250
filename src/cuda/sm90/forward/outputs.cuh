// Stages `states` and `outputs` in one kernel on Hopper: H.
#pragma once

#include "cuda/arch/math.cuh"
#include "cuda/arch/stream.cuh"
#include "cuda/sm90/forward/shared.cuh"

namespace tfla::cuda::sm90::forward {

template <class T, int M, int N, bool Normalized, bool Keep, bool Packed, Time Direction, Half Dqk>
struct Outputs : Block<T, M, N, Normalized, Keep, Packed, Direction, Dqk> {
  using Base = Block<T, M, N, Normalized, Keep, Packed, Direction, Dqk>;
  using Base::across;
  using Base::at;
  using Base::beside;
  using Base::call;
  using Base::depth;
  using Base::each_block;
  using Base::factored;
  using Base::is_fresh;
  using Base::left_by_half;
  using Base::lifted;
  using Base::reverse;
  using Base::shape;
  using Base::skips_fresh;
  using Base::space;
  using Base::staged_barrier;
  using Base::warps_barrier;
  using typename Base::Item;
  using typename Base::KeySlots;
  using typename Base::Slots;
  using typename Base::Space;

  __device__ void make(int warpgroup) const {
    const Lane lane;
    if constexpr (Space::wide) {
      unsigned blocks = 0;
      each_block(warpgroup, [&](const Item& it, int block) {
        output_block(warpgroup, lane, Slots::after_steps(blocks), KeySlots::after_steps(Space::parts * blocks),
                     blocks & 1, is_fresh(it, block), it, block);
        ++blocks;
      });
    } else {
      Slots ring(warpgroup);
      KeySlots k(warpgroup * Space::parts);
      unsigned c_phase = 0;
      each_block(warpgroup, [&](const Item& it, int block) {
        const bool fresh = is_fresh(it, block);
        output_block(warpgroup, lane, ring, k, c_phase, fresh, it, block);
        ring.advance(Space::outputs);
        k.advance(Space::outputs * Space::parts);
        c_phase ^= skips_fresh && fresh ? 0 : 1;
      });
    }
  }

 private:
  // Where registers are short, worked out where it is asked for.
  __device__ __forceinline__ static Lane again(const Lane& lane) { return Space::wide ? Lane::again() : lane; }

  __device__ __forceinline__ void output_block(int warpgroup, const Lane& lane, const Slots& ring, const KeySlots& k,
                                               unsigned c_phase, bool fresh, const Item& it, int block) const {
    constexpr int parts = Space::parts;
    const unsigned q_tile = at(Space::q, ring.slot, Space::q_bytes);
    const unsigned gates = at(Space::gates, ring.slot, Space::gate_bytes);
    float s[32], o[N / 2];

#pragma unroll
    for (int p = 0; p < parts; ++p) {
      const KeySlots part = k.after(p);
      arch::wait(at(Space::q_full, ring.slot * parts + p), ring.phase);
      arch::wait(at(Space::k_full, part.slot), part.phase);
    }
    const std::uint64_t q_rows = arch::tile_descriptor(q_tile);
    arch::products_begin();
#pragma unroll
    for (int p = 0; p < parts; ++p) {
      const std::uint64_t k_rows = arch::tile_descriptor(at(Space::k, k.after(p).slot, Space::part_bytes));
#pragma unroll
      for (int d = 0; d < 4 * Space::part_panels; ++d) {
        constexpr int panel_step = panel_bytes / 16, depth_step = 32 / 16;
        const int offset = d / 4 * panel_step + d % 4 * depth_step;
        arch::multiply<T, depth, depth>(s, q_rows + p * (Space::part_bytes / 16) + offset, k_rows + offset, p + d > 0);
      }
    }
    arch::products_commit();

    // O = Q C, and q.n, with it or ahead: under way while P is made of the scores. Wide: while these are gated, too.
    // Factored: O = P V + Q C, in this order, so that only the second product waits for the state.
    constexpr bool n_product = Normalized && Space::n_rows && !beside;
    float qn[2] = {0, 0}, qn_columns[4];
    const auto multiply_state = [&] {
      arch::wait(at(Space::c_full, warpgroup), c_phase);
      constexpr int panel_step = panel_bytes / 16, depth_step = 32 / 16, state_step = 16 * (beside ? 16 : 128) / 16;
      const std::uint64_t state = beside ? arch::groups_descriptor(at(Space::state), Space::group_bytes)
                                         : arch::tile_descriptor(at(Space::state), M * panel_bytes);
      arch::products_begin();
      if constexpr (n_product) {
        const std::uint64_t n = arch::tile_descriptor(at(Space::n, warpgroup, Space::n_bytes));
#pragma unroll
        for (int d = 0; d < 4 * M; ++d)
          arch::multiply<T, depth, depth>(qn_columns, q_rows + d / 4 * panel_step + d % 4 * depth_step,
                                          n + d / 4 * (1024 / 16) + d % 4 * depth_step, d > 0);
        arch::products_commit();
      }
#pragma unroll
      for (int d = 0; d < 4 * M; ++d) {
        const std::uint64_t q = q_rows + d / 4 * panel_step + d % 4 * depth_step;
        if constexpr (beside)
          arch::multiply<T, depth, across>(o, qn_columns, q, state + d * state_step, factored || d > 0);
        else
          arch::multiply<T, depth, across>(o, q, state + d * state_step, factored || d > 0);
      }
      arch::products_commit();
    };
    if constexpr (Space::wide) multiply_state();

    arch::wait(at(Space::v_full, ring.slot), ring.phase);
    float2 u[2];
    const auto read_u = [&] {
#pragma unroll
      for (int h = 0; h < 2; ++h) u[h] = arch::read_float2(gates + Space::u + 8 * (lane.row + 8 * h));
    };
    float decay = 0, weights[16];
    if constexpr (factored) {
      decay = arch::read_float(gates + Space::decay);
      read_weights(weights, decay, gates, lane);
    } else {
      read_u();
    }
    arch::products_wait<!Space::wide ? 0 : n_product ? 2 : 1>();
    arch::pin(s);
#pragma unroll
    for (int p = 0; p < parts; ++p)
      if (arch::arrives(again(lane).lane == 0)) arch::arrive(at(Space::k_empty, k.after(p).slot));
    float sums[2] = {0, 0};
    float first_qn[2] = {0, 0};  // of the first half of dqk
    if constexpr (Dqk == Half::last && Normalized) {
#pragma unroll
      for (int h = 0; h < 2; ++h)
        first_qn[h] = arch::read_once(left_by_half(it, block) + Base::o_floats + again(lane).row + 8 * h);
    }
    if constexpr (!factored) gate_scores(s, u, gates, lane, sums);

    RowTerms rows;
    const auto multiply_values = [&](bool add) {
      constexpr int token_step = 16 * 128 / 16;
      const std::uint64_t values = arch::tile_descriptor(at(Space::v, ring.slot, Space::v_bytes), panel_bytes);
      arch::products_begin();
#pragma unroll
      for (int t = 0; t < 4; ++t) arch::multiply<T, across>(o, rows.high[t], values + t * token_step, add || t > 0);
#pragma unroll
      for (int t = 0; t < split_steps; ++t) arch::multiply<T, across>(o, rows.low[t], values + t * token_step, true);
      arch::products_commit();
    };
    const auto finish_values = [&] {
      if constexpr (beside) set_factors(rows, sums, qn, first_qn, gates, lane, ring.slot);
      if constexpr (lifted) {
        rows.factor[0] *= inverse_power(rows.lift[0]);
        rows.factor[1] *= inverse_power(rows.lift[1]);
      }
      Left left;
      if constexpr (Dqk == Half::last) read_left(left, it, block, 0);
      arch::products_wait<0>();
      arch::pin(o);
      if constexpr (Dqk == Half::last) {
#pragma unroll
        for (int part = 0; part < left_parts; ++part) {
          if (part > 0) read_left(left, it, block, part);
          add_left(o, left, rows.factor, part);
        }
      }
    };
    if constexpr (factored) {
      static_assert(skips_fresh, "nothing is handed over for a fresh block");
      read_rows(rows.unit, gates + Space::qbar, lane);
      if (are_in_range(warpgroup, decay, rows.unit, weights)) {
        weigh_scores(s, weights, lane, sums);
      } else {
        read_u();
        gate_scores(s, u, gates, lane, sums);
        set_units(rows.unit, s, sums, fresh);
        if (!fresh) scale_queries(warpgroup, q_tile, gates, lane);
      }
      round_scores(rows, s);
      multiply_values(false);
      arch::products_wait<0>();
      arch::pin(o);
      if (!fresh) {
        if constexpr (beside) {
#pragma unroll
          for (float& x : qn_columns) x = 0;
          arch::pin(qn_columns);
        }
        multiply_state();
        arch::products_wait<0>();
        arch::pin(o);
        if constexpr (beside) {
          arch::pin(qn_columns);
          add_terms(qn, qn_columns);
        }
        if (arch::arrives(lane.lane == 0)) arch::arrive(at(Space::c_empty));
      }
      set_factors(rows, sums, qn, first_qn, gates, lane, ring.slot);
    } else if (!Space::wide && fresh) {
      make_rows<true>(warpgroup, rows, s, sums, qn, first_qn, gates, again(lane), ring.slot);
      if constexpr (!skips_fresh) {
        arch::wait(at(Space::c_full, warpgroup), c_phase);
        if (arch::arrives(lane.lane == 0)) arch::arrive(at(Space::c_empty));
      }
      multiply_values(false);
      finish_values();
    } else {
      if constexpr (!Space::wide) multiply_state();
      if constexpr (n_product) {
        arch::products_wait<1>();
        arch::pin(qn_columns);
        add_terms(qn, qn_columns);
      } else if constexpr (Normalized && !beside) {
        dots_with_n(q_tile, at(Space::n, warpgroup, Space::n_bytes), lane, qn);
      }
      make_rows<false>(warpgroup, rows, s, sums, qn, first_qn, gates, again(lane), ring.slot);
      arch::products_wait<0>();
      arch::pin(o);
      if constexpr (beside) {
        arch::pin(qn_columns);
        add_terms(qn, qn_columns);
      }
      if ((Normalized && !n_product && !beside) || lifted) __syncwarp();  // all lanes have read n, and the lifts
      if (arch::arrives(again(lane).lane == 0)) arch::arrive(at(Space::c_empty));
#pragma unroll
      for (int p = 1; p < parts; ++p)
        if (arch::arrives(again(lane).lane == 0)) arch::arrive(at(Space::q_empty, ring.slot * parts + p));
#pragma unroll
      for (int e = 0; e < N / 2; ++e) o[e] *= rows.weight[e / 2 % 2];
      arch::pin(o);
      multiply_values(true);
      finish_values();
    }
    __syncwarp();  // all lanes have read the gates
    if (arch::arrives(again(lane).lane == 0)) arch::arrive(at(Space::v_empty, ring.slot));

    if constexpr (Dqk == Half::first) {
      leave(o, rows, it, block);
      return arch::named_arrive(staged_barrier(ring.slot), warpgroup_threads + 32);  // it has read Q
    }
    arch::named_wait(warps_barrier(warpgroup), warpgroup_threads);  // nobody reads Q any more
    const unsigned row = q_tile + again(lane).tile_row();
#pragma unroll
    for (int n = 0; n < N / 16; ++n) {
      const float* x = o + 8 * n;
      const auto pack = [&](int e) {
        const float by = rows.factor[e / 2 % 2];
        return arch::pack(late_factors ? float2{x[e] * by, x[e + 1] * by} : float2{x[e], x[e + 1]}, T{});
      };
      arch::store_tiles((row + n / 4 * panel_bytes) ^ (n % 4 * 32), pack(0), pack(2), pack(4), pack(6));
    }
    arch::writes_before_copies();
    arch::named_arrive(staged_barrier(ring.slot), warpgroup_threads + 32);
  }

  // P, rounded, and what rows are multiplied by: scale / den, in the part of the state times qbar. Where q.n comes with
  // Q C, both parts are multiplied by scale / den in the end. So they are in float16, where P is brought near the upper
  // end: both parts have the lift of the row till then.
  static constexpr bool late_factors = lifted || beside || factored;
  // Steps of 16 keys whose P goes in as two terms: all of them where both halves of dqk round theirs.
  static constexpr int split_steps = lifted || reverse ? 0 : Dqk == Half::both ? 1 : 4;
  struct RowTerms {
    float factor[2], weight[2], n_weight[2], unit[2], lift[2], qn[2];
    uint32_t high[4][4], low[split_steps > 0 ? split_steps : 1][4];
  };
  template <bool Fresh>
  __device__ __forceinline__ void make_rows(int warpgroup, RowTerms& rows, const float (&s)[32], const float (&sums)[2],
                                            const float (&qn)[2], const float (&first_qn)[2], unsigned gates,
                                            const Lane& here, int slot) const {
    float2 lowers{1, 1};  // of Q C and q.n (float16)
    if constexpr (lifted) {
      if (!Fresh) lowers = arch::read_float2(at(Space::lifts, warpgroup));
      lifts_of_rows(s, rows.lift);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float qbar = Fresh ? 0.0F : arch::read_float(gates + Space::qbar + 4 * (here.row + 8 * h));
      rows.weight[h] = lifted ? qbar * lowers.x * rows.lift[h] : qbar;
      rows.n_weight[h] = qbar * lowers.y;
    }
    if constexpr (!beside) set_factors(rows, sums, qn, first_qn, gates, here, slot);
    if constexpr (!late_factors) {
      rows.weight[0] *= rows.factor[0];
      rows.weight[1] *= rows.factor[1];
    }
    round_scores(rows, s);
  }
  __device__ __forceinline__ static void round_scores(RowTerms& rows, const float (&s)[32]) {
#pragma unroll
    for (int e = 0; e < 32; e += 2) {
      const float by = lifted ? rows.lift[e / 2 % 2] : late_factors ? 1.0F : rows.factor[e / 2 % 2];
      const float2 value{s[e] * by, s[e + 1] * by};
      if (e / 8 < split_steps)
        rows.high[e / 8][e / 2 % 4] = split<T>(value, rows.low[e / 8][e / 2 % 4]);
      else
        rows.high[e / 8][e / 2 % 4] = arch::pack(value, T{});
    }
  }

  // sums, qn: this thread's parts of those of its rows.
  __device__ __forceinline__ void set_factors(RowTerms& rows, const float (&sums)[2], const float (&qn)[2],
                                              const float (&first_qn)[2], unsigned gates, const Lane& here,
                                              int slot) const {
    const float scale = Base::lean ? shape.scale : static_cast<float>(call.rules.scale);
    const float eps = Base::lean ? shape.eps : static_cast<float>(call.rules.eps);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // In reverse time it is in the gates, and the last half of dqk has it for both.
      rows.factor[h] = reverse || Dqk == Half::first ? 1.0F : factored ? scale * rows.unit[h] : scale;
      const auto own = [&] {
        if constexpr (factored) return rows.unit[h] * over_row(sums[h] + qn[h]);
        return over_row(sums[h] + rows.n_weight[h] * qn[h]);
      };
      if constexpr (Normalized && Dqk == Half::first) {
        rows.qn[h] = own();
      } else if constexpr (Normalized) {
        const float least = arch::read_float(gates + Space::floor + 4 * (here.row + 8 * h));
        const float sum = scale * (Dqk == Half::last ? own() + first_qn[h] : own()), size = fabsf(sum);
        const float inverse = __fdividef(1, fmaxf(size, least) + eps);
        rows.factor[h] *= inverse;
        if ((Space::wide || call.gates.inverse != nullptr) && here.pair == 0) {  // wide: no register for the question
          const unsigned row = at(Space::rows, slot, Space::row_bytes) + 4 * (here.row + 8 * h);
          arch::write_float(row + Space::inverse, inverse);
          arch::write_float(row + Space::slope, size > least ? copysignf(inverse, -sum) : 0.0F);
        }
      }
    }
  }

  // O of the first half of dqk, of this thread, on its way through global memory: in parts, so that the registers of
  // one are enough.
  static constexpr int left_parts = 2, left_fours = N / 8 / left_parts;
  using Left = float4[left_fours];
  __device__ __forceinline__ float4* left_of_thread(const Item& it, int block) const {
    return reinterpret_cast<float4*>(left_by_half(it, block)) + threadIdx.x % warpgroup_threads;
  }
  __device__ __forceinline__ void leave(const float (&o)[N / 2], const RowTerms& rows, const Item& it,
                                        int block) const {
    float4* to = left_of_thread(it, block);
#pragma unroll
    for (int x = 0; x < N / 8; ++x)
      arch::write_once(to + x * warpgroup_threads, {o[4 * x], o[4 * x + 1], o[4 * x + 2], o[4 * x + 3]});
    if (!Normalized) return;
    const Lane here = Lane::again();
    if (here.pair != 0) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) left_by_half(it, block)[Base::o_floats + here.row + 8 * h] = rows.qn[h];
  }
  __device__ __forceinline__ void read_left(Left& left, const Item& it, int block, int part) const {
    const float4* from = left_of_thread(it, block) + part * (left_fours * warpgroup_threads);
#pragma unroll
    for (int x = 0; x < left_fours; ++x) left[x] = arch::read_once(from + x * warpgroup_threads);
  }
  __device__ __forceinline__ void add_left(float (&o)[N / 2], const Left& left, const float (&factor)[2],
                                           int part) const {
#pragma unroll
    for (int x = 0; x < left_fours; ++x) {
      float* to = o + 4 * (part * left_fours + x);
      to[0] += factor[0] * left[x].x;
      to[1] += factor[0] * left[x].y;
      to[2] += factor[1] * left[x].z;
      to[3] += factor[1] * left[x].w;
    }
  }

  // q.n of this thread's rows, in parts that add up over the row: the other lanes have the third term, and zeros.
  __device__ __forceinline__ static void add_terms(float (&qn)[2], const float (&columns)[4]) {
    qn[0] = columns[0] + columns[1];
    qn[1] = columns[2] + columns[3];
  }

  // Over the keys of a row, which four lanes have.
  __device__ __forceinline__ void lifts_of_rows(const float (&s)[32], float (&lift)[2]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float largest = 0;
#pragma unroll
      for (int e = 0; e < 32; e += 4) largest = fmaxf(largest, fmaxf(fabsf(s[e + 2 * h]), fabsf(s[e + 2 * h + 1])));
      largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFU, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFU, largest, 2));
      lift[h] = scale16_to(largest, top_of_scores, -60, 40);
    }
  }

  // S becomes P before the denominator; sums of its rows too. 16-key parts right of a warp's rows are masked whole; in
  // reverse time, where rows are keys and columns queries, those left of them.
  __device__ __forceinline__ void gate_scores(float (&s)[32], const float2 (&u)[2], unsigned gates, const Lane& lane,
                                              float (&sums)[2]) const {
    each_part(s, lane, [&](int n, bool masked) {
      const float4 c = arch::read_float4(gates + Space::c + 8 * (8 * n + lane.pair));
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int h = e / 2;
        const float exponent = (u[h].x + (e % 2 ? c.z : c.x)) + (u[h].y + (e % 2 ? c.w : c.y));
        s[4 * n + e] *= arch::exp2(exponent);
        finish_score(s[4 * n + e], n, e, masked, lane, sums);
      }
    });
  }
  __device__ __forceinline__ void finish_score(float& score, int n, int e, bool masked, const Lane& lane,
                                               float (&sums)[2]) const {
    const int row = lane.row % 16 + e / 2 * 8, column = 8 * (n % 2) + lane.pair + e % 2;
    if (masked && (reverse ? column < row : column > row)) score = 0;
    if (Normalized) sums[e / 2] += score;
  }
  // visit(n, masked): eight keys.
  template <class Visit>
  __device__ __forceinline__ void each_part(float (&s)[32], const Lane& lane, const Visit& visit) const {
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      if (reverse ? part > lane.warp : part < lane.warp) {
        visit(2 * part, false);
        visit(2 * part + 1, false);
      } else if (part == lane.warp) {
        visit(2 * part, true);
        visit(2 * part + 1, true);
      } else {
#pragma unroll
        for (int e = 8 * part; e < 8 * part + 8; ++e) s[e] = 0;
      }
    }
  }

  // Factored (see Base): O of a row is in units of qbar, so that Q C goes in as it is and P is divided by qbar. That is
  // abar / decay, a number per key, unless the block forgets so much that it might leave the range of float32, or abar
  // be lost below it.
  static constexpr float least_unit = 0x1p-32F, most_unit = 0x1p32F;
  __device__ __forceinline__ static bool is_unit(float x) { return x >= least_unit && x <= most_unit; }
  // Gates are at most one, so qbar falls, to decay in the end; only those given as logarithms may be larger.
  __device__ __forceinline__ bool are_in_range(int warpgroup, float decay, const float (&qbar)[2],
                                               const float (&weights)[16]) const {
    if (!call.rules.may_exceed_one) return decay >= least_unit;
    bool all = is_unit(decay) && is_unit(qbar[0]) && is_unit(qbar[1]);
#pragma unroll
    for (const float weight : weights) all = all && weight <= 0x1p64F;
    return arch::named_all(warps_barrier(warpgroup), warpgroup_threads, all);
  }
  __device__ __forceinline__ void read_weights(float (&weights)[16], float decay, unsigned gates,
                                               const Lane& lane) const {
    const float inverse = __frcp_rn(decay);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float2 abar = arch::read_float2(gates + Space::abar + 4 * (8 * n + lane.pair));
      weights[2 * n] = abar.x * inverse;
      weights[2 * n + 1] = abar.y * inverse;
    }
  }
  __device__ __forceinline__ static void read_rows(float (&rows)[2], unsigned vector, const Lane& lane) {
#pragma unroll
    for (int h = 0; h < 2; ++h) rows[h] = arch::read_float(vector + 4 * (lane.row + 8 * h));
  }
  __device__ __forceinline__ void weigh_scores(float (&s)[32], const float (&weights)[16], const Lane& lane,
                                               float (&sums)[2]) const {
    each_part(s, lane, [&](int n, bool masked) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        s[4 * n + e] *= weights[2 * n + e % 2];
        finish_score(s[4 * n + e], n, e, masked, lane, sums);
      }
    });
  }
  // Where it does, P as it is gated is divided by qbar, or by the unit next to it; rows of Q are multiplied by what
  // qbar is of that. Where it is less, nothing but their part of the state, which is next to nothing, has this
  // rounding.
  __device__ __forceinline__ static float unit_of(float qbar) { return fminf(fmaxf(qbar, least_unit), most_unit); }
  __device__ __forceinline__ void set_units(float (&units)[2], float (&s)[32], float (&sums)[2], bool fresh) const {
    float inverse[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      units[h] = fresh ? 1.0F : unit_of(units[h]);
      inverse[h] = __frcp_rn(units[h]);
      sums[h] *= inverse[h];
    }
#pragma unroll
    for (int e = 0; e < 32; ++e) s[e] *= inverse[e / 2 % 2];
  }
  __device__ __forceinline__ void scale_queries(int warpgroup, unsigned q_tile, unsigned gates,
                                                const Lane& lane) const {
#pragma unroll 1
    for (int x = 0; x < 16 * M; ++x) {  // each warp its own rows, 64 columns at a time
      const int row = 16 * lane.warp + x % 16;
      const float qbar = arch::read_float(gates + Space::qbar + 4 * row), by = qbar / unit_of(qbar);
      if (by == 1) continue;
      const unsigned pair = q_tile + x / 16 * panel_bytes + row * 128 + 4 * lane.lane;
      const float2 q = arch::unpack(__float_as_uint(arch::read_float(pair)), T{});
      arch::write_float(pair, __uint_as_float(arch::pack(float2{q.x * by, q.y * by}, T{})));
    }
    arch::writes_before_copies();
    arch::named_wait(warps_barrier(warpgroup), warpgroup_threads);
  }

  // q.n of this thread's rows, in parts that add up over the row. n has all its digits: it goes in as the sum of three
  // 16-bit numbers, in three columns of a product with eight.
  __device__ __forceinline__ void dots_with_n(unsigned q_tile, unsigned n, const Lane& lane, float (&sums)[2]) const {
    float product[4] = {0, 0, 0, 0};
    const int part = lane.lane / 4;
    const unsigned from = n + min(part, 2) * Space::n_part + lane.pair * 4;
#pragma unroll
    for (int d = 0; d < 4 * M; ++d) {
      uint32_t tiles[4];
      arch::load_tiles(tiles, (q_tile + d / 4 * panel_bytes + lane.tile_row()) ^ (d % 4 * 32));
      uint2 column = arch::read_words(from + 32 * d);
      if (part > 2) column = {0, 0};
      arch::multiply_add(product, tiles, column.x, column.y, T{});
    }
    sums[0] = product[0] + product[1];
    sums[1] = product[2] + product[3];
  }
};

}  // namespace tfla::cuda::sm90::forward
