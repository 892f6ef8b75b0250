"""Modules around the operators.

`MLSTMCell` (gates, operator), `MLSTMLayer` (projections, cell, norm, output gate); `GatedDeltaNet` for the delta rule;
`Mamba2` for the state space dual.
"""

from tfla.nn.cell import MLSTMCell
from tfla.nn.delta import GatedDeltaNet
from tfla.nn.delta_state import DeltaState
from tfla.nn.layer import MLSTMLayer
from tfla.nn.linear import Linear
from tfla.nn.mamba2 import Mamba2
from tfla.nn.mamba2_state import Mamba2State
from tfla.nn.short_conv import ShortConvolution
from tfla.state import State

__all__ = [
    "DeltaState",
    "GatedDeltaNet",
    "Linear",
    "MLSTMCell",
    "MLSTMLayer",
    "Mamba2",
    "Mamba2State",
    "ShortConvolution",
    "State",
]
