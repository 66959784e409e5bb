"""Measure the claims of papers on a model, decide them together, and record the verdicts as a ledger.

``kvbench claims`` calls ``prepare``, ``measure``, ``reach_verdicts`` and ``as_plain`` one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvbench.papers.claims import claims
from kvbench.papers.claims.claims import MEASURES, POINTS, Evidence, Verdict
from kvbench.papers.claims.evidence import NumberReader, read_evidence
from kvbench.papers.claims.ledger import Ledger, Measure, Record
from kvbench.papers.measured import plan
from kvbench.papers.measured.plan import PaperTable
from kvbench.papers.measured.work import join_runs
from kvbench.papers.spec import stand_ins, table_spec
from kvbench.plan.inputs import Inputs
from kvbench.plan.run_plan import RunPlan
from kvbench.run import experiment
from kvbench.store.provenance import describe_local_changes
from kvbench.tasks.metrics import stats

Outcomes = Mapping[str, Sequence[Verdict]]
"""By measure, the verdicts on all claims of a ledger, in the ledger's order."""


def make_tables_of_claims(papers: Sequence[str], model: str) -> list[table_spec.UnprintedTable]:
    """Return tables to be measured on ``model``: their rows are the methods that the claims of ``papers`` compare.

    On the tiny model each row stands twice, with scaled windows and with the paper's own.
    """
    # only the tiny model has prompts so short that windows must be scaled
    scaled = model == stand_ins.MODEL
    tables: list[table_spec.UnprintedTable] = []
    for paper in papers:
        tables += claims.make_tables_of_sides(claims.load(paper), scaled=scaled)
    return tables


def prepare(papers: Sequence[str], model: str, arguments: Sequence[str]) -> dict[str, list[PaperTable]]:
    """Plan what must be measured on a model for the claims of ``papers``. Return the planned tables by paper.

    arguments: options of ``kvbench run`` as the user typed them.
    """
    prepared = {}
    # the tables of all papers have one model, and many read the same tasks
    inputs = Inputs()
    for paper in papers:
        tables = make_tables_of_claims([paper], model)
        prepared[paper] = [plan.prepare(table, model, arguments, inputs) for table in tables]
    return prepared


def measure(prepared: Mapping[str, Sequence[PaperTable]]) -> None:
    """Measure the answers of planned tables that the store does not have yet.

    Papers that ask the same prompt under the same settings share one reading of it.
    """
    for run in join_runs(_list_runs(prepared)):
        experiment.fill(run)


def _list_runs(prepared: Mapping[str, Sequence[PaperTable]]) -> list[RunPlan]:
    runs = []
    for tables_of_paper in prepared.values():
        runs += [ours.run for ours in tables_of_paper if ours.run is not None]
    return runs


def reach_verdicts(prepared: Mapping[str, Sequence[PaperTable]], model: str) -> Outcomes:
    """Decide all claims of the planned papers. Return the verdicts by measure, each in the order of the claims.

    All claims together are corrected as one family, separately for each measure. Unless the run also compares answers
    with the full cache's (``fidelity=true``), there are only verdicts by points.
    """
    # likelihoods and divergences are stored only if answers were compared with the full cache's
    measures: tuple[str, ...] = (POINTS,)
    for run in _list_runs(prepared):
        for group in run.groups:
            if any(cell.fidelity for cell in group.cells):
                measures = MEASURES
    all_claims: list[claims.Claim] = []
    for paper in prepared:
        all_claims += claims.load(paper)
    # evidence by measure and claim id, with windows scaled to the model and with the paper's own
    evidence_of: dict[str, dict[str, Evidence]] = {measure: {} for measure in measures}
    unscaled_evidence_of: dict[str, dict[str, Evidence]] = {measure: {} for measure in measures}
    tested = [claim for claim in all_claims if claim.test != "elsewhere"]
    numbers_of: dict[str, NumberReader | None] = {}
    for paper, tables_of_paper in prepared.items():
        # a paper's tables have one store, and its claims share many cells
        runs = _list_runs({paper: tables_of_paper})
        numbers_of[paper] = None
        if runs:
            numbers_of[paper] = NumberReader(runs[0].store)
    for claim in tested:
        tables_of_paper = prepared[claim.paper]
        numbers = numbers_of[claim.paper]
        for measure, evidence in read_evidence(claim, tables_of_paper, measures, numbers=numbers).items():
            evidence_of[measure][claim.id] = evidence
        # only the tiny model has prompts so short that windows are scaled
        if model == stand_ins.MODEL:
            unscaled = read_evidence(claim, tables_of_paper, measures, windows_as_printed=True, numbers=numbers)
            for measure, evidence in unscaled.items():
                unscaled_evidence_of[measure][claim.id] = evidence
    outcomes = {}
    for measure in measures:
        # the family counts all testable claims, including those without any measurement yet
        outcomes[measure] = claims.decide(
            all_claims,
            evidence_of[measure],
            unscaled_evidence_of[measure],
            family=len(tested),
            measure=measure,
            measures=len(measures),
        )
    return outcomes


