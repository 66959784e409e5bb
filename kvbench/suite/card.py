"""The text of a suite's card: the means by method and budget, the table of parts, and a line a row to quote."""

from __future__ import annotations

from collections.abc import Sequence

from kvbench.base.formatting import format_number, format_percent, format_significant, with_interval
from kvbench.kv.pages import PagesFreed
from kvbench.report import writers
from kvbench.report.table import Table
from kvbench.suite.definition import CHANCE, COMPARISON, KL, METHOD, QUICK, Suite
from kvbench.suite.folder import PICTURE, Line
from kvbench.suite.scores import BelowNegative, RowScore, find_below_negative

NOTHING = "nothing was compressed"
"""The text in place of the score of a row that equals the full cache."""
UNMEASURABLE = "—"
"""The text for a part that cannot be measured with the model, or that does not take the row."""
FEWER_PARTS = "†"
"""The mark of a mean over fewer parts than the suite has."""
FEW = 2
"""Up to this many methods have their lines above the table. More lines would push the table out of sight."""


def write_line(suite: Suite, entry: RowScore) -> str:
    """Return a row as one line of text to quote: its mean, its parts, the worst part, its bytes and its free pages."""
    head = f"{suite.name} @1/{entry.budget}: "
    if entry.nothing_compressed:
        return f"{head}{entry.name}: {NOTHING} on {format_percent(100 * entry.unchanged)} of the prompts"
    if entry.mean is None:
        return f"{head}{entry.name}: no part can be measured with this model"
    parts = []
    for name, part in entry.parts.items():
        if part.retained is not None:
            parts.append(f"{name} {format_number(part.retained, 0)}")
    # whoever quotes the line must see that its mean is not over all parts
    parts += [f"not {name}" for name in _list_absent_parts(suite, entry)]
    pages = ""
    if entry.pages is not None:
        in_place, compacted = _write_shares(entry.pages)
        pages = f"; pages freed {in_place} %, compacted {compacted} %"
    return (
        f"{head}{entry.name} {_write_mean(suite, entry)} ({', '.join(parts)}), "
        f"worst {entry.worst}; "
        f"{format_number(entry.bytes)} % of the bytes{pages}"
    )


def _write_shares(pages: PagesFreed) -> tuple[str, str]:
    """Return the shares of pages freed as kept tokens lie, and compacted, in whole per cent."""
    return format_number(100 * pages.united, 0), format_number(100 * pages.united_compacted, 0)


def write_score(value: float, ci: tuple[float, float] | None, mark: str = "") -> str:
    """Return a score of 0 (random tokens) to 100 (the full cache) without decimals, with its interval."""
    return with_interval(value, ci, 0, mark=mark, gap=" ")


def _list_absent_parts(suite: Suite, entry: RowScore) -> list[str]:
    """Return the suite's parts that do not take the row: a method may refuse a budget while it decodes."""
    return [part.name for part in suite.parts if part.name not in entry.parts]


def build_mean_table(suite: Suite, scored: Sequence[RowScore]) -> Table:
    """Return the table of means: a row for each method and control, a column for each budget."""
    methods, controls = list_methods_and_controls(scored)
    heads = ["mean"]
    heads += [f"at 1/{budget}" for budget in suite.budgets]
    rows = []
    for name in methods + controls:
        means = {entry.budget: _write_mean(suite, entry) for entry in scored if entry.name == name}
        cells = [name]
        cells += [means.get(budget, "") for budget in suite.budgets]
        rows.append(tuple(cells))
    # by the index of the row below: a line without text above the methods, and one above the controls
    headings = {0: "", len(methods): "controls"}
    return Table(tuple(heads), tuple(rows), headings=headings)


def list_methods_and_controls(scored: Sequence[RowScore]) -> tuple[list[str], list[str]]:
    """Return (the user's methods, the controls), each in the order of their first rows.

    Random tokens are left out, since their score is 0 by definition.
    """
    roles = {entry.name: entry.role for entry in scored}
    methods = [name for name, role in roles.items() if role == METHOD]
    controls = [name for name, role in roles.items() if role not in (METHOD, CHANCE)]
    return methods, controls


def _write_mean(suite: Suite, entry: RowScore) -> str:
    """Return a row's mean with its interval as text, or the text that stands in place of a missing mean.

    A mean over fewer parts than the suite has is marked.
    """
    if entry.nothing_compressed:
        return NOTHING
    if entry.mean is None:
        return UNMEASURABLE
    mark = FEWER_PARTS if _list_absent_parts(suite, entry) else ""
    return write_score(entry.mean, entry.ci, mark)


def build_score_table(suite: Suite, scored: Sequence[RowScore], style: str) -> Table:
    """Return the table of all rows: a column for each part. A budget heads its block of rows, in Markdown each row.

    A reader of a page sorts and filters rows, and would part them from their heading.
    """
    heads = ["row", "rank", "mean"]
    heads += [part.name for part in suite.parts]
    heads += ["bytes %", "pages freed % in place, compacted"]
    rows: list[tuple[str, ...]] = []
    # by the index of a block's first row
    headings: dict[int, str] = {}
    if style == "md":
        # one block without a heading, and a column for the budget
        heads.insert(1, "at")
        headings[0] = ""
    for budget in suite.budgets:
        entries = [entry for entry in scored if entry.budget == budget]
        if entries and style != "md":
            headings[len(rows)] = f"at 1/{budget}"
        for entry in entries:
            cells = _write_row(suite, entry)
            if style == "md":
                cells.insert(1, f"1/{budget}")
            rows.append(tuple(cells))
    return Table(tuple(heads), tuple(rows), headings=headings)


