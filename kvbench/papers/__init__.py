"""The papers: what they publish, what is measured beside it, and what they claim."""

import os
from pathlib import Path

DATA = Path(__file__).parent / "data"
"""A folder for each paper: its tables and claims as YAML, its published values as CSV."""


def files(pattern: str) -> list[Path]:
    """Return the files that match, as in ``*/paper.yaml``: ours and those below the folder KVBENCH_PAPERS_DATA."""
    roots = [DATA, *map(Path, filter(None, [os.environ.get("KVBENCH_PAPERS_DATA")]))]
    return sorted((path for root in roots for path in root.glob(pattern)), key=lambda p: (p.parent.name, p.name))
