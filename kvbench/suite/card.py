"""The card of a suite: the means by method and budget, the table of parts, a picture, and a line a row to quote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from kvbench.report import writers
from kvbench.report.looks import looks_of
from kvbench.report.style import canvas, heat, styled
from kvbench.report.table import Table
from kvbench.suite.definition import CHANCE, COMPARISON, KL, METHOD, QUICK, Suite
from kvbench.suite.folder import PICTURE, Line
from kvbench.suite.scores import BelowNegative, PartScore, RowScore, below_negative

NOTHING = "nothing was compressed"
"""The text in place of the score of a row that equals the full cache."""
UNMEASURABLE = "—"
"""The text for a part that cannot be measured with the model, or that does not take the row."""
FEWER_PARTS = "†"
"""The mark of a mean over fewer parts than the suite has."""
CELL_WIDTH, CELL_HEIGHT = 0.3, 0.19
"""The size of one score in the picture, in inches."""
NAMES_WIDTH, TITLES_HEIGHT = 2.4, 0.9
"""The space for names and the colour bar, and for titles and budgets, in inches."""
FEW = 2
"""Up to this many methods have their lines above the table. More lines would push the table out of sight."""


def line_of(suite: Suite, entry: RowScore) -> str:
    """Return a row as one line of text to quote: its mean, its parts, the worst part, its bytes and its free pages."""
    head = f"{suite.name} @1/{entry.budget}: "
    if entry.nothing_compressed:
        return f"{head}{entry.name}: {NOTHING} on {100 * entry.unchanged:.0f} % of the prompts"
    if entry.mean is None:
        return f"{head}{entry.name}: no part can be measured with this model"
    parts = []
    for name, part in entry.parts.items():
        if part.retained is not None:
            parts.append(f"{name} {score_text(part.retained)}")
    # whoever quotes the line must see that its mean is not over all parts
    parts += [f"not {name}" for name in _parts_without(suite, entry)]
    return (
        f"{head}{entry.name} {_mean_text(suite, entry)} ({', '.join(parts)}), "
        f"worst {entry.worst}; "
        f"{entry.bytes:.1f} % of the bytes{_pages_freed(entry)}"
    )


def _pages_freed(entry: RowScore) -> str:
    """Return the text on pages that an engine with one page table a layer could free, as kept tokens lie and compacted.

    It is '' if pages were not counted.
    """
    if entry.pages is None:
        return ""
    return f"; pages freed {100 * entry.pages.united:.0f} %, compacted {100 * entry.pages.united_compacted:.0f} %"


def score_text(value: float) -> str:
    """Return a score without decimals, with a real minus sign."""
    # a whole number, so that a small negative score is 0 and not -0
    return str(round(value)).replace("-", "−")


def interval_text(ci: tuple[float, float] | None) -> str:
    """Return an interval in brackets, with a space before them; '' without an interval."""
    if ci is None:
        return ""
    return f" [{score_text(ci[0])}, {score_text(ci[1])}]"


def _parts_without(suite: Suite, entry: RowScore) -> list[str]:
    """Return the suite's parts that do not take the row: a method may refuse a budget while it decodes."""
    return [part.name for part in suite.parts if part.name not in entry.parts]


def mean_table(suite: Suite, scored: Sequence[RowScore]) -> Table:
    """Return the table of means: a row for each method and control, a column for each budget."""
    methods, controls = _methods_and_controls(scored)
    rows = []
    for name in methods + controls:
        means = {entry.budget: _mean_text(suite, entry) for entry in scored if entry.name == name}
        rows.append((name, *(means.get(budget, "") for budget in suite.budgets)))
    headings = {0: "", len(methods): "controls"}
    return Table(("mean", *(f"at 1/{budget}" for budget in suite.budgets)), tuple(rows), headings=headings)


def _methods_and_controls(scored: Sequence[RowScore]) -> tuple[list[str], list[str]]:
    """Return (the user's methods, the controls), each in the order of their first rows.

    Random tokens are left out, since their score is 0 by definition.
    """
    roles = {entry.name: entry.role for entry in scored}
    methods = [name for name, role in roles.items() if role == METHOD]
    controls = [name for name, role in roles.items() if role not in (METHOD, CHANCE)]
    return methods, controls


def _mean_text(suite: Suite, entry: RowScore) -> str:
    """Return a row's mean with its interval as text, or the text that stands in place of a missing mean.

    A mean over fewer parts than the suite has is marked.
    """
    if entry.nothing_compressed:
        return NOTHING
    if entry.mean is None:
        return UNMEASURABLE
    mark = FEWER_PARTS if _parts_without(suite, entry) else ""
    return score_text(entry.mean) + mark + interval_text(entry.ci)


