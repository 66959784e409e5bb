"""A suite's folder: its rows as JSON lines, the samples behind them, and the card.

    results.jsonl      a row a line, with the ids of its results
    samples.jsonl.gz   every answer, from which all numbers follow
    card.md, card.png  the same for a reader

Any program can read the rows, and ``kvbench verify FOLDER`` makes them again from the samples.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvbench.base.conf import conf_dir
from kvbench.base.errors import Damaged, UsageError
from kvbench.base.files import disk_error, parse_finite_json
from kvbench.store import archive
from kvbench.store.store import ID, ResultStore
from kvbench.suite.definition import EDITIONS, FOLDER
from kvbench.suite.plan import PartRun, SuiteRun, find_cells
from kvbench.suite.rows import SuiteRow
from kvbench.suite.scores import PartSamples, RowScore

RESULTS, SAMPLES, CARD, PICTURE = "results.jsonl", "samples.jsonl.gz", "card.md", "card.png"
CLOSED, OPEN = "closed", "open"
"""The divisions of a suite.

closed: the suite's own model, dtype and prompts.
open: another model, which each row names.
"""
Line = dict[str, Any]
"""A row of results.jsonl: the suite, edition, division and model, the row's name and role, the ids of its results by
part and column, its numbers (the fields of ``RowScore``), and the versions that measured it."""
FULL_ROLE = "full"
"""The role of the full cache's row, by which all others are scored."""
_TEXTS = ("suite", "edition", "division", "model", "dtype", "contributor", "name", "role", "answers")
HEAD: Mapping[str, Any] = {
    **dict.fromkeys(_TEXTS, str),
    "results": dict,
    **dict.fromkeys(("commit", "torch", "transformers"), list),
}
"""The keys of the full cache's row, with the types of their values."""
SCORED: Mapping[str, Any] = {
    **HEAD,
    **{"label": str, "worst": str, "budget": int, "parts": dict, "nothing_compressed": bool},
    **dict.fromkeys(("bytes", "unchanged"), (int, float)),
    **dict.fromkeys(("mean", "ci", "pages", "rank"), object),
}
"""The keys of a scored row, with the types of their values; ``object`` where None is one, too."""
DIGITS = 6
"""The decimal places of numbers in a row. Further places would differ between machines by rounding."""


def make_lines(
    run: SuiteRun,
    scored: Sequence[RowScore],
    samples: Mapping[tuple[str, int | None], Mapping[str, PartSamples]],
    *,
    division: str,
    contributor: str,
) -> list[Line]:
    """Return the rows of results.jsonl, the full cache's first. Each names the results that it was computed from.

    scored: the scores of all other rows.
    samples: by (a row's name, its budget), the samples of the row by part. The full cache's key is ("full", None).
    division: CLOSED or OPEN.
    contributor: the user's ``contributor=``, '' for none.
    """
    # a method has a row at each budget, so its name alone does not identify a row
    rows_by_key = {(row.name, row.budget): row for row in run.rows}
    # all parts have the same model, dtype and store
    plan = run.plans[0]
    head = {
        "suite": run.suite.name,
        "edition": run.suite.edition,
        "division": division,
        "model": plan.cfg.model_name,
        "dtype": plan.dtype,
        "contributor": contributor,
    }
    # the full cache has no score of its own, but all scores are computed from its results, too
    full_cells = {part_run.part.name: _list_result_ids(part_run, row=None) for part_run in run.parts}
    full_line = head | {"name": "full", "role": "full", "results": full_cells}
    full_line |= {"answers": hash_answers(samples["full", None])}
    full_line |= read_versions(plan.store, full_cells)
    result_lines = [full_line]
    for entry in scored:
        row = rows_by_key[entry.name, entry.budget]
        cells = {}
        for part_run in run.parts:
            if row in part_run.rows:
                cells[part_run.part.name] = _list_result_ids(part_run, row)
        line = head | {"name": entry.name, "role": entry.role, "results": cells}
        line |= round_numbers(entry) | {"label": row.config.label}
        line |= {"answers": hash_answers(samples[entry.name, entry.budget])}
        line |= read_versions(plan.store, cells)
        result_lines.append(line)
    return result_lines


def hash_answers(parts: Mapping[str, PartSamples]) -> str:
    """Return a hash of the texts of a row's answers in all parts.

    Numbers alone do not show a changed text that scores the same.
    """
    digest = hashlib.sha256()
    for part in sorted(parts):
        for column in sorted(parts[part]):
            for example_id, sample in sorted(parts[part][column].items()):
                turns = [turn.prediction for turn in sample.turns or ()]
                digest.update(json.dumps([part, column, example_id, sample.prediction, turns]).encode())
    return digest.hexdigest()[:16]


