"""ThinK against its own tables."""

from __future__ import annotations

from kvbench.cache.model_shape import Shape
from kvbench.papers.forensics.statements.base import NOTE, PARTLY, Decision, Statement, scores, value, verdict
from kvbench.papers.spec.published_cells import Book

LLAMA, MISTRAL = "llama-3-8b-instruct", "mistral-7b-instruct-v0.2"
SIZES = ("128", "512", "1024", "2048")
PARAMETERS, A100_FLOPS = 6.7e9, 312e12
MISTRAL_SHAPE = Shape(32, 32, 8, 128)
MIB, FP16 = 2**20, 2


def _average(book: Book, table: int, model: str, method: str, setting: str) -> float:
    return value(book, "think", table, "avg", model=model, method=method, setting=setting)


def _needle_half(book: Book) -> Decision:
    where = {"model": MISTRAL, "method": "snapkv+think"}
    half = value(book, "think", 5, "needle", **where, setting="kv_size=1024;ratio=0.5")
    less = value(book, "think", 5, "needle", **where, setting="kv_size=1024;ratio=0.4")
    panel = value(book, "think", "fig6", "needle", **where, setting="kv_size=1024;ratio=0.5")
    said = value(book, "think", "text", "needle", **where)
    shown = f"table 5 {half:.1f}, figure 6 {panel:.1f}; {less:.1f} is the score at 0.4"
    return verdict(said == half == panel), shown


def _eighty(book: Book) -> Decision:
    rows = [r for r in book.table("think", 7) if "ratio" in r.settings and r.method.startswith("snapkv")]
    saved = []
    for row in rows:
        size = int(row.settings["kv_size"])
        whole = MISTRAL_SHAPE.full_bytes(size, FP16, MISTRAL_SHAPE.query_heads) / MIB
        saved.append(100 * (1 - (row.cells["kv_memory", "kv_memory"].value or 0) / whole))
    return verdict(min(saved) > 75), f"table 7's memory is {min(saved):.0f} to {max(saved):.0f} % smaller, so to 80 %"


def _twenty(book: Book) -> Decision:
    sizes = [int(r.settings["kv_size"]) for r in book.table("think", 7) if "ratio" in r.settings]
    shares = {n: 20 * (1 - 32 / n) for n in sorted(set(sizes))}
    shown = ", ".join(f"{v:.1f} % of {n} tokens" for n, v in shares.items())
    return verdict(min(shares.values()) > 19.5, PARTLY), f"{shown}: 32 tokens keep all channels"


def _beats_full(book: Book) -> Decision:
    own = _average(book, 2, LLAMA, "snapkv+think", "kv_size=2048;ratio=0.4")
    full = _average(book, 2, LLAMA, "full", "")
    return verdict(own > full), f"{own:.2f} against {full:.2f}"


def _rising(book: Book) -> Decision:
    rising = every = 0
    for table, model in ((2, LLAMA), (3, MISTRAL)):
        for base in ("h2o", "snapkv"):
            for ratio in ("", "ratio=0.4", "ratio=0.5"):
                method = f"{base}+think" if ratio else base
                series = [_average(book, table, model, method, f"kv_size={n};{ratio}") for n in SIZES]
                rising += series == sorted(series)
                every += 1
    return verdict(rising == every), f"{rising} of {every} series rise"


def _equal_memory(book: Book) -> Decision:
    pairs = []
    for base in ("h2o", "snapkv"):
        for plain, size in zip(("109", "416", "826", "1645"), SIZES, strict=True):
            own = _average(book, 7, MISTRAL, f"{base}+think", f"kv_size={size}")
            pairs.append(own - _average(book, 7, MISTRAL, base, f"kv_size={plain}"))
    wins = sum(p > 0 for p in pairs)
    return verdict(wins == len(pairs)), f"{wins} of {len(pairs)} pairs, by {min(pairs):.2f} to {max(pairs):.2f}"


def _needle(book: Book) -> Decision:
    pairs = []
    for model in (LLAMA, MISTRAL):
        for size in SIZES:
            own = value(book, "think", 5, "needle", model=model, setting=f"kv_size={size};ratio=0.4")
            base = value(book, "think", 5, "needle", model=model, method="snapkv", setting=f"kv_size={size}")
            pairs.append(own - base)
    level = sum(p >= 0 for p in pairs)
    return verdict(level == len(pairs)), f"{level} of {len(pairs)}, up to {max(pairs):+.1f}"


def _norms(book: Book) -> Decision:
    falls = {
        (base, norm, ratio): _average(book, 1, LLAMA, base, "") - _average(book, 1, LLAMA, f"{base}+{norm}", ratio)
        for base in ("h2o", "snapkv")
        for norm in ("l1", "l2")
        for ratio in ("ratio=0.3", "ratio=0.4")
    }
    low = [v for (_, _, r), v in falls.items() if r == "ratio=0.3"]
    high = {(b, n): v for (b, n, r), v in falls.items() if r == "ratio=0.4"}
    worse = [b for b in ("h2o", "snapkv") if high[b, "l1"] > high[b, "l2"]]
    shown = f"falls of {min(low):.2f} to {max(low):.2f} at 30 %, at 40 % " + ", ".join(
        f"{b}+{n} {v:.2f}" for (b, n), v in high.items()
    )
    shown += f"; l1 falls further for {' and '.join(worse) or 'none'} (six labels are repaired, in part by this)"
    return verdict(min(high.values()) > max(low) and len(worse) == 2, PARTLY), shown


