"""A model with tfla.mlstm compiled ahead of time by torch.export and AOTInductor, to run without its Python code.

    python examples/aot_inductor.py [PACKAGE]     PACKAGE: where the compiled model goes (default: a temporary file)

The package holds machine code for everything around the operator and calls torch.ops.tfla for the operator itself, so
whoever loads it has to have it registered: `import tfla` in Python, or in C++ the library that `tfla.ops` loads.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch

import tfla


class Mixer(torch.nn.Module):
    """Projections, the mLSTM, a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.gates = torch.nn.Linear(width, 2 * heads)
        self.out = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [B,T,width]
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        i, f = self.gates(x).unflatten(-1, (2, self.heads)).unbind(2)
        return x + self.out(tfla.mlstm(q, k, v, i, f + 3).flatten(2))


def compile_to(package: Path, model: torch.nn.Module, example: torch.Tensor) -> None:
    """Any batch and any number of tokens: they are dimensions of the program, not numbers in it."""
    shapes = {"x": {0: torch.export.Dim("batch", min=1, max=64), 1: torch.export.Dim("tokens", min=2, max=65536)}}
    program = torch.export.export(model, (example,), dynamic_shapes=shapes)
    torch._inductor.aoti_compile_and_package(program, package_path=str(package))


def main() -> None:
    torch.manual_seed(0)
    model = Mixer(width=64, heads=4).eval()
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        package = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(folder) / "mixer.pt2"
        compile_to(package, model, torch.randn(2, 40, 64))
        print(f"compiled: {package.name}, {package.stat().st_size} bytes")
        loaded = torch._inductor.aoti_load_package(str(package))
        for shape in [(2, 40, 64), (1, 300, 64), (5, 7, 64)]:
            x = torch.randn(shape)
            expected = model(x)
            error = (loaded(x) - expected).norm() / expected.norm()
            print(f"{shape}: relative difference from the model as written {error:.1e}")
            if not error < 1e-5:
                raise SystemExit("tfla: the compiled model does not give what the model gives")


if __name__ == "__main__":
    main()
