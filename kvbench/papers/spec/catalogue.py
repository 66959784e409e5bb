"""The tables and figures of each paper, from its paper.yaml, with facts that follow from the published cells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from kvbench.base.conf import YAML_LOADER
from kvbench.base.errors import KvbenchError, unknown
from kvbench.papers import data_files
from kvbench.papers.spec.published import Published, load_table

KINDS = ("quality", "ablation", "efficiency", "analysis", "dataset-facts", "measured", "drawing")
"""The kinds of tables and figures."""
FIELDS = ("title", "kind", "exact", "note", "models")
"""The keys that an entry of paper.yaml can have."""


@dataclass(frozen=True)
class CatalogueEntry:
    """A table or figure of a paper.

    paper: the paper's id.
    id: the id of a table's file of published cells (``2``, ``fig6``, ``text``), or a figure's, such as ``figure3``.
    kind: one of KINDS; figures are ``measured`` or ``drawing``.
    exact: the part that can be computed again without a model, '' for no part.
    note: a fact that readers must know, '' for none.
    models: the models of a figure, separated by ``, ``. It is '' for a table, whose models follow from its cells.
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
        """The name for users: ``think/2``."""
        return f"{self.paper}/{self.id}"

    @property
    def is_figure(self) -> bool:
        """True if the entry is a figure. A figure has no published cells."""
        return self.id.startswith("figure")

    @property
    def cells(self) -> tuple[Published, ...]:
        """The published cells; () for a figure."""
        if self.is_figure:
            return ()
        return load_table(self.paper, self.id)

    @property
    def model_names(self) -> list[str]:
        """The models whose numbers are published: those of a table's cells, sorted, or of a figure's entry."""
        # a cell that is a fact about a dataset has no model; figures have no cells
        names = {cell.model for cell in self.cells} - {""}
        if names:
            return sorted(names)
        return [name for name in self.models.split(", ") if name]

    @property
    def method_names(self) -> list[str]:
        """The published methods of the cells, sorted."""
        # a cell that is a fact about a dataset has no method
        return sorted({cell.method for cell in self.cells} - {""})

    def count_cells(self) -> dict[str, int]:
        """Return the numbers of published, suspect, repaired and missing cells, by these words.

        A cell can count more than once, for example as published, suspect and repaired.
        """
        flags: Counter[str] = Counter()
        for cell in self.cells:
            flags.update(cell.flags.keys())
        # a missing cell is empty or n/a on the page, so nothing is published there
        return {
            "published": len(self.cells) - flags["missing"],
            "suspect": flags["suspect"],
            "repaired": flags["repaired"],
            "missing": flags["missing"],
        }

    def as_json(self) -> dict[str, object]:
        """Return the entry's facts and its numbers of cells as plain data, which ``list --json`` prints."""
        facts: dict[str, object] = {
            "id": self.name,
            "kind": self.kind,
            "title": self.title,
            "models": self.model_names,
            "methods": self.method_names,
            "datasets": list(dict.fromkeys(cell.dataset for cell in self.cells)),
            "exact": self.exact,
            "note": self.note,
        }
        facts.update(self.count_cells())
        return facts


@dataclass(frozen=True)
class Paper:
    """A paper with its tables, prose and figures in order.

    source: where the paper was published.
    name: the name of its method.
    preset: the entry of conf/preset for its tables; '' if there is none.
    prompt: the entry of conf/prompt for its LongBench scores; '' if the paper does not state a prompt.
    place: the position of the paper's tables among those of all papers. By default they come last.
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
        """The paper's name, or else its id."""
        return self.name or self.id


def paper_ids() -> tuple[str, ...]:
    """Return the ids of all papers, sorted."""
    return tuple(path.parent.name for path in data_files("*/paper.yaml"))


@cache
def read_paper(paper_id: str) -> Paper:
    """Read one paper. Raises UsageError for an unknown id, KvbenchError for a damaged file."""
    if paper_id not in paper_ids():
        raise unknown("paper", paper_id, (*paper_ids(), "all"))
    # there is one such file: a second folder of papers (KVBENCH_PAPERS_DATA) must not have a paper with the same id
    (path,) = data_files(f"{paper_id}/paper.yaml")
    content = yaml.load(path.read_text(encoding="utf-8"), Loader=YAML_LOADER)
    # missing keys have the defaults of Paper
    fields = {key: content[key] for key in ("title", "source", "name", "preset", "prompt", "place") if key in content}
    return Paper(paper_id, entries=tuple(_read_entries(path, paper_id, content)), **fields)


def choose_papers(name: str) -> list[Paper]:
    """Return the papers that a name stands for: the paper with this id, or every paper for ``all``.

    Raises UsageError for an unknown name.
    """
    if name == "all":
        return [read_paper(paper_id) for paper_id in paper_ids()]
    return [read_paper(name)]


def papers_in_order() -> tuple[str, ...]:
    """Return the ids of all papers, ordered by ``Paper.place``."""

    return tuple(sorted(paper_ids(), key=lambda paper_id: read_paper(paper_id).place))


def _read_entries(
    path: Path, paper_id: str, content: Mapping[str, Mapping[str | int, Mapping[str, str]]]
) -> Iterator[CatalogueEntry]:
    """Yield the tables and figures of a paper. Raises KvbenchError for an unknown kind or field."""
    # table 2 is think/2 on the command line, and figure 2 is think/figure2
    for group, prefix in (("tables", ""), ("figures", "figure")):
        for number, fields in content.get(group, {}).items():
            # without this check, a slip in a key would silently become a default
            if set(fields) - set(FIELDS) or fields.get("kind") not in KINDS:
                raise KvbenchError(f"{path}: {group} {number} needs a kind of {', '.join(KINDS)} and only {FIELDS}")
            yield CatalogueEntry(paper_id, f"{prefix}{number}", **fields)
