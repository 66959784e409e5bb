"""One self-contained HTML page of everything: tables, figures, claims, audit, single examples, provenance.

Nothing is fetched: styles, scripts and pictures are inside. Whatever comes from data is escaped; the sample browser
builds its elements from text alone.
"""

from __future__ import annotations

import base64
import html
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvbench.papers.claims import claim_runner
from kvbench.papers.figures.figure import facts_of
from kvbench.papers.figures.registry import FIGURES
from kvbench.papers.forensics.finding import Finding
from kvbench.papers.report.tables import ReportPart
from kvbench.papers.spec import catalogue
from kvbench.report import writers
from kvbench.report.render import UNCHANGED
from kvbench.report.table import Table

HERE = Path(__file__).parent
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
NAMED = 3  # models in the title
SHORT = 16
"""Characters of a cell that is not broken into lines."""
RUN_HEADS = {
    "interval": "95 % interval",
    "percent_of_full": "% of full, 16 bits",
    "kl_reference": "KL from full, nats, on the reference",
    "kl_greedy": "on the full cache's answer",
}
RUN_COLUMNS = (
    *("model", "method", "dataset", "question", "metric", "score", "interval", "n", "bytes", "percent_of_full"),
    *("kl_reference", "kl_greedy", "status", "dtype", "device", "torch", "transformers", "commit", "cell", "from"),
)
"""The columns of the table of runs, of which those are left out that no run fills."""
OWN_PLOT = "python -m kvbench plot results/pareto method=snapkv,h2o kv_ratio=0.5,0.25"
VIEWS = (("both", "both"), ("ours", "ours"), ("published", "published"), ("delta", "difference"))


@dataclass(frozen=True)
class ReportPage:
    """The report on one model: its tables, figures, ledgers of claims, findings in the papers, samples and runs.

    runs: lines of the open format (run/open_results.py), also of other folders.
    own_figures: those of methods that the user named. papers: False where the user's runs alone are shown.
    """

    model: str
    tables: Sequence[ReportPart]
    figures: Sequence[Mapping[str, str]]
    claims: Sequence[Mapping[str, Any]]
    audit: Sequence[Finding]
    samples: Sequence[Mapping[str, Any]]
    runs: Sequence[Mapping[str, Any]]
    own_figures: Sequence[Mapping[str, str]] = ()
    papers: bool = True

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain data."""
        return {
            "model": self.model,
            "tables": [{**t.plain, "measured": t.measured and asdict(t.measured)} for t in self.tables],
            "figures": [{key.lower(): text for key, text in f.items()} for f in (*self.own_figures, *self.figures)],
            "claims": self.claims,
            "audit": [asdict(finding) for finding in self.audit],
            "samples": self.samples,
            "runs": self.runs,
        }

    def page(self) -> str:
        """Return the report as one HTML page."""
        sections = [
            ("runs", "Your runs", self._runs()),
            ("samples", "Examples", browser(len(self.samples))),
            *(self._of_papers() if self.papers else ()),
        ]
        return build(f"kvbench: KV-cache compression, {self._title()}", sections, self.samples, self._lead())

    def _title(self) -> str:
        """Return the sections in words, each with the models whose numbers stand in it."""
        models = list(dict.fromkeys(str(run.get("model")) for run in self.runs))
        runs = "your runs"
        if models:
            runs += f" on {', '.join(models) if len(models) <= NAMED else f'{len(models)} models'}"
        return f"{runs}, and five papers beside {self.model}" if self.papers else runs

    def _lead(self) -> str:
        """Return the first text of the page: what is in it."""
        runs = f"{len(self.runs)} of your cells, {len(self.samples)} single example{'s' * (len(self.samples) != 1)}"
        if not self.papers:
            return f"{runs}. Click a column's head to sort."
        ours = sum(any("ours" in c and c["method"] != "full" for c in t.plain["cells"]) for t in self.tables)
        stand_in = any("stand-in" in t.title for t in self.tables)
        stands = ", a stand-in: compare orders with the papers', not values" if stand_in else ""
        return (
            f"{runs}; of five papers {len(self.tables)} tables, {ours} of them with our numbers on {self.model}"
            f"{stands}. In a cell ours comes first, the paper's below it. {len(self.audit)} findings about the papers' "
            "own numbers. Click a column's head to sort."
        )

    def _of_papers(self) -> list[tuple[str, str, str]]:
        """Return the sections on the papers: (id, heading, HTML) each."""
        facts = ("table", "row", "cell", "printed", "recomputed", "weight", "why")
        findings = []
        for f in self.audit:
            printed = "" if f.printed == f.row else f.printed
            findings.append((f"{f.paper}/{f.table}", f.row, f.cell, printed, f.recomputed, f.weight, f.why))
        return [
            ("tables", "Tables", tables((t.paper, t.title, t.content) for t in self.tables)),
            ("figures", "Figures", figures(self.figures)),
            ("claims", "Claims", "".join(map(ledger, self.claims)) or "<p>None yet: python -m kvbench claims.</p>"),
            ("audit", "Audit", rows(facts, findings)),
            ("provenance", "Samples behind the tables", self._provenance()),
        ]

    def _runs(self) -> str:
        """Return the figures of the user's methods, and a table of the store's cells with scores and bytes."""
        drawn = figures(self.own_figures) if self.own_figures else f"<p>No figures yet: {html.escape(OWN_PLOT)}.</p>"
        flat = [_flat(run) for run in self.runs]
        columns = [key for key in RUN_COLUMNS if any(run.get(key) not in (None, "") for run in flat)]
        cells = [[run.get(key) for key in columns] for run in flat]
        return drawn + (filtered(rows([RUN_HEADS.get(h, h) for h in columns], cells)) if cells else "<p>None.</p>")

    def _provenance(self) -> str:
        """Return what the samples behind the tables were measured with."""
        measured = [t.measured for t in self.tables if t.measured]
        body = [(m.table, m.cells, m.answers, *m.facts.values()) for m in measured]
        return rows(("table", "cells", "answers", *measured[0].facts), body) if body else "<p>None.</p>"


def _flat(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line of the open format by RUN_COLUMNS, with its numbers as they are printed."""
    seen = (run.get("protocol") or {}).get("query_aware")
    far = {f"kl_{kind}": _nats(some) for kind, some in (run.get("fidelity") or {}).items()}
    values = {**run, **far, "question": None if seen is None else "seen" if seen else "withheld"}
    forms = {"score": "{:.1f}", "interval": "[{0[0]:.0f}, {0[1]:.0f}]", "bytes": "{:,.0f}", "percent_of_full": "{:.1f}"}
    values |= {key: form.format(values[key]) for key, form in forms.items() if values.get(key) is not None}
    if run.get("nothing_compressed"):
        values |= {"score": UNCHANGED.replace("\n", " "), "interval": None}
    return values


