"""A suite as its file in conf/suite says it: the model, the parts, the budgets and the controls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvbench.base.conf import conf_dir, read_yaml
from kvbench.base.errors import UsageError, unknown

FOLDER = "suite"
"""The folder of suites, below conf/ and below a folder of results."""
SCORE, KL = "score", "kl"
"""The measures of a part: the tasks' scores, or the divergence from the full cache."""
CHANCE, CONTROL, NEGATIVE, METHOD = "chance", "control", "negative", "method"
"""The roles of rows. chance: random tokens, which score 0. negative: must come last. method: what is tested."""
FULL, QUICK = "full", "quick"
EDITIONS = (FULL, QUICK)
"""full: all prompts. quick: a few of them, for a first look, which no leaderboard takes."""


@dataclass(frozen=True, kw_only=True)
class SuitePart:
    """One ability that a suite measures.

    keys: the keys of `run` that say what is read. quick: those that the quick edition has in their place.
    measure: SCORE or KL. decoding: whether budgets hold while answers are decoded, too.
    """

    name: str
    about: str
    measure: str
    keys: Mapping[str, Any]
    quick: Mapping[str, Any] = field(default_factory=dict)
    decoding: bool = False

    def settings(self, edition: str) -> dict[str, Any]:
        """Return the keys of `run` for an edition."""
        settings = dict(self.keys)
        if edition == QUICK:
            settings.update(self.quick)
        return settings


@dataclass(frozen=True, kw_only=True)
class Control:
    """A row that every run of a suite has. options: the method's options other than its budget."""

    method: str
    role: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The method with its options, as ``random keep_window=32``."""
        return " ".join([self.method, *(f"{key}={value}" for key, value in self.options.items())])


@dataclass(frozen=True, kw_only=True)
class Suite:
    """A frozen suite.

    tokens: the length of the prompt on which budgets are counted in bytes.
    budgets: d of the budgets 1/d, the share of the full cache's bytes at 16 bits that a row may hold.
    floor: the divergence in nats a token at which KL parts score 100.
    """

    name: str
    about: str
    model: str
    dtype: str
    tokens: int
    budgets: tuple[int, ...]
    parts: tuple[SuitePart, ...]
    floor: float
    controls: tuple[Control, ...]

    def controls_of(self, role: str) -> list[Control]:
        """Return the controls with a role."""
        return [control for control in self.controls if control.role == role]


def names() -> list[str]:
    """Return the names of all suites."""
    return sorted(path.stem for path in (conf_dir() / FOLDER).glob("*.yaml"))


def load(name: str) -> Suite:
    """Return a suite by its name. Raises UsageError for an unknown one."""
    if name not in names():
        raise unknown("suite", name, names())
    path = conf_dir() / FOLDER / f"{name}.yaml"
    content = read_yaml(path)
    try:
        parts = [SuitePart(name=part, **fields) for part, fields in content.pop("parts").items()]
        controls = [Control(**fields) for fields in content.pop("controls")]
        budgets = tuple(content.pop("budgets"))
        return Suite(name=name, parts=tuple(parts), controls=tuple(controls), budgets=budgets, **content)
    except (KeyError, TypeError) as error:
        raise UsageError(f"{path} is not a suite: {error}") from None


def lock_path(name: str) -> Path:
    """Return the path of a suite's lock: the hashes of its prompts and of its checkpoint."""
    return conf_dir() / FOLDER / f"{name}.lock.json"
