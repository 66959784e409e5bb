"""A needle in real text: a sentence hidden at a given depth of a text of given length, and a question for it.

The text is a folder of essays. It is cut so that the whole prompt, question and special tokens included, has the wanted
number of tokens. The test follows github.com/gkamradt/LLMTest_NeedleInAHaystack with two differences: the needle always
stands at a sentence end, and its true depth is recorded.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvbench.base.errors import MissingData, UsageError, unknown
from kvbench.base.example import Example
from kvbench.base.numbers import ceil_div
from kvbench.tasks import metrics
from kvbench.tasks.base import LoadContext, Task, Tokenizer, read_text
from kvbench.tasks.knobs import RULES, check_whole, check_word
from kvbench.tasks.source import ENVIRONMENT, Files
from kvbench.tasks.tiny import GOLDEN, HEADER, NeedlePair, draw_needle

SUFFIXES = (".txt", ".md")
ESSAYS = "paul_graham"
_SENTENCE_END = re.compile(r"""[.!?]["'”’)\]]*(?=\s)|[。！？]""")
CHAT_ANSWER = 32
"""The fewest new tokens with a chat template: chat answers begin by repeating words of the question."""
_LONGEST_TOKEN = 1000
"""The mean number of characters per token above which filling stops with an error. Some tokenizers turn any unknown
text into one token, and such text would never fill a length."""
_SAMPLE = 2000
"""The number of characters on which a token's mean length is measured."""


@dataclass(frozen=True)
class Phrasing:
    """The wording of a needle test and the scoring of its answers.

    pair: the function from an example's index to its needle, question and reference.
    prompt: a template that holds ``{context}`` and ``{question}`` once each.
    metric: the name of the metric.
    max_new_tokens: the most tokens of an answer.
    lead: a text that is scored in front of every answer; '' for none. With a lead, an answer ends at a newline but
    cannot begin with it.
    """

    pair: Callable[[int], NeedlePair]
    prompt: str
    metric: str
    max_new_tokens: int
    lead: str = ""


CLASSIC_NEEDLE = NeedlePair(
    needle="The best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny day.",
    question="What is the best thing to do in San Francisco?",
    answer="eat a sandwich and sit in Dolores Park on a sunny day",
)
"""The needle of the original test."""
CLASSIC_SENTENCE = CLASSIC_NEEDLE._replace(answer=CLASSIC_NEEDLE.needle)
"""The same needle with the whole sentence as reference, as in published needle scores."""
EMPTY_SCORES = {"completion": 60.0}
"""The printed score of an empty answer, by phrasing; it is 0 for the others."""
LEAD_NOTE = (
    "answers are scored with the sentence's beginning in front, so that an empty one has "
    f"{EMPTY_SCORES['completion']}, as in papers' scripts"
)
CLASSIC_LEAD = "The best thing to do in San Francisco is "
"""The beginning of the classic needle, which the phrasing ``completion`` asks to complete."""
SENTENCE_PROMPT = "{context}\n\nQuestion: {question}\nAnswer:"


def _hide_always(pair: NeedlePair) -> Callable[[int], NeedlePair]:
    """Return a function for ``Phrasing.pair`` that gives every example the same needle."""

    def give_pair(index: int) -> NeedlePair:
        return pair

    return give_pair


PHRASINGS = {
    "tiny": Phrasing(
        pair=draw_needle, prompt=f"{HEADER} {{context}} {{question}}", metric="contains", max_new_tokens=8
    ),
    "sanfrancisco": Phrasing(
        pair=_hide_always(CLASSIC_NEEDLE), prompt=SENTENCE_PROMPT, metric="rouge1", max_new_tokens=30
    ),
    # this phrasing is scored as in UNComp's script (github.com/menik1126/UNComp, run_needle_in_haystack.py)
    "completion": Phrasing(
        pair=_hide_always(CLASSIC_SENTENCE._replace(question=f"{CLASSIC_LEAD.rstrip()}:")),
        prompt="{context}\n\nComplete this sentence as the text above has it. {question}",
        metric="rouge1",
        max_new_tokens=30,
        lead=CLASSIC_LEAD,
    ),
}


