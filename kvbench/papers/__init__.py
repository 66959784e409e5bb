"""The papers: their published tables and figures, our measurements beside them, and tests of their claims."""

import os
from pathlib import Path

DATA = Path(__file__).parent / "data"
"""A folder for each paper: its tables and claims as YAML, its published values as CSV."""


def data_files(pattern: str) -> list[Path]:
    """Return the files that match a pattern such as ``*/paper.yaml``, sorted by folder and name.

    They are kvbench's own files and those below the folder that the environment variable KVBENCH_PAPERS_DATA names.
    """
    found = list(DATA.glob(pattern))
    own_folder = os.environ.get("KVBENCH_PAPERS_DATA")
    if own_folder:
        found += Path(own_folder).glob(pattern)
    return sorted(found, key=lambda path: (path.parent.name, path.name))
