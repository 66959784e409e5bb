"""Rank all methods at about equal bytes: by divergence, and by scores with the question seen and withheld."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from math import inf
from statistics import fmean

from kvbench.base.errors import UsageError
from kvbench.plan import config, run_plan
from kvbench.plan.run_plan import RunPlan
from kvbench.plan.words import KL_KEYS
from kvbench.report.render import UNCHANGED, UNCHANGED_NOTE
from kvbench.report.report import Report
from kvbench.report.table import Table, range_text, with_interval
from kvbench.store.fidelity import KINDS, log_ratio_of_means, summarise_texts
from kvbench.studies import byte_table
from kvbench.studies.byte_table import Line
from kvbench.studies.leaderboard import points_between
from kvbench.tasks.metrics.stats import Interval, in_percent, mean_over_tasks

NAME = "ranking"
DIVERGENCE = "KL, nats"
"""The name of the measure by divergence. All other measures are scores."""
LONGBENCH = {
    "dataset": "longbench_mini/multifieldqa_en,longbench_mini/2wikimqa",
    "prompt": "longbench",
    "max_length": "2000",
    "template": "skip",
}
RULER = {
    "dataset": "ruler/niah_single_2,ruler/niah_multikey_1,ruler/niah_multivalue,ruler/vt,ruler/fwe",
    "lengths": "1024",
    "limit": "3",
}
TINY_TASKS = {"dataset": "tiny/needle,tiny/listing"}
SEEN = {"query_aware": "true"}
WITHHELD = {"query_aware": "false"}
MEASURES: Mapping[str, Mapping[str, str]] = {
    DIVERGENCE: {"dataset": "fidelity/essays"},
    "LongBench\nseen": LONGBENCH | SEEN,
    "LongBench\nwithheld": LONGBENCH | WITHHELD,
    "RULER\nseen": RULER | SEEN,
    "RULER\nwithheld": RULER | WITHHELD,
}
"""The keys of `run` behind each column. ``limit`` is 8 unless a column sets it."""
TINY: Mapping[str, Mapping[str, str]] = {
    DIVERGENCE: {"dataset": "fidelity/tiny"},
    "tiny\nseen": TINY_TASKS | SEEN,
    "tiny\nwithheld": TINY_TASKS | WITHHELD,
}
"""The columns of the tiny model, which cannot read real texts."""
FIXED = ("method", "dataset", "preset", "match", "reference", "fidelity", *KL_KEYS, "baseline", "prompt", "query_aware")
"""Keys of `run` that the ranking decides itself."""


@dataclass(frozen=True)
class Measure:
    """One column of the ranking: a value for each row.

    name: the column's head. It may have two lines.
    lines: the measured rows by label.
    values: the value of each row by label, with its 95 % interval. A divergence is a mean in nats. A score is a mean
    over tasks in per cent.
    """

    name: str
    lines: Mapping[str, Line]
    values: Mapping[str, tuple[float, Interval | None]]

    @property
    def ranked_labels(self) -> list[str]:
        """The labels of the ranked rows. The full cache and rows that compressed nothing are left out."""
        return [label for label in self.values if label != "full" and not self.lines[label].unchanged]

    @property
    def ranks(self) -> dict[str, float]:
        """The rank of each ranked row by label. The best rank is 1, and equal values share the mean of their ranks."""
        # a small divergence is good and a large score is good: with this sign, the smallest value is always the best
        sign = -1
        if self.name == DIVERGENCE:
            sign = 1
        values = {label: sign * self.values[label][0] for label in self.ranked_labels}
        ordered = sorted(values.values())
        # n equal values fill the ranks first + 1 ... first + n, and their mean is first + (n + 1) / 2
        return {label: ordered.index(v) + (ordered.count(v) + 1) / 2 for label, v in values.items()}

    @property
    def has_unchanged_rows(self) -> bool:
        """Tell whether some row compressed nothing."""
        return any(line.unchanged for line in self.lines.values())

    def better(self, a: str, b: str) -> int:
        """Return 1 if row ``a`` is better than row ``b`` by their paired interval, -1 if ``b`` is, else 0."""
        line_a = self.lines[a]
        line_b = self.lines[b]
        if self.name == DIVERGENCE:
            texts_a = line_a.texts[KINDS[0]]
            texts_b = line_b.texts[KINDS[0]]
            prompts = sorted(texts_a.keys() & texts_b.keys())
            # ln(mean KL of b / mean KL of a) is positive if b is farther from the full cache, and then a is better
            _, ci = log_ratio_of_means([texts_b[t] for t in prompts], [texts_a[t] for t in prompts])
        else:
            _, ci = points_between(line_a.answers, line_b.answers)
        if ci is None:
            return 0
        # a pair is told apart if its interval excludes 0
        low, high = ci
        if low > 0:
            return 1
        if high < 0:
            return -1
        return 0


@dataclass(frozen=True)
class Disagreement:
    """Two rows that two measures order in opposite ways.

    first, second: the labels of the rows.
    before: the name of the measure that puts ``first`` before ``second``.
    behind: the name of the measure that puts ``first`` behind ``second``.
    """

    first: str
    second: str
    before: str
    behind: str


def prepare(model: str, options: Mapping[str, str]) -> list[RunPlan]:
    """Plan the run behind each column. Raises UsageError for a key that the ranking does not take."""
    for key in options:
        if key in FIXED:
            raise UsageError(f"{key}={options[key]} is not possible here: table {NAME} says it. Use `run` instead")
    # two rows of the table may be the same chain; a run measures it once
    config_by_chain = {chain_config.chain: chain_config for _, chain_config in byte_table.chains_of(NAME)}
    chains = tuple(config_by_chain.values())
    runs = []
    for keys in _run_keys(model).values():
        # the user's options override the column's keys, and these override the defaults
        settings: dict[str, object] = {"model": model, "method": "full", "limit": 8}
        settings |= keys
        settings |= options
        cfg = config.configure(settings)
        runs.append(run_plan.prepare(replace(cfg, chains=chains)))
    return runs


def _run_keys(model: str) -> Mapping[str, Mapping[str, str]]:
    """Return the keys of `run` behind each column of a model."""
    if model == "tiny":
        return TINY
    return MEASURES


def read_measures(model: str, runs: Sequence[RunPlan], reports: Sequence[Report]) -> list[Measure]:
    """Return the columns from the stored results.

    A column compares its rows on the prompts that all of them have. A row that lacks a task is left out.
    """
    measures = []
    for name, run, report in zip(_run_keys(model), runs, reports, strict=True):
        complete_lines = []
        lines = byte_table.lines_of_rows(NAME, run, report)
        for line in lines:
            # the first row is the full cache; every method is compared with it
            full = lines[0]
            if line.answers.keys() == full.answers.keys() and line.texts.keys() == full.texts.keys():
                complete_lines.append(line)
        values: dict[str, tuple[float, Interval | None]] = {}
        paired_lines = on_common_prompts(complete_lines)
        for line in paired_lines:
            if name == DIVERGENCE and KINDS[0] in line.fidelity:
                summary = line.fidelity[KINDS[0]]
                values[line.label] = (summary.kl_mean, summary.ci)
            elif line.answers:
                mean, ci = mean_over_tasks([list(scores.values()) for scores in line.answers.values()])
                values[line.label] = (100 * mean, in_percent(ci))
        measures.append(Measure(name, {line.label: line for line in paired_lines}, values))
    return measures


def on_common_prompts(lines: Sequence[Line]) -> list[Line]:
    """Return the rows with only the divergences and scores on prompts that all rows have."""
    prompts_by_kind = _common_prompts([line.texts for line in lines])
    prompts_by_task = _common_prompts([line.answers for line in lines])
    paired_lines = []
    for line in lines:
        texts = {}
        fidelity = {}
        for kind, text_by_prompt in line.texts.items():
            texts[kind] = {i: text for i, text in text_by_prompt.items() if i in prompts_by_kind[kind]}
            # the means cover only the common prompts, too
            summary = summarise_texts(list(texts[kind].values()))
            if summary is not None:
                fidelity[kind] = summary
        answers = {}
        for task, score_by_prompt in line.answers.items():
            scores = {i: score for i, score in score_by_prompt.items() if i in prompts_by_task[task]}
            if scores:
                answers[task] = scores
        paired_lines.append(replace(line, texts=texts, answers=answers, fidelity=fidelity))
    return paired_lines


def _common_prompts(rows: Sequence[Mapping[str, Mapping[str, object]]]) -> dict[str, set[str]]:
    """Return the prompts that all rows have, by kind of text or by task. A row is {kind or task: {prompt: value}}."""
    common_prompts: dict[str, set[str]] = {}
    # all rows have the same keys, so take the first one's
    for row in rows[:1]:
        for key in row:
            common_prompts[key] = set.intersection(*(set(other[key]) for other in rows))
    return common_prompts


def sheets(measures: Sequence[Measure]) -> list[Table]:
    """Return four tables: values, ranks, costs of withholding the question, and correlations between the ranks.

    Rows are in the order of their mean rank, the best first.
    """
    measures = [measure for measure in measures if measure.values]
    names = [measure.name for measure in measures]
    labels, mean_ranks = _order_by_mean_rank(measures)

    value_heads = ["method", "bytes\n%"] + names + ["compress\nms", "ms/\ntoken"]
    value_rows = [_value_row(label, measures) for label in labels]

    rank_heads = ["method"] + names + ["mean rank"]
    ranks_of_measures = [measure.ranks for measure in measures]
    rank_rows = []
    for label in labels:
        # the full cache and rows that compressed nothing have no rank
        if label in mean_ranks:
            cells = [_two_lines(label)]
            cells += [_rank_text(ranks.get(label)) for ranks in ranks_of_measures]
            cells.append(f"{mean_ranks[label]:.1f}")
            rank_rows.append(tuple(cells))

    # a symmetric matrix of measures x measures, with 1.00 on its diagonal
    tau_heads = [""] + names
    tau_rows = []
    for measure in measures:
        cells = [measure.name.replace("\n", " ")]
        cells += [_tau_text(measure, other) for other in measures]
        tau_rows.append(tuple(cells))

    return [
        Table(tuple(value_heads), tuple(value_rows), headings={0: "at about a quarter of the bytes"}),
        Table(tuple(rank_heads), tuple(rank_rows), headings={0: "ranks"}),
        _cost_table(labels, measures),
        Table(tuple(tau_heads), tuple(tau_rows), headings={0: "Kendall's tau of the ranks"}),
    ]


def _order_by_mean_rank(measures: Sequence[Measure]) -> tuple[list[str], dict[str, float]]:
    """Return the labels of all rows in the tables' order, and the mean rank of each ranked row by label."""
    # a dict keeps the order in which the measures name the rows, each once
    ranks_by_label: dict[str, list[float]] = {}
    for measure in measures:
        ranks = measure.ranks
        for label in measure.values:
            ranks_by_label.setdefault(label, [])
            if label in ranks:
                ranks_by_label[label].append(ranks[label])
    mean_ranks = {label: fmean(ranks) for label, ranks in ranks_by_label.items() if ranks}

    def place(label: str) -> float:
        """Return the sort key: the full cache comes first, and rows without a rank come last."""
        if label == "full":
            return 0.0
        return mean_ranks.get(label, inf)

    return sorted(ranks_by_label, key=place), mean_ranks


