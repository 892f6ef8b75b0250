"""A training run: the loop, its optimizer and loss, the ranks it runs on, its checkpoints and its log."""
