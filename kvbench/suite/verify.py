"""Check a suite's folder: the numbers, the answers' scores, the controls, and the hashes of prompts and checkpoint.

All numbers are computed again from the samples, and the card is written again from them. A row names its results, and
the identity of a result states the method, prompts and settings of its measurement. Tokens and bytes are computed again
from these. The methods' code is not run. If it is not even here, as with a contributor's own method, a row's options,
tokens and budget are taken on trust, within its bytes.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any

from kvbench.base.errors import Damaged, MissingData, UsageError
from kvbench.base.example import Example
from kvbench.kv.model_shape import Shape
from kvbench.methods.core.chain import Chain
from kvbench.plan.cells import Group
from kvbench.store import archive
from kvbench.store.cell import hash_identity
from kvbench.store.results import Sample
from kvbench.store.store import ResultStore
from kvbench.suite import card, lock, plan
from kvbench.suite import folder as folders
from kvbench.suite.definition import KL, METHOD, Suite, load
from kvbench.suite.folder import CARD, CLOSED, FULL_ROLE, SAMPLES, Line
from kvbench.suite.rows import SuiteRow, write_name
from kvbench.suite.scores import (
    PartSamples,
    RowSamples,
    RowScore,
    list_above_full,
    list_control_problems,
    score_rows,
)
from kvbench.suite.verify_controls import compare_controls
from kvbench.suite.verify_samples import ExpectedSample, expect, list_problems

TOLERANCE = 1e-6
"""The largest difference between a stored number and the recomputed one that rounding to a row's digits can make.

Above 1 it is relative to the number.
"""
MOST_BYTES = 1.1
"""The factor by which a row of a method that is not here may exceed its budget: scales and positions count, too."""
MOST_LISTED = 20
"""The most problems that are listed one by one. The others are counted."""


@dataclass
class Checked:
    """The findings on a suite's folder. They grow while it is checked.

    numbers: how many stored numbers were compared with recomputed ones.
    answers: how many answers were scored again with the stored result.
    unscored: how many answers could not be scored again, since their texts are not on this machine.
    problems: all differences found, in words.
    told: what is no problem, but what a reader should know.
    """

    numbers: int = 0
    answers: int = 0
    unscored: int = 0
    problems: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)


Groups = Mapping[str, Mapping[str, Group]]
"""The planned tasks by part and column, with the texts that answers are scored with."""
RowKey = tuple[str, int | None]
"""A row's name and budget; the full cache has no budget."""


def verify_folder(place: Path, without_texts: bool = False) -> Checked:
    """Check the folder of a measured suite, and return the findings.

    without_texts: True to allow texts that are not on this machine. Their answers are then not scored again, and
    everything else is checked.

    Raises UsageError if there is no such folder, and MissingData if texts are missing and this is not allowed.
    """
    checked = Checked()
    try:
        _check_folder(place, without_texts, checked)
    except Damaged as error:
        checked.problems.append(str(error))
    return checked


def _check_folder(place: Path, without_texts: bool, checked: Checked) -> None:
    """Check the folder of a measured suite. Raises Damaged for a file that is no row, or that holds no samples."""
    rows = folders.read_rows(place)
    heads = {(row["suite"], row["edition"], row["division"], row["model"]) for row in rows}
    if len(heads) != 1:
        checked.problems.append("its rows are of different suites, editions, divisions or models")
        return
    # all rows have the suite, the edition, the division and the model of the first one
    first = rows[0]
    suite, is_closed = load(first["suite"], first["edition"]), first["division"] == CLOSED
    # the samples go into a store of their own, so that results measured on this machine are not read in their place
    with tempfile.TemporaryDirectory() as temporary:
        store = ResultStore(Path(temporary))
        archive.unpack(place / SAMPLES, store, temporary=True)
        settings = {"results": temporary, "model": first["model"]}
        expected, groups = _plan_prompts(suite, settings, is_closed, without_texts, checked)
        samples = []
        for row in rows:
            samples.append(_read_row_samples(suite, row, expected, groups=groups, store=store, checked=checked))
        # if samples are missing or of another suite, the numbers computed from them would only repeat these problems
        if not checked.problems:
            controls = plan.list_rows(suite, methods=[], options={}, settings=settings)
            _check_controls(rows, controls, checked)
            chains = _check_methods(suite, rows, controls, settings=settings, store=store, checked=checked)
            _check_facts(rows, samples, store, checked)
        if not checked.problems:
            shape = plan.find_shape(suite, settings)
            _check_samples(suite, rows, samples, chains, expected=expected, shape=shape, checked=checked)
            if is_closed:
                problems, told = compare_controls(place, rows, samples)
                checked.problems += problems
                checked.told += told
        if not checked.problems:
            scored = _check_numbers(suite, rows, samples, checked)
            _check_card(place / CARD, card.write_card(suite, scored, "md"), checked)
            checked.told += list_above_full(scored)


