"""Whether a build has the CUDA backend: by the nvcc that is found, and by what TFLA_CUDA says."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from repository import ROOT

CMAKE = shutil.which("cmake")
pytestmark = pytest.mark.skipif(CMAKE is None, reason="cmake is not in PATH")

BOTH, CPU, WITHOUT = "building the CUDA backend too", "building the CPU backend alone", "there is no nvcc"


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def fake_nvcc(folder: Path, says: str) -> Path:
    """A compiler that does nothing but tell its version as nvcc does."""
    program(folder / "nvcc", f"echo 'nvcc: NVIDIA (R) Cuda compiler driver'\necho '{says}'")
    return folder / "nvcc"


def release(version: str) -> str:
    return f"Cuda compilation tools, release {version}, V{version}.131"


@pytest.fixture
def decide(tmp_path):
    """Decides as make and pip do, with the nvcc given: in PATH, and where NVIDIA's installer would have put one."""

    def run(wanted: str, in_path: str | None, installed: str | None, command: tuple[str, ...], **extra: str):
        if in_path is not None:
            fake_nvcc(tmp_path / "path", in_path)
        if installed is not None:
            fake_nvcc(tmp_path / "cuda" / "bin", installed)
        away = ("CUDACXX", "CUDA_PATH", "CUDA_HOME")
        environment = {name: value for name, value in os.environ.items() if name not in away}
        environment |= {"PATH": str(tmp_path / "path"), "TFLA_CUDA": wanted, **extra}
        return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)

    return run


def script(tmp_path: Path, wanted: str) -> tuple[str, ...]:
    chosen = (f"-DTFLA_CUDA={wanted}", f"-DTFLA_CUDA_ROOTS={tmp_path / 'cuda'}")
    return (CMAKE, *chosen, "-P", str(ROOT / "cmake" / "DecideCuda.cmake"))


# What TFLA_CUDA says, nvcc in PATH, nvcc where it is installed, the answer, words of the sentence.
CHOICES = {
    "none": ("AUTO", None, None, "OFF", [CPU, WITHOUT, "install the CUDA toolkit 12.4 or newer", "TFLA_CUDA=OFF"]),
    "old": ("AUTO", release("12.3"), None, "OFF", [CPU, "is not nvcc 12.4 or newer, but 12.3"]),
    "very old": ("AUTO", release("9.2"), None, "OFF", [CPU, "but 9.2"]),
    "oldest": ("AUTO", release("12.4"), None, "ON", [BOTH, "nvcc 12.4", "TFLA_CUDA=OFF make run", "-Ccmake.define"]),
    "two digits": ("AUTO", release("12.10"), None, "ON", [BOTH, "nvcc 12.10"]),
    "new": ("AUTO", release("13.0"), None, "ON", [BOTH, "nvcc 13.0"]),
    "no nvcc": ("AUTO", "clang version 19", None, "OFF", [CPU, "is not nvcc 12.4 or newer;"]),
    "not in PATH": ("AUTO", None, release("12.8"), "ON", [BOTH, "cuda/bin/nvcc"]),
    "old in PATH": ("AUTO", release("11.5"), release("12.8"), "ON", [BOTH, "nvcc 12.8", "cuda/bin/nvcc"]),
    "PATH first": ("AUTO", release("12.9"), release("12.8"), "ON", [BOTH, "nvcc 12.9", "path/nvcc"]),
    "off": ("OFF", release("13.0"), None, "OFF", []),
    "on": ("ON", release("13.0"), None, "ON", []),
}


@pytest.mark.parametrize(("wanted", "in_path", "installed", "answer", "words"), CHOICES.values(), ids=CHOICES)
def test_choice(decide, tmp_path, wanted, in_path, installed, answer, words):
    result = decide(wanted, in_path, installed, script(tmp_path, wanted))
    assert (result.returncode, result.stdout.strip()) == (0, answer), result.stderr
    assert len(result.stderr.splitlines()) == bool(words)  # one line, or none
    assert result.stderr.startswith("tfla: " if words else "")
    for word in words:
        assert word in result.stderr


