"""ReFreeKV against its own tables."""

from __future__ import annotations

from itertools import pairwise

from kvbench.papers.forensics.exact.averages import ratio
from kvbench.papers.forensics.granularity import fits
from kvbench.papers.forensics.statements.base import NOTE, PARTLY, Decision, Statement, listed, value, verdict
from kvbench.papers.spec.numbers import printed
from kvbench.papers.spec.published_cells import Book, PublishedRow

LLAMA, QWEN = "llama-3-8b-instruct", "qwen2.5-7b-instruct"
WINDOW = 8192


def _rows(book: Book, table: int, method: str) -> list[PublishedRow]:
    return [r for r in book.table("refreekv", table) if r.method == method]


def _budgets(book: Book, k: str) -> dict[str, float]:
    rows = [r for r in _rows(book, 5, "refreekv") if r.settings.get("k") == k and "ranking" not in r.settings]
    row = next(r for r in rows if r.settings["t"] == "0.01")
    return {d: c.value or 0.0 for (d, m), c in row.cells.items() if m == "budget"}


def _throughput(book: Book) -> Decision:
    ups = []
    for row in _rows(book, 10, "refreekv"):
        base = value(book, "refreekv", 10, "narrativeqa", "throughput", method="accelerate", setting=row.setting)
        ups.append(100 * ((row.cells["narrativeqa", "throughput"].value or 0) / base - 1))
    inside = sum(9.5 <= u <= 20.5 for u in ups)
    return verdict(inside == len(ups)), f"{min(ups):.0f} to {max(ups):.0f} %, {inside} of {len(ups)} inside 10 to 20"


def _fastest(book: Book) -> Decision:
    times: dict[tuple[str, str], dict[str, float]] = {}
    for row in book.table("refreekv", 3):
        for (dataset, metric), cell in row.cells.items():
            if metric == "overall_time" and dataset != "avg":
                times.setdefault((row.model, dataset), {})[row.method] = cell.value or 0.0
    best = sum(min(by, key=by.__getitem__) == "refreekv" for by in times.values())
    return verdict(best == 8), f"{best} of {len(times)}"


def _smaller_budget(book: Book) -> Decision:
    one, five = _budgets(book, "1"), _budgets(book, "5%n")
    more = {d: v for d, v in one.items() if v > five[d]}
    mean = [sum(b.values()) / len(b) for b in (one, five)]
    shown = f"mean {mean[0]:.1f} against {mean[1]:.1f} %"
    shown += "".join(f"; larger on {d} ({v:.1f} against {five[d]:.1f})" for d, v in more.items())
    return verdict(not more and mean[0] < mean[1], PARTLY), shown


def _science(book: Book) -> Decision:
    found = [
        c.value or 0.0
        for r in book.table("refreekv", 2)
        for (d, m), c in r.cells.items()
        if m == "budget" and d in ("gsm8k", "gpqa", "theoremqa")
    ]
    over = sum(v > 90 for v in found)
    return verdict(over == len(found), PARTLY), f"{over} of {len(found)}, from {min(found):.1f} to {max(found):.1f} %"


def _lcc(book: Book) -> Decision:
    full = next(r for r in _rows(book, 2, "full") if r.model == QWEN)
    own = next(r for r in _rows(book, 2, "refreekv") if r.model == QWEN)
    names = full.scores
    part = {n: (own.scores[n].value or 0.0) / (full.scores[n].value or 1.0) for n in names}
    share = 100 * (part["lcc"] - 1) / len(part)
    without = 100 * (float(ratio(own, full, ("lcc",))) - 1)
    pooled = 100 * (sum(own.scores[n].value or 0 for n in names) / sum(full.scores[n].value or 0 for n in names) - 1)
    shown = f"LCC goes from {full.scores['lcc'].printed} to {own.scores['lcc'].printed} and adds {share:+.2f} of "
    shown += f"{100 * (float(ratio(own, full)) - 1):+.2f}; without it {without:+.2f} %, summed scores {pooled:+.2f} %"
    return verdict(without > 0, PARTLY), shown


def _beats(book: Book) -> Decision:
    lost, baselines = [], set()
    for own in _rows(book, 2, "refreekv"):
        full = next(r for r in _rows(book, 2, "full") if r.model == own.model)
        for other in book.table("refreekv", 2):
            if other.model == own.model and other.settings.get("budget") == "0.9":
                baselines.add(other.method)
                if float(ratio(other, full)) >= float(ratio(own, full)):
                    lost.append(f"{other.model} {other.method}")
    shown = f"better than all {len(baselines)} of table 2" if not lost else f"not better than {', '.join(lost)}"
    return verdict(not lost and len(baselines) == 3, PARTLY if not lost else "does not hold"), shown


def _frozen(book: Book) -> Decision:
    order, falls = ("none", "0", "0+1", "0+1+2", "0+1+2+3"), []
    for dataset in ("gsm8k", "coqa"):
        budgets = {f: value(book, "refreekv", 7, dataset, "budget", setting=f"frozen={f}") for f in order}
        for a, b in pairwise(order):
            if budgets[b] < budgets[a]:
                falls.append(f"{dataset} falls from {budgets[a]} ({a}) to {budgets[b]} ({b})")
    return verdict(not falls, NOTE), "; ".join(falls) or "budgets rise"


