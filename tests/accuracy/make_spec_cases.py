#!/usr/bin/env python3
"""Write spec_cases.inc: what the executable specification (mlstm_spec.py) says about small problems.

Usage: make_spec_cases.py PATH/TO/mlstm_spec.py > tests/accuracy/spec_cases.inc

Inputs are not stored: both sides draw them from the same little generator (see `numbers`, and Numbers in
spec_test.cc), whose values are exact in double.
"""

import importlib.util
import sys

import numpy as np

SHAPES = ((7, 3, 4, 3), (9, 2, 3, 4), (6, 4, 2, 6), (5, 1, 1, 1), (8, 3, 2, 100))  # T, dqk, dhv, chunk size
VARIANTS = (("exp", "max"), ("exp", "none"), ("sig", "max"), ("sig", "none"))


def numbers(seed):
    """An endless sequence in [-1, 1): the upper 24 bits of a 64-bit linear congruential generator."""
    state = seed
    while True:
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        yield (state >> 40) / 2**23 - 1


def draw(source, *shape):
    return np.array([next(source) for _ in range(int(np.prod(shape)))]).reshape(shape)


def cases():
    seed = 0
    for gate, norm in VARIANTS:
        for with_state in (False, True):
            for exact in (False, True) if norm == "max" else (False,):
                seed += 1
                yield seed, gate, norm, with_state, exact, *SHAPES[seed % len(SHAPES)]


def evaluate(spec, seed, gate, norm, with_state, exact, T, dqk, dhv, L):
    source = numbers(seed)
    q, k, v = 2 * draw(source, T, dqk), 2 * draw(source, T, dqk), 2 * draw(source, T, dhv)
    i, f, dh = 4 * draw(source, T), 4 * draw(source, T) + 1, 2 * draw(source, T, dhv)
    C0, n0, m0 = 2 * draw(source, dqk, dhv), 2 * draw(source, dqk), draw(source, 1)[0]
    dC, dn = 2 * draw(source, dqk, dhv), 2 * draw(source, dqk)
    state = (C0, n0, m0) if with_state else None
    h, (C, n, m) = spec.recurrent(q, k, v, i, f, gate, norm, state)
    grads = spec.chunkwise_backward(
        q, k, v, i, f, dh, L, gate, norm, state, dC if with_state else None, dn if with_state else None, exact
    )
    return [h, C, n, np.array([m]), *grads]


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    loader = importlib.util.spec_from_file_location("mlstm_spec", sys.argv[1])
    spec = importlib.util.module_from_spec(loader)
    loader.loader.exec_module(spec)
    print("// Written by make_spec_cases.py from mlstm_spec.py; see SpecCase in spec_test.cc for the fields.")
    for seed, gate, norm, with_state, exact, T, dqk, dhv, L in cases():
        tensors = evaluate(spec, seed, gate, norm, with_state, exact, T, dqk, dhv, L)
        cxx_gate = "exponential" if gate == "exp" else "sigmoid"
        flags = f"{'true' if with_state else 'false'}, {'true' if exact else 'false'}"
        print(f"{{{seed}, InputGate::{cxx_gate}, Normalizer::{norm}, {flags}, {T}, {dqk}, {dhv}, {L},")
        for x in tensors:
            print(" {" + ",".join(repr(float(y)) for y in x.ravel()) + "},")
        print("},")


if __name__ == "__main__":
    main()
