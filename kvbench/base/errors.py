"""The errors that users meet, and their texts. Any other exception is a bug."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class KvbenchError(Exception):
    """A failure with a message for the user. ``status`` is the exit status of the command line."""

    status = 1


class UsageError(KvbenchError, ValueError):
    """A request that cannot be carried out as written. Its message names key, value, allowed values and a remedy."""

    status = 2


class MissingFiles(UsageError):
    """A request that needs missing files: a data set's or a model's.

    names: the files below the data folder, or the model; none if there is no data folder at all.
    """

    def __init__(self, text: str, names: Iterable[str] = ()) -> None:
        """Take the message and the names."""
        super().__init__(text)
        self.names = tuple(names)


class MissingData(MissingFiles):
    """The texts of a data set are not on this machine."""


class MissingModel(MissingFiles):
    """A checkpoint is not on this machine."""


class Refused(KvbenchError):
    """A result that must not be reported: the measurement contradicts the claim, or is not a number."""


def ending(error: BaseException) -> str:
    """Return the reason why a run ended early, as text."""
    if isinstance(error, SystemExit):
        return "its process was told to end"
    return str(error) or type(error).__name__


def notes(error: BaseException) -> list[str]:
    """Return the notes on an error, such as the work during which it was raised."""
    return list(getattr(error, "__notes__", ()))


def headline(error: BaseException) -> str:
    """Return an error's first line, or its type's name. A line that ends in a colon or comma brings the next line."""
    # libraries raise errors of many lines, or with an empty text
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    text = lines[0]
    for line in lines[1:]:
        if not text.endswith((":", ",")):
            break
        text += f" {line}"
    return text


def did_you_mean(value: object, names: Iterable[str]) -> str:
    """Return the question whether one of the nearest ``names`` was meant, behind a space; empty if none is near."""
    # 0.5 means about half of the letters in common; suggestions below that mislead
    near = difflib.get_close_matches(str(value), sorted(names), n=3, cutoff=0.5)
    if not near:
        return ""
    return f" Did you mean {' or '.join(near)}?"


def unknown(kind: str, value: object, allowed: Iterable[str], hint: str = "") -> UsageError:
    """Return the error for a name that is not one of ``allowed``. It names the nearest ones, then all."""
    names = sorted(set(allowed))
    message = f"unknown {kind} {value!r}.{did_you_mean(value, names)}"
    # a store without cells, for example, has no names
    if names:
        message += f" Available: {', '.join(names)}."
    if hint:
        message += f" {hint}"
    return UsageError(message)
