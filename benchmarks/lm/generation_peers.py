"""Generation by the published packages, of the same shape with random weights: transformers' xLSTM and xlstm."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.lm.step_time import XLSTM_KERNELS
from tfla.lm.config import ModelConfig
from tfla.lm.models import find


def _clock(step: Callable[[Tensor], Tensor], tokens: Tensor, count: int) -> float:
    """Milliseconds a token of greedy steps; tokens stay on the device, which costs a package nothing."""
    for _ in range(3):
        tokens = step(tokens)
    tokens.tolist()
    begin = time.perf_counter()
    for _ in range(count):
        tokens = step(tokens)
    tokens.tolist()
    return 1e3 * (time.perf_counter() - begin) / count


def _transformers(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Any:
    from transformers import xLSTMConfig, xLSTMForCausalLM

    exchange = find(config.kind).exchange
    assert exchange is not None
    fields = exchange.fields(config, "huggingface", None)
    with device:
        return xLSTMForCausalLM(xLSTMConfig(**fields)).to(dtype).eval()


def transformers_step(config: ModelConfig, prompts: Tensor, dtype: torch.dtype, count: int) -> float:
    """A loop over its forward with its cache."""
    model = _transformers(config, dtype, prompts.device)
    cache = model(prompts, use_cache=True).cache_params

    def step(tokens: Tensor) -> Tensor:
        return model(tokens[:, None], cache_params=cache, use_cache=True).logits[:, -1].argmax(-1)

    return _clock(step, prompts[:, 0], count)


def transformers_generate(config: ModelConfig, prompts: Tensor, dtype: torch.dtype, count: int) -> float:
    """Its `generate`: what more tokens take than fewer."""
    model, times = _transformers(config, dtype, prompts.device), []
    for more in (2, 2, 2 + count):  # the first one sets up
        begin = time.perf_counter()
        model.generate(prompts, min_new_tokens=more, max_new_tokens=more, do_sample=False, pad_token_id=0).tolist()
        times.append(time.perf_counter() - begin)
    return 1e3 * (times[2] - times[1]) / count


def xlstm_step(config: ModelConfig, prompts: Tensor, dtype: torch.dtype, count: int) -> float:
    """The package xlstm: a loop over its forward with its states, with its Triton kernels on a GPU."""
    from xlstm.xlstm_large.model import xLSTMLarge, xLSTMLargeConfig

    chunkwise, sequence, step_kernel = XLSTM_KERNELS[prompts.device.type]
    fields = xLSTMLargeConfig(
        embedding_dim=config.dim, num_heads=config.heads, num_blocks=config.layers, vocab_size=config.vocab,
        mode="inference", return_last_states=True, chunkwise_kernel=chunkwise, sequence_kernel=sequence,
        step_kernel=step_kernel, weight_mode="fused",
    )  # fmt: skip
    with prompts.device:
        model = xLSTMLarge(fields).to(dtype).eval()
    _, state = model(prompts)

    def step(tokens: Tensor) -> Tensor:
        nonlocal state
        logits, state = model(tokens[:, None], state)
        return logits[:, -1].argmax(-1)

    return _clock(step, prompts[:, 0], count)


PEERS = {
    "transformers, its step": transformers_step,
    "transformers, generate": transformers_generate,
    "xlstm, its step": xlstm_step,
}


def measure(
    config: ModelConfig, prompts: list[list[int]], dtype: str, device: torch.device, count: int
) -> dict[str, Any]:
    """Milliseconds a token of each, or why there are none."""
    found: dict[str, Any] = {}
    given = torch.tensor(prompts, device=device)
    for name, peer in PEERS.items():
        try:
            with torch.inference_mode():
                found[name] = peer(config, given, getattr(torch, dtype), count)
        except Exception as error:  # a package of others, which may be missing, or not run on this device
            found[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return found
