"""Compute what each method can save at all on released models, by formula: a page and a picture.

python scripts/memory_2026.py            write results/memory-2026.md, .png, .svg and .csv
python scripts/memory_2026.py --verify   fail if the committed page or numbers differ from what the formulas give

No checkpoint and no GPU is needed: conf/model states the shapes. The formulas are those of bench memory, which are held
to the storages of real caches on small models of each family.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import verification
from matplotlib.figure import Figure
from verification import Verification

from kvbench.audit.accounting import HALF, bytes_declared
from kvbench.base.conf import entries
from kvbench.base.errors import UsageError
from kvbench.kv.model_shape import Shape, from_entry
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.resolve import chain_of
from kvbench.report import looks, writers
from kvbench.report.table import Table

RESULTS = Path(__file__).resolve().parent.parent / "results"
PAGE, FIGURE = "memory-2026.md", "memory-2026"
GIB = 2**30
LENGTHS = (8192, 32768, 131072)
SHOWN_LENGTH = LENGTHS[-1]
MODELS = (
    "llama3.1-8b-instruct",
    "qwen3-8b",
    "minimax-m2",
    "gpt-oss-20b",
    "gpt-oss-120b",
    "gemma-3n-e4b-it",
    "gemma-4-26b-a4b-it",
    "llama-4-scout-17b-16e-instruct",
    "qwen3-next-80b-a3b",
    "qwen3.5-9b",
    "qwen3.5-35b-a3b",
    "granite-4.0-h-small",
    "nemotron-3-super-120b-a12b",
    "jamba-v0.1",
    "falcon-h1-7b-instruct",
    "deepseek-v3",
    "kimi-linear-48b-a3b-instruct",
)
"""Entries of conf/model: plain attention first, then local layers, layers with states, and latents."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """A method of the page. head: its words in the tables. colour_of: the method whose colour it has."""

    head: str
    entry: Mapping[str, object]
    colour_of: str

    @property
    def chain(self) -> Chain:
        return chain_of(dict(self.entry))


COLUMNS = (
    Column(head="SnapKV, a quarter of the tokens", entry={"method": "snapkv", "kv_ratio": 0.25}, colour_of="snapkv"),
    Column(head="SnapKV, a sixteenth", entry={"method": "snapkv", "kv_ratio": 0.0625}, colour_of="pyramidkv"),
    Column(head="fp8", entry={"method": "fp8"}, colour_of="fp8"),
    Column(head="q4_0", entry={"method": "q4_0"}, colour_of="q4_0"),
    Column(head="KIVI, 2 bits", entry={"method": "kivi"}, colour_of="kivi"),
    Column(head="SnapKV, a quarter, in fp8", entry={"method": "snapkv+fp8", "kv_ratio": 0.25}, colour_of="snapkv+fp8"),
)
"""A selection, a stronger one, three formats, and both at once. All have formulas that need no prompt."""


@dataclass(frozen=True, kw_only=True)
class ModelBytes:
    """The bytes of one model's cache at 16 bits after ``tokens`` tokens.

    full: the full cache. fixed: the part in which no method chooses tokens, windows and states. held: by the head of a
    column, without methods that have no meaning on the model.
    """

    model: str
    tokens: int
    full: int
    fixed: int
    held: Mapping[str, int]

    def record(self) -> dict[str, object]:
        """Return the numbers as a line of the CSV."""
        return {"model": self.model, "tokens": self.tokens, "full": self.full, "fixed": self.fixed} | dict(self.held)


def count(model: str, tokens: int) -> ModelBytes:
    """Return the bytes of one model's cache under all methods, by formula."""
    shape = from_entry(entries("model")[model]["shape"])
    held = {}
    for column in COLUMNS:
        try:
            column.chain.check_shape(shape)
        except UsageError:
            continue
        declared = bytes_declared(column.chain, shape, tokens, HALF)
        assert declared is not None, "a method whose size depends on the prompt has no place here"
        held[column.head] = declared.total
    return ModelBytes(
        model=model,
        tokens=tokens,
        full=shape.full_bytes(tokens, HALF),
        fixed=shape.local_bytes(tokens, HALF) + shape.state_bytes(HALF),
        held=held,
    )


