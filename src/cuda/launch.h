// The stages of the CUDA backend, as host functions that launch kernels on a stream and return at once.
#pragma once

#include <cuda_runtime.h>

#include "cuda/call.h"
#include "cuda/common/types.h"
#include "cuda/device.h"

namespace tfla::cuda {

enum class Time { forward, reverse };

// by_clusters: in one launch; a sequence has no more chunks than the CTAs of a cluster take.
template <class Real>
void launch_gates(const Call<Real>& call, bool by_clusters, cudaStream_t stream);

// T: the type of q, k, v.
template <class T>
void launch_states(const Call<typename Config<T>::Real>& call, cudaStream_t stream);
// What each segment of a sequence adds to the state.
template <class T>
void launch_segment_totals(const Call<typename Config<T>::Real>& call, Time direction, cudaStream_t stream);
// Totals of the segments of a sequence become the states they start from.
template <class T>
void launch_segment_scan(const Call<typename Config<T>::Real>& call, Time direction, int multiprocessors,
                         cudaStream_t stream);
template <class T>
void launch_grad_states(const Call<typename Config<T>::Real>& call, cudaStream_t stream);
template <class T>
void launch_outputs(const Call<typename Config<T>::Real>& call, cudaStream_t stream);
// 1 / den of every row and its slope, from the n that launch_states left at chunk starts.
template <class T>
void launch_denominators(const Call<typename Config<T>::Real>& call, cudaStream_t stream);
// deta of every row, with the exact normalizer gradient.
template <class T>
void launch_grad_denominators(const Call<typename Config<T>::Real>& call, cudaStream_t stream);
// dQ, dK, dV, and the row sums from which launch_grad_gates makes di and df.
template <class T>
void launch_grad_qkv(const Call<typename Config<T>::Real>& call, cudaStream_t stream);
// dQ and dK of each group of heads, from those of its heads. T: bfloat16 or float16.
template <class T>
void launch_sum_groups(const Call<float>& call, cudaStream_t stream);
template <class T>
void launch_grad_gates(const Call<typename Config<T>::Real>& call, cudaStream_t stream);

// The states of the recurrent formulation at the first token: the initial state, or zero.
template <class Real>
void launch_start_states(const StepCall<Real>& step, cudaStream_t stream);
// Tokens on states in place, in tiles of so many columns of dhv; by clusters in one launch; one token of each of many
// states.
template <class T>
void launch_step(const StepCall<typename Config<T>::Real>& step, int columns, cudaStream_t stream);
template <class T>
void launch_step_cluster(const StepCall<typename Config<T>::Real>& step, int columns, cudaStream_t stream);
template <class T>
void launch_step_many(const StepCall<float>& step, cudaStream_t stream);

}  // namespace tfla::cuda