def _values(book: Book) -> Decision:
    gaps: dict[str, list[float]] = {}
    for row in book.table("think", 8):
        if row.method.endswith("+thinkv"):
            base = row.method.removesuffix("+thinkv")
            own = _average(book, 8, row.model, row.method, row.setting)
            plain = _average(book, 8, row.model, base, f"kv_size={row.settings['kv_size']}")
            gaps.setdefault(row.model, []).append(own - plain)
    mean = {m: sum(v) / len(v) for m, v in gaps.items()}
    shown = "; ".join(f"{m} {min(v):+.2f} to {max(v):+.2f}, mean {mean[m]:+.2f}" for m, v in gaps.items())
    return verdict(mean[MISTRAL] < mean[LLAMA] and mean[MISTRAL] < 0), shown


def _datasets(book: Book) -> Decision:
    tables = [str(t) for t in (1, 2, 3, 4, 6, 7, 8, 9, 12)]
    counts = sorted({len(r.scores) for t in tables for r in book.table("think", t)})
    return verdict(counts == [17]), f"every row of its LongBench tables has {' or '.join(map(str, counts))}"


def _heads(book: Book) -> Decision:
    rows = [r for r in book.table("think", 7) if "ratio" in r.settings and r.method.startswith("snapkv")]
    print_ = [r.cells["kv_memory", "kv_memory"].printed for r in rows]
    token = MISTRAL_SHAPE.full_bytes(1, FP16, 32) / MIB
    whole = [(n - 32) * token / 2 * 76 / 128 + 32 * token / 2 + n * token / 2 for n in (128, 512, 1024, 2048)]
    shown = f"{token:.1f} MiB a token is 32 heads; Mistral stores 8, a quarter. The paper's floor((1 − 0.4) 128) = 76 "
    shown += f"channels would give {' / '.join(f'{v:.2f}' for v in whole)}, 76.8 give the printed {' / '.join(print_)}"
    return NOTE, shown


def _times(book: Book) -> Decision:
    first = value(book, "think", 10, "ttft", method="kivi")
    flops = 300 * 160 * 2 * PARAMETERS
    rate = flops / (first / 1000)
    per_second = 1000 / value(book, "think", 10, "tpot", method="kivi")
    stated = value(book, "think", 11, "throughput", method="kivi")
    shown = f"a prefill of 300 x 160 tokens takes {flops:.1e} FLOP; in {first} ms that is {rate / 1e15:.0f} PFLOP/s, "
    shown += (
        f"{rate / A100_FLOPS:.0f} times an A100, so times are shares of the batch. 1000 / TPOT is {per_second:.0f} "
    )
    return NOTE, shown + f"token/s, table 11 has {stated:.0f}: another run, or prompt tokens are counted"


def _whole_cache(book: Book) -> Decision:
    gaps = {}
    for model in (LLAMA, MISTRAL):
        full = _average(book, 9, model, "full", "")
        gaps[model] = _average(book, 9, model, "full+think", "ratio=0.4") - full
    return verdict(min(gaps.values()) > -0.2), ", ".join(f"{m} {v:+.2f}" for m, v in gaps.items())


def _model_of_table4(book: Book) -> Decision:
    models = sorted({r.model for r in book.table("think", 4)})
    return NOTE, f"the paper names no model; {', '.join(models)} is our reading"


def _rows_of_table2(book: Book) -> Decision:
    gaps = [
        abs(a - b)
        for size in ("512", "2048")
        for a in scores(book, "think", 2, "avg", model=LLAMA, method="snapkv", setting=f"kv_size={size}").values()
        for b in scores(book, "think", 8, "avg", model=LLAMA, method="snapkv", setting=f"kv_size={size}").values()
    ]
    return verdict(max(gaps) == 0), f"largest difference of averages {max(gaps):.2f}"


STATEMENTS = tuple(
    Statement("think", place, table, text, decide)
    for place, table, text, decide in (
        ("section 4.3", "5", "The needle score at 1024 tokens and 50 % of channels is 90.6", _needle_half),
        ("appendix G", "7", "The cache shrinks by 80 %", _eighty),
        ("section 4.2", "7", "Dropping 40 % of key channels saves 20 % of the cache", _twenty),
        ("section 4.2", "2", "2048 tokens with 40 % of channels gone beat the full cache of LLaMA-3-8B", _beats_full),
        ("tables 2 and 3", "2", "Averages rise with the cache size, which the repaired block titles need", _rising),
        ("section 4.4", "7", "At equal memory ThinK wins over a smaller plain cache", _equal_memory),
        ("section 4.3", "5", "At 40 % the needle score is never below SnapKV's", _needle),
        ("section 3.1", "1", "30 % of channels go without loss, 40 % hurts, l1 more than l2", _norms),
        ("section 4.4", "8", "Dropping value channels costs Mistral, not LLaMA-3", _values),
        ("appendix E", "9", "40 % of channels go without loss where all tokens stay", _whole_cache),
        ("section 4.1", "2", "LongBench has 17 datasets", _datasets),
        ("tables 2 and 8", "2", "Plain SnapKV rows of tables 2 and 8 have the same averages", _rows_of_table2),
        ("table 7", "7", "What the memory column counts", _heads),
        ("tables 10 and 11", "10", "What the times are per", _times),
        ("table 4", "4", "Whose scores table 4 has", _model_of_table4),
    )
)
