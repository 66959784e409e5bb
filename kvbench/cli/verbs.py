"""The list of verbs, verbs.yaml: each verb's module, its help, and its functions from other packages, by name."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from kvbench.base.conf import read_yaml
from kvbench.base.errors import nearest_name


class Verb(TypedDict):
    """An entry of verbs.yaml.

    module: the module with the verb's ``arguments`` and ``main``.
    group: the heading above the verb in ``--help``.
    about: the verb's line there.
    also: other words that users may type when they mean this verb.
    help: the text below the verb's own options.
    plugins: the verb's functions in other packages by name, each as ``package.module:function``.
    """

    module: str
    group: str
    about: str
    also: list[str]
    help: str
    plugins: NotRequired[dict[str, str]]


VERBS: dict[str, Verb] = read_yaml(Path(__file__).with_name("verbs.yaml"))
"""The verbs in the order of ``--help``."""


def write_overview() -> str:
    """Return the verbs with a line each, below the headings of their groups."""
    lines: list[str] = []
    for group in dict.fromkeys(entry["group"] for entry in VERBS.values()):
        lines.append(f"{group}:")
        for verb, entry in VERBS.items():
            if entry["group"] == group:
                lines.append(f"  {verb:<10} {entry['about']}")
        lines.append("")
    return "\n".join(lines)


def guess_verbs(word: str) -> list[str]:
    """Return the verbs that a user may have meant by ``word``, which is not a verb.

    These are the verbs that list the word under ``also``, or else the verb with the most similar spelling.
    """
    by_meaning = [verb for verb, entry in VERBS.items() if word.lower() in entry["also"]]
    if by_meaning:
        return by_meaning
    near = nearest_name(word, VERBS)
    if near is None:
        return []
    return [near]


def list_plugins(verb: str) -> list[str]:
    """Return the names of a verb's functions from other packages, in the order of verbs.yaml."""
    return list(VERBS[verb].get("plugins", {}))


def load_plugin(verb: str, name: str) -> Any:
    """Import and return a verb's function from another package, by its name in verbs.yaml."""
    module_name, _, function_name = VERBS[verb]["plugins"][name].partition(":")
    return getattr(import_module(module_name), function_name)
