"""Settings of published rows as kvbench's knobs, and their sizes on a stand-in (a small substitute model).

A setting is ``key=value;key=value`` as in the published CSV files (``kv_size=128;ratio=0.4``).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvbench.base.errors import KvbenchError
from kvbench.methods.core import registry

Knobs = dict[str, str]
"""Arguments of ``run``, as they are typed, by key."""

SHORTEST_WINDOW = 2
"""The fewest tokens of a scaled window. A stand-in's prompts end with the key that they ask for: a window must hold it.
"""

METHODS = {
    "full+think": "think",
    "full+thinkv": "thinkv",
    "kivi+think": "think+kivi",
    "uncomp-stage": "uncomp-stage+uncomp-group",
}
"""kvbench's name of a method by the published name, if the two differ."""
FACTS = {
    "mem_m",
    "matched_to",
    "compress_pct",
    "block",
    "gpu",
    "samples",
    "same_memory",
    "where",
    "id",
    "layer",
    "batch",
} | {"prompt", "gen", "input", "output", "context", "shots", "windows"}
"""Keys that describe a row, its workload or its prompts, and set no knob of a method."""

HEADS, DIM = 32, 128
"""The number of query heads and the head dimension of LLaMA-2-7B, the model of the papers' ablations."""

RENAMED = {"kv_high": "high", "kv_low": "low", "keep": "kv_ratio", "v_ratio": "value_ratio", "t": "T"}
"""The name of the knob by the key of a published setting, if the two differ."""

OWNERS = {"recent": ("think", "thinkv", "l1", "l2"), "bits": ("kivi", "qhitter")}
"""By knob that two stages of a chain can have: the stages for which a published row states it."""

LENGTHS = ("window", "recent", "observed", "sinks")
"""Knobs of presets that count tokens and follow the prompt's length on a stand-in."""


@dataclass(frozen=True)
class StandIn:
    """The sizes of a substitute model and of the published model, by which a row's numbers are scaled.

    length, paper_length: the tokens of the stand-in's prompts and of the paper's.
    layers, heads, dim: the stand-in's layers, query heads and dimensions of a head.
    paper_heads, paper_dim: the published model's query heads and dimensions of a head.
    windows: ``scaled``, or ``paper`` to keep windows as published.
    """

    length: int
    paper_length: int
    layers: int
    heads: int
    dim: int
    paper_heads: int = HEADS
    paper_dim: int = DIM
    windows: str = "scaled"

    def scale_tokens(self, count: int) -> int:
        """Return a published number of tokens times length / paper_length, rounded, at least one."""
        return max(1, round(count * self.length / self.paper_length))

    def scale_window(self, count: int) -> int:
        """Return a published window scaled to the stand-in's length, or as published if ``windows`` says so.

        A scaled window has SHORTEST_WINDOW tokens or more, unless the published window is shorter.
        """
        if self.windows == "paper":
            return count
        return min(count, max(SHORTEST_WINDOW, self.scale_tokens(count)))


AS_PUBLISHED = StandIn(length=1, paper_length=1, layers=1 << 16, heads=HEADS, dim=DIM, windows="paper")
"""The sizes of a published model itself, which leave all numbers as they are. No model has so many layers."""


def parse_setting(setting: str) -> dict[str, str]:
    """Return the values of a setting by key, such as {"kv_size": "128"} for ``kv_size=128``."""
    values = {}
    for part in setting.split(";"):
        if part:
            key, _, value = part.partition("=")
            values[key] = value
    return values


def translate_method(method: str, setting: Mapping[str, str]) -> str:
    """Return kvbench's name for a published method in a row with these settings."""
    if method == "h2o+quant" and "selection_bits" in setting:
        return "h2o"  # Q-Hitter's table 1 quantises only the keys that select tokens, not the stored cache
    return METHODS.get(method, method)


def run_arguments(method: str, setting: str, stand_in: StandIn | None = None) -> Knobs:
    """Return the arguments of ``run`` that a published row's setting stands for, by key.

    stand_in: the sizes to which numbers are scaled; None to leave them as published.
    Raises KvbenchError for a key that is no knob of the row's methods.
    """
    settings = parse_setting(setting)
    stages = translate_method(method, settings).split("+")
    knob_names: set[str] = set()
    for stage in stages:
        # published rows also have stages that are no methods of kvbench, such as full
        if stage in registry.available():
            knob_names.update(registry.knob_names(stage))
    arguments: Knobs = {}
    for key, value in settings.items():
        if key not in FACTS:
            arguments |= _translate_part(key, value, stand_in or AS_PUBLISHED, knob_names)
    # heads of the low group are deleted, so all remaining heads keep the high group's tokens; such rows state kv_high
    if "deleted_heads" in settings:
        arguments["kv_size"] = arguments.pop("high")
    return {_add_owner(key, stages): value for key, value in arguments.items()}