def score_table(suite: Suite, scored: Sequence[RowScore], style: str) -> Table:
    """Return the table of all rows: a column for each part. A budget heads its block of rows, in Markdown each row.

    A reader of a page sorts and filters rows, and would part them from their heading.
    """
    heads = ["row", "rank", "mean"]
    heads += [part.name for part in suite.parts]
    heads += ["bytes %", "pages freed % in place, compacted"]
    rows: list[tuple[str, ...]] = []
    budgets: list[str] = []
    headings: dict[int, str] = {}
    for budget in suite.budgets:
        of_budget = [entry for entry in scored if entry.budget == budget]
        if of_budget:
            headings[len(rows)] = f"at 1/{budget}"
        for entry in of_budget:
            rows.append(_cells_of_row(suite, entry))
            budgets.append(f"1/{budget}")
    if style == "md":
        heads.insert(1, "at")
        rows = [(name, budget, *others) for (name, *others), budget in zip(rows, budgets, strict=True)]
        return Table(tuple(heads), tuple(rows))
    return Table(tuple(heads), tuple(rows), headings=headings)


def _cells_of_row(suite: Suite, entry: RowScore) -> tuple[str, ...]:
    """Return the texts of a row of the table: name, rank, mean, each part, bytes and free pages."""
    rank = str(entry.rank) if entry.rank is not None else UNMEASURABLE
    cells = [entry.name, rank, _mean_text(suite, entry)]
    for part in suite.parts:
        score = entry.parts.get(part.name)
        if score is None or score.retained is None or entry.nothing_compressed:
            cells.append(UNMEASURABLE)
        else:
            cells.append(score_text(score.retained) + interval_text(score.ci))
    pages = UNMEASURABLE
    # results of older versions have no count of pages
    if entry.pages is not None:
        pages = f"{100 * entry.pages.united:.0f}, {100 * entry.pages.united_compacted:.0f}"
    cells += [f"{entry.bytes:.1f}", pages]
    return tuple(cells)


def notes(suite: Suite, scored: Sequence[RowScore]) -> list[str]:
    """Return the notes below the table: the meaning of its columns, parts without a score, and rows to distrust."""
    lines = [
        "A score of 100 is as good as the full cache, and 0 is as good as random tokens at the same bytes, on the same "
        "prompts. In a mean, all parts have the same weight, and so have all tasks of a part. [95 % intervals over "
        "prompts.] rank: 1 and the number of rows at the same budget that are better by an interval.",
        "bytes %: keys, values and all else that is stored after the prompt, as a share of the full cache's bytes at "
        "16 bits.",
        "pages freed: the share of a prompt's pages of 16 tokens that an engine with one page table a layer could give "
        "back, as the kept tokens lie (in place), and if each head's kept tokens are moved together (compacted).",
    ]
    # random tokens are measured in every part, so that their row has each part's size and full score
    chance_parts: Mapping[str, PartScore] = {}
    for entry in scored:
        if entry.role == CHANCE:
            chance_parts = entry.parts
            break
    for part in suite.parts:
        score = chance_parts.get(part.name)
        if score is None:
            continue
        if score.retained is None:
            lines.append(
                f"{part.name} says nothing about compression here: the full cache ({score.full:.1f}) is not above "
                f"random tokens ({score.chance:.1f}) by an interval."
            )
        unit = "nats, the floor" if part.measure == KL else "of 100"
        lines.append(
            f"{part.name}: {part.about}. n = {score.n} prompts. The full cache scores {score.full:.3g} {unit}."
        )
    if any(entry.mean is not None and entry.ci is None and entry.role != CHANCE for entry in scored):
        lines.append(
            "No brackets: in at least one part, every prompt scores what it scores with random tokens, so that there "
            "is no spread to compute an interval from."
        )
    lines += _notes_on_fewer_parts(suite, scored)
    lines += _notes_below_negative(scored)
    if suite.edition == QUICK:
        lines.insert(0, "The quick edition is a first look with few prompts. No leaderboard takes it.")
    return lines


def _notes_on_fewer_parts(suite: Suite, scored: Sequence[RowScore]) -> list[str]:
    """Return a note that names the rows whose mean is over fewer parts than the suite has; none without such rows."""
    # by the names of the absent parts; a dict of names keeps their order, and each name once
    names_by_parts: dict[str, dict[str, None]] = {}
    for entry in scored:
        absent = ", ".join(_parts_without(suite, entry))
        if absent and entry.mean is not None:
            names_by_parts.setdefault(absent, {})[entry.name] = None
    if not names_by_parts:
        return []
    groups = [f"without {absent}: {', '.join(names)}" for absent, names in names_by_parts.items()]
    return [
        f"{FEWER_PARTS} The mean of fewer parts, since the others do not take the row ({'; '.join(groups)}). Compare "
        "it only with means over the same parts. Ranks compare two rows over the parts that both have."
    ]


