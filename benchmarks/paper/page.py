"""docs/paper.md: our figure, the paper's statement and our finding, side by side."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from benchmarks.common import markdown

from .data import stored
from .findings import EPSILONS, Numbers, within_best
from .measured import gpu_within_best

Pairs = Iterable[tuple[str, str]]
CREDITED = (
    "Stars: our kernels, credited with the operations that the paper counts at that chunk size, not with those that "
    "they execute; those are fewer, and so a star can lie above its roof"
)
FORMULATIONS = ("chunkwise", "parallel", "recurrent")


def section(title: str, figure: str, caption: str, pairs: Pairs) -> str:
    lines = [f"## {title}\n", f"![{caption}](paper/{figure}.png)\n", f"{caption} ([SVG](paper/{figure}.svg))\n"]
    return "\n".join(lines) + "\n" + table(pairs)


def table(pairs: Pairs, head: tuple[str, str] = ("the paper says", "computed here")) -> str:
    return markdown.table(head, pairs)


INTRODUCTION = """# The paper's analysis, computed

Written by `make paper` (benchmarks/paper/make_paper.py) from the numbers of `tfla analyse`; not edited by hand. The
model is in [include/tfla/analysis.h](../include/tfla/analysis.h) and [src/plan/cost](../src/plan/cost); its tests, with
the worked numbers of the paper's text to the paper's own rounding, are in [tests/analysis](../tests/analysis) and
[tests/cli/analyse_test.py](../tests/cli/analyse_test.py).