def _value_row(label: str, measures: Sequence[Measure]) -> tuple[str, ...]:
    """Return the texts of a row of values: label, bytes, the value of each measure, and two times."""
    lines = [measure.lines[label] for measure in measures if label in measure.lines]
    # bytes differ little between measures, so take the first measure with this row
    byte_text = "—"
    if lines[0].bytes is not None:
        byte_text = f"{lines[0].bytes:.1f}"
    cells = [_two_lines(label), byte_text]
    cells += [_value_text(measure, label) for measure in measures]
    compress_ms = fmean(line.times[0] for line in lines)
    decode_ms = fmean(line.times[1] for line in lines)
    cells += [f"{compress_ms:.0f}", f"{decode_ms:.0f}"]
    return tuple(cells)


def _value_text(measure: Measure, label: str) -> str:
    """Return the text of a row's value, with its interval below it."""
    if label not in measure.values:
        return "—"
    if measure.lines[label].unchanged:
        return UNCHANGED
    value, ci = measure.values[label]
    if measure.name != DIVERGENCE:
        return with_interval(value, ci)
    # divergences span orders of magnitude, so they have significant digits, not decimals
    return f"{value:.3g}" + byte_table.interval_below(ci, ".2g")


def _rank_text(rank: float | None) -> str:
    """Return the text of a rank. It has a decimal only if rows share it."""
    if rank is None:
        return "—"
    return f"{rank:g}"