def as_plain(prepared: Mapping[str, Sequence[PaperTable]], model: str, outcomes: Outcomes) -> Ledger:
    """Return a ledger as plain data: the model, notes for readers, and a record of each claim with its verdicts.

    prepared: the planned tables by paper.
    outcomes: the verdicts of ``reach_verdicts``.
    """
    notes: list[str] = []
    # a model in the tables of one paper is no substitute, even if the other papers do not have it
    stand_in = True
    for tables_of_paper in prepared.values():
        for ours in tables_of_paper:
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
    records = []
    # every measure lists the same claims in the same order, so this zip gives one claim's verdicts by all measures
    for verdicts_on_claim in zip(*outcomes.values(), strict=True):
        verdict_by_measure = dict(zip(outcomes, verdicts_on_claim, strict=True))
        records.append(_record_claim(verdict_by_measure))
    return {
        "model": model,
        "stand_in": stand_in,
        "dtype": ", ".join(sorted(dtypes)),
        "level": claims.LEVEL,
        "tested": sum(record["test"] != "elsewhere" for record in records),
        # tables of one paper repeat notes, and a note on local changes is '' if there are none
        "notes": [note for note in dict.fromkeys(notes) if note],
        "verdicts": records,
    }


def _record_claim(verdicts: Mapping[str, Verdict]) -> Record:
    deciding_measure = claims.choose_deciding_measure(verdicts)
    verdict = verdicts[deciding_measure]
    # the reason, the cells and the methods that ran are those of points, the measure that is tried first
    by_points = verdicts[POINTS]
    claim = by_points.claim
    decided_by = deciding_measure if verdict.verdict in claims.DECIDED else ""
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
        "measures": {measure: _record_measure(outcome) for measure, outcome in verdicts.items()},
    }


def _record_measure(verdict: Verdict) -> Measure:
    evidence = verdict.evidence
    settings_ci = [stats.in_percent(stats.mean_interval(some, (-1.0, 1.0))) for some in evidence.settings]
    return {
        "verdict": verdict.verdict,
        "side": verdict.side,
        "why_not": verdict.why_not,
        "mean": _round_mean(verdict.mean),
        "elsewhere": _round_mean(verdict.mean_unscaled),
        "ci": _round_interval(verdict.ci),
        "p_for": verdict.p_for,
        "p_against": verdict.p_against,
        "p_same": verdict.p_same,
        "needs": verdict.needs,
        "n": {task: len(differences) for task, differences in evidence.differences.items()},
        "tasks": {task: round(mean, 6) for task, mean in evidence.tasks.items()},
        "settings": [round(100 * float(some.mean()), 6) for some in evidence.settings],
        "settings_ci": [_round_interval(ci) for ci in settings_ci],
        "floors": list(evidence.floors),
    }


def _round_interval(interval: stats.Interval | None) -> list[float] | None:
    return None if interval is None else [round(bound, 3) for bound in interval]


def _round_mean(mean: float | None) -> float | None:
    return None if mean is None else round(mean, 6)
