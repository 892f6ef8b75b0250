"""`tfla analyse scale`: its bytes against what two processes hand to their collectives, its models against ours."""

import json
import re
import subprocess
import textwrap
from collections import Counter

import pytest
import torch

from lm_inputs import make_data, small_model, small_recipe
from ranks import run_ranks
from repository import ROOT
from scale_worker import RUNS
from tfla.lm import LanguageModel
from tfla.lm.config import PRESETS, preset

PROGRAM = ROOT / "build" / "release" / "tfla"
pytestmark = pytest.mark.skipif(not PROGRAM.exists(), reason="tfla: needs build/release/tfla")
RANKS = 2


def analysed(*options: object) -> dict:
    command = [PROGRAM, "analyse", "scale", "--json", *options]
    return json.loads(subprocess.run([*map(str, command)], check=True, capture_output=True, text=True).stdout)


def options_of(name: str) -> list[object]:
    """How the program is told of a run of two processes."""
    changes, fields = RUNS[name]
    model, recipe = small_model(**fields), small_recipe(**changes)
    batch = recipe.batch * recipe.context_parallel // RANKS
    options: list[object] = [
        "--strategy", name.split(",")[0], "--gpus", RANKS, "--step-seconds", 1, "--kernel-seconds", 0.1,
        "--batch", batch, "--micro-batch", min(recipe.micro_batch or batch, batch), "--ffn-dim", model.feed_forward,
    ]  # fmt: skip
    for field in ("layers", "dim", "heads", "vocab", "qk_factor", "v_factor"):
        options += [f"--{field.replace('_', '-')}", getattr(model, field)]
    return options + (["--checkpoint-activations"] if recipe.checkpoint_activations else [])


@pytest.fixture(scope="module")
def sent(tmp_path_factory):
    out = tmp_path_factory.mktemp("scale")
    run_ranks("scale_worker.py", make_data(out), out, ranks=RANKS, store=out / "store")
    return [json.loads((out / f"sent-{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("name", RUNS)
def test_bytes_are_those_of_two_processes(sent, name):
    """Every call and its size once DDP has agreed on its buckets, which takes two steps; all bytes before that, too."""
    (run,) = analysed(*options_of(name))["runs"]
    expected: Counter = Counter()
    for row in run["collectives"]:
        assert row["ranks"] == RANKS
        expected[row["operation"], row["bytes"]] += row["calls"]
    for rank in range(RANKS):
        steps = [Counter(map(tuple, step)) for step in sent[rank][name]["steps"]]
        assert steps[2:] == [expected] * 2
        assert totals(steps[0]) == totals(expected)


def totals(calls: Counter) -> Counter:
    """Bytes of each operation."""
    total: Counter = Counter()
    for (operation, size), times in calls.items():
        total[operation] += times * size
    return total


@pytest.mark.parametrize("name", ["ddp, buckets", "context, large states"])
def test_sockets_carry_what_rings_send(sent, name):
    """Megabytes, beside which gloo's headers are small. Not of FSDP: gloo scatters sums by a whole all-reduce."""
    (run,) = analysed(*options_of(name))["runs"]
    for rank in range(RANKS):
        assert sent[rank][name]["wire"] == pytest.approx(run["sent_bytes"], rel=1e-3)


@pytest.mark.parametrize("name", RUNS)
def test_memory_is_that_of_the_first_process(sent, name):
    (run,) = analysed(*options_of(name))["runs"]
    assert sent[0][name]["memory"] == {key: run["memory_bytes"][key] for key in ("parameters", "optimizer")}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_those_of_tfla_lm(name):
    config = preset(name)
    with torch.device("meta"):
        parameters = sum(x.numel() for x in LanguageModel(config).parameters())
    model = analysed("--model", name, "--step-seconds", 1, "--strategy", "ddp")["model"]
    assert model == {
        "layers": config.layers, "dim": config.dim, "heads": config.heads, "vocab": config.vocab,
        "ffn_dim": config.feed_forward, "qk_dim": config.dim // 2, "v_dim": config.dim, "parameters": parameters,
    }  # fmt: skip


def test_measured_times_are_those_of_their_source():
    experiments = json.loads((ROOT / "docs" / "experiments" / "results" / "steps.json").read_text())["runs"]
    for setting, rows in experiments.items():
        name, batch = setting.split(", batch ")
        (row,) = (row for row in rows if row["model"] == "exp")
        found = analysed("--model", name, "--batch", batch)["one_gpu"]
        assert found["step_seconds"] == pytest.approx(row["milliseconds"] / 1e3, abs=1e-7)
        assert found["kernel_seconds"] == pytest.approx(row["kernel_milliseconds"] / 1e3, abs=1e-7)
        assert row["milliseconds"] * row["tokens_per_second"] / 1e3 == pytest.approx(found["tokens"])


def test_tables_of_the_page_are_the_programs():
    """Blocks that begin with a command have lines of what it prints."""
    blocks = re.findall(
        r"^    \$ tfla (.+)\n((?:    .+\n)+)", (ROOT / "docs" / "lm_scale.md").read_text(), re.MULTILINE
    )
    assert len(blocks) == 3
    for command, table in blocks:
        printed = subprocess.run([PROGRAM, *command.split()], check=True, capture_output=True, text=True).stdout
        assert textwrap.dedent(table) in printed
