"""XSUM and CNN/DailyMail in HELM's layout: k articles with summaries, then the article to summarise.

Blocks begin with ``###``, so an answer is cut at the first one. Layout: github.com/stanford-crfm/helm, adapter of the
summarization scenario. Data: github.com/EdinburghNLP/XSum, github.com/abisee/cnn-dailymail.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from kvbench.base.errors import UsageError
from kvbench.base.example import Example
from kvbench.tasks.base import LoadContext, Task
from kvbench.tasks.knobs import check_whole, check_word, shuffled_by_seed
from kvbench.tasks.rows import FileRow, read_rows
from kvbench.tasks.source import Files

SEPARATOR = "###"
"""The beginning of each block of a prompt."""
SOURCES = ("auto", "prompts", "articles")
"""The values of the knob ``source``. Prompts are ready ones or made from articles; ``auto`` prefers ready ones."""
POOL = 1000
"""The number of articles at the beginning of the training file from which shots are drawn. The rest is not read."""


@dataclass(frozen=True, kw_only=True)
class SummaryKnobs:
    """The knobs of conf/dataset/xsum.yaml and cnn_dailymail.yaml, which explain each of them."""

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
    def instruction(self) -> str:
        """The end of each block of the prompt, which asks for the summary."""
        return f"Summarize the above article in {_count_noun(self.sentences, 'sentence')}.\n"

    def write_block(self, row: FileRow) -> str:
        """Return a block of the prompt: the row's article, and the instruction that asks for the summary."""
        return f"{SEPARATOR}\nArticle: {_read_line(row, self.article_key)}\n\n{self.instruction}"


def load(context: LoadContext, **entry: Any) -> list[Task]:
    """Return one task from ready ``prompts`` (a file per number of shots) or the articles of ``test`` and ``train``.

    ``source=auto`` takes ready prompts if there are some. The shots, solved examples in front of the article, are the
    same for every prompt. They are drawn from training articles of at most ``shot_words`` words. ``examples`` takes the
    first of the test articles, or of the ready prompts. Raises UsageError naming file, line and reason for a record
    without article or summary.
    """
    knobs = SummaryKnobs(**entry)
    dataset, files = context.dataset, context.files
    check_word(dataset, "source", knobs.source, SOURCES)
    # without shots, the prompt is an article alone, with the instruction behind it
    for knob, least in (("shots", 0), ("shot_words", 1), ("sentences", 1), ("seed", 0), ("max_new_tokens", 1)):
        check_whole(dataset, knob, getattr(knobs, knob), least=least)
    if knobs.examples is not None:
        check_whole(dataset, "examples", knobs.examples)
    ready_prompts = _find_ready_prompts(files, knobs)
    if ready_prompts:
        source = f"ready prompts, {ready_prompts.name}"
        examples = _read_ready_prompts(dataset, ready_prompts, knobs.max_new_tokens)
    else:
        path = files.path(knobs.test)
        shots = _write_shots(dataset, files.path(knobs.train), knobs) if knobs.shots else ""
        source = path.name
        examples = _read_articles(dataset, path, knobs, shots)
    task = Task(
        id=dataset,
        # read the file only up to the last example needed
        examples=tuple(islice(examples, knobs.examples)),
        metric="rouge_l",
        source=f"{source}, {_count_noun(knobs.shots, 'shot')}",
        category="summarisation",
        # a model that has seen shots continues with another block
        cut_at=SEPARATOR,
        chat=False,
    )
    return [task]


def _find_ready_prompts(files: Files, knobs: SummaryKnobs) -> Path | None:
    """Return the file of ready prompts; None if prompts are made from articles.

    Raises MissingData if ``source=prompts`` asks for a file that does not exist.
    """
    name = knobs.prompts.replace("{shots}", str(knobs.shots))
    if knobs.source == "articles":
        return None
    if knobs.source == "prompts":
        return files.path(name)
    return files.find_first(name)


def _read_articles(dataset: str, path: Path, knobs: SummaryKnobs, shots: str) -> Iterator[Example]:
    """Yield an example for each article of the file ``path``. Its prompt is ``shots``, then the article.

    shots: the text of the solved examples, the same for all prompts; '' for none.
    """
    for i, row in enumerate(read_rows(path)):
        yield Example(
            id=row.name("id", f"{dataset}-{i}"),
            prompt=shots + knobs.write_block(row),
            answers=(_read_line(row, knobs.summary_key),),
            max_new_tokens=knobs.max_new_tokens,
            question=knobs.instruction,
        )


def _read_ready_prompts(dataset: str, path: Path, max_new_tokens: int) -> Iterator[Example]:
    """Yield an example for each line with a ready prompt and its summary, as Q-Hitter's predecessors share them.

    Raises UsageError for a prompt that does not begin and end as ``SummaryKnobs.write_block`` writes it.
    """
    for i, row in enumerate(read_rows(path)):
        prompt = row.text("prompt")
        # the last paragraph asks for the summary: it is the question that ``query_aware=false`` withholds
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


def _write_shots(dataset: str, path: Path, knobs: SummaryKnobs) -> str:
    """Return the blocks of drawn training articles with their summaries.

    path: the file of training articles.

    Raises UsageError if too few articles are short enough.
    """
    pool = list(islice(read_rows(path), POOL))
    shots: list[FileRow] = []
    # the seed depends on no example, so that all prompts begin with the same shots
    for row in shuffled_by_seed(pool, f"{knobs.seed}:{dataset}"):
        if len(shots) == knobs.shots:
            break
        # long shots would leave no room for the article to summarise
        if len(row.text(knobs.article_key).split()) <= knobs.shot_words:
            shots.append(row)
    if len(shots) < knobs.shots:
        raise UsageError(
            f"dataset.{dataset}.shots={knobs.shots} is not possible: of the first {len(pool)} articles of {path} only "
            f"{len(shots)} have at most {knobs.shot_words} words (raise shot_words=)"
        )
    return "".join(f"{knobs.write_block(row)}{_read_line(row, knobs.summary_key)}\n\n" for row in shots)


def _read_line(row: FileRow, key: str) -> str:
    """Return the text under ``key`` with spaces in place of line breaks."""
    # blank lines separate the parts of a prompt, so no text may hold one
    return row.text(key).replace("\r", " ").replace("\n", " ").strip()


def _count_noun(number: int, noun: str) -> str:
    if number == 1:
        return f"{number} {noun}"
    return f"{number} {noun}s"
