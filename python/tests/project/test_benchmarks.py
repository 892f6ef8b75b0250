"""What benchmarks/gpu/compare.py makes of peers that crash, hang or refuse, and of files from several runs; no GPU. And
how the growth of the CPU's times is judged."""

import json
import os
import sys

import pytest

from repository import ROOT

sys.path.append(str(ROOT))

from benchmarks.cpu import targets  # noqa: E402
from benchmarks.gpu import chunk_sizes, compare, fit_chunk_model, through_torch  # noqa: E402
from benchmarks.gpu import parts as gpu_parts  # noqa: E402
from benchmarks.gpu import targets as gpu_targets  # noqa: E402
from benchmarks.gpu.measure import Run  # noqa: E402
from benchmarks.gpu.peer_process import PeerProcess  # noqa: E402

# A worker that does as its job says: "dies" aborts after forward where LLVM's passes are on, "always" wherever.
WORKER = """
import json, os, sys, time
for line in sys.stdin:
    job = json.loads(line)
    if job["job"] == "hangs":
        time.sleep(60)
    if job["job"] == "refuses":
        print(json.dumps({"error": "no such kernel"}), flush=True)
        continue
    if job["job"] == "breaks":
        print(json.dumps({"error": "illegal access", "ended": True}), flush=True)
        time.sleep(60)
    print(json.dumps({"forward": 1.5}), flush=True)
    if job["job"] == "always" or job["job"] == "dies" and "DISABLE_LLVM_OPT" not in os.environ:
        print("Assertion failed", file=sys.stderr, flush=True)
        os.abort()
    print(json.dumps({"training": 2.5}), flush=True)
    print(json.dumps({"done": True}), flush=True)
"""


@pytest.fixture
def process():
    process = PeerProcess("worker", limit=5, command=[sys.executable, "-c", WORKER])
    yield process
    process.stop()


def job(name):
    return {"job": name, "operations": ["forward", "training"]}


BOTH = {"forward": 1.5, "training": 2.5}


def test_results_of_a_peer(process):
    assert process.run(job("works")) == BOTH


def test_a_refusal_is_a_reason(process):
    assert process.run(job("refuses")) == {"forward_error": "no such kernel", "training_error": "no such kernel"}
    assert process.run(job("works")) == BOTH


def test_an_abort_is_tried_without_llvm(process):
    assert process.run(job("dies")) == BOTH | {"without_llvm": True}
    assert process.run(job("works")) == BOTH | {"without_llvm": True}


def test_a_crash_costs_only_what_was_not_done(process):
    row = process.run(job("always"))
    assert row["ended"] and row["forward"] == 1.5 and row["training_error"] == "ended with SIGABRT: Assertion failed"
    assert process.run(job("works")) == BOTH | {"without_llvm": True}


def test_a_broken_process_is_replaced(process):
    assert process.run(job("breaks"))["training_error"] == "illegal access"
    assert process.run(job("works")) == BOTH


def test_a_hang_ends_at_the_limit(process):
    process.limit = 0.5
    assert process.run(job("hangs"))["forward_error"] == "no result within 0.5 s"
    process.limit = 5
    assert process.run(job("works")) == BOTH


PROGRAM = """#!{python}
import json, sys
given = dict(zip(sys.argv[2::2], sys.argv[3::2]))
if given["--op"] == "training" and given["--shape"].endswith("512,512"):
    sys.exit("tfla: too wide")
portable = "--portable" in sys.argv
time = {{"median": 2e-3 if portable else 1e-3}}
scratch = 1e9 if portable and given["--chunk"] == "0" else 5e8
rows = [{{"gate": gate, "burst_seconds": time, "seconds": time, "tensor_bytes": 3e9, "scratch_bytes": scratch}}
        for gate in ("exp", "sig")]
about = {{"tfla": "0", "date": "today", "gpu": "none"}}
open(given["--json"], "w").write(json.dumps(about | {{"sequences": rows}}))
"""


