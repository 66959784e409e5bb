"""The definition of a suite, read from its file in conf/suite: the model, the parts, the budgets and the controls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvbench.base.conf import conf_dir, read_yaml
from kvbench.base.errors import UsageError, unknown

FOLDER = "suite"
"""The folder of suites, below conf/ and below a folder of results."""
SCORE, KL = "score", "kl"
"""The measures of a part: the tasks' scores, or the divergence from the full cache."""
CHANCE, COMPARISON, CONTROL, NEGATIVE, METHOD = "chance", "comparison", "control", "negative", "method"
"""The roles of rows.

chance: random tokens, which score 0.
comparison: a row that is shown for comparison and not checked.
control: a row that must not be worse than the negative control.
negative: a row that must fail.
method: a method of the user.
"""
FULL, QUICK = "full", "quick"
EDITIONS = (FULL, QUICK)
"""The editions of a suite.

full: all prompts.
quick: a few prompts for a first look. Leaderboards accept full runs only.
"""


@dataclass(frozen=True, kw_only=True)
class SuitePart:
    """One ability that a suite measures.

    name: the part's name.
    about: its description for readers.
    measure: SCORE or KL.
    keys: the keys of `run` that choose the prompts.
    decoding: whether budgets also hold while answers are decoded.
    """

    name: str
    about: str
    measure: str
    keys: Mapping[str, object]
    decoding: bool = False


@dataclass(frozen=True, kw_only=True)
class Control:
    """A row that every run of a suite has beside the user's methods.

    method: the method, without options.
    role: one of the roles above.
    options: the method's options other than its budget.
    """

    method: str
    role: str
    options: Mapping[str, object] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The method with its options, such as ``random keep_window=32``."""
        return " ".join([self.method, *(f"{key}={value}" for key, value in self.options.items())])


@dataclass(frozen=True, kw_only=True)
class Suite:
    """One edition of a frozen suite.

    name: the suite's name.
    edition: one of EDITIONS.
    about: its description for readers.
    model: the model in the closed division.
    dtype: the number format of that model's weights and cache.
    tokens: the length of the prompt on which budgets are counted in bytes.
    budgets: the denominators d of the budgets, rising. A row may hold 1/d of the full cache's bytes at 16 bits.
    parts: the abilities that the suite measures.
    floor: the divergence in nats a token at which parts with the measure KL score 100.
    controls: the rows that every run has beside the user's methods.
    counts: the bytes that a budget counts, as ``match=`` counts them: ``bytes`` (all layers) or ``compressed``.
    """

    name: str
    edition: str
    about: str
    model: str
    dtype: str
    tokens: int
    budgets: tuple[int, ...]
    parts: tuple[SuitePart, ...]
    floor: float
    controls: tuple[Control, ...]
    counts: str = "bytes"


def suite_names() -> list[str]:
    """Return the names of all suites."""
    return sorted(path.stem for path in (conf_dir() / FOLDER).glob("*.yaml"))


def load(name: str, edition: str = FULL) -> Suite:
    """Return an edition of a suite by its name. Raises UsageError for an unknown one."""
    if name not in suite_names():
        raise unknown("suite", name, suite_names())
    path = conf_dir() / FOLDER / f"{name}.yaml"
    content = read_yaml(path)
    try:
        # every key that is read here leaves ``content``; the keys that stay are fields of Suite
        quick = content.pop("quick")
        budgets = content.pop("budgets")
        if edition == QUICK:
            budgets = quick["budgets"]
        parts = []
        for part, fields in content.pop("parts").items():
            keys = dict(fields.pop("keys"))
            if edition == QUICK:
                # the quick edition takes every key that it does not name from the full one
                keys.update(quick["parts"][part])
            parts.append(SuitePart(name=part, keys=keys, **fields))
        controls = [Control(**fields) for fields in content.pop("controls")]
        return Suite(
            name=name,
            edition=edition,
            parts=tuple(parts),
            controls=tuple(controls),
            budgets=tuple(budgets),
            **content,
        )
    except (KeyError, TypeError) as error:
        raise UsageError(f"{path} is not a suite: {error}") from None


def lock_path(name: str) -> Path:
    """Return the path of a suite's lock: the hashes of its prompts and of its checkpoint."""
    return conf_dir() / FOLDER / f"{name}.lock.json"
