"""``key=value`` arguments, and the keys of verbs other than ``run``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvbench.base.errors import UsageError, unknown


@dataclass(frozen=True)
class Key:
    """One key of a verb.

    name: the key.
    default: the text that is read if the user does not give the key. If it is None, the value is None, too.
    read: a function from a text to its value. It raises ValueError for a text that is not allowed.
    allowed: the allowed values in words, for the message to the user.
    """

    name: str
    default: str | None = None
    read: Callable[[str], Any] = str
    allowed: str = ""

    def value(self, texts: Mapping[str, str]) -> Any:
        """Return the value of the key's text, or of its default. Raises UsageError for a text that is not allowed."""
        text = texts.get(self.name, self.default)
        if text is None:
            return None
        try:
            return self.read(text)
        # a UsageError is a ValueError, too, but has a message of its own
        except UsageError:
            raise
        except ValueError:
            raise UsageError(f"{self.name}={text} is not possible: {self.allowed}") from None


def values(keys: Iterable[Key], texts: Mapping[str, str]) -> dict[str, Any]:
    """Return the value of each key by the key's name, from its text in ``texts`` or its default.

    Raises UsageError for a text that is not allowed.
    """
    return {key.name: key.value(texts) for key in keys}


def whole(name: str, least: int, default: str | None = None, allowed: str = "") -> Key:
    """Return a key whose values are whole numbers of at least ``least``.

    allowed: the words for the allowed values, in place of "a whole number, N or more".
    """
    return Key(name, default, partial(whole_number, least=least), allowed or f"a whole number, {least} or more")


def flag(name: str) -> Key:
    """Return a key with the values true and false, by default false."""

    def read(text: str) -> bool:
        if text not in ("true", "false"):
            raise ValueError(text)
        return text == "true"

    return Key(name, "false", read, "true or false")


def choice(name: str, choices: Sequence[str]) -> Key:
    """Return a key that takes one of ``choices``, the first by default."""
    return Key(name, choices[0], partial(check_choice, f"value of {name}", choices))


def optional(key: Key) -> Key:
    """Return the key with ``null`` as an allowed text and as its default. It stands for None."""

    def read(text: str) -> Any:
        if text == "null":
            return None
        return key.read(text)

    return Key(key.name, "null", read, key.allowed)


def whole_number(text: str, least: int) -> int:
    """Return the number that a text of digits states. Raises ValueError for other texts and numbers below ``least``."""
    if not text.isdigit() or int(text) < least:
        raise ValueError(text)
    return int(text)


def check_choice(kind: str, choices: Collection[str], text: str) -> str:
    """Return ``text`` if it is one of ``choices``. Raises UsageError that suggests the nearest choice if it is not.

    kind: the noun for the choices in the error.
    """
    if text not in choices:
        raise unknown(kind, text, choices)
    return text


def parse_pairs(arguments: Iterable[str], example: str = "method=snapkv+think or kv_size=64,128") -> dict[str, str]:
    """Return the values of ``key=value`` arguments as texts by key.

    Raises UsageError for an argument of another form, and for a key given twice.
    """
    keys_and_texts: list[tuple[str, str]] = []
    for argument in arguments:
        key, sign, text = argument.partition("=")
        if not sign or not key:
            raise UsageError(f"{argument!r} is not key=value, as in {example}")
        if "\0" in argument:
            raise UsageError(f"{argument!r} is not possible: it holds a NUL character")
        keys_and_texts.append((key.strip(), text.strip()))
    for key, times in Counter(key for key, _ in keys_and_texts).items():
        if times > 1:
            raise UsageError(f"{key}= is given {times} times: give it once, with a comma list for a grid")
    return dict(keys_and_texts)


def divide(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return (arguments without =, texts of the ``key=value`` arguments by key).

    Raises UsageError as ``parse_pairs`` does.
    """
    words, pairs = [], []
    for argument in arguments:
        if "=" in argument:
            pairs.append(argument)
        else:
            words.append(argument)
    return words, parse_pairs(pairs)
