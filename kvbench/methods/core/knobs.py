"""The knobs of a stage: the kind of value that each takes by its declared type, and the refusal of a wrong one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields
from typing import Any, ClassVar

from kvbench.base.conf import is_whole
from kvbench.base.errors import UsageError

DEFAULT_RATIO = 0.25
"""The fraction of the prompt that a selector keeps where no budget is given."""


def is_knob(f: Field[Any]) -> bool:
    """Tell whether a field of a stage is a knob, which a user may set."""
    return bool(f.metadata.get("knob", True))


@dataclass(frozen=True)
class Rule:
    """A limit on a knob's values, in words and as a test. Null passes where the knob's type allows it."""

    allowed: str
    holds: Callable[[Any], bool]


def knob(default: Any, rule: Rule) -> Any:
    """Return the field of a knob under a rule, which also holds for subclasses with another default."""
    return field(default=default, metadata={"rule": rule})


def at_least(least: int, unit: str = "", null: bool = False) -> Rule:
    """Return the rule of a whole number of ``unit``, ``least`` or more."""
    of_unit = f" of {unit}" if unit else ""
    return Rule(f"a whole number{of_unit}, {least} or more{', or null' if null else ''}", lambda value: value >= least)


def one_of(*names: str) -> Rule:
    """Return the rule of a knob with these names as values."""
    return Rule(" or ".join(names), lambda value: value in names)


ODD = Rule("an odd whole number, 1 to 9999 (1: no pooling)", lambda width: 1 <= width < 10_000 and width % 2 == 1)
"""The rule of a width of pooling."""
MOST = 2**31 - 1
"""The largest whole number that a knob takes: no text has as many tokens."""
CODE_BITS = Rule("2, 3, 4 or 8", lambda bits: bits in (2, 3, 4, 8))


def allowed_kind(declared: str, value: Any) -> str:
    """Return the kind of value that a knob of type ``declared`` takes, in words, or '' if ``value`` is of that kind.

    Kinds are numbers, switches and null. Names, lists and ranges are checked by the stage itself.
    """
    if "str" in declared or "tuple" in declared or not any(t in declared for t in ("int", "float", "bool")):
        return ""
    optional = "None" in declared
    if value is None and optional:
        return ""
    kind = "a number" if "float" in declared else "a whole number"
    if "bool" in declared:
        kind, fits = "true or false", isinstance(value, bool)
    else:
        real = "float" in declared and isinstance(value, float) and math.isfinite(value)
        fits = is_whole(value) or real
    return "" if fits else f"{kind}, or null" if optional else kind


@dataclass(frozen=True, kw_only=True)
class Knobs:
    """A record whose fields are knobs that users type; ``id`` names the method that they belong to."""

    id: ClassVar[str]

    def __post_init__(self) -> None:
        for f in fields(self):
            kind = allowed_kind(str(f.type), getattr(self, f.name)) if is_knob(f) else ""
            self.require(f.name, not kind, kind)
        for f in fields(self):
            rule, value = self._rule(f.name), getattr(self, f.name)
            if rule is not None and not (value is None and "None" in str(f.type)):
                self.require(f.name, rule.holds(value), rule.allowed)
        self.check()
        for f in fields(self):
            value = getattr(self, f.name)
            # a rule of the knob's own says more
            self.require(f.name, not (is_knob(f) and is_whole(value) and abs(value) > MOST), f"at most {MOST}")

    @classmethod
    def _rule(cls, name: str) -> Rule | None:
        declared = [c.__dataclass_fields__.get(name) for c in cls.__mro__ if issubclass(c, Knobs)]
        return next((f.metadata["rule"] for f in declared if f is not None and "rule" in f.metadata), None)

    def check(self) -> None:
        """Raise UsageError for knobs at odds with each other. Each by itself is known to be of its kind and rule."""

    def knobs(self) -> dict[str, Any]:
        """Return the knobs by name, numbers in their declared type: 1 and 1.0 are one budget."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if is_knob(f)}
        reals = {f.name for f in fields(self) if str(f.type).startswith("float")}
        return {k: float(v) if k in reals and v is not None else v for k, v in values.items()}

    def require(self, knob: str, ok: bool, allowed: str) -> None:
        """Raise UsageError naming the knob, its value and what is allowed, unless ``ok``."""
        if not ok:
            raise UsageError(
                f"method.{self.id}.{knob}={getattr(self, knob)!r} is not possible: {allowed} "
                f"(see conf/method/{self.id}.yaml)"
            )

    def require_layers(self, knob: str, n_layers: int | None = None) -> None:
        """Sort a knob that lists layers by number. With ``n_layers``, only raise UsageError for layers past them."""
        layers = getattr(self, knob)
        if n_layers is not None:
            self.require(knob, all(i < n_layers for i in layers), f"the model has layers 0 to {n_layers - 1}")
            return
        listed = isinstance(layers, (list, tuple)) and all(is_whole(i) and i >= 0 for i in layers)
        self.require(knob, listed, "a list of layer numbers")
        object.__setattr__(self, knob, tuple(sorted(set(layers))))
