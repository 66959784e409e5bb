"""Results as records: a stored answer, and the record and the summary of a cell.

``read`` takes the JSON from disk, ``record`` returns the JSON to write. A field that an older version did not write is
None. Fields that this version does not know are kept in ``more``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Self

from kvbench.base.errors import Damaged, UsageError
from kvbench.kv.pages import PagesFreed
from kvbench.store.fidelity import FidelitySummary, TextFidelity
from kvbench.store.turns import TurnAnswer, TurnsSummary

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Record = Mapping[str, Any]
"""A JSON object of a stored file."""
Facts = Mapping[str, Any]
"""The provenance of numbers by name: versions, device, dtype and more, and facts that a method adds."""
CELL_RECORD: Mapping[str, type] = {"label": str, "column": str, "of": int, "identity": dict, "provenance": list}
"""The types of the values in a cell.json, by key."""


@dataclass(frozen=True)
class Timing:
    """The time of one answer.

    prefill_s, compress_s, decode_s: seconds of each stage.
    batch_rows: how many rows were decoded together.
    batch_factor: the bytes that the batch allocated for keys and values, divided by the bytes of its rows' tokens. It
    exceeds 1 if rows are padded.
    """

    prefill_s: float
    compress_s: float
    decode_s: float
    batch_rows: int | None = None
    batch_factor: float | None = None


@dataclass(frozen=True)
class DrawnAnswer:
    """One of several answers drawn for a prompt.

    prediction: the text of the answer.
    score: its score; None if the metric gives it none.
    new_tokens, decode_s: its tokens, and the seconds of its decoding.
    """

    prediction: str
    score: float | None
    new_tokens: int
    decode_s: float


NUMBERS = ("n", "kept", "payload", "overhead", "full_bytes", "payload16", "overhead16", "full16", "cut", "new_tokens")
"""The fields of a sample that are numbers in every line."""


@dataclass(frozen=True)
class Sample:
    """One stored answer: tokens and bytes of its cache as audited, seconds, the text, and its score.

    id: the example's id.
    n, kept: the tokens of the prompt, and the mean number of them that a head holds.
    nominal: the tokens of the method's budget; None if the method has no budget.
    payload, overhead, full_bytes: the bytes of keys and values, of the data beside them, and of the full cache.
    payload_kv_head, payload_query_head: the payload under ``per=kv_head`` and under ``per=query_head``.
    payload16, overhead16, full16: the bytes of the same tokens at 16 bits, by formula.
    cut: the number of tokens cut out of the prompt.
    shrunk: True if the budget had no room for the method's sinks, window and one token more.
    new_tokens: the tokens of the answer.
    meta: facts about the example, for reports.
    timing: the seconds of the answer.
    prediction: the text of the answer.
    score: None if the metric gives this answer no score.
    answers: the references.
    attended: the mean number of tokens that a masking method reads.
    decode_peak: the most tokens that a head held while answering.
    provenance: an index into the provenance of the cell's record.
    fidelity: the comparison with the full cache by kind of text, if it was asked for.
    turns: the answers to a context's several questions. ``score`` is their mean.
    pages_freed: the shares of the prompt's pages that an engine could give back.
    compressed_percent: the bytes at 16 bits of the layers that methods compress, in per cent of their full cache; None
        if the model has no other layers that hold anything.
    draws: the answers drawn for the prompt, if there are several. ``score`` is their mean, and ``prediction`` joins
    their texts. ``new_tokens`` and ``decode_s`` are sums over ``turns`` or ``draws``.
    more: the fields of a line that a newer version wrote.
    """

    id: str
    n: int
    kept: float
    nominal: int | None
    payload: float
    overhead: float
    full_bytes: float
    payload_kv_head: float | None
    payload_query_head: float | None
    payload16: float
    overhead16: float
    full16: float
    cut: int
    shrunk: bool
    new_tokens: int
    meta: Record
    timing: Timing
    prediction: str
    score: float | None
    answers: tuple[str, ...] | None = None
    attended: float | None = None
    decode_peak: int | None = None
    provenance: int | None = None
    fidelity: Mapping[str, TextFidelity] | None = None
    turns: tuple[TurnAnswer, ...] | None = None
    pages_freed: PagesFreed | None = None
    compressed_percent: float | None = None
    draws: tuple[DrawnAnswer, ...] | None = None
    more: Mapping[str, object] = field(default_factory=dict)

    @property
    def answer_lengths(self) -> list[int]:
        """The length in tokens of each drawn answer, or of the only answer."""
        if self.draws:
            return [draw.new_tokens for draw in self.draws]
        return [self.new_tokens]

    @property
    def texts(self) -> list[str]:
        """The texts of the answers to a context's questions, of the drawn answers, or of the only answer."""
        answers = self.turns or self.draws
        if answers:
            return [answer.prediction for answer in answers]
        return [self.prediction]

    @classmethod
    def read(cls, line: Record) -> Self:
        """Return the sample in a stored line.

        Raises UsageError for an old version's line, without bytes at 16 bits, and Damaged for one that lacks a field or
        has a value of another kind.
        """
        if "full16" not in line:
            raise UsageError(
                f"example {line['id']} was measured by an older version, without bytes at 16 bits: measure it again in "
                "another results=FOLDER"
            )
        try:
            return cls._read_fields(line)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise Damaged(f"the sample of {line.get('id')} is damaged: {error}") from None

    @classmethod
    def _read_fields(cls, line: Record) -> Self:
        """Return the sample in a stored line. Raises KeyError, TypeError, AttributeError or ValueError for damage."""
        for name in NUMBERS:
            if isinstance(line[name], bool) or not isinstance(line[name], (int, float)):
                raise TypeError(f"{name} is {line[name]!r}, and no number")
        # lines of older versions may lack these fields, and the record has no defaults for them
        known: dict[str, Any] = dict.fromkeys(("nominal", "payload_kv_head", "payload_query_head"))
        known |= _select_known(cls, line)
        if "answers" in line:
            known["answers"] = tuple(line["answers"])
        if "fidelity" in line:
            known["fidelity"] = {kind: TextFidelity.read(record) for kind, record in line["fidelity"].items()}
        if "turns" in line:
            turns = []
            for turn in line["turns"]:
                # JSON has no tuples: turn the list back into one, so that a sample read equals the sample written
                turns.append(TurnAnswer(**turn | {"answers": tuple(turn["answers"])}))
            known["turns"] = tuple(turns)
        if "pages_freed" in line:
            known["pages_freed"] = PagesFreed(**line["pages_freed"])
        if "draws" in line:
            known["draws"] = tuple(DrawnAnswer(**draw) for draw in line["draws"])
        # drop unknown fields of the timing; unknown fields of the sample itself are kept
        timing = Timing(**_select_known(Timing, line["timing"]))
        return cls(**known | {"timing": timing, "more": _select_unknown(cls, line)})

    def record(self) -> dict[str, object]:
        """Return the sample as the JSON to store."""
        known = {name: getattr(self, name) for name in _list_fields(Sample)}
        if self.fidelity is not None:
            known["fidelity"] = {kind: text.record() for kind, text in self.fidelity.items()}
        if self.turns is not None:
            known["turns"] = [asdict(turn) for turn in self.turns]
        if self.pages_freed is not None:
            known["pages_freed"] = asdict(self.pages_freed)
        if self.draws is not None:
            known["draws"] = [asdict(draw) for draw in self.draws]
        known["timing"] = {name: seconds for name, seconds in asdict(self.timing).items() if seconds is not None}
        # None is a value of these two fields: no budget, and an answer without a score; elsewhere None means unknown
        nullable = ("nominal", "score")
        written = {name: value for name, value in known.items() if name in nullable or value is not None}
        # a newer version's fields come last, in the form in which they were read
        return written | dict(self.more)