def _cost_table(labels: Sequence[str], measures: Sequence[Measure]) -> Table:
    """Return the table of differences between scores with the question withheld and seen, a column a benchmark."""
    # the two measures of a benchmark stand side by side
    benchmarks = []
    for seen, withheld in pairwise(measures):
        if seen.name.endswith("\nseen") and withheld.name.endswith("\nwithheld"):
            benchmarks.append((seen, withheld))
    heads = ["method"]
    heads += [seen.name.removesuffix("\nseen") for seen, _ in benchmarks]
    rows = []
    for label in labels:
        if label != "full":
            cells = [_two_lines(label)]
            cells += [_cost_text(label, seen, withheld) for seen, withheld in benchmarks]
            rows.append(tuple(cells))
    heading = "what withholding the question costs: withheld − seen, paired"
    return Table(tuple(heads), tuple(rows), headings={0: heading})


def _cost_text(label: str, seen: Measure, withheld: Measure) -> str:
    """Return the text of a row's paired difference ``withheld - seen`` in points."""
    if label not in seen.ranked_labels or label not in withheld.ranked_labels:
        return "—"
    cost, ci = points_between(withheld.lines[label].answers, seen.lines[label].answers)
    return with_interval(cost, ci, "+")


def _two_lines(label: str) -> str:
    """Return a label with its method on the first line and its knobs on the second."""
    return label.replace(" ", "\n", 1)


