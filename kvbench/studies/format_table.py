"""Build the tables of cache formats: divergence from the full cache beside scores, and pairs of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import TypedDict

import numpy as np

from kvbench.base.conf import read_yaml
from kvbench.base.errors import UsageError
from kvbench.base.formatting import format_number, format_significant, with_interval
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.resolve import ChainConfig, resolve
from kvbench.plan import config, run_plan
from kvbench.plan.cells import Group
from kvbench.plan.run_plan import RunPlan
from kvbench.plan.words import KL_KEYS
from kvbench.report.data import CellResult
from kvbench.report.render import UNCHANGED, UNCHANGED_NOTE
from kvbench.report.report import Report
from kvbench.report.table import Table
from kvbench.store.cell import Cell
from kvbench.store.fidelity import CODED, KINDS, FidelitySummary, TextFidelity, log_ratio_of_means, summarise_texts
from kvbench.store.results import CellSummary, share
from kvbench.tasks.metrics.stats import Interval, in_percent, mean_over_tasks


class TableEntry(TypedDict):
    """A table in format_tables.yaml.

    title: the table's title.
    blocks: by heading, the rows of a block. A row holds ``method``, its knobs, and ``label`` for another name.
    """

    title: str
    blocks: Mapping[str, Sequence[Mapping[str, object]]]


TABLES: Mapping[str, TableEntry] = read_yaml(Path(__file__).with_name("format_tables.yaml"))
"""The tables by name, each with its title and its rows in blocks."""
DATASETS = {"tiny": "fidelity/tiny,tiny", "": "fidelity/essays,needle,longbench_mini"}
"""The default of ``dataset=`` by model. The key "" stands for every other model."""
FIXED = ("method", "preset", "match", "reference", "fidelity", *KL_KEYS, "baseline")
"""Keys of `run` that a table decides itself."""


@dataclass(frozen=True)
class Line:
    """One row of a table.

    label: the method's name with its knobs.
    block: the heading above the row's block.
    bytes: the cache's bytes after the prompt, in per cent of the full cache's at 16 bits.
    fidelity: the summary of divergences by kind of text.
    texts: the divergence of each prompt, by kind of text and then by "task example".
    scores: the mean score by dataset, in per cent.
    answers: the scores in [0, 1], by task and then by example.
    times: the mean milliseconds to compress a prompt, and to decode a token.
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
        # these keys have the order of the printed JSON
        record: dict[str, object] = {"label": self.label, "block": self.block, "bytes_percent": self.bytes}
        record["fidelity"] = {kind: vars(summary) for kind, summary in self.fidelity.items()}
        record["scores"] = dict(self.scores)
        # write the key only where it is true, so that records of ordinary rows stay short
        if self.unchanged:
            record["nothing_compressed"] = True
        record["score_intervals"] = {dataset: self.interval(dataset) for dataset in self.scores}
        return record

    def scores_by_task(self, dataset: str) -> list[list[float]]:
        """Return the scores in [0, 1] of a dataset, a list for each of its tasks."""
        return [list(scores.values()) for task, scores in self.answers.items() if _find_dataset(task) == dataset]

    def interval(self, dataset: str) -> Interval | None:
        """Return the 95 % interval of a dataset's score in per cent."""
        _, ci = mean_over_tasks(self.scores_by_task(dataset))
        return in_percent(ci)


def prepare(name: str, model: str, options: Mapping[str, str], kl_mode: str = config.AFTER_PREFILL) -> RunPlan:
    """Plan the run behind a table. Raises UsageError for a key that the table decides itself.

    options: the keys of `run` that the user typed.
    kl_mode: one of the modes in which a run compares methods with the full cache.
    """
    for key in options:
        if key in FIXED:
            raise UsageError(
                f"{key}={options[key]} is not possible here: the table {name} sets it. Use `kvbench run` to choose it"
            )
    settings: dict[str, object] = {"model": model, "dataset": DATASETS.get(model, DATASETS[""]), "limit": 8}
    settings |= options
    # the method is a placeholder: the table's chains replace it below
    settings["method"] = "full"
    # texts of dataset=fidelity are compared with the full cache whether the run asks for it or not
    if "fidelity" not in str(settings["dataset"]) or kl_mode != config.AFTER_PREFILL:
        settings["kl"] = True
        settings["kl_mode"] = kl_mode
    cfg = config.configure(settings)
    # two rows of a table may be the same chain; a run measures it once
    config_by_chain = {chain_config.chain: chain_config for _, chain_config in read_rows(name)}
    return run_plan.prepare(replace(cfg, chains=tuple(config_by_chain.values())))


