"""Measured cells as lists show them: one dictionary each, filters by key=value, and a table."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from kvbench.errors import UsageError, unknown
from kvbench.run.labels import differences, fields, label
from kvbench.run.store import STATUSES, ResultStore
from kvbench.run.words import split_list

FILTERS = ("status", "model", "method", "dataset", "cells")
DAMAGED = "damaged"


def given(arguments: Sequence[str], keys: Sequence[str]) -> dict[str, str]:
    """The ``key=value`` arguments; raises UsageError for one not in ``keys``, given twice or without a value."""
    found: dict[str, str] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or key not in keys:
            raise unknown("argument", argument, [f"{k}=" for k in keys])
        if key in found:
            raise UsageError(f"{key}= is given 2 times: list the values with commas, {key}={found[key]},{value}")
        if "" in split_list(value):
            raise UsageError(f"{argument}: a value is missing; write {key}=A or {key}=A,B (is a variable unset?)")
        found[key] = value
    for status in split_list(found["status"]) if "status" in found else ():
        if status not in (*STATUSES, DAMAGED):
            raise unknown("status", status, (*STATUSES, DAMAGED))
    return found


def rows(store: ResultStore, filters: Mapping[str, str]) -> list[dict[str, Any]]:
    """The cells of a store that pass all ``filters``, by dataset and label."""
    asked = filters.get("cells")
    names = store.folders() if asked is None else [store.find(name) for name in dict.fromkeys(split_list(asked))]
    found = [r for r in (row(store, name) for name in names) if _passes(r, filters)]
    alike: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for r in found:
        alike.setdefault((r["label"], r["dataset"], r["model"]), []).append(r)
    for some in alike.values():
        for r, words in zip(some, differences([r.pop("identity") for r in some]), strict=True):
            r["differs"] = words
    return sorted(found, key=lambda r: (r["dataset"], r["label"], r["differs"], r["id"]))


def row(store: ResultStore, name: str) -> dict[str, Any]:
    """What there is to know about one cell at a glance, and its identity."""
    folder = store.folder(name)
    empty = {"id": name, "label": "", "dataset": "", "model": "", "folder": str(folder), "imported": False}
    try:
        record, status = store.cell(name) or {}, store.status(name)
        metrics = store.metrics(name)
        identity = record.get("identity", {})
        settings = {**fields(identity), "identity": identity}
        empty["label"] = label(identity, record.get("label", ""))
    except UsageError as error:
        empty |= {**fields({}), "identity": {}}
        return {**empty, "status": DAMAGED, "n": 0, "of": None, "reason": str(error), "measuring": [], "changed": None}
    current = metrics.get("n") == status.n
    return {
        **empty,
        "dataset": record.get("column", ""),
        "model": model_name(record),
        **settings,
        "imported": record.get("kind") == "imported",
        "status": status.status,
        "n": status.n,
        "of": status.of,
        "reason": status.reason,
        "measuring": list(status.measuring),
        "changed": status.changed and datetime.fromtimestamp(status.changed).astimezone().isoformat("T", "seconds"),
        # of an interrupted cell, the means may be of fewer samples than there are
        **({k: metrics.get(k) for k in ("metric", "score", "ci")} if current and status.status != "refused" else {}),
    }


def table(found: Sequence[Mapping[str, Any]], store: ResultStore) -> str:
    """The cells as text that fits 100 columns, with reasons and counts below."""
    from kvbench.tables.table import Table
    from kvbench.tables.writers import compose

    headers = ("status\nn of N", "method", "dataset\nmodel", "score\ninterval", "last change\ncell")
    sheet = Table(headers, tuple(_texts(r) for r in found))
    counts = Counter(str(r["status"]) for r in found)
    alike: dict[tuple[str, str], list[str]] = {}
    for r in found:
        if r["reason"]:
            alike.setdefault((str(r["status"]), str(r["reason"])), []).append(str(r["id"]))
    notes = [f"{status} {', '.join(names)}: {reason}" for (status, reason), names in alike.items()]
    busy = [(r["id"], ", ".join(map(str, r["measuring"]))) for r in found if r["measuring"]]
    notes += [f"{name} is being measured now, shard {shards}" for name, shards in busy]
    notes += store.warnings
    total = ", ".join(f"{counts[s]} {s}" for s in (*STATUSES, DAMAGED) if counts[s])
    return compose([sheet], [*notes, f"{len(found)} cells in {store.root}/cells/<cell>/: {total}."], "text")


def _texts(r: Mapping[str, Any]) -> tuple[str, ...]:
    score, ci = r.get("score"), r.get("ci")
    name, _, knobs = str(r["label"]).partition(" ")
    return (
        f"{r['status']}\n{r['n']} of {'?' if r['of'] is None else r['of']}",
        "\n".join([*_fold(name, "+"), *_fold(knobs, " "), *_fold(r["differs"], " ")]),
        "\n".join([*_fold(r["dataset"], " "), *_fold(r["model"], "/"), *(["imported"] if r["imported"] else [])]),
        "—" if score is None else f"{r['metric']} {score:.1f}" + (f"\n[{ci[0]:.0f}, {ci[1]:.0f}]" if ci else ""),
        f"{_ago(r['changed'])}\n{r['id']}",
    )


def _fold(text: str, at: str, width: int = 24) -> list[str]:
    """The text in lines of at most ``width`` characters, broken behind ``at``, or anywhere where there is none."""
    lines = [""]
    for i, part in enumerate(text.split(at) if text else ()):
        piece = f"{lines[-1]}{at}{part}" if i else part
        if len(piece) <= width:
            lines[-1] = piece
            continue
        lines[-1:] = [f"{lines[-1]}{at}".rstrip(" ")] if i else []
        lines += [part[i : i + width] for i in range(0, len(part), width)] or [""]
    return [line for line in lines if line]


def _passes(r: Mapping[str, Any], filters: Mapping[str, str]) -> bool:
    named = {k: split_list(v) for k, v in filters.items()}
    dataset = str(r["dataset"]).partition(" ")[0]
    return (
        r["status"] in named.get("status", [r["status"]])
        and str(r["label"]).partition(" ")[0] in named.get("method", [str(r["label"]).partition(" ")[0]])
        and r["model"] in named.get("model", [r["model"]])
        and bool({dataset, dataset.partition("/")[0]} & set(named.get("dataset", [dataset])))
    )


def model_name(record: Mapping[str, Any]) -> str:
    """The model's name as the last run gave it; of cells that were never told one, its fingerprint."""
    names = [p["model"] for p in record.get("provenance", ()) if p.get("model")]
    model = record.get("identity", {}).get("model", "")
    return str(names[-1] if names else model.get("fingerprint", "") if isinstance(model, dict) else model)


def _ago(changed: str | None) -> str:
    if not changed:
        return "—"
    seconds = max(0.0, time.time() - datetime.fromisoformat(changed).timestamp())
    for unit, size in (("day", 86400), ("hour", 3600), ("minute", 60)):
        count = int(seconds // size)
        if count:
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"
