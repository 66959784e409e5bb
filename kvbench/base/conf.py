"""The folder ``conf/``, the YAML entries of its groups, and helpers for the records of a configuration."""

from __future__ import annotations

import re
from dataclasses import field
from functools import cache
from pathlib import Path
from textwrap import wrap
from typing import Any

import yaml

from kvbench.base.errors import UsageError, unknown

Config = dict[str, Any]
"""The settings of a YAML file, by key."""
LISTED = {"model": "hf", "prompt": "plain", "logger": "wandb"}
"""The config groups that hold the keys of one chosen entry, each with the entry that has all keys."""
# Hydra's own keys, and keys that users set under other names: method= for chains, dataset= for tasks
HIDDEN = ("defaults", "hydra", "chains", "tasks", "data", "preset")
KEY_FILES = ("keys", "config", "prompt/plain", "model/hf", "logger/wandb")
"""The files of conf/ that explain the keys of ``run``, besides those of its methods and datasets."""
YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The loader of YAML files. libyaml's, which not every PyYAML has, reads all entries in a tenth of the time."""
LEAST_PIECE = 16
"""The fewest tokens of a piece of a prompt. Smaller pieces would cost more than reading the prompt whole."""
HELP_WIDTH = 100
"""The number of characters in a line of help."""
NOT_TYPED = re.compile(
    r"^( *)(defaults|hydra|chains|tasks|preset|hub|_target_|_rows_|architecture):.*\n(\1 +.*\n)*\n?", re.MULTILINE
)
"""The blocks of conf/'s files that hold nothing to type."""


