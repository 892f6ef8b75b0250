"""benchmarks/operators/beside.py without a GPU: what is wrong, absent, dead or silent, the page, and the verdicts."""

import importlib
import json
import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch

from repository import ROOT

sys.path.append(str(ROOT))

from benchmarks.operators import beside, beside_page, conv, delta, goals, mamba2_layer, packages, problem, ssd  # noqa: E402

# A running sum as the operator of a suite, on the CPU and by a clock that says what a side is to take.
SUITE = """
import os, sys, time
from dataclasses import dataclass

import torch

from benchmarks.gpu import worker
from benchmarks.operators import beside, problem
from benchmarks.operators.goals import AHEAD, COPY, MILLISECONDS, Goal, times

SECONDS = {"tfla": 1e-3, "slow": 3e-3, "copy": 0.5e-3}
now = 0.0


@dataclass(frozen=True)
class Sum(problem.Problem):
    operation: str
    sides: tuple = ("tfla", "slow", "wrong", "absent")
    tokens: int = 300
    axes = {"x": "BTH", "a": "H", "y": "BTH", "state": "BH"}
    dtype = torch.float32

    def __str__(self):
        return f"{self.operation}, {self.tokens}, {len(self.sides)} sides"

    def draw(self, device):
        numbers = torch.Generator(device).manual_seed(1)
        rows = (2,) if self.operation == "step" else (2, self.tokens)
        if "no_memory" in os.environ and self.operation == "forward":
            raise RuntimeError("no memory")
        given = {"x": torch.randn(*rows, 3, generator=numbers), "a": torch.rand(3, generator=numbers) / 2}
        if self.operation == "step":
            given["state"] = torch.randn(2, 3, generator=numbers)
        return given

    def narrow(self):
        return {"H": 2}

    def first_state(self, given):
        return given["x"].new_zeros(given["x"].shape[0], given["x"].shape[2])

    def token(self, given, state):
        state = given["a"] * state + given["x"]
        return state, state

    def side(self, name, given):
        global now
        if name == "absent":
            raise ModuleNotFoundError("No module named 'absent'")

        def call():
            global now
            now = SECONDS.get(name, 2e-3)
            if name == "dies":
                os.abort()
            if name == "breaks":
                worker.usable = lambda: False
                raise RuntimeError("illegal access")
            if name == "silent":
                time.sleep(600)
            if self.operation == "step":
                given["state"].copy_(given["a"] * given["state"] + given["x"])
                return given["state"].clone()
            rows, state = [], 0
            for t in range(self.tokens):
                keep = 0.9 if name == "wrong" and t == self.tokens - 1 else 1.0
                state = given["a"] * keep * state + given["x"][:, t]
                rows.append(state)
            return torch.stack(rows, 1)

        return call


def clock():
    if "no_gpu" in os.environ:
        raise SystemExit("no GPU")

    def burst(call, once):
        global now
        now = SECONDS["copy"]
        call()
        return now

    return beside.Clock("cpu", lambda call: burst(call, 0), burst, lambda call: call, 1)


def cases():
    sides = tuple(os.environ.get("sides", "tfla slow wrong absent").split())
    return [
        beside.Case(Sum("forward", sides), (Goal(MILLISECONDS, 0.5), Goal(MILLISECONDS, 2.0, "the goal"))),
        beside.Case(Sum("training", sides), (Goal(times("slow"), 2.0), Goal(times("absent"), 2.0), Goal(AHEAD, 1.0))),
        beside.Case(Sum("step", ("tfla",)), (Goal(COPY, 0.9),)),
    ]


SUITE = beside.Suite("sums", "Sums", "sums_suite", "Sums.", cases)

if __name__ == "__main__":
    beside.main(SUITE, "Sums.", "", clock)
"""


