"""Printed statements about memory, recomputed by the paper's own arithmetic and from kvbench's stored bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial

from kvbench.audit.accounting import bytes_declared, nominal_payload
from kvbench.base.errors import unknown
from kvbench.kv.model_shape import Shape
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.resolve import chain_of
from kvbench.papers.spec import row_knobs
from kvbench.papers.spec.published import load_table
from kvbench.report.table import Table
from kvbench.report.writers import compose

FP16, MIB, GIB = 2, 2**20, 2**30
"""The bytes of a number in fp16, of a MiB and of a GiB."""
# layers, query heads, kv heads, head dimension
LLAMA2_7B = Shape(32, 32, 32, 128)
MISTRAL_7B = LLAMA3_8B = Shape(32, 32, 8, 128)
LLAMA3_70B = Shape(80, 64, 8, 128)
LONG = 16384
"""The tokens of a prompt that is longer than every published budget, so that a cache of it is full to its budget."""

THINK7 = "arXiv 2407.21018, table 7; formula 0.5 N - 0.1 (N - 32) MiB of 32 heads, stored with 77 of 128 channels"
THINK = "arXiv 2407.21018, section 3.1"
SAVING = "arXiv 2407.21018, section 4.2; formula 0.5 x 0.4 (1 - 32 / N), 20 % for long caches only"
KIVI = (
    "formula of arXiv 2402.02750's layout (channels: 2407.21018): 1000 tokens, groups of 32, residual 128, D 128, T 77"
)
FLEXGEN = "arXiv 2303.06865, section 5: groups of 64, 4 bits, fp16 scale and minimum"
QHITTER = "Q-Hitter (MLSys 2024), whose factors count codes alone; D 128, fp16 scale and zero point, 8 bytes of scores"
REFREEKV = "arXiv 2502.16886, section 1; formula under query heads, stored under kv heads"


@dataclass(frozen=True)
class StatedFigure:
    """One number about memory: as the paper prints it, by the paper's formula, and as kvbench stores it.

    what: the quantity in words.
    source: where the paper prints it, with the formula.
    digits: the number of decimals that are compared.
    published: the printed number; None if the paper prints none.
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
        """The number that others are compared with: the printed one, or else the formula's, rounded."""
        if self.published is None:
            return _round_as_papers(self.formula, self.digits)
        return self.published

    def offset_of(self, value: float) -> float:
        """Return a value, rounded to ``digits`` decimals, minus the reference; 0 if both have the same digits."""
        # rounding to 10 decimals removes the error of the subtraction, and adding 0.0 makes a negative zero positive
        return round(_round_as_papers(value, self.digits) - self.reference, 10) + 0.0

    def as_json(self) -> dict[str, object]:
        """Return plain data: the fields, and how far the formula's and the stored number are off the reference."""
        offsets = {"formula_off": self.offset_of(self.formula), "stored_off": self.offset_of(self.stored)}
        return asdict(self) | offsets


Figures = Iterator[StatedFigure]
"""The figures of one paper, or of one part of it, in the order of the printed table."""


def select_figures(paper: str) -> list[StatedFigure]:
    """Compute the figures of one paper (``think``), of one of its tables (``think/7``), or of all papers (``all``).

    Raises UsageError for any other name.
    """
    # a name of FIGURES is a paper, or one part of it behind a slash
    papers = {name.partition("/")[0] for name in FIGURES}
    names = sorted(papers | FIGURES.keys())
    names.append("all")
    if paper not in names:
        raise unknown("paper", paper, names, "As in paper=think/7 or paper=all.")
    figures: list[StatedFigure] = []
    for name, stated_figures in FIGURES.items():
        if paper in ("all", name, name.partition("/")[0]):
            figures.extend(stated_figures())
    return figures


def render(figures: Sequence[StatedFigure]) -> str:
    """Return the figures as text: one table for each paper, with its sources."""
    parts = []
    for paper in dict.fromkeys(figure.paper for figure in figures):
        parts.append(_format_paper(paper, [figure for figure in figures if figure.paper == paper]))
    parts.append(
        "formula: the paper's own arithmetic, compared with what it prints. stored here: what kvbench's\n"
        "caches hold, by the formula that every cache is audited with. ✓: equal to the digits printed."
    )
    return "\n".join(parts)


