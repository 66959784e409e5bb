"""The notebooks of the documentation, executed as a reader does."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

pytestmark = pytest.mark.e2e("executes notebooks")

NOTEBOOKS = sorted((Path(__file__).parents[1] / "docs" / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_of_a_notebook_runs(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [o for cell in notebook.cells if cell.cell_type == "code" for o in cell.outputs]
    assert any("text/markdown" in o.get("data", {}) for o in shown), "a table is shown"
    if path.stem == "first":
        assert any("image/png" in o.get("data", {}) for o in shown), "a picture is shown"
    if path.stem == "method":
        tables = [o["data"]["text/markdown"] for o in shown if "text/markdown" in o.get("data", {})]
        assert "refused" in tables[0] and "refused" not in tables[1]
