"""The ledger of claims: they are measured, decided together, and shown with their evidence, a column a model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import nan
from pathlib import Path
from textwrap import fill
from typing import Any

from kvbench.base.errors import UsageError
from kvbench.base.files import write_json
from kvbench.papers.claims import claims
from kvbench.papers.claims.claims import (
    DIVERGENCE,
    FRAGILE,
    LIKELIHOOD,
    MEASURES,
    MIXED,
    NO_DIFFERENCE,
    NOT_DECIDABLE,
    POINTS,
    UNDECIDED,
    Claim,
    Evidence,
    Verdict,
)
from kvbench.papers.measured import our_table
from kvbench.papers.measured.joint import joint
from kvbench.papers.measured.our_table import OurTable
from kvbench.papers.spec import stand_ins, table_spec
from kvbench.report.table import Table
from kvbench.run import experiment
from kvbench.store.provenance import local_changes
from kvbench.tasks.metrics import stats

FOLDER = "claims"
"""The folder below a results folder with a ledger for each model."""
SAYS = 46
"""Characters of a line of a statement."""
MARKS = {
    "supported": "✓",
    "contradicted": "✗",
    "no difference": "=",
    "mixed": "±",
    "fragile": "~",
    UNDECIDED: "?",
}
NAMES = {POINTS: "points", LIKELIHOOD: "likelihood of the answer, nats a token", DIVERGENCE: "divergence"}
"""What tables call the measures, beside their numbers."""
BY = {POINTS: "points", LIKELIHOOD: "the likelihood of the answer", DIVERGENCE: "divergence"}
"""What they call the measure that decided a claim."""

Outcomes = Mapping[str, Sequence[Verdict]]
"""The verdicts on all claims of a ledger, in order, by measure."""

ABOUT_NATS = (
    "Likelihood of the answer: the nats a token that the reference answer loses beside the full cache, less for the "
    f"claim's method than for the other, one nat at most, with a margin of {claims.NATS:g} where nothing is to be "
    "lost; of tasks with short references. Divergence: from the full cache's next-token distribution on its own "
    "greedy answer; gains are the difference over the sum of both, in per cent, losses are nats, one at most a "
    f"prompt, with a margin of {claims.NATS:g}. Above 0 the claim's method is the better one. A claim is decided by "
    "points where they decide, else by the likelihood, else by the divergence; each has a third of the level, and "
    "they answer different questions."
)


def tables(papers: Sequence[str], model: str) -> list[table_spec.Given]:
    """Return the rows that the claims of ``papers`` compare, as tables to be measured."""
    return [t for paper in papers for t in claims.sides(claims.load(paper), scaled=model == stand_ins.MODEL)]


def prepare(papers: Sequence[str], model: str, arguments: Sequence[str]) -> dict[str, list[OurTable]]:
    """Plan the claims' tables on a model, by paper."""
    return {p: [our_table.prepare(t, model, arguments) for t in tables([p], model)] for p in papers}


def measure(prepared: Mapping[str, Sequence[OurTable]]) -> None:
    """Measure what is missing, each prompt once for all papers that read it alike."""
    for run in joint(ours.run for some in prepared.values() for ours in some if ours.run is not None):
        experiment.fill(run)


def settle(prepared: Mapping[str, Sequence[OurTable]], model: str) -> Outcomes:
    """Return the verdicts on all claims of the prepared papers by measure, in order; each measure's corrected together.

    Only points are there where no answer was compared with the full cache's (``fidelity=true``).
    """
    ledger = [c for paper in prepared for c in claims.load(paper)]
    runs = [ours.run for some in prepared.values() for ours in some if ours.run is not None]
    compared = any(c.fidelity for r in runs for g in r.groups for c in g.cells)
    measures = MEASURES if compared else (POINTS,)
    return {m: _settled(prepared, ledger, model, m, len(measures)) for m in measures}


def _settled(
    prepared: Mapping[str, Sequence[OurTable]], ledger: Sequence[Claim], model: str, measure: str, measures: int
) -> list[Verdict]:
    tested = [c for c in ledger if c.test != "elsewhere"]
    found = {c.id: claims.evidence(c, prepared[c.paper], measure=measure) for c in tested}
    others: dict[str, Evidence] = {}
    if model == stand_ins.MODEL:
        others = {c.id: claims.evidence(c, prepared[c.paper], True, measure) for c in tested}
    return claims.decide(ledger, found, others, len(tested), measure, measures)


