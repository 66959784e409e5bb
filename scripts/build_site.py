"""The generated pages of the documentation site (hooks of mkdocs, `make docs`); none of them is committed.

methods/            one page a method: paper, formula, knobs, the tokens that it keeps of one prompt, its row on SmolLM2
add.md, architecture.md    the worked examples, and the code map, of CONTRIBUTING.md
keys.md             the keys of `run`, as `run --help keys` prints them, and the knobs of datasets
papers.md           what `reference` prints; what-is-measured.md: what scripts/measured.py prints
results/            results/README.md with the tables and pictures that it links to
"""

from __future__ import annotations

import html
import importlib
import inspect
import json
import posixpath
import re
import subprocess
import sys
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import kvbench
from kvbench.base.conf import KEY_FILES, commented, conf_dir, entries
from kvbench.methods.core import registry
from kvbench.methods.core.base import Modifier
from kvbench.methods.core.lowrank import LowRankStage
from kvbench.methods.core.prompt_cache import PromptCache
from kvbench.papers.report import reference
from kvbench.papers.spec import catalogue
from kvbench.plan import presets
from kvbench.report import writers

ROOT = Path(__file__).parents[1]
ROWS = ROOT / "results" / "methods.json"
"""The report of all methods on SmolLM2, as `run --json` printed it."""
PROMPT = (
    "notes: the cold river shines slowly. a red boat turned near the town. the magic number of paris is 471. "
    "it was a calm night by the tower. the old bridge over the river is made of stone. "
    "question: what is the magic number of paris? answer: paris is"
)
RATIO = 0.25
SHOWN = (".md", ".png", ".txt", ".csv")
PIXELS, GAP = 6, 4
"""Size of a token in a picture of kept tokens, and the space between layers."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages to those of docs/."""
    sys.path.insert(0, str(ROOT / "scripts"))
    measured = importlib.import_module("measured").page()
    contributing = _sections((ROOT / "CONTRIBUTING.md").read_text("utf-8"))
    texts = {
        "add.md": "# Add something\n\n" + contributing["Seven things to add"],
        "architecture.md": f"# Code map\n\n{contributing['Code map']}\n\n## Four walks\n\n"
        + contributing["Four walks"],
        "keys.md": _keys(),
        "papers.md": reference.markdown([catalogue.paper(name) for name in catalogue.papers()]),
        "what-is-measured.md": measured,
        **_method_pages(),
    }
    published = _published()
    for name, text in texts.items():
        # links in these texts are written as seen from docs/ or from the root
        folder = "docs" if name in ("papers.md", "what-is-measured.md") else ""
        text = text if name.startswith("methods/") else _relinked(_fences(text), folder, name, published)
        files.append(File.generated(config, name, content=text))
    for name in published:
        if name.endswith(".md"):
            text = _relinked((ROOT / name).read_text("utf-8"), posixpath.dirname(name), name, published)
            files.append(File.generated(config, name.replace("README.md", "index.md"), content=text))
        else:
            files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def _published() -> tuple[str, ...]:
    """Return the names of the committed files of results/ that the site shows."""
    names = subprocess.run(["git", "ls-files", "results"], cwd=ROOT, text=True, capture_output=True, check=True).stdout
    return tuple(n for n in names.split() if n.endswith(SHOWN) and not n.startswith("results/cells/"))


def _sections(text: str) -> dict[str, str]:
    """Return the sections of a Markdown text by their headings of the second level."""
    parts = re.split(r"^## (.+)\n", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], (part.strip() for part in parts[2::2]), strict=True))


def _fences(text: str) -> str:
    """Return the text with code blocks that name a file (```python path) titled by it."""
    return re.sub(r"^```(\w+) (\S+)$", r'```\1 title="\2"', text, flags=re.MULTILINE)


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
            path = path.removeprefix("docs/").replace("reference.md", "papers.md")
        elif path == "CONTRIBUTING.md":
            path = "add.md"
        elif path in published:
            path = path.replace("README.md", "index.md")
        else:
            return f"{label.strip('!')}"
        path = posixpath.relpath(path, posixpath.dirname(page) or ".")
        return f"[{label}]({path}{hash_mark}{anchor})"

    return re.sub(r"\[([^\[\]]*)\]\(([^()\s]+)\)", link, text)


