"""The language model experiments of docs/experiments: tables of training runs, recall, times of a step, and their page.

python -m benchmarks.lm.experiments --help
"""
