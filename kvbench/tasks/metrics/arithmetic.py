"""Numbers as models write them: ``3.5e-8``, ``1,234``, ``\\frac{1}{2}``, ``2\\pi``, ``3 × 10^{-8} m``, ``25%``.

A recursive-descent evaluator reads a text as far as it understands it and stops there. Units and words may follow. The
evaluator never runs the text as code.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence

# a token is one of three groups: a number, a name, or any other sign
_TOKEN = re.compile(r"\s*(?:([0-9]+(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?|\.[0-9]+(?:[eE][-+]?[0-9]+)?)|([A-Za-z]+)|(\S))")
# no digit, letter, dot or ) may stand before a number: the 5 of x5 is part of a name, the minus of 7-3 is no sign
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
"""(number, name, other sign), of which one is a text and the others are None."""
_Operation = Callable[[float, float], float]
"""The function of an operator, from its two operands to their result."""
_SUMS: Mapping[str, _Operation] = {"+": operator.add, "-": operator.sub}
_PRODUCTS: Mapping[str, _Operation] = {"*": operator.mul, "/": operator.truediv}
_CONSTANTS = {"pi": math.pi, "e": math.e}
# names that multiply a number before them, such as 2 pi and 2 sqrt(3); an e behind a number may be a unit or a word
_FACTORS = frozenset(_FUNCTIONS) | {"pi"}
# places in a token
_NUMBER, _NAME, _SIGN = range(3)
_DEEPEST = 50
"""The most levels of nesting: hostile answers of thousands of brackets must not exhaust Python's stack."""
_LONGEST = 300
"""The most characters of a number. Longer ones are noise, and Python refuses to read 5,000 digits."""


def rewrite_operators(text: str) -> str:
    """Return a text with its LaTeX and typographic signs rewritten as plain operators and brackets."""
    text = _STYLE.sub(" ", text.replace("{,}", ","))
    for sign, plain in (("−", "-"), ("×", "*"), ("·", "*"), ("\\times", "*"), ("\\cdot", "*"), ("π", " pi ")):
        text = text.replace(sign, plain)
    text = re.sub(r"\\pi(?![A-Za-z])", " pi ", text)
    # the patterns match braces without braces inside; each pass resolves the innermost level of nested LaTeX
    for _ in range(_DEEPEST):
        simpler = _POWER.sub(_write_power, text)
        simpler = _ROOT.sub(r" sqrt(\1)", simpler)
        simpler = _FRACTION.sub(r"((\1)/(\2))", simpler)
        if simpler == text:
            break
        text = simpler
    return text.replace("\\", " ")


def evaluate_first(text: str) -> float | None:
    """Return the value of the first expression in a text, as far as it can be read.

    Returns None if there is no expression, or if the first one has no finite value.
    """
    text = _join_thousands(rewrite_operators(text))
    tokens: list[_Token] = [(match[1], match[2], match[3]) for match in _TOKEN.finditer(text)]
    for start in range(len(tokens)):
        if not _begins_expression(tokens, start):
            continue
        try:
            value = _Reader(tokens, start).read_sum(depth=0)
        except _Unreadable:
            continue
        except (ArithmeticError, ValueError):
            # 1/0 or the root of a negative number: the expression is the answer, but it has no value
            return None
        if not math.isfinite(value):
            return None
        return value
    return None


def _begins_expression(tokens: Sequence[_Token], start: int) -> bool:
    """Return True if an expression can begin at a token: a number, a minus, a parenthesis, or a name of _FACTORS."""
    number, name, sign = tokens[start]
    if number or sign in ("-", "(") or name in _FACTORS:
        return True
    # a single e begins only a power such as e^2: "i.e. 5" is 5. The slice is empty behind the last token
    next_token = tokens[start + 1 : start + 2]
    return name == "e" and next_token == [(None, None, "^")]


def read_numbers(text: str) -> list[float]:
    """Return all finite numbers of at most _LONGEST characters in a text, in order, without any arithmetic."""
    plain = _join_thousands(text.replace("−", "-").replace("{,}", ","))
    values = []
    for match in _PLAIN.finditer(plain):
        if len(match[0]) <= _LONGEST:
            value = float(match[0])
            if math.isfinite(value):
                values.append(value)
    return values


def _join_thousands(text: str) -> str:
    """Return a text in which 1,234 is 1234."""
    return _THOUSANDS.sub(lambda match: match[1].replace(",", ""), text)


def _write_power(match: re.Match[str]) -> str:
    """Return ``^(...)`` for LaTeX's ``^{...}``. Return ``^`` for ``**``, which has no braces."""
    if match[1] is None:
        return "^"
    return f"^({match[1]})"


