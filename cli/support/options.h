// Reading the command line: one function per kind of value, shared by the commands. What cannot be read becomes a
// UsageError, one sentence that names the option, what it was and what is accepted.
#pragma once

#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "tfla/tfla.h"

namespace CLI {  // NOLINT(readability-identifier-naming) CLI11's
class App;
class Option;
}  // namespace CLI

namespace tfla::cli {

class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

[[nodiscard]] std::int64_t parse_integer(const std::string& option, std::string_view text, std::int64_t least,
                                         std::int64_t most);
[[nodiscard]] double parse_real(const std::string& option, const std::string& text, double least, double most);
[[nodiscard]] double parse_seconds(const std::string& option, const std::string& text);
[[nodiscard]] std::vector<std::int64_t> parse_integers(const std::string& option, const std::string& text);
[[nodiscard]] MlstmShape parse_shape(const std::string& option, const std::string& text);  // B,T,H,dqk,dhv
[[nodiscard]] Device parse_device(const std::string& option, const std::string& text);

// Comma-separated names, or "all".
[[nodiscard]] std::vector<DType> parse_dtypes(const std::string& option, const std::string& text);
[[nodiscard]] std::vector<InputGate> parse_gates(const std::string& option, const std::string& text);
[[nodiscard]] std::vector<Formulation> parse_formulations(const std::string& option, const std::string& text);

// One of a few words; its index.
[[nodiscard]] std::size_t parse_word(const std::string& option, const std::string& text,
                                     const std::vector<std::string>& words);
// Which of the words are in a comma-separated list; all of them for "all".
[[nodiscard]] std::vector<std::size_t> parse_words(const std::string& option, const std::string& text,
                                                   const std::vector<std::string>& words);

// What a command is about.
enum class Operator : std::uint8_t { mlstm, delta };
void add_operator_option(CLI::App& app, Operator& subject);
// The delta rule has no such options: refuses the first that is given.
void refuse_of_mlstm(const CLI::App& app, const std::vector<std::string>& options);

// Sets shape.tokens and what follows from it in a dense batch.
void set_tokens(MlstmShape& shape, std::int64_t tokens);
// Sets shape.dtype and the gates' dtype that goes with it: float32, or float64 where everything is.
void set_dtype(MlstmShape& shape, DType dtype);

// Where and how the work runs; every command has these options.
struct CommonOptions {
  Execution execution;
  std::int64_t chunk = 0;
};
void add_common_options(CLI::App& app, CommonOptions& options);

// Adds an option whose text goes to `read(option, text)`.
CLI::Option* add_text_option(CLI::App& app, const std::string& option, const std::string& kind, const std::string& help,
                             std::function<void(const std::string&, const std::string&)> read);

}  // namespace tfla::cli
