"""The table of ``bench memory``: bytes of methods at prompt sizes, measured beside their formulas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvbench.audit.accounting import HALF, bytes_declared
from kvbench.base.errors import KvbenchError, UsageError, say
from kvbench.bench.layers import MeasuredLayers, measure, working_bytes
from kvbench.engine.memory import free_bytes
from kvbench.kv.model_shape import Shape
from kvbench.methods.core import registry
from kvbench.methods.core.base import Modifier
from kvbench.methods.core.resolve import ChainConfig
from kvbench.report.table import Table
from kvbench.report.writers import compose

CHAINS = ("snapkv+think", "snapkv+kivi", "think+kivi", "snapkv+think+kivi")
PARTS = ("exact", "codes", "scales", "positions", "ids", "state")
OPTIONAL = ("exact", "codes", "scales", "posi-\ntions", "ids", "state")
HEAD = (
    *("method", "pay-\nload", *OPTIONAL[:3], "over-\nhead", *OPTIONAL[3:]),
    *("total", "% of\nfull at\n16 bits", "as the\nformula"),
)
LAYERWISE = "a layer would need about {need:.1f} GiB"


@dataclass(frozen=True)
class Account:
    """The bytes of one chain at one prompt size.

    full: the bytes of the full cache.
    measured: the layers that were built, if any were.
    formula: (tokens per stored head, payload, overhead) without a cache; None if only data decide.
    percent: the bytes at 16 bits in per cent of the full cache's.
    even: whether the formula takes tokens as spread evenly over heads and layers.
    why: why ``measured`` or ``formula`` is missing.
    """

    method: str
    n: int
    full: int
    measured: MeasuredLayers | None
    formula: tuple[float, int, int] | None
    percent: float | None
    even: bool = False
    why: str = ""

    @property
    def sums(self) -> tuple[float, int, int] | None:
        """Return (tokens per stored head, payload, overhead), measured if a cache was built, else by formula."""
        if self.measured is None:
            return self.formula
        return self.measured.tokens, self.measured.held.payload, self.measured.held.overhead

    def as_json(self) -> dict[str, Any]:
        """Return the account as plain data."""
        built = self.measured
        by_formula = (built.payload_formula, built.overhead_formula) if built else self.formula and self.formula[1:]
        return {
            "method": self.method,
            "n": self.n,
            "full_bytes": self.full,
            **(dict(zip(("tokens", "payload", "overhead"), self.sums, strict=True)) if self.sums else {}),
            "total": sum(self.sums[1:]) if self.sums else None,
            "percent_of_full": self.percent,
            "measured": built is not None,
            "layers_built": built.made if built else 0,
            "parts": dict(zip(PARTS, built.held.parts(), strict=True)) if built else {},
            "formula": dict(zip(("payload", "overhead"), by_formula, strict=True)) if by_formula else None,
            "agrees": built.agrees if built else None,
            "even": self.even,
            "why": self.why,
        }


def default_methods() -> list[str]:
    """Return every registered method, alone or behind the first method that it decorates, and the CHAINS.

    Methods that need a calibration are left out, since a model's weights decide their bytes.
    """
    names = []
    for method in registry.available():
        try:
            stage = registry.make_stage(method, registry.defaults(method)) if method != "full" else None
        except UsageError as error:
            say(str(error))
            continue
        if stage is None or not stage.unbound:
            names.append(f"{stage.decorates[0]}+{method}" if isinstance(stage, Modifier) else method)
    return [*sorted(names, key=lambda m: m != "full"), *CHAINS]


def account(c: ChainConfig, shape: Shape, n: int, dtype: torch.dtype, build: bool = True) -> Account:
    """Return the account of one chain at a prompt of n tokens. A cache is built if ``build`` and memory allow it."""
    declared = bytes_declared(c.chain, shape, n, dtype.itemsize)
    formula = None if declared is None else (declared.tokens, declared.payload, declared.overhead)
    full = shape.full_bytes(n, dtype.itemsize)
    need = working_bytes(c.chain, shape, n, dtype.itemsize)
    measured, why = None, ""
    if build and need > room():
        why = LAYERWISE.format(need=need / 2**30)
    elif build:
        try:
            measured = measure(c.chain, shape, n, dtype)
        except Exception as error:
            if not (c.chain.foreign or isinstance(error, KvbenchError)):
                raise
            why = str(error) if isinstance(error, KvbenchError) else f"failed: {type(error).__name__}: {error}"
    if formula is None and measured is None:
        why = f"only a prompt decides what is kept; {why}".rstrip("; ")
    declared16 = bytes_declared(c.chain, shape, n, HALF)
    total16 = None if declared16 is None else declared16.total
    if measured is not None:
        total16 = measured.total16
    percent = None if total16 is None else 100 * total16 / shape.full_bytes(n, HALF)
    return Account(
        method=c.label,
        n=n,
        full=full,
        measured=measured,
        formula=formula,
        percent=percent,
        even=declared is not None and declared.even,
        why=why,
    )


def room() -> float:
    """Return the bytes that a layer may take: half of the free memory."""
    return free_bytes(torch.device("cpu")) / 2


def render(rows: Sequence[Account], notes: Sequence[str] = ()) -> str:
    """Return the table of rows with the same n as text, without columns that are all empty, with notes below it."""
    units = (("KiB", 2**10), ("MiB", 2**20), ("GiB", 2**30))
    unit, size = next(((u, s) for u, s in units if rows[0].full < 1e4 * s), ("TiB", 2**40))
    lines = [_row(r, size) for r in rows]
    used = [name for name in HEAD if name not in OPTIONAL or any(line[name].strip("—0") for line in lines)]
    sheet = Table(tuple(used), tuple(tuple(line[name] for name in used) for line in lines))
    title = f"prompt of {rows[0].n} tokens; full cache {rows[0].full / size:.4g} {unit}; all numbers in {unit}\n\n"
    return title + compose([sheet], [*_notes(rows), *notes], "text")


def _row(r: Account, size: int) -> dict[str, str]:
    name = r.method.replace(" ", "\n")
    if r.sums is None:
        return dict.fromkeys(HEAD, "—") | {"method": name}
    _, payload, overhead = r.sums
    parts = [_number(p / size) for p in r.measured.held.parts()] if r.measured else ["—"] * len(PARTS)
    if r.measured is None:
        verdict = "≈ formula" if r.even else "formula"
    else:
        verdict = "✓" if r.measured.agrees else f"{r.measured.off:+d} B".replace("-", "−")
    sums = [_number(x / size) for x in (payload, overhead, payload + overhead)]
    values = (name, sums[0], *parts[:3], sums[1], *parts[3:], sums[2], f"{r.percent:.1f}", verdict)
    return dict(zip(HEAD, values, strict=True))


def _notes(rows: Sequence[Account]) -> Iterator[str]:
    built = [r.measured for r in rows if r.measured]
    if built:
        yield (
            "Payload: exact keys and values, packed codes, their scales and minima. Overhead: positions, ids of kept "
            "channels, state for decoding. Storages of real layers of random numbers; ✓: payload and overhead equal "
            "the formulas for the tokens kept, to the byte."
        )
        yield "One layer is built for all that promise the same number of tokens, and counts for each of them."
    if len(built) < len(rows):
        yield "formula: not built, bytes by formula alone (≈: tokens taken as spread evenly over heads and layers)."
    for why in dict.fromkeys(r.why for r in rows if r.why):
        yield f"{', '.join(r.method.partition(' ')[0] for r in rows if r.why == why)}: {why}."


def _number(x: float) -> str:
    """Return a number in at most five characters."""
    return "0" if x == 0 else f"{x:.{max(0, 3 - len(str(int(x))) + (x < 1))}f}"
