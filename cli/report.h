// The parts of a JSON report that commands share.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "tfla/plan.h"

namespace tfla::cli {

[[nodiscard]] nlohmann::ordered_json to_json(const Plan& plan);

// Library version, date, device, compiler and threads: what a reader needs to place the numbers that follow.
[[nodiscard]] nlohmann::ordered_json describe_run(Device device, int threads);

[[nodiscard]] std::string cpu_model();

// How many threads a plan made with this execution would use.
[[nodiscard]] int resolved_threads(const Execution& execution);

}  // namespace tfla::cli
