"""One self-contained HTML page of everything: tables, figures, claims, audit, single examples, provenance.

Nothing is fetched: styles, scripts and pictures are inside. Whatever comes from data is escaped. The sample browser
builds its elements from text alone.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from kvbench.base.formatting import format_number, format_significant, with_interval
from kvbench.papers import fill_template
from kvbench.papers.claims import ledger
from kvbench.papers.forensics.finding import Finding
from kvbench.papers.report import cards
from kvbench.papers.report.cards import VerdictSet
from kvbench.report import writers
from kvbench.report.render import UNCHANGED
from kvbench.report.table import Table
from kvbench.store.labels import explain_budgets

NAMED = 3
"""The page's title names up to this many models. If there are more, it states their number."""
SHORT = 16
"""The cells of a column are not broken into lines if none of them has more characters than this."""
RUN_HEADS = {
    "interval": "95 % interval",
    "percent_of_full": "% of full, 16 bits",
    "cell": "result",
    "kl_reference": "KL from full, nats, on the reference",
    "kl_greedy": "on the full cache's answer",
}
"""The heads of the columns of runs whose key would not tell a reader what they contain."""
RUN_COLUMNS = (
    "model",
    "method",
    "dataset",
    "question",
    "metric",
    "score",
    "interval",
    "n",
    "bytes",
    "percent_of_full",
) + ("kl_reference", "kl_greedy", "status", "dtype", "device", "torch", "transformers", "commit", "cell", "from")
"""The columns of the table of runs. Those that no run fills are left out."""


@dataclass(frozen=True)
class ReportPage:
    """The report on one model: its tables, figures, ledgers of claims, findings in the papers, samples and runs.

    tables: the papers' tables (see ``tables.build_tables``).
    figures: the papers' figures, as texts by key and the path of a ``picture``.
    audit: the findings about the papers' own numbers.
    samples: the examples that the page's browser shows (see samples.collect_samples).
    runs: lines of the open format (report/open_results.py), also of other folders.
    own_figures: the figures of methods that the user named, in the same form as ``figures``.
    papers: False to show the user's runs alone.
    verdicts: the verdicts on the user's methods, by model and dataset.
    paper_cells: the ids of results that the papers' tables and claims use. The page folds them away.
    """

    model: str
    tables: Sequence[Mapping[str, Any]]
    figures: Sequence[Mapping[str, str]]
    claims: Sequence[ledger.Ledger]
    audit: Sequence[Finding]
    samples: Sequence[Mapping[str, object]]
    runs: Sequence[Mapping[str, Any]]
    own_figures: Sequence[Mapping[str, str]] = ()
    papers: bool = True
    verdicts: Sequence[VerdictSet] = ()
    paper_cells: Collection[str] = ()

    def as_json(self) -> dict[str, object]:
        """Return the report's content as data for JSON."""
        figures = []
        for figure in (*self.own_figures, *self.figures):
            figures.append({key.lower(): text for key, text in figure.items() if key != "image"})
        return {
            "model": self.model,
            "tables": [table["plain"] | {"measured": table["measured"]} for table in self.tables],
            "figures": figures,
            "claims": self.claims,
            "audit": [asdict(finding) for finding in self.audit],
            "samples": self.samples,
            "runs": self.runs,
        }

    def page(self) -> str:
        """Return the report as one HTML page."""
        heads = ("table", "row", "value", "printed", "recomputed", "weight", "why")
        findings = []
        for f in self.audit:
            # a finding about a statement has the statement as its row: do not show it twice
            printed = f.printed if f.printed != f.row else ""
            findings.append((f"{f.paper}/{f.table}", f.row, f.cell, printed, f.recomputed, f.weight, f.why))
        # a tag inside the data must not end the element that holds it
        samples = json.dumps(list(self.samples), ensure_ascii=False).replace("<", "\\u003c")
        return fill_template(
            "page.html",
            page=self,
            title=f"kvbench: KV-cache compression, {self._write_title()}",
            lead=self._write_lead(),
            cards=[cards.describe_set(verdict_set) for verdict_set in self.verdicts],
            runs=self._fold_runs(),
            ledgers=[_describe_ledger(content) for content in self.claims],
            audit=render_sortable(heads, findings),
            provenance=self._render_provenance(),
            samples=Markup(samples),
        )

    def _write_title(self) -> str:
        # lines of other folders may be about other models than the report's
        models = list(dict.fromkeys(str(run.get("model")) for run in self.runs))
        if not models:
            runs = "your runs"
        elif len(models) <= NAMED:
            runs = f"your runs on {', '.join(models)}"
        else:
            runs = f"your runs on {len(models)} models"
        if self.papers:
            runs += f", and five papers beside {self.model}"
        return runs

    def _write_lead(self) -> list[str]:
        plural = "" if len(self.samples) == 1 else "s"
        lines = [f"{len(self.runs)} results of your runs, {len(self.samples)} single example{plural}."]
        if self.papers:
            # a table whose only measured rows are those of the full cache says nothing about a method
            tables_with_ours = 0
            for table in self.tables:
                if any("ours" in cell and cell["method"] != "full" for cell in table["plain"]["cells"]):
                    tables_with_ours += 1
            lines.append(
                f"{len(self.tables)} tables of five papers, {tables_with_ours} with our numbers on {self.model}. "
                "Ours stands first, the paper's below it."
            )
            if any("substitute model" in table["title"] for table in self.tables):
                lines.append(
                    f"{self.model} is a substitute model: compare its orders with the papers', not its values."
                )
            lines.append(f"{len(self.audit)} findings about the papers' own numbers.")
        lines += explain_budgets(str(run.get("method")) for run in self.runs)
        lines.append("Click a column's head to sort.")
        return lines

    def _fold_runs(self) -> list[tuple[str, int, Markup]]:
        """Return (name, number of results, table) for each method. Results that only papers use come last, in one."""
        run_values = [_format_run(run) for run in self.runs]
        # an empty column would only push others out of sight
        filled: set[str] = set()
        for values in run_values:
            filled.update(key for key, value in values.items() if value not in (None, ""))
        columns = [key for key in RUN_COLUMNS if key in filled]
        heads = [RUN_HEADS.get(key, key) for key in columns]
        own: dict[str, list[list[object]]] = {}
        of_papers: list[list[object]] = []
        for values in run_values:
            # the method without its options
            method = str(values.get("method")).partition(" ")[0]
            row = [values.get(key) for key in columns]
            # the full cache is the base of all methods, also of those that no paper has
            if method != "full" and values.get("cell") in self.paper_cells:
                of_papers.append(row)
            else:
                own.setdefault(method, []).append(row)
        folds = list(own.items())
        if of_papers:
            folds.append(("measured for papers' tables and claims", of_papers))
        return [(name, len(rows), render_sortable(heads, rows)) for name, rows in folds]

    def _render_provenance(self) -> Markup | None:
        measured = [table["measured"] for table in self.tables if table["measured"] is not None]
        if not measured:
            return None
        # all have the facts of tables.FACTS, in one order
        heads = ["table", "results", "answers"] + list(measured[0]["facts"])
        rows = [[m["table"], m["cells"], m["answers"]] + list(m["facts"].values()) for m in measured]
        return render_sortable(heads, rows)


