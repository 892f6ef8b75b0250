"""Generation against the plain model: the decoder's captured step beside forward over whole sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from tfla.lm import Decoder, LanguageModel, preset
from tfla.lm.generate import Sampling, Session, generate
from tfla.reference import relative_error

LENGTHS = (1, 37, 130, 64)  # of the prompts


def make_model(dtype: torch.dtype, size: str, device: torch.device) -> LanguageModel:
    """Gates that depend on their input, unlike at the beginning of training."""
    torch.manual_seed(0)
    with device:
        model = LanguageModel(preset(size, vocab=5000), dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
    return model


def generated(model: LanguageModel, tokens: int) -> tuple[list[list[int]], list[int], Tensor]:
    """Texts, where their prompts end, and the logits (tokens,B,vocab) from which their tokens were chosen."""
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(0, model.config.vocab, (length,), generator=generator).tolist() for length in LENGTHS]
    session = Session(Decoder(model), texts)
    logits = [session.logits]
    for row in generate(session, tokens, Sampling(temperature=0)):
        logits.append(session.logits)
        texts = [[*text, token] for text, token in zip(texts, row, strict=True)]
    return texts, list(LENGTHS), torch.stack(logits[:-1])


@torch.no_grad()
def plain(model: LanguageModel, texts: list[list[int]], begins: list[int]) -> Tensor:
    """The same logits by the whole sequences."""
    device = model.embedding.weight.device
    rows = [model(torch.tensor([text], device=device))[0, a - 1 : -1] for text, a in zip(texts, begins, strict=True)]
    return torch.stack(rows, dim=1)


def main(device: torch.device, quick: bool) -> int:
    size, tokens = ("tiny", 8) if quick else ("160m", 48)
    failed = False
    exact = make_model(torch.float32, size, device)
    texts, begins, logits = generated(exact, tokens)
    whole = plain(exact, texts, begins)
    error = relative_error(logits.cpu(), whole.cpu())
    same = torch.equal(logits.argmax(-1), whole.argmax(-1))
    # The order of float32 sums over the layers; a wrong weight, gate or norm is off by more than a hundredth.
    failed |= not same or error > 1e-3
    print(
        f"float32: greedy tokens {'are' if same else 'ARE NOT'} those of the plain model; logits differ by {error:.1e}"
    )
    model = make_model(torch.bfloat16, size, device)
    texts, begins, logits = generated(model, tokens)
    reference, whole = plain(exact, texts, begins).cpu(), plain(model, texts, begins).cpu()
    ours, theirs = relative_error(logits.cpu(), reference), relative_error(whole, reference)
    failed |= ours > 1.25 * theirs  # one rounding more or less in every norm and sum
    share = (logits.cpu().argmax(-1) == whole.argmax(-1)).float().mean().item()
    print(f"bfloat16: logits are {ours:.2e} from float32, those of the plain model {theirs:.2e}; ", end="")
    print(f"{share:.1%} of greedy tokens are the plain model's")
    print("failed" if failed else "passed")
    return int(failed)
