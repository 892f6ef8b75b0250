#!/usr/bin/env python3
"""Tests of `tfla analyse`: its files, its refusals, and the paper's claims about the transfer behaviour.
usage: analyse_test.py PROGRAM"""

from __future__ import annotations

import csv
import math
import tempfile
import unittest
from pathlib import Path

from cli_test import ProgramTest, tfla

SUBJECTS = {
    "flops": {"flops_terms", "flops_totals", "flops_gates", "flops_curves"},
    "bytes": {"bytes_terms", "bytes_totals"},
    "runtime": {"runtime"},
    "intensity": {"intensity"},
    "roofline": {"roofline_machines", "roofline_points"},
    "chunk": {"chunk_best", "chunk_cpu_tiles", "chunk_flop_optimal", "chunk_runtime_optimal", "chunk_over_intensity"},
    "transfer": {"transfer"},
    "scale": {"scale_steps", "scale_collectives", "scale_memory"},
}
EPSILONS = ("after_1e-2", "after_1e-6", "after_1e-8")
Row = dict[str, str]
Gains = dict[tuple[float, float], float]  # by forget and input gate


def read(path: Path) -> list[Row]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


class Files(ProgramTest):
    def test_every_subject_prints_and_writes(self) -> None:
        for subject, names in SUBJECTS.items():
            options = ("--step", "4") if subject == "transfer" else ()
            printed = self.assert_done("analyse", subject, *options)
            self.assertGreater(len(printed.splitlines()), 5, subject)
            out = self.directory / subject
            self.assertEqual(self.assert_done("analyse", subject, *options, "--out", str(out)), printed)
            self.assertEqual({path.name for path in out.iterdir()}, {f"{name}.csv" for name in names})
            for name in names:
                rows = read(out / f"{name}.csv")
                self.assertGreater(len(rows), 0, name)
                self.assertTrue(all(None not in row and None not in row.values() for row in rows), name)

    def test_files_are_replaced(self) -> None:
        path = self.directory / "bytes_totals.csv"
        path.write_text("old")
        self.assert_done("analyse", "bytes", "--out", str(self.directory))
        self.assertEqual(len(read(path)), 10)

    def test_options_reach_the_model(self) -> None:
        options = ("--shape", "1,1024,2,64,128", "--chunk", "64", "--causal", "1", "--state-bytes", "2")
        self.assert_done("analyse", "flops", *options, "--out", str(self.directory))
        rows = read(self.directory / "flops_terms.csv")
        (intra,) = (row for row in rows if row["term"] == "Intra Outputs" and row["gate"] == "sig")
        self.assertEqual(float(intra["products"]), 2 * 64**2 * (64 + 128))
        self.assert_done("analyse", "bytes", *options, "--out", str(self.directory))
        rows = read(self.directory / "bytes_totals.csv")
        (total,) = (
            row for row in rows if (row["pass"], row["formulation"], row["gate"]) == ("forward", "chunkwise", "sig")
        )
        self.assertEqual(float(total["exact"]), 2 * 1024 / 64 * (4 * 64 * 2 + 3 * 64 * 192 * 2 + 2 * 64 * 128 * 2))

    def test_this_machine_is_measured(self) -> None:
        self.assert_done("analyse", "roofline", "--accelerator", "H100,here", "--out", str(self.directory))
        known, here = read(self.directory / "roofline_machines.csv")
        self.assertEqual([known["accelerator"], here["accelerator"]], ["H100", "here"])
        self.assertEqual(round(float(known["intensity"])), 295)
        self.assertGreater(float(here["flops_per_second"]), 1e8)
        self.assertGreater(float(here["bytes_per_second"]), 1e8)

    def test_backward_takes_longer(self) -> None:
        times = {}
        for which in ("forward", "backward"):
            self.assert_done("analyse", "runtime", "--pass", which, "--gate", "exp", "--out", str(self.directory))
            rows = read(self.directory / "runtime.csv")
            times[which] = {(row["accelerator"], row["chunk"]): float(row["sum_ms"]) for row in rows}
        for key, forward in times["forward"].items():
            self.assertGreater(
                times["backward"][key], 1.8 * forward
            )  # about twice the bytes, more than twice the FLOPs

    def test_a_search_finds_the_closed_form(self) -> None:
        self.assert_done("analyse", "chunk", "--out", str(self.directory))
        for row in read(self.directory / "chunk_best.csv"):
            self.assertEqual(row["runtime_optimal"], row["searched"], row)
            if row["paper_formula"]:
                self.assertAlmostEqual(float(row["paper_formula"]) / float(row["searched"]), 1, delta=0.01)


