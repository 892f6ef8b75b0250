"""docs/experiments/language_models.md, from results: every number of it, and the sentences of what follows."""

from __future__ import annotations

import json
import math
from typing import Any

from benchmarks.lm.experiments import recall_page, step_page, tables
from benchmarks.lm.experiments.common import LABELS
from benchmarks.lm.experiments.curves import SPIKE, WINDOW
from benchmarks.lm.experiments.judgement import beside, difference, grid, heading, sentence, spread
from benchmarks.lm.experiments.results import Results
from benchmarks.lm.experiments.tables import Run

Found = list[tuple[Run, dict[str, Any]]]


def by_seed(found: Found, key: str) -> dict[str, dict[int, float]]:
    """The value of a key by model and seed, of runs that have one."""
    values: dict[str, dict[int, float]] = {}
    for run, result in found:
        if result.get(key) is not None:
            values.setdefault(run.model, {})[run.seed] = result[key]
    return values


def setting(found: Found) -> list[str]:
    """Device and lengths of a table, and what is missing of it."""
    run, result = found[0]
    devices = sorted({other["about"]["device"] for _, other in found})
    dates = sorted({other["about"]["date"] for _, other in found})
    about = {
        **result["about"],
        "device": " and ".join(devices),
        "date": " to ".join(dict.fromkeys((dates[0], dates[-1]))),
    }
    passes = ""
    if "tokens" in result["data"]:
        passes = f", {result['tokens'] / result['data']['tokens']:.1f} times its training tokens"
    missing = len(tables.runs(run.table)) - len(found)
    text = (
        f"{result['steps']:,} steps of {result['batch']} x {result['context']} tokens on "
        f"{result['data'].get('text', 'the corpus')}{passes}; the same tokens in the same order for the same seed."
    )
    if missing:
        text += f" {missing} of {missing + len(found)} runs are not done yet."
    return [heading(about, [f"python -m benchmarks.lm.experiments run {run.table}"]), "", text, ""]


def sweep_section(size: str, results: Results) -> list[str]:
    found = results.table(f"sweep-{size}")
    if not found:
        return []
    best = results.best_rates(size)
    rates = sorted({run.lr for run, _ in found if run.lr is not None})
    losses = {(run.model, run.lr): result["validation_loss"] for run, result in found}
    rows = []
    notes = []
    for model, label in LABELS.items():
        cells = []
        for lr in rates:
            loss = losses.get((model, lr))
            text = "failed" if (model, lr) in losses and loss is None else "" if loss is None else f"{loss:.4f}"
            cells.append(f"**{text}**" if best.get(model) == lr else text)
        rows.append([label, *cells])
        if model in best and best[model] in (rates[0], rates[-1]):
            notes.append(f"The best rate of {label} is the {'least' if best[model] == rates[0] else 'largest'} tried.")
    head = ["validation loss at peak rate", *(f"{lr:g}" for lr in rates)]
    return [f"### Learning rates, {size}", "", *setting(found), *grid(head, rows), *_paragraph(notes)]


def _paragraph(sentences: list[str]) -> list[str]:
    return [" ".join(sentences), ""] if sentences else []


def _each(sentences: list[str]) -> list[str]:
    return [line for text in sentences for line in (f"- {text}",)] + ([""] if sentences else [])


def compare_section(table: str, title: str, results: Results) -> list[str]:
    found = results.table(table)
    if not found:
        return []
    models = [model for model in LABELS if any(run.model == model for run, _ in found)]
    rows = []
    for model in models:
        mine = [(run, result) for run, result in found if run.model == model]
        good = [result for _, result in mine if result["validation_loss"] is not None]
        rates = sorted({result["tokens_per_second"] for _, result in mine})
        rows.append([
            LABELS[model], len(mine), ", ".join(f"{lr:g}" for lr in sorted({result["lr"] for _, result in mine})),
            f"{mine[0][1]['tokens'] / 1e6:.1f} M", spread([result["validation_loss"] for result in good], 4),
            spread([math.exp(result["validation_loss"]) for result in good], 3),
            spread([result["norm_median"] for result in good], 3), f"{max(r['norm_largest'] for _, r in mine):.2f}",
            " + ".join(str(result["spikes"]) for _, result in mine), len(mine) - len(good),
            f"{rates[len(rates) // 2]:,.0f}",
        ])  # fmt: skip
    head = ["model", "seeds", "rate", "tokens", "validation loss", "perplexity", "median norm", "largest", "spikes",
            "failed", "tokens/s"]  # fmt: skip
    about = (
        f"± is the deviation over seeds. Norms are of gradients before clipping; a spike is one above {SPIKE:g} times "
        f"the median of the {WINDOW} steps before, after warm-up, counted seed by seed."
    )
    lines = [f"## {title}", "", *setting(found), *grid(head, rows), about, "", f"![loss and norms]({table}.png)", ""]
    lines += _each(follows(found))
    return [*lines, *gates_table(found), *positions_table(table, found)]