class _Unreadable(Exception):
    """The error for a place where no expression can be read."""


class _Reader:
    """Recursive descent over tokens (number, name, sign), from the place ``at`` on.

    The grammar is::

        sum     = product { ("+" | "-") product }
        product = signed { ("*" | "/") signed | implied signed }
        signed  = { "+" | "-" } atom [ "^" signed ]
        atom    = (number | "(" sum ")") [ "%" | "!" ] | constant | function atom

    If the operand behind an operator cannot be read, the expression ends before the operator. Methods raise _Unreadable
    if nothing can be read at ``at``. Their argument ``depth`` counts the levels of nesting so far.
    """

    def __init__(self, tokens: list[_Token], at: int) -> None:
        self.tokens, self.at = tokens, at

    def read_sum(self, depth: int) -> float:
        """Return the value of the sum that begins at ``at``, and move ``at`` behind it."""
        return self._read_chain(depth, _SUMS, self._read_product)

    def _read_product(self, depth: int) -> float:
        """Return the value of the product that begins at ``at``, and move ``at`` behind it."""
        return self._read_chain(depth, _PRODUCTS, self._read_signed)

    def _read_chain(
        self, depth: int, operators: Mapping[str, _Operation], read_operand: Callable[[int], float]
    ) -> float:
        """Return the value of operands that stand between operators of one rank, evaluated from left to right.

        operators: the functions of these operators, by their signs.
        read_operand: reads an operand, given the depth.
        """
        value = read_operand(depth + 1)
        while True:
            operator_at = self.at
            if "*" in operators and self._peek(_NAME) in _FACTORS:
                # 2 pi and 2 sqrt(3) are products without a sign to pass over
                sign = "*"
            else:
                sign = self._peek(_SIGN)
                if sign not in operators:
                    return value
                self.at += 1
            try:
                right = read_operand(depth + 1)
            except _Unreadable:
                # the operator belongs to the text behind the expression
                self.at = operator_at
                return value
            value = operators[sign](value, right)

    def _read_signed(self, depth: int) -> float:
        """Return the value of an atom with its signs and its power. The power binds closer: -2^2 is -4."""
        sign = self._peek(_SIGN)
        if sign in ("-", "+"):
            self.at += 1
            value = self._read_signed(self._next_depth(depth))
            if sign == "-":
                return -value
            return value
        value = self._read_atom(depth)
        if self._peek(_SIGN) != "^":
            return value
        caret_at = self.at
        self.at += 1
        try:
            # the exponent reads its own power first, so powers group from the right
            exponent = self._read_signed(self._next_depth(depth))
        except _Unreadable:
            # the caret belongs to the text behind the expression
            self.at = caret_at
            return value
        raised = float(value) ** float(exponent)
        # Python gives a complex number for a fractional power of a negative number
        if isinstance(raised, complex):
            raise ValueError(f"{value}^... is no real number")
        return raised

    def _read_atom(self, depth: int) -> float:
        """Return the value of a number, a constant, a function or a parenthesis, and move behind it.

        Raises _Unreadable if none of these stands here.
        """
        if number := self._peek(_NUMBER):
            self.at += 1
            # so long a number is noise, and could make the arithmetic slow
            if len(number) > _LONGEST:
                raise _Unreadable
            return self._read_suffix(float(number))
        if name := self._peek(_NAME):
            self.at += 1
            if name in _CONSTANTS:
                return _CONSTANTS[name]
            if name in _FUNCTIONS:
                argument = self._read_atom(self._next_depth(depth))
                return _FUNCTIONS[name](argument)
        elif self._peek(_SIGN) == "(":
            self.at += 1
            value = self.read_sum(self._next_depth(depth))
            if self._peek(_SIGN) == ")":
                self.at += 1
                return self._read_suffix(value)
        raise _Unreadable

    def _read_suffix(self, value: float) -> float:
        """Return ``value`` in per cent or its factorial if such a sign follows, else ``value`` itself."""
        if self._peek(_SIGN) == "%":
            self.at += 1
            return value / 100
        # 170! is the largest factorial below the largest float
        if self._peek(_SIGN) == "!" and 0 <= value <= 170 and value == int(value):
            self.at += 1
            return float(math.factorial(int(value)))
        return value

    def _peek(self, kind: int) -> str:
        """Return the text of the next token if it is of ``kind`` (_NUMBER, _NAME or _SIGN), else ''."""
        if self.at >= len(self.tokens):
            return ""
        return self.tokens[self.at][kind] or ""

    def _next_depth(self, depth: int) -> int:
        """Return the depth of the next level. Raises _Unreadable beyond the deepest one."""
        if depth > _DEEPEST:
            raise _Unreadable
        return depth + 1