def layers_in_words(shape: Shape) -> str:
    """Return which layers a method reaches."""
    if shape.own_values:
        latents = f"{shape.layers} of {shape.all_layers} hold latents"
        return latents if shape.keyless_layers else f"all {shape.layers} hold latents"
    if shape.has_states and not shape.keyless_layers:
        return f"all {shape.layers} hold keys and a state"
    if shape.keyless_layers:
        return f"{shape.layers} of {shape.all_layers} hold keys"
    if shape.sharing_layers:
        return f"{shape.layers} of {shape.all_layers} hold keys and attend everything"
    if shape.local_layers:
        return f"{shape.layers} of {shape.all_layers} attend everything"
    return f"all {shape.layers}"


def page() -> str:
    """Return the page in Markdown."""
    counted = {tokens: [count(model, tokens) for model in MODELS] for tokens in LENGTHS}
    longest = {row.model: row for row in counted[SHOWN_LENGTH]}
    shortest = {row.model: row for row in counted[LENGTHS[0]]}
    quarter, formats = COLUMNS[0].head, COLUMNS[3].head
    hybrid, plain = "nemotron-3-super-120b-a12b", "llama3.1-8b-instruct"
    parts = [
        f"# What a method can save at all on {len(MODELS)} released models\n",
        "`python scripts/memory_2026.py`\n",
        "**A method that keeps a quarter of the tokens makes the cache of Llama-3.1-8B "
        f"{_smaller(shortest[plain], quarter)} smaller, that of Nemotron-3-Super "
        f"{_smaller(shortest[hybrid], quarter)} at 8,192 tokens and {_smaller(longest[hybrid], quarter)} at 131,072.** "
        "Few layers of a hybrid hold keys. The states of Nemotron's other layers are "
        f"{100 * shortest[hybrid].fixed / shortest[hybrid].full:.0f} % of its full cache at 8,192 tokens, and no "
        "method compresses them. q4_0 makes Llama's cache "
        f"{_smaller(shortest[plain], formats)} smaller, and Nemotron's "
        f"{_smaller(shortest[hybrid], formats)} at 8,192 tokens and {_smaller(longest[hybrid], formats)} at 131,072.\n",
        "![Share of the full cache by model and method at 8,192 and at 131,072 tokens; of the grey part "
        "formats alone compress the windows. At the right the full cache's size]"
        f"({FIGURE}.png)\n",
    ]
    for tokens in reversed(LENGTHS):
        heads = ("model", "layers", "full cache, GiB", "fixed part, %", *(f"{c.head}, x smaller" for c in COLUMNS))
        rows = []
        for row in counted[tokens]:
            shape = from_entry(entries("model")[row.model]["shape"])
            smaller = []
            for column in COLUMNS:
                if column.head in row.held:
                    smaller.append(f"{row.full / row.held[column.head]:.2f}")
                else:
                    smaller.append("—")
            rows.append(
                (
                    row.model,
                    layers_in_words(shape),
                    f"{row.full / GIB:.3f}",
                    f"{100 * row.fixed / row.full:.1f}",
                    *smaller,
                )
            )
        parts.append(f"## {tokens:,} tokens\n")
        parts.append(writers.markdown(Table(heads, tuple(rows), left=2)))
    parts.append(
        "- One prompt at 16 bits a number, by formula: keys and values with all that a method stores beside them "
        "(scales, positions, counts). *x smaller* is the full cache's bytes over the method's. Both count states and "
        "windows.\n"
        "- The *fixed part* is the states of layers of linear attention or state space, and the windows of local "
        "layers. A number of a recurrent state counts four bytes, as in transformers and in Nemotron-3's config. In an "
        "engine with states of 16 bits it takes two.\n"
        "- Formats code the windows of local layers, too, as engines do (llama.cpp, vLLM); `local=exact` leaves them "
        "exact. KIVI, which codes groups of tokens, and methods that choose tokens leave windows as they are.\n"
        "- Tests compare the formulas with real caches of small models of each family (`tests/engine/test_states.py`, "
        "`tests/audit`). None of these checkpoints was run. Bytes say nothing about scores.\n"
        "- DeepSeek-V3 and Kimi-Linear hold one latent a token and layer for all heads. DeepSeek's 576 numbers stand "
        "for 40,960 of its heads' keys and values, so its cache is small without any method. A dash means that KIVI "
        "does not apply: it quantises keys and values by different rules, and a latent is both at once.\n"
        "- Shapes: `conf/model`.\n"
    )
    return "\n".join(parts)


