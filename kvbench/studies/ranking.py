"""All methods at about equal bytes, ranked by divergence and by scores with the question seen and withheld."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, groupby, pairwise
from math import inf
from statistics import fmean
from typing import Any

from kvbench.base.errors import UsageError
from kvbench.plan import config
from kvbench.plan.run_plan import RunPlan
from kvbench.report.render import UNCHANGED, UNCHANGED_NOTE
from kvbench.report.report import Report
from kvbench.report.table import Table
from kvbench.run import experiment
from kvbench.store.fidelity import KINDS, log_ratio_of_means, summarise_texts
from kvbench.studies import byte_table
from kvbench.studies.byte_table import Line
from kvbench.studies.leaderboard import difference, percent, with_interval
from kvbench.tasks.metrics.stats import Interval, mean_over_tasks

NAME = "ranking"
DIVERGENCE = "KL, nats"
LONGBENCH = {
    "dataset": ",".join(f"longbench_mini/{t}" for t in ("multifieldqa_en", "2wikimqa")),
    **{"prompt": "longbench", "max_length": "2000", "template": "skip"},
}
SEEN, WITHHELD = {"query_aware": "true"}, {"query_aware": "false"}
RULER = {
    "dataset": ",".join(f"ruler/{t}" for t in ("niah_single_2", "niah_multikey_1", "niah_multivalue", "vt", "fwe")),
    **{"lengths": "1024", "limit": "3"},
}
MEASURES: Mapping[str, Mapping[str, str]] = {
    DIVERGENCE: {"dataset": "fidelity/essays"},
    "LongBench\nseen": {**LONGBENCH, **SEEN},
    "LongBench\nwithheld": {**LONGBENCH, **WITHHELD},
    "RULER\nseen": {**RULER, **SEEN},
    "RULER\nwithheld": {**RULER, **WITHHELD},
}
"""The keys of `run` behind each column; ``limit`` is 8 where it says nothing."""
TINY: Mapping[str, Mapping[str, str]] = {
    DIVERGENCE: {"dataset": "fidelity/tiny"},
    "tiny\nseen": {"dataset": "tiny/needle,tiny/listing", **SEEN},
    "tiny\nwithheld": {"dataset": "tiny/needle,tiny/listing", **WITHHELD},
}
"""The columns of the tiny model, which cannot read real texts."""
FIXED = ("method", "dataset", "preset", "match", "reference", "fidelity", "baseline", "prompt", "query_aware")
"""Keys of `run` that the ranking decides itself."""


@dataclass(frozen=True)
class Measure:
    """What one measure says of the rows.

    lines: by label, what is measured.
    values: by label, the mean divergence in nats or the mean score over tasks in per cent, with its 95 % interval.
    """

    name: str
    lines: Mapping[str, Line]
    values: Mapping[str, tuple[float, Interval | None]]

    @property
    def compared(self) -> list[str]:
        """The rows that are ranked: all but the full cache's and those that compressed nothing."""
        return [label for label in self.values if label != "full" and not self.lines[label].unchanged]

    @property
    def ranks(self) -> dict[str, float]:
        """The rank of each row that is compared, 1 the best; equal values share the mean of their ranks."""
        sign = 1 if self.name == DIVERGENCE else -1
        values = {label: sign * self.values[label][0] for label in self.compared}
        ordered = sorted(values.values())
        return {label: ordered.index(v) + (ordered.count(v) + 1) / 2 for label, v in values.items()}

    def better(self, a: str, b: str) -> int:
        """Return 1 where the paired interval says that ``a`` is better than ``b``, -1 the other way, else 0."""
        one, other = self.lines[a], self.lines[b]
        if self.name == DIVERGENCE:
            texts, others = (line.texts[KINDS[0]] for line in (other, one))
            common = sorted(texts.keys() & others.keys())
            _, ci = log_ratio_of_means([texts[t] for t in common], [others[t] for t in common])
        else:
            _, ci = difference(one.answers, other.answers)
        return 0 if ci is None else int(ci[0] > 0) - int(ci[1] < 0)


@dataclass(frozen=True)
class Disagreement:
    """Two rows of which the measure ``before`` says that the first is better, and ``behind`` that the second is."""

    first: str
    second: str
    before: str
    behind: str


def prepare(model: str, options: Mapping[str, str]) -> list[RunPlan]:
    """Plan the run behind each column. Raises UsageError for a key that it does not take."""
    for key in options:
        if key in FIXED:
            raise UsageError(f"{key}={options[key]} is not possible here: table {NAME} says it. Use `run` instead")
    chains = tuple({c.chain: c for _, c in byte_table.chains_of(NAME)}.values())
    runs = []
    for keys in _keys(model).values():
        words = {"model": model, "method": "full", "limit": "8", **keys, **options}
        cfg = config.read([f"{key}={value}" for key, value in words.items()])
        runs.append(experiment.prepare(replace(cfg, chains=chains)))
    return runs


