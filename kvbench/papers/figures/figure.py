"""Figures: tidy data computed from something, and a drawing of those data alone.

A figure's CSV begins with ``# key: value`` lines that say which figure it is and what it was computed from. Drawings
are always made from the CSV as it is on disk, so that redrawing one gives the same bytes.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas

from kvbench.base.errors import UsageError
from kvbench.papers.figures.panels import Picture
from kvbench.papers.spec import stand_ins
from kvbench.report.style import styled
from kvbench.tasks.base import read_text

if TYPE_CHECKING:
    from kvbench.papers.figures.measured import Sweep

DIGITS = "%.5g"
OWN_METHODS = "methods"
"""The fact that says which methods the user named in place of the figure's."""


@dataclass(frozen=True)
class Fact:
    """A label with values: a text, a number, or a series of numbers by name, or by name and place.

    form: how a number is written. at: how the place is.
    """

    label: str
    values: Any
    form: str = "{:.1f}"
    at: str = "{}"

    def text(self) -> str:
        """Return ``label: values``, with names before numbers and places after them; '' where no number is known."""
        if isinstance(self.values, str):
            return f"{self.label}: {self.values}"
        values = pd.Series(self.values).dropna()
        if not isinstance(self.values, pd.Series | dict):
            parts = [self.form.format(v) for v in values]
        elif values.index.nlevels == 1:
            parts = [f"{self.at.format(i)} {self.form.format(v)}" for i, v in values.items()]
        else:
            parts = []
            for name, rows in values.groupby(level=list(range(values.index.nlevels - 1)), sort=False):
                numbers = (f"{self.form.format(v)} at {self.at.format(i[-1])}" for i, v in rows.items())
                title = " ".join(map(str, name)) if isinstance(name, tuple) else name
                parts.append(f"{title} {', '.join(numbers)}")
        several = values.index.nlevels > 1
        return f"{self.label}: {('; ' if several else ', ').join(parts)}" if parts else ""


def sentences(facts: Iterable[Fact]) -> str:
    """Return the facts as one text, a sentence each, without those that have no value."""
    return " ".join(f"{text}." for text in (fact.text() for fact in facts) if text)


class Code(NamedTuple):
    """The functions that compute and describe a figure.

    compute: returns its data from a source; None for measured scores. facts: yields findings of the data. prepare: adds
    the columns that the picture shows.
    """

    compute: Callable[[Any], pd.DataFrame] | None = None
    facts: Callable[[pd.DataFrame], Iterable[Fact]] = lambda data: ()
    prepare: Callable[[pd.DataFrame], pd.DataFrame] = lambda data: data


