// A GPU whose threads are fibers: kernels of src/cuda, compiled by a C++ compiler, run on any CPU, for their tests.
//
// A thread runs until it waits for another one. Which of those that can go on is next, and whether an asynchronous
// copy or product is done at once or as late as its waits allow, are drawn by chance from a seed. What nobody can go on
// from, what reads outside of shared memory, and lanes that meet at different instructions end the program with a
// sentence. Speed, alignment of registers and the order of memory accesses of different threads are not modelled.
#pragma once

#include <array>
#include <boost/context/fiber.hpp>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "emulator/products.h"

namespace tfla::emulator {

inline constexpr unsigned warp_lanes = 32;
inline constexpr unsigned named_barriers = 16;
inline constexpr std::size_t most_shared_bytes = 227 * 1024;

struct Index {
  unsigned x = 1, y = 1, z = 1;
};

// Ends the program: the kernel, the CTA and the thread, then the sentence.
[[noreturn]] void fail(const std::string& sentence);

struct Cta;

// Lanes of a warp that meet at one instruction. The last one to come does what the instruction does for all.
struct Meeting {
  using Work = void (*)(void* const* lanes, unsigned mask);
  unsigned mask = 0;
  unsigned arrived = 0;
  unsigned round = 0;
  Work work = nullptr;
  std::array<void*, warp_lanes> lanes{};
};

struct Warp {
  std::vector<std::unique_ptr<Meeting>> meetings;  // by their masks
  std::vector<Product> open;                       // products that no batch has yet
  std::vector<std::vector<Product>> batches;       // in flight, the oldest first
};

struct Barrier {
  unsigned arrived = 0, round = 0;
  bool all = true, all_of_last_round = true;  // whether something held in every thread
};

// Copies of a thread that it waits for in groups.
struct CopyGroups {
  std::vector<std::function<void()>> open;
  std::vector<std::vector<std::function<void()>>> groups;

  void add(std::function<void()> copy) { open.push_back(std::move(copy)); }
  void commit();
  void finish(std::size_t all_but);  // the oldest first
};

struct Thread {
  boost::context::fiber fiber, scheduler;
  Index index;
  unsigned number = 0;
  Cta* cta = nullptr;
  Warp* warp = nullptr;
  bool done = true;
  // What it waits for: that these bits of a word change.
  const volatile unsigned* word = nullptr;
  unsigned mask = 0, value = 0;
  const char* waits_for = "";
  CopyGroups copies, stores;
  unsigned cluster_round = 0;

  [[nodiscard]] unsigned lane() const { return number % warp_lanes; }
  [[nodiscard]] bool blocked() const { return word != nullptr && (*word & mask) == value; }
};

// CTAs that can meet, and read each other's shared memory. Each has an operating system's thread, whose thread_local
// variables are its __shared__ ones; one runs at a time.
struct Cluster {
  unsigned live = 0;  // threads
  Barrier barrier;
  std::vector<char*> anchors;  // of each CTA: where its thread_local variables are
};

struct Cta {
  Index block, block_dim, grid_dim;
  unsigned rank = 0;
  Cluster* cluster = nullptr;
  const char* kernel = "";
  unsigned char* shared = nullptr;
  std::size_t shared_bytes = 0;
  unsigned live = 0;
  std::array<Barrier, named_barriers> barriers{};
  std::vector<Warp> warps;
  std::vector<std::function<void()>> in_flight;  // copies into shared memory
  std::mt19937 random;
};

extern constinit thread_local Thread* current;
extern constinit thread_local Index gridDim, blockDim;  // of the CTA that runs
[[nodiscard]] inline Thread& self() { return *current; }

// Until (*word & mask) is not `value`.
void wait_while(const volatile unsigned* word, unsigned mask, unsigned value, const char* waits_for);

// Calls work(arguments of all lanes) once, when every lane of the mask is here.
void meet(unsigned mask, void* arguments, Meeting::Work work);
template <class Arguments, void (*For)(Arguments* const* lanes, unsigned mask)>
void together(unsigned mask, Arguments& own) {
  meet(mask, &own, [](void* const* lanes, unsigned all) { For(reinterpret_cast<Arguments* const*>(lanes), all); });
}
void meet_warp(unsigned mask);

// Named barriers, 0 being that of all threads that have not ended.
void barrier_arrive(unsigned barrier, unsigned threads);
void barrier_wait(unsigned barrier, unsigned threads);
[[nodiscard]] bool barrier_all(unsigned barrier, unsigned threads, bool holds);
void sync_threads();
void cluster_arrive();
void cluster_wait();

// Whether what begins now ends at once; else as late as it may.
[[nodiscard]] bool at_once();
// A copy into shared memory, in flight until the scheduler lets it end.
void fly(std::function<void()> copy);
// A copy of a thread's own, of which the bytes beyond `valid` are zeros; done when its group is waited for.
void copy(void* shared, const void* global, int bytes, int valid);
// Arrives at a barrier in shared memory when this thread's copies so far are done.
void arrive_after_copies(unsigned barrier);

// For what ends when the thread that began it has gone on, or ended.
void as_thread_of(Cta& cta, const std::function<void()>& work);

// Dynamic shared memory by its 32-bit address.
[[nodiscard]] unsigned char* shared_at(unsigned address, std::size_t bytes);
[[nodiscard]] unsigned shared_address(const void* pointer);

// A barrier in shared memory that counts arrivals and bytes.
void mbarrier_init(unsigned address, unsigned arrivals);
void mbarrier_arrive(unsigned address, unsigned count);
void mbarrier_expect(unsigned address, unsigned bytes);
void mbarrier_received(unsigned address, unsigned bytes);
void mbarrier_wait(unsigned address, unsigned parity);

// The same variable of another CTA of the cluster.
[[nodiscard]] const void* of_cta(const void* own, unsigned rank);

struct LaunchShape {
  const char* kernel = "";
  Index grid, block;
  unsigned cluster = 1;
  std::size_t shared_bytes = 0;
};
void launch(const LaunchShape& shape, const std::function<void()>& kernel);

}  // namespace tfla::emulator
