"""Tables of methods by what their bytes keep: divergence from the full cache beside scores, and which rows differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from kvbench.base.conf import read_yaml
from kvbench.base.errors import UsageError
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.resolve import ChainConfig, resolve
from kvbench.plan import config
from kvbench.plan.cells import Cell, Group
from kvbench.plan.run_plan import RunPlan
from kvbench.report.render import UNCHANGED, UNCHANGED_NOTE
from kvbench.report.report import CellResult, Report
from kvbench.report.table import Table
from kvbench.run import experiment
from kvbench.store.fidelity import KINDS, FidelitySummary, TextFidelity, log_ratio_of_means, summarise_texts
from kvbench.store.results import share
from kvbench.studies.leaderboard import percent, with_interval
from kvbench.tasks.metrics.stats import Interval, mean_over_tasks

ROWS: Mapping[str, Any] = read_yaml(Path(__file__).with_name("byte_tables.yaml"))
"""The tables by name, each with its title and its rows in blocks."""
DATASETS = {"tiny": "fidelity/tiny,tiny", "": "fidelity/essays,needle,longbench_mini"}
"""What is read by model, unless dataset= says otherwise."""
FIXED = ("method", "preset", "match", "reference", "fidelity", "baseline")
"""Keys of `run` that a table decides itself."""


@dataclass(frozen=True)
class Line:
    """One row of a table.

    bytes: those after the prompt, in per cent of the full cache's at 16 bits.
    fidelity, scores: divergences by kind of text, mean scores by dataset.
    texts: by kind, the divergences of each prompt by task and example.
    answers: by task, the scores of its examples.
    times: mean milliseconds to compress a prompt, and to decode a token.
    unchanged: whether nothing was compressed, so that the row says nothing about its method.
    """

    label: str
    block: str
    bytes: float | None
    fidelity: Mapping[str, FidelitySummary]
    texts: Mapping[str, Mapping[str, TextFidelity]]
    scores: Mapping[str, float]
    answers: Mapping[str, Mapping[str, float]]
    times: tuple[float, float]
    unchanged: bool = False

    def record(self) -> dict[str, object]:
        """Return the row as ``--json`` prints it."""
        divergences = {kind: vars(summary) for kind, summary in self.fidelity.items()}
        return {
            **{"label": self.label, "block": self.block, "bytes_percent": self.bytes},
            **{"fidelity": divergences, "scores": dict(self.scores)},
            **({"nothing_compressed": True} if self.unchanged else {}),
            "score_intervals": {dataset: self.interval(dataset) for dataset in self.scores},
        }

    def of(self, dataset: str) -> list[list[float]]:
        """Return the scores of each task of a dataset."""
        return [[*scores.values()] for task, scores in self.answers.items() if _dataset(task) == dataset]

    def interval(self, dataset: str) -> Interval | None:
        """Return the 95 % interval of a dataset's score in per cent."""
        return percent(mean_over_tasks(self.of(dataset))[1])


def prepare(name: str, model: str, options: Mapping[str, str], fidelity: str = "true") -> RunPlan:
    """Plan the run behind a table. Raises UsageError for a key that it does not take."""
    for key in options:
        if key in FIXED:
            raise UsageError(f"{key}={options[key]} is not possible here: table {name} says it. Use `run` instead")
    keys = {"model": model, "dataset": DATASETS.get(model, DATASETS[""]), "limit": "8", **options}
    # long texts are compared with the full cache anyway; answers are only where there are none
    compared = [] if "fidelity" in keys["dataset"] and fidelity == "true" else [f"fidelity={fidelity}"]
    cfg = config.read([*(f"{key}={value}" for key, value in keys.items()), "method=full", *compared])
    chains = {c.chain: c for _, c in chains_of(name)}
    return experiment.prepare(replace(cfg, chains=tuple(chains.values())))


def chains_of(name: str) -> list[tuple[str, ChainConfig]]:
    """Return (block, chain) of each row of a table."""
    chains = chains_of(ROWS[name]["extends"]) if "extends" in ROWS[name] else []
    for block, rows in ROWS[name]["blocks"].items():
        for row in rows:
            knobs = {key: value for key, value in row.items() if key not in ("method", "label")}
            (chain,) = resolve([row["method"]], knobs)
            chains.append((block, ChainConfig(chain.chain, row.get("label", chain.label))))
    return chains


def lines(name: str, run: RunPlan, report: Report) -> list[Line]:
    """Return the rows of a table from what is stored, the full cache first; rows of which nothing is are left out."""
    by_chain = {c.chain: i for i, c in enumerate(run.groups[0].cells)}
    rows = [("", ChainConfig(Chain(), "full")), *chains_of(name)]
    measured = (_line(cfg.label, block, run, report, by_chain[cfg.chain]) for block, cfg in rows)
    return [line for line in measured if line is not None]


