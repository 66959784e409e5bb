"""Real contexts with several questions each: XQuAD's articles and QMSum's meetings.

XQuAD: github.com/google-deepmind/xquad, 48 articles of SQuAD 1.1's development set. QMSum: github.com/Yale-LILY/QMSum.
"""

from __future__ import annotations

import re

from kvbench.base.errors import UsageError
from kvbench.base.example import Example, Turn
from kvbench.tasks.base import LoadContext, Task, limit_questions, note_own_wording, read_text
from kvbench.tasks.knobs import check_whole
from kvbench.tasks.longbench import PROMPTS, read_official
from kvbench.tasks.rows import FileRow, parse_json, read_rows

INSTRUCTION = "Read the article and answer each question about it with a few of its words."
# QMSum's authors clean their transcripts this way before a model reads them: they remove marks of sounds, and join
# abbreviations that were transcribed letter by letter
NOISES = re.compile(r"\{ ?(?:vocalsound|disfmarker|pause|nonvocalsound|gap) ?\} ?")
JOINED = {"a_m_i_": "ami", "l_c_d_": "lcd", "p_m_s": "pms", "t_v_": "tv"}


def articles(context: LoadContext, file: str, max_new_tokens: int, questions: int | None = None) -> list[Task]:
    """Return XQuAD as one task. An example is the text of an article, with questions that are asked one after another.

    file: XQuAD's JSON, a path below the data folder.
    max_new_tokens: the most tokens of an answer.
    questions: the most questions of an article; its first ones are taken. None takes all.

    Raises UsageError naming file and place for an article without paragraphs, questions or answers.
    """
    dataset, files = context.dataset, context.files
    check_whole(dataset, "max_new_tokens", max_new_tokens)
    path = files.path(file)
    content = parse_json(path, place="", text=read_text(path, f"dataset={dataset}"))
    if not isinstance(content, dict):
        raise UsageError(f"{path}: must be a JSON object with a list under 'data'")
    examples = []
    for article in FileRow(path, "top level", content).records("data"):
        title, paragraphs = article.text("title"), article.records("paragraphs")
        # the whole article is one context: a question must find its paragraph among the others
        turns = []
        for paragraph in paragraphs:
            for row in paragraph.records("qas"):
                question = f"\n\nQuestion: {row.text('question').strip()}\nAnswer:"
                answers = tuple(answer.text("text") for answer in row.records("answers"))
                turns.append(Turn(question, answers))
        text = "\n\n".join(paragraph.text("context").strip() for paragraph in paragraphs)
        # titles have the form of Wikipedia's addresses
        prompt = f"{INSTRUCTION}\n\n{title.replace('_', ' ')}\n\n{text}"
        # the turns hold the references
        examples.append(Example(id=title, prompt=prompt, answers=(), max_new_tokens=max_new_tokens, turns=tuple(turns)))
    task = Task(
        id=dataset,
        examples=tuple(examples),
        metric="squad_f1",
        source=f"XQuAD English, {path.name}",
        category="single-document QA",
        note=note_own_wording(dataset),
        first_line=True,
        beside=("squad_em", "best_subspan_em"),
    )
    return limit_questions(dataset, [task], questions)


def meetings(context: LoadContext, file: str, max_new_tokens: int, questions: int | None = None) -> list[Task]:
    """Return QMSum as one task. An example is a meeting in LongBench's qmsum prompt, with queries about it.

    file: QMSum's JSON lines, a path below the data folder.
    max_new_tokens: the most tokens of an answer.
    questions: the most queries of a meeting; general queries come before specific ones. None takes all.

    Raises UsageError naming file and line for a meeting without transcript or queries.
    """
    dataset, files = context.dataset, context.files
    check_whole(dataset, "max_new_tokens", max_new_tokens)
    template = read_official(files, PROMPTS).get("qmsum")
    # the query must stand behind the context, so that one compressed context serves all queries
    if not isinstance(template, str) or not 0 <= template.find("{context}") < template.find("{input}"):
        raise UsageError(f"{PROMPTS}: the prompt of qmsum must be text with {{context}} and then {{input}}")
    # the text behind the context ends the prompt of each query
    prefix, _, suffix = template.partition("{context}")
    path = files.path(file)
    examples = []
    for i, row in enumerate(read_rows(path)):
        transcript = []
        for speech in row.records("meeting_transcripts"):
            words = ""
            # ``speech.text`` refuses an empty text
            if speech.value("content") != "":
                words = _clean(speech.text("content"))
            transcript.append(f"{_clean(speech.text('speaker'))}: {words}")
        turns = _read_queries(row, suffix)
        prompt = prefix + "\n".join(transcript)
        # the turns hold the references
        examples.append(
            Example(id=f"meeting-{i + 1}", prompt=prompt, answers=(), max_new_tokens=max_new_tokens, turns=turns)
        )
    task = Task(
        id=dataset,
        examples=tuple(examples),
        metric="rouge_l",
        source=f"QMSum, {path.name}, {len(examples)} meetings; prompt of LongBench's {PROMPTS}",
        category="summarisation",
        beside=("rouge_1", "rouge_2"),
    )
    return limit_questions(dataset, [task], questions)


def _read_queries(row: FileRow, template: str) -> tuple[Turn, ...]:
    """Return the queries about a meeting, general ones first. Raises UsageError for a meeting without a query.

    template: the end of the prompt, with ``{input}`` in place of the query.
    """
    turns = []
    for key in ("general_query_list", "specific_query_list"):
        # a meeting may have no query of one kind, but it must have both lists
        if not row.value(key):
            continue
        for query in row.records(key):
            question = template.replace("{input}", query.text("query").strip())
            turns.append(Turn(question, query.texts("answer")))
    if not turns:
        raise row.wrong("the meeting has no query")
    return tuple(turns)


def _clean(text: str) -> str:
    """Return a text of a transcript without marks of sounds, and with its abbreviations joined."""
    text = NOISES.sub("", text)
    for mark, plain in JOINED.items():
        text = text.replace(mark, plain)
    return text.strip()
