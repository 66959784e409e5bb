"""Describe a cell from its identity alone: its label, its settings as fields, and its differences from others."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from kvbench.base.errors import UsageError
from kvbench.methods.core import registry
from kvbench.methods.core.registry import ALWAYS_NAMED, choose_by_size

Identity = Mapping[str, Any]
"""All settings that decide a cell's numbers, as cell.json holds them."""
BUDGETS = {
    "kv_ratio": "the share of a prompt's tokens that is kept",
    "decode_ratio": "the share of all tokens so far, prompt and answer, that a head holds while it answers",
    "kv_size": "the tokens kept in each head",
    "ratio": "the share of the channels, or of the rank, that is removed",
}
"""The meaning of each budget in a label: ``kv_ratio`` counts tokens kept, ``ratio`` channels removed."""


def explain_budgets(labels: Iterable[str]) -> list[str]:
    """Return one note on the meaning of the budgets in ``labels``; [] if no label has a budget."""
    options = set()
    for label in labels:
        # the first word of a label is the method, the others are options
        for option in label.split(" ")[1:]:
            # method.snapkv.kv_ratio=0.25 is a kv_ratio, too
            options.add(option.partition("=")[0].rpartition(".")[2])
    meanings = [f"{name}: {meaning}" for name, meaning in BUDGETS.items() if name in options]
    if not meanings:
        return []
    return [". ".join(meanings) + "."]


def label_cell(identity: Identity, otherwise: str = "") -> str:
    """Return a cell's label in a table: the method, its budgets and every knob that differs from the defaults.

    otherwise: the label of a cell without a chain, which was imported.
    """
    chain = identity.get("chain")
    if not isinstance(chain, Mapping):
        return otherwise
    stages = chain["stages"]
    words = ["+".join(stage["id"] for stage in stages) or "full"]
    stages_with_knob: Counter[str] = Counter()
    for stage in stages:
        stages_with_knob.update(stage["knobs"].keys())  # only the keys: a mapping would add its values
    for stage in stages:
        for knob, value in _list_shown_knobs(stage):
            # a knob that several stages have is named with its stage
            key = f"{stage['id']}.{knob}" if stages_with_knob[knob] > 1 else knob
            words.append(f"{key}={_write_value(value)}")
    # kv_head is the default
    if chain["per"] != "kv_head":
        words.append(f"per={chain['per']}")
    return " ".join(words)


def _list_shown_knobs(stage: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return (knob, value) of each knob of a stage that a label shows: budgets, and values that are not the default.

    stage: the stage as an identity holds it, with its ``id`` and its ``knobs``.
    """
    knobs = stage["knobs"]
    defaults = _read_default_knobs(stage["id"])
    # knobs stand in the order of the method's file; knobs that the file no longer has come last
    in_order = [knob for knob in defaults if knob in knobs]
    in_order += [knob for knob in knobs if knob not in defaults]
    shown = []
    for knob in in_order:
        is_default = knob in defaults and defaults[knob] == _pass_through_json(knobs[knob])
        if knob in ALWAYS_NAMED or not is_default:
            shown.append((knob, knobs[knob]))
    return shown


def list_settings(identity: Identity) -> dict[str, object]:
    """Return a cell's settings by name, as ``--json`` prints them. Settings that an imported cell lacks are None."""
    chain = _mapping_or_empty(identity.get("chain"))
    prompt = identity.get("prompt")
    # an imported cell may have a text in place of a policy
    policy = _mapping_or_empty(prompt)
    if policy:
        # query_aware is a setting of its own below
        prompt = {key: value for key, value in policy.items() if key != "query_aware"}
    settings: dict[str, object] = {
        "knobs": {stage["id"]: stage["knobs"] for stage in chain.get("stages", ())},
        "per": chain.get("per"),
        "prompt": prompt,
        "query_aware": policy.get("query_aware"),
        "dtype": _mapping_or_empty(identity.get("model")).get("dtype"),
    }
    # only some cells have these two
    if "turns" in identity:
        settings["turns"] = identity["turns"]
    decoding = _mapping_or_empty(identity.get("decoding"))
    if "samples_per_prompt" in decoding:
        settings["samples_per_prompt"] = decoding["samples_per_prompt"]
    return settings


def _mapping_or_empty(value: object) -> Mapping[str, Any]:
    if isinstance(value, Mapping):
        return value
    return {}


def describe_differences(identities: Sequence[Identity]) -> list[str]:
    """Return, for each cell, its values of the settings that differ among the cells: ``template=off bos=false``."""
    # compare nested settings one by one, to name only the differing part of a prompt
    settings_of_cells = [dict(_walk_settings(identity)) for identity in identities]
    differing = _find_differing_paths(settings_of_cells)
    texts = []
    for settings in settings_of_cells:
        words = []
        for path in differing:
            # the last part of a path names the setting, except that metric.name is the metric
            setting = path.removesuffix(".name").rpartition(".")[2]
            value = settings.get(path)
            # an identity has false in place of a template if prompts have none
            if path == "prompt.template" and not value:
                word = "off"
            elif path in ("prompt.template", "content", "model.fingerprint"):
                word = _write_value(value)[:8]
            else:
                word = _write_value(value)
            words.append(f"{setting}={word}")
        texts.append(" ".join(words))
    return texts


def _find_differing_paths(settings_of_cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the paths of the settings that do not have the same value in all cells.

    settings_of_cells: for each cell, its settings by dotted path. A cell without a setting counts as having None.
    """
    # a dict keeps the order of the paths, unlike a set
    paths: dict[str, None] = {}
    for settings in settings_of_cells:
        paths |= dict.fromkeys(settings)
    differing = []
    for path in paths:
        # values may be lists, which a set cannot hold, so their JSON is compared
        values = {json.dumps(settings.get(path), sort_keys=True, default=str) for settings in settings_of_cells}
        if len(values) > 1:
            differing.append(path)
    return differing


def _walk_settings(identity: Identity, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted path, value) of each setting in an identity, without the stages' ids and knobs, which labels show.

    prefix: the path of ``identity`` itself if it is a part of a larger one, with a dot behind it.
    """
    for key, value in identity.items():
        if isinstance(value, Mapping) and value:
            yield from _walk_settings(value, f"{prefix}{key}.")
        elif key == "stages":
            for stage in value:
                for name, setting in stage.items():
                    if name not in ("id", "knobs"):
                        yield f"{stage['id']}.{name}", setting
        else:
            yield f"{prefix}{key}", value


def _write_value(value: Any) -> str:
    """Return a knob's value as a user would type it: lists with commas, whole floats without a decimal point."""
    if isinstance(value, (list, tuple)):
        return ",".join(map(_write_value, value)) or "none"
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, str):
        return value
    return json.dumps(value, default=str)


def _pass_through_json(value: Any) -> Any:
    """Return the value as it comes back from JSON, so that it can be compared with stored values."""
    return json.loads(json.dumps(value, default=str))


@cache
def _read_default_knobs(method: str) -> dict[str, Any]:
    """Return the default knobs of a method, in their order. A method that no longer exists has {}."""
    try:
        # read the entry, not the stage: listing stored results must not wait for torch
        entry = choose_by_size(registry.defaults(method))
    except UsageError:
        return {}
    return {knob: _pass_through_json(entry[knob]) for knob in registry.knob_names(method)}
