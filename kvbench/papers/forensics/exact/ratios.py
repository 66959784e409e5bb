"""Times and rates that follow from others: sums, throughputs, speed-ups and drops."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvbench.papers.forensics.exact.base import Exact
from kvbench.papers.spec.numbers import Number, printed
from kvbench.papers.spec.published_cells import Book

LLAMA2, LLAMA3, MISTRAL = "llama-2-7b-chat", "llama-3-8b-instruct", "mistral-7b-instruct-v0.2"


def attention(book: Book) -> Iterator[Exact]:
    """UNComp's table 3: the attention time is the sum of prefill and decoding."""
    for row in book.table("uncomp", 3):
        by = {metric: c for (_, metric), c in row.cells.items()}
        total = printed(by["prefill_time"].printed) + printed(by["decode_time"].printed)
        yield Exact(by["attention_time"], row.label, "prefill + decoding", total)


def throughput(book: Book) -> Iterator[Exact]:
    """ReFreeKV's table 10: tokens per second from seconds per 100 tokens of each prompt in the batch."""
    for row in book.table("refreekv", 10):
        by = {metric: c for (_, metric), c in row.cells.items()}
        rate = 100 * int(row.settings["batch"])
        per_second = printed(by["latency"].printed)
        yield Exact(by["throughput"], row.label, "100 x batch / latency", inverse(per_second, rate))


def speedups(book: Book) -> Iterator[Exact]:
    """VATP's table 4: throughput over that of the full cache on the same GPU."""
    rows = book.table("vatp", 4)
    full = {r.settings["gpu"]: r for r in rows if r.method == "full"}
    key = ("throughput", "throughput")
    for row in rows:
        base = full[row.settings["gpu"]]
        own = printed(row.cells[key].printed)
        over = own / printed(base.cells[key].printed) if row is not base else own / own.value
        stated = row.cells["throughput", "speedup_vs_full"]
        yield Exact(stated, row.label, "throughput / that of the full cache", over)


def prose(book: Book) -> Iterator[Exact]:
    """Numbers of the prose that divide or subtract others: UNComp, ThinK and Q-Hitter."""
    for paper, found in STATED.items():
        for row in book.table(paper, "text"):
            for (dataset, metric), cell in row.cells.items():
                for (d, m, method, part), (formula, compute) in found.items():
                    same = (dataset, metric, row.method) == (d, m, method) and part in row.setting
                    if same and (part or not row.setting.startswith("fig=7;")):
                        yield Exact(cell, row.label, formula, compute(book))


def inverse(number: Number, times: int) -> Number:
    """``times`` / ``number``."""
    return Number(times / number.value, times / number.high, times / number.low)


def _average(paper: str, table: int, model: str, first: str, second: str) -> Callable[[Book], Number]:
    def difference(book: Book) -> Number:
        one = book.number(paper, table, "avg", model=model, method=first)
        return one - book.number(paper, table, "avg", model=model, method=second)

    return difference


def _uncomp3(metric: str, slow: str, fast: str) -> Callable[[Book], Number]:
    def over(book: Book) -> Number:
        gpu = "gpu=a100-80g"
        one = book.number("uncomp", 3, "multifieldqa_en", metric, method=slow, setting=gpu)
        return one / book.number("uncomp", 3, "multifieldqa_en", metric, method=fast, setting=gpu)

    return over


def _uncomp_long(book: Book) -> Number:
    """2048 + 8096 tokens: the full cache in batches of 6, the stage in batches of 32."""
    full = book.number("uncomp", "text", "wikitext2", method="full")
    return full / book.number("uncomp", "text", "wikitext2", method="uncomp-stage")


def _uncomp10(book: Book) -> Number:
    """3712 + 384 tokens: the best batch of the stage, 12, over the largest that the full cache can run, 8."""
    full = book.number("uncomp", 10, "wikitext2", "tpot", method="full", setting="batch=8;prompt=3712")
    return full / book.number("uncomp", 10, "wikitext2", "tpot", method="uncomp-stage", setting="batch=12;prompt=3712")