def follows(found: Found, key: str = "validation_loss", what: str = "Validation loss") -> list[str]:
    """mLSTMsig against mLSTMexp in pairs of seeds; the Transformer beside them."""
    values = by_seed(found, key)
    sentences = []
    if "sigmoid" in values and "exp" in values:
        gap = difference(values["sigmoid"], values["exp"])
        if gap is not None:
            sentences.append(sentence(LABELS["sigmoid"], LABELS["exp"], gap, what, " nats"))
    if "transformer" in values:
        others = {LABELS[model]: list(values[model].values()) for model in ("exp", "sigmoid") if model in values}
        (value, *_) = values["transformer"].values()
        sentences += beside(LABELS["transformer"], value, others, " nats")
    return sentences


def gates_table(found: Found) -> list[str]:
    """Pre-activations of a seed, layer by layer."""
    rows = []
    for run, result in found:
        if run.seed == 0 and result.get("gates"):
            for name, layers in result["gates"].items():
                cells = [f"{layer['mean']:.1f} ± {layer['deviation']:.1f}" for layer in layers]
                extremes = f"{min(x['least'] for x in layers):.1f} to {max(x['largest'] for x in layers):.1f}"
                rows.append([LABELS[run.model], name, extremes, *cells])
    if not rows:
        return []
    layers = range(1, len(max(rows, key=len)) - 2)
    text = "Gate pre-activations after the soft cap on validation text, seed 0: mean ± deviation over tokens and heads."
    return [text, "", *grid(["model", "gate", "range", *(f"layer {n}" for n in layers)], rows)]


def positions_table(table: str, found: Found) -> list[str]:
    """Loss at multiples of the training context: the last quarter of each."""
    having = [(run, result) for run, result in found if result.get("positions")]
    if not having:
        return []
    first = having[0][1]["positions"]
    multiples = (1, 2, 4, 8)
    rows, last = [], {}
    for model, label in LABELS.items():
        mine = {run.seed: result["positions"]["loss"] for run, result in having if run.model == model}
        if mine:
            values = {n: [loss[4 * n - 1] for loss in mine.values()] for n in multiples}
            rows.append([label, len(mine), *(spread(values[n], 4) for n in multiples)])
            last[model] = {seed: loss[4 * 8 - 1] - loss[3] for seed, loss in mine.items()}
    text = (
        f"Loss on {first['rows']} stretches of {8 * first['context']:,} tokens of held-out documents, each from an "
        f"empty state: mean of the last {first['tokens_per_bin']} tokens of 1, 2, 4 and 8 training contexts."
    )
    head = ["model", "seeds", *(f"{n} x {first['context']}" for n in multiples)]
    notes = []
    if "sigmoid" in last and "exp" in last and (gap := difference(last["sigmoid"], last["exp"])) is not None:
        notes.append(sentence(LABELS["sigmoid"], LABELS["exp"], gap, "Rise of loss from 1 to 8 contexts", " nats"))
    if "transformer" in last:
        (rise, *_) = last["transformer"].values()
        others = {LABELS[model]: list(last[model].values()) for model in ("exp", "sigmoid") if model in last}
        notes += [f"The same rise: {text}" for text in beside(LABELS["transformer"], rise, others, " nats")]
    title = f"### Length extrapolation, {having[0][0].size}"
    return [title, "", text, "", *grid(head, rows), f"![loss over position]({table}-positions.png)", "", *_each(notes)]


def ablations_section(table: str, title: str, results: Results) -> list[str]:
    found = results.table(table)
    if not found:
        return []
    groups: dict[tuple[str, float, float], Found] = {}
    for run, result in found:
        key = (run.model, run.changes["input_gate_bias"], run.changes["cell_norm_eps"])
        groups.setdefault(key, []).append((run, result))
    rows = []
    for (model, bias, eps), mine in groups.items():
        good = [result for _, result in mine if result["validation_loss"] is not None]
        rows.append([
            LABELS[model], f"{bias:g}", f"{eps:g}", len(mine), spread([r["validation_loss"] for r in good], 4),
            len(mine) - len(good), spread([r["norm_median"] for _, r in mine], 2),
            f"{max(r['norm_largest'] for _, r in mine):.2f}", " + ".join(str(r["spikes"]) for _, r in mine),
        ])  # fmt: skip
    head = ["model", "input gate bias", "eps", "seeds", "validation loss", "failed", "median norm", "largest", "spikes"]
    text = "eps: of the norm after the cell. Norms and spikes as above."
    notes = _ablation_follows(groups)
    return [f"## {title}", "", *setting(found), text, "", *grid(head, rows), f"![loss]({table}.png)", "", *_each(notes)]


