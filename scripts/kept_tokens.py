"""A picture of the tokens that a method keeps of one prompt, by layer and head, with axes and a legend."""

from __future__ import annotations

import html
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import kvbench
from kvbench.methods.core import registry
from kvbench.methods.core.prompt_cache import PromptCache

ROOT = Path(__file__).parents[1]
PROMPT = (
    "notes: the cold river shines slowly. a red boat turned near the town. the magic number of paris is 471. "
    "it was a calm night by the tower. the old bridge over the river is made of stone. "
    "question: what is the magic number of paris? answer: paris is"
)
ANSWER = "471"
RATIO = 0.25
PIXELS, GAP = 7, 5
"""Size of a token in a picture, and the space between layers."""
LEFT, TOP, BOTTOM = 64, 22, 40
"""Space for the names of layers, for the mark above the answer, and for the axis of positions."""
TICK = 20
"""Tokens between two numbers of the axis."""


def figure(method: str, stage: str) -> str:
    """Return what a method keeps of the prompt: a picture if it drops tokens, otherwise a sentence with its bytes.

    ``stage`` is the part of ``method`` whose options are set.
    """
    model, tokenizer, ids = _model()
    options: dict[str, Any] = {}
    if "kv_ratio" in registry.knob_names(stage):
        options["kv_ratio"] = RATIO
    if "window" in registry.knob_names(stage):
        # the default window is as long as a third of this prompt
        options["window"] = 4
    entry: Any = {"method": method, **options}
    if registry.make_stage(stage, registry.defaults(stage)).unbound:
        entry = kvbench.calibrate(model, tokenizer, entry, folder=ROOT / "build" / "calibration", samples=4)
    full, small = kvbench.prefill(model, ids, ["full", entry])
    share = f"{small.nbytes() / 1024:.1f} of {full.nbytes() / 1024:.1f} KiB"
    written = " ".join([f"method={method}", *(f"{name}={value}" for name, value in options.items())])
    if all(len(positions) == small.prompt_tokens for layer in small.layers for positions in layer.kept_positions()):
        exact = registry.defaults(stage).get("residual") or 0
        if exact >= small.prompt_tokens:
            return (
                f"`{written}` keeps every token. The newest {exact} tokens stay exact (`residual={exact}`), so it "
                f"packs nothing of this prompt of {small.prompt_tokens} tokens."
            )
        return f"With `{written}` it keeps every token of the prompt, in {share}."
    words = [tokenizer.decode([i]) for i in ids[0]]
    introduction = (
        f"The tiny model reads a prompt of {len(words)} tokens and is asked for the number {ANSWER}. `{written}` holds "
        f"{share}."
    )
    return f"{introduction}\n\n{drawing(small, words, method)}"


@cache
def _model() -> tuple[Any, Any, Any]:
    """Return the tiny model, its tokenizer and the token ids [1, n] of the prompt."""
    warnings.simplefilter("ignore")
    model, tokenizer = kvbench.load_model("tiny")
    return model, tokenizer, tokenizer(PROMPT, return_tensors="pt").input_ids


def drawing(kept: PromptCache, words: Sequence[str], method: str) -> str:
    """Return a picture (SVG) of the tokens that each layer and head keeps, and the prompt shaded by how many do."""
    n = kept.prompt_tokens
    right = LEFT + n * PIXELS
    parts: list[str] = []
    counts = [0] * n
    heads = 0
    y = TOP
    for number, layer in enumerate(kept.layers, start=1):
        top = y
        for positions in layer.kept_positions():
            heads += 1
            parts.append(f'<rect class="token" x="{LEFT}" y="{y}" width="{n * PIXELS}" height="{PIXELS - 1}"/>')
            for position in positions.tolist():
                counts[position] += 1
                x = LEFT + position * PIXELS
                parts.append(f'<rect class="kept" x="{x}" y="{y}" width="{PIXELS - 1}" height="{PIXELS - 1}"/>')
            y += PIXELS
        parts.append(f'<text x="{LEFT - 6}" y="{(top + y) / 2 + 3}" text-anchor="end">layer {number}</text>')
        y += GAP
    parts += [*_answer_mark(words, y), *_axis(n, y)]
    most = sorted(range(n), key=lambda i: -counts[i])[:5]
    seen = ", ".join(html.escape(words[i].strip()) for i in sorted(most))
    label = f"Tokens that {method} keeps of {n}, by layer and head; those that most heads keep: {seen}"
    picture = f'<svg viewBox="0 0 {right + 8} {y + BOTTOM}" role="img" aria-label="{label}">{"".join(parts)}</svg>'
    legend = (
        '<span class="key kept"></span> kept <span class="key token"></span> dropped. One row is one head. Frame: the '
        f"answer {ANSWER}."
    )
    shaded = "".join(
        f'<span style="--share:{count / heads:.2f}">{html.escape(word)}</span>'
        for count, word in zip(counts, words, strict=True)
    )
    scale = "".join(f'<span style="--share:{share / 100:.2f}"> {share} % </span>' for share in (0, 25, 50, 75, 100))
    return (
        f'<figure class="tokens">{picture}<figcaption>{legend}</figcaption>'
        f'<p class="prompt">{shaded}</p>'
        f'<figcaption>The prompt, shaded by the share of heads that keep a token: <span class="prompt">{scale}</span>'
        "</figcaption></figure>"
    )


def _answer_mark(words: Sequence[str], bottom: int) -> list[str]:
    """Return a frame around the tokens of the answer, with the answer above it."""
    text, first, last = "", None, 0
    start = "".join(words).index(ANSWER)
    for position, word in enumerate(words):
        begin, text = len(text), text + word
        if len(text) > start and begin < start + len(ANSWER):
            first = position if first is None else first
            last = position
    assert first is not None
    x, width = LEFT + first * PIXELS - 1, (last - first + 1) * PIXELS + 1
    return [
        f'<rect class="answer" x="{x}" y="{TOP - 3}" width="{width}" height="{bottom - GAP - TOP + 5}"/>',
        f'<text x="{x + width / 2}" y="{TOP - 7}" text-anchor="middle">{ANSWER}</text>',
    ]


def _axis(n: int, y: int) -> list[str]:
    """Return the axis of positions below the last row."""
    parts = []
    for token in sorted({1, *range(TICK, n + 1, TICK), n}):
        if n - TICK / 4 < token < n:
            # its number would touch the last one
            continue
        x = LEFT + (token - 0.5) * PIXELS
        parts.append(f'<line x1="{x}" y1="{y - 2}" x2="{x}" y2="{y + 3}"/>')
        parts.append(f'<text x="{x}" y="{y + 16}" text-anchor="middle">{token}</text>')
    middle = LEFT + n * PIXELS / 2
    parts.append(f'<text x="{middle}" y="{y + 35}" text-anchor="middle">position in the prompt, tokens</text>')
    return parts