@dataclass(frozen=True)
class Figure:
    """One figure of a paper, ``<paper>/fig<number>``, with its data, its texts and its drawing.

    title: its content in a line. shows: its caption, with the exact computation. claim: the paper's reading of its own
    figure. unsaid: points that the paper leaves open, and the choices made here. columns: those of the data. knobs: its
    options with their defaults; None stands for the default in ``shows``. each, most: prompts read by default per task
    and in all. own: its caption with methods that the user names, '' if it takes none. compute, facts, prepare: as in
    ``Code``. sweeps: the runs behind measured scores, empty where formulas
    alone compute a figure; None for one of a model's activations.
    """

    id: str
    title: str
    shows: str
    claim: str
    unsaid: str
    columns: tuple[str, ...]
    picture: Picture
    compute: Callable[[Any], pd.DataFrame]
    facts: Callable[[pd.DataFrame], Iterable[Fact]]
    prepare: Callable[[pd.DataFrame], pd.DataFrame]
    knobs: Mapping[str, Any] = field(default_factory=dict)
    each: int = 1
    most: int | None = None
    sweeps: tuple[Sweep, ...] | None = None
    own: str = ""

    def captioned(self, csv_facts: Mapping[str, Any]) -> Figure:
        """Return the figure with the caption that fits data of these facts: methods of the user's own test no claim."""
        return replace(self, shows=self.own, claim="", unsaid="") if OWN_METHODS in csv_facts else self

    @property
    def paper(self) -> str:
        """Return the paper's name, as in conf/preset."""
        return self.id.partition("/")[0]

    def draw(self, data: pd.DataFrame) -> Canvas:
        """Return the drawing of the data."""
        return self.picture.draw(self.prepare(data))

    def finding(self, data: pd.DataFrame) -> str:
        """Return the findings about the claim, in numbers."""
        return sentences(self.facts(data))

    def write(self, data: pd.DataFrame, facts: Mapping[str, Any], folder: Path) -> tuple[list[Path], str]:
        """Write the data as CSV, headed by comment lines of ``facts`` (their provenance), and as PNG and SVG.

        Returns (paths, finding).
        """
        head = "".join(f"# {key}: {value}\n" for key, value in {"figure": self.id, **facts}.items())
        csv_text = head + data[list(self.columns)].to_csv(index=False, float_format=DIGITS, lineterminator="\n")
        path = folder / f"{self.id}.csv"
        _save(path, csv_text.encode())
        # drawn from the CSV, so that a later redraw gives the same picture
        pictures, finding = self.redraw(csv_text, path.with_suffix(""))
        return [*pictures, path], finding

    def redraw(self, text: str, stem: Path) -> tuple[list[Path], str]:
        """Write ``stem``.png and ``stem``.svg from the text of a CSV, and return (paths, finding)."""
        data = self.parse(text)
        paths = [stem.with_suffix(".png"), stem.with_suffix(".svg")]
        with styled():
            canvas = self.draw(data)
            FigureCanvasAgg(canvas)
            # laid out once for both files: that takes most of the time
            canvas.draw_without_rendering()
            canvas.set_layout_engine("none")
            for ax in canvas.axes:
                # the last bits of a layout depend on what was drawn before, and names in an SVG on them
                left, bottom, width, height = (round(x, 6) for x in ax.get_position(original=True).bounds)
                ax.set_position((left, bottom, width, height))
            for path in paths:
                kind = path.suffix[1:]
                buffer = io.BytesIO()
                # neither a date nor a version, so that equal data give equal bytes
                facts = {"Software": None} if kind == "png" else {"Date": None, "Creator": None}
                canvas.savefig(buffer, format=kind, metadata={"Title": f"{self.id}: {self.title}", **facts})
                _save(path, buffer.getvalue())
        return paths, self.finding(data)

    def parse(self, text: str) -> pd.DataFrame:
        """Return the data of a CSV; raise UsageError where they are not this figure's."""
        body = "".join(line for line in text.splitlines(keepends=True) if not line.startswith("# "))
        try:
            data = pd.read_csv(io.StringIO(body))
        except ValueError as error:
            raise UsageError(f"{self.id}: the CSV cannot be read: {error}") from None
        missing = [c for c in self.columns if c not in data.columns]
        if missing or data.empty:
            problem = f"it has no column {', '.join(missing)}" if missing else "it has no rows"
            raise UsageError(f"{self.id}: the CSV does not hold this figure's data: {problem}")
        return data


def own_folder(results: Path | str, model: str) -> Path:
    """Return the folder of figures of the user's own methods on a model."""
    return Path(results) / "own" / Path(model).name / "figures"


def folder(results: Path | str, model: str) -> Path:
    """Return the folder of a model's figures; the tiny model has its own, so that it never replaces others."""
    return Path(results) / ("tiny/figures" if model == stand_ins.MODEL else "figures")


def percent(x: float) -> str:
    """Format a fraction as in texts: 12 %."""
    return f"{100 * x:.0f} %"


def facts_of(text: str) -> dict[str, str]:
    """Return {key: value} of the ``# key: value`` lines at the start of a CSV."""
    facts = {}
    for line in text.splitlines():
        if not line.startswith("# "):
            break
        key, _, value = line[2:].partition(": ")
        facts[key] = value
    return facts


def read_csv(path: Path) -> tuple[str, str]:
    """Return (id of the figure, text) of a figure's CSV; raise UsageError for any other file."""
    text = read_text(path, f"--from-csv {path}")
    facts = facts_of(text)
    if "figure" not in facts:
        raise UsageError(
            f"--from-csv {path}: this is no figure's CSV: its first line does not say which figure, as in "
            "'# figure: uncomp/fig1'"
        )
    return facts["figure"], text


def _save(path: Path, content: bytes) -> None:
    """Write a file, and raise UsageError where that is not possible."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written: {error.strerror}; give another folder with output= or results="
        ) from None
