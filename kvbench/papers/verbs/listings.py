"""The papers' tables and figures, as records for `list`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from kvbench.papers.spec.catalogue import CatalogueEntry


class FigureEntry(TypedDict):
    """A figure that can be drawn.

    about: the figure's title.
    shows: the caption.
    claim: the paper's finding.
    unsaid: the points that the paper leaves open.
    takes: the names of the figure's own options.
    """

    id: str
    about: str
    shows: str
    claim: str
    unsaid: str
    takes: list[str]


def figures(results: Path | None = None) -> list[FigureEntry]:
    """Return every figure that can be drawn, with its content, the paper's finding and its options.

    results: not used, since the figures are the same in all folders. ``list`` passes the folder to all listings.
    """
    from kvbench.papers.figures import declared

    # only the YAML files are read, so that the list waits for none of the figures' code
    entries: list[FigureEntry] = []
    for name, figure in declared().items():
        entries.append(
            {
                "id": name,
                "about": figure["title"],
                "shows": figure["shows"],
                "claim": figure["claim"],
                "unsaid": figure["unsaid"],
                "takes": list(figure.get("knobs", {})),
            }
        )
    return entries


def tables(results: Path) -> list[dict[str, object]]:
    """Return a record of every table and figure, with the numbers of its printed and of our measured cells.

    results: the folder of results, whose tables have our cells.
    """
    from kvbench.papers.measured import coverage
    from kvbench.papers.spec import catalogue

    # the tables of the tiny model and those of pretrained models have a folder each
    counts_by_folder = [coverage.read_counts(results / folder) for folder in ("tiny", "tables")]
    records = []
    for paper in catalogue.choose_papers("all"):
        for entry in paper.entries:
            # a table that was not measured has no counts in a folder
            ours = [counts[entry.name] for counts in counts_by_folder if entry.name in counts]
            records.append(_record_entry(entry, ours))
    return records


def _record_entry(entry: CatalogueEntry, ours: Sequence[Mapping[str, str]]) -> dict[str, object]:
    from kvbench.papers.measured import coverage

    counts_in_words = []
    printed = ", ".join(f"{count} {kind}" for kind, count in entry.count_cells().items() if count)
    # a table whose numbers are not entered has no counts
    if printed:
        counts_in_words.append(printed)
    # each model has its counts as numbers
    measured = []
    for counts in ours:
        cells = ", ".join(f"{counts[state]} {state}" for state in coverage.STATES if counts[state] != "0")
        counts_in_words.append(f"{counts['model']}: {cells}")
        numbers: dict[str, object] = {"model": counts["model"]}
        for state in coverage.STATES:
            numbers[state] = int(counts[state])
        measured.append(numbers)
    about = f"{entry.kind}: {entry.title}"
    if counts_in_words:
        about += f" ({'; '.join(counts_in_words)})"
    record: dict[str, object] = {"about": about}
    record |= entry.as_json()
    record["ours"] = measured
    return record
