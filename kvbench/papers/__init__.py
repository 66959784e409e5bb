"""The papers: their published tables and figures, our measurements beside them, and tests of their claims."""

import os
from pathlib import Path

HERE = Path(__file__).parent
DATA = HERE / "data"
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


def fill_template(name: str, **values: object) -> str:
    """Return a page of the folder ``templates`` with these values, which are escaped unless they are marked as safe."""
    import jinja2  # every verb imports this module, and few need a page

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE / "templates"),
        autoescape=True,
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    return environment.get_template(name).render(values)
