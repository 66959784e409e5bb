"""The divergence of llama.cpp's caches from its own f16 cache, token by token, in its perplexity tool's windows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict

import torch
from torch import Tensor

from kvbench.base.example import Example, scored_text
from kvbench.base.formatting import format_number, with_interval
from kvbench.base.progress import Tick, progress
from kvbench.engine.divergence import compare_logits
from kvbench.engines.llamacpp import LlamaCpp
from kvbench.engines.measure import open_writer, write_metrics
from kvbench.engines.rows import EngineRow, EngineRun
from kvbench.plan.cells import Group
from kvbench.report.table import Table
from kvbench.run.forced import build_text_fidelity
from kvbench.store.fidelity import FidelitySummary, TextFidelity, summarise_texts

REFERENCE = "reference"
"""The kind of text that is compared: the windows' own tokens."""


def measure(run: EngineRun, exact: EngineRow, quiet: bool = False) -> None:
    """Compare every row with ``exact``, llama.cpp's f16 cache, on the windows that the row lacks."""
    uncompared = run.count_unanswered()
    if not any(uncompared.values()):
        return
    try:
        # if one of the engines fails to open, those before it are closed, too
        with ExitStack() as stack:
            reference = _open_llamacpp(exact)
            stack.callback(reference.close)
            engines = {}
            for row in run.rows:
                if uncompared[row.label]:
                    engines[row.label] = _open_llamacpp(row)
                    stack.callback(engines[row.label].close)
            tick = stack.enter_context(progress(uncompared, quiet, unit="windows"))
            for group in run.plan.groups:
                _measure_group(run, group, reference, engines, tick)
    finally:
        # summarise what is stored even if an error or Ctrl-C ended the comparison early
        for group in run.plan.groups:
            for row in run.rows:
                summary = summarise_texts(_read_stored_texts(run, group, row))
                if summary is not None:
                    write_metrics(run, group, row, {"fidelity": {REFERENCE: asdict(summary)}})


def _measure_group(
    run: EngineRun, group: Group, reference: LlamaCpp, engines: Mapping[str, LlamaCpp], tick: Tick
) -> None:
    """Compare rows with ``reference`` on the windows of one task, and store each row's divergences.

    The reference reads each window once for all rows.

    reference: llama.cpp with the exact cache.
    engines: llama.cpp with each row's cache, by label.
    tick: the progress line, which counts windows by label.
    """
    # the ids of the windows that each row lacks, by the row's label
    missing: dict[str, set[str]] = {}
    for row in run.rows:
        missing[row.label] = {example.id for example in run.find_unanswered(group, row)}
    with ExitStack() as stack:
        writers = {}
        for row in run.rows:
            if missing[row.label]:
                writers[row.label] = stack.enter_context(open_writer(run, group, row, engines[row.label]))
        for example in group.examples:
            labels = [label for label, ids in missing.items() if example.id in ids]
            # no row lacks this window, so the reference need not read it
            if not labels:
                continue
            ids = scored_text(example).ids
            exact_logits = reference.compute_logits(ids)
            for label in labels:
                logits = engines[label].compute_logits(ids)
                writers[label].append(build_window_record(example, exact_logits, logits))
                tick(label, 1)


def _open_llamacpp(row: EngineRow) -> LlamaCpp:
    engine = row.open()
    assert isinstance(engine, LlamaCpp), "only llama.cpp gives the logits of every token"
    return engine


def build_window_record(example: Example, exact: Tensor, logits: Tensor) -> dict[str, object]:
    """Return the record of a window's divergence, as it is stored.

    As in llama.cpp's perplexity tool, only the second half of a window counts: predictions from ``scored_from`` on.

    exact: the logits [T, V] after each token with the exact cache.
    logits: the logits [T, V] after each token with the row's cache.
    """
    text = scored_text(example)
    assert text.scored_from is not None, "only windows of a long text are compared"
    targets = torch.tensor(text.ids[text.scored_from + 1 :])
    # the logits after token i predict token i + 1
    scored = slice(text.scored_from, len(text.ids) - 1)
    # ``compare_logits`` takes a batch of rows; here it is one row
    (divergence,) = compare_logits(exact[scored], logits[None, scored], targets)
    losses = torch.nn.functional.cross_entropy(logits[scored].double(), targets, reduction="sum")
    # nobody has measured how far rounding alone moves llama.cpp's logits, so the floor is 0
    fidelity = build_text_fidelity(divergence, float(losses), floor=0.0, document=text.document)
    return {
        "id": example.id,
        "prediction": "",
        "score": float(losses) / text.divisor,
        "meta": example.facts(),
        "fidelity": {REFERENCE: fidelity.record()},
    }


def _read_stored_texts(run: EngineRun, group: Group, row: EngineRow) -> list[TextFidelity]:
    lines = run.plan.store.lines(run.make_cell(group, row).id)
    records = [lines[example.id]["fidelity"] for example in group.examples if example.id in lines]
    return [TextFidelity.read(record[REFERENCE]) for record in records]


def summarise_rows(run: EngineRun) -> dict[str, FidelitySummary]:
    """Return the divergence of each row over all its stored windows, by label. Rows without windows are left out."""
    by_label = {}
    for row in run.rows:
        texts: list[TextFidelity] = []
        for group in run.plan.groups:
            texts += _read_stored_texts(run, group, row)
        summary = summarise_texts(texts)
        if summary is not None:
            by_label[row.label] = summary
    return by_label


def build_table(by_label: Mapping[str, FidelitySummary]) -> Table:
    """Return the table of divergences: a row for each cache, by its label."""
    heads = ["cache", "KL, nats a token", "same first choice, %", "perplexity", "of f16's"]
    rows = []
    for label, summary in by_label.items():
        texts = (
            label,
            with_interval(summary.kl_mean, summary.ci, 3, significant=True, gap=" "),
            format_number(summary.top1),
            format_number(summary.perplexity, 3),
            format_number(summary.ppl_ratio, 4),
        )
        rows.append(texts)
    return Table(tuple(heads), tuple(rows))


def build_notes(by_label: Mapping[str, FidelitySummary]) -> Sequence[str]:
    """Return the notes below the table of at least one row: how the numbers are computed, and over how much text."""
    # all rows are compared on the same windows
    first = next(iter(by_label.values()))
    return [
        "KL: mean divergence of the next-token distribution from that of llama.cpp's own f16 cache, over the second "
        f"half of each window of its perplexity tool. [95 % intervals over documents.] n = {first.n} windows, "
        f"{first.n_tokens:,} tokens. Every token is stored in the cache before a later one reads it."
    ]