def read_rows(name: str) -> list[tuple[str, ChainConfig]]:
    """Return (heading of the row's block, the row's chain with its label) for each row of a table, in order."""
    chains = []
    for block, rows in TABLES[name]["blocks"].items():
        for row in rows:
            knobs = {key: value for key, value in row.items() if key not in ("method", "label")}
            # a row must resolve to exactly one chain, without swept knobs
            (resolved,) = resolve([str(row["method"])], knobs)
            label = str(row.get("label", resolved.label))
            chains.append((block, ChainConfig(resolved.chain, label)))
    return chains


def read_lines_of_table(name: str, run: RunPlan, report: Report) -> list[Line]:
    """Return the measured rows of a table from the stored results, the full cache first.

    run: the run that ``prepare`` planned for the table.
    report: the report on this run.
    """
    # the same chain has the same index in the cells of every task
    index_by_chain = {cell.chain: i for i, cell in enumerate(run.groups[0].cells)}
    rows = [("", ChainConfig(Chain(), "full"))]
    rows += read_rows(name)
    measured_lines = []
    for block, cfg in rows:
        line = _read_line(cfg.label, block, run, report, row=index_by_chain[cfg.chain])
        if line is not None:
            measured_lines.append(line)
    return measured_lines


@dataclass(frozen=True)
class MeasuredCell:
    """A row's cell on one task that has stored answers.

    group: the cells of the task.
    cell: the row's cell.
    result: the cell's stored result.
    summary: the summary of its samples.
    """

    group: Group
    cell: Cell
    result: CellResult
    summary: CellSummary


def _read_line(label: str, block: str, run: RunPlan, report: Report, row: int) -> Line | None:
    """Return a row of the table, or None if no cell of it is measured.

    row: the index of the row's method in the report's rows and in the cells of each task.
    """
    cells = []
    for group, result in zip(run.groups, report.rows[row].cells, strict=True):
        if result.summary is not None:
            cells.append(MeasuredCell(group, group.cells[row], result, result.summary))
    if not cells:
        return None
    # a kind of text has no summary if no task was compared on it
    texts = {}
    fidelity = {}
    for kind in KINDS:
        texts[kind] = _read_divergences(run, cells, kind)
        text_summary = summarise_texts(list(texts[kind].values()))
        if text_summary is not None:
            fidelity[kind] = text_summary
    # tasks of long texts have no scores; they are compared with the full cache
    scored_cells = [cell for cell in cells if not cell.group.task.fidelity and cell.summary.score is not None]
    scored_tasks = {cell.group.task.id for cell in scored_cells}
    compress_ms = 1000 * fmean(cell.summary.timing.compress_s for cell in cells)
    decode_ms = 1000 * fmean(cell.summary.timing.decode_s_per_token for cell in cells)
    return Line(
        label=label,
        block=block,
        bytes=_compute_share(cells),
        fidelity=fidelity,
        texts=texts,
        scores=_compute_scores(scored_cells),
        answers={task: scores for task, scores in run.answers(row).items() if task in scored_tasks},
        times=(compress_ms, decode_ms),
        unchanged=all(cell.result.unchanged for cell in cells),
    )


def _compute_share(cells: Sequence[MeasuredCell]) -> float | None:
    """Return the bytes of all prompts in per cent of the full cache's, at 16 bits. Long prompts count for more."""
    # a summary holds means over its n prompts
    payload16 = sum(cell.summary.n * cell.summary.payload16 for cell in cells)
    overhead16 = sum(cell.summary.n * cell.summary.overhead16 for cell in cells)
    full16 = sum(cell.summary.n * cell.summary.full16 for cell in cells)
    return share(payload16, overhead16, full16)


