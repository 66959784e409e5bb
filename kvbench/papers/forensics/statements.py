"""(e) and (g): statements of the papers against their numbers, and arithmetic facts about those numbers.

Each paper's statements.yaml says where a statement stands, what it says, and by which formulas it holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache

import yaml

from kvbench.papers import DATA
from kvbench.papers.forensics.exact import kept_share
from kvbench.papers.forensics.finding import Finding
from kvbench.papers.forensics.formulas import cells, evaluate, query, text
from kvbench.papers.forensics.granularity import fits
from kvbench.papers.forensics.repeats import repeats
from kvbench.papers.spec.numbers import grade, printed
from kvbench.papers.spec.published_cells import Book

PAPERS = ("think", "refreekv", "uncomp", "vatp", "qhitter")
HOLDS, PARTLY, FAILS, NOTE = "holds", "partly", "does not hold", "note"
WEIGHT = {PARTLY: "doubt", FAILS: "wrong", NOTE: "note"}
ODD = ("pyramidkv", "cake")
"""The methods whose scores in ReFreeKV's tables often lie off the grid of right answers."""


@dataclass(frozen=True)
class Statement:
    """One statement of a paper in our words, with the formulas that decide it.

    place: where the paper makes it.
    table: where its numbers are.
    values: queries and formulas by name, after those of the facts that ``uses`` names.
    holds: the formula that decides. Without one it is no statement of the paper but a NOTE, an arithmetic fact that a
        reader must know.
    partly, otherwise: where it does not hold, the verdict is PARTLY if ``partly`` does, else ``otherwise``.
    shown: the recomputed figures.
    """

    paper: str
    place: str
    table: str
    text: str
    shown: str
    values: Mapping[str, str | float | dict[str, object]] = field(default_factory=dict)
    uses: str = ""
    holds: str = ""
    partly: str = "not 1"
    otherwise: str = FAILS

    def judge(self, book: Book) -> Judged:
        """Return the verdict by the cells of ``book``."""
        names: dict[str, object] = {}
        if self.uses:
            names.update(FACTS[self.uses](book))
        # in order, as a formula may use the names before it
        for name, entry in self.values.items():
            if isinstance(entry, dict):
                names[name] = query(book, self.paper, entry)
            else:
                names[name] = evaluate(str(entry), names)
        return Judged(self, self._verdict(names), text(self.shown, names))

    def _verdict(self, names: Mapping[str, object]) -> str:
        """Return HOLDS, PARTLY, FAILS or NOTE by the values of ``names``."""
        if not self.holds:
            return NOTE
        if evaluate(self.holds, names):
            return HOLDS
        if evaluate(self.partly, names):
            return PARTLY
        return self.otherwise


@dataclass(frozen=True)
class Judged:
    """A statement with its verdict and the figures behind it."""

    statement: Statement
    verdict: str
    shown: str

    def finding(self) -> Finding | None:
        """Return the statement as a finding, or None where it holds."""
        if self.verdict == HOLDS:
            return None
        # a note says nothing against the paper
        check, why = "statement", f"{self.statement.place}: {self.verdict}"
        if self.verdict == NOTE:
            check, why = "accounting", self.statement.place
        return Finding(
            check=check,
            weight=WEIGHT[self.verdict],
            paper=self.statement.paper,
            table=self.statement.table,
            # the statement is both the place and the printed text of the finding
            row=self.statement.text,
            cell="",
            printed=self.statement.text,
            recomputed=self.shown,
            why=why,
        )


@cache
def _statements() -> tuple[Statement, ...]:
    """Return all statements, by paper."""
    statements = []
    for paper in PAPERS:
        path = DATA / paper / "statements.yaml"
        for entry in yaml.safe_load(path.read_text(encoding="utf-8")):
            statements.append(Statement(paper, **entry))
    return tuple(statements)


def judged(book: Book) -> list[Judged]:
    """Return every statement of the book's papers with its verdict, in order."""
    return [statement.judge(book) for statement in _statements() if statement.paper in book.papers]


def statements(book: Book) -> Iterator[Finding]:
    """Yield statements that do not hold, or only partly, and facts to know."""
    for judgement in judged(book):
        finding = judgement.finding()
        if finding is not None:
            yield finding


