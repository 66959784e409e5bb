"""The tiny model in place of the papers' models: which of its six tasks stands for which dataset."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from kvbench.errors import KvbenchError
from kvbench.papers.declared import group_of
from kvbench.papers.settings import StandIn
from kvbench.tasks.longbench import CODE, FEW_SHOT, MULTI, SINGLE, SUMMARY, SYNTHETIC

MODEL = "tiny"
PROMPT = 1024
TINY = StandIn(length=PROMPT, of=PROMPT, layers=6, heads=8, dim=32)

BY_GROUP: Mapping[str, str] = MappingProxyType(
    {
        SINGLE: "needle",
        MULTI: "hop",
        SUMMARY: "listing",
        FEW_SHOT: "labels",
        SYNTHETIC: "multikey",
        CODE: "code",
    }
)
OTHERS: Mapping[str, str] = MappingProxyType(
    {
        "needle": "needle",
        "gsm8k": "hop",
        "gpqa": "labels",
        "theoremqa": "multikey",
        "truthfulqa": "listing",
        "coqa": "needle",
        "mdqa": "needle",
        "xsum": "listing",
        "cnn_dailymail": "hop",
        "wikitext103": "listing",
        "ptb": "code",
    }
)
SAMPLES = {
    "uncomp-group": {"samples": "32"},
    "uncomp-stage": {"samples": "32"},
    "palu": {"samples": "32"},
    "asvd": {"samples": "32"},
}
"""Calibration windows: the tiny model's statistics settle with fewer than the papers' models need."""


def task_of(dataset: str) -> str:
    """The tiny task that stands for a published dataset."""
    task = BY_GROUP.get(group_of(dataset)) or OTHERS.get(dataset)
    if task is None:
        raise KvbenchError(f"no task of the tiny suite stands for {dataset}; say which in kvbench/papers/standin.py")
    return task


def mapping(datasets: Iterable[str]) -> str:
    """In words: which task stands for which datasets."""
    found: dict[str, list[str]] = {}
    for dataset in dict.fromkeys(datasets):
        found.setdefault(task_of(dataset), []).append(dataset)
    return "; ".join(f"{task} for {', '.join(names)}" for task, names in found.items())
