"""Makes the folder that --peers of the GPU benchmarks takes: packages of Python alone, unpacked side by side, for a
machine that has torch and triton but neither a network nor pip.

Wheels are unpacked. Of a source archive, as mamba_ssm has, only the packages are taken, so that none of their CUDA
extensions is built: their Triton kernels do without. pip asks such an archive for its version by its setup.py, which
imports torch, so run this where torch is installed. Without names the folder has 6 MB. flash_qla and flashinfer-python
can be named too, but need packages of machine code besides (tilelang, cuda-python), which this refuses.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from email.parser import Parser
from pathlib import Path

DEFAULT = ("fla-core", "einops", "packaging", "mamba_ssm")
# Of archives whose setup.py would compile.
ENVIRONMENT = {"MAMBA_SKIP_CUDA_BUILD": "TRUE", "CAUSAL_CONV1D_SKIP_CUDA_BUILD": "TRUE"}

EXAMPLES = f"""examples:
  python -m benchmarks.operators.peers_folder --out peers                       {", ".join(DEFAULT)}
  python -m benchmarks.operators.peers_folder --out peers fla-core==0.6.0 einops packaging
  python -m benchmarks.operators.peers_folder --out peers --from downloads      of files that are there: no network
  python -m benchmarks.operators.peers_folder --out tests pytest iniconfig pluggy pygments   what their_tests.py needs

The first is the same as
  pip download --no-deps --no-build-isolation --dest downloads {" ".join(DEFAULT)}
and unpacking what that brings.
"""


def download(names: list[str], folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation", "--dest"]
    for name in names:  # one by one, so that the sentence names it
        if subprocess.run([*command, str(folder), name], env=os.environ | ENVIRONMENT, check=False).returncode:
            raise SystemExit(f"peers_folder: pip does not download {name}")


def unpack_wheel(file: Path, out: Path) -> None:
    if not file.name.endswith("-none-any.whl"):
        raise SystemExit(f"peers_folder: {file.name} is for one kind of machine; it must be of Python alone")
    with zipfile.ZipFile(file) as wheel:
        wheel.extractall(out)


def unpack_sources(file: Path, out: Path) -> None:
    """Its packages, and their version where importlib.metadata looks for it."""
    with tempfile.TemporaryDirectory() as directory, tarfile.open(file) as archive:
        archive.extractall(directory, filter="data")
        (root,) = Path(directory).iterdir()
        parts = Parser().parsestr((root / "PKG-INFO").read_text())
        name = re.sub(r"[-.]+", "_", parts["Name"])
        places = [place for place in (root, root / "src") if (place / name / "__init__.py").exists()]
        if not places:
            raise SystemExit(f"peers_folder: {file.name} has no package {name}")
        shutil.move(places[0] / name, out / name)
        information = out / f"{name}-{parts['Version']}.dist-info"
        information.mkdir()
        shutil.move(root / "PKG-INFO", information / "METADATA")


def unpack(files: list[Path], out: Path) -> None:
    if out.exists() and any(out.iterdir()):
        raise SystemExit(f"peers_folder: --out was {out}, which holds something; it must be new or empty")
    out.mkdir(parents=True, exist_ok=True)
    for file in files:
        if file.suffix == ".whl":
            unpack_wheel(file, out)
        elif file.name.endswith(".tar.gz"):
            unpack_sources(file, out)
        else:
            raise SystemExit(f"peers_folder: {file.name} is neither a wheel nor a source archive")


def report(out: Path) -> str:
    sizes: dict[str, int] = {}
    for file in out.rglob("*"):
        if file.is_file():
            first = file.relative_to(out).parts[0]
            sizes[first] = sizes.get(first, 0) + file.stat().st_size
    lines = [f"{size / 1e6:8.2f} MB  {name}" for name, size in sorted(sizes.items()) if not name.endswith(".dist-info")]
    return "\n".join([*lines, f"{sum(sizes.values()) / 1e6:8.2f} MB  {out}"])


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, epilog=EXAMPLES, formatter_class=form)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"packages as pip takes them ({', '.join(DEFAULT)})")
    parser.add_argument("--out", type=Path, required=True, help="the folder that is made")
    parser.add_argument("--from", type=Path, metavar="DIR", dest="source", help="unpack what lies here, without pip")
    given = parser.parse_args()
    if given.source is not None and given.names:
        parser.error(f"--from was {given.source}, all of which is unpacked; names have no use then")
    with tempfile.TemporaryDirectory() as directory:
        source = given.source or Path(directory)
        if given.source is None:
            download(given.names or list(DEFAULT), source)
        unpack(sorted(source.iterdir()), given.out)
    print(report(given.out))


if __name__ == "__main__":
    main()
