"""The notebooks of the documentation, executed as a reader does."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

pytestmark = pytest.mark.e2e("executes notebooks")

NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs" / "notebooks").glob("*.ipynb"))


def test_every_cell_of_a_notebook_runs(tmp_path):
    """One after the other in one kernel, which forgets all names in between; of each data set the first prompts."""
    notebooks = {path.stem: nbformat.read(path, as_version=4) for path in NOTEBOOKS}
    for cell in (cell for notebook in notebooks.values() for cell in notebook.cells):
        cell["source"] = re.sub(r"\blimit=\d+", "limit=2", cell["source"])
    cells = []
    for notebook in notebooks.values():
        cells += [*notebook.cells, nbformat.v4.new_code_cell("%reset -f")]
    for i, cell in enumerate(cells):
        cell["id"] = f"cell-{i}"  # unique over all notebooks
    joined = nbformat.v4.new_notebook(cells=cells, metadata=next(iter(notebooks.values())).metadata)
    NotebookClient(joined, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = {
        stem: [o for cell in notebook.cells if cell.cell_type == "code" for o in cell.outputs]
        for stem, notebook in notebooks.items()
    }
    tables = {
        stem: [o["data"]["text/markdown"] for o in shown if "text/markdown" in o.get("data", {})]
        for stem, shown in outputs.items()
    }
    assert all(tables.values()), "a table is shown"
    assert any("image/png" in o.get("data", {}) for o in outputs["first"]), "a picture is shown"
    assert "refused" in tables["method"][0] and "refused" not in tables["method"][1]