The paper is *Tiled Flash Linear Attention* (Beck, Pöppel, Lippe, Hochreiter, 2025). Unless said otherwise: mLSTMsig
forward, causal factor 0.5, bfloat16 tensors, float32 states, d_qk = 256, d_hv = 512, 8 heads, batch 8, T = 8,192.
"""


def small(value: float) -> str:
    """A number that may be nothing but the last digit of a CSV file."""
    return f"{value:.0e}" if value > 1e-5 else "less than 1e-5"


def transfer(n: Numbers) -> str:
    exp, sig, bounded = ("exp", "max(|S1| exp(-m))"), ("sig", "1"), ("sig", "max(|S1| 1)")
    after = "after_1e-6"
    equal = {text: n.difference(exp, sig, column) for column, text in EPSILONS.items()}
    before = n.difference(exp, sig, "before")
    at = {gate: {text: n.transition(gate, column, 0) for column, text in EPSILONS.items()} for gate in ("exp", "sig")}
    gates = section(
        "Transfer behaviour (section 4.2)",
        "transfer_gates",
        "Gain of mLSTMexp and mLSTMsig with their default normalizers, before and after an RMS norm",
        [
            (
                "After the norm layer mLSTMsig without normalizer behaves as mLSTMexp with normalizer and max state.",
                f"Yes. The gains differ by at most {equal['1e-6']:.4f} at ε = 1e-6 and {equal['1e-8']:.4f} at 1e-8. "
                f"With ε = 1e-2 it is {equal['1e-2']:.2f}, where σ(i) has left exp(i). Before the norm they differ by "
                f"up to {before:.0f}.",
            ),
            (
                "Both pass from suppressing (G = 0) to passing (G = 1) at larger negative input gates.",
                f"Half of the signal passes at i = {at['exp']['1e-6']:.2f} (exp) and {at['sig']['1e-6']:.2f} (sig), "
                "f = 0, ε = 1e-6.",
            ),
        ],
    )
    shifts = ", ".join(f"{at['exp'][e]:.2f}/{at['sig'][e]:.2f} at {e}" for e in EPSILONS.values())
    exponential = section(
        "Normalizers of mLSTMexp (appendix D.2)",
        "transfer_exp",
        "mLSTMexp: a row per normalizer, a column per ε",
        [
            (
                "A larger ε moves the gain up in the direction of the input gate, a smaller one down (the paper writes "
                "“increasing” for both).",
                f"Half of the signal passes at i = {shifts} (exp/sig, f = 0). h grows as exp(i), so the step is half "
                "the logarithm of the ratio of ε: 4.61 for 1e-2 to 1e-6, 2.30 for 1e-6 to 1e-8.",
            ),
            (
                "Only the default normalizer depends on the input gate.",
                "After the norm (1e-6) the gain varies over i by at most "
                f"{n.dependence('exp', 'max(|S1| exp(-m))', 'after_1e-6'):.2f} with it, by "
                f"{small(n.dependence('exp', 'max(|S1| 1)', 'after_1e-6'))} with max(&#124;S1&#124;, 1) and by "
                f"{small(n.dependence('exp', '1', 'after_1e-6'))} with 1: there i cancels with m.",
            ),
        ],
    )
    sigmoid = section(
        "Normalizers of mLSTMsig (appendix D.2)",
        "transfer_sig",
        "mLSTMsig: a row per normalizer, a column per ε",
        [
            (
                "The normalizer of mLSTMexp without max state, max(&#124;S1&#124;, 1), does not alter the transfer.",
                f"It changes the gain after the norm by at most {small(n.difference(sig, bounded, 'after_1e-6'))} "
                f"(1e-6) and {n.difference(sig, bounded, 'after_1e-2'):.2f} (1e-2).",
            ),
            (
                "&#124;S1&#124; and S1 show a clearly different transfer.",
                f"With either, i cancels: over i the gain varies by {small(n.dependence('sig', '|S1|', after))}.",
            ),
            (
                "&#124;S1&#124; and S1 are two figures.",
                "The gain is a largest absolute value, which the sign of a denominator does not change: the two differ "
                f"by {n.difference(('sig', '|S1|'), ('sig', 'S1'), 'before'):.0f} before the norm and after it.",
            ),
        ],
    )
    return "\n".join((gates, exponential, sigmoid))


def counts(n: Numbers) -> str:
    flops = section(
        "FLOPs of the formulations (appendix F.4)",
        "flops",
        "FLOPs over the chunk size, one head, T = 8,192",
        [
            (
                "L = 1 matches the recurrent formulation.",
                "Chunkwise over recurrent at L = 1: "
                + ", ".join(f"{n.flops_at(1, 'recurrent', dhv):.3f} (d_hv {dhv})" for dhv in (512, 256, 128)),
            ),
            (
                "L = T matches the parallel one.",
                "Chunkwise over parallel at L = T: "
                + ", ".join(f"{n.flops_at(8192, 'parallel', dhv):.3f} (d_hv {dhv})" for dhv in (512, 256, 128))
                + ". The rest is 4 T d_qk d_hv: the one state, which the parallel formulation does not make.",
            ),
        ],
    )
    optimum = section(
        "FLOP-optimal chunk size (appendix F.5)",
        "flop_optimal",
        "The chunk size with the fewest FLOPs over the head dimension",
        [
            ("L = 16 for d_hv = 512.", f"{n.best('H100', 'flop_optimal'):.1f}; the nearest power of two is 16."),
            ("Grows with the square root of d_hv.", "Four times d_hv gives 2.00 ± 0.03 times the chunk (tested)."),
        ],
    )

    def percent(dim: int) -> str:
        parts = [f"{name} {n.gate_percent(name, dim, 'exp over sig percent')}" for name in FORMULATIONS]
        exact = n.gate_percent("chunkwise", dim, "exact percent")
        return f"{', '.join(parts)} by the table of totals (L 64 to 256); chunkwise by the exact tables {exact}."

    gates = "## mLSTMexp against mLSTMsig (appendix F.3)\n\n" + table(
        [
            (
                "Less than 2 % more FLOPs for mLSTMexp at head dimension 64.",
                f"In %: {percent(64)} The text follows from the exact tables; that of totals counts 2 d_hv too many.",
            ),
            ("About 0.2 % at 512, for all formulations.", f"In %: {percent(512)}"),
        ]
    )
    return "\n".join((flops, gates, optimum))


def machines(n: Numbers) -> str:
    runtime = section(
        "Theoretical runtime (appendix G.1)",
        "runtime",
        "Time over the chunk size: the sum of both times, and their maximum (overlapped)",
        [
            (
                "There is a best chunk size, and it increases on more recent GPUs (e.g. B200).",
                f"A100 {n.best('A100'):.0f}, H100 {n.best('H100'):.0f}, B200 {n.best('B200'):.0f}. It depends on the "
                "machine through FLOPs per byte alone, and B200 has 292 where H100 has 295: no increase there.",
            ),
            (
                "For newer GPUs the runtime becomes less sensitive to the chunk size.",
                f"In ms yes: from worst to best chunk {n.span('A100'):.1f} (A100), {n.span('H100'):.1f} (H100), "
                f"{n.span('B200'):.1f} (B200). In proportion no: L = 64 takes {n.slowdown('A100', 64):.2f}, "
                f"{n.slowdown('H100', 64):.2f} and {n.slowdown('B200', 64):.2f} times the least time.",
            ),
        ],
    )
    intensity = section(
        "Arithmetic intensity (appendix G.2)",
        "intensity",
        "FLOPs per byte over the chunk size",
        [
            (
                "Accelerator intensities 133, 161, 295, 292.",
                "The same (V100, A100, H100, B200), from their rates (tested).",
            ),
            (
                "Larger chunks raise the intensity, from memory-bound to compute-bound.",
                f"d_hv = 512, float32 states: compute-bound from L = {n.best('A100', 'overlapped'):.0f} on A100, "
                f"{n.best('H100', 'overlapped'):.0f} on H100, {n.best('H200', 'overlapped'):.0f} on H200 (at measured "
                "ceilings).",
            ),
        ],
    )
    roofline = section(
        "Roofline (appendix G.3)",
        "roofline",
        "Left: rooflines of the paper's GPUs, and of an H200 at its measured ceilings. Right: one CPU core, forward at "
        f"tiles of 16 to 256 tokens. {CREDITED}",
        [
            (
                "The paper's kernels are far from the roof.",
                "On a CPU core our forward is under the flat roof at every tile: the state stays in the cache, so only "
                "the tensors move. Small heads lose to gates and to small products.",
            ),
        ],
    )
    rates = section(
        "FLOP/s are not the measure (appendix G.3)",
        "rates",
        f"FLOP/s rise with the chunk size, time does not fall with them. {CREDITED}",
        [
            (
                "FLOP/s rise with L while the time has its minimum elsewhere.",
                f"On H100 the rate still rises at L = 8,192, where the time is {n.slowdown('H100', 8192):.1f} times "
                "the least.",
            ),
        ],
    )
    optimal = section(
        "Runtime-optimal chunk size (appendix G.4)",
        "runtime_optimal",
        "The chunk size with the least time over the head dimension",
        [
            (
                "Much larger than the FLOP-optimal one; on H100 larger than the measured 256.",
                f"{n.best('H100'):.0f} against {n.best('H100', 'flop_optimal'):.0f}; a numerical search finds "
                f"{n.best('H100', 'searched'):.1f}. If loads and products overlap fully it is "
                f"{n.best('H100', 'overlapped'):.0f}.",
            ),
            (
                "The paper does not count backward.",
                f"With the tables of `tfla analyse flops`: {n.best('H100', which='backward'):.0f} on H100, "
                f"{n.best('H200', which='backward'):.0f} on H200.",
            ),
        ],
    )
    over = section(
        "Over accelerator intensity (appendix G.4)",
        "over_intensity",
        "The chunk size with the least time over FLOPs per byte",
        [("Grows with the square root of the intensity.", "Four times the intensity: 2.00 ± 0.01 times (tested).")],
    )
    return "\n".join((runtime, intensity, roofline, rates, optimal, over))


def gpu_default(folder: Path) -> tuple[str, str]:
    """What the model says of the CUDA backend's chunk at the ceilings of an H200."""
    parts = []
    for dims in ("128_256", "256_512"):
        n = Numbers(folder / dims)
        best = {which: n.best("H200", gate="exp", which=which) for which in ("forward", "backward")}
        late = {chunk: n.slowdown("H200", chunk) - 1 for chunk in (128, 256)}
        parts.append(
            f"{dims.replace('_', '/')} best at {best['forward']:.0f} forward and {best['backward']:.0f} backward; "
            f"forward {late[128]:+.0%} at 128, {late[256]:+.0%} at 256"
        )
    return (
        "Newer GPUs require larger chunks.",
        f"H200 at its measured ceilings, bfloat16 states, nothing overlapped: {'; '.join(parts)}. Kernels below the "
        "ceilings move this; their own rates come from the measurement.",
    )