@dataclass(frozen=True)
class CellRecord:
    """The content of a cell's cell.json.

    id: the cell's id; '' if the record lacks it.
    kind: None for a cell that kvbench measured, "imported" or "engine" for any other.
    label, column: the method and the task in words.
    of: the number of the task's examples; None if unknown.
    identity: all settings that decide the cell's numbers.
    provenance: the facts of each process that measured samples.
    more: the fields of a record that a newer version wrote.
    """

    id: str = ""
    kind: str | None = None
    label: str = ""
    column: str = ""
    of: int | None = None
    identity: Record = field(default_factory=dict)
    provenance: tuple[Facts, ...] = ()
    more: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def read(cls, record: Record) -> Self:
        """Return the record in the JSON of a cell.json. Raises ValueError naming its damaged fields."""
        damaged = _list_damaged_fields(record)
        if damaged:
            raise ValueError(f"{', '.join(damaged)} of it is damaged")
        known = _select_known(cls, record)
        return cls(**known | {"provenance": tuple(record.get("provenance", ())), "more": _select_unknown(cls, record)})

    def record(self) -> dict[str, object]:
        """Return the record as the JSON of cell.json."""
        known = {name: getattr(self, name) for name in _list_fields(CellRecord)}
        # None means unknown; a newer version's fields come last, in the form in which they were read
        return {name: value for name, value in known.items() if value is not None} | dict(self.more)

    @property
    def model(self) -> str:
        """The model's name as the latest run gave it, or the model's fingerprint if no run gave a name."""
        # the identity holds a fingerprint of the weights, since one model may have several names
        names = [facts["model"] for facts in self.provenance if facts.get("model")]
        if names:
            return str(names[-1])
        model = self.identity.get("model", "")
        # an imported cell's model is its name alone
        if isinstance(model, dict):
            return str(model.get("fingerprint", ""))
        return str(model)