def _compute_scores(scored_cells: Sequence[MeasuredCell]) -> dict[str, float]:
    """Return the score of each dataset: the mean over its tasks, whatever their sizes."""
    scores_by_dataset: dict[str, list[float]] = {}
    for cell in scored_cells:
        if cell.summary.score is not None:
            scores_by_dataset.setdefault(_find_dataset(cell.group.task.id), []).append(cell.summary.score)
    return {dataset: fmean(scores) for dataset, scores in scores_by_dataset.items()}


def _find_dataset(task: str) -> str:
    """Return the dataset of a task's id, for example "ruler" of "ruler/vt/1024"."""
    dataset, _, _ = task.partition("/")
    return dataset


def _read_divergences(run: RunPlan, cells: Sequence[MeasuredCell], kind: str) -> dict[str, TextFidelity]:
    """Return a row's divergences on one kind of text (``reference`` or ``greedy``), by "TASK EXAMPLE".

    If the run has tasks of long texts, only these count. Otherwise all tasks count.
    """
    # a task with ``fidelity`` has long texts
    has_long_texts = any(cell.group.task.fidelity for cell in cells)
    divergences: dict[str, TextFidelity] = {}
    for cell in cells:
        task = cell.group.task
        if has_long_texts and not task.fidelity:
            continue
        for example_id, sample in run.samples(cell.group, cell.cell).items():
            by_kind = sample.fidelity or {}
            if kind in by_kind:
                divergences[f"{task.id} {example_id}"] = by_kind[kind]
    return divergences


def build_table(rows: Sequence[Line]) -> Table:
    """Return the table of the rows, with a heading above each block."""
    # a dataset's column stands where the first row with its scores puts it
    datasets: list[str] = []
    for line in rows:
        datasets += [dataset for dataset in line.scores if dataset not in datasets]
    heads = ["method", "bytes\n%", "KL,\nreference", "KL,\nanswer", "same\nchoice %", "perplexity\nratio"]
    texts = tuple(_write_row(line, datasets) for line in rows)
    return Table(tuple(heads + datasets), texts, headings=find_headings(rows))


def find_headings(rows: Sequence[Line]) -> dict[int, str]:
    """Return the heading of each block by the index of its first row."""
    heading_by_index: dict[int, str] = {}
    for i, line in enumerate(rows):
        if i == 0 or line.block != rows[i - 1].block:
            heading_by_index[i] = line.block
    return heading_by_index


def _write_row(line: Line, datasets: Sequence[str]) -> tuple[str, ...]:
    reference = line.fidelity.get("reference")
    answer = line.fidelity.get("greedy")
    # choices and perplexity belong to the reference; a run without one shows the answer's
    summary = reference or answer
    ratio_text = "—"
    if summary is not None:
        ratio_text = with_interval(summary.ppl_ratio, summary.ppl_ratio_ci, 4)
    texts = [
        line.label.replace(" ", "\n", 1),
        format_number(line.bytes),
        write_nats(reference),
        write_nats(answer),
        write_same_choice(summary),
        ratio_text,
    ]
    texts += [_write_score(line, dataset) for dataset in datasets]
    return tuple(texts)


def _write_score(line: Line, dataset: str) -> str:
    """Return the text of a dataset's score in per cent, with its interval below it."""
    if dataset not in line.scores:
        return "—"
    if line.unchanged:
        return UNCHANGED
    return with_interval(line.scores[dataset], line.interval(dataset))


def write_nats(summary: FidelitySummary | None) -> str:
    """Return the text of a mean divergence in nats, with its interval below it."""
    if summary is None:
        return "—"
    if summary.at_floor:
        # a divergence below rounding is 0 only if no text diverges at all
        if not summary.kl_max:
            return "0"
        return "≤ rounding"
    return with_interval(summary.kl_mean, summary.ci, 3, significant=True)


def write_same_choice(summary: FidelitySummary | None) -> str:
    """Return the text of equal first choices in per cent, with the interval below it."""
    if summary is None:
        return "—"
    return with_interval(summary.top1, summary.top1_ci)


