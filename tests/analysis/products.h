// Counts the operations of every matrix product in this program.
#pragma once

namespace tfla::test {

void reset_product_count();
[[nodiscard]] double counted_flops();

}  // namespace tfla::test