def _plan_prompts(
    suite: Suite, settings: Mapping[str, object], is_closed: bool, without_texts: bool, checked: Checked
) -> tuple[lock.Locked, Groups]:
    """Return (the hashes that results must have, the planned tasks with their texts) of a suite.

    If texts are not on this machine and this is allowed, the hashes come from the suite's lock, and no task is planned.

    is_closed: whether the division is closed. Differences between the planned prompts and the lock are then added to
        the problems in ``checked``.
    without_texts: whether missing texts are allowed.

    Raises MissingData if texts are missing and this is not allowed.
    """
    try:
        # without methods of a user, the suite's own controls plan all prompts
        run = plan.prepare(suite, methods=[], options={}, settings=settings)
    except MissingData:
        # the open division has no lock: without texts nobody knows its prompts
        if not without_texts or not is_closed:
            raise
        return lock.read_lock(suite)["editions"][suite.edition], {}
    hashes = lock.hash_run(run)
    if is_closed:
        checked.problems += lock.list_differences(suite, run, hashes)
    groups: dict[str, dict[str, Group]] = {}
    for part_run in run.parts:
        groups[part_run.part.name] = {group.column: group for group in part_run.plan.groups}
    return hashes, groups


def _read_row_samples(
    suite: Suite,
    row: Line,
    expected: lock.Locked,
    groups: Groups,
    store: ResultStore,
    checked: Checked,
) -> dict[str, PartSamples]:
    """Return a row's samples by part, column and example, and score its answers again.

    row: a line of results.jsonl, which names the results.
    expected: the hashes that the results must have.
    groups: the planned tasks; without a task's texts its answers are counted as unscored.
    checked: the findings, to which differences and missing samples are added as problems.
    """
    samples_by_part: dict[str, PartSamples] = {}
    for part_name, cells in row["results"].items():
        for column in cells:
            if column not in expected.get(part_name, {}):
                checked.problems.append(f"{row['name']}: {part_name} has no {column} in {suite.name}")
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
            samples = _read_cell_samples(cell_id, label, locked, store, checked)
            columns[column] = samples
            if part.measure == KL:
                continue
            group = groups.get(part.name, {}).get(column)
            if group is None:
                checked.unscored += len(samples)
            else:
                _rescore_all(samples, label, group, checked)
        samples_by_part[part.name] = columns
    return samples_by_part


def _read_cell_samples(
    cell_id: str, label: str, locked: lock.LockedColumn, store: ResultStore, checked: Checked
) -> dict[str, Sample]:
    """Return a result's samples on the locked prompts, by example id.

    locked: the hashes that the result must have.
    checked: the findings, to which differences and missing samples are added as problems. They begin with ``label``.
    """
    record = store.cell(cell_id)
    if record is None or "chain" not in record.identity:
        checked.problems.append(f"{label}: the result {cell_id} is not in {SAMPLES}, or states no method")
        return {}
    if hash_identity(record.identity) != cell_id:
        checked.problems.append(f"{label}: the result {cell_id} has another identity than its id says")
    if lock.hash_protocol(record.identity) != locked["protocol"]:
        checked.problems.append(f"{label}: measured on other prompts, with other settings or scored in another way")
    try:
        stored_samples = store.samples(cell_id)
    # a sample that lacks its bytes at 16 bits
    except UsageError as error:
        checked.problems.append(f"{label}: {error}")
        return {}
    locked_samples = {}
    for example_id in locked["prompts"]:
        if example_id in stored_samples:
            locked_samples[example_id] = stored_samples[example_id]
        else:
            checked.problems.append(f"{label}: the sample of {example_id} is missing")
    return locked_samples


def _rescore_all(samples: Mapping[str, Sample], label: str, group: Group, checked: Checked) -> None:
    """Score each answer again. Add an answer to the problems if its stored score differs."""
    for example in group.examples:
        sample = samples.get(example.id)
        # a missing sample is among the problems already
        if sample is None:
            continue
        rescored = _rescore(sample, group, example)
        is_same = rescored is not None and sample.score is not None and abs(rescored - sample.score) <= TOLERANCE
        if not is_same:
            checked.problems.append(
                f"{label}: the answer to {example.id} scores {rescored}, and {sample.score} is stored"
            )
        else:
            checked.answers += 1