@dataclass(frozen=True, kw_only=True)
class NeedleKnobs:
    """The knobs of conf/dataset/needle.yaml, which explains each of them."""

    haystack: str | None
    lengths: int | Sequence[int]
    depths: float | Sequence[float]
    repeats: int
    phrasing: str
    needle: str | None
    question: str | None
    answer: str | None
    prompt: str | None
    metric: str | None
    max_new_tokens: int | None
    rules: str = "scripts"


def load(context: LoadContext, **entry: Any) -> list[Task]:
    """Return one task per length. A task's examples are ``repeats`` rounds over all ``depths`` (per cent of the text).

    ``lengths`` are prompt tokens as ``tokenizer.encode`` counts them, with special tokens and without chat template. A
    prompt is never longer. It is a few tokens shorter only if no cut of the text gives the exact number. Raises
    UsageError for a haystack that is missing, empty or not text, and for lengths that leave no room.
    """
    knobs = NeedleKnobs(**entry)
    dataset, tokenizer = context.dataset, context.tokenizer
    lengths = []
    for length in _check_list(dataset, "lengths", knobs.lengths):
        lengths.append(check_whole(dataset, "lengths", length, least=1, most=10_000_000))
    depths = _check_list(dataset, "depths", knobs.depths)
    for depth in depths:
        if not isinstance(depth, int | float) or isinstance(depth, bool) or not 0 <= depth <= 100:
            raise UsageError(f"dataset.{dataset}.depths={depth!r} is not possible: a number from 0 to 100")
    check_whole(dataset, "repeats", knobs.repeats, least=1, most=1_000_000)
    phrasing = _limit_answer(_choose_phrasing(dataset, knobs), dataset, knobs, chat=context.chat)
    if tokenizer is None:
        raise UsageError(f"dataset {dataset} is cut to a number of tokens: it needs a model with a tokenizer")
    text, source = read_haystack(context.files, knobs.haystack)
    # each repeat begins elsewhere in the text; multiples of the golden ratio spread any number of beginnings evenly
    starts = [repeat * GOLDEN % 1.0 for repeat in range(knobs.repeats)]
    # an answer that continues the needle's sentence ends with its line, and must not begin with a newline
    stop: tuple[str, ...] = ("\n",) if phrasing.lead else ()
    min_new_tokens = 1 if phrasing.lead else 0
    tasks = []
    for length in lengths:
        # a generator, so that one window at a time is in memory: its text may be long
        windows = (Window(text, start, tokenizer) for start in starts)
        task = Task(
            id=f"{dataset}/{length}",
            examples=tuple(_make_examples(dataset, phrasing, windows, length=length, depths=depths)),
            metric=phrasing.metric,
            source=source,
            category="needle",
            note=_write_note(dataset, phrasing, len(text), length, knobs.rules),
            stop=stop,
            min_new_tokens=min_new_tokens,
            grid=("depth",),
            lead=phrasing.lead if knobs.rules == "scripts" else "",
        )
        tasks.append(task)
    return tasks


def _write_note(dataset: str, phrasing: Phrasing, chars: int, length: int, rules: str) -> str:
    """Return the note of the task with prompts of ``length`` tokens, from a haystack of ``chars`` characters."""
    facts = []
    if phrasing.lead and rules == "scripts":
        facts.append(f"{dataset}: {LEAD_NOTE}")
    # nearly every token has at least one character, so fewer characters than tokens cannot fill the prompt
    if chars < length:
        facts.append(f"the haystack of {chars} characters is repeated to fill {length} tokens")
    return "; ".join(facts)


def _limit_answer(phrasing: Phrasing, dataset: str, knobs: NeedleKnobs, chat: bool) -> Phrasing:
    """Return the phrasing with the number of new tokens that the user set, or that an answer in a chat needs."""
    if knobs.max_new_tokens is not None:
        check_whole(dataset, "max_new_tokens", knobs.max_new_tokens, least=1, most=1_000_000)
        return replace(phrasing, max_new_tokens=knobs.max_new_tokens)
    if chat:
        # a chat model repeats words of the question before it answers
        return replace(phrasing, max_new_tokens=max(CHAT_ANSWER, phrasing.max_new_tokens))
    return phrasing


