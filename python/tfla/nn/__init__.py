"""Modules around the operator: `MLSTMCell` (gates, operator), `MLSTMLayer` (projections, cell, norm, output gate)."""

from tfla.nn.cell import MLSTMCell
from tfla.nn.layer import MLSTMLayer
from tfla.nn.linear import Linear
from tfla.state import State

__all__ = ["Linear", "MLSTMCell", "MLSTMLayer", "State"]
