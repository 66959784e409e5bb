"""Describe a cell from its identity alone: its label, its settings as fields, and its differences from others."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from kvbench.errors import UsageError
from kvbench.methods import registry
from kvbench.methods.resolve import ALWAYS_NAMED, by_size

Identity = Mapping[str, Any]


def label(identity: Identity, otherwise: str = "") -> str:
    """Return the label in a run's table: the method, its budgets and every knob that differs from the plain defaults.

    ``otherwise`` is the label of a cell without a chain, which was imported.
    """
    chain = identity.get("chain")
    if not isinstance(chain, Mapping):
        return otherwise
    stages = chain["stages"]
    owners = Counter(knob for s in stages for knob in s["knobs"])
    words = ["+".join(s["id"] for s in stages) or "full"]
    for stage in stages:
        plain = _plain(stage["id"])
        order = list(plain)
        for knob in sorted(stage["knobs"], key=lambda k: order.index(k) if k in plain else len(order)):
            value, key = stage["knobs"][knob], knob if owners[knob] == 1 else f"{stage['id']}.{knob}"
            if knob in ALWAYS_NAMED or knob not in plain or plain[knob] != _same(value):
                words.append(f"{key}={_text(value)}")
    return " ".join([*words, *([f"per={chain['per']}"] if chain["per"] != "kv_head" else [])])


def fields(identity: Identity) -> dict[str, object]:
    """Return the settings of a cell by name, as ``--json`` prints them; None for those that an imported cell lacks."""
    chain, prompt, model = (identity.get(k) for k in ("chain", "prompt", "model"))
    chain, read = chain if isinstance(chain, Mapping) else {}, prompt if isinstance(prompt, Mapping) else {}
    return {
        "knobs": {s["id"]: s["knobs"] for s in chain.get("stages", ())},
        "per": chain.get("per"),
        "prompt": {k: v for k, v in read.items() if k != "query_aware"} if read else prompt,
        "query_aware": read.get("query_aware"),
        "dtype": model.get("dtype") if isinstance(model, Mapping) else None,
    }


def differences(identities: Sequence[Identity]) -> list[str]:
    """Return for each of several cells the settings in which they differ, as ``template=off query_aware=true``."""
    flat = [dict(_leaves(i)) for i in identities]
    keys = list(dict.fromkeys(k for f in flat for k in f))
    differing = [k for k in keys if len({json.dumps(f.get(k), sort_keys=True, default=str) for f in flat}) > 1]
    return [" ".join(f"{k.rpartition('.')[2]}={_short(k, f.get(k))}" for k in differing) for f in flat]


def _leaves(identity: Identity, above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in identity.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{above}{key}.")
        elif key == "stages":
            yield from ((f"{s['id']}.{k}", v) for s in value for k, v in s.items() if k not in ("id", "knobs"))
        else:
            yield f"{above}{key}", value


def _short(key: str, value: Any) -> str:
    """Return a setting as one word; a template or a hash is cut to its first 8 characters."""
    if key == "prompt.template" and not value:
        return "off"
    return _text(value)[:8] if key in ("prompt.template", "content", "model.fingerprint") else _text(value)


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ",".join(map(_text, value)) or "none"
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _same(value: Any) -> Any:
    """Return the value after a round trip through JSON."""
    return json.loads(json.dumps(value, default=str))


@cache
def _plain(method: str) -> dict[str, Any]:
    """Return the default knobs of a method in their order; {} for a method that exists no more."""
    try:
        stage = registry.make_stage(method, by_size(registry.defaults(method)))
    except UsageError:
        return {}
    return {k: _same(stage.knobs()[k]) for k in registry.knob_names(method)}
