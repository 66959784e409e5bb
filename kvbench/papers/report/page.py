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
from pathlib import Path
from typing import Any

from kvbench.papers.figures.registry import FIGURES

HERE = Path(__file__).parent
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
PAPERS = {"think": "ThinK", "refreekv": "ReFreeKV", "uncomp": "UNComp", "vatp": "VATP", "qhitter": "Q-Hitter"}
SHORT = 24
"""Characters of a cell that is not broken into lines."""
VIEWS = (("both", "both"), ("ours", "ours"), ("published", "published"), ("delta", "difference"))


def build(
    title: str, sections: Sequence[tuple[str, str, str]], data: Sequence[Mapping[str, Any]] = (), lead: str = ""
) -> str:
    """The page: ``sections`` are (id, heading, HTML), ``data`` the samples of the browser; ``lead`` stands first."""
    style, script = ((HERE / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    links = "".join(f'<a href="#{i}">{html.escape(h)}</a>' for i, h, _ in sections)
    views = "".join(
        f'<button data-view="{view}" aria-pressed="{"true" if view == "both" else "false"}">{label}</button>'
        for view, label in VIEWS
    )
    body = "\n".join(f'<section><h2 id="{i}">{html.escape(h)}</h2>\n{content}</section>' for i, h, content in sections)
    # a tag inside the data must not end the element that holds it
    held = json.dumps(list(data), ensure_ascii=False).replace("<", "\\u003c")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n<style>{style}</style></head>\n'
        f'<body class="view-both">\n<h1>{html.escape(title)}</h1>\n<p>{html.escape(lead)}</p>\n'
        f"<nav>{links} <span>cells show {views}</span></nav>\n"
        f'{body}\n<script type="application/json" id="samples-data">{held}</script>\n'
        f"<script>{script}</script>\n</body></html>\n"
    )


def tables(found: Iterable[tuple[str, str, str]]) -> str:
    """Tables to unfold: (paper, title, HTML) each, below a heading for every paper; the first is open."""
    out, paper = [], None
    for name, title, content in found:
        if name != paper:
            out.append(f"<h3>{html.escape(PAPERS.get(name, name))}</h3>")
        opened = " open" if paper is None else ""
        paper = name
        out.append(f"<details{opened}><summary>{html.escape(title)}</summary>{content}</details>")
    return "\n".join(out)


def figures(folder: Path) -> str:
    """Every figure of ``folder`` inside the page, with what it shows, what the paper finds there, and what is here."""
    found = sorted(folder.rglob("*.png"), key=lambda path: _order(str(path.relative_to(folder))))
    if not found:
        return "<p>None yet: python -m kvbench plot.</p>"
    return "\n".join(_figure(path, str(path.relative_to(folder).with_suffix(""))) for path in found)


def _order(name: str) -> tuple[Any, ...]:
    """By name, with numbers as numbers: figure 10 comes behind figure 9."""
    return tuple(int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name))


def _figure(path: Path, name: str) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    figure, csv = FIGURES.get(name), path.with_suffix(".csv")
    said: list[tuple[str, str]] = []
    if figure is not None:
        said = [("Shows", figure.shows), ("The paper", figure.claim), ("Open", figure.unsaid)]
        if csv.exists():
            said.insert(1, ("Here", figure.finding(figure.parse(csv.read_text(encoding="utf-8")))))
    lines = "".join(f"<p><b>{what}</b> {html.escape(text)}</p>" for what, text in said if text)
    title = html.escape(f"{name}: {figure.title}" if figure is not None else name)
    return (
        f"<details><summary>{title}</summary><figure><img loading='lazy' alt='{title}' "
        f"src='data:image/png;base64,{data}'><figcaption>{lines}</figcaption></figure></details>"
    )


def rows(headers: Sequence[str], body: Iterable[Sequence[Any]], classes: Iterable[str] = ()) -> str:
    """A sortable table of texts; ``classes`` are those of its rows. Columns of numbers only stand at their right."""
    texts = [["" if c is None else str(c) for c in row] for row in body]
    kinds = [_kind(column) for column in zip(*texts, strict=True)] or ["text"] * len(headers)
    head = "".join(f'<th class="{k}">{html.escape(h)}</th>' for h, k in zip(headers, kinds, strict=True))
    of_rows = iter(classes)
    lines = "".join(
        f'<tr class="{html.escape(next(of_rows, ""))}">'
        + "".join(f'<td class="{k}">{html.escape(c)}</td>' for c, k in zip(row, kinds, strict=True))
        + "</tr>"
        for row in texts
    )
    table = f'<table class="sortable"><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>'
    return f'<div class="scroll">{table}</div>'


def _kind(column: Sequence[str]) -> str:
    """number, short (one line) or text (wrapped), by what the column holds."""
    if all(re.fullmatch(r"[+\-−]?[\d,.]*", c) for c in column):
        return "number"
    return "short" if max(map(len, column)) <= SHORT else "text"


def browser(count: int) -> str:
    """Where the script shows the samples."""
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
