"""One self-contained HTML page of everything: tables, figures, claims, audit, single examples, provenance.

Nothing is fetched: styles, scripts and pictures are inside. Whatever comes from data is escaped; the sample browser
builds its elements from text alone.
"""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
VIEWS = (("both", "both"), ("ours", "ours"), ("published", "published"), ("delta", "difference"))


def build(title: str, sections: Sequence[tuple[str, str, str]], data: Sequence[Mapping[str, Any]] = ()) -> str:
    """The page: ``sections`` are (id, heading, HTML); ``data`` are the samples of the browser."""
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
        f'<body class="view-both">\n<h1>{html.escape(title)}</h1>\n<nav>{links} <span>cells show {views}</span></nav>\n'
        f'{body}\n<script type="application/json" id="samples-data">{held}</script>\n'
        f"<script>{script}</script>\n</body></html>\n"
    )


def tables(parts: Iterable[tuple[str, str]]) -> str:
    """Tables to unfold."""
    return "\n".join(f"<details><summary>{html.escape(name)}</summary>{part}</details>" for name, part in parts)


def figures(folder: Path) -> str:
    """Every PNG of ``folder`` inside the page, with its name."""
    found = sorted(folder.rglob("*.png"))
    if not found:
        return "<p>None yet: python -m kvbench plot.</p>"
    return "\n".join(_figure(path, str(path.relative_to(folder).with_suffix(""))) for path in found)


def _figure(path: Path, name: str) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    shown = html.escape(name)
    return (
        f"<details><summary>{shown}</summary><figure><img loading='lazy' alt='{shown}' "
        f"src='data:image/png;base64,{data}'><figcaption>{shown}</figcaption></figure></details>"
    )


def rows(headers: Sequence[str], body: Iterable[Sequence[Any]], classes: Iterable[str] = ()) -> str:
    """A sortable table of texts; ``classes`` are those of its rows."""
    head = "".join(f"<th>{html.escape(h)}</th>" for h in headers)
    kinds = iter(classes)
    lines = "".join(
        f'<tr class="{html.escape(next(kinds, ""))}">'
        + "".join(f'<td class="text">{html.escape(str(c))}</td>' for c in row)
        + "</tr>"
        for row in body
    )
    table = f'<table class="sortable"><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>'
    return f'<div class="scroll">{table}</div>'


def browser(count: int) -> str:
    """Where the script shows the samples."""
    if not count:
        return "<p>No examples were asked for (samples=).</p>"
    return (
        '<p><label>Example <select id="sample"></select></label> reference: <b id="reference"></b></p>'
        '<div class="scroll"><table><thead><tr><th>method</th><th>score</th><th>answer</th></tr></thead>'
        '<tbody id="answers"></tbody></table></div>'
        "<p>Tokens that the chosen method kept are shaded by the share of layers and heads that hold them.</p>"
        '<div id="prompt"></div>'
    )
