// Random numbers that depend on nothing but (seed, stream, index), and the gate distributions drawn from them.
#pragma once

#include <cstdint>

namespace tfla::reference {

// The gate distributions of docs/numerics.md.
enum class Regime : std::uint8_t { randn, init, trained_like, large_i, capped_extremes, never_forget, resets };
inline constexpr Regime all_regimes[] = {
    Regime::randn,           Regime::init,         Regime::trained_like, Regime::large_i,
    Regime::capped_extremes, Regime::never_forget, Regime::resets};
[[nodiscard]] const char* name(Regime regime);

// Which tensor a number belongs to: each has a sequence of its own.
enum class Stream : std::uint8_t { q, k, v, i, f, dh, C0, n0, m0, dC_last, dn_last };

// 64 well-mixed bits (splitmix64).
[[nodiscard]] std::uint64_t mix(std::uint64_t value);

// Standard normal; the same on every machine, thread count and memory layout.
[[nodiscard]] double normal(std::uint64_t seed, Stream stream, std::int64_t index);

// The raw gate of one token. `noise` is a standard normal, `head` of `heads` sets its place in linspace(3, 6).
[[nodiscard]] double input_gate(Regime regime, double noise);
[[nodiscard]] double forget_gate(Regime regime, double noise, std::int64_t token, std::int64_t head,
                                 std::int64_t heads);

// A power of two for v and dh when they are stored in float16. With N(0, 1) the small input gates of some regimes
// make h and the gradients subnormal there, and the small denominators of large_i come near its end; then the range of
// the type would be measured, not the arithmetic. Relative errors do not depend on the scale.
[[nodiscard]] double float16_scale(Regime regime);

}  // namespace tfla::reference
