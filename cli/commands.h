// The commands of the program. One is a folder with a command.cc, a line here and a row in main.cc.
#pragma once

#include <functional>

namespace CLI {  // NOLINT(readability-identifier-naming) CLI11's
class App;
}  // namespace CLI

namespace tfla::cli {

// A command as main sees it: the part of the command line that belongs to it and what to do once that is read.
struct Command {
  CLI::App* app = nullptr;
  std::function<int()> run;  // returns the exit code
};
[[nodiscard]] Command add_check(CLI::App& program);
[[nodiscard]] Command add_bench(CLI::App& program);
[[nodiscard]] Command add_explain(CLI::App& program);
[[nodiscard]] Command add_analyse(CLI::App& program);

}  // namespace tfla::cli
