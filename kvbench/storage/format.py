"""What a storage format does with the rows that decode in it, and what it is given of a row.

A format is one file with a subclass of ``Format`` and one line in ``storage.registry``.
Shapes: B rows of a batch, U entries of a format, Hq query heads, Hk kv heads, T new tokens, D head dimension.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvbench.cache.segment import LayerCache, Segment
from kvbench.storage.roles import Evictor, Lift, Masker, Rotary, RowCoder
from kvbench.storage.row_segments import format_of


@dataclass(frozen=True, kw_only=True)
class StoredRow:
    """One layer of one row as a batch is given it, and what its method does while decoding."""

    cache: LayerCache
    layer: int = 0
    masker: Masker | None = None
    coder: RowCoder | None = None
    evictor: Evictor | None = None
    lift: Lift | None = None
    rotary: Rotary | None = None  # the model's, where it has one


@dataclass(frozen=True, kw_only=True)
class Room:
    """What is still to come: ``tokens`` of each row, ``at_once`` of them in one step at most."""

    tokens: int
    at_once: int = 1
    windowed: bool = False  # whether the text may outgrow the model's sliding window


class Format(ABC):
    """Entries of one storage format in one layer of a decode batch: whole rows, or single heads of ragged rows."""

    takes_ragged: ClassVar[bool] = False
    """Whether it takes rows whose heads hold different numbers of tokens, and rows of any lengths together. Others get
    such heads one by one, and entries of which none is much longer than another."""

    moves: str = ""
    """Why one step is not like the next, so that no graph of it can be recorded; '' if they are alike."""

    attended: Tensor | None = None
    """Tokens that the last step attended, the mean over heads [U], where the method masks."""

    @abstractmethod
    def __init__(self, rows: Sequence[StoredRow], room: Room) -> None:
        """Load rows of equal ``key``. What it does not need of their caches it must not keep alive."""

    @classmethod
    @abstractmethod
    def takes(cls, row: StoredRow) -> bool:
        """Whether a row is stored in this format."""

    @classmethod
    def key(cls, row: StoredRow) -> Hashable:
        """What rows must share to be stored and attended together."""
        return (row.masker, *(format_of(s) for s in row.cache.segments))

    @abstractmethod
    def add(self, k: Tensor, v: Tensor, positions: Tensor) -> None:
        """Take k, v [U, Hk, T, D], or latents [U, T, R], of T new tokens at ``positions`` [U, T]."""

    @abstractmethod
    def attend(self, query: Tensor, scale: float, window: int | None) -> Tensor:
        """Attention of query [U, Hq, T, D] of the tokens just added over all that is stored -> [U, Hq, T, D].

        ``window`` is the model's sliding window where the text has outgrown it.
        """

    @abstractmethod
    def keep(self, at: Tensor) -> None:
        """Go on with the entries ``at`` (ascending) only."""

    @abstractmethod
    def tokens(self) -> Tensor:
        """The most tokens that any head of each entry has held so far [U]."""

    @abstractmethod
    def payload(self) -> list[int]:
        """Bytes of keys and values behind the tokens of each entry now.

        An entry's share of a tensor is what the tensor costs a token, times the entry's own tokens: padding to the
        longest, free slots and room for tokens to come belong to the batch.
        """

    @abstractmethod
    def segments(self, u: int, cache: LayerCache) -> tuple[Segment, ...]:
        """One entry's tokens, of which ``cache`` are those that it was loaded with; copies, or all that is stored."""
