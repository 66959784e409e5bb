"""The ledger of claims: measured with as many examples as it takes, up to a limit, and shown with its evidence."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from textwrap import fill
from typing import Any

from kvbench import config, experiment
from kvbench.cli.rewrite import rewrite
from kvbench.model import load
from kvbench.papers import claims, declared, measured, standin
from kvbench.papers.claims import UNDECIDED, Claim, Verdict
from kvbench.render import Sheet

SAYS = 46
"""Characters of a line of a statement."""
MARKS = {"supported": "✓", "contradicted": "✗", "undecided": "?", "not testable here": "—"}


def settle(papers: Sequence[str], model: str, arguments: Sequence[str], limit: int, up_to: int) -> list[Verdict]:
    """Verdicts on all claims of ``papers``, in order: ``limit`` examples a task, doubled while a claim is undecided.

    The number of looks is fixed by ``limit`` and ``up_to`` and corrected for; a verdict once reached stays.
    """
    ledger = [c for paper in papers for c in claims.load(paper)]
    limits = [limit]
    while limits[-1] < up_to:
        limits.append(min(2 * limits[-1], up_to))
    settled: dict[str, Verdict] = {}
    for n in limits:
        open_ = [c for c in ledger if c.id not in settled or settled[c.id].verdict == UNDECIDED]
        found: dict[str, Any] = {}
        for paper in papers:
            mine = [c for c in ledger if c.paper == paper and c in open_ and c.test != "elsewhere"]
            if mine:
                print(f"kvbench: {paper}: {len(mine)} claims, {n} examples a task", file=sys.stderr)
            found |= _measure(paper, mine, model, [*arguments, f"limit={n}"])
        # corrected over the whole ledger, whatever is open: those settled keep their places
        for verdict in claims.decide(open_, found, len(limits), family=sum(c.test != "elsewhere" for c in ledger)):
            settled[verdict.claim.id] = verdict
        if not any(v.verdict == UNDECIDED for v in settled.values()):
            break
    return [settled[c.id] for c in ledger]


def dtype_of(model: str, arguments: Sequence[str]) -> str:
    """The dtype that ``model`` runs in under ``run``'s arguments."""
    cfg = config.parse(config.compose_config(rewrite([f"model={model}", "method=full", *arguments]).runs[0]))
    found = load.resolve_dtype(cfg.model, load.resolve_device(cfg.device), load.locate(cfg.model).config)
    return str(found).removeprefix("torch.")


def _measure(paper: str, mine: Sequence[Claim], model: str, arguments: Sequence[str]) -> dict[str, Any]:
    tables = []
    for table in claims.sides(paper, mine):
        ours = measured.prepare(table, model, arguments)
        if ours.run is not None:
            experiment.measure(ours.run)
        tables.append(ours)
    return {c.id: claims.differences(c, tables) for c in mine}


def sheet(verdicts: Sequence[Verdict]) -> Sheet:
    """The ledger as a table of strings."""
    rows = tuple(
        (f"{MARKS[v.verdict]} {v.claim.id}\n{fill(v.claim.says, SAYS)}", v.verdict, _evidence(v)) for v in verdicts
    )
    headers = ("what the paper says", "verdict", "difference in points")
    return Sheet("scores", headers, rows, left=len(headers))


def plain(verdict: Verdict) -> dict[str, Any]:
    """One verdict as plain data."""
    return asdict(verdict)


def stands_in(papers: Sequence[str], model: str) -> bool:
    """Whether a model is none of those of the papers' tables."""
    tables = (t for paper in papers for t in declared.find(paper) if t.measurable)
    return all(measured.stands_in(t, model) for t in tables)


def notes(verdicts: Sequence[Verdict], model: str, dtype: str, stand_in: bool) -> list[str]:
    """What the reader must know of a ledger."""
    own = "tasks and budgets are its own" if model == standin.MODEL else "the papers' data under their budgets"
    tested = sum(v.claim.test != "elsewhere" for v in verdicts)
    lines = [
        f"Model {model}, {dtype}" + (f", a stand-in for the papers' models: {own}." if stand_in else "."),
        f"Differences are paired, in points of 100, with 95 % bootstrap intervals; a verdict needs p < {claims.LEVEL} "
        f"(Gaffke's test, of a mean of bounded differences), corrected for {tested} claims (Holm) and for every look "
        "at the data.",
        "better: above 0; no worse: above minus the margin; undecided: the pairs that would decide it with a chance of "
        f"{100 * claims.POWER:.0f} %, if the difference is what it seems.",
    ]
    lines += [f"{v.claim.id}: {v.reason}" for v in verdicts if v.reason]
    return lines


def _evidence(v: Verdict) -> str:
    if v.mean is None:
        return "—"
    margin = (
        ""
        if v.claim.test == "better"
        else f"\nmargin {v.claim.margin:g}" + (", each task" if v.claim.test == "no_worse_each" else "")
    )
    interval = f" [{v.ci[0]:.1f}, {v.ci[1]:.1f}]" if v.ci else ""
    worst = min(v.tasks, key=lambda t: v.tasks[t])
    p = min(x for x in (v.p_for, v.p_against) if x is not None)
    more = f"\nwould take {v.would_take:,} pairs" if v.would_take else ""
    least = f"least {v.tasks[worst]:+.1f} ({worst.rpartition('/')[2]})"
    text = f"{v.mean:+.1f}{interval}\nn {v.n:,}, p {p:.2g}{margin}\n{least}{more}"
    return text.replace("-", "−") if "−" not in text else text
