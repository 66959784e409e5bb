"""Presets: the settings that reproduce a paper's tables, in YAML files in conf/preset, one per paper.

Keys are ``prompt`` (a policy of conf/prompt), ``per``, ``match`` (the kind of equal memory, if a run asks for it) and
knobs below ``method``. Keys below ``models`` hold for one entry of conf/model only. Every value stands on a line of its
own, followed by its source.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml

from kvbench.base.conf import conf_dir
from kvbench.base.errors import UsageError, unknown


@dataclass(frozen=True)
class Setting:
    """One value of a preset.

    key: the full key, such as ``method.snapkv.window``.
    value: the value as YAML reads it.
    source: where the paper or its code states the value.
    model: the entry of conf/model that the value is for; '' for every model without a value of its own.
    """

    key: str
    value: Any
    source: str
    model: str = ""


@cache
def available() -> tuple[str, ...]:
    """Return the names of all presets."""
    return tuple(sorted(p.stem for p in (conf_dir() / "preset").glob("*.yaml")))


def about(name: str) -> str:
    """Return the description of a preset: the comment at the head of its file."""
    lines = []
    for line in _read_text(name).splitlines():
        if not line.startswith("#"):
            break
        lines.append(line[1:].strip())
    return " ".join(lines)


@cache
def settings(name: str) -> tuple[Setting, ...]:
    """Return all settings of a preset in the order of its file. Raises UsageError for an unknown name."""
    text = _read_text(name)
    lines = text.splitlines()
    # nodes know their place in the text, and so the comment behind them; loaded values do not
    root = yaml.compose(text, yaml.SafeLoader)
    # a file of comments alone
    if root is None:
        return ()
    settings_of_file = []
    for path, node in _find_values(root):
        model = ""
        # models, the name of the model, then the key
        if path[:1] == ["models"]:
            _, model, *path = path
        # the source is the comment behind the value, and the value is read from its own piece of the text
        _, _, comment = lines[node.end_mark.line].partition(" #")
        value = yaml.safe_load(text[node.start_mark.index : node.end_mark.index])
        settings_of_file.append(Setting(".".join(path), value, comment.strip(), model))
    return tuple(settings_of_file)


def values(name: str, model: str = "") -> dict[str, Any]:
    """Return the values of a preset by full key, for one entry of conf/model; '' stands for any other model."""
    for_all = {s.key: s.value for s in settings(name) if s.model == ""}
    for_model = {s.key: s.value for s in settings(name) if s.model == model}
    return for_all | for_model


def untouched(name: str, model: str, methods: Iterable[str]) -> list[str]:
    """Return the ``methods`` that run with their plain defaults, since the preset sets no knob of theirs."""
    keys = values(name, model)
    without_knobs = []
    for method in dict.fromkeys(methods):
        if not any(key.startswith(f"method.{method}.") for key in keys):
            without_knobs.append(method)
    return without_knobs


def explain(error: UsageError, name: str | None) -> UsageError:
    """Return the error, with the preset ``name`` added as the source if the error names a knob that it sets.

    Return the error as it is if no preset was asked for, that is, if ``name`` is None.
    """
    if name is None:
        return error
    for setting in settings(name):
        if setting.key.startswith("method.") and f"{setting.key}=" in str(error):
            return UsageError(f"{error}; preset={name} sets it (kvbench list presets), and what you type wins")
    return error


def _read_text(name: str) -> str:
    """Return the text of a preset's YAML file. Raises UsageError with the nearest names for an unknown preset."""
    if name not in available():
        # a list of presets, as other keys take lists
        hint = "One preset a run." if "," in name else ""
        raise unknown("preset", name, available(), hint)
    return (conf_dir() / "preset" / f"{name}.yaml").read_text(encoding="utf-8")


def _find_values(node: yaml.Node, path: Sequence[str] = ()) -> Iterator[tuple[Sequence[str], yaml.Node]]:
    """Yield (keys down to the value, node) of every value below a node. A mapping in braces counts as one value."""
    if not isinstance(node, yaml.MappingNode) or node.flow_style:
        yield path, node
        return
    for key, value in node.value:
        yield from _find_values(value, [*path, key.value])
