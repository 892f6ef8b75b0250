"""How threads wait for each other; imported before torch, whose OpenMP runtime reads the environment as it is loaded.

libgomp's threads spin for 300,000 turns, about ten milliseconds, before they sleep. Where other programs want the cores
as well, each such wait takes the time of the very thread that is waited for: two busy programs beside a training on two
cores make it many times slower. A spin that covers the gap between two operators is enough.
"""

from __future__ import annotations

import os

if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")  # some 0.1 ms
