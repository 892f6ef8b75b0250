// JSON reports: the parts that commands share, and the file that they go to.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "tfla/delta.h"
#include "tfla/plan.h"

namespace tfla::cli {

[[nodiscard]] nlohmann::ordered_json to_json(const Plan& plan);
[[nodiscard]] nlohmann::ordered_json to_json(const DeltaPlan& plan);

// Library version, date, device, compiler and threads: what a reader needs to place the numbers that follow.
[[nodiscard]] nlohmann::ordered_json describe_run(Device device, int threads);

[[nodiscard]] std::string cpu_model();

// How many threads a plan made with this execution would use.
[[nodiscard]] int resolved_threads(const Execution& execution);

// A file that is known to be writable before the work starts; a run that fails leaves no empty file behind, and an old
// file as it was. With an empty path it does nothing.
class JsonFile {
 public:
  explicit JsonFile(std::string path);
  ~JsonFile();
  JsonFile(const JsonFile&) = delete;
  JsonFile& operator=(const JsonFile&) = delete;
  void write(const nlohmann::ordered_json& content);

 private:
  std::string path_;
  bool created_ = false;
};

}  // namespace tfla::cli
