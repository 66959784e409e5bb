"""``Report``, which ``compare`` returns: the data of report/data.py with the ways to show them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from kvbench.base.extras import require
from kvbench.report import render, verdict
from kvbench.report.data import ReportData

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure as Canvas


@dataclass(frozen=True, repr=False)
class Report(ReportData):
    """The measurements of a run, as ``compare`` returns them. It can be shown as Markdown, DataFrame or figure."""

    def __repr__(self) -> str:
        """Return the tables and notes that `run` prints, for ``print`` and for the Python prompt."""
        return render.render_report(self).rstrip("\n")

    def record(self) -> dict[str, object]:
        """Return the report as ``run --json`` prints it, with the verdict on each method."""
        record = super().record()
        record["verdicts"] = [asdict(judged) for judged in verdict.judge_methods(self)]
        return record

    def to_markdown(self, intervals: bool = False, notes: bool = False) -> str:
        """Return verdicts, scores and sizes as Markdown.

        ``intervals`` and ``notes`` add the details that ``run --intervals`` and ``run --notes`` print.
        """
        return render.render_report(self, "md", render.Detail(intervals=intervals, notes=notes))

    def to_pandas(self) -> pd.DataFrame:
        """Return a DataFrame with a row per method and task. Its columns are those of ``run --format csv``."""
        import pandas as pd

        return pd.DataFrame(render.list_records(self), columns=list(render.CSV_FIELDS))

    def plot(self) -> Canvas:
        """Return a figure with one panel for each task: scores with intervals against size in % of the full cache.

        Raises UsageError without matplotlib.
        """
        require("matplotlib", "plot")
        from kvbench.report import scatter

        return scatter.draw_report(self)

    def _repr_markdown_(self) -> str:
        """Return the report as Markdown, which a Jupyter notebook shows by itself."""
        return self.to_markdown()