def _qhitter2(other: str) -> Callable[[Book], Number]:
    def best(book: Book) -> Number:
        own = [r for r in book.table("qhitter", 2) if r.method == "qhitter"]
        found = []
        for row in own:
            gen = f"gen={row.settings['gen']}"
            base = book.number("qhitter", 2, "throughput", model=row.model, method=other, setting=gen)
            found.append(printed(row.cells["throughput", "throughput"].printed) / base)
        return max(found, key=float)

    return best


def _qhitter1(book: Book) -> Number:
    bits = "selection_bits=2"
    worst = book.number("qhitter", 1, "ptb", model="pythia-70m", method="h2o+quant", setting=bits)
    return worst - book.number("qhitter", 1, "ptb", model="pythia-70m", method="full")


def _qhitter3(book: Book) -> Number:
    own = book.number("qhitter", 3, "cnn_dailymail", method="qhitter", setting="shots=0")
    return own - book.number("qhitter", 3, "cnn_dailymail", method="h2o+quant", setting="shots=0")


def _qhitter_memory(book: Book) -> Number:
    """Five times fewer tokens on XSUM and 4 instead of 16 bits."""
    return book.number("qhitter", "text", "xsum", "sparsity_factor") * 4


# (dataset, metric, method, part of the setting) -> (formula, how): which stated number of the prose is meant
Stated = dict[tuple[str, str, str, str], tuple[str, Callable[[Book], Number]]]
STATED: dict[str, Stated] = {
    "think": {
        ("avg", "drop_vs_full", "palu", ""): (
            "table 12, full − Palu, Mistral",
            _average("think", 12, MISTRAL, "full", "palu"),
        ),
        ("avg", "drop_vs_full", "full+think", ""): (
            "table 12, full − ThinK, LLaMA-2",
            _average("think", 12, LLAMA2, "full", "full+think"),
        ),
        ("avg", "drop_vs_full", "asvd", ""): (
            "table 12, full − ASVD, LLaMA-2",
            _average("think", 12, LLAMA2, "full", "asvd"),
        ),
    },
    "uncomp": {
        ("throughput", "speedup_vs_full", "uncomp-stage", "where=abstract"): (
            "time per token, full / stage, 2048+8096",
            _uncomp_long,
        ),
        ("throughput", "speedup_vs_full", "uncomp-stage", "where=appendix E"): (
            "table 10, full at batch 8 / stage at 12, 3712+384",
            _uncomp10,
        ),
        ("prefill_time", "speedup_vs_full", "uncomp-stage", ""): (
            "table 3, full / stage, A100",
            _uncomp3("prefill_time", "full", "uncomp-stage"),
        ),
        ("overall_time", "speedup", "uncomp-stage", ""): (
            "table 3, attention time, group / stage, A100",
            _uncomp3("attention_time", "uncomp-group", "uncomp-stage"),
        ),
        ("avg", "drop_vs_full", "uncomp-group", "where=section 4.2"): (
            "table 1, full − group, LLaMA-2-7B",
            _average("uncomp", 1, LLAMA2, "full", "uncomp-group"),
        ),
        ("avg", "drop_vs_full", "uncomp-group", "where=abstract"): (
            "table 1, full − group, LLaMA-3-8B",
            _average("uncomp", 1, LLAMA3, "full", "uncomp-group"),
        ),
        ("avg", "drop", "uncomp-stage", ""): (
            "table 1, group − stage, LLaMA-2-7B",
            _average("uncomp", 1, LLAMA2, "uncomp-group", "uncomp-stage"),
        ),
    },
    "qhitter": {
        **{
            ("throughput", "speedup", "qhitter", f"versus={other}"): (
                f"table 2, largest ratio to {other}",
                _qhitter2(other),
            )
            for other in ("accelerate", "deepspeed", "flexgen", "h2o")
        },
        ("kv_memory", "reduction_vs_full", "qhitter", ""): ("sparsity 5 x 16 / 4 bits", _qhitter_memory),
        ("ptb", "ppl_increase", "h2o+quant", ""): ("table 1, 2 bits − full", _qhitter1),
        ("cnn_dailymail", "gain", "qhitter", "where=section 5.4"): ("table 3, Q-Hitter − H2O at 4 bits", _qhitter3),
    },
}
