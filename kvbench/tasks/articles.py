"""Real contexts with several questions each: XQuAD's articles and QMSum's meetings.

XQuAD: github.com/google-deepmind/xquad, 48 articles of SQuAD 1.1's development set. QMSum: github.com/Yale-LILY/QMSum.
"""

from __future__ import annotations

import re

from kvbench.base.errors import UsageError
from kvbench.base.example import Example, Turn
from kvbench.tasks.base import Task, own_wording, read_text
from kvbench.tasks.knobs import whole
from kvbench.tasks.longbench import PROMPTS, official
from kvbench.tasks.rows import FileRow, parse, read
from kvbench.tasks.source import Files

INSTRUCTION = "Read the article and answer each question about it with a few of its words."
NOISES = re.compile(r"\{ ?(?:vocalsound|disfmarker|pause|nonvocalsound|gap) ?\} ?")
JOINED = {"a_m_i_": "ami", "l_c_d_": "lcd", "p_m_s": "pms", "t_v_": "tv"}
"""What QMSum's authors remove from transcripts, and replace there."""


def articles(dataset: str, files: Files, file: str, max_new_tokens: int) -> list[Task]:
    """Return one task with an example per article: its title and paragraphs, and their questions in the file's order.

    Raises UsageError naming file and place for an article without paragraphs, questions or answers.
    """
    whole(dataset, "max_new_tokens", max_new_tokens)
    path = files.path(file)
    content = parse(path, "", read_text(path, f"dataset={dataset}"))
    if not isinstance(content, dict):
        raise UsageError(f"{path}: must be a JSON object with a list under 'data'")
    examples = []
    for article in FileRow(path, "top level", content).records("data"):
        title, paragraphs = article.text("title"), article.records("paragraphs")
        turns = [
            Turn(
                question=f"\n\nQuestion: {row.text('question').strip()}\nAnswer:",
                answers=tuple(answer.text("text") for answer in row.records("answers")),
            )
            for paragraph in paragraphs
            for row in paragraph.records("qas")
        ]
        text = "\n\n".join(p.text("context").strip() for p in paragraphs)
        prompt = f"{INSTRUCTION}\n\n{title.replace('_', ' ')}\n\n{text}"
        examples.append(Example(title, prompt, (), max_new_tokens, turns=tuple(turns)))
    return [
        Task(
            id=dataset,
            examples=tuple(examples),
            metric="squad_f1",
            source=f"XQuAD English, {path.name}",
            category="single-document QA",
            note=own_wording(dataset),
            first_line=True,
            beside=("squad_em", "best_subspan_em"),
        )
    ]


def meetings(dataset: str, files: Files, file: str, max_new_tokens: int) -> list[Task]:
    """Return one task with an example per meeting: LongBench's prompt of qmsum with each query, the general ones first.

    Raises UsageError naming file and line for a meeting without transcript or queries.
    """
    whole(dataset, "max_new_tokens", max_new_tokens)
    template = official(files, PROMPTS).get("qmsum")
    if not isinstance(template, str) or not 0 <= template.find("{context}") < template.find("{input}"):
        raise UsageError(f"{PROMPTS}: the prompt of qmsum must be text with {{context}} and then {{input}}")
    prefix, _, suffix = template.partition("{context}")
    path = files.path(file)
    examples = []
    for i, row in enumerate(read(path)):
        spoken = [f"{_clean(r.text('speaker'))}: {_said(r)}" for r in row.records("meeting_transcripts")]
        queries = [
            query
            for kind in ("general_query_list", "specific_query_list")
            for query in (row.records(kind) if row.value(kind) else [])
        ]
        turns = tuple(Turn(suffix.replace("{input}", q.text("query").strip()), q.texts("answer")) for q in queries)
        if not turns:
            raise row.wrong("the meeting has no query")
        examples.append(Example(f"meeting-{i + 1}", prefix + "\n".join(spoken), (), max_new_tokens, turns=turns))
    source = f"QMSum, {path.name}, {len(examples)} meetings; prompt of LongBench's {PROMPTS}"
    beside = ("rouge_1", "rouge_2")
    return [Task(dataset, tuple(examples), "rouge_l", source, "summarisation", beside=beside)]


def _said(row: FileRow) -> str:
    """Return what one speaker said, which may be nothing."""
    return "" if row.value("content") == "" else _clean(row.text("content"))


def _clean(text: str) -> str:
    text = NOISES.sub("", text)
    for mark, plain in JOINED.items():
        text = text.replace(mark, plain)
    return text.strip()
