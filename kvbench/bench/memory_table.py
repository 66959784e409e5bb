"""The table of ``bench memory``: bytes of methods at prompt sizes, measured beside their formulas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch

from kvbench.audit.accounting import HALF, bytes_declared
from kvbench.base.errors import KvbenchError, UsageError
from kvbench.base.formatting import UNITS, format_number, format_significant, format_size
from kvbench.base.visible import say
from kvbench.bench.layers import MeasuredLayers, estimate_working_bytes, measure_bytes
from kvbench.engine.memory import free_bytes
from kvbench.kv.model_shape import Shape
from kvbench.methods.core import registry
from kvbench.methods.core.base import Modifier
from kvbench.methods.core.resolve import ChainConfig
from kvbench.report import pages
from kvbench.report.table import Table
from kvbench.report.writers import compose

CHAINS = ("snapkv+think", "snapkv+kivi", "think+kivi", "snapkv+think+kivi")
"""The combinations that the table has if no method is named."""
# the order of HeldBytes.parts(): the first three make up the payload, the others the overhead
PARTS = ("exact", "codes", "scales", "positions", "ids", "state")
PAYLOAD_PARTS = 3
HEAD = (
    "method",
    "pay-\nload",
    "exact",
    "codes",
    "scales",
    "over-\nhead",
    "posi-\ntions",
    "ids",
    "state",
    "total",
    "% of\nfull at\n16 bits",
    "as the\nformula",
)
OPTIONAL = ("exact", "codes", "scales", "posi-\ntions", "ids", "state")
"""The columns of PARTS. A column without a number in any row is left out."""
RANDOM_TOKENS = (
    "in place: these layers hold random numbers, so a method that chooses by scores frees other pages of a prompt. "
    "kvbench run measures that on prompts (--notes, --json)."
)
LAYERWISE = "a layer would need about {need}"
"""The reason why no layer was built: there is not enough free memory."""


@dataclass(frozen=True)
class ByteSums:
    """The tokens and bytes of one chain at one prompt size, over all layers.

    tokens: the tokens per stored head, on average.
    payload: the bytes of keys and values, packed or not.
    overhead: the bytes of all that is stored beside keys and values.
    """

    tokens: float
    payload: int
    overhead: int

    @property
    def total(self) -> int:
        """The bytes of payload and overhead."""
        return self.payload + self.overhead


@dataclass(frozen=True)
class Account:
    """The bytes of one chain at one prompt size.

    method: the chain's label.
    n: the number of the prompt's tokens.
    full: the bytes of the full cache.
    measured: the layers that were built, if any were.
    formula: the sums without a cache; None if only data decide.
    percent: the bytes at 16 bits in per cent of the full cache's.
    even: whether the formula assumes that tokens are spread evenly over heads and layers.
    why: the reason why ``measured`` or ``formula`` is missing.
    """

    method: str
    n: int
    full: int
    measured: MeasuredLayers | None
    formula: ByteSums | None
    percent: float | None
    even: bool = False
    why: str = ""

    @property
    def sums(self) -> ByteSums | None:
        """The measured sums if a cache was built, else those by formula, which may be None."""
        if self.measured is None:
            return self.formula
        cache_bytes = self.measured.held
        return ByteSums(tokens=self.measured.tokens, payload=cache_bytes.payload, overhead=cache_bytes.overhead)

    def as_json(self) -> dict[str, object]:
        """Return the account as plain data."""
        record: dict[str, object] = {"method": self.method, "n": self.n, "full_bytes": self.full}
        sums = self.sums
        if sums is None:
            record["total"] = None
        else:
            record |= {"tokens": sums.tokens, "payload": sums.payload, "overhead": sums.overhead}
            record["total"] = sums.total
        record["percent_of_full"] = self.percent
        built = self.measured
        if built is not None:
            record |= {
                "measured": True,
                "layers_built": built.made,
                "parts": dict(zip(PARTS, built.held.parts(), strict=True)),
                # the formula counts the tokens kept by the built layers, which may differ from the chain's promise
                "formula": {"payload": built.payload_formula, "overhead": built.overhead_formula},
                "agrees": built.agrees,
                "pages_freed": asdict(built.pages_freed),
            }
        else:
            by_formula = None
            if self.formula is not None:
                by_formula = {"payload": self.formula.payload, "overhead": self.formula.overhead}
            record |= {"measured": False, "layers_built": 0, "parts": {}, "formula": by_formula, "agrees": None}
            # which pages are free follows from the tokens kept, which no formula knows
            record["pages_freed"] = None
        return record | {"even": self.even, "why": self.why}


def list_default_methods() -> list[str]:
    """Return the methods that the table has if none is named: every registered method, and the CHAINS.

    A modifier stands behind the first method that it decorates, as in h2o+vatp. Methods that need a calibration are
    left out, since a model's weights decide their bytes.
    """
    names = ["full"]
    for method in registry.available():
        if method == "full":
            continue
        try:
            stage = registry.make_stage(method, registry.defaults(method))
        except UsageError as error:
            # a user's method may have impossible defaults; the others still count
            say(str(error))
            continue
        if stage.unbound:
            continue
        if isinstance(stage, Modifier):
            # a modifier has no effect alone
            names.append(f"{stage.decorates[0]}+{method}")
        else:
            names.append(method)
    names.extend(CHAINS)
    return names


def make_account(entry: ChainConfig, shape: Shape, n: int, dtype: torch.dtype, build: bool = True) -> Account:
    """Return the account of one chain at a prompt of n tokens. Build a cache if ``build`` and memory allow it."""
    # None means that the prompt's text decides how many tokens stay
    declared = bytes_declared(entry.chain, shape, n, dtype.itemsize)
    formula, even = None, False
    if declared is not None:
        formula = ByteSums(tokens=declared.tokens, payload=declared.payload, overhead=declared.overhead)
        even = declared.even
    measured, why = None, ""
    if build:
        measured, why = _measure_if_possible(entry, shape, n, dtype)
    if formula is None and measured is None:
        # without ``build`` there is no other reason, and nothing stands behind the semicolon
        why = f"only a prompt decides what is kept; {why}".rstrip("; ")
    # percentages are at 16 bits, as in papers, whatever number type was asked for
    total16 = None
    if measured is not None:
        total16 = measured.total16
    else:
        declared16 = bytes_declared(entry.chain, shape, n, HALF)
        if declared16 is not None:
            total16 = declared16.total
    percent = None
    if total16 is not None:
        percent = 100 * total16 / shape.full_bytes(n, HALF)
    return Account(
        method=entry.label,
        n=n,
        full=shape.full_bytes(n, dtype.itemsize),
        measured=measured,
        formula=formula,
        percent=percent,
        even=even,
        why=why,
    )


def _measure_if_possible(
    entry: ChainConfig, shape: Shape, n: int, dtype: torch.dtype
) -> tuple[MeasuredLayers | None, str]:
    """Return (the layers of one chain, ''), or (None, why they were not built)."""
    need = estimate_working_bytes(entry.chain, shape, n, dtype.itemsize)
    if need > measure_room():
        return None, LAYERWISE.format(need=format_size(need))
    try:
        return measure_bytes(entry.chain, shape, n, dtype), ""
    except KvbenchError as error:
        return None, str(error)
    except Exception as error:
        # kvbench's own errors must not hide in a row; a user's method costs only its row
        if not entry.chain.foreign:
            raise
        return None, f"failed: {type(error).__name__}: {error}"


def measure_room() -> float:
    """Return the bytes that a layer may take: half of the free memory."""
    return free_bytes(torch.device("cpu")) / 2


def render(rows: Sequence[Account], notes: Sequence[str] = ()) -> str:
    """Return as text the tables of bytes and of pages freed, and the notes below them.

    rows: the accounts of methods at one prompt size, on one model.
    notes: further notes.

    Columns that are all empty are left out, and so are methods that free no page.
    """
    # all rows have one prompt size and one model, so the first row's full cache is that of all
    full_bytes = rows[0].full
    unit = _choose_unit(full_bytes)
    size = UNITS[unit]
    full = f"{format_significant(full_bytes / size, 4)} {unit}"
    title = f"prompt of {rows[0].n} tokens; full cache {full}; all numbers in {unit}\n\n"
    tables = [_build_bytes_table(rows, size)]
    all_notes = list(_list_notes(rows))
    freed = []
    for row in rows:
        # heads apart and compacted is the largest of the shares: if it is 0, all are
        if row.measured is not None and row.measured.pages_freed.apart_compacted:
            freed.append((row.method, row.measured.pages_freed))
    if freed:
        tables.append(pages.build_table(freed))
        all_notes += pages.NOTES
        all_notes.append(RANDOM_TOKENS)
    all_notes.extend(notes)
    return title + compose(tables, all_notes, "text")


def _build_bytes_table(rows: Sequence[Account], size: int) -> Table:
    """Return the table of bytes in units of ``size`` bytes, without the OPTIONAL columns that have no number."""
    lines = [_write_cells(account, size) for account in rows]
    heads = []
    for head in HEAD:
        # a cell without bytes is a dash or 0
        has_numbers = any(line[head].strip("—0") for line in lines)
        if head not in OPTIONAL or has_numbers:
            heads.append(head)
    body = []
    for line in lines:
        body.append(tuple(line[head] for head in heads))
    return Table(tuple(heads), tuple(body))


def _choose_unit(byte_count: int) -> str:
    """Return the smallest unit in which ``byte_count`` bytes are below 10,000; TiB for more."""
    for unit, size in UNITS.items():
        if byte_count < 1e4 * size:
            return unit
    return "TiB"


def _write_cells(account: Account, size: int) -> dict[str, str]:
    """Return one row's texts by their column's head, in units of ``size`` bytes."""
    # one option a line keeps the table within the page
    name = account.method.replace(" ", "\n")
    sums = account.sums
    if sums is None:
        return dict.fromkeys(HEAD, "—") | {"method": name}
    built = account.measured
    if built is None:
        parts = ["—"] * len(PARTS)
        verdict = "≈ formula" if account.even else "formula"
    else:
        parts = [format_significant(part / size) for part in built.held.parts()]
        # print a difference with its sign; a minus is U+2212
        verdict = "✓" if built.agrees else f"{built.off:+d} B".replace("-", "−")
    # the values stand in the order of HEAD
    cells = [name, format_significant(sums.payload / size)]
    cells += parts[:PAYLOAD_PARTS]
    cells.append(format_significant(sums.overhead / size))
    cells += parts[PAYLOAD_PARTS:]
    cells += [format_significant(sums.total / size), format_number(account.percent), verdict]
    return dict(zip(HEAD, cells, strict=True))


def _list_notes(rows: Sequence[Account]) -> Iterator[str]:
    """Yield the meaning of the columns, and each reason for missing cells with its methods."""
    built = [row for row in rows if row.measured is not None]
    if built:
        yield (
            "Payload: exact keys and values, packed codes, their scales and minima. Overhead: positions, ids of kept "
            "channels, state for decoding. Storages of real layers of random numbers; ✓: payload and overhead equal "
            "the formulas for the tokens kept, to the byte."
        )
        yield "One layer is built for all that promise the same number of tokens, and counts for each of them."
    if len(built) < len(rows):
        yield "formula: not built, bytes by formula alone (≈: tokens taken as spread evenly over heads and layers)."
    methods_by_reason: dict[str, list[str]] = {}
    for row in rows:
        if row.why:
            # a label is the method's name, followed by its options
            method, _, _ = row.method.partition(" ")
            methods_by_reason.setdefault(row.why, []).append(method)
    for why, methods in methods_by_reason.items():
        yield f"{', '.join(methods)}: {why}."
