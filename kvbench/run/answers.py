"""Rows of prompts that wait for the decode batch or are in it, questions of one context, and their samples.

A row is one prompt's cache under one method. ``DecodeQueue`` decodes rows together and recovers when a step fails.
``Asking`` follows the questions of one context, ``Drawing`` the answers drawn for one prompt. Their answers make one
sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import Generic, NamedTuple, TypeVar

from transformers import PreTrainedModel

from kvbench.audit.prompt_audit import MeasuredBytes
from kvbench.base.example import Example
from kvbench.base.visible import say
from kvbench.engine.batch import Answer, DecodeBatch
from kvbench.engine.decode import extend_cache, extend_caches
from kvbench.engine.memory import is_out_of_memory, release, run_in_parts
from kvbench.engine.stopping import Ending
from kvbench.methods.core.prompt_cache import PromptCache
from kvbench.run.host import Host
from kvbench.store.cell import Cell
from kvbench.store.fidelity import TextFidelity
from kvbench.store.results import DrawnAnswer, Sample, Timing
from kvbench.store.turns import TurnAnswer
from kvbench.tasks.encoding import EncodedTurns
from kvbench.tasks.prompt import Encoded

ENTER_SHARE = 0.5
"""Rows enter a running batch once it has shrunk to this share of its limits, so that groups are few and large."""


@dataclass(frozen=True, eq=False)
class QueuedRow:
    """One prompt's cache under one method, ready to be decoded. Rows are compared by identity: two may be equal.

    cell: the method and the task that the row is measured for.
    example: the prompt with its references; a context with its questions, if ``turn`` numbers one of them.
    cache: the prompt's compressed cache, which decoding continues.
    measured: the audited bytes and tokens of the cache.
    cut: the number of tokens cut out of the prompt.
    ending: how the answer's tokens are drawn, and when the answer ends.
    fidelity: the comparison with the full cache by kind of text, once it was made.
    turn: the index of the context's question that this row answers, or of the answer that it draws for its prompt; None
    for a prompt with one answer.
    given_up: whether a batch took the cache over. Only the cache's shapes are left then.
    """

    cell: Cell
    example: Example
    cache: PromptCache
    measured: MeasuredBytes
    cut: int
    ending: Ending
    fidelity: Mapping[str, TextFidelity] | None = None
    turn: int | None = None
    given_up: bool = False

    @property
    def scored_example(self) -> Example:
        """The example that scores the answer: one of a context's questions, or the row's example."""
        if self.turn is None or not self.example.turns:
            return self.example
        return self.example.asked(self.turn)

    @property
    def cost(self) -> int:
        """The bytes that decoding takes: the cache, a copy where other answers need it, and the new tokens.

        New tokens are counted at the full cache's bytes a token, since most methods store new tokens in full.
        """
        cache_bytes = self.measured.payload + self.measured.overhead
        # decoding works on a copy, and the cache stays for the questions or answers that branch from it
        if self.turn is not None:
            cache_bytes *= 2
        # the full cache's bytes a token are full_bytes / n; multiplied by the most new tokens, before rounding down
        new_bytes = self.measured.full_bytes * self.ending.limit // max(1, self.measured.n)
        return cache_bytes + new_bytes

    def without_cache(self) -> QueuedRow:
        """Return the row without its cache's numbers.

        A row whose cache serves other questions or answers keeps it.
        """
        if self.turn is not None:
            return self
        return replace(self, cache=self.cache.shapes(), given_up=True)


Outcome = tuple[QueuedRow, Answer | Exception]
"""A row with its answer, or with the exception that made it fail."""
Remake = Callable[[Sequence[QueuedRow]], Sequence[tuple[QueuedRow, QueuedRow | Exception]]]
"""From rows without caches to (each row, the row with its cache read again, or the exception of reading it)."""


class DecodeQueue:
    """The rows to be decoded, in the order in which they came, at most ``most_rows`` and ``most_bytes`` at a time.

    The order and ``most_rows`` decide which rows run together. Running out of memory halves ``most_rows``. Rows that
    were running begin again from their caches, so none is lost or answered twice.

    remake: reads prompts again and returns each row with its new cache, or with the exception. The queue then need not
    keep a cache beside the batch's copy. Without ``remake`` the queue keeps all caches. If remaking runs out of memory
    while other rows run, the rows to remake wait.
    make_room: frees what others keep when memory runs out, and returns whether there was anything to free.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        most_rows: int,
        most_bytes: int,
        remake: Remake | None = None,
        # by default, nothing else can be freed
        make_room: Callable[[], bool] = lambda: False,
    ) -> None:
        self.model = model
        self.most_rows = most_rows
        self.most_bytes = most_bytes
        self.remake = remake
        self.make_room = make_room
        self.waiting: list[QueuedRow] = []
        self.running: list[QueuedRow] = []
        # the rows of a failed batch, which run one by one to show which of them fails
        self.apart: list[QueuedRow] = []
        self._batch: DecodeBatch[QueuedRow] = DecodeBatch(model)

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running) + len(self.apart)

    def __iter__(self) -> Iterator[QueuedRow]:
        """Yield the rows that have not ended, those that are being decoded first."""
        yield from self.running
        yield from self.apart
        yield from self.waiting

    def add(self, row: QueuedRow) -> None:
        """Put a row at the end of the queue."""
        self.waiting.append(row)

    def drop(self, cell_id: str) -> None:
        """Remove the rows of a cell that are not being decoded yet."""
        self.waiting = [row for row in self.waiting if row.cell.id != cell_id]
        self.apart = [row for row in self.apart if row.cell.id != cell_id]

    def has_room(self, rows: int) -> bool:
        """Return True if the queue is empty, or stays within its limits with ``rows`` more rows of the mean cost."""
        queued = list(self)
        if not queued:
            return True
        cost = sum(row.cost for row in queued)
        # rows to come are not known yet: assume that each costs as much as the mean row
        cost_to_come = cost * rows // len(queued)
        return len(queued) + rows <= self.most_rows and cost + cost_to_come <= self.most_bytes

    def advance(self) -> list[Outcome]:
        """Decode until some rows have ended or failed. Return these rows as (row, answer or exception).

        Return [] if a batch of several rows failed: its rows are decoded again. A row that fails alone is returned with
        its exception.
        """
        # rows of a failed batch go first: the batch is empty while any of them waits
        if self.apart:
            return self._advance_alone(self.apart.pop(0))
        lost = self._admit_rows()
        # the caller handles lost rows before the batch goes on, since their cells may leave the run
        if lost:
            return lost
        failure: Exception | None = None
        try:
            answers = self._batch.advance()
        except Exception as error:
            failure = error
        if failure is None:
            ended = {row for row, _ in answers}
            self.running = [row for row in self.running if row not in ended]
            return list(answers)
        # a failed step may have changed the batch's caches, so all of its rows begin again
        rows = self.running
        self.running = []
        self._batch = DecodeBatch(self.model)
        out_of_memory = is_out_of_memory(failure)
        made_room = out_of_memory and self.make_room()
        # without more room, a row that failed alone would fail again
        if len(rows) == 1 and not made_room:
            return [(rows[0], failure)]
        # an exception's traceback would keep the batch in memory
        failure = None
        release()
        if out_of_memory:
            # half as many rows take about half of the memory
            self._shrink_batch(len(rows) // 2, rows, f"with {len(rows)} answers at once")
        else:
            self.apart = rows
        return []

    def _advance_alone(self, row: QueuedRow) -> list[Outcome]:
        """Decode one row of a failed batch by itself, so that only the row that fails is lost."""
        batch: DecodeBatch[QueuedRow] = DecodeBatch(self.model)
        try:
            _, lost = self._enter_rows(batch, [row])
            if lost:
                return lost
            return list(batch.advance())
        except Exception as error:
            return [(row, error)]

    def _admit_rows(self) -> list[Outcome]:
        """Move waiting rows into the batch while it has room. Enter only rows for which the model is adapted alike.

        Return (row, exception) of rows whose caches could not be made again.
        """
        entering = self._choose_entering_rows()
        if not entering:
            return []
        self.waiting = [row for row in self.waiting if row not in entering]
        entered, lost = self._enter_rows(self._batch, entering)
        self.running += entered
        # rows that ran out of memory here can be made again later, when running rows have freed theirs
        unmade = [row for row, error in lost if isinstance(error, Exception) and is_out_of_memory(error)]
        # without running rows, no memory will become free
        if not (unmade and self.running):
            return lost
        release()
        self._shrink_batch(len(self.running), unmade, f"beside {len(self.running)} answers")
        return [(row, error) for row, error in lost if row not in unmade]

    def _choose_entering_rows(self) -> list[QueuedRow]:
        """Return the waiting rows that may enter the batch now, in their order. They stay in ``waiting``."""
        cost = sum(row.cost for row in self.running)
        if not self.waiting or not self._batch.open:
            return []
        # wait until the batch has shrunk, so that rows enter in few and large groups
        if len(self.running) > ENTER_SHARE * self.most_rows or cost > ENTER_SHARE * self.most_bytes:
            return []
        # the running rows decide for which methods the model is adapted; without any, the first waiting row does
        first = (self.running or self.waiting)[0]
        entering: list[QueuedRow] = []
        for row in self.waiting:
            # a method may adapt the model while it decodes, so rows of other methods must wait
            if row.cache.batch_key != first.cache.batch_key:
                continue
            count = len(self.running) + len(entering)
            cost += row.cost
            # a single row enters whatever it takes, since nothing else could make room for it
            if count and (count >= self.most_rows or cost > self.most_bytes):
                break
            entering.append(row)
        return entering

    def _shrink_batch(self, most_rows: int, rows: Sequence[QueuedRow], where: str) -> None:
        """After running out of memory, requeue ``rows`` and cap the batch at ``most_rows`` from now on.

        where: what took the memory, for the message to the user.
        """
        self.most_rows = max(1, most_rows)
        self.waiting = list(rows) + self.waiting
        say(f"out of memory {where}; going on with at most {self.most_rows}")

    def _enter_rows(
        self, batch: DecodeBatch[QueuedRow], rows: Sequence[QueuedRow]
    ) -> tuple[list[QueuedRow], list[Outcome]]:
        """Enter rows into a batch, which then owns their caches.

        Return (entered rows, (row, exception) of rows whose caches could not be made again).
        """
        lost: list[Outcome] = []
        # the row with its new cache, by the row without one
        remade: dict[QueuedRow, QueuedRow] = {}
        # a batch that failed owned these caches, and only their shapes are left
        cacheless = [row for row in rows if row.given_up]
        if self.remake is not None and cacheless:
            for row, outcome in self.remake(cacheless):
                if isinstance(outcome, Exception):
                    lost.append((row, outcome))
                else:
                    remade[row] = outcome
        complete = []
        for row in rows:
            if row in remade:
                complete.append(remade[row])
            elif not row.given_up:
                complete.append(row)
        entered = complete
        if self.remake is not None:
            # the batch holds the numbers now, and the prompt can be read again
            entered = [row.without_cache() for row in complete]
        # the batch names each answer by the row that stays in the queue
        batch.enter([(kept, row.cache, row.ending) for kept, row in zip(entered, complete, strict=True)])
        return entered, lost


Record = TypeVar("Record", TurnAnswer, DrawnAnswer)


class Answered(NamedTuple, Generic[Record]):
    """One of several answers from one cache.

    record: the answer as it is stored.
    answer: the tokens and the costs of decoding them.
    peak: the most tokens that a head held meanwhile.
    """

    record: Record
    answer: Answer
    peak: int


@dataclass(eq=False)
class Asking:
    """The questions of one context under one method, and the answers so far.

    host: the model and tokenizer that read the questions.
    row: the compressed context. Isolated questions branch from its cache.
    encoded: the token ids of the context and of its questions.
    cache: the cache that the next question continues.
    answered: the answers so far, by the index of the question.
    """

    host: Host
    row: QueuedRow
    encoded: EncodedTurns
    cache: PromptCache
    answered: dict[int, Answered[TurnAnswer]] = field(default_factory=dict)

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

    def question_ids(self, turn: int) -> Sequence[int]:
        """Return the tokens that the model reads for a question.

        Under turns=gold the reference answer to the previous question comes before the question.
        """
        question = list(self.encoded.questions[turn])
        # the first question has none before it
        if turn and self.cell.task.turns == "gold":
            return list(self.encoded.references[turn - 1]) + question
        return question

    def add_answer(self, row: QueuedRow, answer: Answer, text: str, value: float | None, peak: int) -> Sample | None:
        """Add the answer to a row's question. Return the context's sample once all questions are answered, else None.

        row: the question's row, whose ``turn`` is the question's index.
        text: the answer's text.
        value: the answer's score; None if the metric gives no score.
        peak: the most tokens that a head held while answering.
        """
        assert row.turn is not None
        task, question = row.cell.task, row.scored_example
        # when questions see each other, the next one continues the cache that has read this one
        if not self.isolated:
            self.cache = row.cache
        # the model's own answer stays in the context of the next question
        if task.turns == "own":
            tokens = self._tokens_to_keep(row, answer)
            if tokens:
                self.cache = extend_cache(self.host.model, row.cache, tokens)
        record = TurnAnswer(
            prediction=text,
            score=value,
            answers=question.answers,
            new_tokens=len(answer.tokens),
            decode_s=round(answer.seconds, 6),
            bytes=self.cache.nbytes(),
            # other metrics than the task's own
            beside={name: task.score(text, question, name) for name in task.beside},
        )
        self.answered[row.turn] = Answered(record, answer, peak)
        if len(self.answered) < len(self.encoded.questions):
            return None
        # isolated questions may be answered in any order
        in_order = [self.answered[i] for i in range(len(self.answered))]
        sample = build_joint_sample(self.row, in_order)
        # each turn's record holds its references
        return replace(sample, answers=None, turns=tuple(answered.record for answered in in_order))

    def _tokens_to_keep(self, row: QueuedRow, answer: Answer) -> list[int]:
        """Return an answer's tokens for the context of the next question, so that one end token follows the answer.

        With a chat template the next question begins with that token, and the answer goes without.
        """
        tokens, _ = self.host.cut_answer(answer.tokens, row.ending)
        # ``between`` is True if the next question begins with the end token
        if self.encoded.between:
            return tokens
        if answer.tokens and answer.tokens[-1] in row.ending.stop:
            return answer.tokens
        # not every tokenizer has one
        end_id = getattr(self.host.tokenizer, "eos_token_id", None)
        if end_id is None:
            return tokens
        # the answer was cut at its limit or at a stop text: end it as the model would have
        return tokens + [int(end_id)]


@dataclass(eq=False)
class Drawing:
    """The answers that are drawn for one prompt under one method, and those that have come.

    All begin from one cache: the prompt is read and compressed once.

    row: the compressed prompt.
    answered: the answers that have come, by the index of the draw.
    """

    row: QueuedRow
    answered: dict[int, Answered[DrawnAnswer]] = field(default_factory=dict)

    @property
    def cell(self) -> Cell:
        """The cell that the prompt is measured for."""
        return self.row.cell

    def row_of(self, index: int, host: Host) -> QueuedRow:
        """Return the row that draws one of the answers, with a seed of its own."""
        # ids count answers from 1, as those of questions
        drawn = replace(self.row.example, id=f"{self.row.example.id}#{index + 1}")
        return replace(self.row, ending=host.make_ending(self.cell.task, drawn), turn=index)

    def add_answer(self, row: QueuedRow, answer: Answer, text: str, value: float | None, peak: int) -> Sample | None:
        """Add a row's answer. Return the prompt's sample once all its answers have come, else None.

        row: the drawn answer's row, whose ``turn`` is the index of the draw.
        text: the answer's text.
        value: the answer's score; None if the metric gives no score.
        peak: the most tokens that a head held while answering.
        """
        assert row.turn is not None
        record = DrawnAnswer(text, value, new_tokens=len(answer.tokens), decode_s=round(answer.seconds, 6))
        self.answered[row.turn] = Answered(record, answer, peak)
        count = self.cell.task.samples
        if len(self.answered) < count:
            return None
        # answers may end in any order
        in_order = [self.answered[i] for i in range(count)]
        sample = build_joint_sample(self.row, in_order)
        return replace(sample, draws=tuple(answered.record for answered in in_order))


def build_joint_sample(row: QueuedRow, answers: Sequence[Answered[Record]]) -> Sample:
    """Return one sample for several answers from a row's cache: their mean score, and their texts in lines."""
    records = [answered.record for answered in answers]
    answer = join_answers([answered.answer for answered in answers])
    text = "\n".join(record.prediction.strip() for record in records)
    peak = max(answered.peak for answered in answers)
    return build_sample(row, answer, text, average_scores(records), decode_peak=peak)


def join_answers(answers: Sequence[Answer]) -> Answer:
    """Return one or more answers from one cache as one answer.

    Times are added, numbers of batches are maxima, and the tokens of all answers stand one after the other.
    """
    tokens: list[int] = []
    for answer in answers:
        tokens += answer.tokens
    # only methods that mask count what they attend to
    attended = [a.attended for a in answers if a.attended is not None]
    mean_attended = fmean(attended) if attended else None
    return replace(
        answers[-1],
        tokens=tokens,
        seconds=sum(a.seconds for a in answers),
        rows=max(a.rows for a in answers),
        factor=max((a.factor for a in answers if a.factor is not None), default=None),
        attended=mean_attended,
    )


def average_scores(records: Sequence[TurnAnswer] | Sequence[DrawnAnswer]) -> float | None:
    """Return the mean score of answers; None if none has a score."""
    scores = [record.score for record in records if record.score is not None]
    if not scores:
        return None
    return fmean(scores)


def read_question(askings: Sequence[Asking], turn: int) -> list[QueuedRow]:
    """Read one question of a context behind the caches of all methods. Return the rows that answer it.

    askings: the context under each method, all on one host.
    turn: the index of the question.
    """
    if not askings:
        return []
    # any of them has the host and the question's tokens
    host, ids = askings[0].host, askings[0].question_ids(turn)
    # one pass of the model serves the caches of all methods
    caches = extend_caches(host.model, [asking.cache for asking in askings], ids)
    rows = []
    for asking, cache in zip(askings, caches, strict=True):
        ending = host.make_ending(asking.cell.task, asking.example.asked(turn))
        rows.append(replace(asking.row, cache=cache, ending=ending, turn=turn))
    return rows


def extend_rows(rows: Sequence[QueuedRow], host: Host, ids: Sequence[int]) -> list[QueuedRow]:
    """Let the caches of one prompt's rows read ``ids``, the withheld question. Return the rows with these caches."""
    caches = extend_caches(host.model, [row.cache for row in rows], ids)
    return [replace(row, cache=cache) for row, cache in zip(rows, caches, strict=True)]


def remake_rows(host: Host, rows: Sequence[QueuedRow]) -> list[tuple[QueuedRow, QueuedRow | Exception]]:
    """Read the prompts of ``rows`` again. Return each row with its new cache, or the exception raised."""
    rows_by_prompt: dict[tuple[str, str], list[QueuedRow]] = {}
    for row in rows:
        # group by column, too: another column may withhold the question, or use the id for another prompt
        rows_by_prompt.setdefault((row.cell.column, row.example.id), []).append(row)
    outcomes: list[tuple[QueuedRow, QueuedRow | Exception]] = []
    for rows_of_prompt in rows_by_prompt.values():
        # all rows of a prompt read the same tokens
        first = rows_of_prompt[0]
        encoded = host.encode(first.example, first.cell.task)
        outcomes += run_in_parts(rows_of_prompt, partial(_read_prompt_again, host, encoded))
    return outcomes


def _read_prompt_again(host: Host, encoded: Encoded, rows: Sequence[QueuedRow]) -> list[QueuedRow]:
    """Return the rows of one prompt with caches made anew, which have read the withheld question if there is one."""
    caches = host.prefill(encoded.ids, [row.cell.chain for row in rows])
    with_caches = [replace(row, cache=cache, given_up=False) for row, cache in zip(rows, caches, strict=True)]
    if encoded.question:
        return extend_rows(with_caches, host, encoded.question)
    return with_caches


def build_sample(row: QueuedRow, answer: Answer, text: str, value: float | None, decode_peak: int) -> Sample:
    """Return the sample to store for a row's answer that passed the audit.

    text: the answer's text; '' for a text that was scored.
    value: the answer's score; None if the metric gives no score.
    decode_peak: the most tokens that a head held while answering.
    """
    example = row.example
    capacity = row.cell.chain.capacity(row.measured.n)
    factor = round(answer.factor, 3) if answer.factor is not None else None
    references: tuple[str, ...] | None = tuple(example.answers)
    # methods that mask attend fewer tokens than they hold
    attended = answer.attended
    if example.scored is not None:
        # this text was scored by its likelihood, and has no answer
        references, attended = None, None
    return Sample(
        id=example.id,
        n=row.measured.n,
        kept=row.measured.kept,
        nominal=row.measured.nominal,
        payload=row.measured.payload,
        overhead=row.measured.overhead,
        full_bytes=row.measured.full_bytes,
        payload_kv_head=row.measured.payload_kv_head,
        payload_query_head=row.measured.payload_query_head,
        payload16=row.measured.payload16,
        overhead16=row.measured.overhead16,
        full16=row.measured.full16,
        pages_freed=row.measured.pages_freed,
        compressed_percent=row.measured.compressed_percent,
        cut=row.cut,
        shrunk=bool(capacity and capacity.shrunk),
        new_tokens=len(answer.tokens),
        meta=example.facts(),
        timing=Timing(
            prefill_s=round(row.cache.prefill_s, 6),
            compress_s=round(row.cache.compress_s, 6),
            decode_s=round(answer.seconds, 6),
            batch_rows=answer.rows,
            batch_factor=factor,
        ),
        prediction=text,
        score=value,
        answers=references,
        attended=attended,
        decode_peak=decode_peak,
        fidelity=row.fidelity,
    )
