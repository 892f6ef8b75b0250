"""tfla and the published kernels on a CPU, and the measurement behind the plan's tile length and chunk size."""