class Refusals(ProgramTest):
    def test_command_line(self) -> None:
        for arguments, names in (
            ((), "flops, bytes, runtime, intensity, roofline, chunk, transfer, scale"),
            (("gossip",), "gossip"),
            (("flops", "extra"), "extra"),
            (("flops", "--accelerator", "H100"), "--accelerator"),
            (("transfer", "--gate", "exp"), "--gate"),
            (("chunk", "--accelerator", "H100,TPU"), "TPU"),
            (("chunk", "--accelerator", ""), "--accelerator"),
            (("flops", "--shape", "0,8192,8,256,512"), "--shape"),
            (("flops", "--shape", "8,0,8,256,512"), "--shape"),
            (("flops", "--shape", "8,8192,0,256,512"), "H of --shape"),
            (("flops", "--shape", "8,8192,8,-256,512"), "dqk of --shape"),
            (("flops", "--shape", "8,8192,8,256"), "--shape"),
            (("flops", "--chunk", "0"), "--chunk"),
            (("flops", "--causal", "0"), "--causal"),
            (("flops", "--causal", "nan"), "--causal"),
            (("runtime", "--gate", "all"), "--gate"),
            (("runtime", "--pass", "sideways"), "--pass"),
            (("intensity", "--state-bytes", "0"), "--state-bytes"),
            (("transfer", "--step", "0"), "--step"),
            (("transfer", "--step", "-1"), "--step"),
            (("transfer", "--threads", "-1"), "--threads"),
        ):
            out = self.directory / "out"
            subject = () if not arguments else (*arguments, "--out", str(out)) if len(arguments) > 2 else arguments
            self.assert_refused("analyse", *subject, names=names)
            self.assertFalse(out.exists(), arguments)

    def test_help_is_named(self) -> None:
        self.assertIn("see tfla analyse flops --help", tfla("analyse", "flops", "--nonsense").stderr)

    def test_folder(self) -> None:
        file = self.directory / "file"
        file.write_text("kept")
        for folder in (file, file / "below", self.directory / "no" / "parent", Path("/proc/tfla")):
            for subject in ("flops", "transfer"):
                self.assert_refused("analyse", subject, "--out", str(folder), names=str(folder))
        self.assertEqual(file.read_text(), "kept")
        self.assertEqual([path.name for path in self.directory.iterdir()], ["file"])

    def test_nothing_is_half_written(self) -> None:
        obstacle = self.directory / "bytes_totals.csv"  # the second of two files
        obstacle.mkdir()
        (obstacle / "kept").write_text("")
        self.assert_refused("analyse", "bytes", "--out", str(self.directory), names="--out")
        self.assertEqual([path.name for path in self.directory.iterdir()], ["bytes_totals.csv"])