def _make_examples(
    dataset: str, phrasing: Phrasing, windows: Iterable[Window], length: int, depths: Sequence[float]
) -> Iterator[Example]:
    """Yield the examples of one length: every depth in every window's text, each with a needle of its own.

    windows: a window for each round over the depths.
    length: the most tokens of a prompt.
    depths: the needle's depths, in per cent of the text.
    """
    for repeat, window in enumerate(windows):
        for i, depth in enumerate(depths):
            index_in_task = repeat * len(depths) + i
            needle, question, reference = phrasing.pair(index_in_task)
            template = phrasing.prompt.replace("{question}", question)
            prompt, meta = window.fill(dataset, template, needle, length=length, depth=depth)
            # the prompt's end behind the text holds the question, which ``query_aware=false`` withholds
            _, _, ending = phrasing.prompt.partition("{context}")
            ending = ending.replace("{question}", question)
            # a template may ask in front of the text: then nothing at the prompt's end can be withheld
            if question not in ending:
                ending = ""
            yield Example(
                id=f"needle-{length}-{depth:g}-{repeat}",
                prompt=prompt,
                answers=(reference,),
                max_new_tokens=phrasing.max_new_tokens,
                question=ending,
                meta={"length": length, "depth": depth, "repeat": repeat} | meta,
            )


def read_haystack(files: Files, haystack: str | None) -> tuple[str, str]:
    """Return (the haystack's text, its source in words).

    haystack: a file, or a folder whose .txt and .md files are read in the order of their names; None: the folder of
        essays below the data folder.

    Raises MissingData if the haystack does not exist, and UsageError if it holds no text with a sentence end.
    """
    dataset = files.dataset
    remedy = (
        "give haystack=FOLDER of .txt or .md files, or say with data.root=FOLDER or the environment variable "
        f"{ENVIRONMENT} which folder holds {ESSAYS}/"
    )
    if haystack:
        path = Path(haystack).expanduser()
    elif files.root is not None:
        path = files.root / ESSAYS
    else:
        raise MissingData(f"dataset {dataset} hides its needle in real text and has none: {remedy}")
    if not path.exists():
        raise MissingData(f"dataset {dataset}: there is no haystack {path}; {remedy}", names=[haystack or ESSAYS])
    paths = _list_haystack_files(dataset, path)
    texts = []
    for file in paths:
        # a file may begin with a byte order mark (U+FEFF)
        file_text = read_text(file, f"dataset {dataset}: haystack").strip("\ufeff \n\t\r")
        if file_text:
            texts.append(file_text)
    text = "\n\n".join(texts)
    # a sentence ends only before whitespace, so the text's last one needs a newline behind it
    if not _SENTENCE_END.search(f"{text}\n"):
        if not paths:
            lack = "no .txt or .md file"
        elif not texts:
            lack = "no text"
        else:
            lack = "no sentence end (. ! ?)"
        raise UsageError(f"dataset {dataset}: haystack {path} has {lack}; {remedy}")
    source = f"real text: {path.name}, {len(paths)} file"
    if len(paths) > 1:
        source += "s"
    return text, source


def _list_haystack_files(dataset: str, haystack: Path) -> list[Path]:
    """Return the files of a haystack: the file itself, or a folder's .txt and .md files in the order of their names.

    Raises UsageError if the folder cannot be read.
    """
    try:
        if not haystack.is_dir():
            return [haystack]
        # sort by name, so that the text is the same on every file system
        return sorted(file for file in haystack.iterdir() if file.suffix.lower() in SUFFIXES)
    except OSError as error:
        raise UsageError(f"dataset {dataset}: haystack {haystack} cannot be read: {error.strerror}") from None


