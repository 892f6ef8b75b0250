"""benchmarks/gpu/kernels.py without a GPU: names of kernels, what is made of their times, and the page."""

import json
import re
import sys

import pytest

from repository import ROOT

sys.path.append(str(ROOT))

from benchmarks.gpu import kernels  # noqa: E402

SM90 = "_ZN4tfla4cuda4sm90"
STATES = (
    SM90 + "6states13states_kernelINS2_6ConfigI13__nv_bfloat16XtlNS2_7Options"
    "ELi2ELi256ELNS0_4TimeE{}ELNS2_4PassE{}ELb0EEEEEEEv"
)
FORWARD = (
    "void tfla::cuda::sm90::forward::forward_kernel<tfla::cuda::sm90::forward::Config<__nv_bfloat16, "
    "tfla::cuda::sm90::forward::Options{{2, 128, true, (tfla::Keep){}, false, (tfla::cuda::Time){}, "
    "(tfla::cuda::sm90::forward::DqkPart)0, {}}}> >(...)"
)
MANGLED_FORWARD = (
    SM90 + "7forward14forward_kernelINS2_6ConfigI13__nv_bfloat16XtlNS2_7OptionsELi4ELi128ELb0ELNS_4KeepE0E"
    "Lb0ELNS0_4TimeE1ELNS2_7DqkPartE0ELb1EEEEEEEv"
)
GRAD_QK = SM90 + "7grad_qk14grad_qk_kernelINS2_6ConfigI13__nv_bfloat16XtlNS2_7OptionsELb{}ELb0EEEEEEEv"
PORTABLE = "void tfla::cuda::(anonymous namespace)::{}_kernel<__nv_bfloat16, {}>(tfla::cuda::Call<float>, int)"


@pytest.mark.parametrize(
    ("name", "label"),
    [
        (STATES.format(0, 0), "states"),
        (STATES.format(1, 0), "grad_states"),
        (STATES.format(0, 1), "segment_totals"),
        (STATES.format(0, 2), "segment_totals"),
        (STATES.format(1, 1), "grad_segment_totals"),
        (FORWARD.format(0, 0, "false"), "forward"),
        (FORWARD.format(2, 0, "false"), "forward"),
        (FORWARD.format(0, 1, "false"), "grad_v_reverse"),
        (FORWARD.format(2, 1, "false"), "grad_states_v"),
        (FORWARD.format(0, 0, "true"), "grad_q_forward"),
        (FORWARD.format(0, 1, "true"), "grad_k_reverse"),
        (MANGLED_FORWARD, "grad_k_reverse"),
        (GRAD_QK.format(0), "grad_qk"),
        (GRAD_QK.format(1), "grad_qk_norm"),
        (SM90 + "14grad_qkv_small21grad_qkv_small_kernelINS2_6ConfigIXtlNS2_7OptionsELi64ELb1E", "grad_qkv_small"),
        (PORTABLE.format("states", "(tfla::cuda::Time)0, (tfla::cuda::Pass)1"), "states"),
        (PORTABLE.format("states", "(tfla::cuda::Time)1, (tfla::cuda::Pass)0"), "grad_segment_totals"),
        (PORTABLE.format("segment_scan", "(tfla::cuda::Time)1"), "grad_segment_scan"),
        (PORTABLE.format("outputs", "(tfla::cuda::(anonymous namespace)::Wanted)1"), "grad_denominators"),
        (PORTABLE.format("dk", "true"), "grad_qkv: dk"),
        (PORTABLE.format("gate_vectors", "float"), "gates: gate_vectors"),
        ("void tfla::cuda::sm90::(anonymous namespace)::packed_segment_scan_kernel<true>(int)", "grad_segment_scan"),
        ("void tfla::cuda::sm90::(anonymous namespace)::packed_segment_scan_kernel<false>(int)", "segment_scan"),
        ("tfla::cuda::sm90::(anonymous namespace)::grad_n_scan_kernel(bool)", "grad_n: grad_n_scan"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>(int)", None),
        ("Memset (Device)", None),
    ],
)  # fmt: skip
def test_names(name, label):
    assert kernels.label(name) == label


def test_every_kernel_has_a_name_of_the_table():
    enumeration = re.search(r"enum class Kernel [^{]*{(.*?)};", (ROOT / "src/plan/kernel_table.h").read_text(), re.S)
    named = set(re.findall(r"^  (\w+),", enumeration[1], re.M))
    sources = [path for path in (ROOT / "src/cuda").rglob("*") if path.suffix in (".cu", ".cuh")]
    # Of the mLSTM: the other operators have tables of their own.
    sources = [path for path in sources if not {"conv", "delta", "ssd"} & set(path.parts)]
    text = "\n".join(path.read_text() for path in sources)
    functions = re.findall(r"__global__ void (?:__launch_bounds__\(.*\)\s+)?(\w+)_kernel\(", text)
    assert len(functions) == text.count("__global__")
    for function in functions:
        name, _, part = kernels.label(f"tfla::cuda::{function}_kernel(int)").partition(": ")
        assert name in named and part in ("", function), function


def test_times_are_medians_of_calls():
    gates, dq = (PORTABLE.format(one, "float") for one in ("gates", "dq"))
    launches = [(gates, 1.0), (dq, 5.0), (dq, 6.0), (gates, 3.0), ("Memset", 9.0), (dq, 1.0), (dq, 2.0)]
    launches += [(gates, 2.0), (dq, 0.0), (dq, 8.0)]
    assert kernels.seconds_by_kernel(launches, 3) == [
        {"kernel": "gates", "launches": 1, "seconds": 2.0},
        {"kernel": "grad_qkv: dq", "launches": 2, "seconds": 8.0},
    ]
    with pytest.raises(SystemExit, match="gates was launched 3 times in 2 repetitions"):
        kernels.seconds_by_kernel(launches, 2)
    with pytest.raises(SystemExit, match="no kernel of tfla"):
        kernels.seconds_by_kernel([("Memset", 1.0)], 1)


def test_boundaries_of_documents():
    (case,) = (case for case in kernels.CASES if case.documents)
    cuts = case.boundaries()
    assert len(cuts) == case.documents + 1 and cuts[0] == 0 and cuts[-1] == case.workload.tokens
    assert all(one < other for one, other in zip(cuts, cuts[1:], strict=False))


ABOUT = {"gpu": "A GPU", "date": "2026-01-01", "tfla": "1", "packages": {"torch": "2"}, "repetitions": 20}


def test_page():
    rows = [{"kernel": "gates", "launches": 1, "seconds": 1e-5}, {"kernel": "forward", "launches": 2, "seconds": 3e-5}]
    case = {"workload": [1, 64, 2, 16, 32], "documents": 3, "forward": rows, "backward": rows[:1]}
    text = kernels.page({"about": ABOUT, "cases": [case]})
    assert "## 2 heads of 16/32, T 64, batch 1, 3 packed documents\n" in text
    assert "| forward | forward (2 launches) | 30.0 | 75 % |\n| forward | **all** | 40.0 |  |\n" in text
    assert "| backward | gates | 10.0 | 100 % |\n" in text


def test_the_page_is_made_of_the_numbers_beside_it():
    file, page = (ROOT / f"docs/benchmarks/kernels.{suffix}" for suffix in ("json", "md"))
    assert file.exists() == page.exists()
    if file.exists():
        assert page.read_text() == kernels.page(json.loads(file.read_text()))
