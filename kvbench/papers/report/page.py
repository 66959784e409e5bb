"""One self-contained HTML page of everything: tables, figures, claims, audit, single examples, provenance.

Nothing is fetched: styles, scripts and pictures are inside. Whatever comes from data is escaped. The sample browser
builds its elements from text alone.
"""

from __future__ import annotations

import base64
import html
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypedDict

from kvbench.base.formatting import format_number, format_significant, with_interval
from kvbench.papers.claims import ledger
from kvbench.papers.forensics.finding import Finding
from kvbench.papers.report import cards
from kvbench.papers.report.cards import VerdictSet
from kvbench.papers.spec import catalogue
from kvbench.report import writers
from kvbench.report.render import UNCHANGED
from kvbench.report.table import Table
from kvbench.store.labels import explain_budgets

HERE = Path(__file__).parent
"""The folder of page.css and page.js."""
# the page may fetch nothing: its pictures, styles and scripts are all inline
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
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
    "kl_reference",
    "kl_greedy",
    "status",
    "dtype",
    "device",
    "torch",
    "transformers",
    "commit",
    "cell",
    "from",
)
"""The columns of the table of runs. Those that no run fills are left out."""
OWN_PLOT = "kvbench plot results/pareto method=snapkv,h2o kv_ratio=0.5,0.25"
"""The command that a page without figures of the user's methods shows as an example."""
VIEWS = (("both", "both"), ("ours", "ours"), ("published", "published"), ("delta", "difference"))
"""The views of the cells of papers' tables: the view's name in page.css, and the label of its button."""


class DivergenceRecord(TypedDict, total=False):
    """The KL divergence of a run's distributions from the full cache's, in nats.

    kl_mean: the mean; None if it was not measured.
    ci: the 95 % interval of the mean; None with too few texts.
    at_floor: True if the mean is not above the divergence that rounding alone makes.
    """

    kl_mean: float | None
    ci: tuple[float, float] | None
    at_floor: bool


@dataclass(frozen=True)
class ReportPart:
    """One paper's table for the page.

    content: the table as HTML.
    plain: the table as plain data, for JSON.
    measured: the committed samples behind the table; None if it shows the results in the user's own store.
    cells: the ids of all results that the table uses, whether they are measured or not.
    """

    paper: str
    title: str
    content: str
    plain: dict[str, Any]
    measured: MeasuredTable | None = None
    cells: frozenset[str] = frozenset()


@dataclass(frozen=True)
class MeasuredTable:
    """The samples behind a table: how many results and answers there are, and the facts of their provenance.

    table: the table's address, such as ``think/2``.
    facts: the values (model, device, ...) by the keys of tables.FACTS.
    """

    table: str
    cells: int
    answers: int
    facts: dict[str, str]


