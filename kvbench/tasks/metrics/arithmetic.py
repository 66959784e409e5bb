"""Numbers as models write them: ``3.5e-8``, ``1,234``, ``\\frac{1}{2}``, ``2\\pi``, ``3 × 10^{-8} m``, ``25%``.

A recursive-descent evaluator that reads as far as it understands and stops there, so that units and words may
follow. It never runs the text as code.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping

_TOKEN = re.compile(r"\s*(?:([0-9]+(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?|\.[0-9]+(?:[eE][-+]?[0-9]+)?)|([A-Za-z]+)|(\S))")
_PLAIN = re.compile(r"(?<![0-9A-Za-z.)])-?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_THOUSANDS = re.compile(r"(?<![0-9.,])([0-9]{1,3}(?:,[0-9]{3})+)(?![0-9,])")
_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_POWER = re.compile(r"\^\s*\{([^{}]*)\}|\*\*")
_ROOT = re.compile(r"\\sqrt\s*\{([^{}]*)\}")
_STYLE = re.compile(r"\\(?:left|right|text|mathrm|displaystyle|boxed|[,;!: ])|[$°]")
_FUNCTIONS: Mapping[str, Callable[[float], float]] = {
    "sqrt": math.sqrt,
    "exp": math.exp,
    "ln": math.log,
    "log": math.log,
    "sin": math.sin,
    "cos": math.cos,
    "tan": math.tan,
}
_Token = tuple[str | None, str | None, str | None]
_Operation = Callable[[float, float], float]
_SUMS: Mapping[str, _Operation] = {"+": operator.add, "-": operator.sub}
_PRODUCTS: Mapping[str, _Operation] = {"*": operator.mul, "/": operator.truediv}
_CONSTANTS = {"pi": math.pi, "e": math.e}
_NUMBER, _NAME, _SIGN = range(3)
_DEEPEST = 50
_LONGEST = 300
"""Digits a number may have: more is noise, and Python refuses to read 5,000."""


def clean(text: str) -> str:
    """Return a text with its LaTeX and typographic signs rewritten as plain operators and brackets."""
    text = _STYLE.sub(" ", text.replace("{,}", ","))
    for sign, plain in (("−", "-"), ("×", "*"), ("·", "*"), ("\\times", "*"), ("\\cdot", "*"), ("π", " pi ")):
        text = text.replace(sign, plain)
    text = re.sub(r"\\pi(?![A-Za-z])", " pi ", text)
    for _ in range(_DEEPEST):
        simpler = _FRACTION.sub(r"((\1)/(\2))", _ROOT.sub(r" sqrt(\1)", _POWER.sub(_power, text)))
        if simpler == text:
            break
        text = simpler
    return text.replace("\\", " ")


def evaluate(text: str) -> float | None:
    """Return the value of the first expression in a text, as far as it can be read; None if there is none."""
    text = _THOUSANDS.sub(lambda m: m[1].replace(",", ""), clean(text))
    tokens: list[_Token] = [(m[1], m[2], m[3]) for m in _TOKEN.finditer(text)]
    for start, (number, name, sign) in enumerate(tokens):
        # A single e opens nothing but a power: "i.e. 5" is 5.
        is_name = (
            name in _FUNCTIONS or name == "pi" or (name == "e" and tokens[start + 1 : start + 2] == [(None, None, "^")])
        )
        if number or is_name or sign in ("-", "("):
            try:
                value = _Reader(tokens, start).sum(0)
            except _Unreadable:
                continue
            except (ArithmeticError, ValueError):
                return None
            return value if math.isfinite(value) else None
    return None


def numbers(text: str) -> list[float]:
    """Return all numbers that stand in a text, in order; no arithmetic is done."""
    plain = _THOUSANDS.sub(lambda m: m[1].replace(",", ""), text.replace("−", "-").replace("{,}", ","))
    return [float(m[0]) for m in _PLAIN.finditer(plain) if len(m[0]) <= _LONGEST and math.isfinite(float(m[0]))]


def _power(match: re.Match[str]) -> str:
    return f"^({match[1]})" if match[1] is not None else "^"


class _Unreadable(Exception):
    pass


class _Reader:
    """Recursive descent over tokens (number, name, sign); a failure after an operator ends before that operator."""

    def __init__(self, tokens: list[_Token], at: int) -> None:
        self.tokens, self.at = tokens, at

    def sum(self, depth: int) -> float:
        return self._chain(depth, _SUMS, self._product)

    def _product(self, depth: int) -> float:
        return self._chain(depth, _PRODUCTS, self._signed)

    def _chain(self, depth: int, operators: Mapping[str, _Operation], operand: Callable[[int], float]) -> float:
        value = operand(depth + 1)
        while True:
            operator_at = self.at
            # 2 pi and 2 sqrt(3): a name multiplies the number before it.
            implied = "*" in operators and self._peek(_NAME) in ("pi", *_FUNCTIONS)
            sign = "*" if implied else self._peek(_SIGN)
            if sign not in operators:
                return value
            self.at += not implied
            try:
                right = operand(depth + 1)
            except _Unreadable:
                self.at = operator_at
                return value
            value = operators[sign](value, right)

    def _signed(self, depth: int) -> float:
        if self._peek(_SIGN) in ("-", "+"):
            negative = self._peek(_SIGN) == "-"
            self.at += 1
            value = self._signed(self._deeper(depth))
            return -value if negative else value
        value = self._atom(depth)
        caret_at = self.at
        if self._peek(_SIGN) == "^":
            self.at += 1
            try:
                raised = float(value) ** float(self._signed(self._deeper(depth)))
            except _Unreadable:
                self.at = caret_at
                return value
            if isinstance(raised, complex):
                raise ValueError(f"{value}^... is no real number")
            value = raised
        return value

    def _atom(self, depth: int) -> float:
        if number := self._peek(_NUMBER):
            self.at += 1
            if len(number) > _LONGEST:
                raise _Unreadable
            return self._suffixed(float(number))
        if name := self._peek(_NAME):
            self.at += 1
            if name in _CONSTANTS:
                return _CONSTANTS[name]
            if name in _FUNCTIONS:
                return _FUNCTIONS[name](self._atom(self._deeper(depth)))
        elif self._peek(_SIGN) == "(":
            self.at += 1
            value = self.sum(self._deeper(depth))
            if self._peek(_SIGN) == ")":
                self.at += 1
                return self._suffixed(value)
        raise _Unreadable

    def _suffixed(self, value: float) -> float:
        if self._peek(_SIGN) == "%":
            self.at += 1
            return value / 100
        if self._peek(_SIGN) == "!" and 0 <= value <= 170 and value == int(value):
            self.at += 1
            return float(math.factorial(int(value)))
        return value

    def _peek(self, kind: int) -> str:
        return (self.tokens[self.at][kind] or "") if self.at < len(self.tokens) else ""

    def _deeper(self, depth: int) -> int:
        if depth > _DEEPEST:
            raise _Unreadable
        return depth + 1
