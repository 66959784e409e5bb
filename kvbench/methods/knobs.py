"""The knobs of a stage: the kind of value that each takes by its declared type, and the refusal of a wrong one."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import Field, dataclass, fields
from typing import Any, ClassVar

from kvbench.conf import is_whole
from kvbench.errors import UsageError


def is_knob(f: Field[Any]) -> bool:
    """Tell whether a field of a stage is a knob, which a user may set."""
    return bool(f.metadata.get("knob", True))


def allowed_kind(declared: str, value: Any) -> str:
    """Return the kind of value that a knob of type ``declared`` takes, or '' where ``value`` is of that kind.

    Kinds are numbers, switches and null. Names, lists and ranges are checked by the stage itself.
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
            kind = allowed_kind(str(f.type), getattr(self, f.name)) if is_knob(f) else ""
            self.require(f.name, not kind, kind)
        self.check()

    def check(self) -> None:
        """Raise UsageError for knobs out of range or at odds. Numbers and switches are known to be such."""

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

    def require_at_least(self, knob: str, least: int, unit: str = "") -> None:
        """Raise UsageError for a whole number below ``least``. Null passes where the knob may be null."""
        value, null = getattr(self, knob), any(f.name == knob and "None" in str(f.type) for f in fields(self))
        allowed = f"a whole number{f' of {unit}' if unit else ''}, {least} or more{', or null' if null else ''}"
        self.require(knob, value is None or value >= least, allowed)

    def require_one_of(self, knob: str, names: Iterable[str]) -> None:
        """Raise UsageError unless the knob is one of ``names``."""
        self.require(knob, getattr(self, knob) in tuple(names), " or ".join(names))

    def require_odd(self, knob: str) -> None:
        """Raise UsageError unless the knob is an odd width of pooling."""
        width = getattr(self, knob)
        self.require(knob, width >= 1 and width % 2 == 1, "an odd whole number, 1 or more (1: no pooling)")

    def require_layers(self, knob: str, n_layers: int | None = None) -> None:
        """Sort a knob that lists layers by number. With ``n_layers``, only raise UsageError for layers past them."""
        layers = getattr(self, knob)
        if n_layers is not None:
            self.require(knob, all(i < n_layers for i in layers), f"the model has layers 0 to {n_layers - 1}")
            return
        listed = isinstance(layers, (list, tuple)) and all(is_whole(i) and i >= 0 for i in layers)
        self.require(knob, listed, "a list of layer numbers")
        object.__setattr__(self, knob, tuple(sorted(set(layers))))
