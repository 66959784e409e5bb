"""VATP against its own tables."""

from __future__ import annotations

from fractions import Fraction

from kvbench.methods.chain import Chain
from kvbench.papers.forensics.statements.base import NOTE, Decision, Statement, listed, value, verdict
from kvbench.papers.spec.numbers import mean, printed
from kvbench.papers.spec.published_cells import Book
from kvbench.papers.timed.paper_arithmetic import FP16, LLAMA2_7B

MODELS = ("llama-2-7b-chat", "vicuna-7b-v1.5-16k")
STATED = {
    (MODELS[0], "h2o"): 12,
    (MODELS[0], "scissorhands"): 13,
    (MODELS[1], "h2o"): 12,
    (MODELS[1], "scissorhands"): 14,
}


def _wins(book: Book) -> Decision:
    wins, level = {}, {}
    for model, base in STATED:
        rows = {r.method: r.scores for r in book.table("vatp", 1) if r.model == model}
        pairs = [((c.value or 0) - (rows[base][d].value or 0)) for d, c in rows[f"{base}+vatp"].items()]
        wins[model, base] = sum(p > 0 for p in pairs)
        level[model, base] = sum(p == 0 for p in pairs)
    shown = ", ".join(f"{m} {b} {n} (+{level[m, b]} level)" for (m, b), n in wins.items())
    return verdict(wins == STATED), shown


def _norm(book: Book) -> Decision:
    averages = {n: value(book, "vatp", 2, "avg", setting=f"norm={n}") for n in ("l1", "l2", "linf")}
    return verdict(max(averages, key=averages.__getitem__) == "l1"), listed(averages)


def _overhead(book: Book) -> Decision:
    speed = [value(book, "vatp", 3, "throughput", method=m) for m in ("scissorhands", "scissorhands+vatp")]
    memory = [value(book, "vatp", 3, "peak_memory", method=m) for m in ("scissorhands", "scissorhands+vatp")]
    slower = 100 * (1 - speed[1] / speed[0])
    return verdict(slower < 1 and memory[1] <= memory[0]), f"{slower:.2f} % slower, {memory[1] - memory[0]:+.0f} MiB"


def _size(book: Book) -> Decision:
    (block,) = Chain().layout(1, LLAMA2_7B.head_dim, FP16)
    share = Fraction(FP16, block.key_bytes + block.value_bytes)
    return verdict(share == Fraction(1, 256)), f"one fp16 number a token and head beside its key and value: {share}"


def _speedups(book: Book) -> Decision:
    gaps = []
    base = {r.settings["gpu"]: r for r in book.table("vatp", 4) if r.method == "full"}
    for row in book.table("vatp", 4):
        own = {m: c.value or 0.0 for (_, m), c in row.cells.items()}
        full = base[row.settings["gpu"]].cells["throughput", "throughput"].value or 1.0
        gaps.append(abs(own["throughput"] / full - own["speedup_vs_full"]))
    return verdict(max(gaps) < 0.0051), f"largest gap {max(gaps):.3f}"


def _trends(book: Book) -> Decision:
    """Fewer tokens, more tokens per second."""
    by: dict[str, list[float]] = {}
    for row in book.table("vatp", 4):
        by.setdefault(row.settings["gpu"], []).append(row.cells["throughput", "throughput"].value or 0.0)
    return verdict(all(v == sorted(v) for v in by.values())), "; ".join(
        f"{g} {', '.join(map(str, v))}" for g, v in by.items()
    )


def _means(book: Book) -> Decision:
    found: dict[str, list[str]] = {}
    for row in book.table("vatp", 1):
        found.setdefault(row.method, []).append(mean(printed(c.printed) for c in row.scores.values()).text(2))
    shown = "; ".join(f"{m} {' / '.join(v)}" for m, v in found.items())
    return NOTE, f"no averages are printed; of 16 tasks ({' / '.join(MODELS)}): {shown}"


STATEMENTS = tuple(
    Statement("vatp", place, table, text, decide)
    for place, table, text, decide in (
        ("section 4.2", "1", "VATP wins 12 and 13 of 16 tasks with LLaMA-2, 12 and 14 with Vicuna", _wins),
        ("appendix B", "2", "The l1 norm is the best", _norm),
        ("section 4.2", "3", "It costs next to no throughput and no memory", _overhead),
        ("section 4.2", "1", "Norms are 1/256 of the cache", _size),
        ("appendix C", "4", "Speed-ups at half and a quarter of the cache", _speedups),
        ("appendix C", "4", "Throughput rises as the cache shrinks", _trends),
        ("table 1", "1", "Averages of table 1", _means),
    )
)
