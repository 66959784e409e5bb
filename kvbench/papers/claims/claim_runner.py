"""Measure claims, decide them together, and record the verdicts as a ledger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvbench.papers.claims import claims
from kvbench.papers.claims.claims import MEASURES, POINTS, Evidence, Verdict
from kvbench.papers.claims.evidence import evidence_by_measure
from kvbench.papers.claims.ledger import ClaimRecord, Ledger, MeasureRecord
from kvbench.papers.measured import our_table
from kvbench.papers.measured.joint import join_runs
from kvbench.papers.measured.our_table import OurTable
from kvbench.papers.spec import stand_ins, table_spec
from kvbench.plan.run_plan import RunPlan
from kvbench.run import experiment
from kvbench.store.provenance import describe_local_changes

Outcomes = Mapping[str, Sequence[Verdict]]
"""The verdicts on all claims of a ledger, in order, by measure."""


def tables_of_claims(papers: Sequence[str], model: str) -> list[table_spec.Given]:
    """Return the rows that the claims of ``papers`` compare, as tables to be measured."""
    scaled = model == stand_ins.MODEL
    specs: list[table_spec.Given] = []
    for paper in papers:
        specs += claims.tables_of_sides(claims.load(paper), scaled=scaled)
    return specs


def prepare(papers: Sequence[str], model: str, arguments: Sequence[str]) -> dict[str, list[OurTable]]:
    """Plan the claims' tables on a model, by paper."""
    prepared = {}
    for paper in papers:
        prepared[paper] = [our_table.prepare(table, model, arguments) for table in tables_of_claims([paper], model)]
    return prepared


def measure(prepared: Mapping[str, Sequence[OurTable]]) -> None:
    """Measure the missing answers. Read each prompt once for all papers that read it alike."""
    for run in join_runs(_list_runs(prepared)):
        experiment.fill(run)


def _list_runs(prepared: Mapping[str, Sequence[OurTable]]) -> list[RunPlan]:
    """Return the runs of the tables that can be run."""
    runs = []
    for our_tables in prepared.values():
        runs += [ours.run for ours in our_tables if ours.run is not None]
    return runs


def reach_verdicts(prepared: Mapping[str, Sequence[OurTable]], model: str) -> Outcomes:
    """Return the verdicts on all claims of the prepared papers by measure, in order.

    The verdicts by one measure are corrected together. Without comparisons of answers with the full cache's
    (``fidelity=true``), there are only verdicts by points.
    """
    # likelihoods and divergences are stored only if answers were compared with the full cache's
    measures: tuple[str, ...] = (POINTS,)
    for run in _list_runs(prepared):
        for group in run.groups:
            if any(cell.fidelity for cell in group.cells):
                measures = MEASURES
    ledger: list[claims.Claim] = []
    for paper in prepared:
        ledger += claims.load(paper)
    # evidence by measure and claim; the stand-in also has evidence from rows with the paper's unscaled windows
    evidence_of: dict[str, dict[str, Evidence]] = {measure: {} for measure in measures}
    evidence_as_printed_of: dict[str, dict[str, Evidence]] = {measure: {} for measure in measures}
    tested = [claim for claim in ledger if claim.test != "elsewhere"]
    for claim in tested:
        our_tables = prepared[claim.paper]
        for measure, evidence in evidence_by_measure(claim, our_tables, measures).items():
            evidence_of[measure][claim.id] = evidence
        if model == stand_ins.MODEL:
            as_printed = evidence_by_measure(claim, our_tables, measures, windows_as_printed=True)
            for measure, evidence in as_printed.items():
                evidence_as_printed_of[measure][claim.id] = evidence
    outcomes = {}
    for measure in measures:
        # the family counts all testable claims, including those without any measurement yet
        outcomes[measure] = claims.decide(
            ledger,
            evidence_of[measure],
            evidence_as_printed_of[measure],
            family=len(tested),
            measure=measure,
            measures=len(measures),
        )
    return outcomes


def as_plain(prepared: Mapping[str, Sequence[OurTable]], model: str, outcomes: Outcomes) -> Ledger:
    """Return a ledger as plain data: the model, whether it stands in for the papers', and a record of each claim."""
    notes: list[str] = []
    stand_in = True
    for our_tables in prepared.values():
        for ours in our_tables:
            notes.extend(ours.notes)
            stand_in = stand_in and ours.stand_in
    dtypes: set[str] = set()
    cell_records = {}
    for run in _list_runs(prepared):
        for group in run.groups:
            dtypes.update(str(cell.identity["model"]["dtype"]) for cell in group.cells)
            # a task's note names the data read in place of the paper's; for tiny's tasks the title says enough
            if group.task.note and not group.task.id.startswith("tiny/"):
                notes.append(f"{group.task.note}.")
        # tables share cells, so count a cell with local changes once
        cell_records.update({record.id: record for record in run.records()})
    notes.append(describe_local_changes(cell_records.values()))
    # each measure has the claims in the ledger's order
    records = []
    for verdicts in zip(*outcomes.values(), strict=True):
        records.append(_record_of_claim(dict(zip(outcomes, verdicts, strict=True))))
    return {
        "model": model,
        "stand_in": stand_in,
        "dtype": ", ".join(sorted(dtypes)),
        "level": claims.LEVEL,
        "tested": sum(record["test"] != "elsewhere" for record in records),
        "notes": [note for note in dict.fromkeys(notes) if note],
        "verdicts": records,
    }


def _record_of_claim(verdicts: Mapping[str, Verdict]) -> ClaimRecord:
    """Return a claim with its verdict, and the verdict and numbers of each measure, as plain data."""
    deciding_measure = claims.deciding_measure(verdicts)
    verdict = verdicts[deciding_measure]
    # the reason and the cells come from the score, since it is tried first
    by_points = verdicts[POINTS]
    claim = by_points.claim
    decided_by = ""
    if verdict.verdict in claims.DECIDED:
        decided_by = deciding_measure
    return {
        "id": claim.id,
        "paper": claim.paper,
        "quote": claim.quote,
        "where": claim.where,
        "tested": claim.tested,
        "test": claim.test,
        "margin": claim.margin,
        "pairs": claim.pairs,
        "verdict": verdict.verdict,
        "side": verdict.side,
        "decided_by": decided_by,
        "ran": by_points.evidence.ran,
        "cells": by_points.evidence.cells,
        "reason": by_points.reason,
        "measures": {measure: _record_measure(verdict) for measure, verdict in verdicts.items()},
    }


def _record_measure(verdict: Verdict) -> MeasureRecord:
    """Return a verdict by one measure with its numbers as plain data."""
    evidence = verdict.evidence
    ci = None
    if verdict.ci is not None:
        ci = [round(bound, 3) for bound in verdict.ci]
    return {
        "verdict": verdict.verdict,
        "side": verdict.side,
        "why_not": verdict.why_not,
        "mean": _round_mean(verdict.mean),
        "elsewhere": _round_mean(verdict.elsewhere),
        "ci": ci,
        "p_for": verdict.p_for,
        "p_against": verdict.p_against,
        "p_same": verdict.p_same,
        "needs": verdict.needs,
        "n": {task: len(differences) for task, differences in evidence.differences.items()},
        "tasks": {task: round(mean, 6) for task, mean in evidence.tasks.items()},
        "settings": [round(float(mean), 6) for mean in evidence.settings],
        "floors": list(evidence.floors),
    }


def _round_mean(mean: float | None) -> float | None:
    """Return a mean with six digits behind the point; None stays None."""
    return None if mean is None else round(mean, 6)
