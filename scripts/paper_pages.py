"""The site's page of each paper: what it claims, what was found here, its tables and figures, and its preset."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kvbench.papers.claims import ledger
from kvbench.papers.report import reference
from kvbench.papers.spec import catalogue
from kvbench.papers.spec.catalogue import Paper
from kvbench.report import writers

ROOT = Path(__file__).parents[1]
RESULTS = "../results"
"""The results as pages of papers link to them."""
LEDGER = ROOT / "results" / "claims" / "smollm2-135m-q4_1.json"
MODEL = "SmolLM2-135M"
"""The model of the ledger and of results/tables, a substitute for the papers' models."""
MEASURES = {"points": "the scores", "likelihood": "the likelihood of the answer", "divergence": "the divergence"}
LATEX = {"$": "", "l_1": "l₁", "l_2": "l₂", "l_∞": "l∞", "ℓ_1": "ℓ₁", "ℓ_2": "ℓ₂", "\\times": "×"}
"""Marks of LaTeX in the papers' words, and the signs that are printed for them."""


def pages() -> dict[str, str]:
    """Return the page of each paper and their index, by the name of the page."""
    papers = [catalogue.read_paper(name) for name in catalogue.paper_ids()]
    texts = {"papers/index.md": _index(papers)}
    for paper in papers:
        texts[f"papers/{paper.id}.md"] = _page(paper)
    return texts


def navigation() -> list[dict[str, str]]:
    """Return the navigation of the papers: their index, and the page of each."""
    entries = [{"All papers": "papers/index.md"}]
    for name in catalogue.paper_ids():
        entries.append({catalogue.read_paper(name).name: f"papers/{name}.md"})
    return entries


def _index(papers: Sequence[Paper]) -> str:
    rows = []
    for paper in papers:
        statements = "<br>".join(ledger.tally_verdicts(_claims(paper)))
        tables = sum(not entry.is_figure for entry in paper.entries)
        figures = len(paper.entries) - tables
        rows.append((f"[{paper.name}]({paper.id}.md)", paper.source, f"{tables} and {figures}", statements))
    return "\n\n".join(
        [
            "# Papers",
            "Each page shows a paper's claims, the verdicts on them, the tables and figures that can be measured, and "
            f"the values of the paper's preset. The model is {MODEL}, a substitute for the papers' models. You can "
            "compare the order of methods with the paper's, but not the values.",
            writers.table(("paper", "source", "tables and figures", f"claims, tested on {MODEL}"), rows),
            f"[How claims are tested]({RESULTS}/measured.md) · [all claims with their evidence]({RESULTS}/claims.md) · "
            f"[where the printed numbers contradict themselves]({RESULTS}/audit.md) · [how to reproduce a "
            "paper](../reproduce.md)",
        ]
    )


def _page(paper: Paper) -> str:
    """Return the page of one paper."""
    record = reference.as_json(paper)
    claims = _claims(paper)
    preset: dict[str, str] = record["preset"]  # type: ignore[assignment]
    parts = [
        f"# {paper.name}",
        f"*{record['title']}*, {record['source']}.",
        "## What it claims, and what was found here",
        f"{len(claims)} claims, tested on {MODEL}. Papers claim scores, so only scores (*points*) support or "
        f"contradict a claim. [The evidence for each verdict]({RESULTS}/claims.md) has intervals, the number of "
        "prompts, and the verdicts on the tiny model.",
        "\n".join(f"- {tally}" for tally in ledger.tally_verdicts(claims)),
        writers.table(("", "the paper says", "tested here", "verdict"), list(map(_claim_row, claims))),
        "## Its own numbers",
        "This table compares the paper's statements with the numbers that the paper prints. No model is needed "
        f"([the audit]({RESULTS}/audit.md)):",
        writers.table(("place", "statement, in our words", "by its own numbers"), _values(record["statements"])),
        "## Tables and figures",
        f"The links in column *ours* lead to kvbench's measurements. `kvbench table {paper.id}/1` prints a table "
        f"beside the paper's, and `kvbench plot {paper.id}/fig1` draws a figure. With {MODEL} or another substitute "
        "model, kvbench's numbers are in per cent of kvbench's full cache, and the paper's numbers in per cent "
        "of the paper's full cache.",
        writers.table(
            ("", "shows", "ours", "printed values", "what can be reproduced"), list(_entry_rows(paper, record))
        ),
    ]
    notes = [f"- {place}: {note}" for place, note in _notes(paper)]
    if notes:
        parts.append("\n".join(notes))
    if preset["name"]:
        parts += [
            f"## What `preset={preset['name']}` sets",
            f"{preset['about']} These values replace kvbench's defaults. An option that you type overrides the preset.",
            writers.table(("option", "value", "model", "where it comes from"), list(_setting_rows(record))),
        ]
    return "\n\n".join(parts) + "\n"


def _claims(paper: Paper) -> list[ledger.Record]:
    """Return the verdicts on a paper's claims, as they are committed."""
    verdicts = json.loads(LEDGER.read_text("utf-8"))["verdicts"]
    return [verdict for verdict in verdicts if verdict["paper"] == paper.id]


def _claim_row(claim: ledger.Record) -> tuple[str, ...]:
    """Return a claim as a row: its mark, the paper's words with their place, the test, and the verdict."""
    verdict = claim["verdict"]
    if claim["decided_by"]:
        verdict = f"**{verdict}** by {MEASURES[claim['decided_by']]}"
    quote = f"“{plain(claim['quote'])}” ({claim['where']})"
    return ledger.MARKS.get(claim["verdict"], "—"), quote, claim["tested"], verdict


def plain(quote: str) -> str:
    """Return a quotation without the marks of LaTeX."""
    for mark, sign in LATEX.items():
        quote = quote.replace(mark, sign)
    return quote


def _values(records: Any) -> list[tuple[str, ...]]:
    return [tuple(record.values()) for record in records]


def _entry_rows(paper: Paper, record: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the tables and figures of a paper, with links to what was measured of them."""
    for entry, row in zip(paper.entries, record["entries"], strict=True):
        # the number stays on the line of its word
        name = row["name"].replace(" ", "\u00a0")
        yield name, row["title"], _ours(paper, entry.id, entry.is_figure), row["cells"], row["reproduction"]


def _ours(paper: Paper, entry: str, is_figure: bool) -> str:
    """Return links to our committed measurements of a table or figure, on SmolLM2 and on the tiny model."""
    if is_figure:
        # a figure may be measured in parts, as fig3a and fig3b
        pattern = f"figures/{paper.id}/fig{entry.removeprefix('figure')}*.png"
        part = re.compile(rf"fig{entry.removeprefix('figure')}[a-z]?$")
    else:
        pattern = f"{paper.id}-{entry}.md"
        part = re.compile(".*")
    links = []
    for model, folder in ((MODEL, "" if is_figure else "tables/"), ("tiny", "tiny/")):
        for path in sorted((ROOT / "results").glob(folder + pattern)):
            if part.match(path.stem):
                links.append(f"[{model}]({RESULTS}/{path.relative_to(ROOT / 'results').as_posix()})")
    return ", ".join(links)


def _notes(paper: Paper) -> Iterator[tuple[str, str]]:
    for entry in paper.entries:
        if entry.note:
            kind = "figure" if entry.is_figure else "table"
            yield f"{kind} {entry.id.removeprefix('figure')}", entry.note


def _setting_rows(record: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for setting in record["settings"]:
        value = json.dumps(setting["value"], ensure_ascii=False).strip('"')
        yield f"`{setting['key']}`", f"`{value}`", setting["model"] or "any", setting["source"]
