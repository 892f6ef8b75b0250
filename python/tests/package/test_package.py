"""The package as installed: what importing it does, and `python -m tfla`."""

import os
import subprocess
import sys
from typing import Any

import pytest

import tfla
from tfla import info
from tfla.__main__ import _kernels


def python(*arguments: str, **options: Any) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, **options)


def test_import_loads_no_framework():
    code = (
        "import sys, tfla; dir(tfla); tfla.info.library_version(); print({'torch', 'jax', 'numpy'} & set(sys.modules))"
    )
    result = python("-c", code)
    assert result.stdout.strip() == "set()", result.stderr


def test_import_beside_torch_loads_little():
    """What takes time in an import is modules: beside torch there are those of tfla alone."""
    code = """
import sys, torch, torch.library
before = set(sys.modules)
import tfla
tfla.mlstm
print(len(set(sys.modules) - before), {name.split(".")[0] for name in set(sys.modules) - before} - {"tfla"})
"""
    count, foreign = python("-c", code).stdout.split(maxsplit=1)
    assert int(count) < 30
    assert foreign.strip() == "set()"


MISSING = [
    ("torch", "tfla.jax", ("mlstm", "mlstm_step", "delta_rule", "delta_rule_step", "ssd", "nn", "distributed", "lm")),
    ("jax", "tfla.mlstm and torch", ("jax",)),
]


@pytest.mark.parametrize(("framework", "instead", "names"), MISSING, ids=[row[0] for row in MISSING])
def test_without_a_framework(framework, instead, names):
    """Everything that needs one says so in a sentence when it is used, not before."""
    code = f"""
import sys
sys.modules["{framework}"] = None  # as if it were not installed
import tfla
for name in {names}:
    try:
        getattr(tfla, name)
    except ImportError as error:
        print(error)
"""
    result = python("-c", code)
    needs = f"needs {framework}, which is not installed; pip install {framework}, or use {instead}"
    assert result.stdout.splitlines() == [f"tfla: tfla.{name} {needs}" for name in names], result.stderr


WAITING = [({}, "3000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "None")]


@pytest.mark.parametrize(("given", "count"), WAITING, ids=str)
@pytest.mark.parametrize("start", ["import tfla.lm", "runpy.run_module('tfla.lm', run_name='__main__')"])
def test_language_models_do_not_spin_for_long(start, given, count):
    """What OpenMP finds in the environment when torch loads it; what the user says stays."""
    code = f"""
import os, runpy, sys
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(os.environ.get("GOMP_SPINCOUNT"), flush=True)
            os._exit(0)
sys.meta_path.insert(0, Watch())
{start}
"""
    mine = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    assert python("-c", code, env={**mine, **given}).stdout.strip() == count


def test_unknown_attribute():
    try:
        tfla.attention  # noqa: B018
    except AttributeError as error:
        assert "has no attribute 'attention'" in str(error)
    else:
        raise AssertionError("accepted")


def test_versions_agree():
    assert tfla.__version__ == info.library_version()


def test_describe():
    assert "chunkwise" in info.describe("forward", tokens=100, dqk=8, dhv=8)
    assert "step" in info.describe("step", dqk=8, dhv=8, dtype="bfloat16")


def test_program_lists_every_kernel():
    """Of a plan for a GPU too, which has a line for each, whatever GPU is here."""
    shape: dict[str, Any] = {"tokens": 4096, "heads": 4, "dqk": 128, "dhv": 256, "dtype": "bfloat16"}
    plan = info.describe("backward", **shape, keep="denominators", device="cuda", gpu="H200")
    listed = [part.split("(")[0].strip() for part in _kernels(plan, "cuda").split("), ")]
    assert listed[0] == "gates" and listed[-1] == "grad_gates" and "grad_segment_totals" in listed
    assert all(f"{name} " in plan for name in listed) and len(listed) == len(set(listed)) >= 6
    own = info.describe("forward", **shape)
    assert f"kernels         {_kernels(own, 'cpu')}\n" in own


def test_program():
    result = python("-m", "tfla", "--verbose")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "20 of 20 checks against float64 passed" in result.stdout
    assert result.stdout.count(", delta rule: ") == 4
