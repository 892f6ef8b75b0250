// An mLSTM through the C API of tfla, held against the recurrence written out in plain C; then decoding token by token.
//
//   cc -std=c11 c_api.c $(pkg-config --cflags --libs tfla) -lm -o c_api
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <tfla/tfla_c.h>

enum { batch = 2, tokens = 50, heads = 3, dqk = 8, dhv = 16 };
enum {
  qk_count = batch * tokens * heads * dqk,
  hv_count = batch * tokens * heads * dhv,
  gate_count = batch * tokens * heads
};
enum { state_count = batch * heads * dqk * dhv };

static const double eps = 1e-6;
static const double allowed = 1e-5;  // of numbers around 1, in float32 over 50 tokens

static float q[qk_count], k[qk_count], v[hv_count], i[gate_count], f[gate_count], h[hv_count];
static float C[state_count], n[batch * heads * dqk], m[batch * heads];

// Numbers in [-1, 1) that are the same everywhere.
static void fill(float* values, size_t count, uint32_t seed) {
  for (size_t at = 0; at < count; ++at) {
    seed = seed * 1664525u + 1013904223u;
    values[at] = (float)(seed >> 8) / (float)(1 << 23) - 1.0f;
  }
}

// One token of one head in float64. The state is kept as C exp(m): C and n are divided by exp(m).
static void recurrence(double* C_, double* n_, double* m_, size_t token, double* out) {
  const float *q_ = q + token * dqk, *k_ = k + token * dqk, *v_ = v + token * dhv;
  const double log_f = -log1p(exp(-(double)f[token])), m_new = fmax(log_f + *m_, i[token]);
  const double decay = exp(log_f + *m_ - m_new), input = exp(i[token] - m_new), scale = 1 / sqrt(dqk);
  double dot = 0;
  for (int row = 0; row < dqk; ++row) {
    n_[row] = decay * n_[row] + input * k_[row];
    dot += scale * q_[row] * n_[row];
    for (int column = 0; column < dhv; ++column) {
      C_[row * dhv + column] = decay * C_[row * dhv + column] + input * k_[row] * v_[column];
    }
  }
  *m_ = m_new;
  for (int column = 0; column < dhv; ++column) {
    double sum = 0;
    for (int row = 0; row < dqk; ++row) sum += scale * q_[row] * C_[row * dhv + column];
    out[column] = sum / (fmax(fabs(dot), exp(-m_new)) + eps);
  }
}

// The largest difference of h from the recurrence.
static double worst_difference(void) {
  double worst = 0;
  for (size_t sequence = 0; sequence < batch; ++sequence) {
    for (size_t head = 0; head < heads; ++head) {
      double C_[dqk * dhv] = {0}, n_[dqk] = {0}, m_ = 0, expected[dhv];
      for (size_t t = 0; t < tokens; ++t) {
        const size_t token = (sequence * tokens + t) * heads + head;
        recurrence(C_, n_, &m_, token, expected);
        for (size_t column = 0; column < dhv; ++column) {
          const double difference = fabs(h[token * dhv + column] - expected[column]);
          if (!(difference <= worst)) worst = difference;  // and if it is no number
        }
      }
    }
  }
  return worst;
}

static void require(tfla_status status) {
  if (status == TFLA_OK) return;
  fprintf(stderr, "%s\n", tfla_last_error());
  exit(1);
}

// All tokens at once.
static tfla_mlstm_forward_args forward_args(void) {
  const int64_t qk[] = {batch, tokens, heads, dqk}, hv[] = {batch, tokens, heads, dhv};
  tfla_mlstm_forward_args args = {
      .struct_size = sizeof args,
      .q = tfla_dense(q, TFLA_FLOAT32, 4, qk),
      .k = tfla_dense(k, TFLA_FLOAT32, 4, qk),
      .v = tfla_dense(v, TFLA_FLOAT32, 4, hv),
      .i = tfla_dense(i, TFLA_FLOAT32, 3, hv),
      .f = tfla_dense(f, TFLA_FLOAT32, 3, hv),
      .h = tfla_dense(h, TFLA_FLOAT32, 4, hv),
  };
  return args;
}

// The token t of a tensor with all tokens.
static tfla_tensor token_of(tfla_tensor tensor, int64_t t) {
  tensor.data = (float*)tensor.data + t * tensor.strides[1];
  tensor.shape[1] = 1;
  return tensor;
}

// Token by token, as a model decodes.
static void decode(const tfla_mlstm_forward_args* all) {
  const int64_t shape[] = {batch, heads, dqk, dhv};
  const tfla_mlstm_state state = {tfla_dense(C, TFLA_FLOAT32, 4, shape), tfla_dense(n, TFLA_FLOAT32, 3, shape),
                                  tfla_dense(m, TFLA_FLOAT32, 2, shape)};
  for (int64_t t = 0; t < tokens; ++t) {
    const tfla_mlstm_step_args args = {
        .struct_size = sizeof args,
        .q = token_of(all->q, t),
        .k = token_of(all->k, t),
        .v = token_of(all->v, t),
        .i = token_of(all->i, t),
        .f = token_of(all->f, t),
        .h = token_of(all->h, t),
        .state = state,
    };
    require(tfla_mlstm_step(&args, NULL));
  }
}

// With scratch of our own, as a program that may not allocate would.
static void planned(const tfla_mlstm_forward_args* args) {
  tfla_plan* plan = NULL;
  require(tfla_plan_forward(args, NULL, &plan));
  const size_t bytes = (tfla_plan_scratch_bytes(plan) + 63) / 64 * 64;
  void* scratch = aligned_alloc(64, bytes > 0 ? bytes : 64);
  if (scratch == NULL) exit(1);
  require(tfla_run_forward(args, plan, scratch, bytes, NULL));
  printf("a forward pass needs %zu bytes of scratch\n", tfla_plan_scratch_bytes(plan));
  free(scratch);
  tfla_plan_free(plan);
}

int main(void) {
  fill(q, qk_count, 1);
  fill(k, qk_count, 2);
  fill(v, hv_count, 3);
  fill(i, gate_count, 4);
  fill(f, gate_count, 5);
  tfla_mlstm_forward_args args = forward_args();

  printf("tfla %s\n", tfla_version());
  require(tfla_mlstm_forward(&args, NULL));
  const double at_once = worst_difference();
  memset(h, 0, sizeof h);
  decode(&args);
  const double by_token = worst_difference();
  memset(h, 0, sizeof h);
  planned(&args);
  const double with_plan = worst_difference();
  printf("largest difference from the recurrence: %.1e at once, %.1e token by token, %.1e with a plan\n", at_once,
         by_token, with_plan);
  if (!(at_once < allowed && by_token < allowed && with_plan < allowed)) return 1;

  // What cannot be right is refused by a sentence that names it.
  args.k.shape[3] = dqk - 1;
  if (tfla_mlstm_forward(&args, NULL) != TFLA_INVALID_ARGUMENT) return 1;
  printf("refused: %s\n", tfla_last_error());
  return 0;
}
