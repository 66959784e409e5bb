"""Texts on which methods are compared with the full cache, token by token. The option ``windows`` cuts them.

``windows=prefix`` takes one window of each document. Its first ``length`` tokens are read and compressed, and the next
``forced`` tokens are fed to all methods and compared.

``windows=llamacpp`` cuts a whole text as llama.cpp's perplexity tool does, with BOS over the first token of each
window. Predictions count from the middle of a window on (github.com/ggml-org/llama.cpp, tools/perplexity).

``windows=second_half`` takes llama.cpp's windows and predictions, but reads the first half of each window exactly.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvbench.base.errors import UsageError, unknown
from kvbench.base.example import Example, ScoredText
from kvbench.tasks import tiny
from kvbench.tasks.base import LoadContext, Task, read_text
from kvbench.tasks.knobs import check_whole
from kvbench.tasks.source import Files

# the length of a window in tokens by the value of ``windows``; llama.cpp's tables are made with a context of 512
LENGTHS: Mapping[str, int] = MappingProxyType({"prefix": 2048, "llamacpp": 512, "second_half": 512})
OLD_WINDOWS: Mapping[str, str] = MappingProxyType({"halves": "second_half"})
"""Names of windows in earlier versions, which are still accepted."""
TINY_LENGTH = 512
"""The tokens of a window of the tiny model's text."""
TINY_PROMPT = 128
"""The tokens of each prompt in that text."""
TINY_DOCUMENTS = 64
"""The number of the tiny model's documents."""
TINY_SENTENCES = 16
"""The number of prompts with their answers in each of the tiny model's documents."""
MOST_CONTEXTS = 50
"""The most contexts of a LongBench task. A run takes 20 documents by default, and LongBench has 200 long ones."""
WIKITEXT = "wikitext2/test.txt"
# the folders that may hold essays, or LongBench's tasks; the first that exists is taken
ESSAYS = ("paul_graham", "state_union")
CONTEXTS = ("longbench_mini", "longbench")
# the heading of an article in WikiText: one equals sign on each side, since headings of sections have more
ARTICLE = re.compile(r"(?m)^ = [^=].* = $")

Documents = Iterator[tuple[str, str]]
"""(name, text) of each document."""


@dataclass(frozen=True, kw_only=True)
class FidelityKnobs:
    """The knobs of conf/dataset/fidelity.yaml, which explains each of them."""

    windows: str
    length: int | None
    forced: int


def load(context: LoadContext, **entry: Any) -> list[Task]:
    """Return a task for each selected text. Without a selection, return one for each text whose files exist.

    Raises UsageError if a selected text is missing, or no document is long enough.
    """
    knobs = FidelityKnobs(**entry)
    knobs = replace(knobs, windows=OLD_WINDOWS.get(knobs.windows, knobs.windows))
    dataset, files, selection = context.dataset, context.files, context.selection
    tokenizer = context.tokenizer
    _check_knobs(dataset, knobs)
    if tokenizer is None:
        raise UsageError(f"dataset {dataset} is cut to a number of tokens: it needs a model with a tokenizer")
    tasks = []
    for name in selection or TEXTS:
        if name not in TEXTS:
            raise unknown(f"task of dataset {dataset}", name, TEXTS)
        try:
            documents = list(TEXTS[name](files))
        except UsageError:
            # a run of all texts skips absent ones; a named text must not be left out
            if selection:
                raise
            continue
        usual_length = TINY_LENGTH if name == "tiny" else LENGTHS[knobs.windows]
        length = knobs.length or usual_length
        examples = tuple(_cut_windows(f"{dataset}-{name}", tokenizer, documents, knobs, length))
        if not examples:
            raise UsageError(f"dataset={dataset}/{name}: no text of {length + knobs.forced} tokens: lower length=")
        task = Task(
            id=f"{dataset}/{name}",
            examples=examples,
            metric="perplexity",
            source=f"{name}: {len(examples)} windows, {length} tokens read",
            category="language modelling",
            fidelity=True,
        )
        tasks.append(task)
    return tasks