def _tau_text(a: Measure, b: Measure) -> str:
    """Return the text of Kendall's tau between the ranks of two measures."""
    value = kendall_tau(a.ranks, b.ranks)
    if value is None:
        return "—"
    return f"{value:.2f}"


def kendall_tau(a: Mapping[str, float], b: Mapping[str, float]) -> float | None:
    """Return Kendall's tau-b between two rankings over the labels in both, or None if a ranking has only ties."""
    # concordant pairs minus discordant pairs: sum_{x<y} sign(a_x - a_y) sign(b_x - b_y)
    balance = 0
    # the numbers of pairs without a tie in a, and in b
    untied_a = 0
    untied_b = 0
    for x, y in combinations(sorted(a.keys() & b.keys()), 2):
        sign_a = _sign(a[x] - a[y])
        sign_b = _sign(b[x] - b[y])
        balance += sign_a * sign_b
        untied_a += abs(sign_a)
        untied_b += abs(sign_b)
    if untied_a == 0 or untied_b == 0:
        return None
    # tau-b = balance / sqrt(untied_a * untied_b)
    return float(balance / (untied_a * untied_b) ** 0.5)


def _sign(x: float) -> int:
    """Return 1, 0 or -1."""
    if x > 0:
        return 1
    if x < 0:
        return -1
    return 0


def told_apart(measure: Measure) -> str:
    """Return the text "measure n of m": the measure tells n of its m pairs of rows apart."""
    # m = r (r - 1) / 2 for r ranked rows
    pairs = list(combinations(measure.ranked_labels, 2))
    n = sum(measure.better(a, b) != 0 for a, b in pairs)
    return f"{measure.name} {n} of {len(pairs)}"


def disagreements(measures: Sequence[Measure]) -> list[Disagreement]:
    """Return the pairs of rows that two measures tell apart in opposite ways."""
    labels: list[str] = []
    for measure in measures:
        labels += [label for label in measure.ranked_labels if label not in labels]
    opposed = []
    for a, b in combinations(labels, 2):
        verdicts: dict[str, int] = {}
        for measure in measures:
            ranked_labels = measure.ranked_labels
            if a in ranked_labels and b in ranked_labels:
                verdicts[measure.name] = measure.better(a, b)
        for name, other in combinations(verdicts, 2):
            # 1 and -1: each measure tells the two rows apart, but the better row differs
            if verdicts[name] * verdicts[other] < 0:
                if verdicts[name] > 0:
                    opposed.append(Disagreement(a, b, name, other))
                else:
                    opposed.append(Disagreement(b, a, name, other))
    return opposed


