"""The wheel in a fresh environment: what it holds, where it may be installed, without torch, and with torch."""

import json
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import torch

from repository import ROOT

WHEEL = os.environ.get("TFLA_WHEEL")
pytestmark = pytest.mark.skipif(WHEEL is None, reason="TFLA_WHEEL names no wheel (tools/test_python.sh builds one)")


def names_in(wheel: str | Path) -> list[str]:
    return [name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")]


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    """Runs a program in an environment that holds the wheel and nothing else, and finds no other program."""
    directory = tmp_path_factory.mktemp("fresh")
    venv.create(directory, with_pip=True)
    python = directory / "bin" / "python"
    environment = {"PATH": str(python.parent)}
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-index", WHEEL], check=True, env=environment)

    def run(code: str, *, with_torch: bool = False) -> str:
        # In place of a second installation of torch: the one the tests run with, behind the fresh environment's own.
        extra = f"import sys; sys.path.append({str(Path(torch.__file__).parents[1])!r}); " if with_torch else ""
        command = [python, "-c", extra + code]
        result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=directory, env=environment)
        return result.stdout + result.stderr

    return run


def test_one_wheel_for_every_python():
    assert re.search(r"-py3-none-manylinux_2_\d+_x86_64.whl$", WHEEL)
    names = names_in(WHEEL)
    libraries = {Path(name).name for name in names if name.startswith("tfla/lib/")}
    assert {"libtfla_torch.so", "libtfla_info.so", "libgomp.so.1", "libhwy.so.1"} <= libraries
    assert sum(name.startswith("libtfla.so") for name in libraries) == 1
    assert "tfla/py.typed" in names
    assert len(names) == len(set(names))


def test_tag_is_what_the_libraries_ask_for():
    """By auditwheel, which reads the versions of their symbols; libtorch.so is torch's and is there with it."""
    command = [sys.executable, "-m", "auditwheel", "show", "--json", WHEEL]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert f"-{found['sym_tag']}.whl" in WHEEL
    assert not found["unsupported_isa"]
    assert set(found["external_libs"]) == {"libtorch.so"}


def test_label(tmp_path):
    """A wheel with the CUDA backend is the same package in another version, which pip accepts."""
    wheel = Path(shutil.copy(WHEEL, tmp_path))
    subprocess.run([ROOT / "tools" / "label_wheel.sh", Path(sys.prefix), wheel, "cu130"], check=True)
    labelled = tmp_path / wheel.name.replace("-py3", "+cu130-py3")
    command = ["pip", "install", "--quiet", "--no-index", "--no-deps", "--target", tmp_path / "there", labelled]
    subprocess.run([sys.executable, "-m", *command], check=True)
    assert "\nVersion: 0.1.0+cu130\n" in (tmp_path / "there/tfla-0.1.0+cu130.dist-info/METADATA").read_text()
    assert [name.replace("+cu130", "") for name in sorted(names_in(labelled))] == sorted(names_in(WHEEL))


def test_every_library_in_the_wheel_has_a_licence():
    """Ours is LICENSE; any other has a row in NOTICE.md that names texts which are in the wheel too."""
    with zipfile.ZipFile(WHEEL) as wheel:
        names = names_in(WHEEL)
        texts = {Path(name).name: wheel.read(name).decode() for name in names if ".dist-info/licenses/" in name}
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in texts["NOTICE.md"].splitlines() if "`lib" in line
    ]
    noticed = {row[0]: re.findall("`([^`]+)`", row[-1]) for row in rows}
    foreign = {Path(name).name for name in names if name.startswith("tfla/lib/")}
    foreign = {name for name in foreign if not name.startswith("libtfla")}
    assert {f"`{name}`" for name in foreign} <= noticed.keys()
    for files in noticed.values():
        assert files and all(len(texts[file]) > 500 for file in files)
    assert noticed["`libgomp.so.1`"] == ["GPL-3.0.txt", "GCC-exception-3.1.txt"]
    assert "GNU GENERAL PUBLIC LICENSE" in texts["GPL-3.0.txt"]
    assert "GCC RUNTIME LIBRARY EXCEPTION" in texts["GCC-exception-3.1.txt"]
    assert "apt-get source gcc-12" in texts["NOTICE.md"]


def test_without_torch(fresh):
    code = "import tfla, tfla.info; print(tfla.__version__, tfla.info.library_version())\ntfla.mlstm"
    output = fresh(code)
    assert output.startswith("0.1.0 0.1.0\n")
    assert "ImportError: tfla: tfla.mlstm needs torch, which is not installed; pip install torch" in output


def test_with_torch(fresh):
    code = (
        "import torch, tfla; assert 'fresh' in tfla.__file__; torch.manual_seed(0); "
        "q = torch.randn(1, 6, 1, 4); g = torch.randn(1, 6, 1); print(tfla.mlstm(q, q, q, g, g).shape)"
    )
    assert fresh(code, with_torch=True).strip() == "torch.Size([1, 6, 1, 4])"


def test_libraries_need_nothing_that_is_not_there(fresh):
    """Besides the C and C++ runtimes every library is in the wheel, or torch's."""
    code = "import pathlib, tfla; print(pathlib.Path(tfla.__file__).parent / 'lib')"
    directory = Path(fresh(code).strip())
    system = {f"lib{name}" for name in ("c.so.6", "m.so.6", "stdc++.so.6", "gcc_s.so.1", "dl.so.2", "rt.so.1")}
    for library in directory.iterdir():
        dynamic = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
        needed = {line.split("[")[1].rstrip("]") for line in dynamic.splitlines() if "(NEEDED)" in line}
        missing = {name for name in needed - system if not (directory / name).exists()}
        assert missing <= {"libtorch.so", "ld-linux-x86-64.so.2"}, library.name


def test_same_interpreter_is_not_needed():
    """Nothing in the wheel is compiled for one Python."""
    for name in zipfile.ZipFile(WHEEL).namelist():
        assert ".cpython-" not in name and f"cp{sys.version_info.major}{sys.version_info.minor}" not in name
