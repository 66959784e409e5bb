"""Loading a dataset as a run does: its YAML entry, a data folder, and the knobs of a test."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import yaml

from kvbench.tasks.base import Task, load_tasks

CONF = Path(__file__).parents[2] / "conf/dataset"


def load(dataset: str, root: Path, *selection: str, **knobs: Any) -> list[Task]:
    entry = yaml.safe_load((CONF / f"{dataset}.yaml").read_text(encoding="utf-8"))[dataset]
    unknown = set(knobs) - set(entry)
    assert not unknown, f"conf/dataset/{dataset}.yaml has no knob {unknown}"
    return load_tasks(dataset, {**entry, **knobs}, list(selection), None, root)


def write_lines(path: Path, *rows: Any) -> Path:
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows), encoding="utf-8")
    return path


def write_table(path: Path, *rows: dict[str, str]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)
    return path
