"""A needle in real text: a sentence hidden at a given depth of a given length, and a question that asks for it.

The text is a folder of essays, cut so that the whole prompt, question and special tokens included, has the wanted
number of tokens. After github.com/gkamradt/LLMTest_NeedleInAHaystack, with two differences: the needle always stands at
a sentence end, and its depth is recorded as it came out.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvbench.base.errors import MissingData, UsageError, unknown
from kvbench.base.example import Example
from kvbench.tasks import metrics
from kvbench.tasks.base import Task, Tokenizer, read_text
from kvbench.tasks.knobs import whole
from kvbench.tasks.source import ENVIRONMENT, Files
from kvbench.tasks.tiny import GOLDEN, HEADER, needle_pair

SUFFIXES = (".txt", ".md")
ESSAYS = "paul_graham"
_SENTENCE_END = re.compile(r"""[.!?]["'”’)\]]*(?=\s)|[。！？]""")
CHAT_ANSWER = 32
"""The fewest new tokens with a chat template, where answers begin by repeating words of the question."""
_LONGEST_TOKEN = 1000
"""The mean number of characters per token above which filling a length is given up."""


@dataclass(frozen=True)
class Phrasing:
    """The wording of a needle test and the scoring of its answers.

    pair: the function from an index to (sentence to hide, question, reference).
    prompt: a template that holds ``{context}`` and ``{question}`` once each.
    lead: a text that is scored in front of every answer, which then ends at a newline but cannot begin with it.
    """

    pair: Callable[[int], tuple[str, str, str]]
    prompt: str
    metric: str
    max_new_tokens: int
    lead: str = ""


