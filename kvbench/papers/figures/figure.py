"""Figures as values: how a figure's data are computed, described, written as CSV, and drawn from that CSV.

A figure's CSV begins with ``# key: value`` lines, which name the figure and the origin of its data. Drawings are always
made from the CSV as it is on disk, so that redrawing one gives the same bytes.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure as Canvas

from kvbench.base.errors import UsageError
from kvbench.papers.figures import names
from kvbench.papers.figures.draw import Head
from kvbench.papers.figures.pictures import Drawing
from kvbench.papers.figures.sweep import Sweep
from kvbench.papers.spec import stand_ins
from kvbench.report.style import styled
from kvbench.tasks.base import read_text

DIGITS = "%.5g"
"""The format of numbers in a CSV."""
SHORT = 40
"""A part of a figure's note with fewer letters than this is never broken into two lines."""
OWN_METHODS = "methods"
"""The key of a CSV's fact that lists the methods that the user named in place of the figure's."""


@dataclass(frozen=True)
class Fact:
    """One finding of a figure's data, to be printed as a sentence: a label with values.

    label: the words before the values.
    values: a text, a number, a list of numbers, or numbers by name (a dict or a series). A series can have several
    index levels: the last is the place of a number, such as its budget, and those before it are its name.
    form: the format of a number.
    at: the format of a place, or of a name without a place.
    """

    label: str
    values: Any
    form: str = "{:.1f}"
    at: str = "{}"

    def format_text(self) -> str:
        """Return ``label: values`` as text, such as ``Best: h2o 41.2 at 25 %``; '' if no number is known."""
        if isinstance(self.values, str):
            return f"{self.label}: {self.values}"
        # NaN stands for a value that could not be computed
        values = pd.Series(self.values).dropna()
        if values.empty:
            return ""
        if not isinstance(self.values, pd.Series | dict):
            # the values of a list, and a single number, have no names
            shown = ", ".join(self.form.format(value) for value in values)
        elif values.index.nlevels == 1:
            shown = ", ".join(f"{self.at.format(name)} {self.form.format(value)}" for name, value in values.items())
        else:
            shown = self._format_places(values)
        return f"{self.label}: {shown}"

    def _format_places(self, values: pd.Series[Any]) -> str:
        name_levels = list(range(values.index.nlevels - 1))
        parts = []
        for name, numbers in values.groupby(level=name_levels, sort=False):
            # a name of several levels is a tuple
            title = " ".join(map(str, name)) if isinstance(name, tuple) else name
            texts = []
            for index, value in numbers.items():
                place = index[-1]
                texts.append(f"{self.form.format(value)} at {self.at.format(place)}")
            parts.append(f"{title} {', '.join(texts)}")
        return "; ".join(parts)


def join_facts(facts: Iterable[Fact]) -> str:
    """Return the facts as one text with a sentence for each. Facts without a value are left out."""
    texts = [fact.format_text() for fact in facts]
    return " ".join(f"{text}." for text in texts if text)


class Code(NamedTuple):
    """The functions that are special to one figure. The defaults add nothing.

    compute: returns the data from a source, which is a ``Reading`` or a ``MeasuredFigure``. None stands for measured
    scores as ``MeasuredFigure.frame`` returns them.
    facts: yields findings of the data.
    prepare: returns the data as the picture shows them, such as with more columns for its titles.
    complete: returns the data of a CSV with further columns that are computed from the CSV's facts.
    """

    compute: Callable[[Any], pd.DataFrame] | None = None
    facts: Callable[[pd.DataFrame], Iterable[Fact]] = lambda data: ()
    prepare: Callable[[pd.DataFrame], pd.DataFrame] = lambda data: data
    complete: Callable[[pd.DataFrame, Mapping[str, str]], pd.DataFrame] = lambda data, facts: data


