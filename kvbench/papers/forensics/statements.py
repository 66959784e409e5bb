"""(e) and (g): statements of the papers against their numbers, and arithmetic facts about those numbers.

Each paper's statements.yaml says where a statement stands, what it says, and by which formulas it holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

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


@dataclass(frozen=True)
class Statement:
    """One statement of a paper in our words, with the formulas that decide it.

    place: where the paper makes it. table: where its numbers are. values: queries and formulas by name, after those of
    the facts that ``uses`` names. holds: the formula that decides; without one it is no statement of the paper but a
    NOTE, an arithmetic fact that a reader must know. Where it does not hold, the verdict is PARTLY if ``partly`` does,
    else ``otherwise``. shown: the recomputed figures.
    """

    paper: str
    place: str
    table: str
    text: str
    shown: str
    values: Mapping[str, Any] = field(default_factory=dict)
    uses: str = ""
    holds: str = ""
    partly: str = "not 1"
    otherwise: str = FAILS

    def judge(self, book: Book) -> Judged:
        """Return the verdict by the cells of ``book``."""
        names: dict[str, Any] = FACTS[self.uses](book) if self.uses else {}
        for name, entry in self.values.items():
            names[name] = query(book, self.paper, entry) if isinstance(entry, dict) else evaluate(str(entry), names)
        verdict = NOTE
        if self.holds:
            otherwise = PARTLY if evaluate(self.partly, names) else self.otherwise
            verdict = HOLDS if evaluate(self.holds, names) else otherwise
        return Judged(self, verdict, text(self.shown, names))


@dataclass(frozen=True)
class Judged:
    """A statement with its verdict and the figures behind it."""

    statement: Statement
    verdict: str
    shown: str

    def finding(self) -> Finding | None:
        """Return the statement as a finding; None where it holds."""
        if self.verdict == HOLDS:
            return None
        s = self.statement
        check = "accounting" if self.verdict == NOTE else "statement"
        why = s.place if self.verdict == NOTE else f"{s.place}: {self.verdict}"
        return Finding(check, WEIGHT[self.verdict], s.paper, s.table, s.text, "", s.text, self.shown, why)


@cache
def _statements() -> tuple[Statement, ...]:
    """Return all statements, by paper."""
    paths = {paper: DATA / paper / "statements.yaml" for paper in PAPERS}
    entries = {paper: yaml.safe_load(path.read_text(encoding="utf-8")) for paper, path in paths.items()}
    return tuple(Statement(paper, **entry) for paper, items in entries.items() for entry in items)


def judged(book: Book) -> list[Judged]:
    """Return every statement of the book's papers with its verdict, in order."""
    return [s.judge(book) for s in _statements() if s.paper in book.papers]


def statements(book: Book) -> Iterator[Finding]:
    """Yield statements that do not hold, or only partly, and facts to know."""
    yield from filter(None, (j.finding() for j in judged(book)))


def off_grid_by_method(book: Book) -> dict[str, Any]:
    """Count ReFreeKV's scores, and those that no k right answers of n give (``off``).

    ``odd`` and ``odd_off`` are those of PyramidKV and CAKE, ``others`` and ``off`` those of all other methods.
    """
    grid_fits = [fit for fit in fits(book) if fit.grid.paper == "refreekv" and fit.grid.holds]
    cells, off = ([row.method in ODD for f in grid_fits for row, _ in getattr(f, field)] for field in ("cells", "off"))
    return {"odd": sum(cells), "odd_off": sum(off), "others": cells.count(False), "off": off.count(False)}


def rounding_of_speedup(book: Book) -> dict[str, Any]:
    """Return the range of Q-Hitter's largest speed-up that one printed digit allows."""
    where = {"table": 2, "of": "throughput", "model": "opt-30b", "gen": 512}
    base, own = (query(book, "qhitter", {**where, "method": m}, printed) for m in ("accelerate", "qhitter"))
    speedup = own / base
    return {"base": float(base), "low": float(speedup.low), "high": float(speedup.high)}


def sizes_of_groups(book: Book) -> dict[str, Any]:
    """Return UNComp's lists of group sizes with a wrong count, or a mean more than 2 from the cache's size."""
    odd = []
    for row in book.table("uncomp", 6):
        sizes = [int(s) for s in row.settings["group_sizes"].split("/")]
        average = sum(sizes) / len(sizes)
        if len(sizes) != int(row.settings["groups"]) or abs(average - int(row.settings["kv_size"])) > 2:
            odd.append(f"{row.settings['groups']} groups list {len(sizes)} sizes with mean {average:.0f}")
    return {"odd": odd}


def kept_hidden_states(book: Book) -> dict[str, Any]:
    """Return the shares that UNComp's two schedules keep, and which of them is the stated one."""
    key = ("hidden_state_size",) * 2
    rows = [r for r in book.table("uncomp", "text") if r.model == "llama-2-7b-chat" and key in r.cells]
    places = ("appendix A.3", "appendix E")
    shares = {place: kept_share([r for r in rows if r.settings["where"] == place], 4096) for place in places}
    ((_, _, cell),) = cells(book, "uncomp", {"table": "text", "of": "hidden_state_ratio"})
    stated = cell.printed
    names = {"early": shares[places[0]].text(2), "late": shares[places[1]].text(2), "stated": stated}
    matching_place = next((place for place, share in shares.items() if grade(stated, share) == "equal"), "neither")
    consequence = "; tables of scores name appendix A.3, so times seem to be of a stronger compression"
    return {**names, "fits": matching_place, "so": consequence if matching_place == places[1] else ""}


def two_sets_of_scores(book: Book) -> dict[str, Any]:
    """Return the datasets on which UNComp's main configuration is printed with several scores."""
    findings = [f for f in repeats(book) if f.paper == "uncomp" and f.row.startswith("llama-2-7b-chat")]
    return {"datasets": [f.cell for f in findings if "kv_size=384" in f.row]}


FACTS = {
    **{"off_grid_by_method": off_grid_by_method, "rounding_of_speedup": rounding_of_speedup},
    **{"sizes_of_groups": sizes_of_groups, "kept_hidden_states": kept_hidden_states},
    **{"two_sets_of_scores": two_sets_of_scores},
}
"""Facts that statements use and no formula gives: lists of sizes, hidden digits, and what other checks find."""
