"""Scores of imported answers as plain data and as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from kvbench.base.visible import one_line
from kvbench.papers.spec import catalogue
from kvbench.report import writers
from kvbench.report.table import Table
from kvbench.studies.imports.scoring import Score, Scored, printed
from kvbench.studies.imports.verdict import mark
from kvbench.tasks.longbench import BUCKETS, TASKS, names
from kvbench.tasks.metrics import metric

CSV_FIELDS = (
    *("kind", "dataset", "split", "bucket", "metric", "score", "ci_low", "ci_high", "n", "unscored"),
    *("paper", "table", "setting", "verdict", "indicative", "because", "certainty", "file", "cell"),
)
ROUNDING = 0.02
"""Difference of a printed average to the mean of its printed cells that rounding can explain."""
Verdicts = Mapping[tuple[str, str], Mapping[int, Mapping[str, Any]]]
Means = Mapping[tuple[str, str], Mapping[str, float | None]]


def tasks(scored: Sequence[Scored], verdicts: Verdicts) -> list[dict[str, Any]]:
    """Return a record per file and dataset, with scores and intervals in printed units, rounded to two digits."""
    return [
        {
            "dataset": s.predictions.dataset,
            "split": "e" if s.predictions.extended else "standard" if s.predictions.dataset in TASKS else None,
            "metric": s.metric,
            **_numbers(s.metric, s.scores, s.interval),
            **({"buckets": {b.name: _numbers(s.metric, b.scores, b.interval) for b in s.buckets}} if s.buckets else {}),
            "published": [judged[i] for judged in verdicts.values() if i in judged],
            "file": str(s.predictions.path),
            "layout": s.predictions.layout,
            "seconds": round(s.seconds, 3),
        }
        for i, s in enumerate(scored)
    ]


def average(records: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the mean score over LongBench's 16 English tasks; None unless each is there exactly once."""
    scores = {r["dataset"]: r["score"] for r in records if r["split"] == "standard" and r["dataset"] in names("en")}
    once = sorted(r["dataset"] for r in records) == sorted({r["dataset"] for r in records})
    if not once or len(scores) < len(names("en")) or None in scores.values():
        return None
    return round(sum(scores.values()) / len(scores), 2)


def as_csv(records: Sequence[Mapping[str, Any]]) -> str:
    """Return CSV text, a line for each dataset, range of length and published value, told apart by ``kind``."""
    lines: list[dict[str, Any]] = []
    for r in records:
        lines.append({"kind": "score", **r, **_ends(r["ci"])})
        for name, b in r.get("buckets", {}).items():
            lines.append({**r, "kind": "bucket", "bucket": name, **b, **_ends(b["ci"])})
        for j in r["published"]:
            printed_value = {"score": j["value"], "n": "", "unscored": "", "because": "; ".join(j["because"])}
            lines.append({**r, **j, "kind": "published", **printed_value})
    return writers.csv(CSV_FIELDS, lines)


def sheets(records: Sequence[Mapping[str, Any]], verdicts: Verdicts, means: Means, times: bool = False) -> list[Table]:
    """Return the table of scores, and where a paper has the row a second table with its values."""
    labels = _labels(records)
    ranges = [name for name, _ in BUCKETS] if any("buckets" in r for r in records) else []
    headers = ("dataset", "metric", "score", "95 % interval", "n", "unscored", *ranges, *(["s"] if times else []))
    body = []
    for label, r in zip(labels, records, strict=True):
        buckets = [_number(r.get("buckets", {}).get(name, {}).get("score")) for name in ranges]
        interval = f"[{r['ci'][0]:.2f}, {r['ci'][1]:.2f}]" if r["ci"] else "—"
        scores = (r["metric"], _number(r["score"]), interval, str(r["n"]), str(r["unscored"]))
        body.append((label, *scores, *buckets, *([f"{r['seconds']:.2f}"] if times else [])))
    mean = average(records)
    if mean is not None:
        body.append(("mean of the 16", "", f"{mean:.2f}", *[""] * (len(headers) - 3)))
    tables = [Table(headers, tuple(body))]
    if verdicts:
        titles = [f"{catalogue.paper(paper).called} table {table}" for paper, table in verdicts]
        rows = [
            (label, _number(r["score"]), *(mark(judged[i]) if i in judged else "—" for judged in verdicts.values()))
            for i, (label, r) in enumerate(zip(labels, records, strict=True))
            if any(i in judged for judged in verdicts.values())
        ]
        if mean is not None:
            rows.append(("mean of the 16", f"{mean:.2f}", *(_mean_text(means[key]) for key in verdicts)))
        tables.append(Table(("dataset", "score", *titles), tuple(rows)))
    return tables


def notes(records: Sequence[Mapping[str, Any]], verdicts: Verdicts) -> list[str]:
    """Return the notes below these tables, a sentence each."""
    lines = ["[a, b]: 95 % interval over examples. unscored: answers whose references cannot be scored."]
    sizes = [TASKS[r["dataset"]].size if r["split"] == "standard" else r["n"] for r in records]
    odd = [f"{r['dataset']} {r['n']} of {size}" for r, size in zip(records, sizes, strict=True) if r["n"] != size]
    if odd:
        lines.append(f"Not all of the benchmark's examples: {', '.join(odd)}.")
    if verdicts:
        lines.append(
            "inside, outside: whether the published value lies in our interval. *: indicative only. "
            "?: the value is suspect, ~: repaired (kvbench/papers)."
        )
    for (paper, table), judged in verdicts.items():
        counts = Counter(reason for j in judged.values() for reason in j["because"])
        reasons = [f"{reason} ({n} of {len(judged)} tasks)" for reason, n in counts.items()]
        if reasons:
            lines.append(f"* {catalogue.paper(paper).called} table {table}: {'; '.join(reasons)}.")
        first = next(iter(judged.values()))
        if first["matching"] > 1:
            shown = f"table {table}, {first['setting'] or 'no setting'}"
            lines.append(
                f"{catalogue.paper(paper).called}: {first['matching']} rows match; shown is {shown} (setting= chooses)."
            )
        lines += [f"{catalogue.paper(paper).called} table {table}, {j['flag']}" for j in judged.values() if j["flag"]]
    return lines


def _mean_text(mean: Mapping[str, float | None]) -> str:
    """Return a published average, and the mean of its cells where that differs or the average is not printed."""
    stated, of_cells = mean["stated"], mean["of_cells"]
    if of_cells is None or (stated is not None and abs(stated - of_cells) <= ROUNDING):
        return _number(stated)
    return f"{_number(stated)}, cells {of_cells:.2f}"


def _numbers(name: str, scores: Sequence[Score], interval: tuple[float, float] | None) -> dict[str, Any]:
    value, scale = printed(name, scores), metric(name).scale
    return {
        "score": None if value is None else round(value, 2),
        "ci": None if interval is None else [round(scale * x, 2) for x in interval],
        "n": len(scores),
        "unscored": sum(s is None for s in scores),
    }


def _ends(ci: Sequence[float] | None) -> dict[str, float]:
    return {"ci_low": ci[0], "ci_high": ci[1]} if ci else {}


def _labels(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the dataset of each record, with its file where two records have the same dataset."""
    plain = [f"{one_line(r['dataset'])}{' (E)' if r['split'] == 'e' else ''}" for r in records]
    return [
        name if plain.count(name) == 1 else f"{name}\n{one_line('/'.join(r['file'].rsplit('/', 2)[-2:]))}"
        for name, r in zip(plain, records, strict=True)
    ]


def _number(value: float | None) -> str:
    return "—" if value is None else f"{value:.2f}"
