"""The operator with its input and forget gates."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tfla import distributed
from tfla._gates import soft_capped
from tfla._options import DEFAULTS, Gate, Keep, Normalizer
from tfla.ops import State, mlstm, mlstm_step

Mode = Literal["train", "prefill", "decode"]


class ScalarGate(nn.Linear):
    """Pre-activations of a gate: weights begin at zero, biases evenly spaced over heads."""

    def __init__(self, dim: int, heads: int, biases: tuple[float, float], **factory: Any) -> None:
        self.biases = biases
        super().__init__(dim, heads, **factory)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.weight.zero_()
        self.bias.copy_(torch.linspace(*self.biases, self.out_features))

    def forward(self, x: Tensor) -> Tensor:
        return self.biased(F.linear(x, self.weight.to(x.dtype)))

    def biased(self, product: Tensor) -> Tensor:
        # The bias is the larger part; added in float32 it is not rounded to 16 bits under autocast.
        return product + self.bias if product.dtype == torch.float64 else product.float() + self.bias.float()


class MLSTMCell(nn.Module):
    """Gates from the layer's input, then the operator on q, k, v.

    Gate weights begin at zero and biases at -10 (input) and linspace(3, 6) over heads (forget), so that a new cell
    remembers long and takes up input slowly; pre-activations are capped softly at `soft_cap`.

    With `track_gates` the attribute `input_gate_max` holds the largest input gate pre-activation, after the cap, of the
    last call that was not decoding.
    """

    input_gate_max: Tensor

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        gate: Gate = DEFAULTS.gate,
        normalizer: Normalizer | None = DEFAULTS.normalizer,
        eps: float = DEFAULTS.eps,
        soft_cap: float | None = 15.0,
        chunk_size: int | None = DEFAULTS.chunk_size,
        exact_normalizer_grad: bool = DEFAULTS.exact_normalizer_grad,
        keep: Keep = DEFAULTS.keep,
        input_gate_bias: float = -10.0,
        forget_gate_bias: tuple[float, float] = (3.0, 6.0),
        train_input_gate: bool = True,
        reset: float = float("-inf"),
        track_gates: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """reset: the forget gate's pre-activation, after the cap, where `starts` is set; -inf clears the state."""
        super().__init__()
        self.heads = heads
        self.gate: Gate = gate
        self.normalizer: Normalizer | None = normalizer
        self.eps = eps
        self.soft_cap = soft_cap
        self.chunk_size = chunk_size
        self.exact_normalizer_grad = exact_normalizer_grad
        self.keep: Keep = keep
        self.reset, self.track_gates = reset, track_gates
        self.input_gate = ScalarGate(dim, heads, (input_gate_bias, input_gate_bias), device=device, dtype=dtype)
        self.input_gate.requires_grad_(train_input_gate)
        self.forget_gate = ScalarGate(dim, heads, forget_gate_bias, device=device, dtype=dtype)

    def forward(
        self,
        x: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: State | None = None,
        *,
        mode: Mode = "train",
        cu_seqlens: Tensor | None = None,
        slots: Tensor | None = None,
        starts: Tensor | None = None,
        group: dist.ProcessGroup | None = None,
        products: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, State | None]:
        """h (B,T,H,dhv) and the state after it, for x (B,T,dim), q, k (B,T,Hqk,dqk), v (B,T,H,dhv).

        mode "train" returns no state; "prefill" returns one; "decode" updates the given one in place and returns it.
        starts (B,T) bool: first tokens of documents, where the state is reset. group: the tokens are this rank's
        stretch of a sequence that lies on the ranks of the group (context parallel). products: x times the weights of
        input and forget gate, by who multiplied them together with others (`fused`).
        """
        if products is not None:
            i, f = self.input_gate.biased(products[0]), self.forget_gate.biased(products[1])
        else:
            i, f = self.input_gate(x), self.forget_gate(x)
        soft_cap = self.soft_cap
        if mode == "decode":
            if state is None or cu_seqlens is not None or starts is not None or group is not None:
                raise ValueError("tfla: mode is 'decode', which needs state and takes no cu_seqlens, starts or group")
            h = mlstm_step(
                q, k, v, i, f, state, gate=self.gate, normalizer=self.normalizer, slots=slots, eps=self.eps,
                soft_cap=self.soft_cap,
            )  # fmt: skip
            return h, state
        if mode not in ("train", "prefill"):
            raise ValueError(f"tfla: mode is {mode!r}; it must be 'train', 'prefill' or 'decode'")
        if slots is not None:
            raise ValueError(f"tfla: slots is given with mode {mode!r}; only 'decode' takes slots")
        if self.track_gates and i.numel() > 0:
            largest = i.detach().amax()
            self.input_gate_max = soft_capped(largest, soft_cap)
        if starts is not None:
            # A reset is below the cap, so the cap cannot be left to the operator.
            i, f = soft_capped(i, soft_cap), soft_capped(f, soft_cap)
            soft_cap = None
            f = f.masked_fill(starts.unsqueeze(-1), self.reset)
        options: dict[str, Any] = {
            "gate": self.gate,
            "normalizer": self.normalizer,
            "initial_state": state,
            "chunk_size": self.chunk_size,
            "eps": self.eps,
            "soft_cap": soft_cap,
            "exact_normalizer_grad": self.exact_normalizer_grad,
            "keep": self.keep,
        }
        if group is not None:
            if cu_seqlens is not None:
                raise ValueError("tfla: cu_seqlens is given with group; context parallel separates documents by starts")
            result = distributed.mlstm(q, k, v, i, f, group=group, output_final_state=mode == "prefill", **options)
            return result if isinstance(result, tuple) else (result, None)
        options["cu_seqlens"] = cu_seqlens
        if mode == "prefill":
            return mlstm(q, k, v, i, f, output_final_state=True, **options)
        return mlstm(q, k, v, i, f, **options), None

    def extra_repr(self) -> str:
        return f"gate={self.gate!r}, normalizer={self.normalizer!r}, eps={self.eps}, soft_cap={self.soft_cap}"
