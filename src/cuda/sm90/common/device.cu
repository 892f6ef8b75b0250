#include "cuda/launch.h"
#include "cuda/sm90/entry.h"

namespace tfla::cuda::sm90 {

bool supported_device() { return device_facts().capability == 90; }

int multiprocessors() { return device_facts().multiprocessors; }

}  // namespace tfla::cuda::sm90
