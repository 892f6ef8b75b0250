"""The examples that are quick enough run and judge themselves."""

import subprocess
import sys

import pytest

from repository import ROOT

EXAMPLES = ROOT / "examples"


@pytest.mark.parametrize(("name", "words"), [("aot_inductor.py", "(5, 7, 64): relative difference")])
def test_example(name, words):
    result = subprocess.run([sys.executable, EXAMPLES / name], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert words in result.stdout
