"""tools/check_layers.py on this repository, and on trees with a mistake in them."""

import subprocess
import sys

import pytest

from repository import ROOT

SCRIPT = ROOT / "tools" / "check_layers.py"

GOOD = {
    "include/tfla/tfla.h": [],
    "src/core/arena.h": ["tfla/tfla.h"],
    "src/plan/plan.h": ["core/arena.h"],
    "src/cpu/problem.h": ["plan/plan.h"],
    "src/cpu/stages/gates.h": ["cpu/problem.h"],
    "src/cpu/run.h": ["cpu/stages/gates.h"],
    "src/cuda/call.h": ["plan/plan.h"],
    "src/cuda/portable/gemm.cuh": ["cuda/call.h"],
    "src/cuda/sm90/forward/kernel.cuh": ["cuda/call.h"],
    "src/api/api.h": ["cpu/run.h", "cuda/call.h"],
    "src/reference/reference.h": ["tfla/tfla.h"],
    "src/testkit/judge.h": ["reference/reference.h", "api/api.h"],
    "cli/support/options.h": ["tfla/tfla.h"],
    "cli/check/command.cc": ["cli/support/options.h", "testkit/judge.h"],
    "tests/support/support.h": ["testkit/judge.h"],
    "tests/plan/plan_test.cc": ["tests/support/support.h", "plan/plan.h"],
}

# A file, what it includes besides, and how the sentence goes on.
BAD = [
    ("src/core/arena.h", "plan/plan.h", "src/core may not include src/plan/plan.h"),
    ("src/plan/plan.h", "cpu/run.h", "src/plan may not include src/cpu/run.h"),
    ("src/plan/plan.h", "api/api.h", "src/plan may not include src/api/api.h"),
    ("src/cpu/run.h", "cuda/call.h", "src/cpu may not include src/cuda/call.h"),
    ("src/cuda/call.h", "cpu/run.h", "src/cuda may not include src/cpu/run.h"),
    ("src/cuda/sm90/forward/kernel.cuh", "cuda/portable/gemm.cuh", "src/cuda/sm90 may not include src/cuda/portable"),
    ("src/cpu/run.h", "api/api.h", "src/cpu may not include src/api/api.h"),
    ("src/api/api.h", "testkit/judge.h", "src/api may not include src/testkit/judge.h"),
    ("src/reference/reference.h", "core/arena.h", "src/reference may not include src/core/arena.h"),
    ("src/testkit/judge.h", "cli/support/options.h", "src/testkit may not include cli/support/options.h"),
    ("cli/check/command.cc", "tests/support/support.h", "cli may not include tests/support/support.h"),
    ("cli/check/command.cc", "cli/support/gone.h", '"cli/support/gone.h" names no file'),
    ("src/new/new.h", "tfla/tfla.h", "no row for its folder"),
]


def check(root):
    return subprocess.run([sys.executable, SCRIPT, root], capture_output=True, text=True)


def write(root, files):
    for name, includes in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f'#include "{one}"\n' for one in includes))


def test_this_repository():
    result = check(ROOT)
    assert result.returncode == 0, result.stderr


def test_a_tree_in_order(tmp_path):
    write(tmp_path, GOOD)
    result = check(tmp_path)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize(("file", "included", "sentence"), BAD, ids=[f"{row[0]}-{row[1]}" for row in BAD])
def test_a_mistake(tmp_path, file, included, sentence):
    write(tmp_path, GOOD | {file: [*GOOD.get(file, []), included]})
    result = check(tmp_path)
    assert result.returncode == 1
    assert f"tfla: {file}: {sentence}" in result.stderr


def test_a_cycle(tmp_path):
    write(tmp_path, GOOD | {"src/core/arena.h": ["cpu/run.h"]})
    result = check(tmp_path)
    assert result.returncode == 1
    assert "tfla: cycle: src/core -> src/cpu -> src/plan -> src/core\n" in result.stderr


def test_a_folder_that_is_not_there(tmp_path):
    result = check(tmp_path / "nothing")
    assert result.returncode == 2
    assert "it must be a folder that has src" in result.stderr