@pytest.mark.parametrize("in_path", [None, release("12.3")])
def test_on_without_a_compiler_is_an_error(decide, tmp_path, in_path):
    result = decide("ON", in_path, None, script(tmp_path, "ON"))
    assert result.returncode != 0 and result.stdout == ""
    assert "tfla: TFLA_CUDA is ON and" in result.stderr


def test_named_compiler_is_the_only_one(decide, tmp_path):
    named = fake_nvcc(tmp_path / "named", release("12.0"))
    result = decide("AUTO", release("13.0"), None, script(tmp_path, "AUTO"), CUDACXX=str(named))
    assert result.stdout.strip() == "OFF"
    assert str(named) in result.stderr


@pytest.mark.parametrize(("wanted", "preset"), [("AUTO", "cuda"), ("OFF", "release")])
def test_preset_of_make(decide, tmp_path, wanted, preset):
    path = f"{tmp_path / 'path'}:{Path(CMAKE).parent}:/usr/bin:/bin"
    result = decide(wanted, release("12.6"), None, (str(ROOT / "tools" / "cuda_preset.sh"), "release"), PATH=path)
    assert result.stdout.strip() == preset, result.stderr


# What TFLA_CUDA says, whether there is a GPU, and what `make run` runs then.
CPU_RUN = ["tfla check", "tfla bench --quick"]
GPU_RUN = ["tfla check --device cuda", "tfla bench --quick --device cuda --dtype bfloat16"]
NO_GPU = ["tfla: no GPU is here; the CUDA backend is built and was not run."]
RUNS = {
    "off": ("OFF", True, "release", CPU_RUN),
    "no GPU": ("AUTO", False, "cuda", CPU_RUN + NO_GPU),
    "GPU": ("AUTO", True, "cuda", CPU_RUN + GPU_RUN),
}


@pytest.mark.parametrize(("wanted", "gpu", "preset", "lines"), RUNS.values(), ids=RUNS)
def test_make_run(decide, tmp_path, wanted, gpu, preset, lines):
    """The scripts in a tree of their own, where cmake builds nothing and the program says how it was called."""
    for name in ("tools/first_run.sh", "tools/build_preset.sh", "tools/cuda_preset.sh", "cmake/DecideCuda.cmake"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    script = tmp_path / "tools" / "first_run.sh"
    device = tmp_path / "nvidiactl"
    script.write_text(script.read_text().replace("/dev/nvidiactl", str(device)).replace("/dev/dxg", str(device)))
    if gpu:
        device.touch()
    program(tmp_path / "build" / preset / "tfla", 'echo "tfla $*"')
    decides = f'case "$*" in *-P*) exec {CMAKE} "$@";; esac'
    program(tmp_path / "stubs" / "cmake", f'{decides}\necho "$*" >>{tmp_path / "built"}')
    path = f"{tmp_path / 'path'}:{tmp_path / 'stubs'}:/usr/bin:/bin"
    result = decide(wanted, release("12.6"), None, (str(script),), PATH=path)
    assert (result.returncode, result.stdout.splitlines()) == (0, lines), result.stderr
    assert f"--build --preset {preset}" in (tmp_path / "built").read_text()


@pytest.mark.parametrize(
    ("environment", "given", "wanted"),
    [(None, {}, "AUTO"), ("OFF", {}, "OFF"), (None, {"cmake.define.TFLA_CUDA": "OFF"}, "OFF"), ("ON", {}, "ON")],
)
def test_pip_passes_it_on(monkeypatch, environment, given, wanted):
    """As scikit-build-core reads pyproject.toml for `pip install . -C...`."""
    settings = pytest.importorskip("scikit_build_core.settings.skbuild_read_settings")
    monkeypatch.delenv("TFLA_CUDA", raising=False)
    if environment is not None:
        monkeypatch.setenv("TFLA_CUDA", environment)
    read = settings.SettingsReader.from_file(ROOT / "pyproject.toml", given)
    assert read.settings.cmake.define["TFLA_CUDA"] == wanted
