"""The wheel laid out as a kernel of the Hugging Face Hub (packaging/huggingface)."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from repository import ROOT

MAKE = ROOT / "packaging" / "huggingface" / "make_kernel.py"
WHEEL = os.environ.get("TFLA_WHEEL")
pytestmark = pytest.mark.skipif(WHEEL is None, reason="TFLA_WHEEL names no wheel (tools/test_python.sh builds one)")

# What `kernels` does with a build variant, in its own words or in these.
BY_KERNELS = "import kernels; kernel = kernels.get_local_kernel(folder, backend='cpu')"
BY_HAND = """
import importlib.util
spec = importlib.util.spec_from_file_location("some_unique_name", variant / "__init__.py")
kernel = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernel)
"""
USE = """
import torch
assert sys.modules["tfla"].__file__.startswith(str(folder))
x, gate = torch.randn(1, 6, 1, 4), torch.randn(1, 6, 1)
h = kernel.mlstm(x, x, x, gate, gate)
import tfla
assert tfla.mlstm is kernel.mlstm and torch.equal(h, tfla.mlstm(x, x, x, gate, gate))
print(tuple(h.shape), kernel.__version__, "mlstm" in dir(kernel))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kernel")
    subprocess.run([sys.executable, MAKE, WHEEL, folder], check=True, capture_output=True)
    (variant,) = (folder / "build").iterdir()

    def python(code: str) -> subprocess.CompletedProcess:
        start = (
            f"import pathlib, sys\nfolder, variant = pathlib.Path({str(folder)!r}), pathlib.Path({str(variant)!r})\n"
        )
        offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
        return subprocess.run(
            [sys.executable, "-c", start + code], capture_output=True, text=True, check=False, env=offline
        )

    python.variant = variant
    return python


def test_layout(run):
    assert run.variant.name == "torch-stable-abi210-cpu-x86_64-linux"
    about = json.loads((run.variant / "metadata.json").read_text())
    assert (about["name"], about["backend"]["type"]) == ("tfla", "cpu")
    assert (run.variant / "licenses" / "NOTICE.md").exists()


@pytest.mark.parametrize("load", [BY_HAND, BY_KERNELS], ids=["by hand", "by kernels"])
def test_kernel_runs(run, load):
    if load == BY_KERNELS and importlib.util.find_spec("kernels") is None:
        pytest.skip("the package kernels is not installed")
    result = run(load + USE)
    assert result.stdout.strip() == "(1, 6, 1, 4) 0.1.0 True", result.stderr


def test_two_versions_are_refused(run):
    other = "import types\nsys.modules['tfla'] = types.SimpleNamespace(__version__='0.0.9')\n"
    error = run(other + BY_HAND).stderr.splitlines()[-1]
    assert error.startswith("ImportError: tfla: this process has loaded tfla 0.0.9; the kernel, which is 0.1.0, cannot")


def test_other_wheels_are_refused(tmp_path):
    result = subprocess.run([sys.executable, MAKE, "tfla-0.1.0-py3-none-linux_x86_64.whl", tmp_path],
                            capture_output=True, text=True, check=False)  # fmt: skip
    assert result.returncode != 0 and result.stderr.startswith("tfla: ")