class Window:
    """Real text that begins at one place and repeats until it is long enough.

    period: the whole text, from that place on to its end, and then from its beginning on to that place.
    text: ``period`` repeated as often as was needed so far.
    ends: the index behind each sentence of ``text``.
    chars_per_token: the mean number of characters per token, measured on the beginning of ``period``.
    """

    def __init__(self, text: str, start: float, tokenizer: Tokenizer) -> None:
        """Begin at the first whole sentence after the fraction ``start`` of the text."""
        # a sentence ends only before whitespace, so the text's last one needs a newline behind it
        ends = [0]
        for match in _SENTENCE_END.finditer(f"{text}\n"):
            if match.end() < len(text):
                ends.append(match.end())
        # the first sentence end from there on, or the last one of all
        nearest = min(bisect_left(ends, start * len(text)), len(ends) - 1)
        start_index = ends[nearest]
        # the text behind the beginning comes first, then the text before it: nothing is lost before it repeats
        self.period = f"{text[start_index:].lstrip()}\n\n{text[:start_index]}".rstrip() + "\n\n"
        self.tokenizer = tokenizer
        sample = self.period[:_SAMPLE]
        # the lower limit avoids division by 0 where a tokenizer finds no token
        self.chars_per_token = len(sample) / max(1, len(tokenizer.encode(sample)))
        self._grow(_SAMPLE)

    def fill(self, dataset: str, template: str, needle: str, length: int, depth: float) -> tuple[str, dict[str, float]]:
        """Return (a prompt with the needle at ``depth`` per cent of the text, facts about the prompt).

        The prompt has at most ``length`` tokens. The facts are its true number of ``tokens``, the needle's true depth
        (``depth_actual``) and the number of tokens before the needle (``position``).

        template: the prompt with ``{context}``, once, in place of the text.
        needle: the sentence to hide.

        Raises UsageError if the length leaves no room for a sentence of the text.
        """
        prefix, suffix = template.split("{context}")

        def assemble(cut: int) -> str:
            """Return the prompt with the first ``cut`` characters of the text and the needle as its context."""
            end = self._find_nearest_end(cut, depth)
            # at the start of the text, no sentence stands before the needle
            if end == 0:
                return f"{prefix}{needle} {self.text[:cut]}{suffix}"
            return f"{prefix}{self.text[:end]} {needle}{self.text[end:cut]}{suffix}"

        def count_tokens(cut: int) -> int:
            """Return the number of tokens of the prompt with the first ``cut`` characters of the text."""
            return len(self.tokenizer.encode(assemble(cut)))

        cut = self._cut_to_length(dataset, count_tokens, length)
        if not self.ends or self.ends[0] > cut:
            raise UsageError(
                f"dataset {dataset}: length {length} leaves room for {cut} characters of text, less than a sentence"
            )
        # a sentence fits, so ``cut`` is above 0
        prompt = assemble(cut)
        end = self._find_nearest_end(cut, depth)
        facts = {
            "tokens": len(self.tokenizer.encode(prompt)),
            "depth_actual": round(100 * end / cut, 2),
            "position": len(self.tokenizer.encode((prefix + self.text[:end]).rstrip())),
        }
        return prompt, facts

    def _cut_to_length(self, dataset: str, count_tokens: Callable[[int], int], length: int) -> int:
        """Return after how many characters to cut the text, so that the prompt has ``length`` tokens or slightly fewer.

        count_tokens: returns the number of tokens of the prompt whose text is cut after so many characters.

        Raises UsageError if even a prompt without text is longer, or if no repetition of the text gives enough tokens.
        """
        shortest = count_tokens(0)
        if shortest > length:
            raise UsageError(
                f"dataset {dataset}: length {length} is too short: needle and question alone have {shortest} tokens"
            )
        guess = (length - shortest) * self.chars_per_token
        while True:
            # more text than the guess, so that the search can also go beyond it
            self._grow(int(1.2 * guess) + 1000)
            cut = _find_cut(count_tokens, length, int(guess), most=len(self.text), chars_per_token=self.chars_per_token)
            if cut < len(self.text) or count_tokens(cut) == length:
                return cut
            # the whole text is too short, since its tokens are longer than those of the sample: repeat it more often
            if len(self.text) > _LONGEST_TOKEN * length:
                raise UsageError(f"dataset {dataset}: {len(self.text)} characters of text have under {length} tokens")
            guess = 2 * len(self.text)

    def _grow(self, chars: int) -> None:
        """Set ``text`` to the period repeated up to ``chars`` characters, and ``ends`` to its sentence ends."""
        times = ceil_div(chars, len(self.period))
        self.text = (self.period * times)[:chars]
        self.ends = [match.end() for match in _SENTENCE_END.finditer(self.text)]

    def _find_nearest_end(self, cut: int, depth: float) -> int:
        """Return the sentence end up to ``cut``, or the text's start, that is nearest to ``depth`` per cent of it."""
        target = cut * depth / 100
        # the last end before the target and the first end behind it; there may be none on one side
        i = bisect_left(self.ends, target)
        neighbours = self.ends[max(0, i - 1) : i + 1]
        # 0 is the text's start
        candidates = [0] + [end for end in neighbours if end <= cut]
        return min(candidates, key=lambda end: abs(end - target))


