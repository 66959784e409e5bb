"""The reference of the papers: their presets, what they print and claim, and what kvbench can reproduce of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from textwrap import fill
from typing import NamedTuple

import yaml

from kvbench.base.conf import entries
from kvbench.methods.core import registry
from kvbench.papers.forensics.exact import recomputed_cells
from kvbench.papers.forensics.finding import name_table
from kvbench.papers.forensics.paper_audit import NOTE
from kvbench.papers.forensics.statements import judge_statements
from kvbench.papers.spec.catalogue import CatalogueEntry, Paper
from kvbench.papers.spec.published import AVERAGE, SCORES, model_id
from kvbench.papers.spec.published_cells import Book, read_published
from kvbench.plan import presets
from kvbench.plan.presets import Setting
from kvbench.report.table import WIDTH
from kvbench.report.writers import table
from kvbench.store.labels import explain_budgets
from kvbench.tasks.longbench import TASKS

HEAD = """# Reference of the papers

`kvbench reference --format md` makes this page from the presets in `conf/preset`, the published values in
`kvbench/papers/data`, and kvbench's methods, datasets and models. A test compares the page with them.

The values of a preset replace kvbench's defaults, and an option that you type overrides the preset. A table that needs
a model needs the checkpoint that it names. `model=tiny` is a substitute model and shows trends at best. The statements
are checked only against the paper's own numbers ([the audit](../results/audit.md)).
"""
QUANT = "quant"
"""A stage of ``h2o+quant``, which is ``qhitter`` with lam=1: kvbench has no method of that name."""
TIMES = "times and peaks are those of its GPU"
"""The reference's sentence about the numbers of an efficiency table."""
COLUMNS = ("", "kind", "title", "values", "what can be reproduced")
"""The heads of a table of EntryRow."""
SAYS = ("place", "statement, in our words", "by its own numbers")
"""The heads of a table of ClaimRow."""


class EntryRow(NamedTuple):
    """One row under COLUMNS: a table or figure, and what can be reproduced of it.

    cells: the number of published values, and of flagged ones in brackets; '' for a figure.
    """

    name: str
    kind: str
    title: str
    cells: str
    reproduction: str


class ClaimRow(NamedTuple):
    """One row under SAYS: a statement of a paper, and its verdict by the paper's own numbers."""

    place: str
    text: str
    verdict: str


def describe_reproduction(entry: CatalogueEntry, book: Book) -> str:
    """Return in words what can be reproduced of a table or figure, and which models or data kvbench lacks for it."""
    if entry.kind == "drawing":
        return "a drawing"
    if entry.kind == "dataset-facts":
        return _describe_exact_part(entry, book)
    parts = []
    if entry.exact:
        parts.append(_describe_exact_part(entry, book))
    if entry.kind == "efficiency":
        parts.append(TIMES)
    # the entries of conf/model by a common spelling: papers write llama-2-7b, kvbench llama2-7b
    our_name_by_id = {model_id(model): model for model in entries("model")}
    our_models = []
    # models, methods and datasets of the table that kvbench does not have
    absent = []
    for name in entry.model_names:
        if model_id(name) in our_name_by_id:
            our_models.append(our_name_by_id[model_id(name)])
        else:
            absent.append(name)
    if our_models:
        parts.append(f"with {', '.join(our_models)}")
    else:
        parts.append("with the paper's model")
    absent += _list_absent_stages(entry) + _list_absent_datasets(entry)
    if absent:
        parts.append(f"not here: {', '.join(absent)}")
    return "; ".join(parts)


def _list_absent_stages(entry: CatalogueEntry) -> list[str]:
    # snapkv+think is a chain of two methods, of which either can be missing
    stages: set[str] = set()
    for method in entry.method_names:
        stages.update(method.split("+"))
    return sorted(stages - {QUANT} - set(registry.available()))


def _list_absent_datasets(entry: CatalogueEntry) -> list[str]:
    # columns of bytes and times have no dataset that kvbench would need
    datasets = {cell.dataset for cell in entry.cells if cell.metric in SCORES or cell.metric == "perplexity"}
    return sorted(datasets - {AVERAGE} - set(entries("dataset")) - set(TASKS))


def write_markdown(papers: Sequence[Paper]) -> str:
    """Return the reference of papers as a Markdown page: presets with sources, tables and figures, and statements."""
    book = read_published()
    parts = [HEAD]
    for paper in papers:
        # a paper without a preset ends its line here
        preset = "."
        if paper.preset:
            preset = f", `preset={paper.preset}`. {presets.about(paper.preset)}"
        parts.append(f"## {paper.title}\n\n{paper.source}{preset}\n")
        settings = []
        for setting in _read_preset_settings(paper):
            settings.append((setting.key, _format_value(setting.value), setting.model or "any", setting.source))
        parts += ["### What the preset sets\n", table(("key", "value", "model", "where it comes from"), settings)]
        entry_rows = [_make_entry_row(entry, book) for entry in paper.entries]
        parts += ["### Tables, figures and prose\n", table(COLUMNS, entry_rows)]
        notes = [f"- {_name_place(entry)}: {entry.note}" for entry in paper.entries if entry.note]
        if notes:
            parts.append("\n".join(notes) + "\n")
        parts += ["### What it says\n", table(SAYS, list(_list_claims(paper, book)))]
    return "\n".join(parts).rstrip() + "\n"


