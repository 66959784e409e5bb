"""The papers' figures: what each declares, computes and draws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvbench.base.conf import read_yaml
from kvbench.papers import DATA


def declared() -> dict[str, dict[str, Any]]:
    """Return the entries of the papers' figures.yaml and of ours.yaml by id, sorted."""
    paths = (*DATA.glob("*/figures.yaml"), Path(__file__).with_name("ours.yaml"))
    return dict(sorted(entry for path in paths for entry in read_yaml(path).items()))
