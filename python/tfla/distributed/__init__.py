"""One sequence over several devices (context parallel), on torch.distributed.

Rank r holds the r-th stretch of tokens. Every rank computes what its tokens make of a state, one all-gather tells all
of them, and each runs its tokens from the state before them.
"""

from tfla.distributed._delta import delta_rule
from tfla.distributed._mlstm import mlstm

__all__ = ["delta_rule", "mlstm"]
