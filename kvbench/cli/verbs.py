"""The list of verbs, verbs.yaml: the module of each, its help, and its functions from other rooms, loaded by name."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from kvbench.base.conf import read_yaml


class Verb(TypedDict):
    """An entry of the list.

    module: the module with the verb's ``arguments`` and ``main``.
    about: the verb's line in ``--help``. help: the text below the verb's own options.
    plugins: functions of other rooms, each as ``package.module:function``.
    """

    module: str
    about: str
    help: str
    plugins: NotRequired[dict[str, str]]


VERBS: dict[str, Verb] = read_yaml(Path(__file__).with_name("verbs.yaml"))
"""The verbs in the order of ``--help``."""


def plugins(verb: str) -> list[str]:
    """Return the names of a verb's functions from other rooms, in their order."""
    return list(VERBS[verb].get("plugins", {}))


def load_plugin(verb: str, name: str) -> Any:
    """Import and return a verb's function from another room."""
    module, _, function = VERBS[verb]["plugins"][name].partition(":")
    return getattr(import_module(module), function)
