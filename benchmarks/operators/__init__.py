"""Operators through PyTorch beside other packages, on a GPU."""