@cache
def conf_dir() -> Path:
    """Return the folder of configurations: beside the package in a clone, inside it in an installed wheel."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "conf"
    if inside.is_dir():
        return inside
    return package.parent / "conf"


def read_yaml(path: Path) -> Config:
    """Return the mapping in a YAML file; {} for an empty file.

    Raises UsageError, with the file and mostly the line, if the file is not YAML or holds no mapping.
    """
    try:
        # YAML reads an empty file as None; here it is an empty mapping
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=YAML_LOADER) or {}
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise UsageError(f"{path}:{line} is not UTF-8: byte {error.object[error.start]:#x}") from None
    except yaml.YAMLError as error:
        # only the parser's errors have a mark; its lines count from 0
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}" if mark else str(path)
        raise UsageError(f"{place} is not YAML: {getattr(error, 'problem', None) or error}") from None
    if not isinstance(content, dict):
        raise UsageError(f"{path}:1 holds no mapping: write key: value")
    return content


def read_method_entry(path: Path) -> Config:
    """Return the entry in a method's file: ``_target_``, the path of its class, and its knobs with their defaults.

    The entry of ``full`` is {}. Raises UsageError if the file does not define the method that it is named after.
    """
    method = path.stem
    # the entry stands under the method's name, since Hydra merges all methods into one mapping
    entry = read_yaml(path).get(method)
    # the full cache has no stage to make
    if method == "full":
        return {}
    if not isinstance(entry, dict) or not isinstance(entry.get("_target_"), str):
        raise UsageError(
            f"{path}:1 does not define {method}: write {method}: {{_target_: package.module.Class, option: default}}"
        )
    return entry


@cache
def read_config() -> Config:
    """Return the mapping in conf/config.yaml, before its groups are read."""
    return read_yaml(conf_dir() / "config.yaml")


@cache
def top_level() -> Config:
    """Return the keys of conf/config.yaml that users set, with their defaults."""
    return {key: value for key, value in read_config().items() if key not in HIDDEN}


@cache
def entries(group: str) -> dict[str, Config]:
    """Return the entries of one config group, such as ``model``, by the names of their files."""
    return {path.stem: read_entry(group, path) for path in sorted((conf_dir() / group).glob("*.yaml"))}


def read_entry(group: str, path: Path) -> Config:
    """Return the entry in one YAML file of a config group, without keys that no loader takes.

    Raises UsageError if the file is malformed.
    """
    if group == "method":
        content = read_method_entry(path)
    elif group in LISTED:
        content = read_yaml(path)
    else:
        # a dataset's keys stand under its name, since Hydra merges all datasets into one mapping
        content = read_yaml(path).get(path.stem) or {}
    # the default limit and the origin of the files are not for a dataset's loader; other groups lack these keys
    return {key: value for key, value in content.items() if key not in ("default_limit", "hub")}


def read_keys_with_comments(name: str) -> str:
    """Return the keys in the file ``name`` of conf/ with their comments, without blocks that nobody types."""
    text = (conf_dir() / f"{name}.yaml").read_text(encoding="utf-8")
    # users may type every key of conf/keys.yaml
    if name == "keys":
        return text
    return NOT_TYPED.sub("", text)


def write_key_help(topic: str) -> str:
    """Return the text of ``run --help TOPIC``: keys of ``run`` with their comments.

    topic: ``keys`` for the general keys, or the name of a method, a dataset or a prompt policy for its own keys. If
    several of these have the name, the keys of all of them are returned.

    Raises UsageError for an unknown topic.
    """
    blocks = []
    for name in _list_key_files(topic):
        lines: list[str] = []
        for line in _join_comments(read_keys_with_comments(name)):
            lines += _wrap_line(line)
        # a group's file has a heading such as method=snapkv; conf/keys.yaml and conf/config.yaml are one list
        if "/" in name:
            lines.insert(0, f"{name.replace('/', '=')}:")
        blocks.append("\n".join(lines) + "\n")
    return "\n".join(blocks)


def _list_key_files(topic: str) -> list[str]:
    """Return the files of conf/ that explain a help topic, as paths without ``.yaml``, such as ``method/snapkv``.

    Raises UsageError for an unknown topic.
    """
    if topic == "keys":
        return list(KEY_FILES)
    groups = ("method", "dataset", "prompt")
    # a method and a prompt policy may have the same name, such as snapkv
    names = [f"{group}/{topic}" for group in groups if topic in entries(group)]
    if not names:
        topics = ["keys"]
        for group in groups:
            topics += entries(group)
        raise unknown("help topic", topic, topics, listed_by="kvbench list methods datasets")
    return names


def _join_comments(text: str) -> list[str]:
    """Return the lines of a YAML text. A comment that is spread over several lines becomes one line."""
    joined_lines: list[str] = []
    for line in text.strip().splitlines():
        above = joined_lines[-1] if joined_lines else ""
        is_comment = line.lstrip().startswith("# ")
        # a comment at the margin explains a block of keys, so it goes on only from another comment at the margin
        same_place = line.startswith("#") == above.startswith("#")
        if is_comment and "# " in above and same_place:
            # [1:] drops the mark and keeps the space behind it
            joined_lines[-1] += line.lstrip()[1:]
        else:
            joined_lines.append(line)
    return joined_lines


def _wrap_line(line: str) -> list[str]:
    """Return a line of YAML as lines of at most HELP_WIDTH characters.

    Only the comment is wrapped. Its further lines are indented to where it begins.
    """
    code, mark, comment = line.partition("# ")
    if len(line) <= HELP_WIDTH or not mark:
        return [line]
    comment_width = HELP_WIDTH - len(code) - len(mark)
    first, *others = wrap(comment, comment_width, break_on_hyphens=False, break_long_words=False)
    fitted = [f"{code}{mark}{first}"]
    indent = " " * len(code)
    for comment_line in others:
        fitted.append(f"{indent}{mark}{comment_line}")
    return fitted


def identity(**kwargs: Any) -> Any:
    """Return a dataclass field for a setting that decides the measured numbers. It is part of a result's identity.

    kwargs: arguments of ``dataclasses.field``, such as ``default``.
    """
    return field(metadata={"role": "identity"}, **kwargs)


def runtime(**kwargs: Any) -> Any:
    """Return a dataclass field for a setting that changes how numbers are measured, but not the numbers.

    kwargs: arguments of ``dataclasses.field``, such as ``default``.
    """
    return field(metadata={"role": "runtime"}, **kwargs)


def is_whole(value: object) -> bool:
    """Return True if a value is a whole number. True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def check(key: str, value: object, ok: bool, allowed: str) -> None:
    """Raise UsageError that names the key, its value and the allowed values, unless ``ok``.

    ok: True if the caller has found the value possible.
    allowed: the possible values in words.
    """
    if ok:
        return
    # the file explains its own keys, and not those of methods, datasets and models
    place = " (see conf/config.yaml)" if key in read_config() else ""
    raise UsageError(f"{key}={value!r} is not possible: {allowed}{place}")


def check_piece_size(size: int | None) -> None:
    """Raise UsageError unless prompts can be read in pieces of ``size`` tokens. None means whole prompts."""
    is_possible = size is None or (is_whole(size) and size >= LEAST_PIECE)
    check("shared_prefix", size, is_possible, f"null, or tokens that are read at a time, {LEAST_PIECE} or more")