def _smaller(row: ModelBytes, head: str) -> str:
    """Return how many times smaller a method makes a cache, in words."""
    return f"{row.full / row.held[head]:.1f} times"


def draw() -> Figure:
    """Return the picture: for the shortest and the longest prompt a line a model, each method in per cent of full."""
    figure = Figure(figsize=(10.0, 6.6), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    places = range(len(MODELS))
    for axes, tokens in zip(panels, (LENGTHS[0], LENGTHS[-1]), strict=True):
        rows = [count(model, tokens) for model in reversed(MODELS)]
        for place, row in enumerate(rows):
            axes.hlines(place, 0, 100, color="0.88", linewidth=1, zorder=1)
            axes.annotate(
                f"{row.full / GIB:.2f} GiB",
                (101.5, place),
                va="center",
                fontsize=8,
                color="0.35",
                annotation_clip=False,
            )
        fixed = [100 * row.fixed / row.full for row in rows]
        axes.barh(
            places, fixed, height=0.55, color="0.78", zorder=2, label="windows and states: formats alone code windows"
        )
        for column in COLUMNS:
            look = looks.look_of(column.colour_of)
            reached = [(place, row) for place, row in enumerate(rows) if column.head in row.held]
            axes.scatter(
                [100 * row.held[column.head] / row.full for _, row in reached],
                [place for place, _ in reached],
                facecolors="white" if look.hollow else look.color,
                edgecolors=look.color,
                marker=look.marker,
                s=32,
                label=column.head,
                zorder=5,
            )
        axes.set_xlim(0, 100)
        axes.set_xlabel(f"% of the full cache at {tokens:,} tokens")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(list(places), list(reversed(MODELS)))
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    figure.suptitle(
        "States, and windows where tokens are chosen, put much of a short prompt's cache out of reach",
        x=0.01,
        ha="left",
    )
    return figure


def numbers() -> str:
    """Return the numbers of all models, lengths and methods as CSV."""
    fields = ("model", "tokens", "full", "fixed", *(column.head for column in COLUMNS))
    return writers.csv(fields, (count(model, tokens).record() for model in MODELS for tokens in LENGTHS))


def verify(found: Verification) -> None:
    """Add the page and its numbers to ``found``."""
    remedy = "python scripts/memory_2026.py"
    found.add_text(RESULTS / PAGE, page, PAGE, remedy)
    found.add_text(RESULTS / f"{FIGURE}.csv", numbers, f"{FIGURE}.csv", remedy)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or verify the page; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verification.add_options(parser)
    args = parser.parse_args(arguments)
    if args.verify:
        return verification.verified(verify, args.without)
    (RESULTS / PAGE).write_text(page(), encoding="utf-8")
    (RESULTS / f"{FIGURE}.csv").write_text(numbers(), encoding="utf-8")
    with mpl.rc_context({"svg.hashsalt": "kvbench"}):
        figure = draw()
        for ending in ("png", "svg"):
            metadata = {"Date": None} if ending == "svg" else None
            figure.savefig(RESULTS / f"{FIGURE}.{ending}", dpi=150, metadata=metadata)
    return 0


if __name__ == "__main__":
    sys.exit(main())
