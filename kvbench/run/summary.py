"""From stored samples to the rows of a table, as plain data: scores, paired differences, tokens, bytes and times."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np
import torch

from kvbench.audit.accounting import at_16_bits
from kvbench.files import Sample
from kvbench.metrics import metric, stats
from kvbench.metrics.stats import FEWEST
from kvbench.run.advice import about_floors, at_floor
from kvbench.run.labels import fields
from kvbench.run.plan import Cell, Group
from kvbench.run.store import ResultStore
from kvbench.tasks.longbench import by_bucket

HALVES = ("payload16", "overhead16", "full16")
"""Bytes at 16 bits, of which shares of the full cache are made."""


def completed(cell: Cell, samples: Iterable[Sample]) -> list[Sample]:
    """The samples, with bytes at 16 bits by formula where older lines have none."""
    itemsize = getattr(torch, cell.identity["model"]["dtype"]).itemsize
    return [s if HALVES[0] in s else {**s, **at_16_bits(cell.chain, s, itemsize)} for s in samples]


def share(found: Mapping[str, Any]) -> float:
    """Bytes held in per cent of the full cache's keys and values, both at 16 bits."""
    return float(100 * (found["payload16"] + found["overhead16"]) / found["full16"])


def summarise(samples: Sequence[Sample], name: str, of: int) -> dict[str, Any]:
    """The metrics of one cell: mean score in printed units, 95 % interval, tokens kept, bytes, and times apart."""
    show = metric(name).show
    scored = [float(s["score"]) for s in samples if s["score"] is not None]
    # an answer of one token attends nothing while decoding
    attended = [s["attended"] for s in samples if "attended" in s]
    interval = stats.bootstrap_ci(scored, bounds=_bounds(name)) if len(scored) >= FEWEST else None
    halves = {key: fmean(s[key] for s in samples) for key in HALVES}
    factors = [s["timing"]["batch_factor"] for s in samples if "batch_factor" in s["timing"]]
    return {
        "metric": name,
        "n": len(samples),
        "of": of,
        "unscored": len(samples) - len(scored),
        "score": show(fmean(scored)) if scored else None,
        "ci": [show(x) for x in interval] if interval else None,
        "prompt_tokens": fmean(s["n"] for s in samples),
        "kept": fmean(s["kept"] for s in samples),
        "nominal": _mean(samples, "nominal"),
        "payload": fmean(s["payload"] for s in samples),
        "overhead": fmean(s["overhead"] for s in samples),
        "payload_kv_head": _mean(samples, "payload_kv_head"),
        "payload_query_head": _mean(samples, "payload_query_head"),
        "full_bytes": fmean(s["full_bytes"] for s in samples),
        **halves,
        "percent_of_full": share(halves),
        "decode_peak": max((s["decode_peak"] for s in samples if "decode_peak" in s), default=None),
        "cut": sum(s["cut"] > 0 for s in samples),
        "shrunk": sum(bool(s["shrunk"]) for s in samples),
        "attended": fmean(attended) if attended else None,
        **by_bucket(samples, show),
        "timing": {
            "prefill_s": fmean(s["timing"]["prefill_s"] for s in samples),
            "compress_s": fmean(s["timing"]["compress_s"] for s in samples),
            "decode_s_per_token": sum(s["timing"]["decode_s"] for s in samples)
            / max(1, sum(s["new_tokens"] for s in samples)),
            "batch_factor": fmean(factors) if factors else None,
        },
    }