def own_kernels(folder: Path, benchmarks: Path) -> str:
    report = stored(benchmarks / "cpu_ranges.json")
    assert report is not None
    ratios = within_best(report["chunks"])
    gpu = stored(benchmarks / "chunk_sizes_cuda.json")
    missing = (
        ""
        if gpu
        else " The same measurement on a GPU (benchmarks/gpu/chunk_sizes.py) is still to be taken; until then the "
        "constants of the CUDA backend's portable kernels are estimates."
    )
    pairs = [
        (
            "Chunks of 64 to 4,096 tokens trade memory for time.",
            "On a CPU the tile carries the quadratic work and the chunk is only the spacing of stored states, so time "
            "hardly depends on it: with larger chunks backward makes more of its states twice.",
        ),
        (
            "The runtime model is qualitative.",
            "With four constants per pass, fitted to times over tiles and chunks (seconds per operation, per element "
            f"of a square, per byte of state, per token), its error is {report['fit']['rms_relative_error']:.1%} rms.",
        ),
        (
            "The chunk size should be chosen by total runtime.",
            "The plan's default against the best measured one, training: "
            + ", ".join(f"{dqk}/{dhv} {ratio - 1:+.1%}" for (dqk, dhv), ratio in ratios.items()),
        ),
        gpu_default(folder),
    ]
    if gpu:
        pairs.append(
            (
                "The best chunk size on a GPU follows from the model.",
                f"{gpu['name']}, {gpu['date'][:10]}: the plan's default against the best measured one, training: "
                + ", ".join(f"{name} {ratio - 1:+.1%}" for name, ratio in gpu_within_best(gpu).items())
                + ". The portable kernels' default is the model's, with constants fitted to these times "
                "([chunk_sizes_cuda.json](benchmarks/chunk_sizes_cuda.json)). Kernels for Hopper compute in tiles of "
                "64 and 128 tokens whatever the chunk is; theirs is 128.",
            )
        )
    caption = (
        f"Training over the chunk size on one core of {report['cpu']}, float32, 4 heads, T = 8,192; measured "
        f"{report['date'][:10]}, constants in [cpu_ranges.json](benchmarks/cpu_ranges.json)"
    )
    lines = ["## Our kernels: predicted and measured\n", "![predicted and measured](paper/chunk_sizes.png)\n"]
    if gpu:
        lines.append("![predicted and measured on a GPU](paper/chunk_sizes_gpu.png)\n")
    return "\n".join(lines) + f"\n{caption}.{missing}\n\n" + table(pairs)