def test_files_of_several_runs_make_one_page(tmp_path):
    program = tmp_path / "tfla"
    program.write_text(PROGRAM.format(python=sys.executable))
    os.chmod(program, 0o755)
    files = []
    for wanted in (["lengths", "memory"], ["sweep"]):
        files.append(tmp_path / f"{wanted[0]}.json")
        run = Run(program, files[-1], min_time=0.1, limit=20, replicas=0, peers=[], lengths=(8192,))
        run.parts(wanted)
    whole = compare.merged(files)
    assert [about["parts"] for about in whole["runs"]] == [["lengths", "memory"], ["sweep"]]
    assert list(whole["parts"]) == ["lengths", "sweep", "memory"]
    verdicts = {verdict.what: verdict for verdict in gpu_targets.judge(whole["parts"])}
    assert not verdicts["mLSTMexp: forward, T up to 8,192"].met
    assert verdicts["mLSTMexp: training, T up to 8,192"].met
    assert verdicts["mLSTMsig: peak memory of training, T 8,192, chunk 1,024"].met
    lengths = whole["parts"]["lengths"]["8,8192,16,128,256"]["rows"]
    assert lengths["tfla mLSTMexp"]["forward"] == 1e-3 and lengths["tfla portable mLSTMexp"]["forward"] == 2e-3
    portable = [verdict for what, verdict in verdicts.items() if what.startswith("portable kernels, mLSTMsig")]
    assert [verdict.word for verdict in portable] == ["open", "open", "met", "met"]  # one length of five; memory
    wide = whole["parts"]["sweep"]["4,8192,8,512,512"]["rows"]["tfla mLSTMexp"]
    assert wide["forward"] == 1e-3 and wide["training_error"] == "tfla: too wide"