def write_text(papers: Sequence[Paper]) -> str:
    """Return the reference of papers as plain text, WIDTH characters wide, with the same parts as the Markdown page."""
    book = read_published()
    lines = []
    for paper in papers:
        preset = f", preset={paper.preset}" if paper.preset else ""
        lines += [fill(f"{paper.title} ({paper.source}{preset})", WIDTH), ""]
        lines += [_write_setting(setting) for setting in _read_preset_settings(paper)]
        lines.append("")
        # explain_budgets reads labels, such as "snapkv kv_size=": a word stands for the method
        for note in explain_budgets(f"preset {setting.key}=" for setting in _read_preset_settings(paper)):
            lines += [fill(note, WIDTH), ""]
        lines += [_write_entry(_make_entry_row(entry, book)) for entry in paper.entries]
        lines.append("")
        for claim in _list_claims(paper, book):
            lines.append(_wrap_hanging(f"{claim.verdict:<14} {claim.text} ({claim.place})", indent=17))
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _write_setting(setting: Setting) -> str:
    # all keys of a preset begin alike, which a line of text has no room for
    line = f"{setting.key.removeprefix('method.')}={_format_value(setting.value)}"
    line = f"{line:<30} {setting.source}"
    if setting.model:
        line += f" ({setting.model} only)"
    # further lines stand below the source: behind 2 characters of indentation, 30 of the setting, and a space
    return _wrap_hanging(line, indent=33)


def _write_entry(row: EntryRow) -> str:
    line = f"{row.name:<10} {row.kind}: {row.title}"
    if row.cells:
        line += f"; values: {row.cells}"
    # further lines stand below the entry's kind, and so does the text on what can be reproduced
    title = _wrap_hanging(line, indent=13)
    indent = " " * 13
    reproducible = row.reproduction.replace("`", "")
    return f"{title}\n{fill(reproducible, WIDTH, initial_indent=indent, subsequent_indent=indent)}"


def as_json(paper: Paper) -> dict[str, object]:
    """Return a paper as plain data: its preset with sources, its tables and figures, and its statements."""
    book = read_published()
    about = presets.about(paper.preset) if paper.preset else ""
    return {
        "paper": paper.id,
        "title": paper.title,
        "source": paper.source,
        "preset": {"name": paper.preset, "about": about},
        "settings": [asdict(setting) for setting in _read_preset_settings(paper)],
        "entries": [_make_entry_row(entry, book)._asdict() for entry in paper.entries],
        "statements": [claim._asdict() for claim in _list_claims(paper, book)],
    }


def _read_preset_settings(paper: Paper) -> tuple[Setting, ...]:
    if not paper.preset:
        return ()
    return presets.settings(paper.preset)


def _make_entry_row(entry: CatalogueEntry, book: Book) -> EntryRow:
    cells = ""
    if not entry.is_figure:
        counts = entry.count_cells()
        cells = str(counts["published"])
        # a flag that no cell has is not named
        flagged = [f"{counts[kind]} {kind}" for kind in ("suspect", "repaired", "missing") if counts[kind]]
        if flagged:
            cells += f" ({', '.join(flagged)})"
    return EntryRow(
        name=_name_place(entry),
        kind=entry.kind,
        title=entry.title,
        cells=cells,
        reproduction=describe_reproduction(entry, book),
    )


def _describe_exact_part(entry: CatalogueEntry, book: Book) -> str:
    description = f"without a model: {entry.exact}"
    recomputed = []
    for value in recomputed_cells(book):
        if (value.cell.paper, value.cell.table) == (entry.paper, entry.id):
            recomputed.append(value)
    if recomputed:
        off = sum(not value.ok for value in recomputed)
        description += f" ({len(recomputed)} values, {off} off)"
    return description


def _list_claims(paper: Paper, book: Book) -> Iterator[ClaimRow]:
    for judgement in judge_statements(book):
        statement = judgement.statement
        is_claim = judgement.verdict != NOTE and not statement.place.startswith("table")
        if statement.paper == paper.id and is_claim:
            yield ClaimRow(statement.place, statement.text, judgement.verdict)


def _name_place(entry: CatalogueEntry) -> str:
    if entry.is_figure:
        return f"figure {entry.id.removeprefix('figure')}"
    return name_table(entry.id)


def _format_value(value: object) -> str:
    # YAML ends a lone number or word with a line of three dots
    return yaml.safe_dump(value, default_flow_style=True, width=1000).replace("\n...", "").strip()


def _wrap_hanging(line: str, indent: int) -> str:
    return fill(line, WIDTH, initial_indent="  ", subsequent_indent=" " * indent, break_long_words=False)
