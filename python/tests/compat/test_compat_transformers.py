"""tfla.compat.transformers with the published transformers, with and without the package xlstm beside it."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("xlstm", ["with", "without"])
def test_hugging_face_xlstm(xlstm):
    script = Path(__file__).with_name("hf_xlstm.py")
    result = subprocess.run([sys.executable, script, xlstm], capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "losses" in result.stdout
