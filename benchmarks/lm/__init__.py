"""Training steps beside published packages, and the experiments of docs/experiments."""