def _keys() -> str:
    """Return the page of all keys, in the text of conf/'s own files. Methods' knobs are on their own pages."""
    names = [*KEY_FILES, *(f"dataset/{name}" for name in entries("dataset"))]
    blocks = (f"```yaml conf/{name}.yaml\n{commented(name).strip()}\n```" for name in names)
    return "# Keys of run\n\nKnobs of methods are on [their pages](methods/index.md).\n\n" + "\n\n".join(blocks) + "\n"


def _method_pages() -> dict[str, str]:
    """Return the page of each method and their index, by name."""
    methods = [m for m in registry.available() if m != "full"]
    pages = {f"methods/{method}.md": _method_page(method) for method in methods}
    rows = [(f"[`{m}`]({m}.md)", _about(m), _row(m, short=True)) for m in methods]
    index = (
        "# Methods\n\nEach runs alone (`method=snapkv`) or joined with others (`method=snapkv+think`). Pictures show "
        f"what each keeps of the same prompt at `kv_ratio={RATIO:g}` on the tiny model; the last column is the mean on "
        f"SmolLM2-135M over the tasks of [its table]({posixpath.relpath('results/methods.txt', 'methods')}), with few "
        "examples and wide intervals.\n\n"
    )
    return {**pages, "methods/index.md": index + writers.table(("method", "", "SmolLM2"), rows)}


def _about(method: str) -> str:
    first = registry.path_of(method).read_text("utf-8").splitlines()[0]
    return first.lstrip("# ").strip('"')


def _method_page(method: str) -> str:
    """Return the page of one method."""
    module = importlib.import_module(registry.defaults(method)["_target_"].rpartition(".")[0])
    stage = getattr(module, registry.defaults(method)["_target_"].rpartition(".")[2])
    settings = []
    for name in presets.available():
        for setting in presets.settings(name):
            if setting.key.startswith(f"method.{method}."):
                knob = setting.key.removeprefix(f"method.{method}.")
                settings.append((name, f"`{knob}={setting.value}`", setting.model or "all", setting.source))
    file = conf_dir() / "method" / f"{method}.yaml"
    knobs = f"```yaml\n{file.read_text('utf-8').strip()}\n```" if file.exists() else "It has the knobs of its class."
    parts = [
        f"# {stage.__name__}",
        f"`method={method}`. {' '.join((inspect.getdoc(module) or '').split())}",
        "## Formula",
        _prose(inspect.getdoc(stage) or ""),
        "## Knobs and variants",
        knobs,
        "## The tokens that it keeps",
        _picture(method),
        "## On SmolLM2",
        _row(method, short=False),
    ]
    if settings:
        table = writers.table(("preset", "value", "model", "source"), settings)
        parts += ["## What presets of papers set", table.rstrip()]
    code = inspect.getsource(stage).rstrip()
    parts += ["## Its code", f'??? note "{stage.__module__}"\n\n' + _indented(f"```python\n{code}\n```")]
    return "\n\n".join(parts) + "\n"


def _prose(docstring: str) -> str:
    """Return a docstring as Markdown: its ``names`` as code, and lines of the form ``knob: text`` as a list."""
    text = docstring.replace("``", "`")
    text = re.sub(r"\n +", " ", text)  # a line that continues below its knob
    return re.sub(r"^([\w, ]+(?: `\w+`)?): ", r"\n- **\1**: ", text, flags=re.MULTILINE)


def _indented(text: str) -> str:
    return "\n".join("    " + line if line else line for line in text.splitlines())


@cache
def _model() -> tuple[Any, Any, Any]:
    """Return the tiny model, its tokenizer and the token ids [1, n] of the prompt."""
    warnings.simplefilter("ignore")
    model, tokenizer = kvbench.load_model("tiny")
    return model, tokenizer, tokenizer(PROMPT, return_tensors="pt").input_ids


