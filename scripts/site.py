"""The generated pages of the documentation site (hooks of mkdocs, `make docs`).

methods/*.md    one page a method: its paper, formula and knobs, the tokens that it keeps of one prompt, its row on SmolLM2
add.md, house.md  the worked examples, and the map of the house, of CONTRIBUTING.md
papers.md, what-is-measured.md  what `reference` and `scripts/measured.py` print
results/        results/README.md with the tables and pictures that it links to
"""

from __future__ import annotations

import contextlib
import html
import inspect
import io
import json
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import kvbench
from kvbench.conf import conf_dir
from kvbench.methods import registry
from kvbench.methods.prompt_cache import Cache
from kvbench.run import presets

ROOT = Path(__file__).parents[1]
ROWS = ROOT / "results" / "methods.json"
"""What `make gallery` measured of every method on SmolLM2: the JSON of `run`."""
PROMPT = (
    "notes: the cold river shines slowly. a red boat turned near the town. the magic number of paris is 471. "
    "it was a calm night by the tower. the old bridge over the river is made of stone. "
    "question: what is the magic number of paris? answer: paris is"
)
RATIO = 0.25
PUBLISHED = (".md", ".png", ".txt", ".csv")
CELL, GAP = 5, 3
"""Pixels of a token in a picture of kept tokens, and between layers."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages to those of docs/."""
    pages = {**_of_contributing(), **_methods(), "papers.md": _papers(), "what-is-measured.md": _measured()}
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    for path in _published():
        name = path.relative_to(ROOT).as_posix()
        if name.endswith("README.md"):
            text = _relinked(path.read_text("utf-8"), name)
            files.append(File.generated(config, name.replace("README.md", "index.md"), content=text))
        else:
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def _published() -> list[Path]:
    """Return the committed files of results/ that the site shows."""
    names = subprocess.run(["git", "ls-files", "results"], cwd=ROOT, text=True, capture_output=True, check=True).stdout
    return [ROOT / name for name in names.split() if name.endswith(PUBLISHED) and not name.startswith("results/cells")]