def _keys(model: str) -> Mapping[str, Mapping[str, str]]:
    return TINY if model == "tiny" else MEASURES


def measures(model: str, runs: Sequence[RunPlan], reports: Sequence[Report]) -> list[Measure]:
    """Return the columns from what is stored, over the prompts that all rows have, without rows that lack a task."""
    measured = []
    for name, run, report in zip(_keys(model), runs, reports, strict=True):
        lines = byte_table.lines(NAME, run, report)
        whole = [
            x for x in lines if x.answers.keys() == lines[0].answers.keys() and x.texts.keys() == lines[0].texts.keys()
        ]
        values: dict[str, tuple[float, Interval | None]] = {}
        alike = on_common_prompts(whole)
        for line in alike:
            if name == DIVERGENCE and KINDS[0] in line.fidelity:
                values[line.label] = line.fidelity[KINDS[0]].kl_mean, line.fidelity[KINDS[0]].ci
            elif line.answers:
                mean, ci = mean_over_tasks([[*scores.values()] for scores in line.answers.values()])
                values[line.label] = 100 * mean, percent(ci)
        measured.append(Measure(name, {line.label: line for line in alike}, values))
    return measured


def on_common_prompts(lines: Sequence[Line]) -> list[Line]:
    """Return the rows with the divergences and scores of the prompts alone that all of them have."""

    def common(of: Callable[[Line], Mapping[str, Mapping[str, Any]]]) -> dict[str, set[str]]:
        return {key: set.intersection(*(set(of(x)[key]) for x in lines)) for key in of(lines[0])} if lines else {}

    prompts, answered = common(lambda x: x.texts), common(lambda x: x.answers)
    alike = []
    for line in lines:
        texts = {kind: {i: t for i, t in some.items() if i in prompts[kind]} for kind, some in line.texts.items()}
        answers = {task: {i: x for i, x in some.items() if i in answered[task]} for task, some in line.answers.items()}
        summaries = {kind: summarise_texts([*some.values()]) for kind, some in texts.items()}
        far = {kind: summary for kind, summary in summaries.items() if summary is not None}
        some = {task: scores for task, scores in answers.items() if scores}
        alike.append(replace(line, texts=texts, answers=some, fidelity=far))
    return alike


def sheets(measures: Sequence[Measure]) -> list[Table]:
    """Return the table of values, the best mean rank first, the table of ranks, and that of how alike the ranks are."""
    measures = [c for c in measures if c.values]
    labels = [*dict.fromkeys(label for c in measures for label in c.values)]
    ranks = {label: [c.ranks.get(label) for c in measures] for label in labels}
    means = {label: fmean(known) for label in labels if (known := [r for r in ranks[label] if r])}
    # the full cache first, and last what no measure ranks
    labels.sort(key=lambda label: 0.0 if label == "full" else means.get(label, inf))
    heads = ("method", "bytes\n%", *(c.name for c in measures), "compress\nms", "ms/\ntoken")
    rows = [(_two_lines(label), *_row(label, measures)) for label in labels]
    places = [
        (_two_lines(label), *("—" if r is None else f"{r:g}" for r in ranks[label]), f"{means[label]:.1f}")
        for label in labels
        if label in means
    ]
    names = tuple(c.name for c in measures)
    both = [(a, b) for a, b in pairwise(measures) if a.name.endswith("\nseen") and b.name.endswith("\nwithheld")]
    costs = tuple((_two_lines(label), *(_cost(label, *pair) for pair in both)) for label in labels if label != "full")
    return [
        Table(heads, tuple(rows), headings={0: "at about a quarter of the bytes"}),
        Table(("method", *names, "mean rank"), tuple(places), headings={0: "ranks"}),
        Table(
            ("method", *(a.name.removesuffix("\nseen") for a, _ in both)),
            costs,
            headings={0: "what withholding the question costs: withheld − seen, paired"},
        ),
        Table(("", *names), tuple(_alike(c, measures) for c in measures), headings={0: "Kendall's tau of the ranks"}),
    ]


def _row(label: str, measures: Sequence[Measure]) -> list[str]:
    line = next(c.lines[label] for c in measures if label in c.lines)
    times = [c.lines[label].times for c in measures if label in c.lines]
    compress, decode = (fmean(t[i] for t in times) for i in (0, 1))
    values = [_value(c, label) for c in measures]
    return ["—" if line.bytes is None else f"{line.bytes:.1f}", *values, f"{compress:.0f}", f"{decode:.0f}"]


def _value(measure: Measure, label: str) -> str:
    if label not in measure.values:
        return "—"
    if measure.lines[label].unchanged:
        return UNCHANGED
    value, ci = measure.values[label]
    if measure.name != DIVERGENCE:
        return with_interval(value, ci)
    return f"{value:.3g}" + ("" if ci is None else f"\n[{ci[0]:.2g}, {ci[1]:.2g}]")