def _ablation_follows(groups: dict[tuple[str, float, float], Found]) -> list[str]:
    """Of every gate: the best of its settings against the paper's bias of -10 and eps of 1e-6."""
    notes = []
    for model, label in (("exp", LABELS["exp"]), ("sigmoid", LABELS["sigmoid"])):
        losses = {
            (bias, eps): {run.seed: r["validation_loss"] for run, r in mine if r["validation_loss"] is not None}
            for (owner, bias, eps), mine in groups.items()
            if owner == model
        }
        paper = losses.get((-10.0, 1e-6))
        shown = []
        for (bias, eps), values in losses.items():
            gap = difference(values, paper) if paper and (bias, eps) != (-10.0, 1e-6) else None
            if gap is not None and gap.shown:
                shown.append(f"bias {bias:g} with eps {eps:g} {gap.mean:+.4f} ± {gap.margin:.4f}")
        if not paper:
            continue
        if max(map(len, losses.values())) < 2:
            notes.append(f"{label}: one seed of each setting; nothing follows, as one seed has no spread.")
        elif shown:
            notes.append(
                f"{label}: against bias -10 with eps 1e-06 these differ, in nats with their 95 % intervals: "
                f"{'; '.join(shown)}. The others' intervals hold 0. Of {len(losses) - 1} such comparisons one in "
                "twenty excludes 0 by chance."
            )
        else:
            notes.append(f"{label}: no setting differs from bias -10 with eps 1e-06: all 95 % intervals hold 0.")
    return notes


def corpus_section(manifest: dict[str, Any]) -> list[str]:
    tokens, kinds = manifest["tokens"], manifest["kinds"]
    rows = [
        [name, f"{part['documents']:,}", f"{part['bytes'] / 1e6:.1f} MB", f"{part['tokens']['train'] / 1e6:.2f} M",
         f"{part['tokens']['validation'] / 1e6:.3f} M"]
        for name, part in kinds.items()
    ]  # fmt: skip
    reasons: dict[str, int] = {}
    for part in kinds.values():
        for reason, count in part["left_out"].items():
            reasons[reason] = reasons.get(reason, 0) + count
    repeated = reasons.pop("bytes of repeated blocks", 0)
    lost = ", ".join(f"{count:,} {reason}" for reason, count in sorted(reasons.items(), key=lambda item: -item[1]))
    total = sum(tokens.values()) / 1e6
    text = (
        f"{total:.1f} M distinct tokens of a byte-level BPE with {manifest['vocab']:,}: documentation, manuals and "
        f"sources of Debian packages, {len(manifest['packages'])} of them fetched for it. Made by `python -m "
        f"benchmarks.lm.corpus make`; fingerprint {manifest['fingerprint']}, packed "
        f"{manifest['packed']['bytes'] / 1e6:.1f} MB. Documents are held out by a hash of their text. Left out: files "
        f"that are {lost}; and {repeated / 1e6:.1f} MB of blocks of lines that occur before (but for spaces, comment "
        "signs and numbers) or hold a licence."
    )
    head = ["kind", "documents", "text", "training tokens", "held out"]
    return ["## The corpus", "", text, "", *grid(head, rows)]


def page(results: Results) -> str:
    lines = ["# Language model experiments", ""]
    lines += ["`python -m benchmarks.lm.experiments draw` writes this page; `make experiments` lists the runs.", ""]
    manifest = results.folder / "corpus.json"
    if manifest.exists():
        lines += corpus_section(json.loads(manifest.read_text()))
    for size in ("160m", "40m"):
        lines += compare_section(f"compare-{size}", f"mLSTMexp, mLSTMsig and the Transformer, {size}", results)
        lines += sweep_section(size, results)
    lines += ablations_section("ablations", "Input gate bias and norm eps", results)
    lines += recall_page.section(results.folder)
    lines += compare_section("short-160m", "200 steps of the 160m shape", results)
    lines += ablations_section("short-ablations", "Input gate bias and norm eps, 150 steps", results)
    steps = results.folder / "steps.json"
    if steps.exists():
        part = json.loads(steps.read_text())
        lines += step_page.section(part, heading(part["about"], part["commands"]))
    return "\n".join(lines).rstrip("\n") + "\n"
