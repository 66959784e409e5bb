"""Which folders of a store are cells, and what makes a record one: everything else there is left alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.errors import UsageError
from kvbench.files import read_json, unreadable

ID = re.compile("[0-9a-f]{16}")
LINK = "is a symbolic link"
RECORD: Mapping[str, type] = {"label": str, "column": str, "of": int, "identity": dict, "provenance": list}


@dataclass(frozen=True)
class Status:
    """What is known of a cell now.

    ``status``: never, started (being measured now), partial, complete, refused, failed or interrupted. ``n`` of ``of``
    examples are measured (``of`` None if unknown). ``measuring``: shards that a process is measuring. ``changed``: the
    time of the last write, in seconds since the epoch.
    """

    status: str
    n: int
    of: int | None
    reason: str | None = None
    measuring: tuple[int, ...] = ()
    changed: float | None = None


def folder(cells: Path, cell_id: str) -> Path:
    """Where a cell lies; raises UsageError for all that is no cell's id, and for a link, which nothing follows."""
    if not ID.fullmatch(cell_id):
        raise UsageError(
            f"{cell_id!r} is no cell's id: 16 digits from 0 to f, as python -m kvbench list runs prints them"
        )
    path = cells / cell_id
    if path.is_symlink():
        raise UsageError(f"{path} {LINK}: put the folder itself there, or give the results=FOLDER that it lies in")
    return path


def listed(cells: Path) -> tuple[list[str], list[Path]]:
    """The ids of all cells there, and the links that are called like one."""
    named = sorted(p for p in cells.glob("*") if ID.fullmatch(p.name) and p.is_dir())
    return [p.name for p in named if not p.is_symlink()], [p for p in named if p.is_symlink()]


def record(path: Path) -> dict[str, Any] | None:
    """A cell's record, None if there is none; raises UsageError for a file that is no record."""
    found = read_json(path)
    if found is None:
        return None
    wrong = [key for key, kind in RECORD.items() if not isinstance(found.get(key, kind()), kind)]
    if not wrong and not all(isinstance(p, dict) for p in found.get("provenance", ())):
        wrong = ["provenance"]
    if not wrong and not _is_identity(found.get("identity", {})):
        wrong = ["identity"]
    if wrong:
        raise unreadable(path, f"{', '.join(wrong)} of it is damaged")
    return found


def _is_identity(identity: Mapping[str, Any]) -> bool:
    """Whether the chain in it, where there is one, is whole."""
    chain = identity.get("chain", {"per": "", "stages": []})
    if not isinstance(chain, dict) or not {"per", "stages"} <= set(chain) or not isinstance(chain["stages"], list):
        return False
    return all(
        isinstance(s, dict) and {"id", "revision"} <= set(s) and isinstance(s.get("knobs"), dict)
        for s in chain["stages"]
    )
