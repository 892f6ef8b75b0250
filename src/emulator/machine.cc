#include "emulator/machine.h"

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <numeric>
#include <thread>
#include <utility>

namespace tfla::emulator {

constinit thread_local Thread* current = nullptr;
constinit thread_local Index gridDim, blockDim;

namespace {

constexpr std::size_t stack_bytes = 256 * 1024;
constexpr unsigned warpgroup_warps = 4;
constexpr unsigned char poison = 0xFF;  // a NaN in every floating-point type
constexpr unsigned outside_of_shared = 1U << 30;
thread_local char anchor;  // thread_local variables are as far from it in every thread of the operating system

unsigned seed_of_launch() {
  static const unsigned given = [] {
    const char* text = std::getenv("TFLA_EMULATOR_SEED");
    return text == nullptr ? 1U : static_cast<unsigned>(std::strtoul(text, nullptr, 10));
  }();
  static unsigned launches = 0;
  return given * 1000003U + launches++;
}

std::string where(const Thread& thread) {
  const Cta& cta = *thread.cta;
  return std::string(cta.kernel) + ", CTA " + std::to_string(cta.block.x) + ", thread " + std::to_string(thread.number);
}

void yield() {
  Thread& own = self();
  own.scheduler = std::move(own.scheduler).resume();
}

// Whether a barrier of so many threads is complete now; then the next round begins.
void complete(Barrier& barrier, unsigned threads) {
  if (barrier.arrived < threads || threads == 0) return;
  barrier.arrived = 0;
  ++barrier.round;
  barrier.all_of_last_round = std::exchange(barrier.all, true);
}

void end_thread(Cta& cta, Thread& thread) {
  thread.copies.commit();
  thread.copies.finish(0);
  thread.stores.commit();
  thread.stores.finish(0);
  --cta.live;
  if (cta.barriers[0].arrived > 0) complete(cta.barriers[0], cta.live);
  --cta.cluster->live;
  if (cta.cluster->barrier.arrived > 0) complete(cta.cluster->barrier, cta.cluster->live);
  thread.done = true;
}

// Fibers of one thread of the operating system, for one CTA after the other.
class Fibers {
 public:
  void start(Cta& cta, unsigned threads, const std::function<void()>& kernel);
  // Lets every thread that can go on do so once, but for those that lag behind. Whether there was one.
  bool pass(Cta& cta);
  // The same for the threads of a warp.
  bool turn(unsigned warp);
  [[noreturn]] void report(const Cta& cta) const;

