#include "emulator/tiles.h"

#include <cstring>

#include "emulator/machine.h"

namespace tfla::emulator {

namespace {

constexpr unsigned whole_warp = ~0U;
constexpr unsigned tile_row_bytes = 16;

struct TileMove {
  unsigned row;
  bool transposed;
  std::array<std::uint32_t, 4> tiles;
};

unsigned address_of(TileMove* const* lanes, unsigned tile, unsigned row) {
  const unsigned address = lanes[8 * tile + row]->row;
  if (address % tile_row_bytes != 0) fail("a row of a tile is not aligned to 16 bytes");
  return address;
}

std::uint16_t number_at(TileMove* const* lanes, unsigned tile, unsigned row, unsigned column) {
  std::uint16_t number;
  std::memcpy(&number, shared_at(address_of(lanes, tile, row) + 2 * column, 2), 2);
  return number;
}

void load_all(TileMove* const* lanes, unsigned) {
  for (unsigned lane = 0; lane < warp_lanes; ++lane) {
    for (unsigned tile = 0; tile < 4; ++tile) {
      const unsigned outer = lane / 4, inner = lane % 4 * 2;
      const bool turned = lanes[lane]->transposed;
      const std::uint16_t first = turned ? number_at(lanes, tile, inner, outer) : number_at(lanes, tile, outer, inner);
      const std::uint16_t second =
          turned ? number_at(lanes, tile, inner + 1, outer) : number_at(lanes, tile, outer, inner + 1);
      lanes[lane]->tiles[tile] = first | static_cast<std::uint32_t>(second) << 16;
    }
  }
}

void store_number(unsigned address, std::uint32_t number) {
  const auto half = static_cast<std::uint16_t>(number);
  std::memcpy(shared_at(address, 2), &half, 2);
}

void store_all(TileMove* const* lanes, unsigned) {
  for (unsigned lane = 0; lane < warp_lanes; ++lane) {
    for (unsigned tile = 0; tile < 4; ++tile) {
      const unsigned outer = lane / 4, inner = lane % 4 * 2;
      for (unsigned e = 0; e < 2; ++e) {
        const unsigned row = lanes[lane]->transposed ? inner + e : outer;
        const unsigned column = lanes[lane]->transposed ? outer : inner + e;
        store_number(address_of(lanes, tile, row) + 2 * column, lanes[lane]->tiles[tile] >> 16 * e);
      }
    }
  }
}

struct TileProduct {
  float* d;
  const std::uint32_t* a;
  std::uint32_t b[2];
  Item item;
};

void multiply_all(TileProduct* const* lanes, unsigned) {
  const Item item = lanes[0]->item;
  float a[16][16], b[16][8];
  for (unsigned lane = 0; lane < warp_lanes; ++lane) {
    for (unsigned r = 0; r < 4; ++r) {
      const unsigned row = lane / 4 + r % 2 * 8, column = lane % 4 * 2 + r / 2 * 8;
      a[row][column] = widen(item, static_cast<std::uint16_t>(lanes[lane]->a[r]));
      a[row][column + 1] = widen(item, static_cast<std::uint16_t>(lanes[lane]->a[r] >> 16));
    }
    for (unsigned r = 0; r < 2; ++r) {
      const unsigned row = lane % 4 * 2 + r * 8;
      b[row][lane / 4] = widen(item, static_cast<std::uint16_t>(lanes[lane]->b[r]));
      b[row + 1][lane / 4] = widen(item, static_cast<std::uint16_t>(lanes[lane]->b[r] >> 16));
    }
  }
  float out[16][8] = {};
  for (unsigned r = 0; r < 16; ++r)
    for (unsigned k = 0; k < 16; ++k)
      for (unsigned n = 0; n < 8; ++n) out[r][n] += a[r][k] * b[k][n];
  for (unsigned lane = 0; lane < warp_lanes; ++lane)
    for (unsigned e = 0; e < 4; ++e) lanes[lane]->d[e] += out[lane / 4 + e / 2 * 8][lane % 4 * 2 + e % 2];
}

struct LaneOfProduct {
  const Product* product;
  float* sums;
  float* more;
  const std::uint32_t* a;
};

void begin_all(LaneOfProduct* const* lanes, unsigned) {
  Product product = *lanes[0]->product;
  for (unsigned lane = 0; lane < warp_lanes; ++lane) {
    const LaneOfProduct& own = *lanes[lane];
    if (own.product->a != product.a || own.product->b != product.b || own.product->adds != product.adds)
      fail("lanes of a warp ask for different products");
    product.sums[lane] = own.sums;
    product.more[lane] = own.more;
    if (own.a != nullptr) std::memcpy(product.a_registers[lane].data(), own.a, sizeof(product.a_registers[lane]));
  }
  const Thread& thread = self();
  product.warp_of_group = static_cast<int>(thread.number / warp_lanes % 4);
  if (at_once() && thread.warp->open.empty() && thread.warp->batches.empty())
    multiply(product);  // whose sums later products may take up
  else
    thread.warp->open.push_back(product);
}

struct Nothing {};

void commit_all(Nothing* const*, unsigned) {
  Warp& warp = *self().warp;
  warp.batches.push_back(std::move(warp.open));
  warp.open.clear();
}

struct Rest {
  std::size_t batches;
};

void finish_all(Rest* const* lanes, unsigned) {
  Warp& warp = *self().warp;
  while (warp.batches.size() > lanes[0]->batches) {
    for (const Product& product : warp.batches.front()) multiply(product);
    warp.batches.erase(warp.batches.begin());
  }
}

}  // namespace

void load_tiles(std::uint32_t (&tiles)[4], unsigned row, bool transposed) {
  TileMove own{row, transposed, {}};
  together<TileMove, load_all>(whole_warp, own);
  for (unsigned tile = 0; tile < 4; ++tile) tiles[tile] = own.tiles[tile];
}

void store_tiles(unsigned row, const std::array<std::uint32_t, 4>& tiles, bool transposed) {
  TileMove own{row, transposed, tiles};
  together<TileMove, store_all>(whole_warp, own);
}

void multiply_tiles(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1, Item item) {
  TileProduct own{d, a, {b0, b1}, item};
  together<TileProduct, multiply_all>(whole_warp, own);
}

void begin_product(Product product, float* sums, float* more, const std::uint32_t* a) {
  LaneOfProduct own{&product, sums, more, a};
  together<LaneOfProduct, begin_all>(whole_warp, own);
}

void commit_products() {
  Nothing own;
  together<Nothing, commit_all>(whole_warp, own);
}

void finish_products(std::size_t all_but) {
  Rest own{all_but};
  together<Rest, finish_all>(whole_warp, own);
}

}  // namespace tfla::emulator
