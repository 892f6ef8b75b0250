#!/usr/bin/env python3
"""Tests of `tfla analyse scale`: that its sums are those of its rows, its options, its refusals.
usage: scale_test.py PROGRAM"""

from __future__ import annotations

import json
import unittest
from typing import Any

from cli_test import ProgramTest


class Scale(ProgramTest):
    """Bytes are compared with processes that train in python/tests/lm/test_lm_scale.py."""

    def report(self, *options: str) -> dict[str, Any]:
        report: dict[str, Any] = json.loads(self.assert_done("analyse", "scale", "--json", *options))
        return report

    def runs(self, *options: str) -> dict[tuple[str, int], dict[str, Any]]:
        return {(run["strategy"], run["gpus"]): run for run in self.report(*options)["runs"]}

    def test_times_are_those_of_the_collectives(self) -> None:
        report = self.report("--strategy", "all", "--gpus", "1,8,64")
        one = report["one_gpu"]
        self.assertEqual(len(report["runs"]), 12)
        for run in report["runs"]:
            time = sum(row["calls"] * row["seconds"] for row in run["collectives"])
            sent = sum(row["calls"] * row["sent_bytes"] for row in run["collectives"])
            self.assertAlmostEqual(run["communication_seconds"], time)
            self.assertAlmostEqual(run["sent_bytes"] / max(sent, 1), min(sent, 1))
            again = one["kernel_seconds"] if run["context_ranks"] > 1 else 0
            self.assertAlmostEqual(run["computation_seconds"], one["step_seconds"] + again)
            step = run["computation_seconds"] + time - run["hidden_seconds"]
            self.assertAlmostEqual(run["step_seconds"], step)
            self.assertAlmostEqual(run["efficiency"], one["step_seconds"] / step)
            self.assertAlmostEqual(run["tokens_per_second"] * step / run["gpus"], one["tokens"], places=3)
            self.assertLessEqual(run["efficiency_without_overlap"], run["efficiency"])
            self.assertEqual(run["gpus"] == 1, not run["collectives"])
            self.assertEqual(run["efficiency"] == 1, run["gpus"] == 1)

    def test_options_reach_the_model(self) -> None:
        fields = ("--layers", "2", "--dim", "48", "--heads", "3", "--vocab", "99", "--ffn-dim", "50", "--qk-factor",
                  "0.25", "--v-factor", "2", "--step-seconds", "1", "--kernel-seconds", "0.5")  # fmt: skip
        report = self.report(*fields, "--batch", "6", "--micro-batch", "2", "--context", "10", "--node", "4")
        self.assertEqual(list(report["model"].values())[:-1], [2, 48, 3, 99, 50, 12, 96])
        self.assertEqual(report["one_gpu"]["tokens"], 60)
        self.assertEqual(report["one_gpu"]["kernel_seconds"], 0.5)
        self.assertEqual({(run["micro_batch"], run["micro_batches"]) for run in report["runs"]}, {(2, 3)})
        self.assertEqual({run["context_ranks"] for run in report["runs"]}, {1, 4})
        network = self.report("--nvlink", "1", "--network", "2", "--call-latency", "3", "--nvlink-latency", "4",
                              "--network-latency", "5", "--overlap", "0.5")["network"]  # fmt: skip
        expected = [8, 1e9, 2e9, 3e-6, 4e-6, 5e-6, 0.5]
        for value, wanted in zip(network.values(), expected, strict=True):
            self.assertAlmostEqual(value / wanted, 1)

    def test_micro_batches_take_the_measured_time_each(self) -> None:
        one, four = (self.report("--batch", batch, "--micro-batch", "8")["one_gpu"] for batch in ("8", "32"))
        for key in ("tokens", "step_seconds", "kernel_seconds"):
            self.assertAlmostEqual(four[key], 4 * one[key])

    def test_a_context_group_stays_in_its_node_or_takes_whole_ones(self) -> None:
        for ranks in (2, 8, 16, 64):
            run = self.runs("--strategy", "context", "--gpus", "64", "--context-parallel", str(ranks))["context", 64]
            states = [row for row in run["collectives"] if "states" in row["what"]]
            self.assertEqual({row["ranks"] for row in states}, {ranks})

    def test_what_slows_the_network_down_costs(self) -> None:
        before = self.runs()
        for option, value in {
            "--nvlink": "20", "--network": "1", "--network-latency": "5000", "--nvlink-latency": "5000",
            "--call-latency": "5000", "--overlap": "0",
        }.items():  # fmt: skip
            after = self.runs(option, value)
            for key, run in before.items():
                slower = key[1] == 64 or not option.startswith("--network")
                self.assertEqual(after[key]["efficiency"] < run["efficiency"], slower, (option, key))

    def test_narrow_elements_halve_bytes(self) -> None:
        wide, narrow = self.runs("--strategy", "ddp"), self.runs("--strategy", "ddp", "--dtype", "bfloat16")
        for key, run in wide.items():
            self.assertEqual(run["sent_bytes"], 2 * narrow[key]["sent_bytes"])

    def test_help_has_examples(self) -> None:
        self.assertGreaterEqual(self.assert_done("analyse", "scale", "--help").count("  tfla analyse scale"), 3)

    def test_refusals(self) -> None:
        for arguments, names in (
            (("--shape", "1,2,3,4,5"), "--shape"),
            (("--model", "3b"), "tiny, 160m, 400m, 1.4b, 7b"),
            (("--model", "7b"), "--step-seconds"),
            (("--model", "160m", "--batch", "16"), "--step-seconds"),
            (("--model", "160m", "--context", "4096"), "--step-seconds"),
            (("--model", "160m", "--layers", "6"), "--step-seconds"),
            (("--model", "160m", "--checkpoint-activations"), "--step-seconds"),
            (("--model", "160m", "--step-seconds", "0.1"), "--kernel-seconds"),
            (("--step-seconds", "0.1", "--kernel-seconds", "0.2"), "--kernel-seconds"),
            (("--step-seconds", "0"), "--step-seconds"),
            (("--gpus", "0"), "--gpus"),
            (("--gpus", "8,12"), "--gpus"),
            (("--gpus", "8,x"), "--gpus"),
            (("--gpus", str(2**21)), "--gpus"),
            (("--strategy", "ddp,zero"), "ddp, fsdp, context, context-fsdp"),
            (("--context-parallel", "3"), "--context-parallel"),
            (("--context-parallel", "16", "--gpus", "8"), "--context-parallel"),
            (("--context-parallel", "12", "--gpus", "24"), "--context-parallel"),
            (("--micro-batch", "3"), "--micro-batch"),
            (("--dim", "100", "--heads", "8"), "--qk-factor"),
            (("--v-factor", "0"), "--v-factor"),
            (("--dtype", "int8"), "float32, bfloat16"),
            (("--overlap", "1.5"), "--overlap"),
            (("--network", "0"), "--network"),
            (("--nvlink-latency", "-1"), "--nvlink-latency"),
        ):
            out = self.directory / "out"
            self.assert_refused("analyse", "scale", *arguments, "--out", str(out), names=names)
            self.assertFalse(out.exists(), arguments)


if __name__ == "__main__":
    unittest.main()
