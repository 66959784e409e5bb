"""The tables and figures of each paper: its paper.yaml, with the facts that follow from the published cells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from kvbench.base.errors import KvbenchError, unknown
from kvbench.papers import files
from kvbench.papers.spec.published import Published, load_table

KINDS = ("quality", "ablation", "efficiency", "analysis", "dataset-facts", "measured", "drawing")
FIELDS = ("title", "kind", "exact", "note", "models")


@dataclass(frozen=True)
class CatalogueEntry:
    """A table or figure. ``id`` as in published files (``2``, ``fig6``, ``text``), a figure's is ``figure3``.

    ``kind`` is one of KINDS, ``measured`` and ``drawing`` for figures. ``exact`` says which part of it can be computed
    again without a model, '' for none. ``models`` is only written for figures; a table's follow from its cells.
    """

    paper: str
    id: str
    title: str
    kind: str
    exact: str = ""
    note: str = ""
    models: str = ""

    @property
    def name(self) -> str:
        """Return the name for users: ``think/2``."""
        return f"{self.paper}/{self.id}"

    @property
    def is_figure(self) -> bool:
        """Tell whether it has no cells of its own."""
        return self.id.startswith("figure")

    @property
    def cells(self) -> tuple[Published, ...]:
        """Return the published cells; none of a figure."""
        return () if self.is_figure else load_table(self.paper, self.id)

    def counts(self) -> dict[str, int]:
        """Count the published cells, and the suspect, repaired and missing ones (a cell can be two of these)."""
        flags = Counter(kind for c in self.cells for kind in c.flags)
        marked = {kind: flags[kind] for kind in ("suspect", "repaired", "missing")}
        return {"published": len(self.cells) - marked["missing"], **marked}

    def as_json(self) -> dict[str, Any]:
        """Return plain data, for lists."""
        return {
            "id": self.name,
            "kind": self.kind,
            "title": self.title,
            "models": sorted({c.model for c in self.cells} - {""}) or list(filter(None, self.models.split(", "))),
            "methods": sorted({c.method for c in self.cells} - {""}),
            "datasets": list(dict.fromkeys(c.dataset for c in self.cells)),
            "exact": self.exact,
            "note": self.note,
            **self.counts(),
        }


@dataclass(frozen=True)
class Paper:
    """A paper with its tables, prose and figures in order.

    ``name`` is what it calls its method, ``source`` where it appeared, ``place`` its place among the papers' tables.
    ``preset`` is the entry of conf/preset that its tables are made with, ``prompt`` the prompt policy in conf/prompt of
    its LongBench scores; '' where there is none, or the paper does not say.
    """

    id: str
    title: str
    source: str
    entries: tuple[CatalogueEntry, ...]
    name: str = ""
    preset: str = ""
    prompt: str = ""
    place: int = 99

    @property
    def called(self) -> str:
        """Return its name, else its id."""
        return self.name or self.id


def papers() -> tuple[str, ...]:
    """Return the ids of all papers."""
    return tuple(path.parent.name for path in files("*/paper.yaml"))


@cache
def paper(name: str) -> Paper:
    """Read one paper; raise UsageError for a name that is none, KvbenchError for a damaged file."""
    if name not in papers():
        raise unknown("paper", name, (*papers(), "all"))
    (path,) = files(f"{name}/paper.yaml")
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    fields = {key: content[key] for key in ("title", "source", "name", "preset", "prompt", "place") if key in content}
    return Paper(name, entries=tuple(_entries(path, name, content)), **fields)


def chosen(name: str) -> list[Paper]:
    """Return the paper of that name, or each for ``all``."""
    return [paper(p) for p in (papers() if name == "all" else [name])]


def in_place() -> tuple[str, ...]:
    """Return the ids of all papers in the order of their tables."""
    return tuple(sorted(papers(), key=lambda p: paper(p).place))


def _entries(path: Path, name: str, content: Mapping[str, Any]) -> Iterator[CatalogueEntry]:
    """Yield the tables and figures of a paper.yaml; raise KvbenchError for an unknown kind or field."""
    for group, prefix in (("tables", ""), ("figures", "figure")):
        for number, fields in content.get(group, {}).items():
            if set(fields) - set(FIELDS) or fields.get("kind") not in KINDS:
                raise KvbenchError(f"{path}: {group} {number} needs a kind of {', '.join(KINDS)} and only {FIELDS}")
            yield CatalogueEntry(name, f"{prefix}{number}", **fields)
