"""Long texts on which methods are compared with the full cache, token by token: one window of each document.

The first ``length`` tokens of a document are read and compressed, the next ``forced`` are fed to all and compared.
Windows of llama.cpp's perplexity tool instead cut a whole text, with BOS over the first token of each, and count the
predictions from the middle of a window on (github.com/ggml-org/llama.cpp, tools/perplexity). ``halves`` are the same
windows and predictions with the first half read exactly.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, islice
from types import MappingProxyType
from typing import Any

from kvbench.base.errors import UsageError, unknown
from kvbench.base.example import Example
from kvbench.tasks import tiny
from kvbench.tasks.base import Task, read_text
from kvbench.tasks.knobs import whole
from kvbench.tasks.source import Files

LENGTHS: Mapping[str, int] = MappingProxyType({"prefix": 2048, "llamacpp": 512, "halves": 512})
TINY_LENGTH = 512
TINY_PROMPT = 128
WIKITEXT = "wikitext2/test.txt"
ESSAYS = ("paul_graham", "state_union")
CONTEXTS = ("longbench_mini", "longbench")
ARTICLE = re.compile(r"(?m)^ = [^=].* = $")

Documents = Iterator[tuple[str, str]]
"""(name, text) of each document."""


@dataclass(frozen=True, kw_only=True)
class FidelityKnobs:
    """The knobs of conf/dataset/fidelity.yaml, which explains each of them."""

    windows: str
    length: int | None
    forced: int


def load(dataset: str, tokenizer: Any, files: Files, selection: Sequence[str], knobs: FidelityKnobs) -> list[Task]:
    """Return a task for each text selected; without a selection, for all whose files are there.

    Raises UsageError where a selected text is missing, or no document is long enough.
    """
    if knobs.windows not in LENGTHS:
        raise unknown(f"value of dataset.{dataset}.windows", knobs.windows, LENGTHS)
    whole(dataset, "forced", knobs.forced, 2, 1_000_000)
    if knobs.length is not None:
        whole(dataset, "length", knobs.length, 1 if knobs.windows == "prefix" else 4, 10_000_000)
    if tokenizer is None:
        raise UsageError(f"dataset {dataset} is cut to a number of tokens: it needs a model with a tokenizer")
    cut = _first_windows if knobs.windows == "prefix" else partial(_llamacpp_windows, knobs.windows == "halves")
    tasks = []
    for name in selection or TEXTS:
        if name not in TEXTS:
            raise unknown(f"task of dataset {dataset}", name, TEXTS)
        try:
            documents = [*TEXTS[name](files)]
        except UsageError:
            if selection:
                raise
            continue
        length = knobs.length or (TINY_LENGTH if name == "tiny" else LENGTHS[knobs.windows])
        examples = tuple(cut(f"{dataset}-{name}", tokenizer, documents, length, knobs.forced))
        if not examples:
            raise UsageError(f"dataset={dataset}/{name}: no text of {length + knobs.forced} tokens: lower length=")
        source = f"{name}: {len(examples)} windows, {length} tokens read"
        tasks.append(Task(f"{dataset}/{name}", examples, "perplexity", source, "language modelling", fidelity=True))
    return tasks


def _first_windows(
    prefix: str, tokenizer: Any, documents: Sequence[tuple[str, str]], length: int, tokens: int
) -> Iterator[Example]:
    """Yield the first window of each document that is long enough."""
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    size = length + tokens - len(bos)
    meta = {"window": length + tokens, "prefix": length, "chunk": 1, "divisor": float(tokens), "unit": "token"}
    for name, text in documents:
        # a token is seldom longer than eight characters
        ids = tokenizer.encode(text[: 8 * size], add_special_tokens=False)
        if len(ids) >= size:
            example_id = f"{prefix}-{length}-{name}"
            yield Example(example_id, "", (), tokens, tokens=(*bos, *ids[:size]), meta=meta)


def _llamacpp_windows(
    halves: bool, prefix: str, tokenizer: Any, documents: Sequence[tuple[str, str]], length: int, tokens: int
) -> Iterator[Example]:
    """Yield all windows of ``length`` tokens of the joined documents; the first half of each is not counted.

    Of ``halves`` it is read at once, else only the first token is. A window's document is the one that it begins in.
    Documents take turns, that a few windows are of many.
    """
    ids = tokenizer.encode("".join(text for _, text in documents), add_special_tokens=False)
    if len(ids) < 2 * length:
        raise UsageError(f"{prefix}: {len(ids)} tokens, less than two windows of {length}: lower length=")
    middle = length // 2
    begin = middle if halves else 1
    ends = [*accumulate(len(tokenizer.encode(text, add_special_tokens=False)) for _, text in documents)]
    meta = {
        **{"window": length, "prefix": begin, "chunk": 1, "unit": "token"},
        **{"divisor": float(length - middle - (not halves)), "scored_from": middle},
    }
    documents_of = [min(bisect_right(ends, i * length), len(documents) - 1) for i in range(len(ids) // length)]
    turns = [i - documents_of.index(place) for i, place in enumerate(documents_of)]
    for i in sorted(range(len(turns)), key=turns.__getitem__):
        window = ids[i * length : (i + 1) * length]
        if tokenizer.bos_token_id is not None:
            window[0] = tokenizer.bos_token_id
        place = {**meta, "document": documents[documents_of[i]][0]}
        yield Example(f"{prefix}-llamacpp-{length}-{i:06d}", "", (), length - begin, tokens=tuple(window), meta=place)


def _tiny(files: Files) -> Documents:
    """Yield texts that the tiny model knows: short prompts of its six tasks with their answers, in turns."""
    names = list(tiny.TASKS)
    for document in range(64):
        examples = (tiny.example(names[i % len(names)], TINY_PROMPT, document * 16 + i) for i in range(16))
        yield f"{document:03d}", " ".join(f"{e.prompt} {e.answers[0]}." for e in examples)


def _wikitext(files: Files) -> Documents:
    """Yield the articles of WikiText-2's test split, each with its heading."""
    path = files.path(WIKITEXT)
    text = read_text(path, f"dataset={files.dataset}")
    starts = [match.start() for match in ARTICLE.finditer(text)] or [0]
    for i, (start, end) in enumerate(zip(starts, [*starts[1:], len(text)], strict=True)):
        yield f"{i:03d}", text[start:end]


def _essays(files: Files) -> Documents:
    """Yield the files of the first folder of essays that is there."""
    there = [folder for folder in ESSAYS if files.root is not None and (files.root / folder).is_dir()]
    folder = files.path(there[0] if there else ESSAYS[0])
    for path in sorted(folder.glob("*.txt")):
        yield path.stem, read_text(path, f"dataset={files.dataset}")


def _contexts(files: Files) -> Documents:
    """Yield the contexts of LongBench's examples, task after task in turns."""
    there = [folder for folder in CONTEXTS if files.root is not None and (files.root / folder).is_dir()]
    folder = files.path(there[0] if there else CONTEXTS[0])
    rows = [
        [
            (f"{path.stem}-{i:03d}", json.loads(line)["context"])
            for i, line in enumerate(islice(path.open(encoding="utf-8"), 50))
        ]
        for path in sorted(folder.rglob("*.jsonl"))
    ]
    for turn in range(max(map(len, rows), default=0)):
        yield from (task[turn] for task in rows if turn < len(task))


TEXTS: Mapping[str, Callable[[Files], Documents]] = MappingProxyType(
    {"tiny": _tiny, "wikitext2": _wikitext, "essays": _essays, "longbench": _contexts}
)
