"""The site's page of each method and their index: formula, use, kept tokens, cost, scores, options.

method_pages.yaml has the facts on methods that the code does not state. Numbers are those of committed results. The
picture of kept tokens is made with the tiny model while the site is built.
"""

from __future__ import annotations

import html
import importlib
import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from kept_tokens import RATIO, figure
from latex2mathml.converter import convert
from option_tables import of_text
from ziamath import zmath

from kvbench.base.conf import conf_dir, read_keys_with_comments
from kvbench.base.formatting import format_number, format_percent, with_interval
from kvbench.methods.core import registry
from kvbench.methods.core.base import Modifier
from kvbench.methods.core.lowrank import LowRankStage
from kvbench.methods.core.stage import Stage
from kvbench.plan import presets
from kvbench.report import writers
from kvbench.report.verdict import describe_size
from kvbench.store.labels import explain_budgets
from kvbench.suite import card, definition

ROOT = Path(__file__).parents[1]
RESULTS = "../results"
"""The results as pages of methods link to them."""
REPORT = ROOT / "results" / "methods.json"
"""The report of all methods on SmolLM2, as `run --json` printed it."""
SUITE = ROOT / "results" / "suite" / "retain-v1-mini" / "kvbench" / "results.jsonl"
"""The rows of the suite on SmolLM2."""
ARXIV = re.compile(r"arXiv (\d{4}\.\d{5})")
FORMULA_SIZE = 19
"""The size of a formula's letters in pixels."""
SYMBOLS = (
    "$n$ tokens have keys $k_j$, values $v_j$ and queries $q_i$ of $d$ channels in each of $H$ heads. $A_{i,j}$ is "
    "the attention that query $i$ pays to token $j$, after the softmax. $C$ is the budget in tokens, $w$ the window "
    "of last tokens that always stay, and $s_j$ the score of token $j$. $x$ is a number to store, $c$ its code, and "
    "$\\hat{x}$ the number that is read back."
)
"""The symbols that formulas share."""


def pages() -> dict[str, str]:
    """Return the page of each method and their index, by the name of the page."""
    texts = {"methods/index.md": _index()}
    for group in groups().values():
        for method in group["methods"]:
            texts[f"methods/{method}.md"] = _page(method)
    return texts


def navigation() -> list[dict[str, Any]]:
    """Return the navigation of the methods: their index, and their pages by kind."""
    entries: list[dict[str, Any]] = [{"All methods": "methods/index.md"}]
    for group in groups().values():
        pages_of_group = [{about["name"]: f"methods/{method}.md"} for method, about in group["methods"].items()]
        entries.append({group["title"]: pages_of_group})
    return entries


@cache
def groups() -> dict[str, Any]:
    """Return the kinds of methods with what method_pages.yaml says of each method. All methods stand there."""
    kinds: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
    described = [method for kind in kinds.values() for method in kind["methods"]]
    missing = set(registry.available()) ^ {"full", *described}
    if missing:
        raise ValueError(f"method_pages.yaml describes other methods than there are: {', '.join(sorted(missing))}")
    return kinds


def _described(method: str) -> dict[str, Any]:
    """Return what method_pages.yaml says of a method."""
    (found,) = [kind["methods"][method] for kind in groups().values() if method in kind["methods"]]
    return found


