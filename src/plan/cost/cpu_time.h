// The paper's runtime model with the constants of a CPU core. Its accelerator moves states at one rate and multiplies
// at another; a core does both, and forms the gate matrix besides, so each has a price in seconds here and they add up.
// The tile takes the place of the paper's chunk: it is what the quadratic work grows with.
#pragma once

#include <cstdint>

#include "tfla/analysis.h"
#include "tfla/plan.h"

namespace tfla {

// Seconds of forward or backward on one core, per head and tile of x tokens.
[[nodiscard]] analysis::Polynomial cpu_tile_seconds(analysis::Pass pass, const analysis::HeadDims& dims);

// Seconds of a call on one core for one head of a sequence. Backward rebuilds the states inside a chunk of several
// tiles, so its time grows with the chunk, and the smallest that memory allows is best.
[[nodiscard]] double cpu_seconds(analysis::Pass pass, const analysis::HeadDims& dims, double tokens, double tile,
                                 double chunk);

// The tile that makes training (forward and backward) fastest: the closed form, in steps of whole vectors.
[[nodiscard]] std::int64_t best_cpu_tile(const analysis::HeadDims& dims);

}  // namespace tfla
