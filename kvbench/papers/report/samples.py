"""Single examples for the page: prompt, reference, each method's answer, and the tokens that it kept."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from kvbench.base.errors import UsageError
from kvbench.base.example import Example
from kvbench.methods.core.prompt_cache import Cache
from kvbench.plan.cells import Group
from kvbench.run import experiment
from kvbench.run.experiment import RunPlan

LEVELS = 10
"""Shades of a token: the share of layers and heads that kept it, from none (0) to all (9)."""


def collect(prepared: RunPlan, per_task: int) -> list[dict[str, Any]]:
    """Return the first ``per_task`` examples of every task with all methods' answers, measured where missing.

    Prompts are read again to see what each method keeps: positions are not part of what a run stores.
    """
    experiment.measure(prepared, quiet=True)
    model = prepared.load_model()
    host = experiment.make_host(prepared, model)
    examples = []
    for group in prepared.bound(prepared.groups, model, quiet=True):
        for example in group.examples[:per_task]:
            if not example.tokens:
                examples.append(_example(host, prepared, group, example))
    return examples


def _example(host: Any, prepared: RunPlan, group: Group, example: Example) -> dict[str, Any]:
    """Return one example with every method's answer and kept tokens."""
    encoded = host.encode(example, group.task)
    methods = []
    cells = [c for c in group.cells if example.id in prepared.store.samples(c.id)]
    caches: list[Cache | None] = [None] * len(cells)
    with suppress(UsageError):  # a chain that cannot read this prompt
        caches = [*host.prefill(encoded.ids, [c.chain for c in cells])]
    for cell, cache in zip(cells, caches, strict=True):
        line = prepared.store.samples(cell.id)[example.id]
        kept = "" if cache is None else "".join(map(str, shades(cache).tolist()))
        answer = {"label": cell.label, "prediction": line.prediction, "score": line.score}
        methods.append({**answer, "kept": kept, "cell": cell.id})
    return {
        "task": group.column,
        "id": example.id,
        "metric": group.task.metric,
        "tokens": [host.tokenizer.decode([i]) for i in encoded.ids],
        "question": host.tokenizer.decode(list(encoded.question)) if encoded.question else "",
        "answers": list(example.answers),
        "methods": methods,
    }


def shades(cache: Cache) -> Tensor:
    """Return for each prompt token the share of layers and heads that hold it, in LEVELS steps [n]."""
    counts = torch.zeros(cache.seen)
    heads = 0
    for layer in cache.layers:
        for positions in layer.kept_positions():
            counts[positions.long().cpu()] += 1
            heads += 1
    return (counts / max(1, heads) * (LEVELS - 1)).round().long()
