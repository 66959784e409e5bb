"""Read the samples of cells from disk, those of each cell once."""

from __future__ import annotations

from kvbench.store.results import Sample
from kvbench.store.store import ResultStore


class SampleReader:
    """The samples of a store's cells. A cell is read when it is first asked for, and its samples are kept.

    store: the store that is read. Samples that are stored later do not show in what was read before.
    """

    def __init__(self, store: ResultStore) -> None:
        self.store = store
        self._samples: dict[str, dict[str, Sample]] = {}

    def read(self, cell_id: str) -> dict[str, Sample]:
        """Return the samples of a cell by example id."""
        if cell_id not in self._samples:
            self._samples[cell_id] = self.store.samples(cell_id)
        return self._samples[cell_id]