def _format_run(run: Mapping[str, Any]) -> dict[str, object]:
    # the values of RUN_COLUMNS by key for one line of the open format, its numbers as they are printed
    values: dict[str, object] = dict(run)
    # other programs' lines may lack the parts that kvbench writes, or have null there
    for kind, divergence in (run.get("fidelity") or {}).items():
        values[f"kl_{kind}"] = _format_divergence(divergence)
    query_aware = (run.get("protocol") or {}).get("query_aware")
    values["question"] = None
    if query_aware is not None:
        values["question"] = "seen" if query_aware else "withheld"
    # a refused or failed run has no score, and stays without one
    if run.get("score") is not None:
        values["score"], _, interval = with_interval(run["score"], run.get("interval")).partition("\n")
        values["interval"] = interval or None
    if run.get("bytes") is not None:
        values["bytes"] = f"{run['bytes']:,.0f}"
    if run.get("percent_of_full") is not None:
        values["percent_of_full"] = format_number(run["percent_of_full"])
    if run.get("kind"):
        # readers must see which results kvbench did not measure itself
        values["status"] = f"{values.get('status')}, {run['kind']}"
    if run.get("nothing_compressed"):
        # a score would look like that of a method that loses nothing
        values |= {"score": UNCHANGED.replace("\n", " "), "interval": None}
    return values


def _format_divergence(divergence: Mapping[str, Any]) -> str | None:
    """Return a KL divergence with its interval as text, or None if it was not measured."""
    mean = divergence.get("kl_mean")
    if mean is None:
        return None
    if divergence.get("at_floor"):
        return "≤ rounding"
    interval = divergence.get("ci")
    if not interval:
        return format_significant(mean)
    return with_interval(mean, interval, 3, significant=True, gap=" ")


def _describe_ledger(content: ledger.Ledger) -> tuple[str, list[str], list[str], Markup]:
    # page.css colours a row by the first word of its verdict
    body, classes = [], []
    for verdict in content["verdicts"]:
        tested = verdict["tested"]
        if verdict["ran"]:
            tested += f" Ran: {'; '.join(verdict['ran'])}."
        quote = f"“{verdict['quote']}” ({verdict['paper']}, {verdict['where']})"
        outcome, evidence = ledger.describe_verdict(verdict), ledger.describe_evidence(verdict)
        body.append((verdict["id"], quote, tested, outcome, evidence, verdict["reason"]))
        classes.append(f"verdict-{verdict['verdict'].split()[0]}")
    heads = ("claim", "what the paper says", "what is tested", "verdict", "evidence", "why")
    title = content["model"]
    if content["stand_in"]:
        title += ", a substitute model"
    tallies, notes = ledger.tally_verdicts(content["verdicts"]), ledger.write_notes(content)
    return title, tallies, notes, render_sortable(heads, body, classes)


def read_pictures(figures: Iterable[Mapping[str, str]]) -> list[dict[str, str]]:
    """Return figures with the picture of each as base64 under ``image``, since the page may fetch no file."""
    read = []
    for texts in figures:
        picture = Path(texts["picture"]).read_bytes()
        read.append(dict(texts) | {"image": base64.b64encode(picture).decode()})
    return read


def render_sortable(headers: Sequence[str], body: Iterable[Sequence[object]], classes: Iterable[str] = ()) -> Markup:
    """Return rows of values as an HTML table that the reader can sort. Columns of numbers are aligned to the right.

    classes: the CSS class of each row.
    """
    texts = tuple(tuple(map(_format_value, row)) for row in body)
    # without rows there are no columns to look at
    kinds = [_classify_column(column) for column in zip(*texts, strict=True)] or ["text"] * len(headers)
    table = writers.html(Table(tuple(headers), texts), kind="sortable", columns=kinds, rows=list(classes))
    return Markup(f'<div class="scroll">{table}</div>')


def _format_value(value: object) -> str:
    if value is None:
        return ""
    return str(value).replace("\n", " ")


def _classify_column(column: Sequence[str]) -> str:
    if all(re.fullmatch(r"[+\-−]?[\d,.]*(e-?\d+)?", cell) for cell in column):
        return "number"
    return "short" if max(map(len, column)) <= SHORT else "text"