CLASSIC_NEEDLE = (
    "The best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny day.",
    "What is the best thing to do in San Francisco?",
    "eat a sandwich and sit in Dolores Park on a sunny day",
)
LEAD_NOTE = (
    "answers are scored with the sentence's beginning in front, so that an empty one has 60.0, as in papers' scripts"
)
CLASSIC_LEAD = "The best thing to do in San Francisco is "
SENTENCE_PROMPT = "{context}\n\nQuestion: {question}\nAnswer:"
PHRASINGS = {
    "tiny": Phrasing(needle_pair, f"{HEADER} {{context}} {{question}}", "contains", 8),
    "sanfrancisco": Phrasing(lambda _: CLASSIC_NEEDLE, SENTENCE_PROMPT, "rouge1", 30),
    # as UNComp's script scores it (github.com/menik1126/UNComp, run_needle_in_haystack.py)
    "completion": Phrasing(
        lambda _: (CLASSIC_NEEDLE[0], f"{CLASSIC_LEAD.rstrip()}:", CLASSIC_NEEDLE[0]),
        "{context}\n\nComplete this sentence as the text above has it. {question}",
        "rouge1",
        30,
        CLASSIC_LEAD,
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


def load(dataset: str, tokenizer: Tokenizer | None, files: Files, knobs: NeedleKnobs, chat: bool) -> list[Task]:
    """Return one task per length, whose examples are ``repeats`` rounds over all ``depths`` (per cent of the text).

    ``lengths`` are prompt tokens as ``tokenizer.encode`` counts them, special tokens included, chat template not. A
    prompt is never longer; it is a few tokens shorter only where no cut of the text gives the exact number. Raises
    UsageError for a haystack that is missing, empty or not text, and for lengths that leave no room.
    """
    lengths = [whole(dataset, "lengths", n, 1, 10_000_000) for n in _check_list(dataset, "lengths", knobs.lengths)]
    depths = _check_list(dataset, "depths", knobs.depths)
    for depth in depths:
        if not isinstance(depth, int | float) or isinstance(depth, bool) or not 0 <= depth <= 100:
            raise UsageError(f"dataset.{dataset}.depths={depth!r} is not possible: a number from 0 to 100")
    whole(dataset, "repeats", knobs.repeats, 1, 1_000_000)
    phrasing = _phrasing(dataset, knobs)
    if knobs.max_new_tokens is not None:
        whole(dataset, "max_new_tokens", knobs.max_new_tokens, 1, 1_000_000)
    default = max(CHAT_ANSWER, phrasing.max_new_tokens) if chat else phrasing.max_new_tokens
    phrasing = replace(phrasing, max_new_tokens=knobs.max_new_tokens or default)
    if tokenizer is None:
        raise UsageError(f"dataset {dataset} is cut to a number of tokens: it needs a model with a tokenizer")
    text, source = read_haystack(files, knobs.haystack)
    starts = [repeat * GOLDEN % 1.0 for repeat in range(knobs.repeats)]
    stop = ("\n",) if phrasing.lead else ()
    return [
        Task(
            id=f"{dataset}/{length}",
            examples=tuple(_examples(dataset, phrasing, (Window(text, s, tokenizer) for s in starts), length, depths)),
            metric=phrasing.metric,
            source=source,
            category="needle",
            note="; ".join(filter(None, [f"{dataset}: {LEAD_NOTE}" if phrasing.lead else "", _repeated(text, length)])),
            stop=stop,
            min_new_tokens=len(stop),  # an answer that may stop at a newline must not begin with it
            grid=("depth",),
            lead=phrasing.lead,
        )
        for length in lengths
    ]


def _repeated(text: str, length: int) -> str:
    """Return the note on a haystack that is repeated to fill ``length`` tokens, '' if it clearly is not."""
    return f"the haystack of {len(text)} characters is repeated to fill {length} tokens" if len(text) < length else ""


def _examples(
    dataset: str, phrasing: Phrasing, windows: Iterable[Window], length: int, depths: Sequence[float]
) -> Iterator[Example]:
    """Yield the examples of one length: every depth in the text of every window, each with a needle of its own."""
    for repeat, window in enumerate(windows):
        for i, depth in enumerate(depths):
            needle, question, reference = phrasing.pair(repeat * len(depths) + i)
            # the prompt's end, where that is what asks
            ending = phrasing.prompt.partition("{context}")[2].replace("{question}", question)
            prompt, meta = window.fill(dataset, phrasing.prompt, needle, question, length, depth)
            yield Example(
                id=f"needle-{length}-{depth:g}-{repeat}",
                prompt=prompt,
                answers=(reference,),
                max_new_tokens=phrasing.max_new_tokens,
                question=ending if question in ending else "",
                meta={"length": length, "depth": depth, "repeat": repeat, **meta},
            )


def read_haystack(files: Files, haystack: str | None) -> tuple[str, str]:
    """Return (text, its source in words) of the file ``haystack``, or of a folder's .txt and .md files by name.

    Without ``haystack`` it is the folder of essays below the data folder.
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
        raise MissingData(f"dataset {dataset}: there is no haystack {path}; {remedy}", [haystack or ESSAYS])
    try:
        paths = sorted(f for f in path.iterdir() if f.suffix.lower() in SUFFIXES) if path.is_dir() else [path]
    except OSError as error:
        raise UsageError(f"dataset {dataset}: haystack {path} cannot be read: {error.strerror}") from None
    texts = [read_text(file, f"dataset {dataset}: haystack").strip("\ufeff \n\t\r") for file in paths]
    text = "\n\n".join(filter(None, texts))
    if not _SENTENCE_END.search(f"{text}\n"):
        lack = "no sentence end (. ! ?)"
        if not text:
            lack = "no text" if paths else "no .txt or .md file"
        raise UsageError(f"dataset {dataset}: haystack {path} has {lack}; {remedy}")
    return text, f"real text: {path.name}, {len(paths)} file{'s' if len(paths) > 1 else ''}"


class Window:
    """Real text that begins at one place and is repeated until it is as long as needed."""

    def __init__(self, text: str, start: float, tokenizer: Tokenizer) -> None:
        """Begin at the first whole sentence after the fraction ``start`` of the text."""
        ends = [0, *(m.end() for m in _SENTENCE_END.finditer(f"{text}\n") if m.end() < len(text))]
        start_index = ends[min(bisect_left(ends, start * len(text)), len(ends) - 1)]
        self.period = f"{text[start_index:].lstrip()}\n\n{text[:start_index]}".rstrip() + "\n\n"
        self.tokenizer = tokenizer
        sample = self.period[:2000]
        self.chars_per_token = len(sample) / max(1, len(tokenizer.encode(sample)))
        self._grow(2000)

    def fill(
        self, dataset: str, prompt: str, needle: str, question: str, length: int, depth: float
    ) -> tuple[str, dict[str, float]]:
        """Return (a prompt of at most ``length`` tokens, its true length and the needle's true depth and position)."""
        prefix, suffix = prompt.replace("{question}", question).split("{context}")

        def assemble(cut: int) -> str:
            end = self._nearest_end(cut, depth)
            inside = f"{self.text[:end]} {needle}{self.text[end:cut]}" if end else f"{needle} {self.text[:cut]}"
            return prefix + inside + suffix

        def tokens(cut: int) -> int:
            return len(self.tokenizer.encode(assemble(cut)))

        shortest = tokens(0)
        if shortest > length:
            raise UsageError(
                f"dataset {dataset}: length {length} is too short: needle and question alone have {shortest} tokens"
            )
        guess = (length - shortest) * self.chars_per_token
        while True:
            self._grow(int(1.2 * guess) + 1000)
            cut = _cut(tokens, length, int(guess), len(self.text), self.chars_per_token)
            if cut < len(self.text) or tokens(cut) == length:
                break
            if len(self.text) > _LONGEST_TOKEN * length:
                raise UsageError(f"dataset {dataset}: {len(self.text)} characters of text have under {length} tokens")
            guess = 2 * len(self.text)
        if not self.ends or self.ends[0] > cut:
            raise UsageError(
                f"dataset {dataset}: length {length} leaves room for {cut} characters of text, less than a sentence"
            )
        end = self._nearest_end(cut, depth)
        position = len(self.tokenizer.encode((prefix + self.text[:end]).rstrip()))
        return assemble(cut), {
            "tokens": tokens(cut),
            "depth_actual": round(100 * end / cut, 2),
            "position": position,
        }

    def _grow(self, chars: int) -> None:
        """Set ``text`` to the period repeated up to ``chars`` characters, and ``ends`` to its sentence ends."""
        times = -(-chars // len(self.period))
        self.text = (self.period * times)[:chars]
        self.ends = [m.end() for m in _SENTENCE_END.finditer(self.text)]

    def _nearest_end(self, cut: int, depth: float) -> int:
        """Return the text's start or the sentence end up to ``cut`` that is nearest to ``depth`` per cent of it."""
        target = cut * depth / 100
        i = bisect_left(self.ends, target)
        candidates = [0, *(end for end in self.ends[max(0, i - 1) : i + 1] if end <= cut)]
        return min(candidates, key=lambda end: abs(end - target))


def _cut(tokens: Callable[[int], int], length: int, guess: int, most: int, chars_per_token: float) -> int:
    """Return a number of characters up to ``most`` with ``tokens(cut) == length``, or else with slightly fewer tokens.

    Each step is the remaining tokens times ``chars_per_token``. It stays between bounds as in a bisection, which
    replaces it after ten steps: token counts grow with the cut, apart from a token or two.
    """
    low, high = 0, most + 1
    cut = min(max(1, guess), most)
    steps = 0
    while high - low > 1:
        n = tokens(cut)
        if n == length:
            return cut
        low, high, steps = (cut, high, steps + 1) if n < length else (low, cut, steps + 1)
        step = round((length - n) * chars_per_token) or (1 if n < length else -1)
        cut = cut + step if steps < 10 else 0  # 0: outside of the bounds, so that the middle is taken
        if not low < cut < high:
            cut = (low + high) // 2
    # a longer cut can have a token less: the neighbours of the bound may have the exact number
    around = range(max(0, low - 8), min(low + 8, most) + 1)
    return next((nearby for nearby in around if tokens(nearby) == length), low)


def _phrasing(dataset: str, knobs: NeedleKnobs) -> Phrasing:
    if knobs.phrasing not in PHRASINGS:
        raise unknown("phrasing of dataset needle", knobs.phrasing, PHRASINGS, "Or give needle= and question=.")
    phrasing = PHRASINGS[knobs.phrasing]
    if knobs.needle and knobs.question:
        custom = (knobs.needle, knobs.question, knobs.answer or knobs.needle)
        phrasing = Phrasing(lambda _: custom, SENTENCE_PROMPT, "rouge1", 30)
    elif knobs.needle or knobs.question or knobs.answer:
        raise UsageError(f"dataset {dataset}: needle= and question= belong together (answer= is optional: the needle)")
    name = metrics.metric(knobs.metric or phrasing.metric).name
    if knobs.phrasing == "sanfrancisco" and not knobs.needle and name in ("rouge1", "rouge_l"):
        # Published needle scores compare the answer with the whole needle sentence.
        phrasing = replace(phrasing, pair=lambda _: (*CLASSIC_NEEDLE[:2], CLASSIC_NEEDLE[0]))
    template = knobs.prompt or phrasing.prompt
    if template.count("{context}") != 1 or template.count("{question}") != 1:
        raise UsageError(f"dataset.{dataset}.prompt={template!r} must hold {{context}} and {{question}} once each")
    return replace(phrasing, prompt=template, metric=name)


def _check_list(dataset: str, knob: str, value: float | Sequence[float]) -> list[float]:
    """Return a knob's value as a list. Raises UsageError if it is empty or holds a value twice."""
    values = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    if not values or any(values.count(v) > 1 for v in values):
        raise UsageError(f"dataset.{dataset}.{knob}={values} must be a list of different values, at least one")
    return values
