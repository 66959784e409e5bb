"""Where ``conf/`` lies, the YAML entries of its groups, and what the records of a configuration are made with."""

from __future__ import annotations

from dataclasses import field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from kvbench.errors import UsageError

LISTED = {"model": "hf", "prompt": "plain", "logger": "wandb"}
"""The groups that hold one entry's keys themselves, with the entry that has them all."""
HIDDEN = ("defaults", "hydra", "chains", "tasks", "data", "preset")


def conf_dir() -> Path:
    """The folder of configurations: beside the package in a clone, inside it in an installed wheel."""
    package = Path(__file__).resolve().parent
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; raises UsageError, with the line, where there is none."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise UsageError(f"{path}:{line} is not UTF-8: byte {error.object[error.start]:#x}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}" if mark else path
        raise UsageError(f"{place} is not YAML: {getattr(error, 'problem', None) or error}") from None
    if not isinstance(content, dict):
        raise UsageError(f"{path}:1 holds no mapping: write key: value")
    return content


def entry_of(path: Path) -> dict[str, Any]:
    """The entry of a method: ``_target_`` and its knobs; {} for ``full``."""
    method = path.stem
    entry = read_yaml(path).get(method)
    if method == "full":
        return {}
    if not isinstance(entry, dict) or not isinstance(entry.get("_target_"), str):
        raise UsageError(
            f"{path}:1 does not say what {method} is: write {method}: {{_target_: package.module.Class, knob: default}}"
        )
    return entry


@cache
def whole_config() -> dict[str, Any]:
    """Return what conf/config.yaml says, before its groups are read."""
    return read_yaml(conf_dir() / "config.yaml")


@cache
def top_level() -> dict[str, Any]:
    """Return the keys of conf/config.yaml that users set, with their defaults."""
    return {k: v for k, v in whole_config().items() if k not in HIDDEN}


@cache
def entries(group: str) -> dict[str, dict[str, Any]]:
    """The YAML files of one config group by id (dataset entries without their outer key)."""
    return {path.stem: entry(group, path) for path in sorted((conf_dir() / group).glob("*.yaml"))}


def entry(group: str, path: Path) -> dict[str, Any]:
    """One YAML file of a config group; raises UsageError where it is none."""
    content = entry_of(path) if group == "method" else read_yaml(path)
    inner = content if group in (*LISTED, "method") else content.get(path.stem) or {}
    return {k: v for k, v in inner.items() if k not in ("default_limit", "hub")}


def identity(**kwargs: Any) -> Any:
    """A field that decides what is measured."""
    return field(metadata={"role": "identity"}, **kwargs)


def runtime(**kwargs: Any) -> Any:
    """A field that only decides how it is measured."""
    return field(metadata={"role": "runtime"}, **kwargs)


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def check(key: str, value: Any, ok: bool, allowed: str) -> None:
    """Raise UsageError naming the key, its value and what is allowed, unless ``ok``."""
    if not ok:
        raise UsageError(f"{key}={value!r} is not possible: {allowed} (see conf/config.yaml)")