def _rescore(sample: Sample, group: Group, example: Example) -> float | None:
    """Score a stored answer again and return its score, or the mean score if its context has several questions.

    Return None if an answer has no score, or if the context has another number of questions than the sample.
    """
    task = group.task
    if sample.turns is None:
        return task.score(sample.prediction, example)
    if len(sample.turns) != len(example.turns):
        return None
    scores: list[float] = []
    for number, turn in enumerate(sample.turns):
        value = task.score(turn.prediction, example.asked(number))
        if value is None:
            return None
        scores.append(value)
    return fmean(scores)


def _check_controls(rows: Sequence[Line], controls: Sequence[SuiteRow], checked: Checked) -> None:
    present = {(row["name"], row.get("budget")) for row in rows}
    for control in controls:
        if (control.name, control.budget) not in present:
            checked.problems.append(f"the control {control.name} at 1/{control.budget} is missing")
    if not any(row["role"] == FULL_ROLE for row in rows):
        checked.problems.append("the full cache is missing")


def _check_methods(
    suite: Suite,
    rows: Sequence[Line],
    controls: Sequence[SuiteRow],
    *,
    settings: Mapping[str, object],
    store: ResultStore,
    checked: Checked,
) -> list[dict[str, Chain]]:
    """Compare each row with the stored results that it names. Each difference is added to the problems.

    A row states its method with options, its budget and its role. The method of that name is planned again, and must be
    the method that the row's results were measured with.

    Returns the methods of each row, by part; {} for one that is not here.
    """
    planned_rows, foreign = _plan_rows(suite, rows, controls, settings)
    seen: set[RowKey] = set()
    chains_by_row: list[dict[str, Chain]] = []
    for row in rows:
        key = (row["name"], row.get("budget"))
        label = f"{row['name']} at 1/{row.get('budget')}"
        if key in seen:
            checked.problems.append(f"{label}: there are two such rows")
        seen.add(key)
        planned = planned_rows.get(key)
        chains: dict[str, Chain] = {}
        chains_by_row.append(chains)
        if row["role"] == FULL_ROLE:
            if row["name"] != FULL_ROLE:
                checked.problems.append(f"{label}: its role is that of the full cache")
            chains |= {part.name: Chain() for part in suite.parts}
            _check_results(row, label, chains, store, checked)
        elif planned is not None:
            for fact, value in (("role", planned.role), ("label", planned.config.label)):
                if row[fact] != value:
                    checked.problems.append(f"{label}: its {fact} is {row[fact]}, and the suite says {value}")
            for part in suite.parts:
                config = planned.config_in(part)
                if config is not None:
                    chains[part.name] = config.chain
            _check_results(row, label, chains, store, checked)
        elif row["name"] in foreign and row["budget"] in suite.budgets:
            _check_foreign(row, label, store, checked)
        else:
            checked.problems.append(f"{label}: the method does not reach this budget, or reaches a smaller one")
    return chains_by_row


def _plan_rows(
    suite: Suite, rows: Sequence[Line], controls: Sequence[SuiteRow], settings: Mapping[str, object]
) -> tuple[dict[RowKey, SuiteRow], set[str]]:
    """Return (the rows that the suite plans for the methods in ``rows``, the names of methods that are not here).

    Such a method is a contributor's own, or needs a package that is not installed.

    controls: the planned rows of the suite's controls.
    """
    planned_rows: dict[RowKey, SuiteRow] = {(row.name, row.budget): row for row in controls}
    control_names = {control.name for control in controls}
    names = [row["name"] for row in rows if row["role"] != FULL_ROLE]
    foreign = set()
    for name in dict.fromkeys(names):
        if name in control_names:
            continue
        try:
            planned_rows |= {(row.name, row.budget): row for row in plan.find_rows(suite, name, settings)}
        except UsageError:
            foreign.add(name)
    return planned_rows, foreign


def _read_method(chain: Mapping[str, Any]) -> dict[str, Any]:
    """Return the stages' ids and options and ``per`` of a chain's identity, as JSON has them.

    A later revision of a stage is no other method.
    """
    stages = [(stage["id"], stage["knobs"]) for stage in chain["stages"]]
    # a stored identity comes from JSON, which has lists for tuples: a planned one must be equal to it
    return dict(json.loads(json.dumps({"stages": stages, "per": chain["per"]})))