def _cost(label: str, seen: Measure, withheld: Measure) -> str:
    if label not in seen.compared or label not in withheld.compared:
        return "—"
    return with_interval(*difference(withheld.lines[label].answers, seen.lines[label].answers), "+")


def _two_lines(label: str) -> str:
    return label.replace(" ", "\n", 1)


def _alike(measure: Measure, measures: Sequence[Measure]) -> tuple[str, ...]:
    return (measure.name.replace("\n", " "), *(_tau(measure, other) for other in measures))


def _tau(a: Measure, b: Measure) -> str:
    value = tau(a.ranks, b.ranks)
    return "—" if value is None else f"{value:.2f}"


def tau(a: Mapping[str, float], b: Mapping[str, float]) -> float | None:
    """Return Kendall's tau-b of two rankings over what both rank; None where either has no order."""
    pairs = [*combinations(sorted(a.keys() & b.keys()), 2)]
    signs = [(_sign(a[x] - a[y]), _sign(b[x] - b[y])) for x, y in pairs]
    ordered = [sum(s[i] != 0 for s in signs) for i in (0, 1)]
    return sum(s * t for s, t in signs) / (ordered[0] * ordered[1]) ** 0.5 if all(ordered) else None


def _sign(x: float) -> int:
    return (x > 0) - (x < 0)


def told_apart(measure: Measure) -> str:
    """Return how many pairs of rows a measure tells apart, as "measure n of m"."""
    pairs = [*combinations(measure.compared, 2)]
    return f"{measure.name} {sum(measure.better(a, b) != 0 for a, b in pairs)} of {len(pairs)}"


def disagreements(measures: Sequence[Measure]) -> list[Disagreement]:
    """Return the pairs of rows that two measures tell apart, each the other way round."""
    opposed = []
    labels = dict.fromkeys(label for c in measures for label in c.compared)
    for a, b in combinations(labels, 2):
        told = {c.name: c.better(a, b) for c in measures if a in c.compared and b in c.compared}
        for one, other in combinations(told, 2):
            if told[one] * told[other] < 0:
                first, second = (a, b) if told[one] > 0 else (b, a)
                opposed.append(Disagreement(first, second, one, other))
    return opposed


def notes(measures: Sequence[Measure], opposed: Sequence[Disagreement]) -> list[str]:
    """Return what stands below the tables: what is shown, and where measures disagree."""
    below = [
        "Bytes after the prompt, in per cent of the full cache's at 16 bits. KL: mean divergence of the next-token "
        "distribution from the full cache's, on the text's own continuation. Scores: means over tasks in per cent; "
        "seen: the question is part of the prompt that is compressed; withheld: it comes after. [95 % intervals] over "
        "prompts, which are the same for all rows. Times are means over all columns. Rows are told apart by the "
        "interval of their paired difference (KL: of the ratio), not corrected for the number of pairs.",
        "; ".join(f"{c.name}: {_counts(c)}".replace("\n", " ") for c in measures) + ".",
        f"Pairs told apart: {'; '.join(told_apart(c) for c in measures if c.values)}.".replace("\n", " "),
    ]
    for (one, other), group in groupby(sorted(opposed, key=_measures_of), _measures_of):
        by_second: dict[str, list[str]] = {}
        for d in group:
            by_second.setdefault(d.second, []).append(d.first)
        rows = "; ".join(f"{', '.join(firsts)} before {second}" for second, firsts in by_second.items())
        below.append(f"Told apart by {one}, and the other way round by {other}: {rows}.".replace("\n", " "))
    if not opposed:
        below.append("No two measures tell a pair of methods apart in opposite ways.")
    if any(line.unchanged for c in measures for line in c.lines.values()):
        below.append(UNCHANGED_NOTE)
    return below


def _measures_of(opposed: Disagreement) -> tuple[str, str]:
    return opposed.before, opposed.behind


def _counts(measure: Measure) -> str:
    if not measure.values:
        return "not measured yet"
    lines = measure.lines.values()
    if measure.name == DIVERGENCE:
        counts = sorted({len(line.texts[KINDS[0]]) for line in lines})
    else:
        counts = sorted({len(scores) for line in lines for scores in line.answers.values()})
    n = "–".join(str(c) for c in dict.fromkeys((counts[0], counts[-1])))
    return f"n = {n} texts" if measure.name == DIVERGENCE else f"n = {n} prompts a task"


def records(measures: Sequence[Measure], opposed: Sequence[Disagreement]) -> dict[str, Any]:
    """Return the ranking as ``--json`` prints it."""
    return {
        "measures": [
            {
                "measure": c.name.replace("\n", " "),
                "rows": [_record(c, label) for label in c.values],
            }
            for c in measures
        ],
        "disagreements": [vars(d) for d in opposed],
    }


def _record(measure: Measure, label: str) -> dict[str, Any]:
    value, ci = measure.values[label]
    verdict = {"nothing_compressed": True} if measure.lines[label].unchanged else {}
    return {"method": label, "value": value, "ci": ci, "rank": measure.ranks.get(label), **verdict}
