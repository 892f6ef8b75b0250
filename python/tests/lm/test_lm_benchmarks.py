"""What benchmarks/lm/step_time.py makes of subjects that do not fit, fail or abort; on the CPU, all of them run."""

import json
import math
import os
import sys

import pytest
import torch

from lm_inputs import ROOT
from tfla.lm import checks

sys.path.append(str(ROOT))

from benchmarks.lm import generation, generation_check, generation_page, step_time  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
TINY = "--device cpu --sizes tiny --layers 1 --vocab 512 --context 128 --batch 1 --steps 1 --no-compile"
MEMORY = [
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory. Tried\nmore"),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate"),
]


def test_all_subjects_are_measured(capsys, tmp_path):
    assert step_time.main([*TINY.split(), "--json", str(tmp_path / "bench.json")]) == 0
    rows = json.loads((tmp_path / "bench.json").read_text())
    assert [row["model"] for row in rows] == list(step_time.SUBJECTS) and not [row for row in rows if "failed" in row]
    for row in rows:
        assert row["tokens_per_second"] == pytest.approx(128e3 / row["milliseconds"], rel=1e-6)
        assert row["loss"] == pytest.approx(math.log(512), rel=0.1)  # there is nothing to learn of random tokens
    assert all(row["kernel_milliseconds"] > 0 for row in rows[:2])
    assert capsys.readouterr().out.count("| tiny |") == len(step_time.SUBJECTS)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [("--sizes 2b", "preset is '2b'"), ("--sizes ,", "sizes is empty"), ("--models exp,rnn", "models is 'rnn'")],
)
def test_unknown_subjects_are_refused_before_any_is_measured(flags, sentence, monkeypatch, capsys):
    monkeypatch.setattr(step_time, "measure", None)
    assert step_time.main([*TINY.split(), *flags.split()]) == 2
    assert capsys.readouterr().err.startswith(f"tfla: {sentence}")


def test_a_peer_that_aborts_takes_only_its_process():
    assert step_time.isolated(max, 3, 5) == 5
    with pytest.raises(RuntimeError, match="ended with code -6 before it was done"):
        step_time.isolated(os.abort)
    with pytest.raises(RuntimeError, match="ValueError: "):
        step_time.isolated(int, "x")


@pytest.mark.parametrize("error", MEMORY, ids=repr)
def test_the_batch_is_halved_for_all_where_memory_does_not_suffice(monkeypatch, error):
    seen = []

    def measure(subject, setting):
        seen.append((subject, setting.batch))
        if setting.batch > 1:
            raise error
        return {"model": subject, "size": setting.size, "batch": setting.batch}

    monkeypatch.setattr(step_time, "measure", measure)
    monkeypatch.setattr(step_time, "release", lambda: None)  # there is nothing, and it takes long
    setting = step_time.Setting("tiny", context=8, batch=2, device="cpu", compile=False)
    rows = step_time.compare(("exp", "sigmoid"), setting, lambda text: None)
    assert seen == [("exp", 2), ("exp", 1), ("sigmoid", 1)] and [row["batch"] for row in rows] == [1, 1]
    assert checks.out_of_memory(error) and not checks.out_of_memory(RuntimeError("shapes differ"))
    assert not checks.out_of_memory(ValueError("out of memory"))


def test_generation_is_measured_and_has_a_page(monkeypatch):
    monkeypatch.setattr(generation.generation_peers, "PEERS", {"a peer": lambda *given: 1e6, "no peer": lambda: 0})
    cases = (generation.Case("tiny", 1, "float32", target=0.0, peers=True), generation.Case("tiny", 2, "float32"))
    monkeypatch.setitem(generation.QUICK, "cpu", cases)
    result = generation.measure_all(torch.device("cpu"), quick=True)
    for row, batch in zip(result["rows"], (1, 2), strict=True):
        model = generation.preset("tiny")
        with torch.device("meta"):
            weights = sum(x.numel() for x in generation.LanguageModel(model).parameters()) - model.vocab * model.dim
        heads, dqk, dhv = model.heads, model.dim // 2 // model.heads, model.dim // model.heads
        states = 2 * batch * model.layers * heads * (dqk * dhv + dqk + 1)
        assert row["bytes"] == 4 * (weights + states) and row["greedy_ms"] > 0 and row["sampled_ms"] > 0
    assert result["rows"][0]["peers_ms"]["a peer"] == 1e6 and "TypeError" in result["rows"][0]["peers_ms"]["no peer"]
    text = generation_page.page({"cuda": result})
    assert "| tiny, float32, batch 1 | 0.0 ms |" in text and "**missed**" in text and "**open**" in text
    assert "faster than a peer | 3 times |" in text and "## On a GPU" in text and "## On a CPU" not in text


def test_the_check_of_generation_can_fail(monkeypatch, capsys):
    assert generation_check.main(torch.device("cpu"), quick=True) == 0
    decode = generation_check.Decoder.decode
    monkeypatch.setattr(generation_check.Decoder, "decode", lambda self, *given: 1.1 * decode(self, *given))
    assert generation_check.main(torch.device("cpu"), quick=True) == 1
    assert capsys.readouterr().out.split()[-1] == "failed"


def test_the_page_of_generation_is_that_of_its_data():
    data, page = (ROOT / f"docs/benchmarks/generation.{suffix}" for suffix in ("json", "md"))
    assert page.read_text() == generation_page.page(json.loads(data.read_text()))