def _write_row(suite: Suite, entry: RowScore) -> list[str]:
    """Return the texts of a row of the table: name, rank, mean, each part, bytes and free pages."""
    rank = str(entry.rank) if entry.rank is not None else UNMEASURABLE
    cells = [entry.name, rank, _write_mean(suite, entry)]
    for part in suite.parts:
        score = entry.parts.get(part.name)
        if score is None or score.retained is None or entry.nothing_compressed:
            cells.append(UNMEASURABLE)
        else:
            cells.append(write_score(score.retained, score.ci))
    pages = UNMEASURABLE
    # results of older versions have no count of pages
    if entry.pages is not None:
        pages = ", ".join(_write_shares(entry.pages))
    cells += [format_number(entry.bytes), pages]
    return cells


def write_notes(suite: Suite, scored: Sequence[RowScore]) -> list[str]:
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
    if suite.counts == "compressed":
        lines.append(
            "Budgets count the bytes of the layers that methods compress, and bytes % those of all layers: the others "
            "hold windows, which formats alone compress."
        )
    lines += _note_parts(suite, scored)
    # random tokens have no interval by definition
    if any(entry.mean is not None and entry.ci is None and entry.role != CHANCE for entry in scored):
        lines.append(
            "No brackets: in at least one part, every prompt scores what it scores with random tokens, so that there "
            "is no spread to compute an interval from."
        )
    lines += _note_fewer_parts(suite, scored)
    lines += _note_below_negative(scored)
    if suite.edition == QUICK:
        lines.insert(0, "The quick edition is a first look with few prompts. No leaderboard takes it.")
    return lines


def _note_parts(suite: Suite, scored: Sequence[RowScore]) -> list[str]:
    """Return the notes on each part: its prompts and the full cache's score, and whether it cannot be measured."""
    # random tokens are measured in every part, so that their rows, one a budget, have each part's size and full score
    chance_rows = [entry for entry in scored if entry.role == CHANCE]
    lines = []
    for part in suite.parts:
        scores = {entry.budget: entry.parts[part.name] for entry in chance_rows if part.name in entry.parts}
        if not scores:
            continue
        # the budgets at which the full cache is not above random tokens by an interval
        at_chance = [
            f"{format_number(score.chance)} at 1/{budget}" for budget, score in scores.items() if score.retained is None
        ]
        full = next(iter(scores.values()))
        if at_chance:
            lines.append(
                f"{part.name} says nothing about compression here: the full cache ({format_number(full.full)}) is not "
                f"above random tokens ({', '.join(at_chance)}) by an interval."
            )
        unit = "nats, the floor" if part.measure == KL else "of 100"
        score = f"{format_significant(full.full)} {unit}"
        lines.append(f"{part.name}: {part.about}. n = {full.n} prompts. The full cache scores {score}.")
    return lines


def _note_fewer_parts(suite: Suite, scored: Sequence[RowScore]) -> list[str]:
    """Return a note that names the rows whose mean is over fewer parts than the suite has; none without such rows."""
    # by the names of the absent parts; the inner dictionary has each name once, in order
    names_by_parts: dict[str, dict[str, None]] = {}
    for entry in scored:
        absent = ", ".join(_list_absent_parts(suite, entry))
        if absent and entry.mean is not None:
            names_by_parts.setdefault(absent, {})[entry.name] = None
    if not names_by_parts:
        return []
    groups = [f"without {absent}: {', '.join(names)}" for absent, names in names_by_parts.items()]
    return [
        f"{FEWER_PARTS} The mean of fewer parts, since the others do not take the row ({'; '.join(groups)}). Compare "
        "it only with means over the same parts. Ranks compare two rows over the parts that both have."
    ]


def _note_below_negative(scored: Sequence[RowScore]) -> list[str]:
    """Return a note that names the rows below the negative control by part and budget; none without such rows."""
    rows_by_place: dict[tuple[str, int], list[BelowNegative]] = {}
    for row in find_below_negative(scored):
        # random tokens are the zero of the score, and need no mark
        if row.role in (METHOD, COMPARISON):
            rows_by_place.setdefault((row.part, row.budget), []).append(row)
    if not rows_by_place:
        return []
    groups = []
    for (part, budget), rows in rows_by_place.items():
        names = ", ".join(f"{row.name} ({format_number(row.retained, 0)})" for row in rows)
        # all rows of one part and budget are compared with one control
        control = f"{rows[0].negative} ({format_number(rows[0].negative_retained, 0)})"
        groups.append(f"{part} at 1/{budget}, {control}: {names}")
    return [
        "Some rows are worse than the first tokens alone, by intervals. These keep the text's beginning whole, with "
        "the answers that stand there. A selection that does not know the question can keep fewer answers:",
        *(f"{group}." for group in groups),
    ]


def write_card(suite: Suite, scored: Sequence[RowScore], style: str) -> str:
    """Return the card as ``text`` or ``md``: the means by budget, the table of parts, and their notes.

    A line to quote for each row of the user's methods stands above them. Those of more than FEW methods stand below,
    and only in Markdown.
    """
    methods, _ = list_methods_and_controls(scored)
    # the lines of one method stand together, and the methods in the order of their first rows
    lines = []
    for name in methods:
        lines += [write_line(suite, entry) for entry in scored if entry.name == name]
    title = f"{suite.name}: {suite.about}"
    if suite.edition == QUICK:
        title += " (quick edition, a first look)"
    tables = [build_mean_table(suite, scored), build_score_table(suite, scored, style)]
    above, below = [], write_notes(suite, scored)
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


def as_plain(suite: Suite, rows: Sequence[Line], notes_below: Sequence[str]) -> dict[str, object]:
    """Return the card as plain data, which ``--json`` prints: the lines of results.jsonl and the notes."""
    return {"suite": suite.name, "edition": suite.edition, "rows": list(rows), "notes": list(notes_below)}