def slips(n: Numbers) -> str:
    forget = n.term("chunkwise", "sig", "Cumulative Forget Gates", "linear")
    rows = [
        (
            "Simplified table, chunkwise mLSTMsig, cumulative forget gates: 0.5 L² + 2.5 L",
            f"0.5 L² + {forget:g} L from the exact row (both gates pass a logsigmoid; the parallel table has it)",
        ),
        (
            "Table of totals, chunkwise mLSTMexp: 4 d_hv per token; difference to mLSTMsig 3 d_hv",
            "2 d_hv and d_hv from its rows. At the setting above the printed total is "
            f"{n.total_ratio('flops', 'chunkwise', 'exp'):.5f} of the exact one (L = 256)",
        ),
        (
            "Table of totals, chunkwise mLSTMsig: 11 per token, 5 per chunk",
            "10 and 1 from its simplified rows, 12 and 1 from the exact ones; "
            f"{n.total_ratio('flops', 'chunkwise', 'sig'):.6f} of the exact total",
        ),
        ("Table of totals, parallel, difference: −2.5 T", "−2 T (2.5 T − 4.5 T)"),
        ("Parallel mLSTMsig, gate matrix: counts F_max as for mLSTMexp", "mLSTMsig takes no maximum; kept as printed"),
        (
            "Memory operations, recurrent, row “Total”: n and m under mLSTMsig, none under mLSTMexp",
            "The two columns are swapped: load + store give n and m to mLSTMexp",
        ),
        ("Appendix D.1: the denominator becomes max{&#124;n·q&#124;, exp(m_{t−1})}", "exp(−m_t), as in equation (4)"),
    ]
    return (
        "## Where the paper's tables do not follow from each other\n\n"
        "`tfla analyse` keeps both, exact and as printed (`flops_terms.csv`, `flops_totals.csv`, `bytes_totals.csv`), "
        "and tests hold every difference fixed. The closed forms of the best chunk size use the printed totals; from "
        "the exact ones they move by less than 1 %.\n\n" + table(rows, ("printed", "follows"))
    )


BACKWARD = """## How backward is counted

The paper's formulas of appendix B.3 by its rules of appendix F: `tfla analyse flops` lists the terms. Their matrix
products are five with the state per token (C once more, dC, and dQ, dK, dV through them) and five squares (S, dS, dQ,
dK, dV). Tests count every product of our CPU kernels: the linker sends each call of `cpu::product` through a counter
that only the test program has (`--wrap`), so the code that is counted is the code that ships, and the library carries
no counter. A plan's FLOPs equal that count exactly, over a table of lengths, chunk sizes, formulations and threads;
with one tile per chunk, where nothing is computed twice, the count is the table's.
"""


def text(folder: Path, benchmarks: Path) -> str:
    n = Numbers(folder)
    parts = (INTRODUCTION, transfer(n), counts(n), machines(n), own_kernels(folder, benchmarks), slips(n), BACKWARD)
    return "\n".join(parts)
