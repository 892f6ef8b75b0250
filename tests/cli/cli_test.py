#!/usr/bin/env python3
"""Tests of the program itself: help, version, exit codes, errors of one sentence, JSON. usage: cli_test.py PROGRAM"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

PROGRAM = Path(sys.argv.pop(1)).resolve() if len(sys.argv) > 1 else Path("build/release/tfla").resolve()
SMALL = ("--tokens", "32,64", "--shape", "1,32,2,16,16", "--min-time", "0.001", "--threads", "1")
STEP = ("--op", "step", "--shape", "2,1,2,16,16", "--min-time", "0.001", "--threads", "1")


def tfla(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(PROGRAM), *arguments], capture_output=True, text=True, timeout=300, check=False)


class ProgramTest(unittest.TestCase):
    def setUp(self) -> None:
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.directory = Path(directory.name)

    def assert_done(self, *arguments: str) -> str:
        done = tfla(*arguments)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def assert_fails(self, *arguments: str, names: str) -> None:
        """Refused after the work began, so there may be lines of progress before the sentence."""
        done = tfla(*arguments)
        self.assertEqual(done.returncode, 2, (arguments, done.stdout, done.stderr))
        self.assertRegex(done.stderr.splitlines()[-1], r"\Atfla: [^\n]+\Z", arguments)
        self.assertIn(names, done.stderr, arguments)

    def assert_refused(self, *arguments: str, names: str) -> None:
        done = tfla(*arguments)
        self.assertEqual(done.returncode, 2, (arguments, done.stdout, done.stderr))
        self.assertEqual(done.stdout, "", arguments)
        self.assertRegex(done.stderr, r"\Atfla: [^\n]+\n\Z", arguments)
        self.assertIn(names, done.stderr, arguments)

    def written_json(self, name: str) -> dict[str, object]:
        content: dict[str, object] = json.loads((self.directory / name).read_text())
        return content


class Teaching(ProgramTest):
    def test_version(self) -> None:
        self.assertRegex(self.assert_done("--version"), r"\Atfla \d+\.\d+\.\d+\n\Z")

    def test_help_has_examples(self) -> None:
        for command in ((), ("check",), ("bench",), ("explain",), ("analyse",)):
            text = self.assert_done(*command, "--help")
            examples = text[text.index("Examples:") :].count("  tfla ")
            self.assertGreaterEqual(examples, 3, command)
            self.assertLessEqual(examples, 5, command)

    def test_help_names_the_commands(self) -> None:
        text = self.assert_done("--help")
        for command in ("check", "bench", "explain", "analyse"):
            self.assertIn(command, text)


class RandomCheck(ProgramTest):
    def test_roundings_explain_every_error(self) -> None:
        path = self.directory / "random.json"
        text = self.assert_done("check", "--random", "40", "--seed", "7", "--json", str(path))
        self.assertIn("40 calls", text)
        report = json.loads(path.read_text())
        self.assertEqual((report["calls"], report["seed"], report["outliers"]), (40, 7, []))


class Refusals(ProgramTest):
    def test_command_line(self) -> None:
        for arguments, names in (
            ((), "check, bench, explain, analyse"),
            (("dance",), "dance"),
            (("--nonsense",), "--nonsense"),
            (("check", "--nonsense"), "--nonsense"),
            (("check", "extra"), "extra"),
            (("check", "--dtype"), "--dtype"),
            (("explain",), "--shape"),
        ):
            self.assert_refused(*arguments, names=names)

    def test_values(self) -> None:
        for arguments, names in (
            (("check", "--threads", "two"), "--threads"),
            (("check", "--threads", "-1"), "--threads"),
            (("check", "--threads", "1.5"), "--threads"),
            (("check", "--chunk", "-8"), "--chunk"),
            (("check", "--chunk", "99999999999999999999"), "--chunk"),
            (("check", "--seed", "x"), "--seed"),
            (("check", "--random", "0"), "--random"),
            (("check", "--dtype", "int8"), "float32, float64, bfloat16, float16"),
            (("check", "--dtype", "int32"), "int32"),
            (("check", "--device", "tpu"), "cpu, cuda"),
            (("bench", "--op", "sideways"), "forward, training, step, all"),
            (("bench", "--gate", "exp,relu"), "relu"),
            (("bench", "--formulation", "chunky"), "chunkwise, parallel, recurrent"),
            (("bench", "--op", "training", "--formulation", "recurrent"), "recurrent"),
            (("bench", "--tokens", "512,,1024"), "--tokens"),
            (("bench", "--tokens", "0"), "--tokens"),
            (("bench", "--min-time", "0"), "--min-time"),
            (("bench", "--min-time", "nan"), "--min-time"),
            (("bench", "--sample-time", "0"), "--sample-time"),
            (("explain", "--shape", "1,2,3"), "B,T,H,dqk,dhv"),
            (("explain", "--shape", "1,-2048,4,128,256"), "T of --shape"),
            (("explain", "--shape", "1,2048,4,0,256"), "dqk of --shape"),
            (("explain", "--shape", "1,2048,4,128,256", "--gate", "all"), "--gate"),
            (("explain", "--shape", "1,2048,4,128,256", "--operator", "gla"), "--operator"),
            (("explain", "--shape", "1,2048,4,128,256", "--operator", "delta", "--gate", "exp"), "--gate"),
            (("explain", "--shape", "1,2048,4,128,256", "--operator", "delta", "--gpu", "H200"), "CUDA"),
            (("bench", "--operator", "delta", "--gemm"), "--gemm"),
            (("check", "--operator", "delta", "--random", "5"), "--random"),
        ):
            self.assert_refused(*arguments, names=names)

    def test_what_the_library_refuses(self) -> None:
        self.assert_refused("explain", "--shape", "1,64,4,16,16", "--qk-heads", "3", names="3")
        self.assert_refused("check", "--device", "cuda", names="CUDA")
        huge = str(2**62)
        self.assert_refused("bench", "--shape", f"1,{huge},4,16,16", names=huge)
        self.assert_refused("check", "--shape", f"1,{huge},4,16,16", names=huge)
        self.assert_refused("explain", "--shape", f"{huge},{huge},4,16,16", names=huge)
        self.assert_refused("explain", "--shape", "1,64,4,16,16", "--op", "backward", "--formulation", "recurrent",
                            names="recurrent")  # fmt: skip

    def test_json_file_is_tried_before_the_work(self) -> None:
        missing = str(self.directory / "missing" / "out.json")
        for command in ("check", "bench"):
            self.assert_refused(command, "--json", missing, names=missing)
            self.assert_refused(command, "--json", str(self.directory), names=str(self.directory))

    def test_full_disk_is_noticed(self) -> None:
        if not os.path.exists("/dev/full"):
            self.skipTest("there is no /dev/full here")
        with open("/dev/full", "w") as full:
            arguments = [str(PROGRAM), "explain", "--shape", "1,64,1,16,16"]
            done = subprocess.run(arguments, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
        self.assertEqual(done.returncode, 2)
        self.assertRegex(done.stderr, r"\Atfla: [^\n]+\n\Z")


class Explain(ProgramTest):
    def test_page(self) -> None:
        self.assertIn("scratch", self.assert_done("explain", "--shape", "1,2048,4,128,256"))

    def test_json(self) -> None:
        text = self.assert_done(
            "explain", "--shape", "2,2048,4,128,256", "--op", "training", "--qk-heads", "2", "--json"
        )
        forward, backward = json.loads(text)
        self.assertEqual([forward["operation"], backward["operation"]], ["forward", "backward"])
        self.assertEqual([forward["batch"], forward["tokens"], forward["qk_heads"]], [2, 2048, 2])
        self.assertGreater(backward["useful_flops"], forward["useful_flops"])

    def test_empty_sequence(self) -> None:
        self.assert_done("explain", "--shape", "1,0,4,16,16")

    def test_delta_rule(self) -> None:
        call = ("explain", "--operator", "delta", "--shape", "2,2048,4,128,256", "--op", "training")
        self.assertIn("triangular system", self.assert_done(*call))
        forward, backward = json.loads(self.assert_done(*call, "--qk-heads", "2", "--chunk", "256", "--json"))
        self.assertEqual([forward["operator"], backward["operation"]], ["delta", "backward"])
        self.assertEqual([forward["qk_heads"], forward["chunk"], backward["chunk"]], [2, 256, 256])
        self.assertEqual(forward["tile"], 64)


class Check(ProgramTest):
    def test_delta_rule(self) -> None:
        path = self.directory / "check.json"
        small = ("--dtype", "float32,bfloat16", "--shape", "1,70,2,16,24", "--json", str(path))
        text = self.assert_done("check", "--operator", "delta", *small)
        self.assertIn("within their bounds", text)
        self.assertEqual(text.count(" ok"), 6)  # three variants, two dtypes
        errors = self.written_json("check.json")["errors"]
        assert isinstance(errors, list)
        self.assertEqual({error["tensor"] for error in errors} & {"h", "C", "dq", "dA_log"}, {"h", "C", "dq", "dA_log"})
        self.assertTrue(all(0 <= error["error"] <= error["bound"] for error in errors))

    def test_quick_passes(self) -> None:
        path = self.directory / "check.json"
        text = self.assert_done("check", "--quick", "--json", str(path))
        self.assertNotIn("FAIL", text)
        self.assertNotIn("\033", text)
        report = self.written_json("check.json")
        self.assertIs(report["ok"], True)
        errors = report["errors"]
        assert isinstance(errors, list)
        self.assertEqual({row["variant"] for row in errors}, {"exp/max", "exp/none", "sig/none", "sig/max", "log/none"})
        self.assertEqual({row["formulation"] for row in errors}, {"chunkwise", "parallel", "recurrent"})
        self.assertEqual({row["dtype"] for row in errors}, {"float32", "float64", "bfloat16", "float16"})
        self.assertEqual(len({row["regime"] for row in errors}), 7)
        self.assertLessEqual({"h", "C", "n", "dq", "dk", "dv", "di", "df"}, {row["tensor"] for row in errors})
        for row in errors:
            self.assertLessEqual(row["relative_error"], row["bound"], row)

    def test_a_run_that_fails_leaves_no_file(self) -> None:
        path = self.directory / "out.json"
        more_than_an_address_space = ("--shape", f"1,{2**41},1,64,64")
        for command in ("check", "bench"):
            self.assert_fails(command, *more_than_an_address_space, "--json", str(path), names="memory")
            self.assertFalse(path.exists())
            path.write_text("kept")
            self.assert_fails(command, *more_than_an_address_space, "--json", str(path), names="memory")
            self.assertEqual(path.read_text(), "kept")
            path.unlink()


class Bench(ProgramTest):
    def test_sequences(self) -> None:
        path = self.directory / "bench.json"
        text = self.assert_done("bench", "--op", "training", "--json", str(path), *SMALL)
        self.assertIn("growth", text)
        report = self.written_json("bench.json")
        for key in ("tfla", "date", "cpu", "compiler", "threads"):
            self.assertTrue(report[key], key)
        rows = report["sequences"]
        assert isinstance(rows, list)
        self.assertEqual(len(rows), 8)  # two gates, chunkwise and parallel, two lengths
        for row in rows:
            self.assertGreater(row["seconds"]["median"], 0)
            self.assertLessEqual(row["seconds"]["lower_quartile"], row["seconds"]["upper_quartile"])
            self.assertLess(row["error_h"], 1e-5)
            self.assertEqual([plan["operation"] for plan in row["plans"]], ["forward", "backward"])

    def test_delta_rule(self) -> None:
        path = self.directory / "bench.json"
        shape = ("--shape", "1,64,2,16,16", "--min-time", "0.001")
        text = self.assert_done("bench", "--operator", "delta", "--json", str(path), *shape)
        self.assertIn("of copy", text)
        rows = self.written_json("bench.json")["rows"]
        assert isinstance(rows, list)
        self.assertEqual([row["operation"] for row in rows], ["forward", "training", "step", "step", "step", "step"])
        self.assertEqual([len(row["plans"]) for row in rows], [1, 2, 1, 1, 1, 1])
        for row in rows:
            self.assertGreater(row["seconds"]["median"], 0)

    def test_longer_samples_have_more_calls(self) -> None:
        path = self.directory / "bench.json"
        options = ("--op", "forward", "--formulation", "chunkwise", "--gate", "exp", "--json", str(path))
        calls = []
        for seconds in ("0.001", "0.1"):
            self.assert_done("bench", *options, "--sample-time", seconds, *SMALL)
            calls.append(self.written_json("bench.json")["sequences"][0]["seconds"]["calls_per_sample"])
        self.assertGreater(calls[1], 3 * calls[0])  # a hundred times as many on a machine that keeps its speed

    def test_step(self) -> None:
        self.assert_done("bench", *STEP, "--json", str(self.directory / "bench.json"))
        rows = self.written_json("bench.json")["steps"]
        assert isinstance(rows, list)
        self.assertEqual([row["gate"] for row in rows], ["exp", "sig"])
        for row in rows:
            self.assertGreater(row["state_bytes_per_second"], 0)
            self.assertGreater(row["copy_bytes_per_second"], 0)

    def test_product(self) -> None:
        done = tfla("bench", *STEP, "--gemm", "--json", str(self.directory / "bench.json"))
        if "no BLAS to compare with" in done.stderr:  # as one line, before anything is timed
            self.assertEqual((done.returncode, done.stdout, done.stderr.count("\n")), (2, "", 1))
            return
        self.assertEqual(done.returncode, 0, done.stderr)
        product = self.written_json("bench.json")["product"]
        assert isinstance(product, dict)
        self.assertIn("OpenBLAS", product["blas"])
        self.assertGreater(product["flops_per_second"], 0)

    def test_progress_off_a_terminal_is_plain_lines(self) -> None:
        done = tfla("bench", "--op", "forward", *SMALL)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertNotIn("\r", done.stderr)
        self.assertRegex(done.stderr, r"\Atfla bench: 0 of \d+ done")


if __name__ == "__main__":
    unittest.main()