def _line(label: str, block: str, run: RunPlan, report: Report, row: int) -> Line | None:
    cells = [(g, g.cells[row], report.rows[row].cells[i]) for i, g in enumerate(run.groups)]
    measured = [(g, cell, result) for g, cell, result in cells if result.summary is not None]
    if not measured:
        return None
    texts = {kind: _texts(run, measured, kind) for kind in KINDS}
    summaries = {kind: summarise_texts([*some.values()]) for kind, some in texts.items()}
    cell_summaries = [r.summary for _, _, r in measured if r.summary is not None]
    totals = [sum(s.n * getattr(s, field) for s in cell_summaries) for field in ("payload16", "overhead16", "full16")]
    by_dataset: dict[str, list[float]] = {}
    scored: set[str] = set()
    for group, _, result in measured:
        if not group.task.fidelity and result.summary is not None and result.summary.score is not None:
            by_dataset.setdefault(_dataset(group.task.id), []).append(result.summary.score)
            scored.add(group.task.id)
    return Line(
        label,
        block,
        share(*totals),
        {kind: summary for kind, summary in summaries.items() if summary is not None},
        texts,
        {dataset: fmean(scores) for dataset, scores in by_dataset.items()},
        {task: scores for task, scores in run.answers(row).items() if task in scored},
        (
            1000 * fmean(s.timing.compress_s for s in cell_summaries),
            1000 * fmean(s.timing.decode_s_per_token for s in cell_summaries),
        ),
        all(result.unchanged for _, _, result in measured),
    )


def _dataset(task: str) -> str:
    return task.partition("/")[0]


def _texts(run: RunPlan, measured: Sequence[tuple[Group, Cell, CellResult]], kind: str) -> dict[str, TextFidelity]:
    """Return the divergences on the tasks of long texts by task and example where these are read, else on all."""
    only_long = any(g.task.fidelity for g, _, _ in measured)
    texts: dict[str, TextFidelity] = {}
    for group, cell, _ in measured:
        if group.task.fidelity or not only_long:
            compared = {i: sample.fidelity or {} for i, sample in run.samples(group, cell).items()}
            texts |= {f"{group.task.id} {i}": by_kind[kind] for i, by_kind in compared.items() if kind in by_kind}
    return texts


def sheet(rows: Sequence[Line]) -> Table:
    """Return the table of the rows, a block for each heading."""
    datasets = list(dict.fromkeys(d for line in rows for d in line.scores))
    heads = ("method", "bytes\n%", "KL,\nreference", "KL,\nanswer", "same\nchoice %", "perplexity\nratio", *datasets)
    return Table(heads, tuple(_texts_of(line, datasets) for line in rows), headings=headings(rows))


def headings(rows: Sequence[Line]) -> dict[int, str]:
    """Return each block's name by the number of its first row."""
    return {i: line.block for i, line in enumerate(rows) if not i or line.block != rows[i - 1].block}


def _texts_of(line: Line, datasets: Sequence[str]) -> tuple[str, ...]:
    reference, greedy = (line.fidelity.get(kind) for kind in KINDS)
    any_kind = reference or greedy
    return (
        line.label.replace(" ", "\n", 1),
        "—" if line.bytes is None else f"{line.bytes:.1f}",
        *(nats(summary) for summary in (reference, greedy)),
        same_choice(any_kind),
        "—" if any_kind is None else f"{any_kind.ppl_ratio:.4f}" + below(any_kind.ppl_ratio_ci, ".4f"),
        *(_score_text(line, dataset) for dataset in datasets),
    )


def _score_text(line: Line, dataset: str) -> str:
    if dataset not in line.scores:
        return "—"
    return UNCHANGED if line.unchanged else with_interval(line.scores[dataset], line.interval(dataset))


def nats(summary: FidelitySummary | None) -> str:
    """Return the text of a mean divergence, with its interval below it."""
    if summary is None:
        return "—"
    if summary.at_floor:
        return "0" if not summary.kl_max else "≤ floor"
    return f"{summary.kl_mean:.3g}" + below(summary.ci, ".2g")


def same_choice(summary: FidelitySummary | None) -> str:
    """Return the text of equal first choices in per cent, with the interval below it."""
    return "—" if summary is None else f"{summary.top1:.1f}" + below(summary.top1_ci, ".1f")


def below(ci: Interval | None, form: str) -> str:
    """Return the text of an interval on a line of its own."""
    return "" if ci is None else f"\n[{ci[0]:{form}}, {ci[1]:{form}}]"


