"""The committed samples of a pretrained model: a file for each paper and task, in results/samples.

A table and a claim of one paper often show the same cells. Each paper's tables and claims are restored from all of its
files, or from the files of the datasets that they name, and are packed into them together.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

from kvbench.plan.run_plan import RunPlan
from kvbench.store import archive
from kvbench.store.store import ResultStore

FOLDER = "samples"
"""The folder of the files, in the one of everything that is committed."""
END = ".samples.jsonl.gz"


def samples_path(paper: str, task: str, folder: Path) -> Path:
    """Return the file of a paper's cells of one task, ``dataset/task`` or ``dataset``."""
    return folder / f"{paper}.{task.replace('/', '.').replace(' ', '_')}{END}"


def restore(
    paper: str, store: ResultStore, folder: Path, datasets: Collection[str] = (), temporary: bool = False
) -> None:
    """Put a paper's samples, all or of some datasets, from ``folder`` into ``store`` if they are missing there.

    ``temporary`` is True for a store that is thrown away.
    """
    for path in sorted(folder.glob(f"{paper}.*{END}")):
        parts = path.name.removesuffix(END).split(".")[1:]
        if not datasets or any(part in datasets for part in parts):
            archive.unpack(path, store, temporary=temporary)


def pack(paper: str, runs: Iterable[RunPlan], store: ResultStore, folder: Path) -> None:
    """Write the samples of ``runs`` into the paper's files in ``folder``, beside the cells that these hold already."""
    cells: dict[str, set[str]] = {}
    for run in runs:
        for group in run.groups:
            measured = {c.id for c in group.cells if store.lines(c.id)}
            cells.setdefault(group.task.id, set()).update(measured)
    for task, ids in cells.items():
        path = samples_path(paper, task, folder)
        held = archive.unpack(path, store).keys() if path.exists() else set()
        if ids:
            archive.pack(store, ids | held, path)