def _index() -> str:
    parts = [
        "# Methods",
        "This page lists the methods of kvbench, grouped by what they do. `+` combines methods "
        "(`method=snapkv+think`). A comma separates methods that you want to compare (`method=snapkv,h2o`). "
        "The page of a method has its formula, advice when to use it, the tokens that it keeps of "
        "one prompt, its cost and its options. "
        "*Size* says how many times smaller the method's cache is than the full cache, measured on "
        f"[SmolLM2]({RESULTS}/methods.txt) with the default options.",
    ]
    for group in groups().values():
        rows = []
        for method, about in group["methods"].items():
            # the name to type stands below the printed one, so that the table fits a phone
            link = f"[{about['name']}]({method}.md)\n`{method}`"
            rows.append((link, _about(method), _paper(method), _size(method)))
        table = writers.table(("method", "idea", "paper", "size"), rows)
        parts += [f"## {group['title']}", group["about"], table]
    parts += [
        "## Compare them",
        "[The suite](../suite.md) has five parts. It compares methods and controls at equal bytes ([the "
        f"results]({RESULTS}/suite/retain-v1-mini/kvbench/card.md)). [Methods and formats]({RESULTS}/comparison.md) "
        "has all scores on LongBench with their intervals. You can also run kvpress's presses "
        "([`method=kvpress:NAME`](../kvpress.md)), and [your own method](../own.md), which takes twelve lines of code.",
        "## Symbols",
        _with_math(SYMBOLS),
    ]
    return "\n\n".join(parts) + "\n"


def _page(method: str) -> str:
    """Return the page of one method."""
    about = _described(method)
    stage = _stage_class(method)
    module = inspect.getmodule(stage)
    parts = [
        f"# {about['name']}",
        " ".join((inspect.getdoc(module) or "").split()),
        "## When to use it",
        _with_math(about["when"]),
        f"```bash\n{_command(method)}\n```",
        *_budgets_in_words(method),
    ]
    if about.get("note"):
        parts.append(about["note"])
    parts += [
        "## Formula",
        "\n\n".join(map(_formula, about["formula"])),
        _with_math(about.get("where", "")),
        f'??? note "Symbols"\n\n    {_with_math(SYMBOLS)}',
        "### Details and variants",
        _docstring_as_markdown(inspect.getdoc(stage) or ""),
        "## The tokens that it keeps",
        _kept(method),
        "## What it costs",
        _cost(method),
        "## Scores on SmolLM2",
        _scores(method),
        "## Options",
        _options(method),
    ]
    settings = list(_preset_rows(method))
    if settings:
        parts += ["## What presets of papers set", writers.table(("preset", "value", "model", "source"), settings)]
    code = _indented(f"```python\n{inspect.getsource(stage).rstrip()}\n```")
    parts += ["## Its code", f'??? note "{stage.__module__}"\n\n{code}']
    return "\n\n".join(part for part in parts if part) + "\n"


def _stage_class(method: str) -> type[Stage]:
    module_name, _, class_name = registry.defaults(method)["_target_"].rpartition(".")
    return getattr(importlib.import_module(module_name), class_name)


def _about(method: str) -> str:
    """Return the first line of a method's file, without its name and source."""
    about = registry.path_of(method).read_text("utf-8").splitlines()[0].lstrip("# ").strip('"')
    about = re.sub(r" \((?:arXiv|https|MLSys)[^()]*\)\.?$", "", about)
    about = about.partition(": ")[2] or about
    return about[0].upper() + about[1:]


def _paper(method: str) -> str:
    """Return a link to a method's paper, or nothing if it has none on arXiv."""
    found = ARXIV.search(inspect.getdoc(inspect.getmodule(_stage_class(method))) or "")
    if not found:
        return ""
    return f"[{found[1]}](https://arxiv.org/abs/{found[1]})"


def _command(method: str) -> str:
    """Return a command that measures a method: alone, or behind the one that it changes."""
    words = [f"method={_runnable(method)}", *_budget(method)]
    return " ".join(["kvbench run", *words])


def _runnable(method: str) -> str:
    """Return a method as it can run: one that changes another stands behind it."""
    stage = registry.make_stage(method, registry.defaults(method))
    if isinstance(stage, Modifier):
        return f"{stage.decorates[0]}+{method}"
    return method


def _budget(method: str) -> list[str]:
    """Return the words that set a method's budget."""
    names = registry.knob_names(method)
    defaults = registry.defaults(method)
    words = []
    if "kv_ratio" in names or _runnable(method) != method:
        words.append(f"kv_ratio={RATIO:g}")
    if "ratio" in names:
        words.append(f"ratio={defaults['ratio']:g}")
    if "value_ratio" in names:
        words.append(f"value_ratio={defaults['value_ratio']:g}")
    return words


