"""The divergence of llama.cpp's caches from its own f16 cache, token by token, in its perplexity tool's windows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kvbench.base.example import Example
from kvbench.base.progress import progress
from kvbench.base.version import version
from kvbench.engine.divergence import Divergence, compare
from kvbench.engines.llamacpp import LlamaCpp
from kvbench.engines.rows import EngineRow, EngineRun
from kvbench.plan.cells import Group
from kvbench.report.table import Table
from kvbench.store.fidelity import FidelitySummary, TextFidelity, summarise_texts
from kvbench.store.provenance import git_commit

REFERENCE = "reference"
"""The kind of text that is compared: the windows' own tokens."""


def measure(run: EngineRun, exact: EngineRow, quiet: bool = False) -> None:
    """Compare every row with ``exact``, llama.cpp's f16 cache, on the windows that the row lacks."""
    totals = {row.label: sum(len(run.left(group, row)) for group in run.run.groups) for row in run.rows}
    if not any(totals.values()):
        return
    reference = _opened(exact)
    engines = {row.label: _opened(row) for row in run.rows if totals[row.label]}
    try:
        with progress(totals, quiet, unit="windows") as tick:
            for group in run.run.groups:
                for example in group.examples:
                    lacking = [row for row in run.rows if example in run.left(group, row)]
                    if not lacking:
                        continue
                    exact_logits = reference.logits(example.tokens)
                    for row in lacking:
                        logits = engines[row.label].logits(example.tokens)
                        _store(run, group, row, engines[row.label], record(example, exact_logits, logits))
                        tick(row.label, 1)
    finally:
        reference.close()
        for engine in engines.values():
            engine.close()


def _opened(row: EngineRow) -> LlamaCpp:
    engine = row.open()
    assert isinstance(engine, LlamaCpp), "only llama.cpp gives the logits of every token"
    return engine


def record(example: Example, exact: Tensor, logits: Tensor) -> dict[str, Any]:
    """Return a window's divergence as it is stored, from the logits [T, V] of both caches after each token.

    Predictions count from the middle of the window on, as in llama.cpp's tool.
    """
    first = int(example.meta["scored_from"])
    targets = torch.tensor(example.tokens[first + 1 :])
    # the logits after token i predict token i + 1
    scored = slice(first, len(example.tokens) - 1)
    (divergence,) = compare(exact[scored], logits[None, scored], targets)
    losses = torch.nn.functional.cross_entropy(logits[scored].double(), targets, reduction="sum")
    fidelity = _fidelity(divergence, float(losses), str(example.meta.get("document", "")))
    return {
        "id": example.id,
        "prediction": "",
        "score": float(losses) / float(example.meta["divisor"]),
        "meta": dict(example.meta),
        "fidelity": {REFERENCE: fidelity.record()},
    }


def _fidelity(divergence: Divergence, loss: float, document: str) -> TextFidelity:
    """Return a comparison as results store it. Rounding's own part is not known of llama.cpp: the floor is 0."""
    return TextFidelity(
        kl=tuple(float(f"{x:.4g}") for x in divergence.kl.tolist()),
        same="".join("1" if same else "0" for same in divergence.same.tolist()),
        log_ratio=float(divergence.log_ratio.sum()),
        shift=float(divergence.shift.square().sum()),
        loss=loss,
        floor=0.0,
        document=document,
    )


def _store(run: EngineRun, group: Group, row: EngineRow, engine: LlamaCpp, line: Mapping[str, Any]) -> None:
    """Store one window of a row."""
    cell = run.cell(group, row)
    facts = {"kvbench": version(), "commit": git_commit(), "model": run.run.cfg.model_name}
    facts |= engine.facts()
    facts["device"] = f"{facts['engine']} {facts['version']}"
    writer = run.run.store.open(cell, facts, shard=0, mix=run.run.cfg.mix)
    try:
        writer.append(line)
    finally:
        writer.close()
        run.run.store.writers.pop(cell.id, None)


def summaries(run: EngineRun) -> dict[str, FidelitySummary]:
    """Return the divergence of each row over all windows that are stored, by label."""
    found = {}
    for row in run.rows:
        texts: list[TextFidelity] = []
        for group in run.run.groups:
            lines = run.run.store.lines(run.cell(group, row).id)
            for example in group.examples:
                if example.id in lines:
                    texts.append(TextFidelity.read(lines[example.id]["fidelity"][REFERENCE]))
        summary = summarise_texts(texts)
        if summary is not None:
            found[row.label] = summary
    return found


def table(found: Mapping[str, FidelitySummary]) -> Table:
    """Return the table of divergences, a row for each cache."""
    heads = ["cache", "KL, nats a token", "same first choice, %", "perplexity", "of f16's"]
    rows = []
    for label, summary in found.items():
        texts = [label, f"{summary.kl_mean:.3g}", f"{summary.top1:.1f}", f"{summary.perplexity:.3f}"]
        if summary.ci is not None:
            texts[1] += f" [{summary.ci[0]:.2g}, {summary.ci[1]:.2g}]"
        rows.append((*texts, f"{summary.ppl_ratio:.4f}"))
    return Table(tuple(heads), tuple(rows))


def notes(found: Mapping[str, FidelitySummary]) -> Sequence[str]:
    """Return what the numbers mean."""
    first = next(iter(found.values()))
    return [
        "KL: mean divergence of the next-token distribution from that of llama.cpp's own f16 cache, over the second "
        f"half of each window of its perplexity tool. [95 % intervals over documents.] n = {first.n} windows, "
        f"{first.n_tokens:,} tokens. Every token is stored in the cache before a later one reads it."
    ]