def off_grid_by_method(book: Book) -> dict[str, object]:
    """Count ReFreeKV's scores, and those that no k right answers of n give (``off``).

    ``odd`` and ``odd_off`` are those of PyramidKV and CAKE, ``others`` and ``off`` those of all other methods.
    """
    scores: Counter[bool] = Counter()
    off: Counter[bool] = Counter()
    for fit in fits(book):
        if fit.grid.paper == "refreekv" and fit.grid.holds:
            scores.update(row.method in ODD for row, _ in fit.cells)
            off.update(row.method in ODD for row, _ in fit.off)
    return {"odd": scores[True], "odd_off": off[True], "others": scores[False], "off": off[False]}


def rounding_of_speedup(book: Book) -> dict[str, object]:
    """Return the range of Q-Hitter's largest speed-up that one printed digit allows."""
    cell = {"table": 2, "of": "throughput", "model": "opt-30b", "gen": 512}
    # throughput / throughput of accelerate, whose value has a single digit
    base = query(book, "qhitter", cell | {"method": "accelerate"}, printed)
    speedup = query(book, "qhitter", cell | {"method": "qhitter"}, printed) / base
    return {"base": float(base), "low": float(speedup.low), "high": float(speedup.high)}


def sizes_of_groups(book: Book) -> dict[str, object]:
    """Return UNComp's lists of group sizes with a wrong count, or a mean more than 2 from the cache's size."""
    odd = []
    for row in book.table("uncomp", 6):
        # group_sizes=256/384/512 lists a size for each group
        sizes = [int(size) for size in row.settings["group_sizes"].split("/")]
        groups = row.settings["groups"]
        # all groups have as many heads, so that the mean of their sizes is the cache's size
        average = sum(sizes) / len(sizes)
        if len(sizes) != int(groups) or abs(average - int(row.settings["kv_size"])) > 2:
            odd.append(f"{groups} groups list {len(sizes)} sizes with mean {average:.0f}")
    return {"odd": odd}


def kept_hidden_states(book: Book) -> dict[str, object]:
    """Return the shares that UNComp's two schedules keep, and which of them is the stated one."""
    key = ("hidden_state_size", "hidden_state_size")
    rows = [row for row in book.table("uncomp", "text") if row.model == "llama-2-7b-chat" and key in row.cells]
    early = kept_share([row for row in rows if row.settings["where"] == "appendix A.3"], 4096)
    late = kept_share([row for row in rows if row.settings["where"] == "appendix E"], 4096)
    # the paper states the share once, without the schedule that it is of
    ((_, _, cell),) = cells(book, "uncomp", {"table": "text", "of": "hidden_state_ratio"})
    matching_place, consequence = "neither", ""
    if grade(cell.printed, early) == "equal":
        matching_place = "appendix A.3"
    elif grade(cell.printed, late) == "equal":
        matching_place = "appendix E"
        consequence = "; tables of scores name appendix A.3, so times seem to be of a stronger compression"
    return {
        "early": early.text(2),
        "late": late.text(2),
        "stated": cell.printed,
        "fits": matching_place,
        "so": consequence,
    }


def two_sets_of_scores(book: Book) -> dict[str, object]:
    """Return the datasets on which UNComp's main configuration is printed with several scores."""
    datasets = []
    for finding in repeats(book):
        # identity.UNCOMP_MAIN gives the main configuration this name
        is_main = finding.row.startswith("llama-2-7b-chat") and "kv_size=384" in finding.row
        if finding.paper == "uncomp" and is_main:
            datasets.append(finding.cell)
    return {"datasets": datasets}


FACTS: Mapping[str, Callable[[Book], dict[str, object]]] = {
    "off_grid_by_method": off_grid_by_method,
    "rounding_of_speedup": rounding_of_speedup,
    "sizes_of_groups": sizes_of_groups,
    "kept_hidden_states": kept_hidden_states,
    "two_sets_of_scores": two_sets_of_scores,
}
"""Facts that statements use and no formula gives: lists of sizes, hidden digits, and the results of other checks."""
