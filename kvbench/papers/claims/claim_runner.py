"""The ledger of claims: they are measured, decided together, and shown with their evidence, a column a model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import fill
from typing import Any

from kvbench.errors import UsageError
from kvbench.files import write_json
from kvbench.papers.claims import claims
from kvbench.papers.claims.claims import FRAGILE, MIXED, NOT_DECIDABLE, UNDECIDED, Evidence, Verdict
from kvbench.papers.measured import our_table
from kvbench.papers.measured.joint import joint
from kvbench.papers.measured.our_table import OurTable
from kvbench.papers.spec import stand_ins, table_spec
from kvbench.run import experiment
from kvbench.run.provenance import local_changes
from kvbench.tables.table import Table

FOLDER = "claims"
"""The folder below a results folder with a ledger for each model."""
SAYS = 46
"""Characters of a line of a statement."""
FIDELITY = ("verdict", "side", "mean", "ci", "p_for", "p_against", "n", "tasks", "settings")
"""The parts of a verdict that are told again in nats."""
MARKS = {"supported": "✓", "contradicted": "✗", "mixed": "±", "fragile": "~", UNDECIDED: "?"}


IN_NATS = (
    "In nats: the same claim by each prompt's divergence from the full cache, on the full cache's own greedy answer; "
    "above 0 the claim's method is nearer to it. Gains are the difference over the sum of both, in per cent; "
    f"losses are nats, at most 1 a prompt, with a margin of {claims.NATS:g} nats. The correction is over these tests "
    "alone. The two verdicts answer different questions."
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


def settle(prepared: Mapping[str, Sequence[OurTable]], model: str, in_nats: bool = False) -> list[Verdict]:
    """Return the verdicts on all claims of the prepared papers, in order, corrected together.

    ``in_nats``: by divergences from the full cache in place of scores, under a correction of their own.
    """
    ledger = [c for paper in prepared for c in claims.load(paper)]
    if in_nats:
        ledger = [replace(c, margin=100 * claims.NATS) for c in ledger]
    tested = [c for c in ledger if c.test != "elsewhere"]
    evidence_by_id = {c.id: claims.evidence(c, prepared[c.paper], in_nats=in_nats) for c in tested}
    others: dict[str, Evidence] = {}
    if model == stand_ins.MODEL:
        others = {c.id: claims.evidence(c, prepared[c.paper], True, in_nats) for c in tested}
    return claims.decide(ledger, evidence_by_id, others, family=len(tested))


def plain(prepared: Mapping[str, Sequence[OurTable]], model: str, verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Return a ledger as plain data: the model, whether it stands in for the papers', and a record of each claim."""
    our_tables = [ours for some in prepared.values() for ours in some]
    runs = [ours.run for ours in our_tables if ours.run is not None]
    dtypes = {str(c.identity["model"]["dtype"]) for r in runs for g in r.groups for c in g.cells}
    # data read in place of others, notes of tasks, and local changes
    tasks = [f"{g.task.note}." for r in runs for g in r.groups if g.task.note and not g.task.id.startswith("tiny/")]
    changed = local_changes({c.id: c for r in runs for c in r.records()}.values())
    records = [_record(v) for v in verdicts]
    if any(c.fidelity for r in runs for g in r.groups for c in g.cells):
        by_id = {v.claim.id: _record(v) for v in settle(prepared, model, in_nats=True)}
        records = [{**r, "fidelity": {key: by_id[r["id"]][key] for key in FIDELITY}} for r in records]
    all_notes = [*(note for ours in our_tables for note in ours.notes), *tasks, changed]
    return {
        "model": model,
        "stand_in": all(ours.stand_in for ours in our_tables),
        "dtype": ", ".join(sorted(dtypes)),
        "level": claims.LEVEL,
        "tested": sum(v.claim.test != "elsewhere" for v in verdicts),
        "notes": [note for note in dict.fromkeys(all_notes) if note],
        "verdicts": records,
    }


