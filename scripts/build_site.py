"""The generated pages of the documentation site (hooks of mkdocs, `make docs`); none of them is committed.

methods/                   one page a method and their index (method_pages.py)
papers/                    one page a paper and their index (paper_pages.py)
keys.md                    the options of `run` and of datasets (option_tables.py)
leaderboard.md             the rows of committed suites (suite_pages.py)
what-is-measured.md        the datasets, prompt formats, metrics and models (measured.py)
add.md, architecture.md    the worked examples, and the code map, of CONTRIBUTING.md
results/                   results/README.md with the pages, tables and pictures that it links to
"""

from __future__ import annotations

import functools
import json
import logging
import posixpath
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

# mkdocs loads this file by its path; the modules beside it are found by this
sys.path.insert(0, str(Path(__file__).parent))

import measured
import method_pages
import option_tables
import paper_pages
import suite_pages

from kvbench.papers.spec import catalogue

ROOT = Path(__file__).parents[1]
SHOWN = (".md", ".png", ".txt", ".csv")
GENERATED = ("methods/", "papers/")
"""Pages whose links are written as the site has them."""
PAGE_OF = {
    "CONTRIBUTING.md": "add.md",
    "conf/keys.yaml": "keys.md",
    "conf/method": "methods/index.md",
    "conf/dataset": "what-is-measured.md",
    "results/suite": suite_pages.PAGE,
}
"""The page of the site for a file or folder of the repository, to which the links of docs/ point."""
FROM_ROOT = ("add.md", "architecture.md", suite_pages.PAGE)
"""Pages whose links are written as seen from the root."""
WEIGHTS = {"methods/": 4, "papers/": 2, "results/claims": 0.5}
"""The weight in the search of pages by the beginning of their name; others have 1."""
TABLES = ("results/tables/", "results/tiny/")
"""Pages of generated tables. They need the space of both sidebars, and the search leaves them out."""
SEARCH = "assets/javascripts/workers/search.*.js"
LUNR_STATE = re.compile(r"(\w+)=\1\+\w+\+\w+\.id\b")
"""Where lunr 2.3.9 writes a state of its word graph as text: it adds a letter and the id of the next state.

States of equal text become one. Without a separator behind the id, states differ and have equal texts where digits are
letters. Pages are full of numbers, so that some words were not found.
"""
CLAIMS = "results/claims.md"
TABLE_OF_PAPER = re.compile(rf"results/(?:tables|tiny)/({'|'.join(catalogue.paper_ids())})-(\d+)\.md")
"""Pages of a paper's table: the paper, and the number of the table."""
TABLE_OF_TINY = re.compile(r"results/tiny/tiny-([\w-]+)\.md")
"""Pages of a measurement on the tiny model: what is varied."""
NOT_FOUND = "404.html"
PARAGRAPH = re.compile(r"<p>((?:(?!</?p>).)*)</p>", re.DOTALL)
FIELD = re.compile(r"(?=^\w+(?:, \w+)*: )", re.MULTILINE)
"""The beginning of a line of a docstring that is about a field: its name and a colon."""
TABS = {"METHODS": method_pages.navigation, "PAPERS": paper_pages.navigation}
"""The names in the navigation of mkdocs.yml that stand for generated pages."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages of methods and papers into the navigation."""
    logging.getLogger("jieba").setLevel(logging.WARNING)
    config.nav = _with_pages(config.nav or [])
    return config


def _with_pages(entries: list[object]) -> list[object]:
    """Return entries of the navigation with the names of TABS replaced by the pages for which they stand."""
    filled: list[object] = []
    for entry in entries:
        if isinstance(entry, str) and entry in TABS:
            filled += TABS[entry]()
        elif isinstance(entry, dict):
            for title, below in entry.items():
                filled.append({title: _with_pages(below) if isinstance(below, list) else below})
        else:
            filled.append(entry)
    return filled


