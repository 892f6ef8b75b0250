// Tables of numbers that a command both prints and writes as CSV.
#pragma once

#include <string>
#include <vector>

namespace tfla::cli {

struct Sheet {
  std::string name;  // of the file, without .csv; a sheet without one is only printed
  std::vector<std::string> columns;
  std::vector<std::vector<std::string>> rows = {};
  std::string title = {};  // printed above it; a sheet without one is only written: curves, hundreds of rows
};

// A number with as many digits as a plot or a comparison can use.
[[nodiscard]] std::string csv_number(double value);
// A count in full.
[[nodiscard]] std::string csv_count(double value);

[[nodiscard]] std::string to_text(const std::vector<Sheet>& sheets);

// A folder for sheets. It is known to be writable before the work starts, and gets all files or none. With an empty
// path it does nothing.
class SheetFolder {
 public:
  explicit SheetFolder(std::string path);
  ~SheetFolder();
  SheetFolder(const SheetFolder&) = delete;
  SheetFolder& operator=(const SheetFolder&) = delete;
  void write(std::vector<Sheet> sheets);

 private:
  std::string path_;
  bool created_ = false;
};

}  // namespace tfla::cli
