"""Printed statements about memory, recomputed by the paper's own arithmetic and from what is stored here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvbench.audit.accounting import bytes_declared, nominal_payload
from kvbench.base.errors import unknown
from kvbench.kv.model_shape import Shape
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.resolve import chain_of
from kvbench.papers.spec.published import load_table
from kvbench.report.table import Table
from kvbench.report.writers import compose

FP16, MIB, GIB = 2, 2**20, 2**30
LLAMA2_7B = Shape(32, 32, 32, 128)
MISTRAL_7B = LLAMA3_8B = Shape(32, 32, 8, 128)
LLAMA3_70B = Shape(80, 64, 8, 128)
HEAD = Shape(1, 1, 1, 128)
LONG = 16384

Figures = Iterator[tuple[str, str, str, int, float | None, float, float]]
"""Names of figures with their source, unit, decimals, printed value, the formula's value and the stored one."""


@dataclass(frozen=True)
class StatedFigure:
    """One number as printed (None: not printed), by the paper's formula, and as stored here.

    ``digits`` are the decimals that are compared.
    """

    paper: str
    what: str
    source: str
    unit: str
    digits: int
    published: float | None
    formula: float
    stored: float

    @property
    def reference(self) -> float:
        """Return the value to compare with: the printed one, or the formula's to as many digits."""
        return _rounded(self.formula, self.digits) if self.published is None else self.published

    def off(self, value: float) -> float:
        """Return the distance of a value to the reference, as printed: 0 where it rounds to the same digits."""
        # exact ties of decimal fractions round up, as papers do, where binary ones may fall below
        return round(_rounded(value, self.digits) - self.reference, 10) + 0.0

    def as_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {**asdict(self), "formula_off": self.off(self.formula), "stored_off": self.off(self.stored)}


def of(paper: str) -> list[StatedFigure]:
    """Return the figures of one paper, of one of its tables (``think/7``), or of all."""
    names = [*sorted({*FIGURES, *(name.partition("/")[0] for name in FIGURES)}), "all"]
    if paper not in names:
        raise unknown("paper", paper, names, "As in paper=think/7 or paper=all.")
    by_name = {name: figures for name, figures in FIGURES.items() if paper in ("all", name, name.partition("/")[0])}
    return [StatedFigure(name.partition("/")[0], *f) for name, figures in by_name.items() for f in figures()]


def render(found: Sequence[StatedFigure]) -> str:
    """Format one table for each paper, with its sources."""
    parts = []
    for paper in dict.fromkeys(f.paper for f in found):
        paper_figures = [f for f in found if f.paper == paper]
        sources = list(dict.fromkeys(f.source for f in paper_figures))
        head = ("figure", "unit", "published", "formula", "", "stored here", "", "source")
        rows = tuple(
            (
                f.what,
                f.unit,
                _number(f.published, f.digits),
                _number(f.formula, f.digits, f.published),
                _mark(f, f.formula) if f.published is not None else "",
                _number(f.stored, f.digits, f.reference),
                _mark(f, f.stored),
                str(1 + sources.index(f.source)),
            )
            for f in paper_figures
        )
        notes = [f"{i}: {s}." for i, s in enumerate(sources, start=1)]
        parts.append(f"{paper}\n\n{compose([Table(head, rows)], notes, 'text')}")
    legend = (
        "formula: the paper's own arithmetic, compared with what it prints. stored here: what kvbench's\n"
        "caches hold, by the formula that every cache is audited with. ✓: equal to the digits printed."
    )
    return "\n".join([*parts, legend])


THINK7 = "arXiv 2407.21018, table 7; formula 0.5 N - 0.1 (N - 32) MiB of 32 heads, stored with 77 of 128 channels"
THINK = "arXiv 2407.21018, section 3.1"
SAVING = "arXiv 2407.21018, section 4.2; formula 0.5 x 0.4 (1 - 32 / N), 20 % for long caches only"
KIVI = (
    "formula of arXiv 2402.02750's layout (channels: 2407.21018): 1000 tokens, groups of 32, residual 128, D 128, T 77"
)
FLEXGEN = "arXiv 2303.06865, section 5: groups of 64, 4 bits, fp16 scale and minimum"
QHITTER = "Q-Hitter (MLSys 2024), whose factors count codes alone; D 128, fp16 scale and zero point, 8 bytes of scores"
REFREEKV = "arXiv 2502.16886, section 1; formula under query heads, stored under kv heads"


def _think7() -> Figures:
    """Yield table 7, section "equal memory": 32 expanded heads, ratio 0.4, fp16."""
    printed = {(c.method, c.setting): c.value for c in load_table("think", "7") if c.dataset == "kv_memory"}
    for (method, setting), value in printed.items():
        if not method.startswith("snapkv"):
            continue  # H2O's rows have the same sizes
        knobs: dict[str, Any] = dict(part.split("=") for part in setting.split(";"))
        size = int(knobs["kv_size"])
        chain = chain_of({"method": method, "kv_size": size, "per": "query_head"})
        formula = nominal_payload(chain, MISTRAL_7B, LONG, FP16)
        assert formula is not None
        what = f"{method} kv_size={size}" + (" ratio=0.4" if "ratio" in knobs else f", for {knobs['matched_to']}")
        yield what, THINK7, "MiB", 1, value, formula / MIB, _payload(chain, MISTRAL_7B) / MIB


