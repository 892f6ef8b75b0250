// Proves that the ThreadSanitizer build can tell a race from an ordered access across OpenMP threads.
#include <array>
#include <cstdio>
#include <cstring>

namespace {

constexpr int threads = 4;
constexpr int rounds = 1000;

// Each thread reads what its neighbour wrote before the implicit barrier.
int ordered() {
  std::array<int, threads> first{};
  std::array<int, threads> second{};
#pragma omp parallel num_threads(threads)
  {
#pragma omp for
    for (int i = 0; i < threads; ++i) first[i] = i;
#pragma omp for
    for (int i = 0; i < threads; ++i) second[i] = first[threads - 1 - i];
  }
  int sum = 0;
  for (int value : second) sum += value;
  return sum;
}

int race() {
  int sum = 0;
#pragma omp parallel for num_threads(threads)
  for (int i = 0; i < rounds; ++i) sum += i;
  return sum;
}

}  // namespace

int main(int argc, char** argv) {
  const bool racing = argc > 1 && std::strcmp(argv[1], "race") == 0;
  std::printf("sum %d\n", racing ? race() : ordered());
  return 0;
}
