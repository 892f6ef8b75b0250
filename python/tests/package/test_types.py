"""The package is typed: it passes mypy, and so do its users; misuse does not."""

import shutil
import subprocess
import sys
from pathlib import Path

import tfla

USE = """
import torch

import tfla

x = torch.zeros(1)
h: torch.Tensor = tfla.mlstm(x, x, x, x, x, gate="exp", chunk_size=3)
pair: tuple[torch.Tensor, tfla.State] = tfla.mlstm_parallel(x, x, x, x, x, output_final_state=True)
h = tfla.delta_rule(x, x, x, x, write="sigmoid", A_log=x, chunk_size=3)
both: tuple[torch.Tensor, torch.Tensor] = tfla.delta_rule(x, x, x, x, x, initial_state=x, output_final_state=True)
h = tfla.delta_rule_step(x, x, x, x, None, x, slots=x)
h = tfla.ssd(x, x, x, x, x, D=x, dt_limit=(0.0, 1.0))
both = tfla.ssd(x, x, x, x, x, initial_state=x, output_final_state=True)
h = tfla.ssd_step(x, x, x, x, x, x, slots=x)
h = tfla.causal_conv1d(x, x, activation="swish", seq_idx=x, layout="bdt")
both = tfla.causal_conv1d(x, x, x, initial_state=x, output_final_state=True)
h = tfla.causal_conv1d_step(x, x, x, slots=x, cache_seqlens=x)
"""
MISUSE = {
    "tfla.mlstm(x, x, x, x, x, gate='soft')": "No overload variant",
    "tfla.mlstm_parallel(x, x, x, x, x, chunk_size=3)": "Unexpected keyword argument",
    "tfla.mlstm_step(x, x, x, x, x)": 'Missing positional argument "state"',
    "tfla.delta_rule(x, x, x, x, write='tanh')": "No overload variant",
    "tfla.delta_rule(x, x, x, x, keep='states')": "No overload variant",
    "tfla.delta_rule_step(x, x, x, x, chunk_size=3)": "Unexpected keyword argument",
    "tfla.ssd(x, x, x, x, x, keep='states')": "No overload variant",
    "tfla.ssd_step(x, x, x, x, x)": 'Missing positional argument "state"',
    "tfla.causal_conv1d(x, x, activation='relu')": "No overload variant",
    "tfla.causal_conv1d_step(x, x, x, seq_idx=x)": "Unexpected keyword argument",
    "tfla.attention": "has no attribute",
}


def test_mypy(tmp_path):
    use = tmp_path / "use.py"
    use.write_text(USE + "\n".join(MISUSE))
    first = USE.count("\n") + 1
    # A copy, since mypy does not check what lies in site-packages; transformers is not followed, which takes long.
    package = shutil.copytree(Path(tfla.__file__).parent, tmp_path / "tfla", ignore=shutil.ignore_patterns("lib"))
    config = tmp_path / "mypy.ini"
    config.write_text("[mypy]\n[mypy-transformers.*]\nfollow_imports = skip\n")
    command = [sys.executable, "-m", "mypy", "--config-file", str(config), "--cache-dir", str(tmp_path / "cache")]
    result = subprocess.run(
        [*command, str(package), str(use)], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    errors = [line for line in result.stdout.splitlines() if ": error: " in line]
    for number, sentence in enumerate(MISUSE.values(), start=first):
        found = [error for error in errors if f"use.py:{number}:" in error]
        assert any(sentence in error for error in found), f"line {number}: {result.stdout}"
        errors = [error for error in errors if error not in found]
    assert not errors, result.stdout + result.stderr