def _check_knobs(dataset: str, knobs: FidelityKnobs) -> None:
    """Raise UsageError for unknown windows, and for impossible numbers of tokens."""
    if knobs.windows not in LENGTHS:
        raise unknown(f"value of dataset.{dataset}.windows", knobs.windows, LENGTHS)
    check_whole(dataset, "forced", knobs.forced, least=2, most=1_000_000)
    if knobs.length is not None:
        # both halves of llama.cpp's windows need tokens: the first is read, the second is predicted
        least_length = 1 if knobs.windows == "prefix" else 4
        check_whole(dataset, "length", knobs.length, least=least_length, most=10_000_000)


def _cut_windows(
    prefix: str, tokenizer: Any, documents: Sequence[tuple[str, str]], knobs: FidelityKnobs, length: int
) -> Iterator[Example]:
    """Return an iterator over the windows of the documents (name, text), as ``knobs.windows`` cuts them.

    prefix: the beginning of a window's id.
    length: the tokens of a window. For ``windows=prefix``, ``knobs.forced`` tokens come in addition.
    """
    if knobs.windows == "prefix":
        return _cut_first_windows(prefix, tokenizer, documents, length, forced=knobs.forced)
    first_half_exact = knobs.windows == "second_half"
    return _cut_llamacpp_windows(prefix, tokenizer, documents, length, first_half_exact=first_half_exact)


def _cut_first_windows(
    prefix: str, tokenizer: Any, documents: Sequence[tuple[str, str]], length: int, *, forced: int
) -> Iterator[Example]:
    """Yield the first window of each document (name, text) that is long enough.

    prefix: the beginning of a window's id.
    length: the tokens of a window that are read, BOS included.
    forced: the tokens behind them that are compared.
    """
    bos = []
    if tokenizer.bos_token_id is not None:
        bos = [tokenizer.bos_token_id]
    size = length + forced - len(bos)  # the tokens of the document in a window
    meta = {"window": length + forced, "unit": "token"}
    for name, text in documents:
        # tokens have fewer than eight characters on average, so the rest of a long text need not be tokenised
        ids = tokenizer.encode(text[: 8 * size], add_special_tokens=False)
        if len(ids) >= size:
            yield Example(
                id=f"{prefix}-{length}-{name}",
                prompt="",
                answers=(),
                max_new_tokens=forced,
                scored=ScoredText(tuple(bos + ids[:size]), prefix=length, divisor=float(forced)),
                meta=meta,
            )