@dataclass(frozen=True)
class Status:
    """The current status of a cell.

    status: never, started (being measured now), done (all that a run asked for), complete (all that there are),
    refused, failed, interrupted or damaged.
    n, of: how many examples are measured, and how many there are; ``of`` is None if unknown.
    reason: why the cell is refused, failed, interrupted or damaged.
    measuring: the shards that some process is measuring now.
    changed: the time of the last write, in seconds since the epoch; None for a damaged cell, and for one without files.
    """

    status: str
    n: int
    of: int | None
    reason: str | None = None
    measuring: tuple[int, ...] = ()
    changed: float | None = None


@dataclass(frozen=True)
class ScoreSummary:
    """The mean score of a cell in printed units, with its 95 % interval.

    metric: the name of the metric.
    n, of: how many examples are answered, and how many there are.
    unscored: the number of answers that the metric gives no score.
    score: the mean score; None if no answer has one.
    ci: the interval of the mean; None if there are too few scores.
    """

    metric: str
    n: int
    of: int
    unscored: int
    score: float | None
    ci: tuple[float, float] | None

    @classmethod
    def read(cls, metrics: Mapping[str, object]) -> Self | None:
        """Return the summary in the JSON of a metrics.json, or None if it holds no metric."""
        # a cell without answers has no metrics at all
        if "metric" not in metrics:
            return None
        known: dict[str, Any] = {name: metrics.get(name) for name in _list_fields(cls)}
        return cls(**known)

    def record(self) -> dict[str, object]:
        """Return the summary as the JSON of metrics.json, without the status."""
        # most cells have no length ranges, no thoughts, no fidelity and no contexts with several questions, and old
        # cells no pages: leave out what is empty
        optional = ("buckets", "cut_thoughts", "fidelity", "questions", "pages_freed", "compressed_percent")
        return {name: value for name, value in asdict(self).items() if name not in optional or value}


@dataclass(frozen=True)
class MeanTiming:
    """The mean times of a cell's answers, in seconds.

    prefill_s, compress_s: the means over answers.
    decode_s_per_token: the seconds of decoding for each new token.
    batch_factor: the mean of ``Timing.batch_factor``; None if no answer has one.
    """

    prefill_s: float
    compress_s: float
    decode_s_per_token: float
    batch_factor: float | None


