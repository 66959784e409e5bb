"""Tables of options for the site: the commented YAML files of conf/ as Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from kvbench.base.conf import KEY_FILES, entries, read_keys_with_comments
from kvbench.report import writers

OPTION = re.compile(r"^( *)([\w-]+):(.*)$")
"""A line of YAML with a key, and whatever stands behind it."""
UNTYPED = ("_target_", "name", "verified")
"""Keys of the files that are facts about an entry, and no options."""
HEAD = ("option", "default", "meaning")
TITLES = {
    "keys": "The first to know",
    "config": "A run",
    "prompt/plain": "The prompt",
    "model/hf": "The model",
    "logger/wandb": "The logger",
}
"""The titles of the files that are not about a dataset."""
INTRODUCTION = """# Options

Type an option as `name=value` behind `kvbench run`. Where two parts have an option of the same name, the full name says
whose it is: `method.snapkv.window=16`, `dataset.file.metric=f1`, `model.dtype=bfloat16`. `kvbench run --help keys`
prints these options in a terminal. Options of methods are on [their pages](methods/index.md).

Two names are easily confused. `kv_ratio=` is the share of tokens **kept**. `ratio=` is the share of channels, or
of the rank, **removed**.
"""


@dataclass(kw_only=True)
class Option:
    """One option of a file: its name as it is typed, its default as YAML, and its comment."""

    name: str
    default: str
    meaning: str


@dataclass(kw_only=True)
class Section:
    """Options that stand together in a file, below a comment of their own."""

    about: str
    options: list[Option]


def page() -> str:
    """Return the page of all options of ``run`` but those of methods."""
    parts = [INTRODUCTION]
    for name in KEY_FILES:
        parts += [f"## {TITLES[name]}\n", *_section_parts(read_keys_with_comments(name))]
    parts.append("## Datasets\n")
    for name in entries("dataset"):
        parts += [f"### {name}\n", *_section_parts(read_keys_with_comments(f"dataset/{name}"))]
    return "\n".join(parts)


def of_text(text: str) -> str:
    """Return a table of the options in the text of one YAML file, or nothing if it has none."""
    options = [option for section in sections(text) for option in section.options]
    if not options:
        return ""
    return _table(options)


def sections(text: str) -> Iterator[Section]:
    """Yield the sections of a commented YAML file.

    An empty line ends a section, which may begin with a comment. An indented comment goes on from the line above it.
    """
    section = Section(about="", options=[])
    # the key of a mapping that holds only its own options, such as data in data.root
    parent = ""
    for line in text.splitlines():
        if not line.strip():
            if section.about or section.options:
                yield section
            section = Section(about="", options=[])
            continue
        if line.startswith("#"):
            section.about = f"{section.about} {line.lstrip('# ')}".strip()
            continue
        if line.strip().startswith("#"):
            if section.options:
                section.options[-1].meaning += " " + line.strip().lstrip("# ")
            continue
        match = OPTION.match(line)
        if not match:
            continue
        indent, name, rest = match.groups()
        value, _, comment = rest.partition(" #")
        if not indent:
            parent = ""
        if not value.strip():
            # a mapping: below the name of a method or dataset its options are typed without it
            parent = f"{name}." if comment else ""
            continue
        if name in UNTYPED:
            continue
        section.options.append(Option(name=parent + name, default=value.strip(), meaning=comment.strip()))
    if section.about or section.options:
        yield section


def _section_parts(text: str) -> Iterator[str]:
    """Yield what the sections of a file are about, and their tables."""
    for section in sections(text):
        if section.about:
            # the comments of conf/ name the command as it is without an installation
            about = section.about.replace("python -m kvbench", "kvbench")
            yield about[0].upper() + about[1:].rstrip(".:") + ".\n"
        if section.options:
            yield _table(section.options)


def _table(options: list[Option]) -> str:
    """Return options as a Markdown table."""
    rows = [(f"`{o.name}`", f"`{o.default}`", o.meaning) for o in options]
    return writers.table(HEAD, rows)
