"""Describe a cell from its identity alone: its label, its settings as fields, and its differences from others."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from kvbench.base.errors import UsageError
from kvbench.methods.core import registry
from kvbench.methods.core.registry import ALWAYS_NAMED, by_size

Identity = Mapping[str, Any]


def label(identity: Identity, otherwise: str = "") -> str:
    """Return a cell's label in a table: the method, its budgets and every knob that differs from the defaults.

    ``otherwise`` is the label of a cell without a chain, which was imported.
    """
    chain = identity.get("chain")
    if not isinstance(chain, Mapping):
        return otherwise
    stages = chain["stages"]
    owners = Counter(knob for s in stages for knob in s["knobs"])
    words = ["+".join(s["id"] for s in stages) or "full"]
    for stage in stages:
        defaults = _default_knobs(stage["id"])
        order = list(defaults)
        for knob in sorted(stage["knobs"], key=lambda k: order.index(k) if k in defaults else len(order)):
            value, key = stage["knobs"][knob], knob if owners[knob] == 1 else f"{stage['id']}.{knob}"
            if knob in ALWAYS_NAMED or knob not in defaults or defaults[knob] != _through_json(value):
                words.append(f"{key}={_text(value)}")
    return " ".join([*words, *([f"per={chain['per']}"] if chain["per"] != "kv_head" else [])])


def fields(identity: Identity) -> dict[str, object]:
    """Return a cell's settings by name, as ``--json`` prints them. Settings that an imported cell lacks are None."""
    chain, prompt, model = (identity.get(k) for k in ("chain", "prompt", "model"))
    chain = chain if isinstance(chain, Mapping) else {}
    policy = prompt if isinstance(prompt, Mapping) else {}
    return {
        "knobs": {s["id"]: s["knobs"] for s in chain.get("stages", ())},
        "per": chain.get("per"),
        "prompt": {k: v for k, v in policy.items() if k != "query_aware"} if policy else prompt,
        "query_aware": policy.get("query_aware"),
        "dtype": model.get("dtype") if isinstance(model, Mapping) else None,
        **({"turns": identity["turns"]} if "turns" in identity else {}),
    }


def differences(identities: Sequence[Identity]) -> list[str]:
    """Return one text per cell: the settings that differ between the cells, as ``template=off query_aware=true``."""
    flat = [dict(_settings_by_path(i)) for i in identities]
    keys = list(dict.fromkeys(k for f in flat for k in f))
    differing = [k for k in keys if len({json.dumps(f.get(k), sort_keys=True, default=str) for f in flat}) > 1]
    # the metric's name is the metric
    names = {k: k.removesuffix(".name").rpartition(".")[2] for k in differing}
    return [" ".join(f"{names[k]}={_one_word(k, f.get(k))}" for k in differing) for f in flat]


def _settings_by_path(identity: Identity, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted path, value) of each setting in an identity, without the stages' ids and knobs."""
    for key, value in identity.items():
        if isinstance(value, Mapping) and value:
            yield from _settings_by_path(value, f"{prefix}{key}.")
        elif key == "stages":
            yield from ((f"{s['id']}.{k}", v) for s in value for k, v in s.items() if k not in ("id", "knobs"))
        else:
            yield f"{prefix}{key}", value


def _one_word(key: str, value: Any) -> str:
    """Return the value of a setting as one word. A template or a hash is cut to its first 8 characters."""
    if key == "prompt.template" and not value:
        return "off"
    return _text(value)[:8] if key in ("prompt.template", "content", "model.fingerprint") else _text(value)


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ",".join(map(_text, value)) or "none"
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _through_json(value: Any) -> Any:
    """Return the value as it is after it was written as JSON and read again."""
    return json.loads(json.dumps(value, default=str))


@cache
def _default_knobs(method: str) -> dict[str, Any]:
    """Return the default knobs of a method, in their order. A method that exists no more has {}."""
    try:
        # the entry, not the stage: a list of what is stored must not wait for torch
        entry = by_size(registry.defaults(method))
    except UsageError:
        return {}
    return {k: _through_json(entry[k]) for k in registry.knob_names(method)}