@dataclass(frozen=True)
class BucketScore:
    """The mean score of the answers on prompts of one range of lengths.

    n: the number of answers.
    score: the mean in printed units; None if no answer has a score.
    """

    n: int
    score: float | None


@dataclass(frozen=True)
class CellSummary(ScoreSummary):
    """The means over a cell's samples, under the names of ``Sample``.

    prompt_tokens: the mean of ``Sample.n``.
    kept, nominal, attended: means of tokens.
    payload, overhead, full_bytes: means of bytes, as are the other fields with these words in their names.
    cut, shrunk: how many prompts were cut, and how many had too small a budget.
    decode_peak: the maximum over the samples.
    percent_of_full: payload and overhead in per cent of the full cache, at 16 bits.
    timing: the mean times.
    buckets: the scores by LongBench-E's ranges of length.
    fidelity: the comparison with the full cache by kind of text.
    new_tokens: the length of answers in tokens; of a context's questions, the length of all answers together.
    empty: how many answers are empty.
    cut_thoughts: the share of answers that end inside their thought.
    questions: the scores by question, for contexts with several.
    pages_freed: None if a sample does not have them, because an older version stored it.
    compressed_percent: None if a sample does not have it.
    """

    prompt_tokens: float
    kept: float
    nominal: float | None
    payload: float
    overhead: float
    payload_kv_head: float | None
    payload_query_head: float | None
    full_bytes: float
    payload16: float
    overhead16: float
    full16: float
    percent_of_full: float
    decode_peak: int | None
    cut: int
    shrunk: int
    attended: float | None
    buckets: Mapping[str, BucketScore]
    timing: MeanTiming
    new_tokens: float | None = None
    empty: int = 0
    cut_thoughts: float = 0.0
    fidelity: Mapping[str, FidelitySummary] = field(default_factory=dict)
    questions: TurnsSummary | None = None
    pages_freed: PagesFreed | None = None
    compressed_percent: float | None = None


def share(payload16: float, overhead16: float, full16: float) -> float:
    """Return the bytes held in per cent of the full cache's bytes, both at 16 bits."""
    # 100 * (keys and values + scales, positions and other data beside them) / full cache
    return 100 * (payload16 + overhead16) / full16


def _list_fields(cls: type[DataclassInstance]) -> list[str]:
    return [name for name in cls.__dataclass_fields__ if name != "more"]


def _select_known(cls: type[DataclassInstance], record: Mapping[str, object]) -> dict[str, Any]:
    """Return the entries of a JSON record for which ``cls`` has a field."""
    fields = cls.__dataclass_fields__
    return {key: value for key, value in record.items() if key in fields and key != "more"}


def _select_unknown(cls: type[DataclassInstance], record: Mapping[str, object]) -> dict[str, object]:
    """Return the entries of a JSON record for which ``cls`` has no field."""
    fields = cls.__dataclass_fields__
    return {key: value for key, value in record.items() if key not in fields or key == "more"}


def _list_damaged_fields(record: Record) -> list[str]:
    """Return the fields of a cell.json with values that cannot be read; [] if there are none.

    A missing field is no damage, since records of older versions may lack it.
    """
    damaged = []
    for key, kind in CELL_RECORD.items():
        if key in record and not isinstance(record[key], kind):
            damaged.append(key)
    if damaged:
        return damaged
    # the types of all fields are right from here on
    if not all(isinstance(facts, dict) for facts in record.get("provenance", ())):
        return ["provenance"]
    identity = record.get("identity", {})
    # an imported cell has no chain in its identity
    if "chain" in identity and not _is_whole_chain(identity["chain"]):
        return ["identity"]
    return []


def _is_whole_chain(chain: object) -> bool:
    """Return True if the chain of an identity has every field that a label needs."""
    # JSON edited by hand may hold anything here, so each type is checked before use
    if not isinstance(chain, dict) or "per" not in chain or not isinstance(chain.get("stages"), list):
        return False
    for stage in chain["stages"]:
        if not isinstance(stage, dict) or "id" not in stage or "revision" not in stage:
            return False
        if not isinstance(stage.get("knobs"), dict):
            return False
    return True
