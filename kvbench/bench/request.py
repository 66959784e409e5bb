"""Requests of ``bench time``, read and measured: seconds, tokens a second and peaks, end to end."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from kvbench.bench import architecture, environment, records, timing
from kvbench.bench.peers import PEERS, find
from kvbench.bench.records import NOT_RUN
from kvbench.bench.timing import Entrant, Settings, row_key, settled, why_not
from kvbench.bench.workload import Workload, parse
from kvbench.cache.model_shape import Shape, from_config, from_entry
from kvbench.conf import top_level
from kvbench.errors import UsageError, unknown
from kvbench.methods.chain import Chain
from kvbench.methods.resolve import ChainConfig
from kvbench.models import load
from kvbench.run import config
from kvbench.run.config import RunConfig
from kvbench.run.words import RunRequest, read, split_list

OWN = {
    "workloads": "128+16x4",
    "repeats": "3",
    "warmup": "1",
    "generate": "full",
    "steps": "64",
    "check": "false",
    "step": "plain",
    "peers": "dynamic,static",
    "over": "full",
    "memory_limit": "null",
    "layers": "null",
    "seed": "0",
    "name": "time",
    "folder": "results/bench",
    "again": "false",
}
OTHERS = ("device", "per", "match", "reference", "threads")
METHODS = "full,snapkv,kivi"
DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}


def options(words: Sequence[str]) -> dict[str, str]:
    """Return the value of each of bench time's own keys."""
    given = dict(w.partition("=")[::2] for w in words)
    return {key: given.get(key, default) for key, default in OWN.items()}


def measure(words: Sequence[str], plan: bool = False, beside: bool = True) -> tuple[list[dict[str, Any]], Path]:
    """Measure what is missing of ``bench time``'s words: all rows asked for, and the file that they are kept in.

    ``plan``: only print what would be measured. ``beside``: with each older row the full cache of its own session.
    """
    given, own = dict(w.partition("=")[::2] for w in words), options(words)
    refuse_keys("time", given, OTHERS, ("model", "method", "preset", "dtype", "weights", *OTHERS, *OWN))
    if not own["name"] or "/" in own["name"] or own["name"].startswith("."):
        raise UsageError(f"name={own['name']} is not possible: the name of a file in folder=, as in name=think")
    rest = [alias(o) for o in words if o.partition("=")[0] not in OWN]
    if "method" not in given:
        rest.append(f"method={METHODS}")
    if not {"weights", "model.weights"} & set(given):
        rest.append("weights=random")
    path = Path(own["folder"]) / f"{own['name']}.jsonl"
    return [row for request in read(rest).runs for row in _one_model(request, own, path, plan, beside)], path


def _one_model(
    request: RunRequest, own: Mapping[str, str], path: Path, plan: bool, older: bool
) -> list[dict[str, Any]]:
    """The rows asked for of one model, measured where they are missing."""
    cfg = config.parse(request)
    if cfg.threads is not None:
        torch.set_num_threads(cfg.threads)
    device = load.resolve_device(cfg.device)
    workloads, entrants = [parse(w) for w in split_list(own["workloads"])], _entrants(cfg, own["peers"], own["step"])
    if own["over"] not in [e.name for e in entrants]:
        raise unknown("value of over", own["over"], [e.name for e in entrants])
    beside = (records.FULL, own["over"])
    settings = _settings(cfg, request.words, own, device)
    asked = [(w, e, row_key(e, w, settings)) for w in workloads for e in entrants]
    known = {} if _flag(own, "again") else records.latest(records.read(path))
    there = {key for w, e, key in asked if settled(known.get(key), e, w, settings)}
    if plan:
        _plan(asked, {key for key in there if known[key]["status"] != NOT_RUN}, settings, path)
        return []
    model: PreTrainedModel | None = None
    for workload in workloads:
        keys = {e.name: key for w, e, key in asked if w == workload}
        missing = [name for name, key in keys.items() if key not in there]
        if not missing:
            continue
        if model is None:
            _say(f"building {cfg.model.name}")
            model = architecture.build(cfg.model, device, settings.layers)
        chosen = [e for e in entrants if e.name in (*missing, *beside)]
        rows = timing.measure(model, chosen, workload, settings, _say)
        records.append(path, [row | {"key": keys[row["method"]], "workload": workload.name} for row in rows])
    known = records.latest(records.read(path))
    wanted = [known[key] for *_, key in asked if key in known]
    if not older:
        return wanted
    # rows that were measured before stand beside the full cache of their own session
    shown, sessions = {(r["session"], r["key"]) for r in wanted}, {r["session"] for r in wanted}
    before = [r for r in records.read(path) if r["session"] in sessions and r["method"] in beside]
    return [*wanted, *(r for r in before if (r["session"], r["key"]) not in shown)]