@dataclass(frozen=True)
class Pair:
    """Two rows of a block, the nearer to the full cache first.

    log_ratio, ci: of their mean divergences over the prompts that both have.
    points, points_ci: the difference of their scores, a mean over tasks, over the examples that both have.
    neighbours: whether no row of the block lies between them.
    """

    nearer: str
    farther: str
    log_ratio: float
    ci: Interval | None
    points: float | None
    points_ci: Interval | None
    neighbours: bool

    @property
    def apart(self) -> bool:
        """Whether the interval of divergences tells them apart."""
        return self.ci is not None and self.ci[1] < 0

    @property
    def scored_apart(self) -> bool:
        """Whether the interval of scores tells them apart."""
        return self.points_ci is not None and (self.points_ci[0] > 0 or self.points_ci[1] < 0)


def pairs(rows: Sequence[Line], kind: str = "reference") -> list[Pair]:
    """Return all pairs within each block, by divergence."""
    told = []
    for block in dict.fromkeys(line.block for line in rows):
        mine = [x for x in rows if x.block == block and kind in x.fidelity and not x.fidelity[kind].at_floor]
        mine = [x for x in mine if not x.unchanged]
        mine.sort(key=lambda x: x.fidelity[kind].kl_mean)
        for (i, a), (j, b) in combinations(enumerate(mine), 2):
            common = sorted(a.texts[kind].keys() & b.texts[kind].keys())
            ratio, ci = log_ratio_of_means(*([line.texts[kind][t] for t in common] for line in (a, b)))
            told.append(Pair(a.label, b.label, ratio, ci, *_points(a, b), neighbours=j == i + 1))
    return told


def _points(a: Line, b: Line) -> tuple[float | None, Interval | None]:
    """Return the difference of two rows' scores in points, a mean over tasks, and its interval over paired examples."""
    both = {task: sorted(a.answers[task].keys() & b.answers[task].keys()) for task in a.answers.keys() & b.answers}
    tasks = [np.array([a.answers[t][i] - b.answers[t][i] for i in ids]) for t, ids in sorted(both.items()) if ids]
    if not tasks:
        return None, None
    mean, ci = mean_over_tasks(tasks, (-1.0, 1.0))
    return 100 * mean, ci and (100 * ci[0], 100 * ci[1])


def notes(rows: Sequence[Line], told: Sequence[Pair]) -> list[str]:
    """Return what stands below a table: what is shown, and which rows are told apart by divergence and by scores."""
    counts = [f"n = {f.n} texts, {f.n_tokens} tokens ({kind})" for kind, f in rows[-1].fidelity.items()] if rows else []
    asked = [f"{d} {sum(map(len, rows[-1].of(d)))}" for d in rows[-1].scores] if rows else []
    scored = [p for p in told if p.apart and p.points is not None]
    floors = [f.floor for line in rows for f in line.fidelity.values()]
    floor = f" The floor is at most {max(floors):.1g} nats." if floors else ""
    lines_below = [
        "Bytes after the prompt, in per cent of the full cache's at 16 bits. KL: mean divergence of the next-token "
        "distribution from the full cache's in nats, on the text's own continuation (reference) and on the full "
        "cache's own greedy answer; same choice and perplexity ratio on the reference. [95 % intervals over prompts.] "
        f"Scores are means over a dataset's tasks, n = {', '.join(asked) or 0} examples. {'; '.join(counts)}.{floor}",
        f"Of {len(told)} pairs within blocks {sum(p.apart for p in told)} are told apart by KL (95 % interval of the "
        "paired log ratio of means, not corrected for their number), "
        f"{sum(p.scored_apart for p in told)} by the scores (of their paired difference), "
        f"{sum(p.apart and not p.scored_apart for p in told)} by KL alone. Where KL tells them apart the nearer one "
        f"has the higher score in {sum((p.points or 0) > 0 for p in scored)}, the lower in "
        f"{sum((p.points or 0) < 0 for p in scored)} (told apart by the scores, too: "
        f"{sum(p.scored_apart and (p.points or 0) > 0 for p in scored)} and "
        f"{sum(p.scored_apart and (p.points or 0) < 0 for p in scored)}).",
    ]
    alone: dict[str, list[str]] = {}
    for p in scored:
        if not p.scored_apart:
            alone.setdefault(p.nearer, []).append(p.farther)
    if alone:
        before = (f"{nearer} before {', '.join(farther)}" for nearer, farther in alone.items())
        lines_below.append(f"By KL alone: {'; '.join(before)}.")
    lines_below += [
        f"{p.nearer} is nearer to the full cache than {p.farther}: ln ratio {p.log_ratio:.2f} [{p.ci[0]:.2f}, "
        f"{p.ci[1]:.2f}]" + _score(p) + "."
        for p in told
        if p.apart and p.neighbours and p.ci is not None
    ]
    if any(line.unchanged for line in rows):
        lines_below.append(UNCHANGED_NOTE)
    return lines_below


def _score(pair: Pair) -> str:
    if pair.points is None:
        return ""
    ci = "" if pair.points_ci is None else f" [{pair.points_ci[0]:+.1f}, {pair.points_ci[1]:+.1f}]"
    return f", scores {pair.points:+.1f}{ci}"
