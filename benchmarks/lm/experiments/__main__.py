"""The language model experiments of docs/experiments: what they are, their runs, and the page from what they left.

list    every table of runs with what is done and the seconds that the rest takes on a GPU
run     works through tables, run by run, within a number of seconds; called again, it goes on
recall  associative recall over the number of pairs, by small models, on a CPU
steps   time of a training step, beside the published xlstm package and the Transformer
merge   adds the results that another machine has left in a folder
draw    the page, from all results

Runs need torch, and tfla built for the device; their tokens come from `python -m benchmarks.lm.corpus`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.lm.experiments import common, tables
from benchmarks.lm.experiments.results import Results, merge

EXAMPLES = """examples:
  python -m benchmarks.lm.experiments list
  python -m benchmarks.lm.experiments run sweep-40m sweep-160m --data build/corpus/dataset --budget 900
  python -m benchmarks.lm.experiments run compare-160m --data build/corpus/dataset --budget 1500 --results out
  python -m benchmarks.lm.experiments run quick --data build/corpus/dataset --device cpu --results build/quick
  python -m benchmarks.lm.experiments merge out
  python -m benchmarks.lm.experiments recall --threads 1
  python -m benchmarks.lm.experiments steps --sizes 1.4b
  python -m benchmarks.lm.experiments draw"""


def _list(options: argparse.Namespace) -> None:
    from benchmarks.lm.experiments import recall, runner

    print(runner.listing(Results(options.results)))
    print(recall.listing(options.results))


def _run(options: argparse.Namespace) -> None:
    import torch

    from benchmarks.lm.experiments import runner

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    runs = [run for table in options.tables for run in tables.runs(table)]
    place = runner.Place(options.data, options.scratch, device)
    found = Results(options.results, common.OUT / "results")  # whose rates and sweeps count on every machine
    left = runner.work(runs, found, place, options.budget)
    common.say(f"{len(left)} of {len(runs)} runs are left")


def _merge(options: argparse.Namespace) -> None:
    for folder in options.folders:
        print(f"{merge(folder, options.results)} results from {folder}")


def _recall(options: argparse.Namespace) -> None:
    import torch

    from benchmarks.lm.experiments import recall

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    recall.work(options.results, options.device, options.budget)


def _steps(options: argparse.Namespace) -> None:
    from benchmarks.lm.experiments import steps

    steps.measure(options, options.results / "steps.json")


def _draw(options: argparse.Namespace) -> None:
    import matplotlib

    from benchmarks.lm.experiments import page, plots

    matplotlib.use("Agg")
    from matplotlib import pyplot

    plots.draw(Results(options.results), options.out, pyplot)
    common.write(options.out / "language_models.md", page.page(Results(options.results)))
    print(f"written {options.out / 'language_models.md'}")


def parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    main = argparse.ArgumentParser(
        prog="python -m benchmarks.lm.experiments", description=__doc__, epilog=EXAMPLES, formatter_class=raw
    )
    commands = main.add_subparsers(dest="command", required=True)
    results = argparse.ArgumentParser(add_help=False)
    results.add_argument(
        "--results", type=Path, default=common.OUT / "results", help="folder; default docs/experiments/results"
    )
    commands.add_parser("list", parents=[results]).set_defaults(act=_list)

    run = commands.add_parser("run", parents=[results])
    run.add_argument("tables", nargs="+", choices=tuple(tables.TABLES), metavar="TABLE")
    run.add_argument("--data", type=Path, required=True, help="the dataset that the corpus has been made into")
    run.add_argument(
        "--budget", type=float, default=float("inf"), help="seconds of training; default: until all is done"
    )
    run.add_argument("--scratch", type=Path, default=common.ROOT / "build" / "runs", help="of checkpoints")
    run.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    run.set_defaults(act=_run)

    merging = commands.add_parser("merge", parents=[results])
    merging.add_argument("folders", nargs="+", type=Path)
    merging.set_defaults(act=_merge)

    recall = commands.add_parser("recall", parents=[results])
    recall.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    recall.add_argument("--threads", type=int)
    recall.add_argument("--budget", type=float, default=float("inf"), help="seconds; default: until all is done")
    recall.set_defaults(act=_recall)

    steps = commands.add_parser("steps", parents=[results])
    steps.add_argument("--sizes", default="1.4b,400m,160m")
    steps.add_argument("--models", default="exp,sigmoid,transformer,xlstm,xlstm-compiled")
    steps.add_argument("--batch", type=int, default=8, help="sequences; halved where it must be")
    steps.add_argument("--context", type=int, default=8192)
    steps.add_argument("--steps", type=int, default=3, help="timed steps")
    steps.add_argument("--fuse", action="store_true", help="one product for projections of the same input")
    steps.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    steps.set_defaults(act=_steps)

    draw = commands.add_parser("draw", parents=[results])
    draw.add_argument("--out", type=Path, default=common.OUT)
    draw.set_defaults(act=_draw)
    return main


def main(argv: list[str] | None = None) -> int:
    from tfla.lm.checks import sentence

    options = parser().parse_args(argv)
    try:
        options.act(options)
    except Exception as error:
        text = sentence(error)
        if text is None:
            raise
        print(text, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