 private:
  void make(unsigned threads);
  std::vector<std::unique_ptr<Thread>> threads_;
  std::vector<unsigned> order_;               // of warps
  unsigned first_lagging_ = 0, lagging_ = 0;  // warps of this CTA, one or those of a warpgroup, that rarely get a turn
  unsigned threads_in_use_ = 0;
  const std::function<void()>* kernel_ = nullptr;
};

void Fibers::make(unsigned threads) {
  while (threads_.size() < threads) {
    threads_.push_back(std::make_unique<Thread>());
    Thread* thread = threads_.back().get();
    thread->number = static_cast<unsigned>(threads_.size() - 1);
    thread->fiber = boost::context::fiber(std::allocator_arg, boost::context::fixedsize_stack(stack_bytes),
                                          [this, thread](boost::context::fiber&& scheduler) {
                                            thread->scheduler = std::move(scheduler);
                                            for (;;) {
                                              (*kernel_)();
                                              end_thread(*thread->cta, *thread);
                                              thread->scheduler = std::move(thread->scheduler).resume();
                                            }
                                            return std::move(thread->scheduler);
                                          });
  }
}

void Fibers::start(Cta& cta, unsigned threads, const std::function<void()>& kernel) {
  make(threads);
  kernel_ = &kernel;
  cta.live = threads;
  cta.warps = std::vector<Warp>((threads + warp_lanes - 1) / warp_lanes);
  order_.resize(cta.warps.size());
  std::iota(order_.begin(), order_.end(), 0U);
  if (cta.random() % 2 != 0) std::shuffle(order_.begin(), order_.end(), cta.random);
  const auto warps = static_cast<unsigned>(cta.warps.size());
  lagging_ = cta.random() % 2 == 0 ? 1 : warpgroup_warps;
  first_lagging_ = cta.random() % 4 == 0 ? cta.random() % ((warps + lagging_ - 1) / lagging_) * lagging_ : warps;
  threads_in_use_ = threads;
  for (unsigned t = 0; t < threads; ++t) {
    Thread& thread = *threads_[t];
    thread.index = {t % cta.block_dim.x, t / cta.block_dim.x % cta.block_dim.y,
                    t / (cta.block_dim.x * cta.block_dim.y)};
    thread.cta = &cta;
    thread.warp = &cta.warps[t / warp_lanes];
    thread.done = false;
    thread.word = nullptr;
  }
}

bool Fibers::turn(unsigned warp) {
  const unsigned first = warp * warp_lanes, last = std::min(first + warp_lanes, threads_in_use_);
  // Lanes that wait for the same see its end at the same time, and none of them runs ahead to where it begins anew:
  // kernels count on that where one lane arrives at a barrier for its warp.
  unsigned ready = 0;
  for (unsigned t = first; t < last; ++t)
    if (!threads_[t]->done && !threads_[t]->blocked()) ready |= 1U << (t - first);
  for (unsigned t = first; t < last; ++t) {
    if ((ready >> (t - first) & 1) == 0) continue;
    Thread& thread = *threads_[t];
    thread.word = nullptr;
    current = &thread;
    thread.fiber = std::move(thread.fiber).resume();
  }
  return ready != 0;
}

bool Fibers::pass(Cta& cta) {
  gridDim = cta.grid_dim;
  blockDim = cta.block_dim;
  bool progress = false;
  const auto lags = [&](unsigned warp) { return warp >= first_lagging_ && warp < first_lagging_ + lagging_; };
  for (const unsigned warp : order_)
    if (!lags(warp)) progress = turn(warp) || progress;
  constexpr unsigned rarely = 16;  // others may wait for it without saying so
  if (!progress || cta.random() % rarely == 0)
    for (const unsigned warp : order_)
      if (lags(warp)) progress = turn(warp) || progress;
  // Copies end while threads run, in any order; at the latest when nobody can go on.
  if (!cta.in_flight.empty() && (!progress || cta.random() % 4 == 0)) {
    const std::size_t index = cta.random() % cta.in_flight.size();
    const std::function<void()> copy = std::move(cta.in_flight[index]);
    cta.in_flight.erase(cta.in_flight.begin() + static_cast<std::ptrdiff_t>(index));
    copy();
    progress = true;
  }
  return progress;
}

void Fibers::report(const Cta& cta) const {
  std::fprintf(stderr, "tfla: %s, CTA %u: nobody can go on\n", cta.kernel, cta.block.x);
  const char* before = "";
  for (unsigned t = 0; t < threads_in_use_; ++t) {
    const Thread& thread = *threads_[t];
    const char* state = thread.done ? "ended" : thread.waits_for;
    if (state != before) std::fprintf(stderr, "  from thread %u on: %s\n", t, state);
    before = state;
  }
  std::abort();
}

// CTAs of a cluster take turns.
struct Turns {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<bool> ended;
  unsigned turn = 0, idle = 0;

  explicit Turns(unsigned ctas) : ended(ctas, false) {}
  void run(unsigned rank, Cta& cta, Fibers& fibers);
};

void Turns::run(unsigned rank, Cta& cta, Fibers& fibers) {
  std::unique_lock lock(mutex);
  while (!ended[rank]) {
    changed.wait(lock, [&] { return turn == rank; });
    idle = fibers.pass(cta) ? 0 : idle + 1;
    if (idle > ended.size()) fibers.report(cta);
    ended[rank] = cta.live == 0 && cta.in_flight.empty();
    for (unsigned step = 1; step <= ended.size(); ++step) {
      turn = static_cast<unsigned>((rank + step) % ended.size());
      if (!ended[turn]) break;
    }
    changed.notify_all();
  }
}

class Launch {
 public:
  Launch(const LaunchShape& shape, const std::function<void()>& kernel);
  void run();

