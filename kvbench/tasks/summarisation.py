"""XSUM and CNN/DailyMail as HELM lays them out: k articles with summaries, then the article to summarise.

Blocks begin with ``###``, so an answer is cut at the first one. Layout: github.com/stanford-crfm/helm, adapter of
the summarization scenario. Data: github.com/EdinburghNLP/XSum, github.com/abisee/cnn-dailymail.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from kvbench.errors import UsageError
from kvbench.example import Example
from kvbench.tasks.base import Task
from kvbench.tasks.knobs import drawn, one_of, whole
from kvbench.tasks.rows import FileRow, read
from kvbench.tasks.source import Files

SEPARATOR = "###"
SOURCES = ("auto", "prompts", "articles")
POOL = 1000
"""Shots are drawn from as many articles at the beginning of the training file: it need not be read to its end."""


def load(
    dataset: str,
    files: Files,
    source: str,
    prompts: str,
    test: str,
    train: str,
    article_key: str,
    summary_key: str,
    shots: int,
    shot_words: int,
    sentences: int,
    examples: int | None,
    seed: int,
    max_new_tokens: int,
) -> list[Task]:
    """One task from ready ``prompts`` (a file per number of shots) or from the articles of ``test`` and ``train``.

    ``source=auto`` takes ready prompts where there are some. The shots are the same for every example, drawn from
    training articles of at most ``shot_words`` words; ``examples`` takes the first of the test articles. Raises
    UsageError naming file, line and reason for a record without article or summary.
    """
    one_of(dataset, "source", source, SOURCES)
    for knob, value, least in (
        ("shots", shots, 0),
        ("shot_words", shot_words, 1),
        ("sentences", sentences, 1),
        ("seed", seed, 0),
        ("max_new_tokens", max_new_tokens, 1),
    ):
        whole(dataset, knob, value, least)
    if examples is not None:
        whole(dataset, "examples", examples)
    name = prompts.replace("{shots}", str(shots))
    ready = files.first(name) if source == "auto" else files.path(name) if source == "prompts" else None
    if ready:
        built = tuple(islice(_ready(dataset, ready, max_new_tokens), examples))
        return [_task(dataset, built, f"ready prompts, {ready.name}", shots)]
    asked = f"Summarize the above article in {sentences} sentence{'' if sentences == 1 else 's'}.\n"
    keys = (article_key, summary_key)
    path = files.path(test)
    before = _shots(dataset, files.path(train), keys, shots, shot_words, seed, asked) if shots else ""
    built = tuple(
        Example(
            id=row.name("id", f"{dataset}-{i}"),
            prompt=f"{before}{_article(row, article_key)}{asked}",
            answers=(_line(row, summary_key),),
            max_new_tokens=max_new_tokens,
            question=asked,
        )
        for i, row in enumerate(islice(read(path), examples))
    )
    return [_task(dataset, built, path.name, shots)]


def _task(dataset: str, examples: tuple[Example, ...], source: str, shots: int) -> Task:
    return Task(
        id=dataset,
        examples=examples,
        metric="rouge_l",
        source=f"{source}, {shots} shot{'' if shots == 1 else 's'}",
        category="summarisation",
        cut_at=SEPARATOR,
        chat=False,
    )


def _ready(dataset: str, path: Path, max_new_tokens: int) -> Iterator[Example]:
    """Lines with a prompt in this layout and its summary, as in the files that Q-Hitter's predecessors share."""
    for i, row in enumerate(read(path)):
        prompt = row.text("prompt")
        article, separator, end = prompt.rpartition("\n\n")
        if not prompt.startswith(SEPARATOR) or not separator or not article:
            raise row.wrong(f"'prompt' must begin with {SEPARATOR!r} and end in a paragraph that asks for the summary")
        yield Example(
            id=f"{dataset}-{i}",
            prompt=prompt,
            answers=row.texts("summary"),
            max_new_tokens=max_new_tokens,
            question=end,
        )


def _shots(dataset: str, path: Path, keys: tuple[str, str], shots: int, shot_words: int, seed: int, asked: str) -> str:
    pool = list(islice(read(path), POOL))
    short = (row for row in drawn(pool, f"{seed}:{dataset}") if len(row.text(keys[0]).split()) <= shot_words)
    chosen = list(islice(short, shots))
    if len(chosen) < shots:
        raise UsageError(
            f"dataset.{dataset}.shots={shots} is not possible: of the first {len(pool)} articles of {path} only "
            f"{len(chosen)} have at most {shot_words} words (raise shot_words=)"
        )
    return "".join(f"{_article(row, keys[0])}{asked}{_line(row, keys[1])}\n\n" for row in chosen)


def _article(row: FileRow, key: str) -> str:
    return f"{SEPARATOR}\nArticle: {_line(row, key)}\n\n"


def _line(row: FileRow, key: str) -> str:
    """Text with its line breaks as spaces, so that blank lines part nothing but the blocks."""
    return row.text(key).replace("\r", " ").replace("\n", " ").strip()
