#!/usr/bin/env python3
"""Lays a wheel of tfla out as a kernel of the Hugging Face Hub, which the package `kernels` loads.

usage: packaging/huggingface/make_kernel.py WHEEL FOLDER

One wheel gives one build variant, FOLDER/build/torch-stable-abi210-BACKEND-x86_64-linux, with BACKEND cpu or, from the
label of its version, cuXY. Several wheels may go into one folder.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import zipfile
from pathlib import Path

HERE = Path(__file__).parent
KERNEL_VERSION = 1  # of the kernel's interface; the Hub has a branch for each
STABLE_ABI = "210"  # cmake/Torch.cmake: TORCH_TARGET_VERSION
CUDA_ARCHITECTURES = ["8.0", "8.6", "8.9", "9.0a", "10.0", "12.0"]  # tools/build_wheel.sh


def backend_of(wheel: Path) -> str:
    found = re.fullmatch(r"tfla-[0-9.]+(?:\+(cu\d+))?-py3-none-manylinux_\w+_x86_64\.whl", wheel.name)
    if found is None:
        raise SystemExit(f"tfla: {wheel.name} is not a wheel that make wheel or make wheel-cuda leaves in dist")
    return found[1] or "cpu"


def metadata(backend: str) -> dict:
    kind: dict = {"type": "cpu"} if backend == "cpu" else {"type": "cuda", "archs": CUDA_ARCHITECTURES}
    return {
        "id": f"_tfla_{backend}_{KERNEL_VERSION}",
        "name": "tfla",
        "version": KERNEL_VERSION,
        "license": "apache-2.0",
        "python-depends": [],
        "backend": kind,
    }


def make(wheel: Path, folder: Path) -> Path:
    backend = backend_of(wheel)
    variant = folder / "build" / f"torch-stable-abi{STABLE_ABI}-{backend}-x86_64-linux"
    shutil.rmtree(variant, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith("tfla/"):
                archive.extract(name, variant)
            elif "/licenses/" in name and not name.endswith("/"):
                (variant / "licenses").mkdir(parents=True, exist_ok=True)
                (variant / "licenses" / Path(name).name).write_bytes(archive.read(name))
    shutil.copy(HERE / "kernel_init.py", variant / "__init__.py")
    (variant / "metadata.json").write_text(json.dumps(metadata(backend), indent=2) + "\n")
    return variant


def main() -> None:
    if len(sys.argv) != 3:
        raise SystemExit("tfla: make_kernel.py takes a wheel and a folder; see its first lines")
    print(f"written: {make(Path(sys.argv[1]), Path(sys.argv[2]))}")


if __name__ == "__main__":
    main()