def _add_owner(key: str, stages: Sequence[str]) -> str:
    for stage in stages:
        if stage in OWNERS.get(key, ()):
            return f"method.{stage}.{key}"
    return key


def scale_windows(values: Mapping[str, object], stages: Iterable[str], stand_in: StandIn) -> Knobs:
    """Return the windows that a preset sets for ``stages``, scaled to the stand-in's length.

    values: the preset's values by full key, such as ``method.snapkv.window``.
    """
    windows: Knobs = {}
    for stage in stages:
        for knob in LENGTHS:
            key = f"method.{stage}.{knob}"
            count = values.get(key)
            if isinstance(count, int):
                windows[key] = str(stand_in.scale_window(int(count)))
    return windows


def _translate_part(key: str, value: str, stand_in: StandIn, knob_names: Container[str]) -> Knobs:
    """Return the knobs of one part of a setting, ``key=value``; {} if the default says the same."""
    knobs = _scale_part(key, value, stand_in)
    if knobs is None:
        knobs = _rewrite_part(key, value)
    if knobs is not None:
        return knobs
    if key in RENAMED or key in knob_names:
        return {RENAMED.get(key, key): value}
    raise KvbenchError(
        f"the setting {key}={value} of a published row has no option in kvbench/papers/spec/row_knobs.py"
    )


def _scale_part(key: str, value: str, stand_in: StandIn) -> Knobs | None:
    """Return the knobs of a part that depends on the model's sizes, scaled to the stand-in; None for any other key."""
    match key:
        case "kv_size" | "kv_high" | "kv_low":
            # the full cache keeps all tokens, and so do the knobs by default
            if value in ("full", "n/a"):
                return {}
            return {RENAMED.get(key, key): str(stand_in.scale_tokens(int(value)))}
        case "recent":
            # a window of 0 stays 0, since a scaled one would have at least one token
            count = int(value)
            return {key: str(stand_in.scale_window(count) if count else 0)}
        case "frozen":
            return {"frozen_layers": _translate_frozen_layers(value, stand_in)}
        case "group_sizes":
            # only the first and last of a row of sizes are set, since UNComp's sizes fall linearly between them
            sizes = [stand_in.scale_tokens(int(size)) for size in value.split("/")]
            # the sizes stand in place of a budget, which the method has by default
            return {"low": str(min(sizes)), "high": str(max(sizes)), "kv_size": "null", "kv_ratio": "null"}
        case "deleted_heads":
            # the stand-in deletes the same share of its heads, one at least
            share_of_heads = round(int(value) * stand_in.heads / stand_in.paper_heads)
            return {"delete": str(max(1, share_of_heads))}
        case "topk":
            # a number of a head's dimensions: the stand-in takes the same share, one at least
            count = stand_in.paper_dim if value == "all" else int(value)
            share_of_dim = count * stand_in.dim // stand_in.paper_dim
            return {"top": str(min(stand_in.dim, max(1, share_of_dim)))}
    return None


def _rewrite_part(key: str, value: str) -> Knobs | None:
    """Return the knobs of a part whose values the papers write otherwise than kvbench; None for any other key."""
    match key:
        case "kv":
            # published rows only have kv=full, and all tokens are kept by default
            return {}
        case "budget":
            # a budget of 1 keeps all tokens, as by default
            if float(value) == 1:
                return {}
            return {"kv_ratio": value}
        case "bits":
            # 2/2 are the bits of keys and of values; both are equal in every published row
            return {key: value.partition("/")[0]}
        case "selection_bits":
            # 16 bits are the exact keys, as by default
            if value == "16":
                return {}
            return {"score_bits": value}
        case "k":
            # ReFreeKV's k is a number of queries, or per cent of the prompt's queries
            if value.endswith("%n"):
                return {key: f"{int(value.removesuffix('%n')) / 100:g}"}
            return {key: value}
        case "partition":
            if value == "effective_rank":
                return {"grouping": "calibrated"}
            return {"grouping": value}
    return None


def _translate_frozen_layers(value: str, stand_in: StandIn) -> str:
    """Return the frozen layers of a published row as a knob: ``[0,1,31]`` for ``0+1+31``, ``[]`` for ``none``."""
    layers = []
    if value != "none":
        for layer in value.split("+"):
            layers.append(min(int(layer), stand_in.layers - 1))
    return f"[{','.join(map(str, dict.fromkeys(layers)))}]"
