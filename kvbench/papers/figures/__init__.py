"""The papers' figures: their declarations in YAML, the code that computes their data, and their drawings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvbench.base.conf import read_yaml
from kvbench.papers import DATA


def declared() -> dict[str, dict[str, Any]]:
    """Return the YAML entry of every figure by its id, such as ``uncomp/fig1``, sorted by id.

    The files are figures.yaml of each paper, and ours.yaml.
    """
    paths = list(DATA.glob("*/figures.yaml"))
    # ours.yaml has kvbench's own figures, which stand in no paper
    paths.append(Path(__file__).with_name("ours.yaml"))
    entries: dict[str, dict[str, Any]] = {}
    for path in paths:
        entries |= read_yaml(path)
    return dict(sorted(entries.items()))