def _cut_llamacpp_windows(
    prefix: str, tokenizer: Any, documents: Sequence[tuple[str, str]], length: int, *, first_half_exact: bool
) -> Iterator[Example]:
    """Yield all windows of ``length`` tokens of the joined documents. Predictions in their first halves do not count.

    prefix: the beginning of a window's id.
    length: the tokens of a window.
    first_half_exact: True if the first half of a window is read at once, and so exactly; False if only its first token
        is.

    Windows of different documents take turns, so that a limit of a few windows covers many documents. Raises UsageError
    for a text of less than two windows.
    """
    ids = tokenizer.encode("".join(text for _, text in documents), add_special_tokens=False)
    if len(ids) < 2 * length:
        raise UsageError(f"{prefix}: {len(ids)} tokens, less than two windows of {length}: lower length=")
    middle = length // 2
    if first_half_exact:
        # the first half is read, and all tokens of the second half are predicted and count
        read_tokens, counted = middle, length - middle
    else:
        # all tokens but the first are predicted; llama.cpp counts n - n / 2 - 1 of them in a window of n tokens
        read_tokens, counted = 1, length - middle - 1
    document_numbers = _find_documents_of_windows(tokenizer, documents, length, windows=len(ids) // length)
    for i in _interleave(document_numbers):
        window = ids[i * length : (i + 1) * length]
        if tokenizer.bos_token_id is not None:
            # llama.cpp writes BOS over the first token, so windows of a text do not shift
            window[0] = tokenizer.bos_token_id
        document, _ = documents[document_numbers[i]]
        yield Example(
            id=f"{prefix}-llamacpp-{length}-{i:06d}",
            prompt="",
            answers=(),
            max_new_tokens=length - read_tokens,
            scored=ScoredText(
                tuple(window), prefix=read_tokens, divisor=float(counted), scored_from=middle, document=document
            ),
            meta={"window": length, "unit": "token"},
        )


def _find_documents_of_windows(
    tokenizer: Any, documents: Sequence[tuple[str, str]], length: int, *, windows: int
) -> list[int]:
    """Return, for each of the ``windows`` windows of ``length`` tokens, the number of the document in which it begins.

    documents: (name, text) of each document; the windows are cut from their joined texts.
    """
    # the end of each document in tokens; joined texts may have one token less where two documents meet
    ends = list(accumulate(len(tokenizer.encode(text, add_special_tokens=False)) for _, text in documents))
    numbers = []
    for i in range(windows):
        start = i * length
        # the number of documents that end up to the window's start; since ``ends`` may be a few tokens off, the last
        # window could otherwise begin behind all documents
        numbers.append(min(bisect_right(ends, start), len(documents) - 1))
    return numbers


def _interleave(document_numbers: Sequence[int]) -> list[int]:
    """Return the indices of windows so that documents take turns, given the number of each window's document.

    The first window of every document comes first, then the second of every document, and so on.
    """
    windows_of_document: Counter[int] = Counter()
    # turns[i]: how many windows of the same document stand before window i
    turns = []
    for number in document_numbers:
        turns.append(windows_of_document[number])
        windows_of_document[number] += 1
    # sorting keeps the order of windows with equal turns
    return sorted(range(len(turns)), key=turns.__getitem__)


def _make_tiny_texts(_files: Files) -> Documents:
    """Yield texts that the tiny model knows: short prompts of its six tasks, taken in turns, with their answers.

    No file is read, but every function in TEXTS has this argument.
    """
    for document in range(TINY_DOCUMENTS):
        yield f"{document:03d}", _make_tiny_text(document)


# cached, since a suite asks for the same texts once for every plan of it
@lru_cache(maxsize=TINY_DOCUMENTS)
def _make_tiny_text(document: int) -> str:
    names = list(tiny.TASKS)
    sentences = []
    for i in range(TINY_SENTENCES):
        # every prompt has an index of its own, so that none occurs twice
        index = document * TINY_SENTENCES + i
        example = tiny.make_example(names[i % len(names)], TINY_PROMPT, index)
        sentences.append(f"{example.prompt} {example.answers[0]}.")
    return " ".join(sentences)


def _read_wikitext_articles(files: Files) -> Documents:
    path = files.path(WIKITEXT)
    text = read_text(path, f"dataset={files.dataset}")
    # a text without headings is one article
    starts = [match.start() for match in ARTICLE.finditer(text)] or [0]
    ends = starts[1:] + [len(text)]
    for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
        yield f"{i:03d}", text[start:end]


def _read_essays(files: Files) -> Documents:
    """Yield the essays of the first existing folder of ESSAYS."""
    folder = _find_first_folder(files, ESSAYS)
    for path in sorted(folder.glob("*.txt")):
        yield path.stem, read_text(path, f"dataset={files.dataset}")


def _read_longbench_contexts(files: Files) -> Documents:
    """Yield the contexts of LongBench's examples, at most MOST_CONTEXTS of a task. The tasks take turns."""
    folder = _find_first_folder(files, CONTEXTS)
    contexts_by_task = []
    for path in sorted(folder.rglob("*.jsonl")):
        contexts = []
        with path.open(encoding="utf-8") as lines:
            for i, line in enumerate(islice(lines, MOST_CONTEXTS)):
                contexts.append((f"{path.stem}-{i:03d}", json.loads(line)["context"]))
        contexts_by_task.append(contexts)
    # the first context of every task, then the second of every task, and so on; a task may have fewer than others
    for turn in range(max(map(len, contexts_by_task), default=0)):
        for contexts in contexts_by_task:
            if turn < len(contexts):
                yield contexts[turn]


def _find_first_folder(files: Files, names: Sequence[str]) -> Path:
    """Return the first of the folders that exists below the data folder.

    If none exists, raises MissingData with the first name.
    """
    for name in names:
        if files.root is not None and (files.root / name).is_dir():
            return files.path(name)
    return files.path(names[0])


TEXTS: Mapping[str, Callable[[Files], Documents]] = MappingProxyType(
    {
        "tiny": _make_tiny_texts,
        "wikitext2": _read_wikitext_articles,
        "essays": _read_essays,
        "longbench": _read_longbench_contexts,
    }
)
"""The functions that yield the documents of a text, by the text's name."""
