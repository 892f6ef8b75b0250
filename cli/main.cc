// The program `tfla`. Exit codes: 0 done, 1 a bound is broken (check), 2 the request cannot be carried out.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <exception>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "tfla/tfla.h"

namespace tfla::cli {
namespace {

constexpr int usage_error = 2;
constexpr const char* too_large =
    "this machine has not enough memory for the request; try fewer tokens or a smaller batch";

// Every command, in the order of the help; commands.h says what makes one.
struct Row {
  const char* example;
  const char* question;  // that the example answers
  Command (*add)(CLI::App&);
};
constexpr Row rows[] = {
    {"tfla check --quick", "is this build right on this machine?", add_check},
    {"tfla bench --quick", "how fast is it, and how does time grow with T?", add_bench},
    {"tfla explain --shape 1,2048,4,128,256", "what would a call do: chunks, scratch, FLOPs, bytes", add_explain},
    {"tfla analyse chunk --accelerator all", "the paper's cost model: which chunk size is best where?", add_analyse},
};

std::string examples() {
  std::string text = "Examples:\n";
  for (const Row& row : rows) text += fmt::format("  {:<47}{}\n", row.example, row.question);
  return text + fmt::format("  {:<47}{}", "tfla check --help", "options and examples of one command");
}

int refuse(std::string sentence) {
  std::replace(sentence.begin(), sentence.end(), '\n', ' ');
  if (sentence.rfind("tfla: ", 0) != 0) sentence.insert(0, "tfla: ");
  fmt::print(stderr, "{}\n", sentence);
  return usage_error;
}

// The (sub)command the user was in when the command line stopped making sense, and how to call it.
struct Place {
  const CLI::App* app;
  std::string call;
};
Place innermost(const CLI::App& program) {
  Place place{&program, program.get_name()};
  for (auto chosen = program.get_subcommands(); !chosen.empty(); chosen = place.app->get_subcommands()) {
    place = {chosen.front(), fmt::format("{} {}", place.call, chosen.front()->get_name())};
  }
  return place;
}

int refuse(const CLI::App& program, const CLI::ParseError& error) {
  const Place where = innermost(program);
  const std::string help = where.call + " --help";
  const auto extras = program.remaining(true);
  if (!extras.empty()) {
    return refuse(fmt::format("'{}' is not {}; see {}", extras.front(),
                              where.app == &program ? "a command or option" : "an option here", help));
  }
  return refuse(fmt::format("{}; see {}", error.what(), help));
}

int run(int argc, char** argv) {
  CLI::App program("Tiled Flash Linear Attention: fast mLSTM kernels, checked and timed on this machine.", "tfla");
  program.set_version_flag("--version", fmt::format("tfla {}", version()), "print the version and exit");
  program.footer(examples());
  program.require_subcommand(0, 1);
  std::vector<Command> commands;
  for (const Row& row : rows) commands.push_back(row.add(program));
  try {
    program.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return program.exit(error);  // --help and --version
    return refuse(program, error);
  }
  std::vector<std::string> names;
  for (const Command& command : commands) {
    if (command.app->parsed()) return command.run();
    names.push_back(command.app->get_name());
  }
  return refuse(fmt::format("a command is missing; it takes one of {}, see tfla --help", fmt::join(names, ", ")));
}

}  // namespace
}  // namespace tfla::cli

int main(int argc, char** argv) {
  int code = 0;
  try {
    code = tfla::cli::run(argc, argv);
  } catch (const std::bad_alloc&) {
    return tfla::cli::refuse(tfla::cli::too_large);
  } catch (const std::length_error&) {
    return tfla::cli::refuse(tfla::cli::too_large);
  } catch (const std::exception& error) {
    return tfla::cli::refuse(error.what());
  }
  if (std::fflush(stdout) != 0) return tfla::cli::refuse("standard output cannot be written");
  return code;
}
