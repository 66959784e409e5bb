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
    "prompt",
    "gen",
    "input",
    "output",
    "context",
    "shots",
    "windows",
}
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

    length, of: the tokens of the stand-in's prompts and of the paper's. A number of tokens is scaled by length / of.
    layers, heads, dim: the stand-in's layers, query heads and dimensions of a head.
    heads_of, dim_of: the published model's query heads and dimensions of a head.
    windows: ``scaled``, or ``paper`` to keep windows as published.
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
        """Return a published number of tokens scaled to the stand-in's length, at least one."""
        return max(1, round(count * self.length / self.of))

    def window(self, count: int) -> int:
        """Return a published window scaled to the stand-in's length, or as published if ``windows`` says so.

        A scaled window has SHORTEST_WINDOW tokens or more, unless the published window is shorter.
        """
        if self.windows == "paper":
            return count
        return min(count, max(SHORTEST_WINDOW, self.tokens(count)))


AS_PUBLISHED = StandIn(length=1, of=1, layers=1 << 16, heads=HEADS, dim=DIM, windows="paper")
"""The sizes of a published model itself, which leave all numbers as they are. No model has so many layers."""


def parse_setting(setting: str) -> dict[str, str]:
    """Return the values of a setting by key, such as {"kv_size": "128"} for ``kv_size=128``."""
    values = {}
    for part in setting.split(";"):
        if part:
            key, _, value = part.partition("=")
            values[key] = value
    return values


def method_of(method: str, setting: Mapping[str, str]) -> str:
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
    stages = method_of(method, settings).split("+")
    knob_names: set[str] = set()
    for stage in stages:
        # published rows also have stages that are no methods of kvbench, such as full
        if stage in registry.available():
            knob_names.update(registry.knob_names(stage))
    arguments: Knobs = {}
    for key, value in settings.items():
        if key not in FACTS:
            arguments |= _knobs_of_part(key, value, stand_in or AS_PUBLISHED, knob_names)
    # heads of the low group are deleted, so all remaining heads keep the high group's tokens; such rows state kv_high
    if "deleted_heads" in settings:
        arguments["kv_size"] = arguments.pop("high")
    return {_key_with_owner(key, stages): value for key, value in arguments.items()}


def _key_with_owner(key: str, stages: Sequence[str]) -> str:
    """Return the key of a knob as ``run`` takes it: with its stage before it if OWNERS names one of ``stages``."""
    for stage in stages:
        if stage in OWNERS.get(key, ()):
            return f"method.{stage}.{key}"
    return key


def scaled_windows(values: Mapping[str, object], stages: Iterable[str], stand_in: StandIn) -> Knobs:
    """Return the windows that a preset sets for ``stages``, scaled to the stand-in's length.

    values: the preset's values by full key, such as ``method.snapkv.window``.
    """
    windows: Knobs = {}
    for stage in stages:
        for knob in LENGTHS:
            key = f"method.{stage}.{knob}"
            count = values.get(key)
            if isinstance(count, int):
                windows[key] = str(stand_in.window(int(count)))
    return windows


def _knobs_of_part(key: str, value: str, stand_in: StandIn, knob_names: Container[str]) -> Knobs:
    """Return the knobs that one part of a setting, ``key=value``, sets on a stand-in; {} if the default says the same.

    knob_names: the knobs of the row's methods.

    Raises KvbenchError for a key that is neither special to published rows nor one of ``knob_names``.
    """
    match key:
        case "kv_size" | "kv_high" | "kv_low":
            # the full cache keeps all tokens, and so do the knobs by default
            if value in ("full", "n/a"):
                return {}
            return {RENAMED.get(key, key): str(stand_in.tokens(int(value)))}
        case "recent":
            # a window of 0 stays 0, since a scaled one would have at least one token
            count = int(value)
            return {key: str(stand_in.window(count) if count else 0)}
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
        case "frozen":
            return {"frozen_layers": _frozen_layers(value, stand_in)}
        case "group_sizes":
            # only the first and last of a row of sizes are set, since UNComp's sizes fall linearly between them
            sizes = [stand_in.tokens(int(size)) for size in value.split("/")]
            # the sizes stand in place of a budget, which the method has by default
            return {"low": str(min(sizes)), "high": str(max(sizes)), "kv_size": "null", "kv_ratio": "null"}
        case "deleted_heads":
            # the stand-in deletes the same share of its heads, one at least
            return {"delete": str(max(1, round(int(value) * stand_in.heads / stand_in.heads_of)))}
        case "topk":
            # a number of a head's dimensions: the stand-in takes the same share, one at least
            count = stand_in.dim_of if value == "all" else int(value)
            return {"top": str(min(stand_in.dim, max(1, count * stand_in.dim // stand_in.dim_of)))}
        case "partition":
            if value == "effective_rank":
                return {"grouping": "calibrated"}
            return {"grouping": value}
        case _ if key in RENAMED or key in knob_names:
            return {RENAMED.get(key, key): value}
    raise KvbenchError(
        f"the setting {key}={value} of a published row has no option in kvbench/papers/spec/row_knobs.py"
    )


def _frozen_layers(value: str, stand_in: StandIn) -> str:
    """Return the frozen layers of a published row as a knob: ``[0,1,31]`` for ``0+1+31``, ``[]`` for ``none``.

    Layers that the stand-in does not have become its last layer, which is named once.
    """
    layers = []
    if value != "none":
        for layer in value.split("+"):
            layers.append(min(int(layer), stand_in.layers - 1))
    return f"[{','.join(map(str, dict.fromkeys(layers)))}]"
