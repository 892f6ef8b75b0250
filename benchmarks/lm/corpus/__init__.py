"""The text of the language model experiments: documentation, manuals and sources of Debian packages, as tokens.

python -m benchmarks.lm.corpus --help
"""