def _notes_below_negative(scored: Sequence[RowScore]) -> list[str]:
    """Return a note that names the rows below the negative control by part and budget; none without such rows."""
    below: dict[tuple[str, int], list[BelowNegative]] = {}
    for place in below_negative(scored):
        # random tokens are the zero of the score, and need no mark
        if place.role in (METHOD, COMPARISON):
            below.setdefault((place.part, place.budget), []).append(place)
    if not below:
        return []
    groups = []
    for (part, budget), places in below.items():
        names = ", ".join(f"{place.name} ({score_text(place.retained)})" for place in places)
        control = f"{places[0].negative} ({score_text(places[0].negative_retained)})"
        groups.append(f"{part} at 1/{budget}, {control}: {names}")
    return [
        "Some rows are worse than the first tokens alone, by intervals. These keep the text's beginning whole, with "
        "the answers that stand there. A selection that does not know the question can keep fewer answers:",
        *(f"{group}." for group in groups),
    ]


def card_text(suite: Suite, scored: Sequence[RowScore], style: str) -> str:
    """Return the card as ``text`` or ``md``: the means by budget, the table of parts, and their notes.

    A line to quote for each row of the user's methods stands above them. Those of more than FEW methods stand below,
    and only in Markdown.
    """
    methods, _ = _methods_and_controls(scored)
    # the lines of one method stand together, and the methods in the order of their first rows
    lines = []
    for name in methods:
        lines += [line_of(suite, entry) for entry in scored if entry.name == name]
    title = f"{suite.name}: {suite.about}"
    if suite.edition == QUICK:
        title += " (quick edition, a first look)"
    tables = [mean_table(suite, scored), score_table(suite, scored, style)]
    above, below = [], notes(suite, scored)
    if len(methods) <= FEW:
        above = lines
    elif style == "md":
        below += lines
    else:
        below.append("card.md has each row as a line to quote.")
    if style == "md":
        picture = f"![S of each row by part and share of the bytes]({PICTURE})"
        return f"# {title}\n\n{picture}\n\n{writers.compose(tables, below, style, above=above)}"
    return writers.compose(tables, below, style, above=[title, *above])


def draw_card(suite: Suite, scored: Sequence[RowScore], path: Path) -> None:
    """Draw the card's picture into a file: a map of S for each measurable part, a row a method, a column a budget.

    The methods stand in the order of the table of means, and the controls below them. Without a measurable part no
    file is written.
    """
    methods, controls = _methods_and_controls(scored)
    names = methods + controls
    looks = looks_of(names)
    parts = []
    for part in suite.parts:
        measured = [entry for entry in scored if part.name in entry.parts]
        if any(entry.parts[part.name].retained is not None for entry in measured):
            parts.append(part)
    if not parts:
        return
    with styled():
        width = NAMES_WIDTH + len(parts) * len(suite.budgets) * CELL_WIDTH
        fig = canvas(width, TITLES_HEIGHT + len(names) * CELL_HEIGHT)
        # one row of panels
        (axes,) = fig.subplots(1, len(parts), sharey=True, squeeze=False)
        budgets = [f"1/{budget}" for budget in suite.budgets]
        for ax, part in zip(axes, parts, strict=True):
            image = heat(ax, _scores_of(part.name, names, suite, scored), names, budgets, "%.0f", vmin=0, vmax=100)
            # ``heat`` leaves out names of a long list, but here each row is a method that a reader looks for
            ax.set_yticks(range(len(names)), [looks[name].name for name in names])
            # a gap between the methods and the controls below them
            ax.axhline(len(methods) - 0.5, color="white", linewidth=3)
            ax.set_title(part.name)
        axes[len(parts) // 2].set_xlabel("share of the bytes")
        # the ends of the bar are pointed: a row may be worse than random tokens, or better than the full cache
        fig.colorbar(image, ax=axes, label="retained: random tokens 0, full cache 100", extend="both", pad=0.01)
        fig.suptitle(f"{suite.name}: what a compressed cache retains", fontsize=9)
        # 250 dpi: a telephone shows half of the pixels, and the names must be readable there, too. No software is named
        # in the file, so that equal data give equal bytes
        fig.savefig(path, dpi=250, metadata={"Software": None})


def _scores_of(part: str, names: Sequence[str], suite: Suite, scored: Sequence[RowScore]) -> np.ndarray:
    """Return S of one part [names, the suite's budgets]; nan where nothing was measured or compressed."""
    scores = np.full((len(names), len(suite.budgets)), np.nan)
    for entry in scored:
        score = entry.parts.get(part)
        if score is None or score.retained is None or entry.nothing_compressed:
            continue
        if entry.name in names:
            scores[names.index(entry.name), suite.budgets.index(entry.budget)] = score.retained
    return scores


def as_plain(suite: Suite, rows: Sequence[Line], notes_below: Sequence[str]) -> dict[str, object]:
    """Return the card as plain data, which ``--json`` prints: the lines of results.jsonl and the notes."""
    return {"suite": suite.name, "edition": suite.edition, "rows": list(rows), "notes": list(notes_below)}