@dataclass(frozen=True)
class Figure:
    """One figure of a paper, or of kvbench's own: its texts, and how its data are computed and drawn.

    id: ``<paper>/fig<number>``; another name for kvbench's own figures, such as ``needle/heatmap``.
    title: the content in a line.
    shows: the caption, with the exact computation.
    claim: the paper's reading of its own figure.
    unsaid: points that the paper leaves open, and the choices made here.
    columns: the columns of the data in the CSV.
    drawing: the function that draws the data as ``prepare`` returns them.
    compute, facts, prepare, complete: the functions of ``Code``.
    note: the end of the note below the heading. It is a format with names of columns, for the first row of the data.
    knobs: the figure's options with their defaults; None stands for the default in ``shows``.
    each: the number of prompts of each task that are read by default.
    most: the most prompts that are read by default in all; None for no limit.
    sweeps: the runs behind measured scores; () if formulas alone compute the figure, None if it shows activations.
    own: the caption with methods that the user names; '' if the figure takes no such methods.
    """

    id: str
    title: str
    shows: str
    claim: str
    unsaid: str
    columns: tuple[str, ...]
    drawing: Drawing
    # figures differ in these functions, so they are fields of one class instead of methods of a class for each figure
    compute: Callable[[Any], pd.DataFrame]
    facts: Callable[[pd.DataFrame], Iterable[Fact]]
    prepare: Callable[[pd.DataFrame], pd.DataFrame]
    complete: Callable[[pd.DataFrame, Mapping[str, str]], pd.DataFrame]
    note: str = ""
    knobs: Mapping[str, Any] = field(default_factory=dict)
    each: int = 1
    most: int | None = None
    sweeps: tuple[Sweep, ...] | None = None
    own: str = ""

    def captioned(self, csv_facts: Mapping[str, object]) -> Figure:
        """Return the figure with the texts that fit the data of a CSV with these facts.

        For data of methods that the user named, the caption is ``own``. The paper says nothing about those methods, so
        ``claim`` and ``unsaid`` are ''. For all other data it is the figure itself.
        """
        if OWN_METHODS not in csv_facts:
            return self
        return replace(self, shows=self.own, claim="", unsaid="")

    @property
    def paper(self) -> str:
        """The first part of the id: the paper's name, as in conf/preset, or the topic of kvbench's own figure."""
        return self.id.partition("/")[0]

    def draw(self, data: pd.DataFrame, csv_facts: Mapping[str, str]) -> Canvas:
        """Draw the figure.

        data: the rows of its CSV.
        csv_facts: the values of the lines ``# key: value`` at the CSV's head, by key.
        """
        prepared = self.prepare(data)
        # str.capitalize would lower all other letters, as those of KL
        heading = self.title[:1].upper() + self.title[1:]
        return self.drawing(prepared, Head(heading, self._compose_note(data, prepared, csv_facts)))

    def _compose_note(self, data: pd.DataFrame, prepared: pd.DataFrame, csv_facts: Mapping[str, str]) -> str:
        # a part that the figure does not have is ''
        parts = [names.find_model(csv_facts), names.find_texts(csv_facts), names.find_tasks(data)]
        if "samples" in prepared:
            parts.append(str(prepared["samples"].iloc[0]))
        if "low" in data:
            has_intervals = data["low"].notna().any()
            # with too few examples, the ends of all intervals are NaN
            parts.append("95 % intervals" if has_intervals else "too few for intervals")
        elif "samples" in prepared:
            # a figure of activations has no samples either, and its note says nothing about intervals
            parts.append("no intervals")
        first_row = prepared.iloc[0]
        parts.append(self.note.format(**{str(column): value for column, value in first_row.items()}))
        unbroken = []
        for part in parts:
            if part:
                # no-break spaces keep a short part in one line
                unbroken.append(part.replace(" ", "\xa0") if len(part) < SHORT else part)
        return " · ".join(unbroken)

    def finding(self, data: pd.DataFrame) -> str:
        """Return the findings of the data as text, a sentence for each fact; '' if no fact has a value."""
        return join_facts(self.facts(data))

    def write(self, data: pd.DataFrame, facts: Mapping[str, object], folder: Path) -> tuple[list[Path], str]:
        """Write the figure's CSV, PNG and SVG below ``folder``. Return (paths of the files, finding).

        facts: the provenance of the data by key, for the comment lines at the head of the CSV.
        """
        csv_text = f"# figure: {self.id}\n"
        for key, value in facts.items():
            csv_text += f"# {key}: {value}\n"
        csv_text += data[list(self.columns)].to_csv(index=False, float_format=DIGITS, lineterminator="\n")
        path = folder / f"{self.id}.csv"
        _save_file(path, csv_text.encode())
        # the CSV is drawn, not ``data``: its numbers are rounded, so a later redraw gives the same picture
        pictures, finding = self.redraw(csv_text, path.with_suffix(""))
        return [*pictures, path], finding

    def redraw(self, text: str, stem: Path) -> tuple[list[Path], str]:
        """Draw the text of a CSV to ``stem``.png and ``stem``.svg. Return (paths of both, finding)."""
        data = self.parse(text)
        with styled():
            canvas = self.draw(data, facts_of(text))
            # the layout of the drawing is kept for both files
            canvas.set_layout_engine("none")
            for ax in canvas.axes:
                # the last bits of a position depend on what was drawn before, and ids in an SVG depend on positions
                left, bottom, width, height = (round(share, 6) for share in ax.get_position(original=True).bounds)
                ax.set_position((left, bottom, width, height))
            title = f"{self.id}: {self.title}"
            # None leaves out matplotlib's date and version, so that equal data give equal bytes
            png = {"Title": title, "Software": None}
            svg = {"Title": title, "Date": None, "Creator": None}
            # ``savefig`` would draw once more before each file, for a layout that is settled here
            canvas.set_dpi(mpl.rcParams["savefig.dpi"])
            _save_drawing(FigureCanvasAgg(canvas).print_png, stem.with_suffix(".png"), png)
            _save_drawing(FigureCanvasSVG(canvas).print_svg, stem.with_suffix(".svg"), svg)
        return [stem.with_suffix(".png"), stem.with_suffix(".svg")], self.finding(data)

    def parse(self, text: str) -> pd.DataFrame:
        """Return the data of a CSV, completed by ``complete``. Raises UsageError for any text but this figure's CSV."""
        # pandas would take any # inside a line for the start of a comment
        body = "".join(line for line in text.splitlines(keepends=True) if not line.startswith("# "))
        try:
            data = pd.read_csv(io.StringIO(body))
        except ValueError as error:
            raise UsageError(f"{self.id}: the CSV cannot be read: {error}") from None
        problem = ""
        missing = [column for column in self.columns if column not in data.columns]
        if missing:
            problem = f"it has no column {', '.join(missing)}"
        elif data.empty:
            problem = "it has no rows"
        if problem:
            raise UsageError(f"{self.id}: the CSV does not hold this figure's data: {problem}")
        return self.complete(data, facts_of(text))


