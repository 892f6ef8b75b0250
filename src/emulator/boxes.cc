#include "emulator/boxes.h"

#include <cstring>
#include <string>

#include "emulator/machine.h"

namespace tfla::emulator {

namespace {

constexpr unsigned item = 2, row_bytes = 128;

// Calls with(shared address, global address or null) for every element of a box.
template <class With>
void for_each(unsigned shared, const CUtensorMap& map, const Place& place, const With& with) {
  unsigned row = 0;
  for (unsigned d = 0; d < (map.rank > 3 ? map.box[3] : 1); ++d)
    for (unsigned c = 0; c < map.box[2]; ++c)
      for (unsigned b = 0; b < map.box[1]; ++b, ++row) {
        const std::int64_t at[4] = {place[0], std::int64_t{place[1]} + b, std::int64_t{place[2]} + c,
                                    std::int64_t{place[3]} + d};
        bool inside = true;
        std::uintptr_t from = map.data;
        for (unsigned axis = 1; axis < map.rank; ++axis) {
          inside = inside && at[axis] >= 0 && at[axis] < map.sizes[axis];
          from += static_cast<std::uintptr_t>(at[axis]) * map.strides[axis - 1];
        }
        for (unsigned column = 0; column < map.box[0]; ++column) {
          const std::int64_t x = at[0] + column;
          const bool there = inside && x >= 0 && x < map.sizes[0];
          const unsigned address = shared + row * row_bytes + column * item;
          with(address ^ (address >> 7 & 7) << 4,
               there ? reinterpret_cast<void*>(from + static_cast<std::uintptr_t>(x) * item) : nullptr);
        }
      }
}

unsigned bytes_of(const CUtensorMap& map) {
  unsigned bytes = item;
  for (unsigned axis = 0; axis < map.rank; ++axis) bytes *= map.box[axis];
  return bytes;
}

void check(unsigned shared, const CUtensorMap& map) {
  if (shared % row_bytes != 0) fail("a box lies at " + std::to_string(shared) + " in shared memory, not at 128 bytes");
  if (map.rank < 3 || map.rank > 4) fail("a tensor map that was never made");
  (void)shared_at(shared, bytes_of(map));
}

}  // namespace

void load_box(unsigned shared, const CUtensorMap& map, unsigned barrier, const Place& place) {
  check(shared, map);
  Cta* cta = self().cta;
  fly([=] {
    as_thread_of(*cta, [&] {
      for_each(shared, map, place, [](unsigned address, const void* from) {
        unsigned char* to = shared_at(address, item);
        if (from == nullptr)
          std::memset(to, 0, item);
        else
          std::memcpy(to, from, item);
      });
      mbarrier_received(barrier, bytes_of(map));
    });
  });
}

void store_box(unsigned shared, const CUtensorMap& map, const Place& place) {
  check(shared, map);
  const auto copy = [=] {
    for_each(shared, map, place, [](unsigned address, void* to) {
      if (to != nullptr) std::memcpy(to, shared_at(address, item), item);
    });
  };
  self().stores.add(copy);
}

}  // namespace tfla::emulator