def _format_paper(paper: str, figures: Sequence[StatedFigure]) -> str:
    sources = list(dict.fromkeys(figure.source for figure in figures))
    rows = []
    for stated in figures:
        # without a printed number the formula itself is the reference
        formula_mark = "" if stated.published is None else _format_mark(stated, stated.formula)
        rows.append(
            (
                stated.what,
                stated.unit,
                _format_number(stated.published, stated.digits),
                _format_number(stated.formula, stated.digits, stated.published),
                formula_mark,
                _format_number(stated.stored, stated.digits, stated.reference),
                _format_mark(stated, stated.stored),
                str(1 + sources.index(stated.source)),
            )
        )
    heads = ("figure", "unit", "published", "formula", "", "stored here", "", "source")
    notes = [f"{number}: {source}." for number, source in enumerate(sources, start=1)]
    return f"{paper}\n\n{compose([Table(heads, tuple(rows))], notes, 'text')}"


def _compute_think7() -> Figures:
    # the cache sizes in ThinK's table 7, section "equal memory": 32 expanded heads, ratio 0.4, fp16
    think = partial(StatedFigure, "think", source=THINK7, unit="MiB", digits=1)
    # each row of the table has one cell with its size; its other cells are scores
    sizes = {(c.method, c.setting): c.value for c in load_table("think", "7") if c.dataset == "kv_memory"}
    for (method, setting), printed in sizes.items():
        # H2O's rows have the same sizes
        if not method.startswith("snapkv"):
            continue
        knobs = row_knobs.parse_setting(setting)
        size = int(knobs["kv_size"])
        chain = chain_of({"method": method, "kv_size": size, "per": "query_head"})
        formula = nominal_payload(chain, MISTRAL_7B, LONG, FP16)
        # None stands for budgets that the prompt's text decides, and kv_size fixes this one
        assert formula is not None
        more = " ratio=0.4" if "ratio" in knobs else f", for {knobs['matched_to']}"
        stored = _count_payload_bytes(chain, MISTRAL_7B) / MIB
        yield think(f"{method} kv_size={size}{more}", published=printed, formula=formula / MIB, stored=stored)


def _compute_think_text() -> Figures:
    # the sizes of the full cache in ThinK's text, and the share of bytes that its pruned keys save
    think = partial(StatedFigure, "think", source=THINK)
    token = LLAMA2_7B.full_bytes(1, FP16)
    stored = _count_payload_bytes(Chain(), LLAMA2_7B, 1) / MIB
    yield think("full, LLaMA-2-7B, one token", unit="MiB", digits=2, published=None, formula=token / MIB, stored=stored)
    formula = 13 * 2048 * token / GIB
    stored = 13 * _count_payload_bytes(Chain(), LLAMA2_7B, 2048) / GIB
    yield think(
        "full, LLaMA-2-7B, 2048 tokens x 13", unit="GiB", digits=0, published=13, formula=formula, stored=stored
    )
    for size in (128, 512, 1024, 2048):
        pruned = _count_payload_bytes(chain_of({"method": "snapkv+think", "kv_size": size}), LLAMA2_7B)
        plain = _count_payload_bytes(chain_of({"method": "snapkv", "kv_size": size}), LLAMA2_7B)
        # half of the cache are keys: 40 % of their channels go, except for the 32 most recent tokens
        formula = 100 * (0.5 * 0.4 * (1 - 32 / size))
        what, stored = f"saved by ratio=0.4 at kv_size={size}", 100 * (1 - pruned / plain)
        yield think(what, source=SAVING, unit="%", digits=0, published=20, formula=formula, stored=stored)