def _find_cut(count_tokens: Callable[[int], int], length: int, guess: int, most: int, chars_per_token: float) -> int:
    """Return a number of characters up to ``most`` whose prompt has ``length`` tokens, or else slightly fewer.

    The search begins at ``guess`` characters. Each step is the number of missing tokens times ``chars_per_token``.
    Bisection takes over after ten steps, and where a step would leave the bounds that were found so far.

    count_tokens: returns the number of tokens of the prompt whose text is cut after so many characters. It grows with
        the cut, apart from a token or two.
    """
    # a cut at ``low`` gives fewer tokens than ``length``, a cut at ``high`` gives more
    low, high = 0, most + 1
    cut = min(max(1, guess), most)
    steps = 0
    while high - low > 1:
        tokens = count_tokens(cut)
        if tokens == length:
            return cut
        step = round((length - tokens) * chars_per_token)
        # a step that rounds to 0 would try the same cut again
        if tokens < length:
            low = cut
            step = step or 1
        else:
            high = cut
            step = step or -1
        steps += 1
        cut += step
        if steps >= 10 or not low < cut < high:
            cut = (low + high) // 2
    # no cut tried so far is exact, and ``low`` has too few tokens. A longer cut can have one token less than a shorter
    # one, so cuts near the bound may still have the exact number
    for nearby in range(max(0, low - 8), min(low + 8, most) + 1):
        if count_tokens(nearby) == length:
            return nearby
    return low


def _choose_phrasing(dataset: str, knobs: NeedleKnobs) -> Phrasing:
    """Return the phrasing that the knobs name or spell out. Raises UsageError if the knobs contradict each other."""
    if knobs.phrasing not in PHRASINGS:
        raise unknown("phrasing of dataset needle", knobs.phrasing, PHRASINGS, hint="Or give needle= and question=.")
    phrasing = PHRASINGS[knobs.phrasing]
    if knobs.needle and knobs.question:
        # without an answer, the whole needle is the reference
        pair = NeedlePair(knobs.needle, knobs.question, answer=knobs.answer or knobs.needle)
        phrasing = Phrasing(pair=_hide_always(pair), prompt=SENTENCE_PROMPT, metric="rouge1", max_new_tokens=30)
    elif knobs.needle or knobs.question or knobs.answer:
        raise UsageError(f"dataset {dataset}: needle= and question= belong together (answer= is optional: the needle)")
    name = metrics.choose(knobs.metric or phrasing.metric).name  # an unknown metric raises UsageError
    if knobs.phrasing == "sanfrancisco" and not knobs.needle and name in ("rouge1", "rouge_l"):
        # published needle scores compare the answer with the whole needle sentence
        phrasing = replace(phrasing, pair=_hide_always(CLASSIC_SENTENCE))
    check_word(dataset, "rules", knobs.rules, RULES)
    if phrasing.lead and knobs.rules == "mended":
        # the answer alone is compared with what is left of the sentence
        phrasing = replace(phrasing, pair=_hide_always(CLASSIC_NEEDLE._replace(question=phrasing.pair(0).question)))
    template = knobs.prompt or phrasing.prompt
    if template.count("{context}") != 1 or template.count("{question}") != 1:
        raise UsageError(f"dataset.{dataset}.prompt={template!r} must hold {{context}} and {{question}} once each")
    return replace(phrasing, prompt=template, metric=name)


def _check_list(dataset: str, knob: str, value: float | Sequence[float]) -> list[float]:
    """Return a knob's value as a list. Raises UsageError if it is empty or holds a value twice."""
    # a text is a sequence, too; treat it as one wrong value, for the checks that follow
    if isinstance(value, Sequence) and not isinstance(value, str):
        values = list(value)
    else:
        values = [value]
    # values may be of any type, lists included, so a set cannot hold them
    if not values or any(values.count(entry) > 1 for entry in values):
        raise UsageError(f"dataset.{dataset}.{knob}={values} must be a list of different values, at least one")
    return values