class Transfer(ProgramTest):
    """Section 4.2 and appendix D.2. Gains are between 0 and 1 after the norm."""

    rows: list[Row]

    @classmethod
    def setUpClass(cls) -> None:
        with tempfile.TemporaryDirectory() as directory:
            done = tfla("analyse", "transfer", "--step", "0.5", "--out", directory)
            assert done.returncode == 0, done.stderr
            cls.rows = read(Path(directory) / "transfer.csv")

    def gains(self, gate: str, normalizer: str, column: str) -> Gains:
        rows = [row for row in self.rows if (row["gate"], row["normalizer"]) == (gate, normalizer)]
        return {(float(row["forget_gate"]), float(row["input_gate"])): float(row[column]) for row in rows}

    def exponential(self, column: str) -> Gains:
        return self.gains("exp", "max(|S1| exp(-m))", column)

    def sigmoid(self, column: str) -> Gains:
        return self.gains("sig", "1", column)

    def distance(self, a: Gains, b: Gains) -> float:
        self.assertEqual(a.keys(), b.keys())
        return max(abs(a[key] - b[key]) for key in a)

    def dependence(self, gains: Gains) -> float:
        """How much the gain changes with the input gate at a forget gate, at most."""
        columns: dict[float, list[float]] = {}
        for (forget, _), gain in gains.items():
            columns.setdefault(forget, []).append(gain)
        return max(max(column) - min(column) for column in columns.values())

    def transition(self, gains: Gains, forget: float) -> float:
        """The input gate at which half of the signal passes."""
        curve = sorted((i, gain) for (f, i), gain in gains.items() if f == forget)
        for (i, gain), (next_i, next_gain) in zip(curve, curve[1:], strict=False):
            if gain < 0.5 <= next_gain:
                return i + (0.5 - gain) / (next_gain - gain) * (next_i - i)
        raise AssertionError("the gain does not cross one half")

    def test_the_grid_is_the_papers(self) -> None:
        gains = self.sigmoid("before")
        self.assertEqual(len(gains), 35 * 41)
        self.assertEqual({min(f for f, _ in gains), max(f for f, _ in gains)}, {-5.0, 12.0})
        self.assertEqual({min(i for _, i in gains), max(i for _, i in gains)}, {-12.0, 8.0})

    def test_after_the_norm_sigmoid_behaves_as_exponential(self) -> None:
        """Within a hundredth of the full gain at the default epsilon and below; before the norm they are far apart."""
        for column in ("after_1e-6", "after_1e-8"):
            self.assertLess(self.distance(self.exponential(column), self.sigmoid(column)), 0.01)
        self.assertGreater(self.distance(self.exponential("before"), self.sigmoid("before")), 1)

    def test_from_suppressing_to_passing(self) -> None:
        for gains in (self.exponential("after_1e-6"), self.sigmoid("after_1e-6")):
            self.assertLess(min(gains.values()), 0.02)
            self.assertGreater(max(gains.values()), 0.98)
            for forget in (-5.0, 0.0, 5.0, 12.0):
                self.assertLess(self.transition(gains, forget), -5)

    def test_a_smaller_epsilon_moves_the_transition_down(self) -> None:
        """h grows as the input gate exp(i), so the transition moves by half the logarithm of the ratio of epsilons. The
        sigmoid is log(1 + exp(i)) behind; the grid adds the error of interpolation."""
        for forget in (-5.0, 0.0, 5.0):
            for gains, slack in ((self.exponential, 0.1), (self.sigmoid, 0.2)):
                high, middle = (self.transition(gains(column), forget) for column in EPSILONS[:2])
                self.assertAlmostEqual(high - middle, math.log(1e4) / 2, delta=slack)
        for gains in (self.exponential, self.sigmoid):
            middle, low = (self.transition(gains(column), 0.0) for column in EPSILONS[1:])
            self.assertAlmostEqual(middle - low, math.log(1e2) / 2, delta=0.1)

    def test_only_the_default_normalizer_of_exponential_depends_on_its_gate(self) -> None:
        for column in EPSILONS:
            self.assertGreater(self.dependence(self.exponential(column)), 0.9)
            for normalizer in ("max(|S1| 1)", "1"):
                self.assertLess(self.dependence(self.gains("exp", normalizer, column)), 1e-4)

    def test_a_bounded_normalizer_does_not_alter_sigmoid(self) -> None:
        for column in EPSILONS:
            bounded = self.gains("sig", "max(|S1| 1)", column)
            self.assertLess(self.distance(bounded, self.sigmoid(column)), 0.02)

    def test_unbounded_normalizers_lose_the_gate(self) -> None:
        for column in EPSILONS:
            self.assertLess(self.dependence(self.gains("sig", "|S1|", column)), 1e-4)
            self.assertEqual(self.gains("sig", "|S1|", column), self.gains("sig", "S1", column))


if __name__ == "__main__":
    unittest.main()
