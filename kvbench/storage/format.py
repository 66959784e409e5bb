"""The interface between a storage format and the rows that decode in it, with the parts of a row that it receives.

Each format is one file with a subclass of ``Format``, and one line in ``storage.registry``.
Shapes: B rows of a batch, U entries of a format, Hq query heads, Hk kv heads, T new tokens, D head dimension.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvbench.kv.observation import Observation
from kvbench.kv.segment import LayerCache, Segment
from kvbench.storage.roles import Coder, Evictor, Lift, Masker, Rotary
from kvbench.storage.row_segments import describe_format


@dataclass(frozen=True, kw_only=True)
class StoredRow:
    """One layer of one row as it enters a decode batch, with the roles that method and model play while decoding.

    cache: the layer's cache.
    layer: the layer's number among the layers that methods compress.
    masker, coder, evictor: the roles that the row's method plays; None: it does not play the role.
    """

    cache: LayerCache
    layer: int = 0
    masker: Masker | None = None
    coder: Coder | None = None
    evictor: Evictor | None = None
    lift: Lift | None = None  # set where projections are low-rank
    rotary: Rotary | None = None  # set where the model has a rotation
    size: int | None = None  # the number of tokens that a single head will hold, if heads differ in that


@dataclass(frozen=True, kw_only=True)
class Room:
    """The room to reserve in each row for tokens still to come.

    tokens: how many tokens may still come.
    at_once: the most tokens that come in one step.
    alone: True if the tokens of one step are read and packed as if each came in a step of its own.
    windowed: True if the text may outgrow the model's sliding window.
    """

    tokens: int
    at_once: int = 1
    alone: bool = False
    windowed: bool = False


class Format(ABC):
    """Entries of one storage format in one layer of a decode batch: whole rows, or single heads of ragged rows."""

    takes_ragged: ClassVar[bool] = False
    """True for a format that takes rows with ragged heads, and rows of any lengths together.

    Other formats get ragged heads one by one, and only entries of similar length together.
    """

    moves: str = ""
    """The reason why steps differ, so that no CUDA graph of a step can be recorded; '' if all steps are alike."""

    attended: Tensor | None = None
    """[U], the tokens attended in the most recent step, as the mean over heads; None unless the method masks."""

    @abstractmethod
    def __init__(self, rows: Sequence[StoredRow], room: Room) -> None:
        """Store ``rows``, which have equal ``key``, with ``room`` for new tokens.

        Unused parts of the rows' caches must not be kept alive.
        """

    @classmethod
    @abstractmethod
    def takes(cls, row: StoredRow) -> bool:
        """Return True if a row can be stored in this format."""

    @classmethod
    def key(cls, row: StoredRow) -> Hashable:
        """Return the key that groups rows: rows with equal keys are stored and attended together."""
        return cls.segment_key(row)

    @staticmethod
    def segment_key(row: StoredRow) -> Hashable:
        """Return a key that is equal for rows whose segments can be stacked and attended by one softmax."""
        # one softmax needs an equal masker, and segments can be stacked if their formats are equal
        return (row.masker, tuple(describe_format(s) for s in row.cache.segments))

    @classmethod
    def head_sizes(cls, row: StoredRow) -> Sequence[int] | None:
        """Return how many tokens each head will hold, if heads are stored apart because they differ; else None."""
        return None

    @abstractmethod
    def add(self, k: Tensor, v: Tensor, positions: Tensor) -> None:
        """Add T new tokens at ``positions`` [U, T]: their k, v [U, Hk, T, D], or their latents [U, T, R]."""

    @abstractmethod
    def attend(self, query: Tensor, scale: float, window: int | None) -> Tensor:
        """Return attention [U, Hq, T, D] of the newest T tokens, query [U, Hq, T, D], over all stored tokens.

        ``window`` is the model's sliding window if the text has outgrown it, else None.
        """

    def attend_again(self, query: Tensor, scale: float, window: int | None) -> Tensor:
        """Return the attention of another layer that shares these keys and values. Arguments are those of ``attend``.

        It is called after ``attend`` in the same step. The method's running state does not change.
        """
        return self.attend(query, scale, window)

    @abstractmethod
    def keep(self, at: Tensor) -> None:
        """Drop all entries except the ascending indices ``at``."""

    @abstractmethod
    def tokens(self) -> Tensor:
        """Return for each entry the most tokens that any of its heads has held so far [U]."""

    @abstractmethod
    def payload(self) -> list[int]:
        """Return how many bytes of keys and values the tokens of each entry take now.

        An entry counts the bytes of one token times its own tokens. The batch's own memory is not counted: padding to
        the longest entry, free slots, and room for tokens to come.
        """

    def observation(self, u: int) -> Observation | None:
        """Return the observation that the method of entry ``u`` reads when it chooses again; None if it never does."""
        # only formats that evict have an observation
        return None

    @abstractmethod
    def segments(self, u: int, cache: LayerCache) -> tuple[Segment, ...]:
        """Return the segments that entry ``u`` holds now. The entry was loaded from ``cache``."""
