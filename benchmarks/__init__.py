"""Measurements and the pages that they write, run from the root of the repository: python -m benchmarks.cpu.compare."""