@dataclass(frozen=True)
class ReportPage:
    """The report on one model: its tables, figures, ledgers of claims, findings in the papers, samples and runs.

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
    tables: Sequence[ReportPart]
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
        table_records = []
        for table in self.tables:
            measured = asdict(table.measured) if table.measured is not None else None
            table_records.append(table.plain | {"measured": measured})
        figure_records = []
        for figure in chain(self.own_figures, self.figures):
            figure_records.append({key.lower(): text for key, text in figure.items()})
        return {
            "model": self.model,
            "tables": table_records,
            "figures": figure_records,
            "claims": self.claims,
            "audit": [asdict(finding) for finding in self.audit],
            "samples": self.samples,
            "runs": self.runs,
        }

    def page(self) -> str:
        """Return the report as one HTML page."""
        # the user's own numbers come first
        sections = [
            ("verdicts", "Verdicts", cards.render_cards(self.verdicts)),
            ("runs", "Your runs", self._render_runs()),
            ("samples", "Examples", render_sample_browser(len(self.samples))),
        ]
        if self.papers:
            sections += self._render_paper_sections()
        title = f"kvbench: KV-cache compression, {self._write_title()}"
        return build_page(title, sections, self.samples, self._write_lead())

    def _write_title(self) -> str:
        # lines of other folders may be about other models than the report's
        models = list(dict.fromkeys(str(run.get("model")) for run in self.runs))
        if not models:
            runs = "your runs"
        elif len(models) <= NAMED:
            runs = f"your runs on {', '.join(models)}"
        else:
            runs = f"your runs on {len(models)} models"
        if not self.papers:
            return runs
        return f"{runs}, and five papers beside {self.model}"

    def _write_lead(self) -> list[str]:
        counts = f"{len(self.runs)} results of your runs, {len(self.samples)} single example"
        if len(self.samples) != 1:
            counts += "s"
        lines = [f"{counts}."]
        if self.papers:
            # a table whose only measured rows are those of the full cache says nothing about a method
            tables_with_ours = 0
            for table in self.tables:
                if any("ours" in cell and cell["method"] != "full" for cell in table.plain["cells"]):
                    tables_with_ours += 1
            lines.append(
                f"{len(self.tables)} tables of five papers, {tables_with_ours} with our numbers on {self.model}. "
                "Ours stands first, the paper's below it."
            )
            if any("substitute model" in table.title for table in self.tables):
                lines.append(
                    f"{self.model} is a substitute model: compare its orders with the papers', not its values."
                )
            lines.append(f"{len(self.audit)} findings about the papers' own numbers.")
        lines += explain_budgets(str(run.get("method")) for run in self.runs)
        lines.append("Click a column's head to sort.")
        return lines

    def _render_paper_sections(self) -> list[tuple[str, str, str]]:
        heads = ("table", "row", "value", "printed", "recomputed", "weight", "why")
        findings = []
        for finding in self.audit:
            # a finding about a statement has the statement as its row: do not show it twice
            printed = finding.printed if finding.printed != finding.row else ""
            findings.append(
                (
                    f"{finding.paper}/{finding.table}",
                    finding.row,
                    finding.cell,
                    printed,
                    finding.recomputed,
                    finding.weight,
                    finding.why,
                )
            )
        ledgers = "".join(map(render_ledger, self.claims)) or "<p>None yet: kvbench claims.</p>"
        return [
            ("tables", "Tables", fold_tables((table.paper, table.title, table.content) for table in self.tables)),
            ("figures", "Figures", render_figures(self.figures)),
            ("claims", "Claims", ledgers),
            ("audit", "Audit", render_sortable(heads, findings)),
            ("provenance", "Samples behind the tables", self._render_provenance()),
        ]

    def _render_runs(self) -> str:
        if self.own_figures:
            figures_html = render_figures(self.own_figures)
        else:
            figures_html = f"<p>No figures yet: {html.escape(OWN_PLOT)}.</p>"
        if not self.runs:
            return f"{figures_html}<p>None.</p>"
        run_values = [_format_run(run) for run in self.runs]
        columns = _list_filled_columns(run_values)
        own_runs: dict[str, list[dict[str, object]]] = {}
        paper_runs: list[dict[str, object]] = []
        for values in run_values:
            # the method without its options
            method = str(values.get("method")).partition(" ")[0]
            # the full cache is the base of all methods, also of those that no paper has
            if method != "full" and values.get("cell") in self.paper_cells:
                paper_runs.append(values)
            else:
                own_runs.setdefault(method, []).append(values)
        folds = [_fold_runs(method, method_runs, columns) for method, method_runs in own_runs.items()]
        if paper_runs:
            folds.append(_fold_runs("measured for papers' tables and claims", paper_runs, columns))
        return figures_html + add_filter("".join(folds))

    def _render_provenance(self) -> str:
        measured = [table.measured for table in self.tables if table.measured is not None]
        if not measured:
            return "<p>None.</p>"
        # all have the facts of tables.FACTS, in one order
        heads = ["table", "results", "answers"]
        heads.extend(measured[0].facts)
        body = []
        for samples in measured:
            cells: list[object] = [samples.table, samples.cells, samples.answers]
            cells.extend(samples.facts.values())
            body.append(cells)
        return render_sortable(heads, body)


def _list_filled_columns(run_values: Sequence[Mapping[str, object]]) -> list[str]:
    filled: set[str] = set()
    for values in run_values:
        filled.update(key for key, value in values.items() if value not in (None, ""))
    return [key for key in RUN_COLUMNS if key in filled]


def _fold_runs(name: str, runs: Sequence[Mapping[str, object]], columns: Sequence[str]) -> str:
    heads = [RUN_HEADS.get(key, key) for key in columns]
    body = []
    for values in runs:
        body.append([values.get(key) for key in columns])
    results = "result" if len(runs) == 1 else "results"
    summary = html.escape(f"{name}: {len(runs)} {results}")
    return f"<details><summary>{summary}</summary>{render_sortable(heads, body)}</details>"


def _format_run(run: Mapping[str, Any]) -> dict[str, object]:
    values: dict[str, object] = dict(run)
    # other programs' lines may lack the parts that kvbench writes, or have null there
    for kind, divergence in (run.get("fidelity") or {}).items():
        values[f"kl_{kind}"] = _format_divergence(divergence)
    query_aware = (run.get("protocol") or {}).get("query_aware")
    if query_aware is None:
        values["question"] = None
    elif query_aware:
        values["question"] = "seen"
    else:
        values["question"] = "withheld"
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
        values["score"] = UNCHANGED.replace("\n", " ")
        values["interval"] = None
    return values


def _format_divergence(divergence: DivergenceRecord) -> str | None:
    """Return a divergence with its interval as text, or None if it was not measured."""
    mean = divergence.get("kl_mean")
    if mean is None:
        return None
    if divergence.get("at_floor"):
        return "≤ rounding"
    interval = divergence.get("ci")
    if not interval:
        return format_significant(mean)
    return with_interval(mean, interval, 3, significant=True, gap=" ")


def render_ledger(content: ledger.Ledger) -> str:
    """Return a model's claims with their verdicts and evidence as HTML."""
    # a row of the table, and the class of its element, for each claim
    body, verdict_classes = [], []
    for verdict in content["verdicts"]:
        tested = verdict["tested"]
        if verdict["ran"]:
            tested += f" Ran: {'; '.join(verdict['ran'])}."
        quote = f"“{verdict['quote']}” ({verdict['paper']}, {verdict['where']})"
        outcome, evidence = ledger.describe_verdict(verdict), ledger.describe_evidence(verdict)
        body.append((verdict["id"], quote, tested, outcome, evidence, verdict["reason"]))
        # page.css colours a row by the first word of its verdict
        verdict_classes.append(f"verdict-{verdict['verdict'].split()[0]}")
    heads = ("claim", "what the paper says", "what is tested", "verdict", "evidence", "why")
    title = content["model"]
    if content["stand_in"]:
        title += ", a substitute model"
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in ledger.write_notes(content))
    tallies = "<br>".join(map(html.escape, ledger.tally_verdicts(content["verdicts"])))
    return (
        f"<h3>{html.escape(title)}</h3><p><b>{tallies}</b></p>"
        f"<details><summary>How verdicts are made</summary><ul>{notes}</ul></details>"
        + render_sortable(heads, body, verdict_classes)
    )


