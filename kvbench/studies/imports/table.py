"""Scores of imported answers as plain data and as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypedDict

from kvbench.base.formatting import DASH, format_number, format_percent, with_interval
from kvbench.base.visible import one_line
from kvbench.papers.spec import catalogue
from kvbench.report import writers
from kvbench.report.table import Table
from kvbench.studies.imports.scoring import Score, Scored, compute_printed_mean
from kvbench.studies.imports.verdict import Judgement, PublishedMean, write_verdict
from kvbench.tasks.longbench import BUCKETS, TASKS, task_names
from kvbench.tasks.metrics import metric
from kvbench.tasks.thoughts import THOUGHT

# lines of all kinds share these columns; a line leaves a column empty if it has no value for it
CSV_FIELDS = (
    "kind",
    "dataset",
    "split",
    "bucket",
    "metric",
    "score",
    "ci_low",
    "ci_high",
    "n",
    "unscored",
    "paper",
    "table",
    "setting",
    "verdict",
    "indicative",
    "because",
    "certainty",
    "file",
    "cell",
)
ROUNDING = 0.02
"""The largest difference between a printed average and the mean of its printed cells that rounding can explain."""
Verdicts = Mapping[tuple[str, str], Mapping[int, Judgement]]
"""The judgements on published values, by (paper, table) and then by the index of a record."""
Means = Mapping[tuple[str, str], PublishedMean]
"""The papers' means over LongBench's 16 English tasks, by (paper, table)."""


class ScoreNumbers(TypedDict):
    """A mean score with its interval, in printed units and rounded to two digits.

    score: the mean; None if no answer can be scored.
    ci: the ends of its 95 % interval.
    n: the number of answers.
    unscored: the number of answers that cannot be scored.
    """

    score: float | None
    ci: list[float] | None
    n: int
    unscored: int


class TaskRecord(TypedDict, total=False):
    """The scores of one file's answers to one dataset, as ``--json`` prints them.

    dataset: LongBench's name of the task, or the tool's name for other benchmarks.
    split: ``standard`` or ``e`` (LongBench-E); None for a dataset of another benchmark.
    metric: the name of the metric that scored the answers.
    score, ci, n, unscored: as in ``ScoreNumbers``.
    cut_thoughts: the share of answers that end inside their thought. The key exists only if there are some.
    buckets: the numbers of each range of length. The key exists only for LongBench-E.
    published: the judgements on the published values of this dataset.
    file: the path of the file.
    layout: the tool whose format the file has.
    seconds: the time that scoring took.
    cell: the id of the stored result. The key exists only for stored answers.
    """

    dataset: str
    split: str | None
    metric: str
    score: float | None
    ci: list[float] | None
    n: int
    unscored: int
    cut_thoughts: float
    buckets: dict[str, ScoreNumbers]
    published: list[Judgement]
    file: str
    layout: str
    seconds: float
    cell: str


def build_records(scored: Sequence[Scored], verdicts: Verdicts) -> list[TaskRecord]:
    """Return a record per file and dataset, with scores and intervals in printed units, rounded to two digits."""
    records = []
    for i, file in enumerate(scored):
        numbers = _compute_numbers(file.metric, file.scores, file.interval)
        split = None
        if file.predictions.extended:
            split = "e"
        elif file.predictions.dataset in TASKS:
            split = "standard"
        # the keys stand in the order in which JSON prints them
        record: TaskRecord = {
            "dataset": file.predictions.dataset,
            "split": split,
            "metric": file.metric,
            "score": numbers["score"],
            "ci": numbers["ci"],
            "n": numbers["n"],
            "unscored": numbers["unscored"],
        }
        cut = sum(THOUGHT.find_answer(answer.prediction) is None for answer in file.predictions.answers)
        if cut:
            record["cut_thoughts"] = cut / len(file.predictions.answers)
        if file.buckets:
            record["buckets"] = {
                bucket.name: _compute_numbers(file.metric, bucket.scores, bucket.interval) for bucket in file.buckets
            }
        record["published"] = [judgements[i] for judgements in verdicts.values() if i in judgements]
        record["file"] = str(file.predictions.path)
        record["layout"] = file.predictions.layout
        record["seconds"] = round(file.seconds, 3)
        records.append(record)
    return records


def _compute_numbers(name: str, scores: Sequence[Score], interval: tuple[float, float] | None) -> ScoreNumbers:
    """Return the mean of scores in [0, 1] by the metric ``name``, with its interval, in printed units."""
    score = compute_printed_mean(name, scores)
    if score is not None:
        score = round(score, 2)
    ci = None
    if interval is not None:
        scale = metric(name).scale
        ci = [round(scale * end, 2) for end in interval]
    return {"score": score, "ci": ci, "n": len(scores), "unscored": sum(value is None for value in scores)}


def compute_english_mean(records: Sequence[TaskRecord]) -> float | None:
    """Return the mean score over LongBench's 16 English tasks.

    Return None if a task is missing or has no score, or if any dataset occurs twice.
    """
    # two files with answers to one dataset are two runs, and their mean would belong to neither
    datasets = [record["dataset"] for record in records]
    if len(datasets) != len(set(datasets)):
        return None
    scores: list[float] = []
    for record in records:
        if record["split"] == "standard" and record["dataset"] in task_names("en"):
            # a task whose answers cannot be scored is missing from the mean
            if record["score"] is None:
                return None
            scores.append(record["score"])
    if len(scores) < len(task_names("en")):
        return None
    return round(sum(scores) / len(scores), 2)


def as_csv(records: Sequence[TaskRecord]) -> str:
    """Return CSV text with a line for each dataset, each range of length and each published value.

    The column ``kind`` tells these lines apart: score, bucket or published.
    """
    lines: list[dict[str, object]] = []
    for record in records:
        score_line: dict[str, object] = {"kind": "score"}
        score_line |= record
        score_line |= _split_interval(record["ci"])
        lines.append(score_line)
        for name, numbers in record.get("buckets", {}).items():
            bucket_line: dict[str, object] = dict(record)
            bucket_line |= {"kind": "bucket", "bucket": name}
            # the range's own score and counts in place of the dataset's
            bucket_line |= numbers
            bucket_line |= _split_interval(numbers["ci"])
            lines.append(bucket_line)
        for judgement in record["published"]:
            published_line: dict[str, object] = dict(record)
            published_line |= judgement
            # a printed value has no number of examples; its score is the paper's
            published_line |= {"kind": "published", "score": judgement["value"], "n": "", "unscored": ""}
            published_line["because"] = "; ".join(judgement["because"])
            lines.append(published_line)
    return writers.csv(CSV_FIELDS, lines)


def _split_interval(ci: Sequence[float] | None) -> dict[str, float]:
    """Return the columns of an interval, {} without one."""
    if not ci:
        return {}
    low, high = ci
    return {"ci_low": low, "ci_high": high}


def build_tables(records: Sequence[TaskRecord], verdicts: Verdicts, means: Means, times: bool = False) -> list[Table]:
    """Return the tables to print: the scores, and a second table if papers print values of this model and method.

    verdicts: the judgements on the published values.
    means: the means that papers print.
    times: True for a column with the seconds that scoring took.
    """
    tables = [_build_score_table(records, times)]
    if verdicts:
        tables.append(_build_published_table(records, verdicts, means))
    return tables


def _build_score_table(records: Sequence[TaskRecord], times: bool) -> Table:
    """Return the table of scores; with ``times``, its last column is the seconds that scoring took."""
    headers = ["dataset", "metric", "score", "95 % interval", "n", "unscored"]
    # if any record has LongBench-E's ranges of length, the table has a column for each range
    ranges: list[str] = []
    if any("buckets" in record for record in records):
        ranges = [name for name, _ in BUCKETS]
    headers += ranges
    if times:
        headers.append("s")
    rows = []
    for label, record in zip(_label_records(records), records, strict=True):
        score, _, interval = with_interval(record["score"], record["ci"], 2).partition("\n")
        texts = [
            label,
            record["metric"],
            score,
            interval or DASH,
            str(record["n"]),
            str(record["unscored"]),
        ]
        buckets = record.get("buckets", {})
        for name in ranges:
            texts.append(_write_score(buckets[name]["score"]) if name in buckets else "—")
        if times:
            texts.append(format_number(record["seconds"], 2))
        rows.append(tuple(texts))
    mean = compute_english_mean(records)
    if mean is not None:
        texts = ["mean of the 16", "", _write_score(mean)]
        # the other columns stay empty
        texts += [""] * (len(headers) - len(texts))
        rows.append(tuple(texts))
    return Table(tuple(headers), tuple(rows))


def _build_published_table(records: Sequence[TaskRecord], verdicts: Verdicts, means: Means) -> Table:
    """Return the table of scores beside published values, a column for each paper's table."""
    headers = ["dataset", "score"]
    headers += [_write_title(paper, table) for paper, table in verdicts]
    rows = []
    for i, (label, record) in enumerate(zip(_label_records(records), records, strict=True)):
        # a dataset that no paper prints has no line
        if not any(i in judgements for judgements in verdicts.values()):
            continue
        texts = [label, _write_score(record["score"])]
        for judgements in verdicts.values():
            texts.append(write_verdict(judgements[i]) if i in judgements else "—")
        rows.append(tuple(texts))
    # papers end a row with the mean of its 16 tasks: print it beside ours if we have all of them
    mean = compute_english_mean(records)
    if mean is not None:
        texts = ["mean of the 16", _write_score(mean)]
        texts += [_write_mean(means[place]) for place in verdicts]
        rows.append(tuple(texts))
    return Table(tuple(headers), tuple(rows))


