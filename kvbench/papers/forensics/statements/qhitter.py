"""Q-Hitter against its own tables."""

from __future__ import annotations

from itertools import pairwise

from kvbench.papers.forensics.statements.base import NOTE, PARTLY, Decision, Statement, listed, value, verdict
from kvbench.papers.spec.numbers import printed
from kvbench.papers.spec.published_cells import Book

SETS, SHOTS = ("xsum", "cnn_dailymail"), (0, 1, 3, 5)
STATED = {"accelerate": 33, "deepspeed": 7, "flexgen": 4, "h2o": 1.3}


def _rouge(book: Book, method: str, dataset: str, shots: int) -> float:
    return value(book, "qhitter", 3, dataset, method=method, setting=f"shots={shots}")


def _gains(book: Book) -> dict[tuple[str, int], float]:
    return {(d, k): _rouge(book, "qhitter", d, k) - _rouge(book, "h2o+quant", d, k) for d in SETS for k in SHOTS}


def _every_setting(book: Book) -> Decision:
    gains = _gains(book)
    best = max(gains, key=gains.__getitem__)
    positive = sum(g > 0 for g in gains.values())
    shown = f"largest {gains[best]:.3f} ({best[0]}, {best[1]} shots), {positive} of {len(gains)} positive"
    return verdict(positive == len(gains) and round(gains[best], 3) == 0.097 and best[1] == 0), shown


def _lossless(book: Book) -> Decision:
    gaps = {(d, k): 100 * (_rouge(book, "qhitter", d, k) / _rouge(book, "full", d, k) - 1) for d in SETS for k in SHOTS}
    below = sum(g < 0 for g in gaps.values())
    worst = min(gaps, key=gaps.__getitem__)
    shown = f"below the full cache in {below} of {len(gaps)}, by {-max(gaps.values()):.1f} to {-gaps[worst]:.1f} %"
    return verdict(below == 0, PARTLY), f"{shown} ({worst[0]}, {worst[1]} shots)"


def _largest_gain(book: Book) -> Decision:
    gains = {k: 100 * (_rouge(book, "qhitter", *k) / _rouge(book, "h2o+quant", *k) - 1) for k in _gains(book)}
    stated = value(book, "qhitter", "text", "cnn_dailymail", "max_gain")
    best = max(gains.values())
    shown = f"table 3 has at most {best:.1f} % at 4 bits; it can only be read off figure 7"
    return verdict(abs(best - stated) < 0.05, PARTLY), shown


def _memory(book: Book) -> Decision:
    shares = {
        d: 100 / (4 * value(book, "qhitter", "text", d, "sparsity_factor")) for d in ("xsum", "cnn_dailymail", "mdqa")
    }
    return verdict(min(shares.values()) == 5 and max(shares.values()) == 12.5), f"{listed(shares, 1)} %"


def _speedups(book: Book) -> Decision:
    best = {}
    for other, said in STATED.items():
        ratios = []
        for row in book.table("qhitter", 2):
            if row.method == "qhitter":
                at = f"gen={row.settings['gen']}"
                base = value(book, "qhitter", 2, "throughput", model=row.model, method=other, setting=at)
                ratios.append((row.cells["throughput", "throughput"].value or 0.0) / base)
        best[other] = max(ratios)
        if abs(best[other] - said) > (0.5 if said > 2 else 0.051):
            return verdict(False), listed(best)
    return verdict(True), listed(best)


def _coarse(book: Book) -> Decision:
    own = book.number("qhitter", 2, "throughput", model="opt-30b", method="qhitter", setting="gen=512")
    base = printed(
        book.cell("qhitter", 2, "throughput", model="opt-30b", method="accelerate", setting="gen=512").printed
    )
    over = own / base
    return (
        NOTE,
        f"rests on one printed digit, {float(base):.1f} token/s: {float(over.low):.1f} to {float(over.high):.1f}",
    )


def _bits(book: Book) -> Decision:
    tested = sorted({int(r.settings["selection_bits"]) for r in book.table("qhitter", 1) if "quant" in r.method})
    rises: dict[int, float] = {}
    for bits in tested:
        for dataset in ("wikitext103", "ptb"):
            for model in ("pythia-70m", "pythia-160m", "pythia-410m"):
                full = value(book, "qhitter", 1, dataset, model=model, method="full")
                at = f"selection_bits={bits}"
                own = value(book, "qhitter", 1, dataset, model=model, method="h2o+quant", setting=at)
                rises[bits] = max(rises.get(bits, 0.0), own - full)
    shown = f"<= 4 in the abstract, <= 3 in the contributions; table 1 tests {', '.join(map(str, tested))}, largest "
    return verdict(4 in tested, PARTLY), shown + f"rises {', '.join(f'{b} bits {r:.2f}' for b, r in rises.items())}"


def _shots(book: Book) -> Decision:
    falls = []
    for method in ("full", "h2o+quant", "qhitter"):
        for dataset in SETS:
            series = [_rouge(book, method, dataset, k) for k in SHOTS]
            for (a, x), (b, y) in pairwise(zip(SHOTS, series, strict=True)):
                if y < x - 0.0015:
                    falls.append(f"{method} on {dataset} falls from {x:.3f} ({a}) to {y:.3f} ({b})")
    return verdict(not falls, NOTE), "; ".join(falls) or "every row rises"


def _size(book: Book) -> Decision:
    row = next(r for r in book.table("qhitter", "text") if "selected" in r.settings)
    parts = [int(row.settings[k]) for k in ("selected", "local", "kv_size")]
    return verdict(parts[0] + parts[1] == parts[2]), f"{parts[0]} + {parts[1]} = {parts[0] + parts[1]}"


STATEMENTS = tuple(
    Statement("qhitter", place, table, text, decide)
    for place, table, text, decide in (
        ("section 5.4", "3", "It gains in every setting, most, 0.097, without shots", _every_setting),
        ("contributions, section 5.2", "3", "4 bits lose nothing against the full cache", _lossless),
        ("section 5.2", "3", "It gains up to 78.17 % over H2O with quantisation", _largest_gain),
        ("section 5.2", "text", "5 to 12.5 % of the memory", _memory),
        ("abstract", "2", "33, 7, 4 and 1.3 times faster than Accelerate, DeepSpeed, FlexGen and H2O", _speedups),
        ("abstract, contributions", "1", "Few bits harm the choice of tokens: from how many on", _bits),
        ("section 5.4", "text", "128 and 1920 tokens make a cache of 2048", _size),
        ("table 2", "2", "What 33 times rests on", _coarse),
        ("table 3", "3", "Rouge-L rises with the number of shots", _shots),
    )
)