def _picture(method: str) -> str:
    """Return a method's choice from the prompt: a picture if it drops tokens, otherwise a sentence with its bytes."""
    model, tokenizer, ids = _model()
    knobs = {"kv_ratio": RATIO} if "kv_ratio" in registry.knob_names(method) else {}
    knobs |= {"window": 4} if "window" in registry.knob_names(method) else {}
    stage = registry.make_stage(method, registry.defaults(method))
    if isinstance(stage, LowRankStage):
        return "It keeps every token of the prompt, as latents of lower rank in place of keys and values."
    method = f"{stage.decorates[0]}+{method}" if isinstance(stage, Modifier) else method
    entry: Any = {"method": method, **knobs}
    if stage.unbound:
        entry = kvbench.calibrate(model, tokenizer, entry, folder=ROOT / "build" / "calibration", samples=4)
    full, small = kvbench.prefill(model, ids, ["full", entry])
    share = f"{small.nbytes() / 1024:.1f} of {full.nbytes() / 1024:.1f} KiB"
    written = " ".join([f"method={method}", *(f"{k}={v}" for k, v in knobs.items())])
    if all(len(p) == small.prompt_tokens for layer in small.layers for p in layer.kept_positions()):
        return f"With `{written}` it keeps every token of the prompt, in {share}."
    words = [tokenizer.decode([i]) for i in ids[0]]
    return f"`{written}` holds {share} of this prompt, which the tiny model reads:\n\n" + drawing(small, words, method)


def drawing(kept: PromptCache, words: Sequence[str], method: str) -> str:
    """Return a picture (SVG) of the tokens that each layer and head keeps, and the prompt shaded by their number."""
    n, boxes, counts, y = kept.prompt_tokens, [], [0] * kept.prompt_tokens, 0
    for layer in kept.layers:
        for positions in layer.kept_positions():
            boxes.append(f'<rect class="token" x="0" y="{y}" width="{n * PIXELS}" height="{PIXELS - 1}"/>')
            for position in positions.tolist():
                counts[position] += 1
                boxes.append(
                    f'<rect class="kept" x="{position * PIXELS}" y="{y}" width="{PIXELS - 1}" height="{PIXELS - 1}"/>'
                )
            y += PIXELS
        y += GAP
    heads = sum(len(layer.kept_positions()) for layer in kept.layers)
    shaded = "".join(
        f'<span style="--share:{count / heads:.2f}">{html.escape(word)}</span>'
        for count, word in zip(counts, words, strict=True)
    )
    most = sorted(range(n), key=lambda i: -counts[i])[:5]
    seen = ", ".join(html.escape(words[i].strip()) for i in sorted(most))
    label = f"Tokens that {method} keeps of {n}, by layer and head; those that most heads keep: {seen}"
    picture = (
        f'<svg viewBox="0 0 {n * PIXELS} {y}" role="img" aria-label="{label}" style="min-width:{n * PIXELS}px">'
        f"{''.join(boxes)}</svg>"
    )
    caption = f"A row a head, {len(kept.layers)} layers; a column a token. Below: the darker, the more heads keep it."
    return (
        f'<figure class="tokens"><div class="scroll">{picture}</div><figcaption>{caption}</figcaption>'
        f'<p class="prompt">{shaded}</p></figure>'
    )


@cache
def _rows() -> dict[str, Any]:
    """Return the rows of the report on SmolLM2 by method."""
    report = json.loads(ROWS.read_text("utf-8"))
    # a method that changes another is measured behind it: the row of vatp is h2o+vatp
    return {row["method"].split()[0].rpartition("+")[2]: row for row in report["rows"]}


def _row(method: str, short: bool) -> str:
    """Return a method's scores on SmolLM2: their mean, or a table with intervals, beside the full cache's."""
    row, full = _rows().get(method), _rows()["full"]
    if row is None or row.get("score_mean") is None:
        return "" if short else "Not measured yet."
    if short:
        return f"{row['score_mean']:.1f} at {row['percent_of_full']:.0f} %"
    heads = [""]
    heads += [c["task"].rpartition("/")[2] for c in full["cells"]]
    heads.append("% of full")
    rows = []
    for name, r in (("full", full), (method, row)):
        cells = [name]
        cells += [_score(c) for c in r["cells"]]
        cells.append(f"{r['percent_of_full']:.1f}")
        rows.append(cells)
    n = ", ".join(str(c["n"]) for c in full["cells"])
    text = writers.table(heads, rows)
    return f"{text}\nn = {n} examples; 95 % bootstrap intervals. % of full: bytes held, at 16 bits."


def _score(cell: dict[str, Any]) -> str:
    """Return a cell's score with its interval, if it has one."""
    interval = " [{:.0f}, {:.0f}]".format(*cell["ci"]) if cell.get("ci") else ""
    return f"{cell['score']:.1f}{interval}"
