"""XSUM and CNN/DailyMail as HELM lays them out: k articles with summaries, then the article to summarise.

Blocks begin with ``###``, so an answer is cut at the first one. Layout: github.com/stanford-crfm/helm, adapter of
the summarization scenario. Data: github.com/EdinburghNLP/XSum, github.com/abisee/cnn-dailymail.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from kvbench.base.errors import UsageError
from kvbench.base.example import Example
from kvbench.tasks.base import Task
from kvbench.tasks.knobs import drawn, one_of, whole
from kvbench.tasks.rows import FileRow, read
from kvbench.tasks.source import Files

SEPARATOR = "###"
SOURCES = ("auto", "prompts", "articles")
POOL = 1000
"""Shots are drawn from as many articles at the beginning of the training file: it need not be read to its end."""


@dataclass(frozen=True, kw_only=True)
class SummaryKnobs:
    """The knobs of one dataset in conf/dataset: where its files lie, the keys of a row, the shape of a prompt."""

    source: str
    prompts: str
    test: str
    train: str
    article_key: str
    summary_key: str
    shots: int
    shot_words: int
    sentences: int
    examples: int | None
    seed: int
    max_new_tokens: int

    @property
    def asked(self) -> str:
        """The end of a block, which asks for the summary."""
        return f"Summarize the above article in {self.sentences} sentence{'' if self.sentences == 1 else 's'}.\n"

    def block(self, row: FileRow) -> str:
        """Return an article and the question for its summary."""
        return f"{SEPARATOR}\nArticle: {_line(row, self.article_key)}\n\n{self.asked}"


def load(dataset: str, files: Files, knobs: SummaryKnobs) -> list[Task]:
    """Return one task from ready ``prompts`` (a file per number of shots) or the articles of ``test`` and ``train``.

    ``source=auto`` takes ready prompts where there are some. The shots are the same for every example, drawn from
    training articles of at most ``shot_words`` words; ``examples`` takes the first of the test articles. Raises
    UsageError naming file, line and reason for a record without article or summary.
    """
    one_of(dataset, "source", knobs.source, SOURCES)
    for knob, least in (("shots", 0), ("shot_words", 1), ("sentences", 1), ("seed", 0), ("max_new_tokens", 1)):
        whole(dataset, knob, getattr(knobs, knob), least)
    if knobs.examples is not None:
        whole(dataset, "examples", knobs.examples)
    name = knobs.prompts.replace("{shots}", str(knobs.shots))
    ready = None
    if knobs.source != "articles":
        ready = files.path(name) if knobs.source == "prompts" else files.first(name)
    if ready:
        source, examples = f"ready prompts, {ready.name}", _ready(dataset, ready, knobs.max_new_tokens)
    else:
        path = files.path(knobs.test)
        shots = _shots(dataset, files.path(knobs.train), knobs) if knobs.shots else ""
        source, examples = path.name, _articles(dataset, path, knobs, shots)
    return [
        Task(
            id=dataset,
            examples=tuple(islice(examples, knobs.examples)),
            metric="rouge_l",
            source=f"{source}, {knobs.shots} shot{'' if knobs.shots == 1 else 's'}",
            category="summarisation",
            cut_at=SEPARATOR,
            chat=False,
        )
    ]


def _articles(dataset: str, path: Path, knobs: SummaryKnobs, shots: str) -> Iterator[Example]:
    for i, row in enumerate(read(path)):
        yield Example(
            id=row.name("id", f"{dataset}-{i}"),
            prompt=shots + knobs.block(row),
            answers=(_line(row, knobs.summary_key),),
            max_new_tokens=knobs.max_new_tokens,
            question=knobs.asked,
        )


def _ready(dataset: str, path: Path, max_new_tokens: int) -> Iterator[Example]:
    """Yield an example for each line with a ready prompt and its summary, as Q-Hitter's predecessors share them."""
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


def _shots(dataset: str, path: Path, knobs: SummaryKnobs) -> str:
    pool, most = list(islice(read(path), POOL)), knobs.shot_words
    short = (r for r in drawn(pool, f"{knobs.seed}:{dataset}") if len(r.text(knobs.article_key).split()) <= most)
    chosen = list(islice(short, knobs.shots))
    if len(chosen) < knobs.shots:
        raise UsageError(
            f"dataset.{dataset}.shots={knobs.shots} is not possible: of the first {len(pool)} articles of {path} only "
            f"{len(chosen)} have at most {most} words (raise shot_words=)"
        )
    return "".join(f"{knobs.block(row)}{_line(row, knobs.summary_key)}\n\n" for row in chosen)


def _line(row: FileRow, key: str) -> str:
    """Return the text under ``key`` with its line breaks as spaces, so that blank lines part nothing but the blocks."""
    return row.text(key).replace("\r", " ").replace("\n", " ").strip()
