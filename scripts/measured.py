"""The page on what is measured, made from the configuration, loaders and metrics that runs use. It reads no data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from kvbench.base.conf import conf_dir
from kvbench.base.example import Example
from kvbench.plan import presets
from kvbench.report import writers
from kvbench.tasks import longbench
from kvbench.tasks.base import Task, load_tasks
from kvbench.tasks.metrics import METRICS
from kvbench.tasks.rowset import RowFormat

HEAD = """# Data and metrics

This page describes every dataset, prompt format, preset, metric and model. It is generated from the configuration,
loaders and metrics that runs use. Numbers of examples are those that a dataset's own description states.
"""


def page() -> str:
    """Return the whole page as Markdown."""
    parts = [HEAD, *_datasets(), *_longbench(), *_prompts(), *_presets(), *_metrics(), *_models()]
    return "\n".join(parts).rstrip() + "\n"


def _entries(group: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield (id, first comment, content) of every YAML file of a group."""
    for path in sorted((conf_dir() / group).glob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        content = yaml.safe_load(text) or {}
        inner = content.get(path.stem)
        yield path.stem, text.splitlines()[0].lstrip("# "), inner if isinstance(inner, dict) else content


def _datasets() -> Iterator[str]:
    yield "## Datasets\n"
    for name, about, entry in _entries("dataset"):
        yield f"### {name}\n\n{about}\n"
        hub = entry.get("hub") or {}
        if hub:
            where = hub.get("repo") or "the address of each file"
            state = "verified" if hub.get("verified") else "not verified"
            yield f"From {where}, revision {hub.get('revision', '-')}, {state}. Licence: {hub.get('licence', '-')}.\n"
        knobs = {k: v for k, v in entry.items() if not k.startswith("_") and k not in ("hub", "default_limit")}
        if knobs:
            yield "Options: " + ", ".join(f"`{k}={_plain(v)}`" for k, v in knobs.items()) + ".\n"
        if entry.get("default_limit"):
            yield f"Measured by default: {entry['default_limit']} examples per task.\n"
        if name == "tiny":  # kvbench itself makes this dataset
            tasks = load_tasks(name, entry, (), None)
            head = ("task", "examples", "metric", "of the answer")
            yield writers.table(head, [(t.id, str(len(t.examples)), t.metric, _answering(t)) for t in tasks])
        if "_rows_" in entry:
            yield from _format(RowFormat(**entry["_rows_"]))


def _format(form: RowFormat) -> Iterator[str]:
    """Yield a line that says how a row's answer is scored, and the prompt's template."""
    answer = Task("", (Example("", "", (), 1),), "", "", **form.task)
    metric = form.metric if isinstance(form.metric, str) else " or ".join(form.metric)
    yield f"Metric: {metric}; of the answer: {_answering(answer)}.{f' Note: {form.note}.' if form.note else ''}\n"
    yield f"Prompt:\n\n```text\n{form.prompt}{form.question}\n```\n"


def _answering(task: Task) -> str:
    rules = []
    if task.first_line:
        rules.append("first line only")
    if task.cut_at:
        rules.append(f"up to `{task.cut_at!r}`")
    if task.stop:
        rules.append("ends at " + ", ".join(repr(s) for s in task.stop))
    if not task.chat:
        rules.append("no chat template")
    return "; ".join(rules) or "whole"


def _longbench() -> Iterator[str]:
    yield "## LongBench's tasks\n"
    yield (
        "Prompts and answer lengths are read from the official files. Metrics and the first-line rule are those of the "
        "official evaluator.\n"
    )
    rows = [
        (
            name,
            str(spec.size),
            spec.metric,
            spec.category,
            "first line only" if spec.first_line else "whole",
            "yes" if spec.chat else "no",
            "yes" if spec.extended else "no",
        )
        for name, spec in longbench.TASKS.items()
    ]
    yield writers.table(
        ("task", "examples", "metric", "category", "of the answer", "chat template", "in LongBench-E"), rows
    )


def _prompts() -> Iterator[str]:
    yield "## Prompt formats (`prompt=`)\n"
    head = ("format", "template", "truncation", "limit", "least new tokens", "what it is")
    yield writers.table(
        head,
        [
            (*(_plain(e[k]) for k in ("name", "template", "truncation", "limits", "min_new_tokens")), about)
            for _, about, e in _entries("prompt")
        ],
    )


def _presets() -> Iterator[str]:
    yield "## Presets (`preset=`)\n"
    yield (
        "The values of a preset replace kvbench's defaults, and an option that you type overrides the preset. You "
        "choose budgets that a preset does not name. [Papers](papers/index.md) and `kvbench reference` have every "
        "value with its source.\n"
    )
    yield writers.table(("preset", "what it is"), [(name, presets.about(name)) for name in presets.available()])


def _metrics() -> Iterator[str]:
    yield "## Metrics\n"
    rows = [(m.name, m.description, m.source, str(m.revision)) for m in METRICS.values()]
    yield writers.table(("metric", "what it is", "source", "revision"), rows)
    yield (
        "Intervals are 95 % intervals over examples: Wilson's for scores, t intervals for values without a range, such "
        "as log losses. If all scores are equal, the interval says what that many equal scores cannot exclude. Below 8 "
        "examples there is none.\n"
    )


def _models() -> Iterator[str]:
    yield "## Models (`model=`)\n"
    head = ("model", "checkpoint", "revision", "context", "prompt limits", "stops")
    keys = ("path", "revision", "context", "prompt_limits", "stop")
    yield writers.table(head, [(name, *(_plain(e[k]) for k in keys)) for name, _, e in _entries("model")])


def _plain(value: Any) -> str:
    if value is None or value == {} or value == []:
        return "-"
    if isinstance(value, dict):
        return ", ".join(f"{k}: {v}" for k, v in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