def _think_text() -> Figures:
    """Yield ThinK's sizes of the full cache, and the bytes that pruned keys save."""
    token, sequence = (_payload(Chain(), LLAMA2_7B, n) for n in (1, 2048))
    token_bytes = LLAMA2_7B.full_bytes(1, FP16)
    yield "full, LLaMA-2-7B, one token", THINK, "MiB", 2, None, token_bytes / MIB, token / MIB
    yield "full, LLaMA-2-7B, 2048 tokens x 13", THINK, "GiB", 0, 13, 13 * 2048 * token_bytes / GIB, 13 * sequence / GIB
    for size in (128, 512, 1024, 2048):
        pruned, plain = (
            _payload(chain_of({"method": method, "kv_size": size}), LLAMA2_7B) for method in ("snapkv+think", "snapkv")
        )
        formula = 0.5 * 0.4 * (1 - 32 / size)
        what = f"saved by ratio=0.4 at kv_size={size}"
        yield what, SAVING, "%", 0, 20, 100 * formula, 100 * (1 - pruned / plain)


def _kivi() -> Figures:
    """Yield bytes per head at n=1000, groups of 32, residual 128, D=128: 896 keys and 872 values are packed."""
    n, group, residual, d = 1000, 32, 128, 128
    keys, values = residual * (n // residual), n - residual
    for method, bits, t in (("kivi", 2, d), ("kivi", 4, d), ("think+kivi", 2, 77)):
        ratio = {"ratio": 0.4} if "think" in method else {}
        (block,) = chain_of({"method": method, "bits": bits, **ratio}).layout(n, d, FP16)
        # packed codes, with 4 bytes of scale and minimum for each group, and an fp16 residual of 2 bytes a number
        k = t * keys * (bits / 8 + 4 / group) + 2 * d * (n - keys)
        v = values * (d * bits / 8 + 4 * d / group) + 2 * d * residual
        name = f"{method} {bits} bits" + (" ratio=0.4" if ratio else "")
        yield f"{name}, keys of a head", KIVI, "B", 0, None, k, block.key_bytes
        if not ratio:
            yield f"{name}, values of a head", KIVI, "B", 0, None, v, block.value_bytes


def _flexgen() -> Figures:
    """Yield the bytes of a group of 64 values, and their ratio to fp16."""
    (block,) = chain_of({"method": "flexgen"}).layout(1, 64, FP16)
    yield "64 values", FLEXGEN, "B", 0, None, 64 * 4 / 8 + 2 * FP16, block.key_bytes
    yield "smaller than fp16", FLEXGEN, "x", 2, None, 128 / 36, 128 / block.key_bytes


def _qhitter() -> Figures:
    """Yield ratios to fp16 of D=128 at 4 bits with fp16 scale and zero point a head, and 8 bytes of scores."""
    d, dense = 128, 2 * 128 * FP16
    payload, scores = 2 * (d * 4 / 8 + 2 * FP16), 8
    (block,) = chain_of({"method": "qhitter", "bits": 4}).layout(1, d, FP16)
    stored = block.key_bytes + block.value_bytes
    running = stored + block.slot_overhead
    yield "4 bits, payload, smaller than fp16", QHITTER, "x", 2, 4, dense / payload, dense / stored
    yield "4 bits, with running scores", QHITTER, "x", 2, 4, dense / (payload + scores), dense / running


def _uncomp() -> Figures:
    """Yield fractions of the prompt: sizes over contexts of 4096 and 8096 tokens."""
    printed = ((384, 4096, 9.38, "table 1"), (384, 8096, 4.74, "table 1"), (64, 4096, 1.56, "section 4.2"))
    for size, context, value, where in printed:
        chain = chain_of({"method": "snapkv", "kv_size": size})
        share = 100 * _payload(chain, LLAMA2_7B, context) / LLAMA2_7B.full_bytes(context, FP16)
        source = f"arXiv 2410.03090, {where}"
        yield f"{size} of {context} tokens", source, "%", 2, value, 100 * size / context, share


def _refreekv() -> Figures:
    """Yield the introduction's sizes, which are those of query heads; GQA stores a fraction of them."""
    for name, shape, tokens, value in (("8B", LLAMA3_8B, 2048, 1), ("70B", LLAMA3_70B, 20000, 50)):
        expanded = shape.full_bytes(tokens, FP16, shape.query_heads) / GIB
        stored = _payload(Chain(), shape, tokens) / GIB
        yield f"full, LLaMA-3-{name}, {tokens} tokens", REFREEKV, "GiB", 1, value, expanded, stored


FIGURES: dict[str, Callable[[], Figures]] = {
    "think/7": _think7,
    "think/text": _think_text,
    "kivi": _kivi,
    "flexgen": _flexgen,
    "qhitter": _qhitter,
    "uncomp": _uncomp,
    "refreekv": _refreekv,
}


def _payload(chain: Chain, shape: Shape, n: int = LONG) -> int:
    """Return the payload in bytes of n tokens in fp16."""
    declared = bytes_declared(chain, shape, n, FP16)
    assert declared is not None
    return declared.payload


def _rounded(value: float, digits: int) -> float:
    """Round as papers do: exact ties of decimals go up."""
    return float(f"{value + 1e-9:.{digits}f}")  # a binary fraction may lie just below its decimal tie


def _mark(f: StatedFigure, value: float) -> str:
    """Return ✓ or the difference to the reference."""
    off = f.off(value)
    return "✓" if off == 0 else f"{off:+.{f.digits}f}".replace("-", "−")


def _number(value: float | None, digits: int, against: float | None = None) -> str:
    """Format a number, with one decimal more where the printed ones hide a difference to ``against``."""
    if value is None:
        return "—"
    fine = digits if against is None or _rounded(value, digits) == value else digits + 1
    return f"{value:,.{fine}f}".replace(",", " ")