def build_page(
    title: str,
    sections: Sequence[tuple[str, str, str]],
    data: Sequence[Mapping[str, object]] = (),
    lead: Sequence[str] = (),
) -> str:
    """Return a self-contained HTML page.

    sections: the id, heading and HTML of each section.
    data: the examples that the sample browser shows.
    lead: the lines of text below the title.
    """
    style = (HERE / "page.css").read_text(encoding="utf-8")
    script = (HERE / "page.js").read_text(encoding="utf-8")
    links = ""
    elements = []
    view_buttons = ""
    for section, heading, content in sections:
        links += f'<a href="#{section}">{html.escape(heading)}</a>'
        elements.append(f'<section><h2 id="{section}">{html.escape(heading)}</h2>\n{content}</section>')
        # only the papers' tables have views
        if section == "tables":
            view_buttons = _render_view_buttons()
    body = "\n".join(elements)
    first_lines = "".join(f"<li>{html.escape(line)}</li>" for line in lead)
    # a tag inside the data must not end the element that holds it
    samples = json.dumps(list(data), ensure_ascii=False).replace("<", "\\u003c")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n<style>{style}</style></head>\n'
        f'<body class="view-both">\n<h1>{html.escape(title)}</h1>\n<ul class="lead">{first_lines}</ul>\n'
        f'<nav>{links}{view_buttons} <button id="unfold">open all</button></nav>\n'
        f'{body}\n<script type="application/json" id="samples-data">{samples}</script>\n'
        f"<script>{script}</script>\n</body></html>\n"
    )


