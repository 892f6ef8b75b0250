// Tables and numbers for a person to read. Plain ASCII; color only on a terminal, and never with NO_COLOR set.
#pragma once

#include <cstdio>
#include <string>
#include <vector>

namespace tfla::cli {

enum class Tone { plain, good, bad, faint };

struct Cell {
  std::string text;
  Tone tone = Tone::plain;
};

enum class Align { left, right };

struct Column {
  std::string title;
  Align align = Align::right;
};

class Table {
 public:
  explicit Table(std::vector<Column> columns);
  void row(std::vector<Cell> cells);  // missing cells at the end are empty
  void rule();                        // a line between groups of rows
  [[nodiscard]] std::string text(bool color) const;

 private:
  std::vector<Column> columns_;
  std::vector<std::vector<Cell>> rows_;  // an empty row is a rule
};

[[nodiscard]] bool use_color(std::FILE* stream);

[[nodiscard]] std::string format_seconds(double seconds);  // "12.3 ms"
[[nodiscard]] std::string format_megabytes(double bytes);  // "1.25" for 1,250,000
[[nodiscard]] std::string format_count(double count);      // "12.3 M"
[[nodiscard]] std::string format_error(double error);      // "1.2e-07"

}  // namespace tfla::cli