def _read_identities(row: Line, store: ResultStore) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield (part, column, identity) of each result of a row. All results must be in the store."""
    for part, columns in row["results"].items():
        for column, cell_id in columns.items():
            record = store.cell(cell_id)
            assert record is not None, "a missing result is a problem that ends the check earlier"
            yield part, column, record.identity


def _check_results(row: Line, label: str, chains: Mapping[str, Chain], store: ResultStore, checked: Checked) -> None:
    """Add to the problems each result of a row that was measured with another method than ``chains`` has by part."""
    methods = {part: _read_method(chain.identity()) for part, chain in chains.items()}
    if set(row["results"]) != set(methods):
        checked.problems.append(
            f"{label}: it has results in {', '.join(row['results'])}, and not in {', '.join(methods)}"
        )
    for part, column, identity in _read_identities(row, store):
        if _read_method(identity["chain"]) != methods.get(part):
            checked.problems.append(f"{label} on {column}: the result is of another method or budget")


def _check_foreign(row: Line, label: str, store: ResultStore, checked: Checked) -> None:
    """Add to the problems a row of a method that is not here, if its results are of other stages than it names.

    Its role and label are problems, too, if no method has such, and its bytes if they are more than MOST_BYTES times
    the budget.
    """
    if row["role"] != METHOD or write_name(row["label"]) != row["name"]:
        checked.problems.append(f"{label}: its role is {row['role']} and its label {row['label']}")
    # a row's name is its stages' ids with plus signs between them, and then the options
    method, *_ = row["name"].split(" ")
    named_stages = sorted(method.split("+"))
    for _, column, identity in _read_identities(row, store):
        measured_stages = sorted(stage["id"] for stage in identity["chain"]["stages"])
        if measured_stages != named_stages:
            checked.problems.append(f"{label} on {column}: the result is of another method")
    if row["bytes"] > MOST_BYTES * 100 / row["budget"]:
        checked.problems.append(f"{label}: it holds {row['bytes']} % of the bytes")


def _check_samples(
    suite: Suite,
    rows: Sequence[Line],
    samples: Sequence[Mapping[str, PartSamples]],
    chains: Sequence[Mapping[str, Chain]],
    *,
    expected: lock.Locked,
    shape: Shape,
    checked: Checked,
) -> None:
    """Add to the problems each sample whose tokens, bytes, lengths or divergences its method and prompt do not give.

    samples, chains: the samples and the methods of each of ``rows``, by part.
    """
    full = next(parts for row, parts in zip(rows, samples, strict=True) if row["role"] == FULL_ROLE)
    measures = {part.name: part.measure for part in suite.parts}
    for row, parts, chains_of_row in zip(rows, samples, chains, strict=True):
        # a method has one chain in all parts but those with long answers
        known: dict[tuple[Chain | None, int], ExpectedSample] = {}
        for part, columns in parts.items():
            chain = chains_of_row.get(part)
            for column, of_column in columns.items():
                locked = expected[part][column]
                for n in set(locked["tokens"].values()):
                    if (chain, n) not in known:
                        known[chain, n] = expect(chain, shape, n)
                problems = list_problems(
                    of_column,
                    full[part][column],
                    locked=locked,
                    measure=measures[part],
                    expected={n: known[chain, n] for n in locked["tokens"].values()},
                )
                label = f"{row['name']} at 1/{row.get('budget')} on {column}"
                checked.problems += [f"{label}: {problem}" for problem in problems]


def _check_facts(
    rows: Sequence[Line], samples: Sequence[Mapping[str, PartSamples]], store: ResultStore, checked: Checked
) -> None:
    """Add to the problems each row that states other versions, another dtype or other answers than its results have.

    Answers are compared by their hash.

    samples: the samples of each of ``rows``, by part.
    """
    for row, parts in zip(rows, samples, strict=True):
        label = f"{row['name']} at 1/{row.get('budget')}"
        if folders.hash_answers(parts) != row.get("answers"):
            checked.problems.append(f"{label}: its answers are not those of its hash")
        for key, versions in folders.read_versions(store, row["results"]).items():
            if row.get(key) != versions:
                checked.problems.append(f"{label}: {key} is {row.get(key)}, and its results have {versions}")
        dtypes = {identity["model"]["dtype"] for _, _, identity in _read_identities(row, store)}
        if dtypes != {row.get("dtype")}:
            checked.problems.append(f"{label}: dtype is {row.get('dtype')}, and its results have {sorted(dtypes)}")


def _check_numbers(
    suite: Suite, rows: Sequence[Line], samples: Sequence[Mapping[str, PartSamples]], checked: Checked
) -> list[RowScore]:
    """Compute every row again from its samples, add each number that differs to the problems, and return the rows.

    samples: the samples of each of ``rows``, by part.
    """
    full_samples = []
    measured = []
    for row, parts in zip(rows, samples, strict=True):
        if row["role"] == FULL_ROLE:
            full_samples.append(parts)
        else:
            measured.append(RowSamples(name=row["name"], budget=row["budget"], role=row["role"], parts=parts))
    # ``_check_controls`` has found the row of the full cache, by which all other rows are scored
    scored = score_rows(suite, measured, full_samples[0])
    stored_by_key = {(row["name"], row.get("budget")): row for row in rows}
    for entry in scored:
        stored = stored_by_key[entry.name, entry.budget]
        for key, value in folders.round_numbers(entry).items():
            count, differs = _compare_values(value, stored.get(key))
            checked.numbers += count
            if differs:
                checked.problems.append(
                    f"{entry.name} at 1/{entry.budget}: {key} is {stored.get(key)}, samples give {value}"
                )
    checked.problems += list_control_problems(scored)
    return scored


def _check_card(path: Path, expected: str, checked: Checked) -> None:
    """Add to the problems the first line in which a card differs from the card ``expected`` by the samples."""
    if not path.exists():
        checked.problems.append(f"{CARD} is missing")
        return
    stored_lines = path.read_text(encoding="utf-8").splitlines()
    for number, (stored, line) in enumerate(zip_longest(stored_lines, expected.splitlines(), fillvalue=""), start=1):
        if stored != line:
            # the words of a card may differ between releases of kvbench, and then its numbers cannot be compared
            checked.problems.append(
                f"{CARD}, line {number}: it says {stored!r}, and the samples give {line!r}. "
                "If only words differ, `kvbench suite` with from= writes the card again"
            )
            return


def _compare_values(value: Any, stored: Any) -> tuple[int, bool]:
    """Compare a recomputed value with the stored one: a number, or a list or mapping that may hold further values.

    Return the count of numbers that were compared, and whether anything differs.
    """
    if isinstance(value, Mapping):
        if not isinstance(stored, Mapping) or set(value) != set(stored):
            return 0, True
        return _add_up([_compare_values(value[key], stored[key]) for key in value])
    if isinstance(value, list):
        if not isinstance(stored, list) or len(value) != len(stored):
            return 0, True
        return _add_up([_compare_values(a, b) for a, b in zip(value, stored, strict=True)])
    if not _is_number(value):
        return 0, value != stored
    if not _is_number(stored):
        return 1, True
    allowed_difference = TOLERANCE * max(1.0, abs(value))
    # written so that NaN, which differs from nothing by more than any number, differs
    return 1, not abs(value - stored) <= allowed_difference


def _is_number(value: Any) -> bool:
    """Return True for a number, but not for True and False, which Python counts as integers."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _add_up(results: Sequence[tuple[int, bool]]) -> tuple[int, bool]:
    """Return (count of numbers, whether anything differs) over the results of several ``_compare_values``."""
    counts = [count for count, _ in results]
    differences = [differs for _, differs in results]
    return sum(counts), any(differences)


def describe_findings(place: Path, checked: Checked) -> str:
    """Return the findings as text: the verdict in the first line, then the problems."""
    if not checked.problems:
        text = (
            f"{place}: verified. {checked.answers:,} answers were scored again, {checked.numbers:,} numbers made again."
        )
        if checked.unscored:
            text += f" {checked.unscored:,} answers could not be scored again: their texts are not on this machine."
        return "\n  ".join([text, *checked.told])
    lines = [f"{place}: NOT verified, {len(checked.problems)} problems"]
    lines += [f"  {problem}" for problem in checked.problems[:MOST_LISTED]]
    if len(checked.problems) > MOST_LISTED:
        lines.append(f"  and {len(checked.problems) - MOST_LISTED} more")
    return "\n".join(lines)


def check_folder(place: Path) -> None:
    """Raise UsageError unless ``place`` is a folder."""
    if not place.is_dir():
        raise UsageError(f"{place} is no folder: name the folder that `kvbench suite` wrote")