def own_folder(results: Path | str, model: str) -> Path:
    """Return the folder for figures on a model with the user's own methods or settings.

    results: the folder of results.
    model: a name, a folder or a hub id. Its last part names the folder.
    """
    return Path(results) / "own" / Path(model).name / "figures"


def figure_folder(results: Path | str, model: str) -> Path:
    """Return the folder for figures as declared. The tiny model has its own, so that its figures replace no others."""
    if model == stand_ins.MODEL:
        return Path(results) / "tiny" / "figures"
    return Path(results) / "figures"


def facts_of(text: str) -> dict[str, str]:
    """Return {key: value} of the ``# key: value`` lines at the start of a CSV."""
    facts = {}
    for line in text.splitlines():
        # the first line without # has the names of the columns
        if not line.startswith("# "):
            break
        key, _, value = line[2:].partition(": ")
        facts[key] = value
    return facts


def read_csv(path: Path) -> tuple[str, str]:
    """Return (id of the figure, text of the file) of a figure's CSV.

    Raises UsageError for a file that cannot be read or does not begin as a figure's CSV does.
    """
    text = read_text(path, f"--from-csv {path}")
    facts = facts_of(text)
    if "figure" not in facts:
        raise UsageError(
            f"--from-csv {path}: this is no figure's CSV: its first line does not say which figure, as in "
            "'# figure: uncomp/fig1'"
        )
    return facts["figure"], text


def _save_drawing(print_drawing: Callable[..., None], path: Path, metadata: Mapping[str, str | None]) -> None:
    # drawing in memory first leaves no half-written file if it fails
    buffer = io.BytesIO()
    print_drawing(buffer, metadata=dict(metadata))
    _save_file(path, buffer.getvalue())


def _save_file(path: Path, content: bytes) -> None:
    """Write a file, and its folder if missing. Raises UsageError if that is not possible."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written: {error.strerror}; give another folder with output= or results="
        ) from None
