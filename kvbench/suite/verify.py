"""Check a suite's folder: the numbers, the answers' scores, the controls, and the hashes of prompts and checkpoint.

All numbers are computed again from the samples. The methods' code is not needed: a row names its results, and the
identity of a result states the prompts and settings of its measurement.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from kvbench.base.errors import MissingData, UsageError
from kvbench.base.example import Example
from kvbench.plan.cells import Group
from kvbench.store import archive
from kvbench.store.cell import identity_hash
from kvbench.store.results import Sample
from kvbench.store.store import ResultStore
from kvbench.suite import folder as folders
from kvbench.suite import lock, plan
from kvbench.suite.definition import KL, Suite, load
from kvbench.suite.folder import CLOSED, SAMPLES, Line
from kvbench.suite.rows import SuiteRow
from kvbench.suite.scores import PartSamples, RowSamples, check_negative, score_rows
from kvbench.tasks.metrics import score as score_answer

TOLERANCE = 1e-6
"""The largest difference of a stored number from the recomputed one: rounding to the digits of a row."""
MOST_SAID = 20
"""The most problems that are listed one by one."""


@dataclass
class Checked:
    """The findings on a folder.

    numbers: how many numbers were compared with recomputed ones.
    answers: how many answers were scored again with the stored result.
    unscored: how many answers could not be scored again, since their texts are not on this machine.
    problems: all differences found, in words.
    """

    numbers: int = 0
    answers: int = 0
    unscored: int = 0
    problems: list[str] = field(default_factory=list)


Groups = Mapping[str, Mapping[str, Group]]
"""The planned tasks by part and column, with the texts that answers are scored with."""


def verify_folder(place: Path, without_texts: bool = False) -> Checked:
    """Check a suite's folder. Raises UsageError if it cannot be read, and MissingData if its texts are not here.

    ``without_texts`` allows missing texts. The answers are then not scored again, and all else is checked.
    """
    rows = folders.read_rows(place)
    checked = Checked()
    heads = {(row["suite"], row["edition"], row.get("division"), row.get("model")) for row in rows}
    if len(heads) != 1:
        checked.problems.append("its rows are of different suites, editions, divisions or models")
        return checked
    suite = load(rows[0]["suite"], rows[0]["edition"])
    # the samples go into a store of their own, so that nothing measured here before is read in their place
    with tempfile.TemporaryDirectory() as temporary:
        store = ResultStore(Path(temporary))
        archive.unpack(place / SAMPLES, store)
        settings = {"results": temporary, "model": rows[0]["model"]}
        groups: dict[str, dict[str, Group]] = {}
        try:
            run = plan.prepare(suite, [], {}, settings)
        except MissingData:
            # the open division has no lock: without texts nobody knows its prompts
            if not without_texts or rows[0].get("division") != CLOSED:
                raise
            expected = lock.read_lock(suite)["editions"][suite.edition]
        else:
            for part in run.parts:
                groups[part.part.name] = {group.column: group for group in part.run.groups}
            expected = lock.of_run(run)
            if rows[0].get("division") == CLOSED:
                checked.problems += lock.differences(suite, run)
        samples = []
        for row in rows:
            samples.append(_row_samples(suite, row, expected, groups=groups, store=store, checked=checked))
        # numbers of samples that are missing or of another suite would only repeat these problems
        if not checked.problems:
            _check_controls(rows, plan.list_rows(suite, [], {}, settings), checked)
        if not checked.problems:
            _check_numbers(suite, rows, samples, checked)
    return checked


def _row_samples(
    suite: Suite,
    row: Line,
    expected: lock.Locked,
    groups: Groups,
    store: ResultStore,
    checked: Checked,
) -> dict[str, PartSamples]:
    """Return a row's samples by part, column and example. Add all differences and missing samples to the problems."""
    found: dict[str, PartSamples] = {}
    for part in suite.parts:
        if part.name not in row["results"]:
            continue
        columns = {}
        for column, locked in expected[part.name].items():
            label = f"{row['name']} on {column}"
            cell_id = row["results"][part.name].get(column)
            if cell_id is None:
                checked.problems.append(f"{label}: no result is named")
                continue
            samples = _cell_samples(cell_id, label, locked, store, checked)
            columns[column] = samples
            if part.measure == KL:
                continue
            group = groups.get(part.name, {}).get(column)
            if group is None:
                checked.unscored += len(samples)
            else:
                _rescore_all(samples, label, group, checked)
        found[part.name] = columns
    return found


def _cell_samples(
    cell_id: str, label: str, locked: lock.LockedColumn, store: ResultStore, checked: Checked
) -> dict[str, Sample]:
    """Return a result's samples by example. Add all differences and missing samples to the problems."""
    record = store.cell(cell_id)
    if record is None:
        checked.problems.append(f"{label}: the result {cell_id} is not in {SAMPLES}")
        return {}
    if identity_hash(record.identity) != cell_id:
        checked.problems.append(f"{label}: the result {cell_id} has another identity than its id says")
    if lock.hash_protocol(record.identity) != locked["protocol"]:
        checked.problems.append(f"{label}: measured on other prompts, with other settings or scored in another way")
    samples = store.samples(cell_id)
    found = {}
    for example_id in locked["prompts"]:
        if example_id in samples:
            found[example_id] = samples[example_id]
        else:
            checked.problems.append(f"{label}: the sample of {example_id} is missing")
    return found


