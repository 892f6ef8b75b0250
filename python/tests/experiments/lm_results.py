"""Results of the experiments as made up, for the tests of what is done with them."""

from __future__ import annotations

ABOUT = {"device": "made up", "date": "2026-01-02", "python": "3.12.3", "packages": {"tfla": "0.1.0"}}


def made_up(run, loss, **changes):
    """A result as training.train makes it."""
    context, last = run.context, 0.0 if loss is None else loss
    curve = {
        "tokens": [1e6, 2e6, 3e6], "loss": [last + 2, last + 1, last], "norm": [1.0] * 3, "norm_max": [2.0] * 3,
        "input_gate_max": [None if run.model == "transformer" else -3.0] * 3,
    }  # fmt: skip
    gate = [{"mean": -1.25, "deviation": 0.5, "least": -9.0, "largest": 3.0}] * 2
    return {
        "about": ABOUT, "data": {"fingerprint": "0", "tokens": 4e7}, "lr": run.lr or 3e-3, "steps": run.steps,
        "context": context, "batch": run.batch, "seed": run.seed, "failed": None, "validation_loss": loss,
        "curve": curve, "spikes": 1, "norm_median": 1.0, "norm_largest": 2.0, "tokens": run.tokens, "mfu": 0.3,
        "tokens_per_second": 1000.0, "seconds": run.tokens / 1000.0 + 7,
        "gates": None if run.model == "transformer" else {"input": gate},
        "positions": {"context": context, "rows": 4, "tokens_per_bin": context // 4,
                      "loss": [last + 0.01 * j for j in range(32)]}, **changes,
    }  # fmt: skip
