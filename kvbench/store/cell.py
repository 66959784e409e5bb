"""A cell: one number of a table, with everything that decides it. A hash of these facts names its samples on disk."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from kvbench.methods.core.chain import Chain
from kvbench.tasks.base import Task


@dataclass(frozen=True)
class Cell:
    """One number of a table: a model, a chain and a task, with everything that decides the number.

    ``id`` is a hash of the identity alone: samples of equal ids may be pooled.

    identity: all facts that decide the number, as they are stored.
    label: the method with its budgets and knobs. It names the row of the table.
    column: the task with any swept values. It heads the column of the table.
    hidden: True for a cell that is read only to compare others with it, and is not stored.
    """

    identity: Mapping[str, Any]
    chain: Chain
    label: str
    task: Task
    column: str
    hidden: bool = False

    @property
    def fidelity(self) -> bool:
        """True if the cell's distributions are compared with the full cache's."""
        return "fidelity" in self.identity

    @cached_property
    def id(self) -> str:
        """The id of the cell. Its folder in the store has this name."""
        return hash_identity(self.identity)

    @property
    def full(self) -> Cell:
        """The cell of the full cache under the same settings."""
        # a chain without stages compresses nothing
        full_chain = Chain()
        identity = dict(self.identity)
        identity["chain"] = full_chain.identity()
        return replace(self, identity=identity, chain=full_chain, label="full")


def hash_identity(identity: Mapping[str, Any]) -> str:
    """Return the id of the cell with an identity: 16 hexadecimal digits."""
    # sorted keys make the order of settings irrelevant
    text = json.dumps(identity, sort_keys=True, default=str)
    # 16 hexadecimal digits are 64 bits: among a million cells, two share an id with a probability of about 3e-8
    return hashlib.sha256(text.encode()).hexdigest()[:16]