def _budgets_in_words(method: str) -> list[str]:
    """Return a sentence on each budget of a method's command; [] if it has none."""
    return [re.sub(r"(\w+): ", r"`\1=` is ", note) for note in explain_budgets([_command(method)])]


def _formula(latex: str) -> str:
    """Return a line of formulas as pictures (SVG). They need no font or script of the reader's, and wrap on a phone."""
    pictures = []
    for part in re.split(r",?\s*\\qquad\s*", latex):
        svg = zmath.Latex(part, size=FORMULA_SIZE, color="currentColor").svg()
        label = html.escape(part, quote=True)
        pictures.append(svg.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1))
    return f'<div class="formula">{"".join(pictures)}</div>'


def _with_math(text: str) -> str:
    """Return a text with its symbols between dollars as MathML."""
    # a browser shows single symbols well without a font for mathematics, and the span keeps them within their sentence
    return re.sub(r"\$([^$]+)\$", lambda match: f"<span>{convert(match[1])}</span>", text)


def _docstring_as_markdown(docstring: str) -> str:
    """Return a docstring as Markdown: its ``names`` as code, and lines of the form ``option: text`` as a list."""
    text = docstring.replace("``", "`")
    # a line that goes on below its option
    text = re.sub(r"\n +", " ", text)
    return re.sub(r"^([\w, ]+(?: `\w+`)?): ", r"\n- **\1**: ", text, flags=re.MULTILINE)


def _indented(text: str) -> str:
    return "\n".join("    " + line if line else line for line in text.splitlines())


def _kept(method: str) -> str:
    """Return the picture of the tokens that a method keeps of a prompt, or a sentence if it keeps all."""
    if issubclass(_stage_class(method), LowRankStage):
        return "It keeps every token of the prompt, as latents of lower rank in place of keys and values."
    return figure(_runnable(method), method)


@cache
def _rows() -> dict[str, dict[str, Any]]:
    """Return the rows of the report on SmolLM2 by method."""
    report = json.loads(REPORT.read_text("utf-8"))
    # a method that changes another is measured behind it: h2o+vatp is the row of vatp
    return {row["method"].split()[0].rpartition("+")[2]: row for row in report["rows"]}


def _size(method: str) -> str:
    row = _rows().get(method)
    if row is None or row.get("percent_of_full") is None:
        return "not measured"
    size = describe_size(_times_smaller(row)).replace(" ", "\u00a0")
    combination = row["method"].split()[0]
    if combination != method:
        # the other method makes it smaller
        size += f" (`{combination}`)"
    return size


def _times_smaller(row: dict[str, Any]) -> float:
    """Return the full cache's bytes over a row's, both at 16 bits."""
    return _rows()["full"]["percent_of_full"] / row["percent_of_full"]


def _cost(method: str) -> str:
    """Return a table of a method's bytes and its time of compression, as committed results have them."""
    row, full = _rows().get(method), _rows()["full"]
    if row is None or row.get("percent_of_full") is None:
        return "The cost has not been measured on SmolLM2 yet. `kvbench bench memory` prints the bytes for any model."
    written = row["method"]
    lines = [
        (
            f"cache of `{written}`",
            f"{format_number(row['percent_of_full'])} % of the full cache, at 16 bits "
            f"({describe_size(_times_smaller(row))})",
        ),
        ("tokens kept", format_percent(row["kept_percent"])),
        ("compression", f"{_seconds(row['compress_ms'])} a prompt"),
        ("reading the prompt, for comparison", f"{_seconds(row['prefill_ms'])}"),
    ]
    if row.get("attended_percent") is not None:
        lines.insert(2, ("tokens attended", format_percent(row["attended_percent"])))
    caveat = (
        f"Measured with SmolLM2-135M on prompts of at most 2,000 tokens, on two CPU cores ([all "
        f"methods]({RESULTS}/methods.txt)). 100 % are the full cache's keys and values. The full cache itself has "
        f"{format_number(full['percent_of_full'])} %, because it also stores positions. Times show only the order of "
        "magnitude: if several methods share some work, its time counts for the first of them. `kvbench bench time` "
        "measures one method at a time."
    )
    return writers.table(("", "measured"), lines) + "\n" + caveat