def _rescore_all(samples: Mapping[str, Sample], label: str, group: Group, checked: Checked) -> None:
    """Score each answer again. Add an answer to the problems if its stored score differs."""
    for example in group.examples:
        sample = samples.get(example.id)
        if sample is None:
            continue  # it is a problem already
        rescored = _rescore(sample, group, example)
        if rescored is None or sample.score is None or abs(rescored - sample.score) > TOLERANCE:
            checked.problems.append(
                f"{label}: the answer to {example.id} scores {rescored}, and {sample.score} is stored"
            )
        else:
            checked.answers += 1


def _rescore(sample: Sample, group: Group, example: Example) -> float | None:
    """Return the score of a stored answer, or the mean score for a context with several questions.

    Return None if an answer has no score, or if the context has another number of questions than the sample.
    """
    task = group.task
    if sample.turns is None:
        return score_answer(task.metric, task.answer(sample.prediction), example)
    if len(sample.turns) != len(example.turns):
        return None
    scores: list[float] = []
    for number, turn in enumerate(sample.turns):
        value = score_answer(task.metric, task.answer(turn.prediction), example.asked(number))
        if value is None:
            return None
        scores.append(value)
    return fmean(scores)


def _check_controls(rows: Sequence[Line], controls: Sequence[SuiteRow], checked: Checked) -> None:
    """Add the controls that are missing in the folder to the problems."""
    present = {(row["name"], row.get("budget")) for row in rows}
    for control in controls:
        if (control.name, control.budget) not in present:
            checked.problems.append(f"the control {control.name} at 1/{control.budget} is missing")
    if not any(row["role"] == "full" for row in rows):
        checked.problems.append("the full cache is missing")


def _check_numbers(
    suite: Suite, rows: Sequence[Line], samples: Sequence[Mapping[str, PartSamples]], checked: Checked
) -> None:
    """Recompute every row and add each number that differs to the problems."""
    full = next(parts for row, parts in zip(rows, samples, strict=True) if row["role"] == "full")
    measured = []
    for row, parts in zip(rows, samples, strict=True):
        if row["role"] != "full":
            measured.append(RowSamples(name=row["name"], budget=row["budget"], role=row["role"], parts=parts))
    scored = score_rows(suite, measured, full)
    stored_by_key = {(row["name"], row.get("budget")): row for row in rows}
    for entry in scored:
        stored = stored_by_key[entry.name, entry.budget]
        for key, value in folders.rounded_numbers(entry).items():
            count, differing = _compare_values(value, stored.get(key))
            checked.numbers += count
            if differing:
                checked.problems.append(
                    f"{entry.name} at 1/{entry.budget}: {key} is {stored.get(key)}, samples give {value}"
                )
    checked.problems += check_negative(scored)


def _compare_values(value: Any, stored: Any) -> tuple[int, bool]:
    """Return (how many numbers a value holds, whether the stored value differs from it)."""
    if isinstance(value, Mapping):
        if not isinstance(stored, Mapping) or set(value) != set(stored):
            return 0, True
        results = [_compare_values(value[key], stored[key]) for key in value]
        return sum(count for count, _ in results), any(differs for _, differs in results)
    if isinstance(value, list):
        if not isinstance(stored, list) or len(value) != len(stored):
            return 0, True
        results = [_compare_values(a, b) for a, b in zip(value, stored, strict=True)]
        return sum(count for count, _ in results), any(differs for _, differs in results)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        is_number = isinstance(stored, (int, float)) and not isinstance(stored, bool)
        return 1, not is_number or abs(value - stored) > TOLERANCE * max(1.0, abs(value))
    return 0, value != stored


def describe_findings(place: Path, checked: Checked) -> str:
    """Return the findings as text: the verdict first, then what is wrong."""
    if not checked.problems:
        text = (
            f"{place}: verified. {checked.answers:,} answers were scored again, {checked.numbers:,} numbers made again."
        )
        if checked.unscored:
            text += f" {checked.unscored:,} answers could not be scored again: their texts are not on this machine."
        return text
    said = [f"{place}: NOT verified, {len(checked.problems)} problems"]
    said += [f"  {problem}" for problem in checked.problems[:MOST_SAID]]
    if len(checked.problems) > MOST_SAID:
        said.append(f"  and {len(checked.problems) - MOST_SAID} more")
    return "\n".join(said)


def check_place(place: Path) -> None:
    """Raise UsageError unless a place is a folder."""
    if not place.is_dir():
        raise UsageError(f"{place} is no folder: name the folder that `kvbench suite` wrote")