def _compute_kivi() -> Figures:
    # the bytes of one head for 1000 tokens: groups of 32, residual 128, dimension 128; KIVI packs 896 of these keys
    # and 872 of these values
    kivi = partial(StatedFigure, "kivi", source=KIVI, unit="B", digits=0, published=None)
    tokens, group, residual, dim = 1000, 32, 128, 128
    # keys are packed in whole blocks of the residual's length, values one by one as they leave it
    packed_keys, packed_values = residual * (tokens // residual), tokens - residual
    for method, bits, channels in (("kivi", 2, dim), ("kivi", 4, dim), ("think+kivi", 2, 77)):
        name = f"{method} {bits} bits"
        knobs: dict[str, object] = {"method": method, "bits": bits}
        if channels < dim:
            # 77 of 128 channels stay
            knobs["ratio"] = 0.4
            name += " ratio=0.4"
        # a head has one block for each segment, and these methods have one segment
        (block,) = chain_of(knobs).layout(tokens, dim, FP16)
        # bytes of a packed number: its code, and its part of the group's scale and minimum, which are in fp16
        code_bytes = bits / 8 + 2 * FP16 / group
        # packed numbers and the residual of exact numbers in fp16, which keeps all channels
        key_bytes = channels * packed_keys * code_bytes + FP16 * dim * (tokens - packed_keys)
        value_bytes = dim * packed_values * code_bytes + FP16 * dim * residual
        yield kivi(f"{name}, keys of a head", formula=key_bytes, stored=block.key_bytes)
        # pruning changes only keys, so the values of ``think+kivi`` are those of ``kivi``
        if channels == dim:
            yield kivi(f"{name}, values of a head", formula=value_bytes, stored=block.value_bytes)


def _compute_flexgen() -> Figures:
    flexgen = partial(StatedFigure, "flexgen", source=FLEXGEN, published=None)
    # one token with a key of 64 numbers, which make one group
    (block,) = chain_of({"method": "flexgen"}).layout(1, 64, FP16)
    # 64 codes of 4 bits, with scale and minimum
    yield flexgen("64 values", unit="B", digits=0, formula=64 * 4 / 8 + 2 * FP16, stored=block.key_bytes)
    # 64 values of 2 bytes over the 36 bytes of the figure above
    yield flexgen("smaller than fp16", unit="x", digits=2, formula=128 / 36, stored=128 / block.key_bytes)


def _compute_qhitter() -> Figures:
    # how many times smaller than fp16: a head of 128 dimensions has an fp16 scale and zero point, and 8 bytes of scores
    # for each token
    qhitter = partial(StatedFigure, "qhitter", source=QHITTER, unit="x", digits=2, published=4)
    dim, bits, score_bytes = 128, 4, 8
    # keys and values of one token in one head: in fp16, and as codes with scale and zero point
    dense = 2 * dim * FP16
    payload = 2 * (dim * bits / 8 + 2 * FP16)
    (block,) = chain_of({"method": "qhitter", "bits": bits}).layout(1, dim, FP16)
    stored = block.key_bytes + block.value_bytes
    yield qhitter("4 bits, payload, smaller than fp16", formula=dense / payload, stored=dense / stored)
    formula = dense / (payload + score_bytes)
    yield qhitter("4 bits, with running scores", formula=formula, stored=dense / (stored + block.slot_overhead))


def _compute_uncomp() -> Figures:
    # cache sizes in per cent of the full cache: 100 x tokens kept / tokens of the context; (tokens kept, tokens of the
    # context, printed per cent, its place in the paper)
    printed = ((384, 4096, 9.38, "table 1"), (384, 8096, 4.74, "table 1"), (64, 4096, 1.56, "section 4.2"))
    for size, context, value, where in printed:
        chain = chain_of({"method": "snapkv", "kv_size": size})
        yield StatedFigure(
            paper="uncomp",
            what=f"{size} of {context} tokens",
            source=f"arXiv 2410.03090, {where}",
            unit="%",
            digits=2,
            published=value,
            formula=100 * size / context,
            stored=100 * _count_payload_bytes(chain, LLAMA2_7B, context) / LLAMA2_7B.full_bytes(context, FP16),
        )


def _compute_refreekv() -> Figures:
    # the introduction counts all query heads, but under GQA fewer heads are stored
    refreekv = partial(StatedFigure, "refreekv", source=REFREEKV, unit="GiB", digits=1)
    for name, shape, tokens, value in (("8B", LLAMA3_8B, 2048, 1), ("70B", LLAMA3_70B, 20000, 50)):
        formula = shape.full_bytes(tokens, FP16, shape.query_heads) / GIB
        stored = _count_payload_bytes(Chain(), shape, tokens) / GIB
        yield refreekv(f"full, LLaMA-3-{name}, {tokens} tokens", published=value, formula=formula, stored=stored)


FIGURES: dict[str, Callable[[], Figures]] = {
    "think/7": _compute_think7,
    "think/text": _compute_think_text,
    "kivi": _compute_kivi,
    "flexgen": _compute_flexgen,
    "qhitter": _compute_qhitter,
    "uncomp": _compute_uncomp,
    "refreekv": _compute_refreekv,
}
"""The function that computes the figures of a paper, or of one part of it."""


def _count_payload_bytes(chain: Chain, shape: Shape, tokens: int = LONG) -> int:
    declared = bytes_declared(chain, shape, tokens, FP16)
    # None stands for budgets that the prompt's text decides
    assert declared is not None
    return declared.payload


def _round_as_papers(value: float, digits: int) -> float:
    # the binary fraction of a tie may lie just below it, so add a little before rounding
    return float(f"{value + 1e-9:.{digits}f}")


def _format_mark(figure: StatedFigure, value: float) -> str:
    offset = figure.offset_of(value)
    if offset == 0:
        return "✓"
    return f"{offset:+.{figure.digits}f}".replace("-", "−")


def _format_number(value: float | None, digits: int, reference: float | None = None) -> str:
    """Format a number; None is a dash. A ``reference`` adds one decimal if rounding changes the number."""
    if value is None:
        return "—"
    if reference is not None and _round_as_papers(value, digits) != value:
        digits += 1
    return f"{value:,.{digits}f}".replace(",", " ")