def _about_batches(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The note on memory that decode batches took beside the bytes of their rows' tokens."""
    found = [c["timing"]["batch_factor"] for r in rows for c in r["cells"] if c.get("timing", {}).get("batch_factor")]
    if not found or max(found) < 1.05:
        return []
    return [
        f"While decoding, a batch took {min(found):.1f} to {max(found):.1f} times the key and value bytes of its rows "
        "(padding, free slots, positions, room for the answer); bytes in tables are those of tokens."
    ]


def _mean(samples: Sequence[Sample], key: str) -> float | None:
    """The mean over samples; None where one has no such number."""
    values = [s[key] for s in samples if s.get(key) is not None]
    return fmean(values) if len(values) == len(samples) else None


def collect(groups: Sequence[Group], store: ResultStore, notes: Sequence[str] = ()) -> dict[str, Any]:
    """Everything that a table of these groups shows, as plain data: what ``--json`` prints.

    Each cell counts only the examples of this run; ``delta`` is the paired difference to the full cache over the
    examples that both have.
    """
    labels = list(dict.fromkeys(c.label for g in groups for c in g.cells))
    rows = []
    for label in labels:
        cells = [measured(g, next(c for c in g.cells if c.label == label), store) for g in groups]
        measures = _storage([c for c in cells if c["status"] == "measured"])
        rows.append({"method": label, "evicts": any(c["evicts"] for c in cells), "cells": cells, **measures})
    columns = [
        {
            "task": g.column,
            "metric": g.task.metric,
            "category": g.task.category,
            "floor": any(r["cells"][i].get("floor", False) for r in rows),
        }
        for i, g in enumerate(groups)
    ]
    notes = [*(about_floors(columns) if len(rows) > 1 else ()), *_about_batches(rows), *notes]
    return {
        "columns": columns,
        "rows": rows,
        "notes": [*dict.fromkeys(f"{g.task.note}." for g in groups if g.task.note), *notes, *store.warnings],
        "results": str(store.root),
    }


def measured(group: Group, cell: Cell, store: ResultStore) -> dict[str, Any]:
    """What a table shows of one cell: its status, and its summary over this run's examples or why there is none."""
    base = {"task": group.column, "cell": cell.id, "evicts": cell.chain.evicts, **fields(cell.identity)}
    refusal = store.refusal(cell.id)
    if refusal is not None:
        return {**base, "status": "refused", "reason": refusal}
    mine = {e.id for e in group.examples}
    samples = {i: s for i, s in store.samples(cell.id).items() if i in mine}
    found = store.status(cell.id) if len(samples) < len(mine) else None
    if found is not None and found.status == "failed":
        return {**base, "status": "failed", "reason": found.reason}
    if not samples:
        return {**base, "status": "missing"}
    summary = summarise(completed(cell, samples.values()), group.task.metric, len(group.task.examples))
    if not cell.chain.stages:
        base["floor"] = at_floor(group.task, [s["score"] for s in samples.values() if s["score"] is not None])
    return {**base, "status": "measured", **summary, **_difference(group, cell, samples, store)}


def _difference(group: Group, cell: Cell, samples: Mapping[str, Sample], store: ResultStore) -> dict[str, Any]:
    """The paired difference to the full cache, in printed units; nothing for the full cache itself."""
    full = next((c for c in group.cells if not c.chain.stages), None)
    if full is None or not cell.chain.stages or store.refusal(full.id) is not None:
        return {}
    baseline = store.samples(full.id)
    both = [
        (float(s["score"]), float(baseline[i]["score"]))
        for i, s in samples.items()
        if i in baseline and s["score"] is not None and baseline[i]["score"] is not None
    ]
    if not both:
        return {}
    name = group.task.metric
    if metric(name).shown is not None:
        return _shown_difference(both, metric(name).show)
    scale = metric(name).scale
    difference = stats.paired_difference([a for a, _ in both], [b for _, b in both])
    low, high = (difference.low, difference.high) if len(both) >= FEWEST else (None, None)
    interval = None if low is None or high is None else [scale * low, scale * high]
    return {"delta": scale * difference.mean, "delta_ci": interval}


def _shown_difference(both: Sequence[tuple[float, float]], show: Callable[[float], float]) -> dict[str, Any]:
    """The difference of two shown means (perplexities), with pairs resampled: both means vary together."""

    def difference(means: Sequence[stats.Pairs]) -> stats.Pairs:
        return np.array([show(float(a)) - show(float(b)) for a, b in means[0]])

    pairs = np.array(both)
    interval = stats.stratified_ci([pairs], difference, None)
    return {"delta": float(difference([pairs.mean(0, keepdims=True)])[0]), "delta_ci": interval and list(interval)}


def _bounds(name: str) -> tuple[float, float] | None:
    """The range of a score; a likelihood has none."""
    return None if metric(name).shown else (0.0, 1.0)


def _storage(cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Tokens, bytes and times of one method over all its measured cells, by mean over prompts."""
    if not cells:
        return {}
    total = sum(c["n"] for c in cells)

    def mean(key: str, of: str = "") -> float:
        return sum((c[of][key] if of else c[key]) * c["n"] for c in cells) / total

    def known(key: str) -> float | None:
        return None if any(c[key] is None for c in cells) else mean(key)

    def percent(key: str) -> float | None:
        value = known(key)
        return None if value is None else 100 * value / mean("prompt_tokens")

    halves = {key: mean(key) for key in HALVES}
    return {
        "score_mean": _mean_score(cells),
        "kept_percent": 100 * mean("kept") / mean("prompt_tokens"),
        "nominal_percent": percent("nominal"),
        "attended_percent": percent("attended"),
        "payload": mean("payload"),
        "overhead": mean("overhead"),
        "payload_kv_head": known("payload_kv_head"),
        "payload_query_head": known("payload_query_head"),
        "percent_of_full": share(halves),
        "payload_percent_of_full": 100 * halves["payload16"] / halves["full16"],
        "prefill_ms": 1000 * mean("prefill_s", "timing"),
        "compress_ms": 1000 * mean("compress_s", "timing"),
        "decode_ms_per_token": 1000 * mean("decode_s_per_token", "timing"),
    }


def _mean_score(cells: Sequence[Mapping[str, Any]]) -> float | None:
    """The mean over columns, where all are measured in the same unit."""
    units = {metric(c["metric"]).shown for c in cells}
    scores = [c["score"] for c in cells if c["score"] is not None]
    return fmean(scores) if len(scores) == len(cells) and len(units) == 1 else None