 private:
  void run_rank(unsigned rank);
  const LaunchShape& shape_;
  const std::function<void()>& kernel_;
  unsigned seed_ = seed_of_launch();
  unsigned ctas_;
  std::vector<Cluster> clusters_;
  std::vector<std::unique_ptr<Turns>> turns_;
};

Launch::Launch(const LaunchShape& shape, const std::function<void()>& kernel)
    : shape_(shape), kernel_(kernel), ctas_(shape.grid.x * shape.grid.y * shape.grid.z) {
  if (shape.shared_bytes > most_shared_bytes) {
    std::fprintf(stderr, "tfla: %s wants %zu bytes of shared memory\n", shape.kernel, shape.shared_bytes);
    std::abort();
  }
  if (ctas_ % shape.cluster != 0) {
    std::fprintf(stderr, "tfla: %s has %u CTAs in clusters of %u\n", shape.kernel, ctas_, shape.cluster);
    std::abort();
  }
  clusters_.resize(ctas_ / shape.cluster);
  for (Cluster& cluster : clusters_) {
    cluster.live = shape.cluster * shape.block.x * shape.block.y * shape.block.z;
    cluster.anchors.resize(shape.cluster);
    turns_.push_back(std::make_unique<Turns>(shape.cluster));
  }
}

void Launch::run_rank(unsigned rank) {
  thread_local Fibers fibers;
  // A kilobyte more at either end, which must stay as it is; the first byte is aligned as the hardware does it.
  thread_local std::vector<unsigned char> memory(most_shared_bytes + 4096);
  constexpr std::size_t guard = 1024;
  auto* shared = reinterpret_cast<unsigned char*>((reinterpret_cast<std::uintptr_t>(memory.data()) + 2047) & ~1023UL);
  for (unsigned c = 0; c < clusters_.size(); ++c) {
    Cta cta;
    const unsigned number = c * shape_.cluster + rank;
    cta.block = {number % shape_.grid.x, number / shape_.grid.x % shape_.grid.y,
                 number / (shape_.grid.x * shape_.grid.y)};
    cta.block_dim = shape_.block;
    cta.grid_dim = shape_.grid;
    cta.rank = rank;
    cta.cluster = &clusters_[c];
    cta.cluster->anchors[rank] = &anchor;
    cta.kernel = shape_.kernel;
    cta.shared = shared;
    cta.shared_bytes = shape_.shared_bytes;
    cta.random.seed(seed_ + number);
    std::memset(shared - guard, poison, shape_.shared_bytes + 2 * guard);
    fibers.start(cta, shape_.block.x * shape_.block.y * shape_.block.z, kernel_);
    turns_[c]->run(rank, cta, fibers);
    const auto touched = [&](const unsigned char* from) {
      return std::any_of(from, from + guard, [](unsigned char byte) { return byte != poison; });
    };
    if (touched(shared - guard) || touched(shared + shape_.shared_bytes)) {
      std::fprintf(stderr, "tfla: %s, CTA %u: wrote outside of its shared memory\n", cta.kernel, number);
      std::abort();
    }
  }
}

void Launch::run() {
  if (shape_.cluster == 1) return run_rank(0);
  std::vector<std::thread> threads;
  for (unsigned rank = 0; rank < shape_.cluster; ++rank) threads.emplace_back([this, rank] { run_rank(rank); });
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

void fail(const std::string& sentence) {
  std::fprintf(stderr, "tfla: %s: %s\n", where(self()).c_str(), sentence.c_str());
  std::abort();
}

void CopyGroups::commit() {
  groups.push_back(std::move(open));
  open.clear();
}

void CopyGroups::finish(std::size_t all_but) {
  while (groups.size() > all_but) {
    for (const auto& copy : groups.front()) copy();
    groups.erase(groups.begin());
  }
}

void wait_while(const volatile unsigned* word, unsigned mask, unsigned value, const char* waits_for) {
  if ((*word & mask) != value) return;
  Thread& own = self();
  own.word = word;
  own.mask = mask;
  own.value = value;
  own.waits_for = waits_for;
  yield();
}

void meet(unsigned mask, void* arguments, Meeting::Work work) {
  Thread& own = self();
  if ((mask >> own.lane() & 1) == 0) fail("a lane meets others by a mask without itself");
  auto& meetings = own.warp->meetings;
  auto found = std::find_if(meetings.begin(), meetings.end(), [&](const auto& any) { return any->mask == mask; });
  if (found == meetings.end()) {
    found = meetings.insert(meetings.end(), std::make_unique<Meeting>());
    (*found)->mask = mask;
  }
  Meeting& meeting = **found;
  if (meeting.arrived != 0 && meeting.work != work) fail("lanes of a warp meet at different instructions");
  meeting.work = work;
  meeting.lanes[own.lane()] = arguments;
  meeting.arrived |= 1U << own.lane();
  if (meeting.arrived != mask) return wait_while(&meeting.round, ~0U, meeting.round, "the other lanes of its warp");
  meeting.arrived = 0;
  work(meeting.lanes.data(), mask);
  ++meeting.round;
}

void meet_warp(unsigned mask) {
  meet(mask, nullptr, [](void* const*, unsigned) {});
}

void barrier_arrive(unsigned barrier, unsigned threads) {
  if (barrier >= named_barriers) fail("there are 16 named barriers");
  Barrier& own = self().cta->barriers[barrier];
  ++own.arrived;
  complete(own, threads);
}

void barrier_wait(unsigned barrier, unsigned threads) {
  Barrier& own = self().cta->barriers[barrier];
  const unsigned round = own.round;
  barrier_arrive(barrier, threads);
  wait_while(&own.round, ~0U, round, "a named barrier");
}

bool barrier_all(unsigned barrier, unsigned threads, bool holds) {
  Barrier& own = self().cta->barriers[barrier];
  own.all = own.all && holds;
  barrier_wait(barrier, threads);
  return own.all_of_last_round;
}

void sync_threads() { barrier_wait(0, self().cta->live); }

void cluster_arrive() {
  Cluster& cluster = *self().cta->cluster;
  self().cluster_round = cluster.barrier.round;
  ++cluster.barrier.arrived;
  complete(cluster.barrier, cluster.live);
}

void cluster_wait() {
  wait_while(&self().cta->cluster->barrier.round, ~0U, self().cluster_round, "the barrier of its cluster");
}

bool at_once() { return self().cta->random() % 2 == 0; }

void fly(std::function<void()> copy) {
  if (at_once()) return copy();
  self().cta->in_flight.push_back(std::move(copy));
}

void copy(void* shared, const void* global, int bytes, int valid) {
  if (reinterpret_cast<std::uintptr_t>(shared) % static_cast<unsigned>(bytes) != 0 ||
      (valid > 0 && reinterpret_cast<std::uintptr_t>(global) % static_cast<unsigned>(bytes) != 0))
    fail("an asynchronous copy is not aligned");
  const auto move = [=] {
    if (valid > 0) std::memcpy(shared, global, static_cast<std::size_t>(valid));
    std::memset(static_cast<char*>(shared) + valid, 0, static_cast<std::size_t>(bytes - valid));
  };
  if (at_once()) return move();
  self().copies.add(move);
}

void arrive_after_copies(unsigned barrier) {
  Thread& own = self();
  Cta* cta = own.cta;
  own.copies.commit();
  auto groups = std::move(own.copies.groups);
  own.copies.groups.clear();
  fly([=] {
    for (const auto& group : groups)
      for (const auto& move : group) move();
    as_thread_of(*cta, [=] { mbarrier_arrive(barrier, 1); });
  });
}

void as_thread_of(Cta& cta, const std::function<void()>& work) {
  Thread stand_in;
  stand_in.cta = &cta;
  Thread* before = std::exchange(current, &stand_in);
  work();
  current = before;
}

unsigned char* shared_at(unsigned address, std::size_t bytes) {
  const Cta& cta = *self().cta;
  if (address + bytes > cta.shared_bytes)
    fail("shared memory has " + std::to_string(cta.shared_bytes) + " bytes, and " + std::to_string(bytes) + " at " +
         std::to_string(address) + " were asked for");
  return cta.shared + address;
}

unsigned shared_address(const void* pointer) {
  const Cta& cta = *self().cta;
  const auto* at = static_cast<const unsigned char*>(pointer);
  if (at >= cta.shared && at < cta.shared + cta.shared_bytes) return static_cast<unsigned>(at - cta.shared);
  return outside_of_shared + static_cast<unsigned>(at - reinterpret_cast<const unsigned char*>(&anchor));
}

const void* of_cta(const void* own, unsigned rank) {
  const auto offset = static_cast<const char*>(own) - &anchor;
  return self().cta->cluster->anchors.at(rank) + offset;
}

namespace {

// 8 bytes of shared memory. `state`: the parity of the phase in bit 0, arrivals of a phase in the next 15, those that
// are still to come in the upper half.
struct MemoryBarrier {
  int bytes;
  unsigned state;

  [[nodiscard]] unsigned expected() const { return state >> 1 & 0x7FFF; }
  [[nodiscard]] unsigned pending() const { return state >> 16; }
  void set(unsigned parity, unsigned arrivals, unsigned to_come) { state = parity | arrivals << 1 | to_come << 16; }
  void end_phase() {
    if (pending() == 0 && bytes == 0) set((state & 1) ^ 1, expected(), expected());
  }
};

MemoryBarrier& barrier_at(unsigned address) {
  if (address % 8 != 0) fail("a barrier in shared memory is aligned to 8 bytes");
  auto& barrier = *reinterpret_cast<MemoryBarrier*>(shared_at(address, sizeof(MemoryBarrier)));
  if (barrier.expected() == 0 || barrier.pending() > barrier.expected() || barrier.state == ~0U)
    fail("there is no barrier at " + std::to_string(address));
  return barrier;
}

}  // namespace

void mbarrier_init(unsigned address, unsigned arrivals) {
  if (address % 8 != 0) fail("a barrier in shared memory is aligned to 8 bytes");
  auto& barrier = *reinterpret_cast<MemoryBarrier*>(shared_at(address, sizeof(MemoryBarrier)));
  barrier.bytes = 0;
  barrier.set(0, arrivals, arrivals);
}

void mbarrier_arrive(unsigned address, unsigned count) {
  MemoryBarrier& barrier = barrier_at(address);
  if (barrier.pending() < count) fail("more arrivals than the barrier at " + std::to_string(address) + " counts");
  barrier.set(barrier.state & 1, barrier.expected(), barrier.pending() - count);
  barrier.end_phase();
}

void mbarrier_expect(unsigned address, unsigned bytes) { barrier_at(address).bytes += static_cast<int>(bytes); }

void mbarrier_received(unsigned address, unsigned bytes) {
  MemoryBarrier& barrier = barrier_at(address);
  barrier.bytes -= static_cast<int>(bytes);
  barrier.end_phase();
}

void mbarrier_wait(unsigned address, unsigned parity) {
  const MemoryBarrier& barrier = barrier_at(address);
  wait_while(&barrier.state, 1, parity & 1, "a barrier in shared memory");
}

void launch(const LaunchShape& shape, const std::function<void()>& kernel) { Launch(shape, kernel).run(); }

}  // namespace tfla::emulator
