"""tfla, the published Triton kernels and attention on a GPU, and the measurement behind the plan's chunk size."""
