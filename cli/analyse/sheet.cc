#include "cli/analyse/sheet.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <utility>

#include "cli/support/options.h"
#include "cli/support/table.h"

namespace tfla::cli {
namespace {

namespace fs = std::filesystem;

bool write_file(const fs::path& path, const Sheet& sheet) {
  std::ofstream file(path, std::ios::trunc);
  file << fmt::format("{}\n", fmt::join(sheet.columns, ","));
  for (const auto& row : sheet.rows) file << fmt::format("{}\n", fmt::join(row, ","));
  file.flush();
  return static_cast<bool>(file);
}

[[noreturn]] void refuse_folder(const std::string& path) {
  throw UsageError(fmt::format("tfla: --out was '{}'; it must be a folder that can be written", path));
}

// Nothing but numbers and gaps: such a column is aligned to the right.
bool holds_numbers(const Sheet& sheet, std::size_t column) {
  return std::all_of(sheet.rows.begin(), sheet.rows.end(), [column](const auto& row) {
    return row[column].find_first_not_of("0123456789+-.e") == std::string::npos;
  });
}

}  // namespace

std::string csv_number(double value) { return fmt::format("{:.6g}", value); }
std::string csv_count(double value) { return fmt::format("{:.15g}", value); }

std::string to_text(const std::vector<Sheet>& sheets) {
  std::string out;
  for (const Sheet& sheet : sheets) {
    if (sheet.title.empty()) continue;
    std::vector<Column> columns;
    for (std::size_t x = 0; x < sheet.columns.size(); ++x) {
      columns.push_back({sheet.columns[x], holds_numbers(sheet, x) ? Align::right : Align::left});
    }
    Table table(columns);
    for (const auto& row : sheet.rows) {
      std::vector<Cell> cells;
      for (const std::string& text : row) cells.push_back({text});
      table.row(std::move(cells));
    }
    out += fmt::format("{}{}\n{}", out.empty() ? "" : "\n", sheet.title, table.text(false));
  }
  return out;
}

SheetFolder::SheetFolder(std::string path) : path_(std::move(path)) {
  if (path_.empty()) return;
  std::error_code error;
  created_ = fs::create_directory(path_, error);
  const fs::path probe = fs::path(path_) / ".tfla-writable";
  if (!fs::is_directory(path_, error) || !std::ofstream(probe)) refuse_folder(path_);
  fs::remove(probe, error);
}

SheetFolder::~SheetFolder() {
  std::error_code error;
  if (created_) fs::remove(path_, error);
}

void SheetFolder::write(std::vector<Sheet> sheets) {
  if (path_.empty()) return;
  std::erase_if(sheets, [](const Sheet& sheet) { return sheet.name.empty(); });
  const auto target = [this](const Sheet& sheet) { return fs::path(path_) / (sheet.name + ".csv"); };
  const auto part = [&target](const Sheet& sheet) { return target(sheet).concat(".part"); };
  bool written = true;
  std::error_code error;
  for (const Sheet& sheet : sheets) {
    const bool replaceable = !fs::exists(target(sheet), error) || fs::is_regular_file(target(sheet), error);
    written = written && replaceable && write_file(part(sheet), sheet);
  }
  for (const Sheet& sheet : sheets) {
    if (written) fs::rename(part(sheet), target(sheet), error);
    written = written && !error;
  }
  if (!written) {
    for (const Sheet& sheet : sheets) fs::remove(part(sheet), error);
    refuse_folder(path_);
  }
  created_ = false;
}

}  // namespace tfla::cli