def _say(text: str) -> None:
    print(f"kvbench: {text}", file=sys.stderr)


def _entrants(cfg: RunConfig, peers: str, step: str) -> list[Entrant]:
    """The full cache first, then the methods, each as ``step`` says, then the peers."""
    full = ChainConfig(Chain(), "full")
    chains = [full, *(c for c in cfg.chains if c.chain.stages)]
    names = {"all": list(PEERS), "none": []}.get(peers, split_list(peers))
    ways = split_list(step)
    if wrong := [way for way in ways if way not in ("plain", "graph")]:
        raise unknown("value of step", wrong[0], ("plain", "graph"))
    timed = {"plain": [Entrant(c.label, c) for c in chains]}
    timed["graph"] = [Entrant(f"{c.label} step=graph", c, graph=True) for c in chains]
    return [
        *timed["plain"][: "plain" not in ways],
        *(entrant for way in dict.fromkeys(ways) for entrant in timed[way]),
        *(Entrant(n, peer=find(n)) for n in names),
    ]


def _settings(cfg: RunConfig, overrides: Sequence[str], own: Mapping[str, str], device: torch.device) -> Settings:
    if own["generate"] not in ("full", "sampled"):
        raise unknown("value of generate", own["generate"], ("full", "sampled"))
    dtype = load.resolve_dtype(cfg.model, device, architecture.model_config(cfg.model))
    name = cfg.model.name if cfg.model.name != "hf" else cfg.model.path
    facts = {
        "model": name,
        "weights": cfg.model.weights,
        "dtype": str(dtype).removeprefix("torch."),
        **environment.facts(device),
    }
    return Settings(
        tuple(overrides),
        facts,
        repeats=_count(own, "repeats", 1),
        warmup=_count(own, "warmup", 0),
        sample=_count(own, "steps", 1) if own["generate"] == "sampled" else None,
        check=_flag(own, "check"),
        seed=_count(own, "seed", 0),
        limit=_gib(own["memory_limit"]),
        layers=None if own["layers"] == "null" else _count(own, "layers", 1),
    )


def _plan(
    asked: Sequence[tuple[Workload, Entrant, str]],
    measured: Collection[str],
    settings: Settings,
    path: Path,
) -> None:
    wide = max(len(w.name) for w, *_ in asked), max(len(e.name) for _, e, _ in asked)
    for w, e, key in asked:
        missing = why_not(e, w)
        state = "there" if key in measured else f"not run: {missing}" if missing else "to measure"
        line = f"{settings.facts['model']}  {w.name:<{wide[0]}}  {e.name:<{wide[1]}}  {state}"
        print(textwrap.fill(line, 100, subsequent_indent="    ", drop_whitespace=True))
    print(f"Rows: {path}")


def _count(own: Mapping[str, str], key: str, least: int) -> int:
    if not own[key].isdigit() or int(own[key]) < least:
        raise UsageError(f"{key}={own[key]} is not possible: a whole number, {least} or more")
    return int(own[key])


def _flag(own: Mapping[str, str], key: str) -> bool:
    if own[key] not in ("true", "false"):
        raise UsageError(f"{key}={own[key]} is not possible: true or false")
    return own[key] == "true"


def _gib(text: str) -> float | None:
    if text == "null":
        return None
    with suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return float(text)
    raise UsageError(f"memory_limit={text} is not possible: GiB, a number above 0, as in memory_limit=40")


def refuse_keys(what: str, given: Iterable[str], top: Collection[str], allowed: Sequence[str]) -> None:
    """Raise UsageError for keys that belong to runs: nothing is read, scored or stored here."""
    for key in given:
        if key.partition(".")[0] in ("dataset", "prompt") or (key in top_level() and key not in top):
            raise unknown(f"key of bench {what}", key, allowed)


def shape_of(cfg: RunConfig) -> Shape:
    """The shape in conf/model, else the checkpoint's."""
    if cfg.model.shape is not None:
        return from_entry(cfg.model.shape)
    return from_config(load.locate(cfg.model).config)


def alias(override: str) -> str:
    """An override whose dtype may be written short: fp16, bf16, fp32."""
    key, sign, value = override.partition("=")
    return f"{key}={DTYPES.get(value, value)}" if sign and key in ("dtype", "model.dtype") else override
