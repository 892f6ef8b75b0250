#include "tfla/plan.h"

namespace tfla {

namespace {

// Capability, multiprocessors and the shared memory that a CTA may have, as the CUDA runtime reports them.
constexpr auto gpus = std::to_array<KnownGpu>({
    {"A100", {.capability = 80, .multiprocessors = 108, .shared_bytes = 166912}},
    {"L40S", {.capability = 89, .multiprocessors = 142, .shared_bytes = 101376}},
    {"RTX 4090", {.capability = 89, .multiprocessors = 128, .shared_bytes = 101376}},
    {"H100 SXM", {.capability = 90, .multiprocessors = 132, .shared_bytes = 232448}},
    {"H100 PCIe", {.capability = 90, .multiprocessors = 114, .shared_bytes = 232448}},
    {"H20", {.capability = 90, .multiprocessors = 78, .shared_bytes = 232448}},
    {"H200", {.capability = 90, .multiprocessors = 132, .shared_bytes = 232448}},
    {"B200", {.capability = 100, .multiprocessors = 148, .shared_bytes = 232448}},
    {"RTX 5090", {.capability = 120, .multiprocessors = 170, .shared_bytes = 101376}},
});

}  // namespace

std::span<const KnownGpu> known_gpus() { return gpus; }

}  // namespace tfla
