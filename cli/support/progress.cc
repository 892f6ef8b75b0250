#include "cli/support/progress.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <utility>

namespace tfla::cli {
namespace {

constexpr std::chrono::seconds between_lines(10);
constexpr std::int64_t bar_width = 20;

std::size_t terminal_columns() {
  winsize size{};
  constexpr std::size_t usual = 80;
  if (ioctl(STDERR_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return usual;
  return size.ws_col;
}

}  // namespace

Progress::Progress(std::string title, std::int64_t total)
    : title_(std::move(title)),
      total_(std::max<std::int64_t>(total, 1)),
      terminal_(isatty(STDERR_FILENO) != 0),
      begin_(std::chrono::steady_clock::now()),
      last_line_(begin_) {}

Progress::~Progress() { finish(); }

void Progress::start(const std::string& what) {
  const auto now = std::chrono::steady_clock::now();
  if (!terminal_ && completed_ != 0 && now - last_line_ < between_lines) return;
  last_line_ = now;
  show(what);
}

void Progress::done() { completed_ = std::min(completed_ + 1, total_); }

void Progress::finish() {
  if (terminal_ && visible_) fmt::print(stderr, "\r\033[K");
  visible_ = false;
}

void Progress::show(const std::string& what) {
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
  if (!terminal_) {
    fmt::print(stderr, "{}: {} of {} done after {:.0f} s, now {}\n", title_, completed_, total_, seconds, what);
    return;
  }
  const auto filled = static_cast<std::size_t>(bar_width * completed_ / total_);
  std::string line = fmt::format("{} [{}{}] {}/{} {:.0f} s  {}", title_, std::string(filled, '#'),
                                 std::string(bar_width - filled, '.'), completed_, total_, seconds, what);
  // A line that wraps could not be drawn over.
  line.resize(std::min(line.size(), terminal_columns() - 1));
  fmt::print(stderr, "\r\033[K{}", line);
  std::fflush(stderr);
  visible_ = true;
}

}  // namespace tfla::cli