def _nats(far: Mapping[str, Any]) -> str | None:
    if far.get("kl_mean") is None:
        return None
    ci = " [{:.2g}, {:.2g}]".format(*far["ci"]) if far.get("ci") else ""
    return "≤ floor" if far.get("at_floor") else f"{far['kl_mean']:.3g}{ci}"


def ledger(content: Mapping[str, Any]) -> str:
    """Return a model's claims with their verdicts and evidence."""
    body = []
    for v in content["verdicts"]:
        tested = v["tested"] + (f" Ran: {'; '.join(v['ran'])}." if v["ran"] else "")
        quote = f"“{v['quote']}” ({v['paper']}, {v['where']})"
        body.append((v["id"], quote, tested, claim_runner.outcome(v), claim_runner.evidence(v), v["reason"]))
    kinds = [f"verdict-{v['verdict'].split()[0]}" for v in content["verdicts"]]
    head = ("claim", "what the paper says", "what is tested", "verdict", "evidence", "why")
    title = f"{content['model']}{', a stand-in' if content['stand_in'] else ''}"
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in claim_runner.notes(content))
    return f"<h3>{html.escape(title)}</h3><ul>{notes}</ul>" + rows(head, body, kinds)


def build(
    title: str, sections: Sequence[tuple[str, str, str]], data: Sequence[Mapping[str, Any]] = (), lead: str = ""
) -> str:
    """Build the page: ``sections`` are (id, heading, HTML), ``data`` the browser's samples, ``lead`` the first text."""
    style, script = ((HERE / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    links = "".join(f'<a href="#{i}">{html.escape(h)}</a>' for i, h, _ in sections)
    views = "".join(
        f'<button data-view="{view}" aria-pressed="{"true" if view == "both" else "false"}">{label}</button>'
        for view, label in VIEWS
    )
    views_note = f" <span>cells show {views}</span>" if any(i == "tables" for i, _, _ in sections) else ""
    body = "\n".join(f'<section><h2 id="{i}">{html.escape(h)}</h2>\n{content}</section>' for i, h, content in sections)
    # a tag inside the data must not end the element that holds it
    samples = json.dumps(list(data), ensure_ascii=False).replace("<", "\\u003c")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n<style>{style}</style></head>\n'
        f'<body class="view-both">\n<h1>{html.escape(title)}</h1>\n<p>{html.escape(lead)}</p>\n'
        f'<nav>{links}{views_note} <button id="unfold">open all</button></nav>\n'
        f'{body}\n<script type="application/json" id="samples-data">{samples}</script>\n'
        f"<script>{script}</script>\n</body></html>\n"
    )


def tables(found: Iterable[tuple[str, str, str]]) -> str:
    """Return tables to unfold: (paper, title, HTML) each, with a heading for every paper; the first is open."""
    parts, paper = [], None
    for name, title, content in found:
        if name != paper:
            parts.append(f"<h3>{html.escape(catalogue.paper(name).called)}</h3>")
        opened = " open" if paper is None else ""
        paper = name
        parts.append(f"<details{opened}><summary>{html.escape(title)}</summary>{content}</details>")
    return "\n".join(parts)


def figures_of(folder: Path) -> list[dict[str, str]]:
    """Return every figure of ``folder``: its picture, what it shows, the paper's finding, and ours."""
    figures = []
    for path in sorted(folder.rglob("*.png"), key=lambda path: _order(str(path.relative_to(folder)))):
        name, csv = str(path.relative_to(folder).with_suffix("")), path.with_suffix(".csv")
        texts = {"name": name, "picture": str(path)}
        if (figure := FIGURES.get(name)) is not None:
            text = csv.read_text(encoding="utf-8") if csv.exists() else ""
            figure, finding = figure.captioned(facts_of(text)), figure.finding(figure.parse(text)) if text else ""
            texts |= {"title": figure.title, "Shows": figure.shows, "Here": finding}
            texts |= {"The paper": figure.claim, "Open": figure.unsaid, "Ran": facts_of(text).get("runs", "")}
        figures.append(texts)
    return figures


def _order(name: str) -> tuple[Any, ...]:
    """Return a sort key with numbers as numbers: figure 10 comes behind figure 9."""
    return tuple(int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name))


