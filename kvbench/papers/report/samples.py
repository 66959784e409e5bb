"""Single examples for the page: prompt, reference, each method's answer, and the tokens that it kept."""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor

from kvbench.base.errors import UsageError
from kvbench.base.example import Example
from kvbench.methods.core.prompt_cache import PromptCache
from kvbench.plan.cells import Group
from kvbench.plan.run_plan import RunPlan
from kvbench.report.looks import look_of
from kvbench.run import experiment
from kvbench.run.host import Host

LEVELS = 10
"""The shades of a token, by the share of layers and heads that kept it: from none (0) to all (9)."""


def collect_samples(prepared: RunPlan, per_task: int) -> list[dict[str, object]]:
    """Return the first ``per_task`` examples of every task with all methods' answers, measured where missing.

    Prompts are read again to see what each method keeps: positions are not part of what a run stores.
    """
    experiment.measure(prepared, quiet=True)
    model = prepared.load_model()
    host = experiment.make_host(prepared, model)
    examples = []
    # ``bound`` gives methods their calibrations, without which some cannot read a prompt
    for group in prepared.bound(prepared.groups, model, quiet=True):
        for example in group.examples[:per_task]:
            # a text that is scored by its likelihood alone has no answers to show
            if example.scored is None:
                examples.append(_record_example(host, prepared, group, example))
    return examples


def _record_example(host: Host, prepared: RunPlan, group: Group, example: Example) -> dict[str, object]:
    encoded = host.encode(example, group.task)
    cells = [cell for cell in group.cells if example.id in prepared.store.samples(cell.id)]
    caches: list[PromptCache | None] = [None] * len(cells)
    # a chain that cannot read this prompt leaves all methods of the group without shades
    with suppress(UsageError):
        caches = list(host.prefill(encoded.ids, [cell.chain for cell in cells]))
    methods = []
    for cell, cache in zip(cells, caches, strict=True):
        sample = prepared.store.samples(cell.id)[example.id]
        digits = ""
        if cache is not None:
            # shades are below 10, so each is one digit
            digits = "".join(map(str, shade_tokens(cache).tolist()))
        methods.append(
            {
                "label": cell.label,
                "prediction": sample.prediction,
                "score": sample.score,
                "kept": digits,
                "cell": cell.id,
                "color": look_of(cell.label).color,
            }
        )
    # the question is empty if the prompt already holds it
    question = host.tokenizer.decode(list(encoded.question)) if encoded.question else ""
    return {
        "task": group.column,
        "id": example.id,
        "metric": group.task.metric,
        # one text a token, to each of which the page gives its shade
        "tokens": [host.tokenizer.decode([token]) for token in encoded.ids],
        "question": question,
        "answers": list(example.answers),
        "methods": methods,
    }


def shade_tokens(cache: PromptCache) -> Tensor:
    """Return the shade of each prompt token, from 0 to LEVELS - 1: the share of all layers' heads that keep it.

    The result is a tensor of whole numbers [n] for n prompt tokens.
    """
    # each number says how many heads keep a token
    counts = torch.zeros(cache.seen)
    heads = 0
    for layer in cache.layers:
        for positions in layer.kept_positions():
            counts[positions.long().cpu()] += 1
            heads += 1
    # the share c / H of a token that c of all layers' H heads keep; a cache without layers has no heads
    shares = counts / max(1, heads)
    return (shares * (LEVELS - 1)).round().long()
