#include "cli/support/table.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <string_view>
#include <utility>

namespace tfla::cli {
namespace {

constexpr std::string_view reset = "\033[0m";

std::string_view escape(Tone tone) {
  switch (tone) {
    case Tone::good: return "\033[32m";
    case Tone::bad: return "\033[1;31m";
    case Tone::faint: return "\033[2m";
    case Tone::plain: return {};
  }
  return {};
}

std::string padded(const Cell& cell, std::size_t width, Align align, bool color) {
  const std::string space(width - cell.text.size(), ' ');
  std::string text = cell.text;
  if (color && !escape(cell.tone).empty()) text = fmt::format("{}{}{}", escape(cell.tone), cell.text, reset);
  return align == Align::left ? text + space : space + text;
}

std::string without_trailing_spaces(std::string line) {
  line.erase(line.find_last_not_of(' ') + 1);
  return line;
}

}  // namespace

Table::Table(std::vector<Column> columns) : columns_(std::move(columns)) {}

void Table::row(std::vector<Cell> cells) {
  cells.resize(columns_.size());
  rows_.push_back(std::move(cells));
}

void Table::rule() { rows_.emplace_back(); }

std::string Table::text(bool color) const {
  std::vector<std::size_t> widths;
  for (const Column& column : columns_) widths.push_back(column.title.size());
  for (const auto& row : rows_) {
    for (std::size_t x = 0; x < row.size(); ++x) widths[x] = std::max(widths[x], row[x].text.size());
  }
  std::string heading;
  std::string line;
  for (std::size_t x = 0; x < columns_.size(); ++x) {
    const std::string_view gap = x == 0 ? "" : "  ";
    heading += fmt::format("{}{}", gap, padded({columns_[x].title}, widths[x], columns_[x].align, false));
    line += fmt::format("{}{}", gap, std::string(widths[x], '-'));
  }
  std::string out = without_trailing_spaces(heading) + "\n" + line + "\n";
  for (const auto& row : rows_) {
    if (row.empty()) {
      out += line + "\n";
      continue;
    }
    std::string text;
    for (std::size_t x = 0; x < row.size(); ++x) {
      text += fmt::format("{}{}", x == 0 ? "" : "  ", padded(row[x], widths[x], columns_[x].align, color));
    }
    out += without_trailing_spaces(text) + "\n";
  }
  return out;
}

bool use_color(std::FILE* stream) {
  const char* no_color = std::getenv("NO_COLOR");
  const char* terminal = std::getenv("TERM");
  if (no_color != nullptr && *no_color != '\0') return false;
  if (terminal == nullptr || std::string_view(terminal) == "dumb") return false;
  return isatty(fileno(stream)) != 0;
}

std::string format_seconds(double seconds) {
  if (seconds >= 1) return fmt::format("{:.3g} s", seconds);
  if (seconds >= 1e-3) return fmt::format("{:.3g} ms", seconds * 1e3);
  return fmt::format("{:.3g} us", seconds * 1e6);
}

std::string format_megabytes(double bytes) {
  const double megabytes = bytes / 1e6;
  return megabytes >= 100 ? fmt::format("{:.0f}", megabytes) : fmt::format("{:.2f}", megabytes);
}

std::string format_count(double count) {
  constexpr std::array<std::pair<double, const char*>, 3> units = {{{1e9, "G"}, {1e6, "M"}, {1e3, "k"}}};
  for (const auto& [size, unit] : units) {
    if (count >= size) return fmt::format("{:.3g} {}", count / size, unit);
  }
  return fmt::format("{:.0f}", count);
}

std::string format_error(double error) { return fmt::format("{:.1e}", error); }

}  // namespace tfla::cli
