"""Measurements of tfla.lm."""

import tfla.lm  # noqa: F401  before torch, whose threads wait as `tfla.lm._waiting` says
