"""The samples of a run: of one answer, or of a context's questions that are answered from one compressed cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean

from kvbench.base.example import Example
from kvbench.engine.batch import Answer
from kvbench.engine.decode import extend_cache, extend_caches
from kvbench.methods.core.prompt_cache import Cache
from kvbench.plan.cells import Cell
from kvbench.run.host import Host
from kvbench.run.queue import QueuedRow, in_parts
from kvbench.store.results import Sample, Timing
from kvbench.store.turns import TurnAnswer
from kvbench.tasks.metrics import score
from kvbench.tasks.prompt import Encoded
from kvbench.tasks.turns import EncodedTurns


@dataclass(eq=False)
class Asking:
    """The questions of one context under one method, and what was answered so far.

    row: the compressed context, from whose cache isolated questions branch.
    cache: what the next question follows.
    answered: by index of the question, its record, its answer and the most tokens that a head held meanwhile.
    """

    host: Host
    row: QueuedRow
    encoded: EncodedTurns
    cache: Cache
    answered: dict[int, tuple[TurnAnswer, Answer, int]] = field(default_factory=dict)

    @property
    def isolated(self) -> bool:
        """True if questions do not see each other."""
        return self.row.cell.task.turns == "isolated"

    @property
    def cell(self) -> Cell:
        """The cell that the context is measured for."""
        return self.row.cell

    @property
    def example(self) -> Example:
        """The context with its questions."""
        return self.row.example

    def ids(self, turn: int) -> Sequence[int]:
        """Return the tokens of a question, behind the reference of the one before where these are given."""
        before = self.encoded.references[turn - 1] if turn and self.cell.task.turns == "gold" else []
        return [*before, *self.encoded.questions[turn]]

    def record(self, row: QueuedRow, answer: Answer, text: str, value: float | None, peak: int) -> Sample | None:
        """Record the answer to a row's question. Return the context's sample once all of them are answered."""
        assert row.turn is not None
        task, asked = row.cell.task, row.asked
        if not self.isolated:
            self.cache = row.cache
        if task.turns == "own" and (tokens := self._kept(row, answer)):
            self.cache = extend_cache(self.host.model, row.cache, tokens)
        known = TurnAnswer(
            prediction=text,
            score=value,
            answers=asked.answers,
            new_tokens=len(answer.tokens),
            decode_s=round(answer.seconds, 6),
            bytes=self.cache.nbytes(),
            beside={name: score(name, task.answer(text), asked) for name in task.beside},
        )
        self.answered[row.turn] = known, answer, peak
        if len(self.answered) < len(self.encoded.questions):
            return None
        turns, answers, peaks = zip(*(self.answered[i] for i in range(len(self.answered))), strict=True)
        scores = [t.score for t in turns if t.score is not None]
        attended = [a.attended for a in answers if a.attended is not None]
        whole = replace(
            answer,
            tokens=[token for a in answers for token in a.tokens],
            seconds=sum(a.seconds for a in answers),
            rows=max(a.rows for a in answers),
            factor=max((a.factor for a in answers if a.factor is not None), default=None),
            attended=fmean(attended) if attended else None,
        )
        text = "\n".join(t.prediction.strip() for t in turns)
        sample = sample_of(self.row, whole, text, fmean(scores) if scores else None, max(peaks))
        return replace(sample, answers=None, turns=turns)

    def _kept(self, row: QueuedRow, answer: Answer) -> list[int]:
        """Return the tokens of an answer that stays, with a token that ends it unless the next question begins so."""
        ended = bool(answer.tokens) and answer.tokens[-1] in row.ending.stop
        if self.encoded.between:
            return answer.tokens[:-1] if ended else answer.tokens
        end = getattr(self.host.tokenizer, "eos_token_id", None)
        return answer.tokens if ended or end is None else [*answer.tokens, int(end)]


def ask(askings: Sequence[Asking], turn: int) -> list[QueuedRow]:
    """Return the rows that answer a question of one context, which its caches read together."""
    if not askings:
        return []
    host, ids = askings[0].host, askings[0].ids(turn)
    caches = extend_caches(host.model, [a.cache for a in askings], ids)
    endings = [host.ending(a.cell.task, a.example.asked(turn)) for a in askings]
    return [
        replace(a.row, cache=cache, ending=ending, turn=turn)
        for a, cache, ending in zip(askings, caches, endings, strict=True)
    ]


def extended(rows: Sequence[QueuedRow], host: Host, ids: Sequence[int]) -> list[QueuedRow]:
    """Return rows of one prompt whose caches have also read ``ids``, the withheld question."""
    caches = extend_caches(host.model, [row.cache for row in rows], ids)
    return [replace(row, cache=cache) for row, cache in zip(rows, caches, strict=True)]


def remade(host: Host, rows: Sequence[QueuedRow]) -> list[tuple[QueuedRow, QueuedRow | Exception]]:
    """Return each row with its cache, which was given up, made anew from its prompt, or with the exception."""
    by_prompt: dict[tuple[str, str], list[QueuedRow]] = {}
    for row in rows:
        # an example is read in one way in one column: elsewhere its question is withheld, or its id is another prompt's
        by_prompt.setdefault((row.cell.column, row.example.id), []).append(row)
    outcomes: list[tuple[QueuedRow, QueuedRow | Exception]] = []
    for alike in by_prompt.values():
        encoded = host.encode(alike[0].example, alike[0].cell.task)

        def read(part: Sequence[QueuedRow], encoded: Encoded = encoded) -> list[QueuedRow]:
            chains = [r.cell.chain for r in part]
            caches = host.prefill(encoded.ids, chains)
            again = [replace(r, cache=cache, given_up=False) for r, cache in zip(part, caches, strict=True)]
            return extended(again, host, encoded.question) if encoded.question else again

        outcomes += in_parts(alike, read)
    return outcomes


def sample_of(row: QueuedRow, answer: Answer, text: str, value: float | None, decode_peak: int) -> Sample:
    """Return the sample to store of a row's answer, which passed the audit."""
    example = row.example
    capacity = row.cell.chain.capacity(row.measured.n)
    return Sample(
        id=example.id,
        **asdict(row.measured),
        cut=row.cut,
        shrunk=bool(capacity and capacity.shrunk),
        new_tokens=len(answer.tokens),
        meta=dict(example.meta),
        timing=Timing(
            prefill_s=round(row.cache.prefill_s, 6),
            compress_s=round(row.cache.compress_s, 6),
            decode_s=round(answer.seconds, 6),
            batch_rows=answer.rows,
            batch_factor=None if answer.factor is None else round(answer.factor, 3),
        ),
        prediction=text,
        score=value,
        answers=None if example.tokens else tuple(example.answers),
        # methods that mask attend fewer tokens than they hold
        attended=None if example.tokens else answer.attended,
        decode_peak=decode_peak,
        fidelity=row.fidelity,
    )
