#!/usr/bin/env python3
"""Write delta_cases.inc: what the executable specification (delta_spec.py) says about small problems.

Usage: make_delta_cases.py PATH/TO/delta_spec.py > tests/delta/delta_cases.inc

Inputs are not stored: both sides draw them from the same little generator (see `numbers`, and Numbers in
reference_test.cc), whose values are exact in double.
"""

import importlib.util
import sys

import numpy as np

# T, dqk, dhv, chunk size, gated, with states, resets
CASES = (
    (7, 3, 4, 3, True, False, False),
    (9, 2, 3, 4, True, True, False),
    (6, 4, 2, 6, False, True, False),
    (5, 1, 1, 1, True, True, False),
    (8, 3, 2, 100, False, False, False),
    (17, 5, 3, 16, True, True, False),
    (8, 3, 3, 1, True, True, True),
)


def numbers(seed):
    """An endless sequence in [-1, 1): the upper 24 bits of a 64-bit linear congruential generator."""
    state = seed
    while True:
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        yield (state >> 40) / 2**23 - 1


def draw(source, *shape):
    return np.array([next(source) for _ in range(int(np.prod(shape)))]).reshape(shape)


def evaluate(spec, seed, T, dqk, dhv, L, gated, with_states, resets):
    source = numbers(seed)
    q, k, v = 2 * draw(source, T, dqk), draw(source, T, dqk), 2 * draw(source, T, dhv)
    beta, g, dh = draw(source, T) + 1, draw(source, T) - 1, 2 * draw(source, T, dhv)
    C0, dC = 2 * draw(source, dqk, dhv), 2 * draw(source, dqk, dhv)
    if resets:
        g[::3] = -1e4  # exp of it is 0; minus infinity would make a NaN of differences in the specification's chunks
    if not gated:
        g = np.zeros(T)
    state, dstate = (C0, dC) if with_states else (None, None)
    h, C = spec.recurrent(q, k, v, beta, g, C=state)
    return [h, C, *spec.chunkwise_backward(q, k, v, beta, g, dh, L, C=state, dC=dstate)]


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    loader = importlib.util.spec_from_file_location("delta_spec", sys.argv[1])
    spec = importlib.util.module_from_spec(loader)
    loader.loader.exec_module(spec)
    print("// Written by make_delta_cases.py from delta_spec.py; see SpecCase in reference_test.cc for the fields.")
    for seed, case in enumerate(CASES, start=1):
        T, dqk, dhv, L, *flags = case
        print(f"{{{seed}, {T}, {dqk}, {dhv}, {L}, {', '.join('true' if flag else 'false' for flag in flags)},")
        for x in evaluate(spec, seed, *case):
            print(" {" + ",".join(repr(float(y)) for y in x.ravel()) + "},")
        print("},")


if __name__ == "__main__":
    main()