def _write_title(paper: str, table: str) -> str:
    """Return a paper's table in the usual form, such as ``ThinK table 2``."""
    return f"{catalogue.read_paper(paper).called} table {table}"


def write_notes(records: Sequence[TaskRecord], verdicts: Verdicts) -> list[str]:
    """Return the notes below these tables, a sentence each."""
    lines = ["[a, b]: 95 % interval over examples. unscored: answers whose references cannot be scored."]
    incomplete = []
    for record in records:
        if "cut_thoughts" in record:
            share = format_percent(100 * record["cut_thoughts"])
            lines.append(f"{record['dataset']}: {share} of the answers end inside their thought, and score as empty.")
        # LongBench-E's sizes, and those of other benchmarks, are not known here
        if record["split"] == "standard":
            size = TASKS[record["dataset"]].size
            if record["n"] != size:
                incomplete.append(f"{record['dataset']} {record['n']} of {size}")
    if incomplete:
        lines.append(f"Not all of the benchmark's examples: {', '.join(incomplete)}.")
    if verdicts:
        lines.append(
            "inside, outside: whether the published value lies in our interval. *: indicative only. "
            "?: the value is suspect, ~: repaired (kvbench/papers)."
        )
    for (paper, table), judgements in verdicts.items():
        lines += _note_table(paper, table, list(judgements.values()))
    return lines