@dataclass(frozen=True)
class Pair:
    """Two rows of a block, the nearer to the full cache first.

    nearer: the label of the row that is nearer to the full cache.
    farther: the label of the other row.
    log_ratio: ln(nearer row's mean divergence / farther row's mean divergence), over the prompts that both rows have.
    ci: the 95 % interval of ``log_ratio``.
    points: the nearer row's score minus the farther's, in points. It is a mean over tasks of paired differences.
    points_ci: the 95 % interval of ``points``.
    neighbours: whether no row of the block lies between the two.
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
        """True if the interval of divergences tells the rows apart."""
        if self.ci is None:
            return False
        _, high = self.ci
        # the rows are in the order of their divergences: they are apart if the ratio is surely below 1
        return high < 0

    @property
    def scored_apart(self) -> bool:
        """True if the interval of scores tells the rows apart, in either direction."""
        if self.points_ci is None:
            return False
        low, high = self.points_ci
        return low > 0 or high < 0

    @property
    def scores_higher(self) -> bool:
        """True if the nearer row has the higher score."""
        return self.points is not None and self.points > 0

    @property
    def scores_lower(self) -> bool:
        """True if the nearer row has the lower score."""
        return self.points is not None and self.points < 0


def compare_pairs(rows: Sequence[Line], kind: str = "reference") -> list[Pair]:
    """Return the comparisons of all pairs of rows within each block. A block's rows are sorted by divergence before.

    kind: the kind of text on which divergence is measured, ``reference`` or ``greedy``.
    """
    block_pairs = []
    for block in dict.fromkeys(line.block for line in rows):
        block_lines = _select_comparable(rows, block, kind)
        for (i, near), (j, far) in combinations(enumerate(block_lines), 2):
            # rows are sorted by divergence, so neighbours have successive indices
            block_pairs.append(_compare_lines(near, far, kind, are_neighbours=j == i + 1))
    return block_pairs


def _compare_lines(near: Line, far: Line, kind: str, are_neighbours: bool) -> Pair:
    """Return the comparison of two rows on the prompts that both have.

    near, far: the row nearer to the full cache, and the other one.
    kind: the kind of text on which divergence is measured.
    are_neighbours: whether no row of the block lies between the two.
    """
    near_texts, far_texts = near.texts[kind], far.texts[kind]
    # sort, since the interval's last digit depends on the order of prompts
    prompts = sorted(near_texts.keys() & far_texts.keys())
    log_ratio, ci = log_ratio_of_means([near_texts[p] for p in prompts], [far_texts[p] for p in prompts])
    points, points_ci = _compare_scores(near, far)
    return Pair(
        nearer=near.label,
        farther=far.label,
        log_ratio=log_ratio,
        ci=ci,
        points=points,
        points_ci=points_ci,
        neighbours=are_neighbours,
    )


def _select_comparable(rows: Sequence[Line], block: str, kind: str) -> list[Line]:
    """Return the rows of a block in the order of their divergence on texts of ``kind``, the smallest first."""
    block_lines = []
    for line in rows:
        if line.block != block or kind not in line.fidelity:
            continue
        # a divergence at the floor is rounding, and an unchanged row is the full cache: neither can be ordered
        if not line.fidelity[kind].at_floor and not line.unchanged:
            block_lines.append(line)

    return sorted(block_lines, key=lambda line: line.fidelity[kind].kl_mean)


def _compare_scores(near: Line, far: Line) -> tuple[float | None, Interval | None]:
    """Return the difference ``near - far`` of two rows' scores in points, and its interval over paired examples.

    The difference is a mean over tasks. It is None if the rows share no example.
    """
    differences_by_task = []
    # sort, since the interval's last digit depends on the order of tasks and examples
    for task in sorted(near.answers.keys() & far.answers.keys()):
        near_scores, far_scores = near.answers[task], far.answers[task]
        examples = sorted(near_scores.keys() & far_scores.keys())
        if examples:
            differences_by_task.append(np.array([near_scores[i] - far_scores[i] for i in examples]))
    if not differences_by_task:
        return None, None
    # a difference of two scores in [0, 1] lies in [-1, 1]
    mean, ci = mean_over_tasks(differences_by_task, bounds=(-1.0, 1.0))
    return 100 * mean, in_percent(ci)


def write_notes(rows: Sequence[Line], pairs: Sequence[Pair]) -> list[str]:
    """Return the notes below a table: units, numbers of texts, and the pairs that divergence and scores tell apart."""
    text_counts: list[str] = []
    score_counts: list[str] = []
    if rows:
        # all rows are measured on the same texts, so any one gives the numbers
        line = rows[-1]
        for kind, summary in line.fidelity.items():
            text_counts.append(f"n = {summary.n} texts, {summary.n_tokens} tokens ({kind})")
        for dataset in line.scores:
            n = sum(map(len, line.scores_by_task(dataset)))
            score_counts.append(f"{dataset} {n}")
    floors: list[float] = []
    for line in rows:
        floors += [summary.floor for summary in line.fidelity.values()]
    floor_text = ""
    if floors:
        floor_text = (
            f" The floor is at most {format_significant(max(floors), 1)} nats where new tokens stay exact. {CODED}"
        )
    # without scores, n is printed as 0
    note_texts = [
        "Bytes after the prompt, in per cent of the full cache's at 16 bits. KL: mean divergence of the next-token "
        "distribution from the full cache's in nats, on the text's own continuation (reference) and on the full "
        "cache's own greedy answer; same choice and perplexity ratio on the reference. [95 % intervals over prompts.] "
        f"Scores are means over a dataset's tasks, n = {', '.join(score_counts) or 0} examples. "
        f"{'; '.join(text_counts)}.{floor_text}",
        _note_agreement(pairs),
    ]
    note_texts += _note_divergences(pairs)
    if any(line.unchanged for line in rows):
        note_texts.append(UNCHANGED_NOTE)
    return note_texts


def _note_agreement(pairs: Sequence[Pair]) -> str:
    """Return the sentence with the numbers of pairs that divergence and scores tell apart, and where they agree."""
    apart = [pair for pair in pairs if pair.apart]
    by_scores = [pair for pair in pairs if pair.scored_apart]
    # each list below is a part of ``apart``
    by_divergence_alone = [pair for pair in apart if not pair.scored_apart]
    higher = [pair for pair in apart if pair.scores_higher]
    lower = [pair for pair in apart if pair.scores_lower]
    higher_apart = [pair for pair in higher if pair.scored_apart]
    lower_apart = [pair for pair in lower if pair.scored_apart]
    return (
        f"Of {len(pairs)} pairs within blocks {len(apart)} are told apart by KL (95 % interval of the "
        "paired log ratio of means, not corrected for their number), "
        f"{len(by_scores)} by the scores (of their paired difference), "
        f"{len(by_divergence_alone)} by KL alone. Where KL tells them apart the nearer one "
        f"has the higher score in {len(higher)}, the lower in "
        f"{len(lower)} (told apart by the scores, too: "
        f"{len(higher_apart)} and {len(lower_apart)})."
    )


def _note_divergences(pairs: Sequence[Pair]) -> list[str]:
    """Return the notes below the table on the pairs of formats that KL divergence tells apart.

    The first note lists the pairs that only KL tells apart, not the scores. One note follows for each pair of
    neighbours in the table, with the log ratio of their mean divergences.

    pairs: all compared pairs of the table, also those that nothing tells apart.
    """
    apart = [pair for pair in pairs if pair.apart]
    texts = []
    # a pair without scores is not listed: scores could not have told it apart
    farther_by_nearer: dict[str, list[str]] = {}
    for pair in apart:
        if pair.points is not None and not pair.scored_apart:
            farther_by_nearer.setdefault(pair.nearer, []).append(pair.farther)
    if farther_by_nearer:
        clauses = [f"{nearer} before {', '.join(farther)}" for nearer, farther in farther_by_nearer.items()]
        texts.append(f"By KL alone: {'; '.join(clauses)}.")
    # neighbours are enough here, since the ratios of other pairs follow from theirs
    for pair in apart:
        if pair.neighbours and pair.ci is not None:
            ratio = with_interval(pair.log_ratio, pair.ci, 2, gap=" ")
            points = ""
            if pair.points is not None:
                points = f", scores {with_interval(pair.points, pair.points_ci, sign=True, gap=' ')}"
            texts.append(f"{pair.nearer} is nearer to the full cache than {pair.farther}: ln ratio {ratio}{points}.")
    return texts
