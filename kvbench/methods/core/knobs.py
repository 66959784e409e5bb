"""The knobs of a stage: their kinds, their limits, and errors for wrong values.

A knob is a field of a dataclass. Its annotation decides the kind of value that it takes, such as a whole number. A
``Rule`` may limit the values further.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields
from typing import Any, ClassVar

from kvbench.base.conf import is_whole
from kvbench.base.errors import UsageError

DEFAULT_RATIO = 0.25
"""The fraction of the prompt that a selector keeps if neither kv_size nor kv_ratio is set."""


def is_knob(f: Field[Any]) -> bool:
    """Return True if a field of a stage is a knob, that is, if users may set it."""
    # a field without metadata is a knob as well
    return bool(f.metadata.get("knob", True))


@dataclass(frozen=True)
class Rule:
    """A limit on a knob's values. Null passes if the knob's type allows it.

    allowed: the allowed values in words, for the error.
    holds: the test. It returns True for an allowed value.
    """

    allowed: str
    holds: Callable[[Any], bool]


def knob(default: Any, rule: Rule) -> Any:
    """Return a dataclass field for a knob under a rule.

    The rule also holds in subclasses that declare the knob again to give it another default.
    """
    return field(default=default, metadata={"rule": rule})


def at_least(least: int, unit: str = "", null: bool = False) -> Rule:
    """Return the rule for a whole number of ``unit`` that is ``least`` or more.

    ``null`` says whether the error lists null among the allowed values. The knob's type decides whether null passes.
    """
    allowed = "a whole number"
    if unit:
        allowed += f" of {unit}"
    allowed += f", {least} or more"
    if null:
        allowed += ", or null"
    return Rule(allowed, lambda value: value >= least)


def one_of(*names: str) -> Rule:
    """Return the rule for a knob whose values are these names."""
    return Rule(" or ".join(names), lambda value: value in names)


ODD = Rule("an odd whole number, 1 to 9999 (1: no pooling)", lambda width: 1 <= width < 10_000 and width % 2 == 1)
"""The rule for a width of pooling, in tokens."""
MOST = 2**31 - 1
"""The largest whole number that a knob takes. No text has as many tokens."""
CODE_BITS = Rule("2, 3, 4 or 8", lambda bits: bits in (2, 3, 4, 8))
"""The rule for the bits of a packed number."""
EVEN = Rule("an even whole number of channels, 2 or more", lambda group: group >= 2 and group % 2 == 0)
"""The rule of the channels of a block: codes of 4 bits are stored in pairs."""
TEMPERATURE = Rule("a number, 0.05 or more", lambda x: x >= 0.05)
"""The rule of CAKE's tau1 and tau2. A smaller tau raises the preference to a power 1 / tau that overflows fp64."""
KEPT_SHARE = Rule("a fraction of the prompt kept, above 0 and at most 1", lambda share: 0 < share <= 1)
"""The rule for ``kv_ratio``."""
DECODE_SHARE = Rule("a share of all tokens so far, above 0 and at most 1, or null", lambda share: 0 < share <= 1)
"""The rule for ``decode_ratio``, the budget while decoding that grows with the text."""


def make_fraction_rule(kind: str) -> Rule:
    """Return the rule for a fraction of channels to remove, such that some channels stay. ``kind``: key or value."""
    return Rule(f"a fraction of the {kind} channels removed, at least 0 and below 1", lambda ratio: 0 <= ratio < 1)


def find_rule(source: str) -> Rule | None:
    """Return the rule that a method's file states as ``source``; None if it needs more names than this file has."""
    try:
        return eval(source, globals())
    except NameError:
        return None


def explain_value(method: str, knob: str, value: object, allowed: str) -> UsageError:
    """Return the error for a knob's value that is not possible. ``allowed`` are the allowed values in words."""
    return UsageError(f"method.{method}.{knob}={value!r} is not possible: {allowed} (see conf/method/{method}.yaml)")


