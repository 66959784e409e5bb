"""Where tests find the papers as text and the tables' own findings: beside the data, never part of the project."""

import os
from pathlib import Path

import pytest


def beside(variable, folder, name):
    """A file of the folder that ``variable`` names, or of ``folder`` beside KVBENCH_DATA; skips where it is not."""
    data = os.environ.get("KVBENCH_DATA")
    root = os.environ.get(variable) or (Path(data).parent / folder if data else None)
    path = None if root is None else Path(root) / name
    if path is None or not path.is_file():
        pytest.skip(f"needs {name}: set {variable} to its folder")
    return path.read_text(encoding="utf-8")


def text_of(paper):
    """A paper's text."""
    return beside("KVBENCH_PAPERS", "papers", f"{paper}.txt")
