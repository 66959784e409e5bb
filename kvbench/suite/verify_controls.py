"""Compare the answers of a folder's full cache and controls with the committed ones, which anybody can read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from kvbench.store import archive
from kvbench.store.fidelity import KINDS
from kvbench.store.results import Sample
from kvbench.suite.definition import METHOD
from kvbench.suite.folder import SAMPLES, Line, find_committed
from kvbench.suite.scores import PartSamples

MOST_OTHER = 0.1
"""The largest share of a control's answers in a part that may differ: rounding on another processor changes a few."""
SAME_KL = 0.01
"""The relative difference of two divergences that rounding on another processor can make."""
SAME_SCORE = 1e-6
"""The largest difference of equal scores."""


def compare_controls(
    place: Path, rows: Sequence[Line], samples: Sequence[Mapping[str, PartSamples]]
) -> tuple[list[str], list[str]]:
    """Return (problems, what a reader should know) of the answers of a folder's full cache and controls.

    A part of a control is a problem if more than MOST_OTHER of its answers are others. Fewer are told.

    place: the folder, which may be the committed one itself.
    rows: the rows of results.jsonl.
    samples: the samples of each of ``rows``, by part.
    """
    committed = find_committed(rows[0]["suite"])
    if not (committed / SAMPLES).exists():
        return [], ["the controls were not compared: no answers of theirs are committed here"]
    if committed.samefile(place):
        return [], []
    fixed = [(row, parts) for row, parts in zip(rows, samples, strict=True) if row["role"] != METHOD]
    cells = {cell_id for row, _ in fixed for columns in row["results"].values() for cell_id in columns.values()}
    _, lines = archive.read(committed / SAMPLES, cells)
    problems = []
    total = others = missing = 0
    for row, parts in fixed:
        for part, columns in parts.items():
            compared = other = 0
            for column, of_column in columns.items():
                theirs = {line["id"]: Sample.read(line) for line in lines[row["results"][part][column]]}
                shared = [name for name in of_column if name in theirs]
                missing += len(of_column) - len(shared)
                compared += len(shared)
                other += sum(_is_other(of_column[name], theirs[name]) for name in shared)
            total += compared
            others += other
            if other > MOST_OTHER * compared:
                label = f"{row['name']} at 1/{row.get('budget')}, {part}"
                problems.append(f"{label}: {other} of {compared} answers are not those in {committed}")
    told = []
    if others or missing:
        told.append(
            f"of the controls' answers, {others:,} of {total:,} differ from the committed ones, and {missing:,} have "
            "none to be compared with"
        )
    return problems, told


def _is_other(sample: Sample, committed: Sample) -> bool:
    """Return True if a sample has other texts, another score or another divergence than the committed one."""
    if _list_texts(sample) != _list_texts(committed):
        return True
    if abs((sample.score or 0.0) - (committed.score or 0.0)) > SAME_SCORE:
        return True
    ours, theirs = _sum_divergence(sample), _sum_divergence(committed)
    return abs(ours - theirs) > SAME_KL * max(ours, theirs)


def _list_texts(sample: Sample) -> list[str]:
    return [sample.prediction, *(turn.prediction for turn in sample.turns or ())]


def _sum_divergence(sample: Sample) -> float:
    """Return the divergence from the full cache, summed over the text that the data give; 0 without one."""
    if sample.fidelity is None or KINDS[0] not in sample.fidelity:
        return 0.0
    return sum(sample.fidelity[KINDS[0]].kl)