def _record(v: Verdict) -> dict[str, Any]:
    """Return a verdict with its claim and evidence as plain data."""
    claim, evidence = v.claim, v.evidence
    means = {key: None if x is None else round(x, 6) for key, x in (("mean", v.mean), ("elsewhere", v.elsewhere))}
    return {
        **{key: getattr(claim, key) for key in ("id", "paper", "quote", "where", "tested", "test", "margin", "pairs")},
        **{key: getattr(v, key) for key in ("verdict", "side", "why_not")},
        **means,
        "ci": None if v.ci is None else [round(x, 3) for x in v.ci],
        **{"p_for": v.p_for, "p_against": v.p_against},
        "n": {task: len(d) for task, d in evidence.differences.items()},
        "tasks": {task: round(x, 6) for task, x in evidence.tasks.items()},
        "settings": [round(float(x), 6) for x in evidence.settings],
        **{key: getattr(evidence, key) for key in ("floors", "ran", "cells")},
        "reason": v.reason,
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
            side = f" ({v['side']} in the mean)" if v is not None and v["side"] else ""
            cells.append("—" if v is None else f"{v['verdict']}{side}\n{evidence(v)}{in_nats(v)}")
        rows.append(tuple(cells))
    heads = (
        f"{content['model']}{', a stand-in' if content['stand_in'] else ''}: points"
        + (" and nats" if any("fidelity" in v for v in content["verdicts"]) else "")
        for content in ledgers
    )
    headers = ("what the paper says, and what is tested", *heads)
    return Table(headers, tuple(rows), left=len(headers), ruled=True)


def evidence(v: Mapping[str, Any]) -> str:
    """Return the numbers behind a verdict: mean difference and interval, pairs, p, and the signs by task."""
    if v["mean"] is None:
        return "—"
    least = 0.0 if v["test"] == "better" else -v["margin"]
    signs = [(m > least + 1e-9) - (m < least - 1e-9) for m in v["tasks"].values()]
    sizes = sorted(v["n"].values())
    n = f"{sizes[0]}" if sizes[0] == sizes[-1] else f"{sizes[0]} to {sizes[-1]}"
    lines = [
        f"{v['mean']:+.1f} [{v['ci'][0]:.1f}, {v['ci'][1]:.1f}]" + (f", margin {v['margin']:g}" if least else ""),
        f"n {n} in {len(sizes)} task{'s' if len(sizes) > 1 else ''}, p {min(v['p_for'], v['p_against']):.2g}",
        f"tasks for {signs.count(1)}, even {signs.count(0)}, against {signs.count(-1)}",
    ]
    if len(v["settings"]) > 1:
        lines.append("settings " + ", ".join(f"{m:+.1f}" for m in v["settings"]))
    if v["elsewhere"] is not None:
        lines.append(f"the paper's windows {v['elsewhere']:+.1f}")
    elif v["why_not"]:
        lines.append("the paper's windows do not fit")
    return "\n".join(lines).replace("-", "−")


def in_nats(v: Mapping[str, Any]) -> str:
    """Return the verdict by divergences, below that by scores; '' where they were not measured."""
    nats = v.get("fidelity")
    if nats is None:
        return ""
    side = f" ({nats['side']} in the mean)" if nats["side"] else ""
    if nats["mean"] is None:
        return f"\nin nats: {nats['verdict']}"
    low, high = nats["ci"]
    if v["test"] == "better":
        numbers = f"{nats['mean']:+.1f} % [{low:.1f}, {high:.1f}]"
    else:
        numbers = f"{nats['mean'] / 100:+.3f} [{low / 100:.3f}, {high / 100:.3f}], margin {claims.NATS:g}"
    p = min(nats["p_for"], nats["p_against"])
    return f"\nin nats: {nats['verdict']}{side}\n{numbers}, p {p:.2g}".replace("-", "−")


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
        "Differences are paired, in points of 100, pooled over tasks, [95 % interval]. p is corrected; a verdict of "
        f"either kind needs {content['level'] / 2:g}, and any of the {tested} claims gets a wrong one with a chance of "
        f"at most {100 * content['level']:g} % (a betting test of bounded means, which is proved for any distribution; "
        "Holm). No verdict decided when to stop measuring.",
        f"{MIXED}: decided in the mean, but a task or setting has the other sign. {FRAGILE}: with the paper's windows "
        f"unscaled the mean has the other sign. {NOT_DECIDABLE}: even if no pair differed, or of a claim of gains all "
        "gained everything, there would be too few to support it. Log losses: a nat counts as 100 points, and no pair "
        "as more. Tasks at the floor are left out by the full cache's own scores of these examples, which speaks "
        "against methods that are compared with it.",
        *([IN_NATS] if any("fidelity" in v for v in content["verdicts"]) else []),
        *content["notes"],
    ]


def reasons(content: Mapping[str, Any]) -> list[str]:
    """Return each reason for a missing verdict or missing data, with the claims that it is about."""
    ids_by_reason: dict[str, list[str]] = {}
    for v in content["verdicts"]:
        if v["reason"]:
            ids_by_reason.setdefault(v["reason"], []).append(v["id"])
    return [f"{content['model']}, {', '.join(ids)}: {reason}." for reason, ids in ids_by_reason.items()]
