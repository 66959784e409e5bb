"""What a published row was run with, as kvbench's knobs: the settings of papers' rows, and how a stand-in scales them.

A setting is ``key=value;key=value`` as the published CSV files have it (``kv_size=128;ratio=0.4``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvbench.errors import KvbenchError

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
        """A published number of tokens at the stand-in's length, at least one."""
        return max(1, round(count * self.length / self.of))

    def window(self, count: int) -> int:
        """A published window, likewise, but not below what a query needs."""
        return count if self.windows == "paper" else min(count, max(SHORTEST_WINDOW, self.tokens(count)))


def parse(setting: str) -> dict[str, str]:
    """The keys and values of a setting."""
    return dict(part.partition("=")[::2] for part in setting.split(";") if part)


def context(setting: Mapping[str, str]) -> int | None:
    """Tokens of the context that a row was measured in, where it says so (``context=4k``)."""
    return 1024 * int(setting["context"].removesuffix("k")) if "context" in setting else None


def method_of(method: str, setting: Mapping[str, str]) -> str:
    """kvbench's name for a published method under a setting."""
    if method == "h2o+quant" and "selection_bits" in setting:
        return "h2o"  # Q-Hitter's table 1 quantises the keys that select, not what is stored
    return METHODS.get(method, method)


def knobs(method: str, setting: str, stand_in: StandIn | None = None) -> Knobs:
    """Arguments of ``run`` by key for a published row. KvbenchError for a key that is not known here."""
    given = parse(setting)
    found: Knobs = {}
    for key, value in given.items():
        if key in FACTS:
            continue
        if key not in _KEYS:
            raise KvbenchError(
                f"the setting {key}={value} of a published row has no knob in kvbench/papers/spec/row_knobs.py"
            )
        found.update(_KEYS[key](value, stand_in))
    if "deleted_heads" in given:  # the heads that stay all keep the high group's tokens
        found["kv_size"] = found.pop("high")
    stages = method_of(method, given).split("+")
    return {_owned(key, stages): value for key, value in found.items()}


def scaled_windows(values: Mapping[str, Any], stages: Iterable[str], stand_in: StandIn) -> Knobs:
    """The windows that a preset (``values`` by full key) sets for ``stages``, at the stand-in's length."""
    return {
        f"method.{stage}.{knob}": str(stand_in.window(int(values[f"method.{stage}.{knob}"])))
        for stage in stages
        for knob in LENGTHS
        if isinstance(values.get(f"method.{stage}.{knob}"), int)
    }


def _owned(knob: str, stages: list[str]) -> str:
    """The full key of a knob that two stages of a chain own."""
    owner = {"recent": ("think", "thinkv", "l1", "l2"), "bits": ("kivi", "qhitter")}.get(knob, ())
    return next((f"method.{s}.{knob}" for s in stages if s in owner), knob)


def _size(key: str) -> Callable[[str, StandIn | None], Knobs]:
    def convert(value: str, stand_in: StandIn | None) -> Knobs:
        if value in ("full", "n/a"):
            return {}
        return {key: str(stand_in.tokens(int(value)) if stand_in else int(value))}

    return convert


def _window(key: str) -> Callable[[str, StandIn | None], Knobs]:
    def convert(value: str, stand_in: StandIn | None) -> Knobs:
        count = int(value)
        return {key: str(stand_in.window(count) if stand_in and count else count)}

    return convert


def _as(key: str, names: Mapping[str, str] | None = None) -> Callable[[str, StandIn | None], Knobs]:
    return lambda value, _: {key: (names or {}).get(value, value)}


def _budget(value: str, _: StandIn | None) -> Knobs:
    return {} if float(value) == 1 else {"kv_ratio": value}


def _rows(value: str, _: StandIn | None) -> Knobs:
    percent = re.fullmatch(r"(\d+)%n", value)
    return {"k": f"{int(percent[1]) / 100:g}" if percent else value}


def _frozen(value: str, stand_in: StandIn | None) -> Knobs:
    layers = [] if value == "none" else [int(layer) for layer in value.split("+")]
    if stand_in:
        layers = [min(layer, stand_in.layers - 1) for layer in layers]
    return {"frozen_layers": f"[{','.join(map(str, dict.fromkeys(layers)))}]"}


def _groups(value: str, stand_in: StandIn | None) -> Knobs:
    """The first and last of a row of sizes; those between fall linearly."""
    sizes = [int(size) for size in value.split("/")]
    low, high = (str(stand_in.tokens(x) if stand_in else x) for x in (min(sizes), max(sizes)))
    return {"low": low, "high": high, "kv_size": "null", "kv_ratio": "null"}


def _deleted(value: str, stand_in: StandIn | None) -> Knobs:
    return {"delete": str(max(1, round(int(value) * stand_in.heads / stand_in.heads_of))) if stand_in else value}


def _top(value: str, stand_in: StandIn | None) -> Knobs:
    if stand_in is None:
        return {"top": str(DIM if value == "all" else int(value))}
    count = stand_in.dim_of if value == "all" else int(value)
    return {"top": str(min(stand_in.dim, max(1, count * stand_in.dim // stand_in.dim_of)))}


_KEYS: Mapping[str, Callable[[str, StandIn | None], Knobs]] = {
    "kv_size": _size("kv_size"),
    "kv": lambda value, _: {},
    "budget": _budget,
    "keep": _as("kv_ratio"),
    "ratio": _as("ratio"),
    "v_ratio": _as("value_ratio"),
    "recent": _window("recent"),
    "bits": lambda value, _: {"bits": value.partition("/")[0]},
    "selection_bits": lambda value, _: {} if value == "16" else {"score_bits": value},
    "t": _as("T"),
    "k": _rows,
    "p": _as("p"),
    "ranking": _as("ranking"),
    "frozen": _frozen,
    "norm": _as("norm"),
    "groups": _as("groups"),
    "group_sizes": _groups,
    "kv_high": _size("high"),
    "kv_low": _size("low"),
    "deleted_heads": _deleted,
    "topk": _top,
    "partition": _as("grouping", {"effective_rank": "calibrated"}),
}
