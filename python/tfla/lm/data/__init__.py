"""Text to tokens to batches: `prepare` writes a dataset, `Dataset` reads it."""

from tfla.lm.data.dataset import Batch, Dataset, Order, boundaries, make_batch

__all__ = ["Batch", "Dataset", "Order", "boundaries", "make_batch"]