@pytest.mark.parametrize(
    ("mine", "dim", "error", "word"),
    [
        (1.0, 64, "fails", "met"),
        (2.0, 64, "fails", "missed"),
        (2.0, 32, "fails", "met"),
        (2.1, 32, "fails", "missed"),
        (1.0, 64, "no result within 120 s", "open"),
        (2.0, 64, "no result within 120 s", "missed"),
    ],
)
def test_the_sweep_is_judged_by_the_best_peer(mine, dim, error, word):
    rows = {"tfla mLSTMexp": {"forward": mine}, "tfla mLSTMsig": {"forward": mine}}
    rows |= {"slow": {"forward": 9.0}, "fast": {"forward": 2.0}, "other": {"forward_error": error}}
    case = {"workload": [4, 8192, 4096 // dim, dim, dim], "rows": rows}
    assert [verdict.word for verdict in gpu_targets.judge({"sweep": {"": case}})] == [word, word]


@pytest.mark.parametrize(
    ("mine", "theirs", "words"),
    [
        ({}, {}, ["met", "met"]),
        ({}, {512: None}, ["met", "open"]),
        ({}, {512: 1e-3}, ["met", "missed"]),
        ({2048: 4e-3}, {}, ["missed", "met"]),
        ({2048: None}, {}, ["missed", "missed"]),
    ],
)
def test_portable_kernels_are_judged_at_every_length(mine, theirs, words):
    """mine, theirs: times that differ from the other lengths'; None: it failed."""
    cases = {}
    for tokens in gpu_parts.LENGTHS:
        rows = {name: {} for name in ("tfla mLSTMexp", "tfla mLSTMsig")}
        times = {"tfla portable mLSTMexp": mine.get(tokens, 2e-3), "mlstm_kernels mLSTMexp": theirs.get(tokens, 5e-3)}
        rows |= {name: {} if time is None else {"forward": time, "training": time} for name, time in times.items()}
        cases[str(tokens)] = {"workload": [65536 // tokens, tokens, 16, 128, 256], "rows": rows}
    verdicts = [one for one in gpu_targets.judge({"lengths": cases}) if one.what.startswith("portable")]
    forward = [one for one in verdicts if one.what == "portable kernels, mLSTMexp: forward, each T"]
    assert [one.word for one in forward] == words
    assert len(verdicts) == 4  # training, too; nothing of the gate that was not measured


@pytest.mark.parametrize(
    ("default", "large", "words"),
    [
        (4.4e9, 4.3e9, ["met", "met"]),
        (4.5e9, 4.5e9, ["missed", "missed"]),
        (4.0e9, None, ["met", "missed"]),
        (None, 4.0e9, ["missed"]),
    ],
)
def test_portable_kernels_take_less_memory_in_larger_chunks(default, large, words):
    cases = {}
    for chunk, peak in ((0, default), (1024, large)):
        rows = {name: {} for name in ("tfla mLSTMexp", "tfla mLSTMsig")}
        rows["tfla portable mLSTMexp"] = {} if peak is None else {"peak_bytes": peak}
        cases[str(chunk)] = {"workload": [8, 8192, 16, 128, 256], "chunk": chunk, "rows": rows}
    verdicts = gpu_targets.judge({"memory": cases})
    assert [verdict.word for verdict in verdicts if verdict.what.startswith("portable")] == words


def test_measurements_without_portable_kernels_have_no_targets_for_them():
    parts = json.loads((ROOT / "docs/benchmarks/gpu.json").read_text())["parts"]
    for part in ("lengths", "memory"):
        for case in parts[part].values():
            case["rows"] = {name: row for name, row in case["rows"].items() if "portable" not in name}
    verdicts = gpu_targets.judge(parts)
    assert verdicts and not [verdict for verdict in verdicts if verdict.what.startswith("portable")]


def test_attention_is_judged_where_tfla_leads_least():
    cases = {}
    for tokens, theirs in ((512, 0.1), (1024, 0.9), (2048, 1.2), (4096, 1.1), (8192, None)):
        rows = {f"tfla mLSTM{gate}": {"forward": 1.0, "training": 1.0} for gate in ("exp", "sig")}
        rows[gpu_parts.ATTENTION] = {} if theirs is None else {"forward": theirs, "training": theirs}
        cases[str(tokens)] = {"workload": [65536 // tokens, tokens, 16, 128, 256], "rows": rows}
    forward, training, *_ = gpu_targets.judge({"attention": cases})
    assert forward.met and "1.10 times faster at T 4,096, the least of 2" in forward.measured
    assert not training.met and "at T 1,024" in training.measured


def test_a_file_of_something_else_is_refused(tmp_path):
    file = tmp_path / "other.json"
    file.write_text(json.dumps({"lengths": {}}))
    with pytest.raises(SystemExit, match="no file of --measure"):
        compare.merged([file])


def made_up_times(rates, variant):
    """What kernels with these constants would take."""
    of = chunk_sizes.VARIANTS[variant]
    rows = []
    for workload, operation, chunk in chunk_sizes.points(of, chunk_sizes.CHUNKS):
        row = {"variant": variant, "operation": operation, "chunk": chunk, "default": False} | vars(workload)
        cost = sum(x * rate for x, rate in zip(fit_chunk_model.features(row), rates[operation], strict=True))
        rows.append(row | {"seconds": cost * workload.batch * workload.tokens * workload.heads})
    return rows


def test_constants_of_the_chunk_model_are_found():
    rates = {"forward": [1.25e-14, 0.0, 9e-13, 1e-12], "training": [9e-15, 2e-13, 2.25e-12, 3e-12]}
    report = {"name": "a GPU", "date": "2026-01-01", "rows": made_up_times(rates, "portable bfloat16")}
    fit_chunk_model.add_fit(report)
    for operation, wanted in rates.items():
        found = report["rates"]["portable bfloat16"][operation]
        assert list(found.values()) == pytest.approx(wanted, rel=1e-3, abs=1e-20)
    assert all(row["predicted"] == pytest.approx(row["seconds"], rel=1e-3) for row in report["rows"])
    before = fit_chunk_model.HEADER.read_text()
    after = fit_chunk_model.header(report, before)
    assert "fitted to times on a GPU, 2026-01-01" in after and "2.250e-12" in after
    floats = before[before.index("// float32") :]
    assert after.endswith(floats)  # not measured here, so not changed
    defaults = {(row["dqk"], row["chunk"]) for row in report["rows"] if row["default"]}
    assert defaults == {(64, 64), (128, 128), (256, 128)}
    assert "best by the model 128" in fit_chunk_model.comparison(report)


def growth_turn(short, tokens, long, spread=1.0):
    """Times per token of two lengths, in microseconds; medians are `spread` times slower."""
    times = {2048: short * 2048e-6, tokens: long * tokens * 1e-6}
    return {str(count): {"fastest": time, "median": spread * time} for count, time in times.items()}


def test_growth_is_that_of_the_fastest_turns():
    turns = [
        growth_turn(3.0, 4096, 3.2),
        growth_turn(9.0, 65536, 3.3, spread=3),  # the machine slowed down and recovered
        growth_turn(3.1, 4096, 9.6),
        growth_turn(3.0, 65536, 9.9),
    ]
    assert targets.fastest(turns) == pytest.approx({2048: 3.0 * 2048e-6, 4096: 3.2 * 4096e-6, 65536: 3.3 * 65536e-6})
    assert list(targets.fastest(turns)) == [2048, 4096, 65536]
    assert targets.growth(turns) == pytest.approx(1.1)


@pytest.mark.parametrize(("longest", "met"), [(3.44, True), (3.46, False)])
def test_growth_verdict(longest, met):
    turns = [growth_turn(3.0, 4096, 3.0), growth_turn(3.0, 65536, longest)]
    verdicts = targets.judge_growth({"growth": {operation: {"turns": turns} for operation in targets.OPERATIONS}})
    assert [verdict.met for verdict in verdicts] == [met, met]
    assert "T 2,048 to 65,536" in verdicts[0].what


def test_cases_through_torch():
    """Those of 65,536 tokens have as many, packed ones too; uneven lengths lie within their range."""
    lengths = through_torch.uneven_lengths()
    assert sum(lengths) == through_torch.TOKENS and min(lengths) >= 16 and max(lengths) <= 3000
    assert len(set(lengths)) > 20
    for case in through_torch.CASES:
        half = case.batch == 4
        assert case.batch * case.tokens == through_torch.TOKENS // (2 if half else 1), case.name
        assert not case.groups or case.heads % case.groups == 0
        assert not case.lengths or (case.batch == 1 and sum(case.lengths) == case.tokens)
    names = [case.name for case in through_torch.CASES]
    assert len(set(names)) == len(names) == 17


def test_table_through_torch():
    """A row that keeps states says what that saves; one that does not, and one that failed, have no such number."""
    times = {"forward": 1.0, "denominators": 4.0, "states": 3.0}
    bytes_of = {"denominators": 1_000_000_000, "states": 3_000_000_000}
    row = {"name": "a", "gate": "exp", "milliseconds": times, "peak_bytes": bytes_of, "saved_bytes": bytes_of}
    kept, less = ({"kept": {"denominators": "denominators", "states": word}} for word in ("states", "denominators"))
    lines = through_torch.table([row | kept, row | less, {"name": "b", "gate": "exp", "error": "no"}]).splitlines()
    assert lines[2] == "| a | exp | 1.000 | 4.000 | 3.000 | 25.0 % | 3.000 | 1.00 | 3.00 |"
    assert lines[3] == "| a | exp | 1.000 | 4.000 | - | - | 3.000 | 1.00 | 3.00 |"
    assert lines[4].startswith("| b | exp | no |")
    assert len({line.count("|") for line in lines}) == 1
