"""The settings of a run in one line, as its report prints them."""

from __future__ import annotations

from collections.abc import Mapping

from kvbench.base.conf import entries
from kvbench.plan import presets
from kvbench.plan.config import DatasetConfig
from kvbench.plan.run_plan import RunPlan


def describe_settings(prepared: RunPlan) -> str:
    """Return the run's settings as one line of text. It tells tables with the same rows and columns apart."""
    cfg = prepared.cfg
    parts = [f"Model {cfg.model_name}, {prepared.dtype}"]
    if cfg.preset:
        methods: list[str] = []
        for configured in cfg.chains:
            methods += [stage.id for stage in configured.chain.stages]
        untouched_methods = presets.untouched(cfg.preset, cfg.model.name, methods)
        words = f"preset {cfg.preset}"
        if untouched_methods:
            words += f" (sets nothing of {', '.join(untouched_methods)})"
        parts.append(words)
    default_entries = entries("dataset")
    for dataset in cfg.datasets:
        parts.append(_describe_dataset(dataset, default_entries[dataset.name]))
    parts.append(_describe_prompt(prepared))
    if cfg.sampling.temperature:
        parts.append(f"temperature {cfg.sampling.temperature:g}, top_p {cfg.sampling.top_p:g}")
    if cfg.sampling.samples_per_prompt > 1:
        parts.append(f"score of a prompt: mean over {cfg.sampling.samples_per_prompt} answers")
    # a dataset that is named twice with different tasks has the same text both times; say it once
    return "; ".join(dict.fromkeys(parts)) + "."


def _describe_dataset(dataset: DatasetConfig, default_entry: Mapping[str, object]) -> str:
    """Return the name of a dataset with its knobs that differ from the defaults.

    default_entry: the dataset's entry in conf/dataset, with the default of each knob.
    """
    words = [f"dataset {dataset.name}"]
    for knob, value in dataset.knobs.items():
        # entries that begin with an underscore, such as _target_, are no knobs
        if knob.startswith("_") or knob not in default_entry or value == default_entry[knob]:
            continue
        if isinstance(value, list):
            words.append(f"{knob}={','.join(str(item) for item in value)}")
        else:
            words.append(f"{knob}={value}")
    return " ".join(words)


def _describe_prompt(prepared: RunPlan) -> str:
    """Return the prompt policy in words: its name, its length, and its departures from the defaults."""
    prompt = prepared.cfg.prompt
    parts = [f"prompt {prompt.name}"]
    if prompt.max_length:
        parts.append(f"at most {prompt.max_length} tokens")
    else:
        parts.append("cut to the context only")
    if prompt.template != "off":
        parts.append(f"template {prompt.template}")
    if not prompt.bos:
        parts.append("no special tokens")
    # tasks of one dataset agree on whether the question is withheld; if several values were asked for, each column of
    # the dataset names its value behind the task's name
    query_aware_by_name = {}
    for group in prepared.groups:
        dataset = group.task.id.partition("/")[0]
        swept_values = group.column.split()[1:]
        query_aware_by_name[" ".join([dataset, *swept_values])] = group.task.query_aware
    withheld = [name for name, query_aware in query_aware_by_name.items() if not query_aware]
    if withheld and len(withheld) == len(query_aware_by_name):
        parts.append("question withheld")
    elif withheld:
        parts.append(f"question withheld in {' and '.join(withheld)}")
    return ", ".join(parts)
