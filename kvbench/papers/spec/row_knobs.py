"""Settings of published rows as kvbench's knobs, and their sizes on a stand-in.

A setting is ``key=value;key=value`` as the published CSV files have it (``kv_size=128;ratio=0.4``).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvbench.base.errors import KvbenchError
from kvbench.methods.core import registry

Knobs = dict[str, str]

SHORTEST_WINDOW = 2
"""Tokens below which no window of a stand-in is scaled: its prompts end with the key that they ask for."""

METHODS = {
    "full+think": "think",
    "full+thinkv": "thinkv",
    "kivi+think": "think+kivi",
    "uncomp-stage": "uncomp-stage+uncomp-group",
}
FACTS = {
    *("mem_m", "matched_to", "compress_pct", "block", "gpu", "samples", "same_memory", "where", "id", "layer"),
    *("batch", "prompt", "gen", "input", "output", "context", "shots", "windows"),
}
"""Keys that describe a row, its workload or its prompts, and set no knob of a method."""

HEADS, DIM = 32, 128
"""Query heads and head dimension of the models of the papers' ablations (LLaMA-2-7B)."""

RENAMED = {"kv_high": "high", "kv_low": "low", "keep": "kv_ratio", "v_ratio": "value_ratio", "t": "T"}
"""Keys of settings that are knobs by another name."""

OWNERS = {"recent": ("think", "thinkv", "l1", "l2"), "bits": ("kivi", "qhitter")}
"""Knobs that two stages of a chain have, and the stages that a published row means."""

LENGTHS = ("window", "recent", "observed", "sinks")
"""Knobs of presets that count tokens and follow the prompt's length on a stand-in."""


@dataclass(frozen=True)
class StandIn:
    """A small model in place of a published one: its prompts have ``length`` tokens where the paper's had ``of``.

    ``windows``: scaled, or paper where they stay as they are. ``layers``, ``heads`` (query heads) and ``dim`` (of a
    head) are the stand-in's own, ``heads_of`` and ``dim_of`` those that published numbers of heads and of dimensions
    are of.
    """

    length: int
    of: int
    layers: int
    heads: int
    dim: int
    heads_of: int = HEADS
    dim_of: int = DIM
    windows: str = "scaled"

    def tokens(self, count: int) -> int:
        """Return a published number of tokens at the stand-in's length, at least one."""
        return max(1, round(count * self.length / self.of))

    def window(self, count: int) -> int:
        """Return a published window at the stand-in's length, but not below what a query needs."""
        return count if self.windows == "paper" else min(count, max(SHORTEST_WINDOW, self.tokens(count)))


AS_PUBLISHED = StandIn(1, 1, layers=1 << 16, heads=HEADS, dim=DIM, windows="paper")
"""A published model itself: its numbers stay."""


def parse(setting: str) -> dict[str, str]:
    """Return the keys and values of a setting."""
    return dict(part.partition("=")[::2] for part in setting.split(";") if part)


def method_of(method: str, setting: Mapping[str, str]) -> str:
    """Return kvbench's name for a published method under a setting."""
    if method == "h2o+quant" and "selection_bits" in setting:
        return "h2o"  # Q-Hitter's table 1 quantises the keys that select, not what is stored
    return METHODS.get(method, method)


def knobs(method: str, setting: str, stand_in: StandIn | None = None) -> Knobs:
    """Return arguments of ``run`` by key for a published row; raise KvbenchError for an unknown key."""
    settings = parse(setting)
    stages = method_of(method, settings).split("+")
    knob_names = {knob for stage in stages if stage in registry.available() for knob in registry.knob_names(stage)}
    arguments: Knobs = {}
    for key, value in settings.items():
        if key not in FACTS:
            arguments |= _knobs(key, value, stand_in or AS_PUBLISHED, knob_names)
    if "deleted_heads" in settings:  # the heads that stay all keep the high group's tokens
        arguments["kv_size"] = arguments.pop("high")
    full_keys = {k: f"method.{s}.{k}" for k, owners in OWNERS.items() for s in reversed(stages) if s in owners}
    return {full_keys.get(key, key): value for key, value in arguments.items()}


def scaled_windows(values: Mapping[str, Any], stages: Iterable[str], stand_in: StandIn) -> Knobs:
    """Return the windows that a preset (``values`` by full key) sets for ``stages``, at the stand-in's length."""
    return {
        f"method.{stage}.{knob}": str(stand_in.window(int(values[f"method.{stage}.{knob}"])))
        for stage in stages
        for knob in LENGTHS
        if isinstance(values.get(f"method.{stage}.{knob}"), int)
    }


def _knobs(key: str, value: str, to: StandIn, known: Container[str]) -> Knobs:
    """Return the knobs that one part of a setting sets on a stand-in; ``known`` are those of the row's methods."""
    match key:
        case "kv_size" | "kv_high" | "kv_low":
            return {} if value in ("full", "n/a") else {RENAMED.get(key, key): str(to.tokens(int(value)))}
        case "recent":
            return {key: str(to.window(int(value)) if int(value) else 0)}
        case "kv":
            return {}
        case "budget":
            return {} if float(value) == 1 else {"kv_ratio": value}
        case "bits":
            return {key: value.partition("/")[0]}
        case "selection_bits":
            return {} if value == "16" else {"score_bits": value}
        case "k":  # a row, or per cent of the prompt's
            return {key: f"{int(value.removesuffix('%n')) / 100:g}" if value.endswith("%n") else value}
        case "frozen":
            layers = [] if value == "none" else [min(int(layer), to.layers - 1) for layer in value.split("+")]
            return {"frozen_layers": f"[{','.join(map(str, dict.fromkeys(layers)))}]"}
        case "group_sizes":  # the first and last of a row of sizes; those between fall linearly
            sizes = [to.tokens(int(size)) for size in value.split("/")]
            return {"low": str(min(sizes)), "high": str(max(sizes)), "kv_size": "null", "kv_ratio": "null"}
        case "deleted_heads":
            return {"delete": str(max(1, round(int(value) * to.heads / to.heads_of)))}
        case "topk":
            count = to.dim_of if value == "all" else int(value)
            return {"top": str(min(to.dim, max(1, count * to.dim // to.dim_of)))}
        case "partition":
            return {"grouping": "calibrated" if value == "effective_rank" else value}
        case _ if key in RENAMED or key in known:
            return {RENAMED.get(key, key): value}
    raise KvbenchError(f"the setting {key}={value} of a published row has no knob in kvbench/papers/spec/row_knobs.py")