def _note_table(paper: str, table: str, judgements: Sequence[Judgement]) -> list[str]:
    """Return the notes on a paper's table: why verdicts are indicative, which row is shown, and flags on values."""
    title = _write_title(paper, table)
    lines = []
    # most reasons hold for all tasks: print each once, with the number of its tasks
    counts: Counter[str] = Counter()
    for judgement in judgements:
        counts.update(judgement["because"])
    reasons = [f"{reason} ({n} of {len(judgements)} tasks)" for reason, n in counts.items()]
    if reasons:
        lines.append(f"* {title}: {'; '.join(reasons)}.")
    # the values of one paper's table come from one row, so the first judgement has the setting of all
    first = judgements[0]
    if first["matching"] > 1:
        shown_row = f"table {table}, {first['setting'] or 'no setting'}"
        paper_name = catalogue.read_paper(paper).called
        lines.append(f"{paper_name}: {first['matching']} rows match; shown is {shown_row} (setting= chooses).")
    lines += [f"{title}, {judgement['flag']}" for judgement in judgements if judgement["flag"]]
    return lines


def _write_mean(mean: PublishedMean) -> str:
    """Return a published average as text: ``33.37``, or ``9.00, cells 7.50`` if its cells give another mean."""
    stated, of_cells = mean["stated"], mean["of_cells"]
    if of_cells is None:
        return _write_score(stated)
    if stated is not None and abs(stated - of_cells) <= ROUNDING:
        return _write_score(stated)
    return f"{_write_score(stated)}, cells {_write_score(of_cells)}"


def _label_records(records: Sequence[TaskRecord]) -> list[str]:
    """Return the dataset of each record, with its file if two records have the same dataset."""
    datasets = []
    for record in records:
        suffix = " (E)" if record["split"] == "e" else ""
        datasets.append(f"{one_line(record['dataset'])}{suffix}")
    labels = []
    for dataset, record in zip(datasets, records, strict=True):
        if datasets.count(dataset) == 1:
            labels.append(dataset)
        else:
            # the last two parts of the path: the run's folder and the file
            short_path = "/".join(record["file"].rsplit("/", 2)[-2:])
            labels.append(f"{dataset}\n{one_line(short_path)}")
    return labels


def _write_score(value: float | None) -> str:
    """Return a score with the decimals of published ones; a dash for None."""
    return format_number(value, 2)