def plain(prepared: Mapping[str, Sequence[OurTable]], model: str, outcomes: Outcomes) -> dict[str, Any]:
    """Return a ledger as plain data: the model, whether it stands in for the papers', and a record of each claim."""
    our_tables = [ours for some in prepared.values() for ours in some]
    runs = [ours.run for ours in our_tables if ours.run is not None]
    dtypes = {str(c.identity["model"]["dtype"]) for r in runs for g in r.groups for c in g.cells}
    # data read in place of others, notes of tasks, and local changes
    tasks = [f"{g.task.note}." for r in runs for g in r.groups if g.task.note and not g.task.id.startswith("tiny/")]
    changed = local_changes({c.id: c for r in runs for c in r.records()}.values())
    records = [_record(dict(zip(outcomes, verdicts, strict=True))) for verdicts in zip(*outcomes.values(), strict=True)]
    all_notes = [*(note for ours in our_tables for note in ours.notes), *tasks, changed]
    return {
        "model": model,
        "stand_in": all(ours.stand_in for ours in our_tables),
        "dtype": ", ".join(sorted(dtypes)),
        "level": claims.LEVEL,
        "tested": sum(record["test"] != "elsewhere" for record in records),
        "notes": [note for note in dict.fromkeys(all_notes) if note],
        "verdicts": records,
    }


def _record(verdicts: Mapping[str, Verdict]) -> dict[str, Any]:
    """Return a claim with its verdict, and the verdict and numbers of each measure, as plain data."""
    by = claims.deciding(verdicts)
    verdict, first = verdicts[by], verdicts[POINTS]
    claim = first.claim
    return {
        **{key: getattr(claim, key) for key in ("id", "paper", "quote", "where", "tested", "test", "margin", "pairs")},
        "verdict": verdict.verdict,
        "side": verdict.side,
        "decided_by": by if verdict.verdict in claims.DECIDED else "",
        **{key: getattr(first.evidence, key) for key in ("ran", "cells")},
        "reason": first.reason,
        "measures": {measure: _numbers(v) for measure, v in verdicts.items()},
    }


def _numbers(v: Verdict) -> dict[str, Any]:
    """Return a verdict by one measure with its numbers as plain data."""
    means = {key: None if x is None else round(x, 6) for key, x in (("mean", v.mean), ("elsewhere", v.elsewhere))}
    evidence = v.evidence
    return {
        **{key: getattr(v, key) for key in ("verdict", "side", "why_not")},
        **means,
        "ci": None if v.ci is None else [round(x, 3) for x in v.ci],
        **{key: getattr(v, key) for key in ("p_for", "p_against", "p_same", "needs")},
        "n": {task: len(d) for task, d in evidence.differences.items()},
        "tasks": {task: round(x, 6) for task, x in evidence.tasks.items()},
        "settings": [round(float(x), 6) for x in evidence.settings],
        "floors": list(evidence.floors),
    }


def place(model: str, results: Path, papers: Sequence[str]) -> Path:
    """Return the path of a model's ledger below a results folder; that of some papers has a name of its own."""
    some = "" if len(papers) == len(claims.papers()) else f".{'-'.join(papers)}"
    return results / FOLDER / f"{model.replace('/', '--')}{some}.json"


def write(content: Mapping[str, Any], results: Path, papers: Sequence[str]) -> Path:
    """Write a ledger below a results folder and return its path."""
    path = place(content["model"], results, papers)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, content)
    return path


def read(results: Path) -> list[dict[str, Any]]:
    """Read the ledgers below a results folder, pretrained models first; raise UsageError for a damaged one."""
    ledgers = []
    for path in sorted((results / FOLDER).glob("*.json"), key=lambda p: (p.stem == stand_ins.MODEL, p.name)):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            sheet([content]), notes(content)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{path} cannot be read ({error}); run python -m kvbench claims again") from None
        ledgers.append(content)
    return ledgers


def sheet(ledgers: Sequence[Mapping[str, Any]]) -> Table:
    """Return ledgers side by side as a table of texts; the first with a claim supplies its words."""
    by_id = [{v["id"]: v for v in content["verdicts"]} for content in ledgers]
    rows = []
    for first in {v["id"]: v for content in reversed(ledgers) for v in content["verdicts"]}.values():
        cells = [f"{MARKS.get(first['verdict'], '—')} {first['id']}"]
        for text in (f"“{first['quote']}” ({first['paper']}, {first['where']})", f"Tested: {first['tested']}"):
            cells[0] += "\n" + fill(text, SAYS, break_on_hyphens=False)
        for v in (verdicts.get(first["id"]) for verdicts in by_id):
            cells.append("—" if v is None else f"{outcome(v)}\n{evidence(v)}")
        rows.append(tuple(cells))
    heads = (
        f"{content['model']}{', a stand-in' if content['stand_in'] else ''}"
        + ("" if _compared(content) else ": points")
        for content in ledgers
    )
    headers = ("what the paper says, and what is tested", *heads)
    return Table(headers, tuple(rows), left=len(headers), ruled=True, breaks=True)


def _compared(content: Mapping[str, Any]) -> bool:
    """Tell whether a ledger has measures beside points."""
    return any(len(v["measures"]) > 1 for v in content["verdicts"])


def _level(content: Mapping[str, Any]) -> float:
    """Return the corrected p-value that a verdict of a ledger needs in one direction."""
    measures = max((len(v["measures"]) for v in content["verdicts"]), default=1)
    return content["level"] / 2 / measures


def outcome(v: Mapping[str, Any]) -> str:
    """Return a claim's verdict, with the side of a mixed one and the measure that decided it."""
    side = f" ({v['side']} in the mean)" if v["side"] else ""
    by = f" by {BY[v['decided_by']]}" if v["decided_by"] and len(v["measures"]) > 1 else ""
    return f"{v['verdict']}{side}{by}"