def _qmsum(book: Book) -> Decision:
    model = "mistral-7b-instruct-v0.3"
    full = value(book, "refreekv", 8, "qmsum", model=model, method="full")
    half = {r.method: r.scores["qmsum"].value or 0.0 for r in book.table("refreekv", 8) if _is_half(r, model)}
    own = value(book, "refreekv", 8, "qmsum", "budget", model=model, method="refreekv")
    best = max(half, key=half.__getitem__)
    return verdict(half[best] >= full), f"{best} at 50 % has {half[best]:.2f}, full {full:.2f}; ReFreeKV takes {own} %"


def _is_half(row: PublishedRow, model: str) -> bool:
    return row.model == model and row.settings.get("budget") == "0.5"


def _long(book: Book) -> Decision:
    means = {}
    for row in book.table("refreekv", 12):
        found = [c.value or 0.0 for (d, m), c in row.cells.items() if m == "budget" and d in LONG]
        if found:
            means[row.model] = sum(found) / len(found)
    return verdict(min(means.values()) < 52, PARTLY), f"mean budget on {', '.join(LONG)}: {listed(means, 1)} %"


LONG = ("narrativeqa", "musique", "qmsum")


def _counts(book: Book) -> Decision:
    half = {r.method for r in book.table("refreekv", 8)} - {"full", "refreekv"}
    return verdict(len(half) == 5), f"{len(half)} are there: {', '.join(sorted(half))}"


def _sizes(book: Book) -> Decision:
    models = sorted({r.model for r in book.table("refreekv", 12)})
    return verdict(any("34b" in m for m in models)), f"the blocks are {', '.join(models)}"


def _context(book: Book) -> Decision:
    longest = max(int(r.settings["input"]) + int(r.settings["output"]) for r in book.table("refreekv", 10))
    models = {r.model for r in book.table("refreekv", 10)}
    return NOTE, f"no model is named ({', '.join(models)}); {longest} tokens would not fit LLaMA-3-8B's {WINDOW}"


def _grids(book: Book) -> Decision:
    tried: dict[bool, int] = {True: 0, False: 0}
    off: dict[bool, int] = {True: 0, False: 0}
    for fit in fits(book):
        if fit.grid.paper == "refreekv" and fit.grid.holds:
            for row, _ in fit.cells:
                tried[row.method in ODD] += 1
            for row, _ in fit.off:
                off[row.method in ODD] += 1
    shown = f"PyramidKV and CAKE {off[True]} of {tried[True]}, all others {off[False]} of {tried[False]}: with the "
    shown += (
        "copied scores and Qwen's NarrativeQA, other scoring for these two would explain it; the paper says nothing"
    )
    return NOTE, shown


ODD = ("pyramidkv", "cake")


def _series(book: Book) -> Decision:
    found = {
        k: value(book, "refreekv", 9, "narrativeqa", "f1", setting=f"k={k}") for k in ("7%n", "8%n", "9%n", "10%n")
    }
    steady = found["10%n"] > 0.8 * found["9%n"]
    return verdict(steady, PARTLY), f"k = {listed(found)}; the last, on which this rests, looks like 19.74"


def _lossless(book: Book) -> Decision:
    gaps = {}
    for row in _rows(book, 12, "refreekv"):
        full = next(r for r in _rows(book, 12, "full") if r.model == row.model)
        if row.scores:
            gaps[row.model] = 100 * (float(ratio(row, full)) - 1)
    worst = min(
        (100 * (float(printed(c.printed) / printed(full.scores[d].printed)) - 1), f"{row.model} {d}")
        for row in _rows(book, 12, "refreekv")
        for full in _rows(book, 12, "full")
        if full.model == row.model
        for d, c in row.scores.items()
    )
    shown = f"mean ratio {', '.join(f'{m} {v:+.2f} %' for m, v in gaps.items())}; worst {worst[1]} {worst[0]:+.1f} %"
    return verdict(worst[0] > -5, PARTLY), shown


STATEMENTS = tuple(
    Statement("refreekv", place, table, text, decide)
    for place, table, text, decide in (
        ("section 3.3", "10", "Throughput rises by 10 to 20 %", _throughput),
        ("section 3.3", "3", "Fastest in 8 of 12 comparisons of overall time", _fastest),
        ("section 3.4", "5", "One row of attention needs a much smaller budget than 5 % of the rows", _smaller_budget),
        ("section 3.4", "9", "Summing 10 % of the rows fails on NarrativeQA", _series),
        ("section 3.2", "2", "Budgets on mathematics and science are over 90 %", _science),
        ("section 3.2", "2", "With Qwen2.5-7B it beats the full cache by 2.63 %", _lcc),
        ("section 3.2", "2", "It beats the three baselines at a budget of 90 %", _beats),
        ("limitations", "8", "QMSum with Mistral needs only half of the cache", _qmsum),
        ("section 3.4", "12", "Larger models stay near the full cache on five datasets", _lossless),
        ("section 3.4", "12", "Longer contexts reach nearly 50 % compression on larger models", _long),
        ("table 7", "7", "Keeping one more layer whole cannot lower the mean budget", _frozen),
        ("caption of table 8", "8", "Five pruning methods are compared at 50 %", _counts),
        ("caption of table 12", "12", "One of the models has 34B parameters", _sizes),
        ("table 10", "10", "Whose times table 10 has", _context),
        ("tables 2 and 8", "2", "Scores that no whole number of right answers gives, by method", _grids),
    )
)
