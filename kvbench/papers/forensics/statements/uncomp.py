"""UNComp against its own tables."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

from kvbench.papers.forensics.exact.sizes import kept_share
from kvbench.papers.forensics.repeats import repeats
from kvbench.papers.forensics.statements.base import (
    FAILS,
    NOTE,
    PARTLY,
    Decision,
    Statement,
    listed,
    scores,
    value,
    verdict,
)
from kvbench.papers.spec.numbers import exactly, fixed, grade
from kvbench.papers.spec.published_cells import Book

L7, L13, L8 = "llama-2-7b-chat", "llama-2-13b-chat", "llama-3-8b-instruct"
OURS = ("uncomp-group", "uncomp-stage")
LONG, SHORT = "prompt=4032", "prompt=3712"


def _average(book: Book, model: str, method: str) -> float:
    return value(book, "uncomp", 1, "avg", model=model, method=method)


def _rate(book: Book) -> Decision:
    stated = scores(book, "uncomp", "text", "kv_ratio", model=L8)
    shown = " and ".join(f"{v:.2f}" for v in stated.values())
    context = {n: fixed(Fraction(38400, n), 2) for n in (8096, 8192)}
    shown += "".join(f"; 384 / {n} is {v} %" for n, v in context.items())
    return verdict(len(set(stated.values())) == 1), shown


def _chai(book: Book) -> Decision:
    stated = scores(book, "uncomp", "text", "kv_ratio", method="chai")
    return verdict(len(set(stated.values())) == 1), " and ".join(f"{v:.2f} %" for v in stated.values())


def _chai_speed(book: Book) -> Decision:
    timed = {r.method for t in (3, 10) for r in book.table("uncomp", t)}
    return verdict("chai" in timed, PARTLY), f"no table has a time of CHAI; timed are {', '.join(sorted(timed))}"


def _faster(book: Book) -> Decision:
    where = {"dataset": "multifieldqa_en", "metric": "attention_time"}
    times = {
        (m, g): value(book, "uncomp", 3, **where, method=m, setting=f"gpu={g}")
        for m in ("full", *OURS)
        for g in ("a100-80g", "mi210-64g")
    }
    over = {g: times["uncomp-group", g] / times["uncomp-stage", g] for g in ("a100-80g", "mi210-64g")}
    full = times["full", "a100-80g"] / times["uncomp-stage", "a100-80g"]
    shown = (
        f"{over['a100-80g']:.2f} on the A100, {over['mi210-64g']:.2f} on the MI210; {full:.2f} is over the full cache"
    )
    return verdict(fixed(Fraction(over["a100-80g"]), 1) == "1.4"), shown


def _points(book: Book) -> Decision:
    lost = {m: (_average(book, m, "full"), _average(book, m, "uncomp-group")) for m in (L7, L13, L8)}
    shown = ", ".join(f"{m} {a - b:.2f} points or {100 * (a - b) / a:.1f} %" for m, (a, b) in lost.items())
    stated = {m: value(book, "uncomp", "text", "avg", "drop_vs_full", model=m) for m in (L7, L8)}
    relative = all(abs(100 * (lost[m][0] - lost[m][1]) / lost[m][0] - said) < 0.05 for m, said in stated.items())
    return verdict(relative, PARTLY), f"{shown}: what is stated are points"


def _near_lossless(book: Book) -> Decision:
    lost = {m: _average(book, m, "full") - _average(book, m, "uncomp-group") for m in (L7, L13)}
    return verdict(max(lost.values()) <= 0.775), listed(lost)


def _best(book: Book) -> Decision:
    averages = {r.method: r.cells["avg", "mean"].value or 0.0 for r in book.table("uncomp", 1) if r.model == L8}
    averages.pop("full")
    best = max(averages, key=averages.__getitem__)
    return verdict(best == "uncomp-group"), f"best of those compressed: {best} {averages[best]:.2f}"


def _groups(book: Book) -> Decision:
    wide: list[float] = []
    narrow: list[float] = []
    for row in book.table("uncomp", 6):
        (wide if row.settings["group_sizes"].startswith("32/") else narrow).append(
            row.cells["avg", "mean"].value or 0.0
        )
    spans = [max(v) - min(v) for v in (narrow, wide)]
    cut = [r.cells["avg", "mean"].value or 0.0 for r in book.table("uncomp", 7)]
    spans.append(max(cut) - min(cut))
    good = [fixed(Fraction(str(round(s, 4))), 2) for s in spans] == ["0.23", "0.96", "0.70"]
    return verdict(good), f"{spans[0]:.2f}, {spans[1]:.2f}, {spans[2]:.2f}"


def _sizes(book: Book) -> Decision:
    odd = []
    for row in book.table("uncomp", 6):
        sizes = [int(s) for s in row.settings["group_sizes"].split("/")]
        mean = sum(sizes) / len(sizes)
        if len(sizes) != int(row.settings["groups"]) or abs(mean - int(row.settings["kv_size"])) > 2:
            odd.append(f"{row.settings['groups']} groups list {len(sizes)} sizes with mean {mean:.0f}")
    hint = "; 636 would fill 436/536/736" if odd else ""
    return verdict(not odd), "; ".join(odd) + hint or "every list has its number of sizes and mean"


def _needle(book: Book) -> Decision:
    parts, better = [], 0
    for model in (L7, L8):
        full = value(book, "uncomp", 4, "needle", model=model, method="full")
        own = {m: value(book, "uncomp", 4, "needle", model=model, method=m) for m in OURS}
        better += sum(v > full for v in own.values())
        parts.append(f"{model} {listed(own)} against {full:.2f}")
    return verdict(better == 4, PARTLY if better else FAILS), f"{better} of 4: {'; '.join(parts)}"


def _hidden(book: Book) -> Decision:
    shares = {}
    for where in ("appendix A.3", "appendix E"):
        rows = [
            r
            for r in book.table("uncomp", "text")
            if r.model == L7 and r.settings.get("where") == where and ("hidden_state_size",) * 2 in r.cells
        ]
        shares[where] = kept_share(rows, 4096)
    stated = book.cell("uncomp", "text", "hidden_state_ratio").printed
    fits = next((w for w, s in shares.items() if grade(stated, s) == "equal"), "neither")
    shown = ", ".join(f"{w} keeps {s.text(2)} %" for w, s in shares.items())
    harder = "; tables of scores name appendix A.3, so times seem to be of a stronger compression"
    return NOTE, f"{shown}; the stated {stated} % is that of {fits}{harder if fits == 'appendix E' else ''}"


def _memory(book: Book) -> Decision:
    over: dict[str, list[float]] = {SHORT: [], LONG: []}
    for row in book.table("uncomp", 10):
        prompt = next(p for p in over if p in row.setting)
        at = f"batch={row.settings['batch']};{prompt}"
        full = book.cell("uncomp", 10, "wikitext2", "peak_memory", method="full", setting=at).value
        if row.method in OURS and full:
            over[prompt].append(100 * ((row.cells["wikitext2", "peak_memory"].value or 0.0) / full - 1))
    above = sum(o > 0 for values in over.values() for o in values)
    shown = "; ".join(f"{p} {min(v):+.2f} to {max(v):+.2f} %" for p, v in over.items())
    count = sum(map(len, over.values()))
    return verdict(not above, PARTLY), f"peaks against the full cache's: {shown}; {above} of {count} are above"


def _monotone(book: Book) -> Decision:
    odd = []
    for method in OURS:
        for prompt in (SHORT, LONG):
            for metric, rises in (("tpot", False), ("peak_memory", True)):
                series = [
                    (r.settings["batch"], r.cells["wikitext2", metric].value or 0.0)
                    for r in book.table("uncomp", 10)
                    if r.method == method and prompt in r.setting
                ]
                for (_, a), (batch, b) in pairwise(series):
                    if (b < a) is rises and a != b:
                        odd.append(f"{method} {prompt} {metric} {a:g} to {b:g} at batch {batch}")
    return verdict(not odd, NOTE), "; ".join(odd) or "time falls and memory rises with the batch"


def _batches(book: Book) -> Decision:
    where = {"dataset": "wikitext2", "metric": "tpot"}
    full = value(book, "uncomp", 10, **where, method="full", setting=f"batch=8;{SHORT}")
    own = {b: value(book, "uncomp", 10, **where, method="uncomp-stage", setting=f"batch={b};{SHORT}") for b in (8, 12)}
    return NOTE, f"{full / own[12]:.2f} is batch 12 over batch 8; at batch 8 for both it is {full / own[8]:.2f}"


def _short_group(book: Book) -> Decision:
    found = [(r.label, r.scores["lcc"], r.scores["trec"]) for r in book.table("uncomp", 8) if "random" in r.setting]
    label, lcc, trec = found[0]
    row = next(r for r in book.table("uncomp", 8) if r.label == label)
    total = sum(exactly(Fraction(c.printed)).value for c in row.scores.values())
    needed = fixed((total + Fraction(1, 2)) / len(row.scores), 2)
    stated = row.cells["avg", "mean"].printed
    shown = f"TREC {trec.printed}, LCC {lcc.printed}, average {stated}; 0.50 more in one cell gives {needed}"
    same = {r.settings["partition"] for t in (8, 9) for r in book.table("uncomp", t)} - {"effective_rank"}
    return NOTE, f"{shown}. Tables 8 and 9 head {' and '.join(sorted(same))} alike"


def _two_sets(book: Book) -> Decision:
    found = [f for f in repeats(book) if f.paper == "uncomp" and "kv_size=384" in f.row and f.row.startswith(L7)]
    tables = [f.cell for f in found]
    return verdict(not found), f"they differ on {len(found)} datasets: {', '.join(tables)}"


def _mistral(book: Book) -> Decision:
    models = {r.model for r in book.table("uncomp", 1) if "mistral" in r.model}
    return NOTE, f"v0.1 in section 4.1, v0.2 in appendix A.2; stored without version: {', '.join(models)}"


def _total(book: Book) -> Decision:
    gaps = []
    for row in book.table("uncomp", 3):
        by = {m: c.value or 0.0 for (_, m), c in row.cells.items()}
        gaps.append(abs(by["prefill_time"] + by["decode_time"] - by["attention_time"]))
    close = sum(g < 0.015 for g in gaps)
    return (
        NOTE,
        f"prefill + decoding in {close} of {len(gaps)} rows (largest gap {max(gaps):.2f} s): the total, not a part",
    )


STATEMENTS = tuple(
    Statement("uncomp", place, table, text, decide)
    for place, table, text, decide in (
        ("abstract, section 4.2", "1", "The cache of LLaMA-3-8B is cut to one stated share", _rate),
        ("caption of table 1, section 4.2", "1", "CHAI has one compression rate", _chai),
        ("section 4.2", "3", "It is 5.4 times faster than CHAI", _chai_speed),
        ("caption of table 1", "3", "The stage makes it 1.4 times faster than the group alone", _faster),
        ("abstract, section 4.2", "1", "Losses of 0.77 % and 1.41 %", _points),
        ("section 4.2", "1", "LLaMA-2 7B and 13B lose no more than 0.77", _near_lossless),
        ("section 4.2", "1", "It is the best method on LLaMA-3-8B", _best),
        ("appendix D", "6", "Groups change 0.23 and 0.96, truncation 0.70", _groups),
        ("table 6", "6", "Sizes of the groups average 384", _sizes),
        ("abstract, section 4.3", "4", "It beats the full cache in the needle test", _needle),
        ("caption of table 3", "3", "Which schedule keeps 63.09 % of hidden states", _hidden),
        ("conclusion", "10", "It takes much less memory than the full cache", _memory),
        ("tables 1, 2, 6, 7", "1", "Groups of 512 and 256 tokens have one set of scores", _two_sets),
        ("table 10", "10", "Time per token falls and memory rises with the batch", _monotone),
        ("appendix E", "10", "What 2.96 times the throughput compares", _batches),
        ("tables 8 and 9", "8", "The random partition's row and column titles", _short_group),
        ("sections 4.1 and A.2", "1", "Which Mistral it is", _mistral),
        ("table 3", "3", "What the attention time is", _total),
    )
)