def _render_view_buttons() -> str:
    buttons = []
    for view, label in VIEWS:
        # the page opens with both sides of a cell
        pressed = "true" if view == "both" else "false"
        buttons.append(f'<button data-view="{view}" aria-pressed="{pressed}">{label}</button>')
    return f" <span>tables show {''.join(buttons)}</span>"


def fold_tables(parts: Iterable[tuple[str, str, str]]) -> str:
    """Return the papers' tables as HTML that the reader unfolds, with a heading for every paper. The first is open.

    parts: the paper's id, the title and the HTML of each table, ordered by paper.
    """
    elements = []
    # tables come by paper, so that a paper's heading stands before the first of its tables
    previous_paper = None
    for paper, title, content in parts:
        if paper != previous_paper:
            elements.append(f"<h3>{html.escape(catalogue.read_paper(paper).called)}</h3>")
        opened = " open" if previous_paper is None else ""
        previous_paper = paper
        elements.append(f"<details{opened}><summary>{html.escape(title)}</summary>{content}</details>")
    return "\n".join(elements)


def render_figures(figure_texts: Sequence[Mapping[str, str]]) -> str:
    """Return figures as HTML: each picture with its captions, folded.

    figure_texts: the texts of each figure by key (name, title, Shows, ...), and the path of its ``picture``.
    """
    elements = []
    for texts in figure_texts:
        caption = ""
        for key in ("Shows", "Here", "The paper", "Open", "Ran"):
            if texts.get(key):
                caption += f"<p><b>{key}</b> {html.escape(texts[key])}</p>"
        title = html.escape(": ".join(texts[key] for key in ("name", "title") if key in texts))
        # a data: address, since the page may fetch no file
        picture = base64.b64encode(Path(texts["picture"]).read_bytes()).decode()
        elements.append(
            f"<details><summary>{title}</summary><figure><img loading='lazy' alt='{title}' "
            f"src='data:image/png;base64,{picture}'><figcaption>{caption}</figcaption></figure></details>"
        )
    return "\n".join(elements) or "<p>None yet: kvbench plot.</p>"


def render_sortable(headers: Sequence[str], body: Iterable[Sequence[object]], classes: Iterable[str] = ()) -> str:
    """Return rows of values as an HTML table that the reader can sort. Columns of numbers are aligned to the right.

    headers: the heads of the columns.
    body: the values of each row, one for each column.
    classes: the CSS class of each row.
    """
    texts = tuple(tuple(map(_format_value, row)) for row in body)
    kinds = [_classify_column(column) for column in zip(*texts, strict=True)]
    # zip of a table without rows gives no columns
    if not texts:
        kinds = ["text"] * len(headers)
    table = writers.html(Table(tuple(headers), texts), kind="sortable", columns=kinds, rows=list(classes))
    return f'<div class="scroll">{table}</div>'


def _format_value(value: object) -> str:
    """Return a value on one line, or '' for None."""
    if value is None:
        return ""
    return str(value).replace("\n", " ")


def add_filter(table: str) -> str:
    """Return sortable tables as HTML with a search box above them. Typed words hide the rows that lack any of them."""
    box = '<label>Rows with <input type="search" class="filter" placeholder="snapkv needle withheld"></label>'
    return f'<div class="filtered"><p>{box} <span class="count" aria-live="polite"></span></p>{table}</div>'


def _classify_column(column: Sequence[str]) -> str:
    if all(re.fullmatch(r"[+\-−]?[\d,.]*(e-?\d+)?", cell) for cell in column):
        return "number"
    if max(map(len, column)) <= SHORT:
        return "short"
    return "text"


def render_sample_browser(count: int) -> str:
    """Return the HTML elements in which the page's script shows the samples, or a sentence if ``count`` is 0."""
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