def evidence(v: Mapping[str, Any]) -> str:
    """Return the numbers behind a verdict, a block of lines for each measure that was taken."""
    blocks = [_told(v, measure, found) for measure, found in v["measures"].items() if found["mean"] is not None]
    return "\n".join("\n".join(lines) for lines in blocks).replace("-", "−") or "—"


def _told(v: Mapping[str, Any], measure: str, found: Mapping[str, Any]) -> list[str]:
    """Return the lines of one measure: mean difference and interval, pairs and p, tasks on each side, what it needs."""
    in_nats = measure == LIKELIHOOD or (measure == DIVERGENCE and v["test"] != "better")
    scale, digits = (100, 3) if in_nats else (1, 1)
    low, high = found["ci"] or (nan, nan)  # one pair has no interval
    mean, low, high = (x / scale for x in (found["mean"], low, high))
    margin = v["margin"] if measure == POINTS else claims.NATS
    least = 0.0 if v["test"] == "better" else -margin * (100 if in_nats else 1)
    signs = [(m > least + 1e-9) - (m < least - 1e-9) for m in found["tasks"].values()]
    sizes = sorted(found["n"].values())
    n = f"{sizes[0]}" if sizes[0] == sizes[-1] else f"{sizes[0]} to {sizes[-1]}"
    unit = " %" if measure == DIVERGENCE and not in_nats else ""
    several = len(v["measures"]) > 1
    ps = [found[key] for key in ("p_for", "p_against", "p_same") if found[key] is not None]
    lines = [
        (f"{NAMES[measure]}\n" if several else "")
        + f"{mean:+.{digits}f}{unit} [{low:.{digits}f}, {high:.{digits}f}]"
        + (f", margin {margin:g}" if least else ""),
        f"n {n} in {len(sizes)} task{'s' if len(sizes) > 1 else ''}, p {min(ps):.2g}",
        f"tasks for {signs.count(1)}, even {signs.count(0)}, against {signs.count(-1)}",
    ]
    if len(found["settings"]) > 1:
        lines.append("settings " + ", ".join(f"{m / scale:+.{digits}f}" for m in found["settings"]))
    if found["needs"] is not None:
        lines.append(f"about {found['needs']:,} pairs would decide")
    if found["elsewhere"] is not None:
        lines.append(f"the paper's windows {found['elsewhere'] / scale:+.{digits}f}")
    elif found["why_not"]:
        lines.append("the paper's windows do not fit")
    return lines


def notes(content: Mapping[str, Any]) -> list[str]:
    """Return the notes that readers of a ledger need."""
    model, tested = content["model"], content["tested"]
    words = [v["verdict"] for v in content["verdicts"]]
    counts = ", ".join(f"{words.count(word)} {word}" for word in claims.VERDICTS if word in words)
    own = (
        "tasks and budgets are its own, and nothing here is said about a paper"
        if model == stand_ins.MODEL
        else "the papers' data under their budgets and windows"
    )
    return [
        f"{model}{', ' * bool(content['dtype'])}{content['dtype']}"
        + (f", a stand-in for the papers' models: {own}." if content["stand_in"] else "."),
        f"{model}: {counts}.",
        "Differences are paired, in points of 100, pooled over tasks, [95 % interval]. p is corrected for the number "
        f"of claims; a verdict needs {_level(content):.2g}, and any of the {tested} claims gets a wrong one by any "
        f"measure with a chance of at most {100 * content['level']:g} % (signs of the differences are flipped at "
        "random; Holm). No verdict decided when to stop measuring.",
        f"{NO_DIFFERENCE}: a claimed gain is shown to be less than a point, 0.01 nats a token, or 10 % of the "
        f"divergence. {MIXED}: decided in the mean, but a task or setting of {stats.FEWEST} pairs or more is told to "
        f"have the other sign. {FRAGILE}: with the paper's windows unscaled the mean has the other sign. {UNDECIDED}: "
        f"as many pairs as stand there would decide it at the difference seen, with a chance of {claims.POWER:.0%}. "
        f"{NOT_DECIDABLE}: even if no pair differed, or of a claim of gains all gained everything, there would be too "
        "few to support it. A claim of losing nothing counts one lost pair more than was seen. Log losses: a nat "
        "counts as 100 points, and no pair as more. Tasks at the floor are left out by the full cache's own scores "
        "of these examples, which speaks against methods that are compared with it.",
        *([ABOUT_NATS] if _compared(content) else []),
        *content["notes"],
    ]


def reasons(content: Mapping[str, Any]) -> list[str]:
    """Return each reason for a missing verdict or missing data, with the claims that it is about."""
    ids_by_reason: dict[str, list[str]] = {}
    for v in content["verdicts"]:
        if v["reason"]:
            ids_by_reason.setdefault(v["reason"], []).append(v["id"])
    return [f"{content['model']}, {', '.join(ids)}: {reason}." for reason, ids in ids_by_reason.items()]
