#include "cli/support/options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <charconv>
#include <cmath>
#include <limits>
#include <utility>

#include "core/names.h"

namespace tfla::cli {
namespace {

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  std::size_t begin = 0;
  while (true) {
    const std::size_t comma = text.find(',', begin);
    parts.push_back(text.substr(begin, comma - begin));
    if (comma == std::string::npos) return parts;
    begin = comma + 1;
  }
}

// Comma-separated words of a table, each mapped to its value; "all" is every value of the table.
template <class Value>
std::vector<Value> parse_list(const std::string& option, const std::string& text,
                              const std::vector<std::pair<std::string, Value>>& table) {
  std::vector<std::string> words;
  std::vector<Value> values;
  for (const auto& [word, value] : table) {
    words.push_back(word);
    values.push_back(value);
  }
  if (text == "all") return values;
  std::vector<Value> chosen;
  for (const std::string& part : split(text)) {
    std::size_t index = 0;
    while (index < words.size() && words[index] != part) ++index;
    if (index == words.size()) {
      throw UsageError(fmt::format("tfla: {} has '{}'; it takes all, or a comma-separated list of {}", option, part,
                                   fmt::join(words, ", ")));
    }
    chosen.push_back(values[index]);
  }
  return chosen;
}

}  // namespace

std::int64_t parse_integer(const std::string& option, std::string_view text, std::int64_t least, std::int64_t most) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < least || value > most) {
    const std::string range = most == std::numeric_limits<std::int64_t>::max()
                                  ? fmt::format("of at least {}", least)
                                  : fmt::format("from {} to {}", least, most);
    throw UsageError(fmt::format("tfla: {} was '{}'; it must be a whole number {}", option, text, range));
  }
  return value;
}

double parse_real(const std::string& option, const std::string& text, double least, double most) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !(value >= least && value <= most)) {
    throw UsageError(fmt::format("tfla: {} was '{}'; it must be a number from {} to {}", option, text, least, most));
  }
  return value;
}

double parse_seconds(const std::string& option, const std::string& text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  constexpr double most = 3600;
  if (error != std::errc() || end != text.data() + text.size() || !(value > 0) || value > most) {
    throw UsageError(
        fmt::format("tfla: {} was '{}'; it must be a number of seconds above 0 and at most {}", option, text, most));
  }
  return value;
}

std::vector<std::int64_t> parse_integers(const std::string& option, const std::string& text) {
  std::vector<std::int64_t> values;
  for (const std::string& part : split(text)) {
    values.push_back(parse_integer(option, part, 1, std::numeric_limits<std::int64_t>::max()));
  }
  return values;
}

MlstmShape parse_shape(const std::string& option, const std::string& text) {
  const std::vector<std::string> parts = split(text);
  constexpr std::size_t axes = 5;
  if (parts.size() != axes) {
    throw UsageError(fmt::format(
        "tfla: {} was '{}'; it takes five whole numbers B,T,H,dqk,dhv such as 1,2048,4,128,256", option, text));
  }
  const auto extent = [&](std::size_t axis, const char* label, std::int64_t least) {
    return parse_integer(fmt::format("{} {}", label, option), parts[axis], least,
                         std::numeric_limits<std::int64_t>::max());
  };
  MlstmShape shape;
  shape.batch = extent(0, "B of", 0);
  const std::int64_t tokens = extent(1, "T of", 0);
  shape.heads = extent(2, "H of", 1);
  shape.qk_heads = shape.heads;
  shape.dqk = extent(3, "dqk of", 1);
  shape.dhv = extent(4, "dhv of", 1);
  set_tokens(shape, tokens);
  return shape;
}

Device parse_device(const std::string& option, const std::string& text) {
  return parse_word(option, text, {name(Device::cpu), name(Device::cuda)}) == 0 ? Device::cpu : Device::cuda;
}

