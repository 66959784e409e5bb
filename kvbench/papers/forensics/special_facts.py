"""Facts that statements need and no formula gives: lists of sizes, hidden digits, and what other checks find."""

from __future__ import annotations

from typing import Any

from kvbench.papers.forensics.exact import kept_share
from kvbench.papers.forensics.formulas import cells, query
from kvbench.papers.forensics.granularity import fits
from kvbench.papers.forensics.repeats import repeats
from kvbench.papers.spec.numbers import grade, printed
from kvbench.papers.spec.published_cells import Book

Facts = dict[str, Any]
ODD = ("pyramidkv", "cake")


def off_grid_by_method(book: Book) -> Facts:
    """Count ReFreeKV's scores off their grid of k/n, of PyramidKV and CAKE and of all other methods."""
    grid_fits = [fit for fit in fits(book) if fit.grid.paper == "refreekv" and fit.grid.holds]
    cells, off = ([row.method in ODD for f in grid_fits for row, _ in getattr(f, field)] for field in ("cells", "off"))
    return {"odd": sum(cells), "odd_off": sum(off), "others": cells.count(False), "off": off.count(False)}


def rounding_of_speedup(book: Book) -> Facts:
    """Return the range of Q-Hitter's largest speed-up that one printed digit allows."""
    where = {"table": 2, "of": "throughput", "model": "opt-30b", "gen": 512}
    base, own = (query(book, "qhitter", {**where, "method": m}, printed) for m in ("accelerate", "qhitter"))
    speedup = own / base
    return {"base": float(base), "low": float(speedup.low), "high": float(speedup.high)}


def sizes_of_groups(book: Book) -> Facts:
    """Return UNComp's lists of group sizes with a wrong count, or a mean more than 2 from the cache's size."""
    odd = []
    for row in book.table("uncomp", 6):
        sizes = [int(s) for s in row.settings["group_sizes"].split("/")]
        average = sum(sizes) / len(sizes)
        if len(sizes) != int(row.settings["groups"]) or abs(average - int(row.settings["kv_size"])) > 2:
            odd.append(f"{row.settings['groups']} groups list {len(sizes)} sizes with mean {average:.0f}")
    return {"odd": odd}


def kept_hidden_states(book: Book) -> Facts:
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


def two_sets_of_scores(book: Book) -> Facts:
    """Return the datasets on which UNComp's main configuration is printed with several scores."""
    findings = [f for f in repeats(book) if f.paper == "uncomp" and f.row.startswith("llama-2-7b-chat")]
    return {"datasets": [f.cell for f in findings if "kv_size=384" in f.row]}
