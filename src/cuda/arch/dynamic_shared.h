// The shared memory whose size a launch says.
#pragma once

// In a kernel: declares `name`, where it begins.
#define TFLA_DYNAMIC_SHARED(alignment, name) \
  extern __shared__ __align__(alignment)     \
  unsigned char name[]
