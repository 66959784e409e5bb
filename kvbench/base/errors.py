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


class Damaged(UsageError):
    """A file of results holds what kvbench cannot have written: a text that is no record, or a number that is none."""


class MissingFiles(UsageError):
    """A request that needs files of a data set or of a model, and these are missing.

    names: the missing files, as paths below the data folder, or the name of the model. It is empty if there is no data
    folder at all.
    """

    def __init__(self, text: str, names: Iterable[str] = ()) -> None:
        super().__init__(text)
        self.names = tuple(names)


class MissingData(MissingFiles):
    """The texts of a data set are not on this machine."""


class MissingModel(MissingFiles):
    """A checkpoint is not on this machine."""


class Refused(KvbenchError):
    """A result that must not be reported, such as that of a method that breaks what it declares, or a NaN."""


def ending(error: BaseException) -> str:
    """Return the reason why a run ended early, as text: the text of ``error``, or the name of its type without one."""
    # the text of a SystemExit is mostly an exit status, which tells the user nothing
    if isinstance(error, SystemExit):
        return "its process was told to end"
    return str(error) or type(error).__name__


def notes(error: BaseException) -> list[str]:
    """Return the notes that were added to an error (``add_note``), such as the work during which it was raised."""
    return list(getattr(error, "__notes__", ()))


def headline(error: BaseException) -> str:
    """Return the first line of an error's text, or the name of its type if it has no text.

    A line that ends in a colon or comma is continued by the next line.
    """
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


def nearest_name(value: object, names: Iterable[str]) -> str | None:
    """Return the name among ``names`` that is spelt most like ``value``, or None if all are spelt too differently."""
    # 0.65: about two thirds of the letters in common, in order. At a half, most English words are near some method
    near = difflib.get_close_matches(str(value), sorted(names), n=1, cutoff=0.65)
    if not near:
        return None
    return near[0]


def did_you_mean(value: object, names: Iterable[str]) -> str:
    """Return " Did you mean NAME?" with the nearest of ``names``; '' if none is near. The text begins with a space."""
    near = nearest_name(value, names)
    if near is None:
        return ""
    return f" Did you mean {near}?"


FEW_NAMES = 12
"""The most names that an error lists beside its suggestion of one name."""


def unknown(kind: str, value: object, allowed: Iterable[str], hint: str = "", listed_by: str = "") -> UsageError:
    """Return the error for ``value``, which should be one of the names ``allowed``. It suggests the nearest name.

    kind: the kind of the names, such as ``dataset`` or ``option of snapkv``.
    hint: a sentence that is added at the end.
    listed_by: the command that lists all names. Without a command, the error itself lists the names if they are few,
        or if none of them is near.
    """
    names = sorted(set(allowed))
    question = did_you_mean(value, names)
    # "option of snapkv" is divided, since the value stands behind the noun: "unknown option ratio of snapkv"
    noun, separator, owner = kind.partition(" of ")
    shown = str(value)
    # quotes show where an empty value, or one with spaces, begins and ends
    if not shown or " " in shown:
        shown = repr(shown)
    message = f"unknown {noun} {shown}{separator}{owner}.{question}"
    if listed_by:
        message += f" All {noun}s: `{listed_by}`."
    # there may be no names at all, for example in a store without results
    elif names and (not question or len(names) <= FEW_NAMES):
        message += f" Available: {', '.join(names)}."
    if hint:
        message += f" {hint}"
    return UsageError(message)