def _seconds(milliseconds: float) -> str:
    if milliseconds >= 1000:
        return f"{milliseconds / 1000:.1f} s"
    return f"{milliseconds:.0f} ms"


def _scores(method: str) -> str:
    """Return a method's scores on SmolLM2 beside the full cache's, with intervals."""
    parts = [*_suite(method), *_longbench(method)]
    return "\n\n".join(parts) or "Not measured yet."


def _longbench(method: str) -> Iterator[str]:
    """Yield a table of the scores on tasks of LongBench, with what it stands on."""
    row, full = _rows().get(method), _rows()["full"]
    if row is None or row.get("score_mean") is None:
        return
    heads = ["LongBench", *(cell["task"].rpartition("/")[2] for cell in full["cells"])]
    lines = [[name, *map(_score, r["cells"])] for name, r in (("full cache", full), (f"`{row['method']}`", row))]
    n = ", ".join(str(cell["n"]) for cell in full["cells"])
    yield writers.table(heads, lines)
    yield (
        f"Numbers of prompts, column by column: {n}. The question was part of the compressed prompt. Brackets have "
        f"95 % intervals. [The table of `make run-real`]({RESULTS}/run-real.txt) has other examples, up to 16 a task."
    )


def _suite(method: str) -> Iterator[str]:
    """Yield a table of what the method retains in each part of the suite, by budget, if the suite has it."""
    if not SUITE.exists():
        return
    rows = [json.loads(line) for line in SUITE.read_text(encoding="utf-8").splitlines()]
    parts = [part.name for part in definition.load("retain-v1-mini").parts]
    lines = []
    for row in rows:
        stages = row["name"].split(" ")[0].removesuffix("_h")
        if row["role"] == "full" or stages not in (method, _runnable(method)):
            continue
        cells = [f"`{row['name']}`", f"1/{row['budget']}", format_number(row["bytes"]), _retained(row)]
        lines.append([*cells, *(_retained(row["parts"].get(part)) for part in parts)])
    if lines:
        yield writers.table(["", "budget", "bytes %", "mean", *parts], lines)
        yield (
            f"Scores of [the suite]({RESULTS}/suite/retain-v1-mini/kvbench/card.md) ([what it measures](../suite.md)): "
            "100 means as good as the full cache, and 0 as good as random tokens with the same bytes. Brackets have "
            "95 % intervals."
        )


def _retained(score: Mapping[str, Any] | None) -> str:
    """Return what is retained in a part, or in the mean, with its interval."""
    if score is None:
        return "—"
    value = score["mean"] if "mean" in score else score["retained"]
    if value is None:
        return "—"
    return card.write_score(value, score["ci"])


def _score(cell: dict[str, Any]) -> str:
    """Return a score with its interval, if it has one."""
    return with_interval(cell["score"], cell.get("ci"), gap=" ")


def _options(method: str) -> str:
    """Return a table of a method's options from its file in conf/, or of the class's own defaults."""
    file = conf_dir() / "method" / f"{method}.yaml"
    if file.exists():
        return of_text(read_keys_with_comments(f"method/{method}"))
    rows = [(f"`{name}`", f"`{registry.defaults(method)[name]}`") for name in registry.knob_names(method)]
    return writers.table(("option", "default"), rows)


def _preset_rows(method: str) -> Iterator[Sequence[str]]:
    """Yield what presets of papers set of a method, with the source of each value."""
    prefix = f"method.{method}."
    for name in presets.available():
        for setting in presets.settings(name):
            if setting.key.startswith(prefix):
                value = f"`{setting.key.removeprefix(prefix)}={json.dumps(setting.value)}`"
                yield name, value, setting.model or "all", setting.source
