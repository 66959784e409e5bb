"""The reference of the papers: their presets, what they print and claim, and what kvbench can reproduce of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from textwrap import fill
from typing import Any

import yaml

from kvbench.base.conf import entries
from kvbench.methods.core import registry
from kvbench.papers.forensics.exact import everything
from kvbench.papers.forensics.finding import place
from kvbench.papers.forensics.statements import NOTE, judged
from kvbench.papers.spec.catalogue import CatalogueEntry, Paper
from kvbench.papers.spec.published import SCORES, model_id
from kvbench.papers.spec.published_cells import Book, published
from kvbench.plan import presets
from kvbench.plan.presets import Setting
from kvbench.report.table import WIDTH
from kvbench.report.writers import table
from kvbench.tasks.longbench import TASKS

HEAD = """# Reference of the papers

Made by `python -m kvbench reference --format md` from the presets in `conf/preset`, the published cells in
`kvbench/papers/data` and the methods, datasets and models that there are; a test compares it with them.

Values of a preset stand in place of the plain defaults, and what you type wins. A table that needs a model needs the
checkpoint that it names: `model=tiny` is a stand-in and shows trends at best. What the statements say is checked
against the paper's own numbers alone ([the audit](../results/audit.md)).
"""
QUANT = "quant"
"""``h2o+quant`` is ``qhitter`` with lam=1."""
TIMES = "times and peaks are those of its GPU"


def reproduction(entry: CatalogueEntry, book: Book) -> str:
    """Describe in a sentence what can be reproduced of a table or figure."""
    if entry.kind == "drawing":
        return "a drawing"
    if entry.kind == "dataset-facts":
        return _exact(entry, book)
    facts, entry_of = entry.as_json(), {model_id(m): m for m in entries("model")}
    models = [entry_of[model_id(m)] for m in facts["models"] if model_id(m) in entry_of]
    # names in its rows and columns that kvbench does not have
    absent = [m for m in facts["models"] if model_id(m) not in entry_of]
    absent += sorted({part for m in facts["methods"] for part in m.split("+")} - {*registry.available(), QUANT})
    measured = {c.dataset for c in entry.cells if c.metric in (*SCORES, "perplexity")} - {"avg"}
    absent += sorted(measured - {*entries("dataset"), *TASKS})
    parts = [_exact(entry, book)] if entry.exact else []
    if entry.kind == "efficiency":
        parts.append(TIMES)
    parts.append(f"with {', '.join(models)}" if models else "with the paper's model")
    if absent:
        parts.append(f"not here: {', '.join(absent)}")
    return "; ".join(parts)


def markdown(papers: Sequence[Paper]) -> str:
    """Return papers as Markdown."""
    book, parts = published(), [HEAD]
    for paper in papers:
        preset = f", `preset={paper.preset}`. {presets.about(paper.preset)}" if paper.preset else "."
        parts.append(f"## {paper.title}\n\n{paper.source}{preset}\n")
        rows = [(s.key, _plain(s.value), s.model or "any", s.source) for s in _settings(paper)]
        parts += ["### What the preset sets\n", table(("key", "value", "model", "where it comes from"), rows)]
        parts += ["### Tables, figures and prose\n", table(COLUMNS, [_entry(e, book) for e in paper.entries])]
        notes = [f"- {_name(e)}: {e.note}" for e in paper.entries if e.note]
        parts += ["\n".join(notes) + "\n"] if notes else []
        parts += ["### What it says\n", table(SAYS, list(_claims(paper, book)))]
    return "\n".join(parts).rstrip() + "\n"


def text(papers: Sequence[Paper]) -> str:
    """Return papers as plain text of WIDTH columns: preset with its sources, what can be reproduced, and claims."""
    book, lines = published(), []
    for paper in papers:
        preset = f", preset={paper.preset}" if paper.preset else ""
        lines += [fill(f"{paper.title} ({paper.source}{preset})", WIDTH), ""]
        for s in _settings(paper):
            setting = f"{s.key.removeprefix('method.')}={_plain(s.value)}"
            lines.append(_hanging(f"{setting:<30} {s.source}" + (f" ({s.model} only)" if s.model else ""), 33))
        lines.append("")
        for e in paper.entries:
            name, kind, title, cells, reproducible = _entry(e, book)
            lines.append(_hanging(f"{name:<10} {kind}: {title}{f'; cells: {cells}' if cells else ''}", 13))
            indent = " " * 13
            lines.append(fill(reproducible.replace("`", ""), WIDTH, initial_indent=indent, subsequent_indent=indent))
        lines.append("")
        lines += [
            _hanging(f"{verdict:<14} {statement} ({place})", 17) for place, statement, verdict in _claims(paper, book)
        ]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def as_json(paper: Paper) -> dict[str, Any]:
    """Return a paper as plain data: its preset with sources, what can be reproduced, and what it says."""
    book = published()
    names = ("name", "kind", "title", "cells", "reproduction")
    return {
        "paper": paper.id,
        "title": paper.title,
        "source": paper.source,
        "preset": {"name": paper.preset, "about": presets.about(paper.preset) if paper.preset else ""},
        "settings": [asdict(s) for s in _settings(paper)],
        "entries": [dict(zip(names, _entry(e, book), strict=True)) for e in paper.entries],
        "statements": [dict(zip(("place", "text", "verdict"), c, strict=True)) for c in _claims(paper, book)],
    }


def _settings(paper: Paper) -> tuple[Setting, ...]:
    """Return the settings of a paper's preset; none where it has no preset."""
    return presets.settings(paper.preset) if paper.preset else ()


COLUMNS = ("", "kind", "title", "cells", "what can be reproduced")
SAYS = ("place", "statement, in our words", "by its own numbers")


def _entry(entry: CatalogueEntry, book: Book) -> tuple[str, str, str, str, str]:
    """Return one row of COLUMNS."""
    counts = entry.counts()
    marked = [f"{counts[k]} {k}" for k in ("suspect", "repaired", "missing") if counts[k]]
    cells = "" if entry.is_figure else str(counts["published"]) + (f" ({', '.join(marked)})" if marked else "")
    return _name(entry), entry.kind, entry.title, cells, reproduction(entry, book)


def _exact(entry: CatalogueEntry, book: Book) -> str:
    """Describe which part can be computed without a model, with the number of cells."""
    cells = [e for e in everything(book) if (e.cell.paper, e.cell.table) == (entry.paper, entry.id)]
    counts = f" ({len(cells)} cells, {sum(not e.ok for e in cells)} off)" if cells else ""
    return f"without a model: {entry.exact}{counts}"


def _claims(paper: Paper, book: Book) -> Iterator[tuple[str, str, str]]:
    """Yield (place, statement, verdict) of a paper's statements, without notes and those about tables."""
    for j in judged(book):
        if j.statement.paper == paper.id and not (j.verdict == NOTE or j.statement.place.startswith("table")):
            yield j.statement.place, j.statement.text, j.verdict


def _name(entry: CatalogueEntry) -> str:
    """Return an entry's place in words."""
    return f"figure {entry.id.removeprefix('figure')}" if entry.is_figure else place(entry.id)


def _plain(value: Any) -> str:
    """Return a value as it is typed."""
    return yaml.safe_dump(value, default_flow_style=True, width=1000).replace("\n...", "").strip()


def _hanging(line: str, indent: int) -> str:
    """Wrap a line, with further lines indented."""
    return fill(line, WIDTH, initial_indent="  ", subsequent_indent=" " * indent, break_long_words=False)
