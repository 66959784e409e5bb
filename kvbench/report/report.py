"""The report of a run: its records, with the ways to show them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvbench.base.extras import require
from kvbench.report import render
from kvbench.report.records import ReportData

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure as Canvas


@dataclass(frozen=True)
class Report(ReportData):
    """The measurements of a run, as ``compare`` returns them, with ways to show them: Markdown, pandas, a figure."""

    def to_markdown(self) -> str:
        """Return the tables of scores and storage with their notes as Markdown."""
        return render.render(self, "md")

    def to_pandas(self) -> pd.DataFrame:
        """Return a row per method and task, with the columns of ``--format csv``."""
        require("pandas", "to_pandas")
        import pandas as pd

        return pd.DataFrame(render.records(self), columns=list(render.CSV_FIELDS))

    def plot(self) -> Canvas:
        """Return a figure with a panel a task: scores with intervals against bytes in per cent of the full cache."""
        require("matplotlib", "plot")
        from kvbench.report import scatter

        return scatter.draw(self)

    def _repr_markdown_(self) -> str:
        return self.to_markdown()