def figures(found: Sequence[Mapping[str, str]]) -> str:
    """Return the figures as HTML."""
    parts = []
    for figure in found:
        texts = ((key, figure.get(key)) for key in ("Shows", "Here", "The paper", "Open", "Ran"))
        lines = "".join(f"<p><b>{what}</b> {html.escape(text)}</p>" for what, text in texts if text)
        title = html.escape(": ".join(figure[key] for key in ("name", "title") if key in figure))
        data = base64.b64encode(Path(figure["picture"]).read_bytes()).decode()
        parts.append(
            f"<details><summary>{title}</summary><figure><img loading='lazy' alt='{title}' "
            f"src='data:image/png;base64,{data}'><figcaption>{lines}</figcaption></figure></details>"
        )
    return "\n".join(parts) or "<p>None yet: python -m kvbench plot.</p>"


def rows(headers: Sequence[str], body: Iterable[Sequence[Any]], classes: Iterable[str] = ()) -> str:
    """Return a sortable table of texts; ``classes`` are those of its rows. Columns of numbers stand at the right."""
    texts = tuple(tuple("" if c is None else str(c).replace("\n", " ") for c in row) for row in body)
    kinds = [_kind(column) for column in zip(*texts, strict=True)] or ["text"] * len(headers)
    table = writers.html(Table(tuple(headers), texts), "sortable", columns=kinds, rows=list(classes))
    return f'<div class="scroll">{table}</div>'


def filtered(table: str) -> str:
    """Return a sortable table with a box above it, in which words leave the rows that have all of them."""
    box = '<label>Rows with <input type="search" class="filter" placeholder="snapkv needle withheld"></label>'
    return f'<div class="filtered"><p>{box} <span class="count" aria-live="polite"></span></p>{table}</div>'


def _kind(column: Sequence[str]) -> str:
    """Return number, short (one line) or text (wrapped), by what the column holds."""
    if all(re.fullmatch(r"[+\-−]?[\d,.]*(e-?\d+)?", c) for c in column):
        return "number"
    return "short" if max(map(len, column)) <= SHORT else "text"


def browser(count: int) -> str:
    """Return the elements in which the script shows the samples."""
    if not count:
        return "<p>No examples were asked for (samples=).</p>"
    return (
        '<p><label>Example <select id="sample"></select></label> reference: <b id="reference"></b></p>'
        '<div class="scroll"><table><thead><tr><th class="text">method</th><th id="metric">score</th>'
        '<th class="text">answer</th></tr></thead>'
        '<tbody id="answers"></tbody></table></div>'
        "<p>Choose a method: the tokens that it kept are shaded by the share of layers and heads that hold them. "
        "Underlined is where the reference stands in the prompt.</p>"
        '<div id="prompt"></div>'
    )
