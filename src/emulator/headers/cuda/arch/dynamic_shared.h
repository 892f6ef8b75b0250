// In the place of cuda/arch/dynamic_shared.h.
#pragma once

#include <cuda_runtime.h>

#define TFLA_DYNAMIC_SHARED(alignment, name) unsigned char* const name = ::tfla::emulator::self().cta->shared