def _contributing_pages() -> dict[str, str]:
    """Return the pages that are sections of CONTRIBUTING.md, by name."""
    contributing = _sections((ROOT / "CONTRIBUTING.md").read_text("utf-8"))
    paths = "Four paths through the code"
    return {
        "add.md": f"# Add something\n\n{contributing['Seven things to add']}",
        "architecture.md": f"# Code map\n\n{contributing['Code map']}\n\n## {paths}\n\n{contributing[paths]}",
    }


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages to those of docs/."""
    texts = {
        **_contributing_pages(),
        "keys.md": option_tables.page(),
        "what-is-measured.md": measured.page(),
        suite_pages.PAGE: suite_pages.page(),
        **paper_pages.pages(),
        **method_pages.pages(),
    }
    published = _published()
    for name, text in texts.items():
        if name.startswith(GENERATED):
            files.append(File.generated(config, name, content=_with_front_matter(text, name)))
            continue
        # these texts are written as seen from docs/ or from the root
        folder = "" if name in FROM_ROOT else "docs"
        files.append(File.generated(config, name, content=_relinked(_fences(_lists(text)), folder, name, published)))
    for name in published:
        if name.endswith(".md"):
            text = _introduced(_lists((ROOT / name).read_text("utf-8")), name)
            text = _relinked(text, posixpath.dirname(name), name, published)
            page = name.replace("README.md", "index.md")
            files.append(File.generated(config, page, content=_with_front_matter(text, page)))
        else:
            files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the text of a file of docs/ with its links to committed results pointing to the site's pages."""
    name = page.file.src_uri
    if page.file.generated_by is not None:
        return markdown
    return _relinked(markdown, "docs", name, _published())


def _with_front_matter(text: str, name: str) -> str:
    """Return the text of a page with its weight in the search; one of TABLES is left out of it and has the whole width.

    Pages about a thing come before tables that name it.
    """
    lines = []
    for start, weight in WEIGHTS.items():
        if name.startswith(start):
            lines += ["search:", f"  boost: {weight}"]
    if name.startswith(TABLES):
        lines += ["search:", "  exclude: true", "hide: [navigation, toc]"]
    if not lines:
        return text
    return "\n".join(["---", *lines, "---", "", text])


def _introduced(text: str, name: str) -> str:
    """Return the text of a page of results that a command wrote, with a line that says what the page is for."""
    if name == CLAIMS:
        return (
            "# Claims of the papers, tested\n\nEach row has a claim in the paper's own words, its test, and what two "
            "models show. [How claims are tested](measured.md#what-the-papers-claim), and [all verdicts of a "
            f"paper](../docs/papers/index.md).\n\n{paper_pages.plain(text)}"
        )
    title, _, rest = text.partition("\n")
    of_paper, of_tiny = TABLE_OF_PAPER.fullmatch(name), TABLE_OF_TINY.fullmatch(name)
    if of_paper:
        paper, number = of_paper.groups()
        link = f"[{catalogue.read_paper(paper).name}](../../docs/papers/{paper}.md)"
        about = (
            f"This is table {number} of {link} as kvbench measures it. The notes below the table explain its entries."
        )
        if title.endswith("as printed"):
            about = f"This is table {number} of {link} as the paper prints it."
        return f"{title}\n\n{about}\n{rest}"
    if of_tiny:
        about = "This is a measurement on the tiny model. [Another page](../tiny.md) sums up all of them."
        return f"# The tiny model: {of_tiny[1].replace('-', ', ')}\n\n{about}\n{rest}"
    return text


@functools.cache
def _published() -> tuple[str, ...]:
    """Return the names of the committed files of results/ that the site shows."""
    names = subprocess.run(["git", "ls-files", "results"], cwd=ROOT, text=True, capture_output=True, check=True).stdout
    return tuple(n for n in names.split() if n.endswith(SHOWN) or n.startswith(("results/suite/", "results/gpu/")))


def on_post_template(output_content: str, *, template_name: str, config: MkDocsConfig) -> str:
    """Return a page that belongs to no text of docs/. That for missing pages works at any address and from a folder."""
    if template_name != NOT_FOUND:
        return output_content
    page = output_content
    # mkdocs writes links from the root of a server, where the site need not be. The base is found when the page opens:
    # the folder of this file, or the one above the folder of the missing page
    folders = "assets|methods|notebooks|papers|results|search"
    base = (
        "<script>{const base = document.createElement('base'), path = location.pathname;"
        f"base.href = path.endsWith('/{NOT_FOUND}') ? path.slice(0, -{len(NOT_FOUND)})"
        f" : path.replace(/^(.*\\/)(?:{folders})\\/.*|[^/]*$/, '$1');"
        "document.head.prepend(base);}</script>"
    )
    page = page.replace("<head>", f"<head>{base}", 1)
    page = re.sub(r'(href|src)="/\.?"', r'\1="index.html"', page)
    page = re.sub(r'(href|src)="/(?=[^/])', r'\1="', page)
    page = page.replace('new URL("/",location)', 'new URL(".",document.baseURI)')
    page = re.sub(r'(<script id="__config"[^>]*>)(.*?)(</script>)', _rebased, page, count=1, flags=re.DOTALL)
    page = page.replace("<title>kvbench</title>", "<title>Page not found - kvbench</title>")
    return page.replace(
        "<h1>404 - Not found</h1>",
        "<h1>Page not found</h1><p>The site has no page at this address. Search for it above, or begin at the "
        '<a href="index.html">home page</a>, the <a href="guide.html">guide</a>, the <a href="methods/index.html">'
        'methods</a> or the <a href="results/index.html">findings</a>.</p>',
    )


