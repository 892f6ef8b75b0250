// What is being done and how far it is, on stderr: a bar on a terminal, elsewhere a line now and then.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace tfla::cli {

class Progress {
 public:
  Progress(std::string title, std::int64_t total);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void start(const std::string& what);  // the next piece of work begins
  void done();                          // and is finished
  void finish();                        // takes the bar away

 private:
  void show(const std::string& what);

  std::string title_;
  std::int64_t total_;
  std::int64_t completed_ = 0;
  bool terminal_;
  bool visible_ = false;
  std::chrono::steady_clock::time_point begin_;
  std::chrono::steady_clock::time_point last_line_;
};

}  // namespace tfla::cli
