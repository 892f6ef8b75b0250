"""The operators of bindings/torch*.cc with all that PyTorch must know about them.

    operators     loads the library and names the operators of the mLSTM
    derivatives   what their gradients are: the plain way to call them, right everywhere
    fast_path     the same with less host time; a reader may skip it
    fake          shapes, dtypes and devices of results, for torch.compile
    vmap          torch.vmap
    delta         all of these for the operators of the delta rule
    conv          the same for those of the convolution
    ssd           the same for those of the state space dual
    transforms    torch.func
    autocast      torch.autocast
    memory        out of memory, as torch says it
    ssd_composed  that operator by way of the mLSTM, above tfla.ops: tfla.state_space imports it

Private, and not `tfla.torch`: that would read as the counterpart of `tfla.jax`, which is `tfla` itself. Importing any
of the others imports them all, so that operators are never without their derivatives.
"""

from tfla._torch import conv, delta, derivatives, fake, fast_path, operators, ssd, vmap

__all__ = ["conv", "delta", "derivatives", "fake", "fast_path", "operators", "ssd", "vmap"]
