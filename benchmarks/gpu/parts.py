"""What compare.py measures, part by part: the workloads, and who is timed beside tfla."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.paper.model import Workload

PARTS = {
    "lengths": "65,536 tokens, 16 heads of 128/256, T 512 to 65,536; tfla's portable kernels, too",
    "shapes": "wide heads, and a grid that few heads starve",
    "sweep": "head dimensions 32 to 512 at a width of 4,096",
    "attention": "cuDNN's attention beside tfla of the same width, T 512 to 65,536",
    "step": "one token on states in place",
    "memory": "peak memory of training at chunk 1,024 and at the default, portable kernels as well",
}
TOTAL_TOKENS = 65_536
LENGTHS = (512, 2048, 8192, 32_768, 65_536)
ATTENTION_LENGTHS = (512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536)
WIDE, STARVED = Workload(8, 8192, 8, 256, 512), Workload(1, 65_536, 4, 128, 256)
SWEEP_DIMS, SWEEP_WIDTH = (32, 64, 128, 256, 512), 4096
MEMORY_TOKENS = 8192
MEMORY_CHUNKS = (0, 1024)  # 0: the plan's default

TRITON_PEERS = ("mlstm_kernels mLSTMexp", "mlstm_kernels mLSTMsig", "FLA Simple GLA")
ATTENTION = "cuDNN attention"
ATTENTION_HEADS, ATTENTION_DIM = 32, 128  # as wide as 16 heads of 256
MOST_ATTENTION_SECONDS = 0.060  # a call that would take longer is left out
STEP_PEER = "mlstm_kernels step"


def own(gate: str, portable: bool = False) -> str:
    """The name of tfla's row; portable: of the kernels that every GPU from sm_80 on runs."""
    return f"tfla {'portable ' if portable else ''}mLSTM{gate}"


def of_length(tokens: int) -> Workload:
    """The paper's main workload at one sequence length."""
    return Workload(TOTAL_TOKENS // tokens, tokens, 16, 128, 256)


def workloads(part: str, lengths: Iterable[int] | None = None, dims: Iterable[int] | None = None) -> list[Workload]:
    """lengths: of the parts `lengths` and `attention`, dims: of `sweep`, where not all of them are wanted."""
    if part == "lengths":
        return [of_length(tokens) for tokens in lengths or LENGTHS]
    if part == "attention":
        return [of_length(tokens) for tokens in lengths or ATTENTION_LENGTHS]
    if part == "shapes":
        return [WIDE, STARVED]
    if part == "sweep":
        return [Workload(4, 8192, SWEEP_WIDTH // dim, dim, dim) for dim in dims or SWEEP_DIMS]
    if part == "memory":
        return [of_length(MEMORY_TOKENS)]
    return []


def attention_workload(workload: Workload) -> Workload:
    return Workload(workload.batch, workload.tokens, ATTENTION_HEADS, ATTENTION_DIM, ATTENTION_DIM)


def label(workload: Workload) -> str:
    """For a reader."""
    heads = f"{workload.heads} heads of {workload.dqk}/{workload.dhv}"
    return f"{heads}, T {workload.tokens:,}, batch {workload.batch}"