@pytest.fixture
def suite(tmp_path, monkeypatch):
    (tmp_path / "sums_suite.py").write_text(SUITE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield lambda: importlib.import_module("sums_suite")
    sys.modules.pop("sums_suite", None)


@pytest.fixture
def run(suite, tmp_path, monkeypatch):
    """In this process, without the one that watches: the JSON file and its page."""

    def call(*options, budget=100.0, **environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        module, given = suite(), ["--out", str(tmp_path), *options]
        file = tmp_path / "sums.json"
        beside.begin(beside.arguments(module.SUITE, "", "", given), file)
        beside.main(module.SUITE, "", "", module.clock, [*given, "--until", str(time.time() + budget)])
        content = json.loads(file.read_text())
        return content, beside_page.page(module.SUITE, content)

    return call


@pytest.fixture
def watched(suite, tmp_path):
    """By its command: what it ended with, and wrote to stderr."""

    def call(*options, **environment):
        path = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", "sums_suite", "--out", str(tmp_path), *options]
        settings = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | environment
        return subprocess.run(command, cwd=tmp_path, env=settings, capture_output=True, text=True, check=False)

    return call


def test_rows_verdicts_and_reasons(run):
    content, page = run()
    rows = content["rows"]
    forward = rows["forward, 300, 4 sides"]
    assert forward["sides"]["tfla"]["seconds"] == [1e-3] * 3 and forward["sides"]["slow"]["seconds"] == [3e-3] * 3
    assert forward["sides"]["tfla"]["apart"] < 1e-6
    assert forward["sides"]["absent"] == {"error": "No module named 'absent'"}
    # Its last token alone is wrong, which the window at the end sees.
    assert forward["sides"]["wrong"]["error"].startswith("y in tokens 172 to 300 is ")
    assert "seconds" not in forward["sides"]["wrong"] and "more than 1e-04; not timed" in page
    assert rows["step, 300, 1 sides"]["sides"]["copy"]["seconds"] == [0.5e-3] * 3
    expected = [
        "| forward, 300, 4 sides | at most 0.5 ms | 1.000 ms | **missed** |",
        "| forward, 300, 4 sides (the goal) | at most 2 ms | 1.000 ms | met |",
        "| training, 300, 4 sides | at least 2 times faster than slow | 3.000 times faster than slow | met |",
        "| training, 300, 4 sides | at least 2 times faster than absent | no time of absent | **open** |",
        "| training, 300, 4 sides | at least 1 times faster than every peer | 3.000 times faster than every peer |",
        "| step, 300, 1 sides | at least 0.9 of the copy speed | 0.500 of the copy speed | **missed** |",
        "| forward, 300, 4 sides | 1.000 ms | 3.000 ms | none [1] | none [2] | 3.00 |",
        "| step, 300, 1 sides | 1.000 ms | 0.500 ms |  | 50% |",
        "- [2] absent: No module named 'absent'",
        "## Targets: 3 of 6 met",
    ]
    assert [line for line in expected if line not in page] == []
    assert max(len(line) for line in page.splitlines() if not line.startswith(("|", "-"))) <= 130


def test_sides_that_take_the_process_with_them(watched, tmp_path):
    done = watched("--only", "forward", "--limit", "10", "--rounds", "2", sides="tfla dies breaks silent slow")
    assert done.returncode == 0, done.stderr
    sides = json.loads((tmp_path / "sums.json").read_text())["rows"]["forward, 300, 5 sides"]["sides"]
    errors = {name: side["error"] for name, side in sides.items() if "error" in side}
    assert errors == {"dies": "ended with SIGABRT", "breaks": "illegal access", "silent": "no result within 10 s"}
    assert sides["tfla"]["seconds"] == [1e-3] * 2 and sides["slow"]["seconds"] == [3e-3] * 2
    page = (tmp_path / "sums.md").read_text()
    assert page in done.stdout and "- [1] dies: ended with SIGABRT" in page and "Not measured:" in page
    assert "forward, 300, 5 sides" in done.stderr and "  breaks: illegal access" in done.stderr


def test_rows_that_are_there_are_kept(run):
    run("--only", "forward", "--rounds", "1")
    first, page = run("--again", "--rounds", "2")
    assert [len(row["sides"]["tfla"]["seconds"]) for row in first["rows"].values()] == [1, 2, 2]
    assert "Not measured:" not in page
    second, page = run("--only", "step")
    assert list(second["rows"]) == ["step, 300, 1 sides"]
    assert "- training, 300, 4 sides" in page.partition("Not measured:")[2]


def test_a_side_that_is_left_out(run):
    content, _ = run("--only", "forward", "--without", "slow", "--rounds", "1")
    assert list(content["rows"]["forward, 300, 4 sides"]["sides"]) == ["tfla", "wrong", "absent"]


def test_arguments_that_cannot_be_made(run):
    content, page = run("--rounds", "1", no_memory="1")
    assert content["rows"]["forward, 300, 4 sides"]["sides"] == {"tfla": {"error": "no memory"}}
    assert (
        "| forward, 300, 4 sides | at most 0.5 ms | fails | **missed** |" in page
        and "training, 300, 4 sides | 1" in page
    )


def test_nothing_is_begun_when_the_time_is_up(run, capsys):
    content, page = run(budget=-1.0)
    assert content["rows"] == {} and page.count("| not measured | **open** |") == 6
    assert "left out, since the time is up: forward" in capsys.readouterr().err


def test_what_is_refused(run, watched, tmp_path, capsys):
    with pytest.raises(SystemExit):
        run("--rounds", "0")
    assert "--rounds was 0; it must be above 0" in capsys.readouterr().err
    with pytest.raises(SystemExit, match=f"--peers was {tmp_path}/none, which is no folder"):
        run("--peers", f"{tmp_path}/none")
    done = watched(no_gpu="1")
    assert "the process that measures ended with exit status 1 before it began anything" in done.stderr
    assert done.returncode == 1 and "no GPU" in done.stderr and not (tmp_path / "sums.md").exists()


# ---------------------------------------------------------------- the operators' own suites

SUITES = (ssd.SUITE, delta.SUITE, conv.SUITE)


@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.name)
def test_suites(suite, capsys):
    cases = suite.cases()
    names = [str(case) for case in cases]
    assert len(set(names)) == len(names)
    for case in cases:
        assert case.sides[0] == goals.OURS and (goals.COPIED in case.sides) == (case.problem.operation == "step")
        for goal in case.goals:
            of = goal.unit.partition("the time of ")[2]
            assert not of or of in names
            peer = goal.unit.partition("faster than ")[2]
            assert peer in ("", "every peer", *case.problem.sides)
    # A page of nothing: everything is open.
    page = beside_page.page(suite, {"about": {"date": "2000-01-01", "rounds": 3}, "rows": {}})
    wanted = sum(len(case.goals) for case in cases)
    assert f"## Targets: 0 of {wanted} met" in page and page.count("| not measured | **open** |") == wanted
    module = importlib.import_module(suite.module)
    with pytest.raises(SystemExit):
        beside.main(suite, module.__doc__, module.EXAMPLES, given=["--help"])
    words = capsys.readouterr().out
    assert "examples:" in words and f"  python -m {suite.module} --" in words and "--budget" in words


DUAL = ssd.Dual("forward", heads=8, head_dim=16, state=32, groups=2, batch=2, tokens=60)
RULE = delta.Rule("forward", heads=4, qk_heads=2, dqk=16, dhv=32, batch=2, tokens=60)
CONVOLUTION = conv.Convolution("forward", 96, batch=2, tokens=60)
SMALL = (
    DUAL, replace(DUAL, gated=False), RULE, replace(RULE, qk_heads=4), CONVOLUTION,
    replace(CONVOLUTION, side_by_side="tokens"), mamba2_layer.Layer("forward", 32, 16, 8, 2, 60),
    *(ssd.Relative("forward", name, 4, 16, 2, 60) for name in ("chunk_simple_gla", "chunk_lightning_attn")),
)  # fmt: skip
STEPS = (
    replace(DUAL, operation="step"), replace(DUAL, operation="step", state_dtype="bfloat16"),
    replace(RULE, operation="step"), replace(CONVOLUTION, operation="step"),
)  # fmt: skip


def checked(case, name="tfla"):
    given = problem.prepared(case, case.draw("cpu"))
    call = case.side(name, given)
    apart = problem.check(case, given, call)
    return apart, problem.timed_call(case, given, call)()


@pytest.fixture
def short_windows(monkeypatch):
    monkeypatch.setattr(problem, "WINDOW", 20)


@pytest.mark.parametrize("operation", ["forward", "training"])
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_sequences_are_those_of_their_formulas(case, operation, short_windows):
    case = replace(case, operation=operation)
    apart, made = checked(case)
    assert 0 < apart < 2.0**-6
    if operation == "training":
        assert [x.shape for x in made] == [x.shape for x in case.leaves(case.draw("cpu")).values()]


@pytest.mark.parametrize("case", STEPS, ids=str)
def test_steps_are_those_of_their_formulas(case):
    given = problem.prepared(case, case.draw("cpu"))
    before = given["state"].clone()
    assert 0 < problem.check(case, given, case.side("tfla", given)) < 2.0**-6
    assert torch.equal(given["state"], before)


@pytest.mark.parametrize("case", [CONVOLUTION, replace(CONVOLUTION, operation="step")], ids=str)
def test_pytorch_convolution(case, short_windows):
    assert checked(case, "PyTorch")[0] < 2.0**-6


@pytest.mark.parametrize("case", [replace(x, operation="training") for x in SMALL], ids=str)
def test_a_wrong_gradient_is_not_timed(case, short_windows):
    """Of each argument in turn, by a side that computes y as it should."""
    names = list(case.leaves(case.draw("cpu")))

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return 1.1 * gradient

    for name in names:
        given = problem.prepared(case, case.draw("cpu"))
        if isinstance(given[name], torch.nn.Parameter):
            continue  # which is in its layer, not in what a side is given
        bent = case.side("tfla", given | {name: Scaled.apply(given[name])})
        with pytest.raises(problem.Wrong, match=f"the gradient of {name} in tokens 0 to 20 is "):
            problem.check(case, given, bent)


def test_results_that_are_not_finite_are_not_timed(short_windows):
    given = problem.prepared(DUAL, DUAL.draw("cpu"))
    call = DUAL.side("tfla", given)

    def broken():
        y = call()
        y[1, 30, 7] = float("nan")  # outside of what is compared
        return y

    with pytest.raises(problem.Wrong, match="y is not finite"):
        problem.check(DUAL, given, broken)


def test_a_wrong_state_is_not_timed():
    case = STEPS[0]
    given = problem.prepared(case, case.draw("cpu"))
    call = case.side("tfla", given)

    def broken():
        y = call()
        given["state"][0, 0] *= 1.1
        return y

    with pytest.raises(problem.Wrong, match="the state is "):
        problem.check(case, given, broken)


def test_packages_without_their_init(tmp_path, monkeypatch):
    package = tmp_path / "mamba_ssm" / "ops"
    package.mkdir(parents=True)
    (tmp_path / "mamba_ssm" / "__init__.py").write_text("import mamba_ssm.ops.one, no_such_package\n")
    (package / "__init__.py").write_text("")
    (package / "one.py").write_text("from huggingface_hub import PyTorchModelHubMixin\nanswer = 42\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in [name for name in sys.modules if name.partition(".")[0] in ("mamba_ssm", packages.HUB)]:
        monkeypatch.delitem(sys.modules, name)
    packages.use_folder(tmp_path)
    try:
        assert packages.mamba_ssm("ops.one").answer == 42
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "mamba_ssm"]:
            del sys.modules[name]