def on_post_build(config: MkDocsConfig) -> None:
    """Put the separator that lunr lacks into the site's search (LUNR_STATE)."""
    (worker,) = Path(config.site_dir).glob(SEARCH)
    code, count = LUNR_STATE.subn(r'\g<0>+","', worker.read_text("utf-8"))
    if count != 1:
        raise PluginError(f"{worker.name} has another lunr: mend LUNR_STATE in scripts/build_site.py")
    worker.write_text(code, "utf-8")


def on_page_content(html: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return a page with the fields of docstrings as lists. Markdown joins their lines to one paragraph."""
    if "doc-contents" not in html:
        return html
    return PARAGRAPH.sub(_fields, html)


def _fields(match: re.Match[str]) -> str:
    """Return a paragraph whose lines are about fields as a list, and any other as it is."""
    fields = FIELD.split(match[1])
    if fields[0] or len(fields) < 3:
        return match[0]
    items = (re.sub(r"^([^:]+): ", r"<strong>\1</strong>: ", field.strip()) for field in fields[1:])
    return f"<ul>{''.join(f'<li>{item}</li>' for item in items)}</ul>"


def _rebased(match: re.Match[str]) -> str:
    """Return the theme's settings followed by a script that puts the base of the page into them."""
    opened, settings, closed = match.groups()
    values = json.loads(settings)
    values.update(base=".", search=values["search"].lstrip("/"))
    script = (
        "<script>{const config = document.getElementById('__config'), values = JSON.parse(config.textContent);"
        "for (const key of ['base', 'search']) values[key] = new URL(values[key], document.baseURI).href;"
        "config.textContent = JSON.stringify(values);}</script>"
    )
    return f"{opened}{json.dumps(values)}{closed}{script}"


def _sections(text: str) -> dict[str, str]:
    """Return the sections of a Markdown text by their headings of the second level."""
    parts = re.split(r"^## (.+)\n", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], (part.strip() for part in parts[2::2]), strict=True))


def _fences(text: str) -> str:
    """Return the text with code blocks that name a file (```python path) titled by it."""
    return re.sub(r"^```(\w+) (\S+)$", r'```\1 title="\2"', text, flags=re.MULTILINE)


def _lists(text: str) -> str:
    """Return the text with its lists as the site's Markdown reads them.

    GitHub lets a list begin below a line of text, the site only below an empty line. An item that begins with the star
    of a footnote would be a list in the list.
    """
    item = re.compile(r"(\d+\.|-) ")
    lines: list[str] = []
    in_code = False
    for line in text.split("\n"):
        if line.startswith("```"):
            in_code = not in_code
        if item.match(line) and not in_code:
            # an item may follow another, or the indented lines of another
            if lines and lines[-1] and not item.match(lines[-1]) and not lines[-1].startswith(" "):
                lines.append("")
            line = line.replace("- * ", "- \\* ", 1)
        lines.append(line)
    return "\n".join(lines)


def _relinked(text: str, folder: str, page: str, published: Sequence[str]) -> str:
    """Return the text of a file in ``folder`` with its relative links pointing to the site, as seen from ``page``.

    A link to a file that the site lacks (a source file) becomes the plain name.
    """

    def link(match: re.Match[str]) -> str:
        label, target = match.groups()
        if re.match(r"[a-z]+:|#", target):
            return match[0]
        path, hash_mark, anchor = target.partition("#")
        path = posixpath.normpath(posixpath.join(folder, path))
        if f"{path}/README.md" in published:
            path = f"{path}/README.md"
        if path.startswith("docs/"):
            path = path.removeprefix("docs/")
        elif path in PAGE_OF:
            path = PAGE_OF[path]
        elif path in published:
            path = path.replace("README.md", "index.md")
        else:
            return f"{label.strip('!')}"
        path = posixpath.relpath(path, posixpath.dirname(page) or ".")
        return f"[{label}]({path}{hash_mark}{anchor})"

    return re.sub(r"\[([^\[\]]*)\]\(([^()\s]+)\)", link, text)