std::vector<DType> parse_dtypes(const std::string& option, const std::string& text) {
  std::vector<std::pair<std::string, DType>> table;
  for (DType dtype : {DType::float32, DType::float64, DType::bfloat16, DType::float16}) {
    table.emplace_back(tfla::name(dtype), dtype);
  }
  return parse_list(option, text, table);
}

std::vector<InputGate> parse_gates(const std::string& option, const std::string& text) {
  std::vector<std::pair<std::string, InputGate>> table;
  for (InputGate gate : {InputGate::exponential, InputGate::sigmoid}) table.emplace_back(name(gate), gate);
  return parse_list(option, text, table);
}

std::vector<Formulation> parse_formulations(const std::string& option, const std::string& text) {
  std::vector<std::pair<std::string, Formulation>> table;
  for (Formulation formulation : {Formulation::chunkwise, Formulation::parallel, Formulation::recurrent}) {
    table.emplace_back(name(formulation), formulation);
  }
  return parse_list(option, text, table);
}

std::size_t parse_word(const std::string& option, const std::string& text, const std::vector<std::string>& words) {
  for (std::size_t index = 0; index < words.size(); ++index) {
    if (words[index] == text) return index;
  }
  throw UsageError(fmt::format("tfla: {} was '{}'; it takes one of {}", option, text, fmt::join(words, ", ")));
}

std::vector<std::size_t> parse_words(const std::string& option, const std::string& text,
                                     const std::vector<std::string>& words) {
  std::vector<std::pair<std::string, std::size_t>> table;
  for (std::size_t index = 0; index < words.size(); ++index) table.emplace_back(words[index], index);
  return parse_list(option, text, table);
}

void set_tokens(MlstmShape& shape, std::int64_t tokens) {
  shape.tokens = tokens;
  shape.sequences = shape.batch;
  shape.longest = tokens;
}

void set_dtype(MlstmShape& shape, DType dtype) {
  shape.dtype = dtype;
  shape.gate_dtype = dtype == DType::float64 ? DType::float64 : DType::float32;
}

CLI::Option* add_text_option(CLI::App& app, const std::string& option, const std::string& kind, const std::string& help,
                             std::function<void(const std::string&, const std::string&)> read) {
  return app
      .add_option_function<std::string>(
          option, [option, read = std::move(read)](const std::string& text) { read(option, text); }, help)
      ->type_name(kind);
}

void add_operator_option(CLI::App& app, Operator& subject) {
  add_text_option(app, "--operator", "NAME", "mlstm (default), or delta: the delta rule",
                  [&subject](const std::string& option, const std::string& text) {
                    subject = static_cast<Operator>(parse_word(option, text, {"mlstm", "delta"}));
                  });
}

void refuse_of_mlstm(const CLI::App& app, const std::vector<std::string>& options) {
  for (const std::string& option : options)
    if (app.count(option) > 0)
      throw UsageError(fmt::format("tfla: {} is given with --operator delta; it is an option of the mlstm", option));
}

void add_common_options(CLI::App& app, CommonOptions& options) {
  add_text_option(app, "--device", "cpu|cuda", "where to run (default cpu)",
                  [&options](const std::string& option, const std::string& text) {
                    options.execution.device = parse_device(option, text);
                  });
  add_text_option(app, "--threads", "N", "threads to use (default 0: as many as OpenMP would)",
                  [&options](const std::string& option, const std::string& text) {
                    constexpr std::int64_t most_threads = 4096;
                    options.execution.threads = static_cast<int>(parse_integer(option, text, 0, most_threads));
                  });
  add_text_option(app, "--chunk", "N", "chunk size (default 0: chosen by the plan)",
                  [&options](const std::string& option, const std::string& text) {
                    options.chunk = parse_integer(option, text, 0, std::numeric_limits<std::int64_t>::max());
                  });
  app.add_flag("--portable", options.execution.portable, "cuda: only the kernels that every GPU has, to compare with");
}

}  // namespace tfla::cli