def notes(measures: Sequence[Measure], opposed: Sequence[Disagreement]) -> list[str]:
    """Return the notes below the tables: units, numbers of prompts, and the pairs on which measures disagree."""
    counts = "; ".join(f"{measure.name}: {_count_text(measure)}" for measure in measures)
    pairs = "; ".join(told_apart(measure) for measure in measures if measure.values)
    below = [
        "Bytes after the prompt, in per cent of the full cache's at 16 bits. KL: mean divergence of the next-token "
        "distribution from the full cache's, on the text's own continuation. Scores: means over tasks in per cent; "
        "seen: the question is part of the prompt that is compressed; withheld: it comes after. [95 % intervals] over "
        "prompts, which are the same for all rows. Times are means over all columns. Rows are told apart by the "
        "interval of their paired difference (KL: of the ratio), not corrected for the number of pairs.",
        # names of measures may have two lines, but a note has one
        f"{counts}.".replace("\n", " "),
        f"Pairs told apart: {pairs}.".replace("\n", " "),
    ]
    below += _disagreement_notes(opposed)
    if not opposed:
        below.append("No two measures tell a pair of methods apart in opposite ways.")
    if any(measure.has_unchanged_rows for measure in measures):
        below.append(UNCHANGED_NOTE)
    return below


def _disagreement_notes(opposed: Sequence[Disagreement]) -> list[str]:
    """Return a note for each two measures that disagree, with the rows that each puts first."""
    # rows put before the same second row share one clause
    firsts_by_second: dict[tuple[str, str], dict[str, list[str]]] = {}
    for pair in opposed:
        by_second = firsts_by_second.setdefault((pair.before, pair.behind), {})
        by_second.setdefault(pair.second, []).append(pair.first)
    texts = []
    for (before, behind), by_second in sorted(firsts_by_second.items(), key=_measure_names):
        clauses = "; ".join(f"{', '.join(firsts)} before {second}" for second, firsts in by_second.items())
        texts.append(f"Told apart by {before}, and the other way round by {behind}: {clauses}.".replace("\n", " "))
    return texts


def _measure_names(entry: tuple[tuple[str, str], object]) -> tuple[str, str]:
    """Return the key of an entry of a dict, the names of two measures."""
    return entry[0]


def _count_text(measure: Measure) -> str:
    """Return the number of prompts behind a measure, as a range if rows or tasks differ."""
    if not measure.values:
        return "not measured yet"
    # rows are restricted to common prompts, so a range comes from tasks of different sizes
    counts = set()
    for line in measure.lines.values():
        if measure.name == DIVERGENCE:
            counts.add(len(line.texts[KINDS[0]]))
        else:
            counts.update(len(scores) for scores in line.answers.values())
    if measure.name == DIVERGENCE:
        return f"n = {range_text(counts)} texts"
    return f"n = {range_text(counts)} prompts a task"


def records(measures: Sequence[Measure], opposed: Sequence[Disagreement]) -> dict[str, object]:
    """Return the ranking as ``--json`` prints it."""
    columns = []
    for measure in measures:
        rows = [_row_record(measure, label) for label in measure.values]
        columns.append({"measure": measure.name.replace("\n", " "), "rows": rows})
    return {"measures": columns, "disagreements": [vars(pair) for pair in opposed]}


def _row_record(measure: Measure, label: str) -> dict[str, object]:
    """Return one row of a measure for JSON."""
    value, ci = measure.values[label]
    record: dict[str, object] = {"method": label, "value": value, "ci": ci, "rank": measure.ranks.get(label)}
    # write the key only where it is true, so that records of ordinary rows stay short
    if measure.lines[label].unchanged:
        record["nothing_compressed"] = True
    return record
