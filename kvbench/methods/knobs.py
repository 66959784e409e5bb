"""The knobs of a stage: what kind of value each takes, by its declared type, and how a wrong one is refused."""

from __future__ import annotations

import math
from dataclasses import Field, dataclass, fields
from typing import Any, ClassVar

from kvbench.conf import is_whole
from kvbench.errors import UsageError


def is_knob(f: Field[Any]) -> bool:
    """Whether a field of a stage is a knob: what a user may set."""
    return bool(f.metadata.get("knob", True))


def are_layers(value: Any) -> bool:
    """Whether a value lists layers by number, from 0."""
    return isinstance(value, (list, tuple)) and all(is_whole(i) and i >= 0 for i in value)


def wrong_kind(declared: str, value: Any) -> str:
    """What a knob declared as ``declared`` has to be where ``value`` is not of that kind, else ''.

    Numbers, switches and null; names and lists are the stage's own matter, as are ranges.
    """
    if "str" in declared or "tuple" in declared or not any(t in declared for t in ("int", "float", "bool")):
        return ""
    optional = "None" in declared
    if value is None and optional:
        return ""
    kind = "a number" if "float" in declared else "a whole number"
    if "bool" in declared:
        kind, ok = "true or false", isinstance(value, bool)
    else:
        real = "float" in declared and isinstance(value, float) and math.isfinite(value)
        ok = is_whole(value) or real
    return "" if ok else f"{kind}, or null" if optional else kind


@dataclass(frozen=True, kw_only=True)
class Knobs:
    """A record whose fields are knobs that users type; ``id`` names the method that they belong to."""

    id: ClassVar[str]

    def __post_init__(self) -> None:
        for f in fields(self):
            kind = wrong_kind(str(f.type), getattr(self, f.name)) if is_knob(f) else ""
            self.require(f.name, not kind, kind)
        self.check()

    def check(self) -> None:
        """Raise UsageError for knobs out of range or at odds; before, numbers and switches were found to be such."""

    def knobs(self) -> dict[str, Any]:
        """The knobs by name, numbers in their declared type: 1 and 1.0 are one budget."""
        found = {f.name: getattr(self, f.name) for f in fields(self) if is_knob(f)}
        reals = {f.name for f in fields(self) if str(f.type).startswith("float")}
        return {k: float(v) if k in reals and v is not None else v for k, v in found.items()}

    def require(self, knob: str, ok: bool, allowed: str) -> None:
        """Raise UsageError naming the knob, its value and what is allowed, unless ``ok``."""
        if not ok:
            raise UsageError(
                f"method.{self.id}.{knob}={getattr(self, knob)!r} is not possible: {allowed} "
                f"(see conf/method/{self.id}.yaml)"
            )

    def at_least(self, knob: str, least: int, unit: str = "") -> None:
        """Raise UsageError for a whole number below ``least``; null, where the knob may be, is none."""
        value, null = getattr(self, knob), any(f.name == knob and "None" in str(f.type) for f in fields(self))
        allowed = f"a whole number{f' of {unit}' if unit else ''}, {least} or more{', or null' if null else ''}"
        self.require(knob, value is None or value >= least, allowed)