def round_numbers(entry: RowScore) -> Line:
    """Return a row's scores in the form in which a line of results.jsonl has them, rounded to DIGITS places."""
    record = asdict(entry)
    # ``make_lines`` puts name and role in front
    del record["name"], record["role"]
    # a property, which asdict leaves out
    record["nothing_compressed"] = entry.nothing_compressed

    def round_number(text: str) -> float:
        """Return the number that a text states, rounded to DIGITS places."""
        return round(float(text), DIGITS)

    # JSON turns tuples into lists, at any depth, and its reader can round every number
    rounded: Line = json.loads(json.dumps(record), parse_float=round_number)
    return rounded


def _list_result_ids(part_run: PartRun, row: SuiteRow | None) -> dict[str, str]:
    """Return the ids of a row's results in a part by column. ``row=None`` stands for the full cache."""
    return {column: cell.id for column, cell in find_cells(part_run, row).items()}


def read_versions(store: ResultStore, cells: Mapping[str, Mapping[str, str]]) -> dict[str, list[str]]:
    """Return the versions that measured a row: every commit, and every release of torch and transformers.

    cells: the ids of the row's results by part and column.
    """
    versions: dict[str, set[str]] = {"commit": set(), "torch": set(), "transformers": set()}
    for columns in cells.values():
        for cell_id in columns.values():
            record = store.cell(cell_id)
            if record is None:
                continue
            # each process that measured a part of the samples has left its facts
            for facts in record.provenance:
                for key, values in versions.items():
                    values.add(str(facts.get(key)))
    return {key: sorted(values) for key, values in versions.items()}


def write_folder(folder: Path, run: SuiteRun, rows: Sequence[Line], card: str) -> None:
    """Write the rows, the samples of their results and the card. Raises KvbenchError if a file cannot be written."""
    # several rows may name one result, and its samples are packed once
    cells: set[str] = set()
    for row in rows:
        for columns in row["results"].values():
            cells.update(columns.values())
    store = run.plans[0].store
    try:
        folder.mkdir(parents=True, exist_ok=True)
        archive.pack(store, cells, folder / SAMPLES)
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / RESULTS).write_text(text, encoding="utf-8")
        (folder / CARD).write_text(card, encoding="utf-8")
    except OSError as error:
        raise disk_error(error, folder) from None


def take_answers(folder: Path, run: SuiteRun) -> None:
    """Add the answers of a suite's folder to a run's results, so that they are not measured again.

    Answers of another suite or method do no harm: they belong to other results and stay unused. Raises UsageError if
    the folder has no samples.
    """
    path = folder / SAMPLES
    if not path.exists():
        raise UsageError(f"from={folder}: it has no {SAMPLES}")
    archive.unpack(path, run.plans[0].store)


def find_committed(suite: str) -> Path:
    """Return the path of the suite's folder in this repository, whose controls all others are compared with."""
    return conf_dir().parent / "results" / FOLDER / suite / "kvbench"


def read_rows(folder: Path) -> list[Line]:
    """Return the rows of a suite's folder.

    Raises UsageError if it has no file of rows, and Damaged for a line that ``make_lines`` cannot have written: with
    other keys, or with a number that is none.
    """
    path = folder / RESULTS
    if not path.exists():
        raise UsageError(f"{folder} is no suite's folder: it has no {RESULTS}")
    rows = []
    try:
        for text in path.read_text(encoding="utf-8").splitlines():
            row = parse_finite_json(text)
            _check_line(row)
            rows.append(row)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"{path}, line {len(rows) + 1} is not a row of a suite: {error}") from None
    if not rows:
        raise Damaged(f"{path} has no rows")
    return rows


def _check_line(row: Line) -> None:
    """Raise ValueError, TypeError, KeyError or AttributeError unless a line has the keys and ids of a suite's row."""
    kinds = HEAD if row["role"] == FULL_ROLE else SCORED
    if set(row) != set(kinds):
        raise ValueError(f"its keys differ from a row's in {', '.join(sorted(set(row) ^ set(kinds)))}")
    for key, kind in kinds.items():
        if not isinstance(row[key], kind) or isinstance(row[key], bool) != (kind is bool):
            raise TypeError(f"{key} is {row[key]!r}")
    if row["edition"] not in EDITIONS or row["division"] not in (CLOSED, OPEN):
        raise ValueError(f"edition is {row['edition']} and division {row['division']}")
    for part, columns in row["results"].items():
        for column, cell_id in columns.items():
            if not ID.fullmatch(cell_id):
                raise ValueError(f"{cell_id!r} is no result's id, in {part} on {column}")