def name_missed_kind(declared: str, value: Any) -> str:
    """Return '' if ``value`` is of the kind that a knob takes, else this kind in words, such as "a whole number".

    Kinds are numbers, switches and null. Each stage checks names, lists and ranges itself.

    declared: the knob's annotation as text, such as "int | None".
    """
    takes_text_or_list = "str" in declared or "tuple" in declared
    takes_number_or_switch = any(kind in declared for kind in ("int", "float", "bool"))
    if takes_text_or_list or not takes_number_or_switch:
        return ""
    optional = "None" in declared
    if value is None and optional:
        return ""
    if "bool" in declared:
        kind = "true or false"
        fits = isinstance(value, bool)
    elif "float" in declared:
        kind = "a number"
        is_real = isinstance(value, float) and math.isfinite(value)
        fits = is_whole(value) or is_real
    else:
        kind = "a whole number"
        fits = is_whole(value)
    if fits:
        return ""
    if optional:
        return f"{kind}, or null"
    return kind


@dataclass(frozen=True, kw_only=True)
class Knobs:
    """A record whose fields are knobs that users type. ``id`` names the method to which they belong.

    All values are checked when the record is made.
    """

    id: ClassVar[str]

    def __post_init__(self) -> None:
        """Check the kind and the rule of each knob, then how knobs go together.

        Raises UsageError with the knob, its value and the allowed values for the first that is wrong.
        """
        # kinds are checked first, because a rule may only compare values of the right kind
        for f in fields(self):
            if is_knob(f):
                missed_kind = name_missed_kind(str(f.type), getattr(self, f.name))
                self.require(f.name, not missed_kind, missed_kind)
        for f in fields(self):
            rule, value = self._find_rule(f.name), getattr(self, f.name)
            # a rule says nothing about null where the knob's type allows it
            is_null = value is None and "None" in str(f.type)
            if rule is not None and not is_null:
                self.require(f.name, rule.holds(value), rule.allowed)
        self.check()
        # the limit MOST is checked last, because the knob's rule and ``check`` give better reasons
        for f in fields(self):
            value = getattr(self, f.name)
            too_large = is_knob(f) and is_whole(value) and abs(value) > MOST
            self.require(f.name, not too_large, f"at most {MOST}")

    @classmethod
    def _find_rule(cls, name: str) -> Rule | None:
        """Return the rule of a knob from the class, or from the nearest base class that has one; None without any."""
        for base in cls.__mro__:
            # other bases, such as ``Masker``, have no knobs
            if not issubclass(base, Knobs):
                continue
            f = base.__dataclass_fields__.get(name)
            if f is not None and "rule" in f.metadata:
                rule: Rule = f.metadata["rule"]
                return rule
        return None

    def check(self) -> None:
        """Raise UsageError for knobs that contradict each other. Subclasses override this.

        Each knob's own kind and rule are checked before.
        """

    def knobs(self) -> dict[str, Any]:
        """Return the knobs by name, with numbers in their declared type: 1 and 1.0 are the same budget."""
        values: dict[str, Any] = {}
        for f in fields(self):
            if not is_knob(f):
                continue
            value = getattr(self, f.name)
            # YAML reads 1 as a whole number even if the knob is a fraction
            if str(f.type).startswith("float") and value is not None:
                value = float(value)
            values[f.name] = value
        return values

    def require(self, knob: str, ok: bool, allowed: str) -> None:
        """Raise UsageError with the knob, its value and the ``allowed`` values, unless ``ok``."""
        if not ok:
            raise explain_value(self.id, knob, getattr(self, knob), allowed)

    def sort_layers(self, knob: str) -> None:
        """Bring a knob that lists layers into one form: a tuple in ascending order without duplicates.

        Raises UsageError if the knob is no list of layer numbers.
        """
        layers = getattr(self, knob)
        is_list = isinstance(layers, (list, tuple)) and all(is_whole(i) and i >= 0 for i in layers)
        self.require(knob, is_list, "a list of layer numbers")
        # equal sets of layers are one method, however the list is written; a frozen dataclass can set its own fields
        # only by object.__setattr__
        object.__setattr__(self, knob, tuple(sorted(set(layers))))

    def require_layers(self, knob: str, n_layers: int) -> None:
        """Raise UsageError if a knob lists a layer that a model of ``n_layers`` layers does not have."""
        layers = getattr(self, knob)
        self.require(knob, all(i < n_layers for i in layers), f"the model has layers 0 to {n_layers - 1}")
