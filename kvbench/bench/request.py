"""Requests of ``bench time``, read and measured: seconds, tokens a second and peaks, end to end."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from kvbench.bench import architecture, environment, records, timing
from kvbench.bench.peers import PEERS, find
from kvbench.bench.records import NOT_RUN
from kvbench.bench.timing import Entrant, Settings, row_key, why_not
from kvbench.bench.workload import Workload, parse
from kvbench.cache.model_shape import Shape, from_config, from_entry
from kvbench.conf import top_level
from kvbench.errors import UsageError, unknown
from kvbench.methods.chain import Chain
from kvbench.methods.resolve import ChainConfig
from kvbench.models import load
from kvbench.run import config
from kvbench.run.config import RunConfig
from kvbench.run.words import Request, read, split_list

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


def measure(words: Sequence[str], plan: bool = False, beside: bool = True) -> tuple[list[dict[str, Any]], Path]:
    """Measure what is missing of ``bench time``'s words: all rows asked for, and the file that they are kept in.

    ``plan``: only print what would be measured. ``beside``: with each older row the full cache of its own session.
    """
    given = dict(w.partition("=")[::2] for w in words)
    own = {**OWN, **{k: v for k, v in given.items() if k in OWN}}
    _refuse_keys(given)
    rest = [alias(o) for o in words if o.partition("=")[0] not in OWN]
    if "method" not in given:
        rest.append(f"method={METHODS}")
    if not {"weights", "model.weights"} & set(given):
        rest.append("weights=random")
    path = Path(own["folder"]) / f"{_name(own['name'])}.jsonl"
    return [row for request in read(rest).runs for row in _one_model(request, own, path, plan, beside)], path


def _one_model(request: Request, own: Mapping[str, str], path: Path, plan: bool, older: bool) -> list[dict[str, Any]]:
    """The rows asked for of one model, measured where they are missing."""
    cfg = config.parse(request)
    if cfg.threads is not None:
        torch.set_num_threads(cfg.threads)
    device = load.resolve_device(cfg.device)
    workloads, entrants = _workloads(own["workloads"]), _entrants(cfg, own["peers"], own["step"])
    beside = dict.fromkeys((records.FULL, own["over"]))
    if own["over"] not in [e.name for e in entrants]:
        raise unknown("value of over", own["over"], [e.name for e in entrants])
    settings = _settings(cfg, request.words, own, device)
    again, limit = _flag(own, "again"), settings.limit
    known = records.latest(records.read(path))
    finished = {} if again else timing.finished(known, entrants, workloads, settings, device)
    if plan:
        _plan(entrants, workloads, settings, finished, path, device)
        return []
    loaded: list[PreTrainedModel] = []

    def model() -> PreTrainedModel:
        if not loaded:
            say(f"building {cfg.model.name}")
            loaded.append(architecture.build(cfg.model, device, settings.layers))
        return loaded[0]

    def say(text: str) -> None:
        print(f"kvbench: {text}", file=sys.stderr)

    if limit is not None and limit <= 0:
        raise UsageError(f"memory_limit={limit} is not possible: GiB, above 0")
    for found in timing.sessions(model, entrants, workloads, settings, finished, say, tuple(beside)):
        records.append(path, found)
    known = records.latest(records.read(path))
    wanted = [timing.row_key(e, w, settings) for w in workloads for e in entrants]
    chosen = [known[k] for k in wanted if k in known]
    if not older:
        return chosen
    # rows that were measured before stand beside the full cache of their own session
    there, sessions = {(r["session"], r["key"]) for r in chosen}, {r["session"] for r in chosen}
    before = [r for r in records.read(path) if r["session"] in sessions and r["method"] in beside]
    return [*chosen, *(r for r in before if (r["session"], r["key"]) not in there)]


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


def _settings(cfg: RunConfig, words: Sequence[str], own: Mapping[str, str], device: Any) -> Settings:
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
        tuple(words),
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
    entrants: Sequence[Entrant],
    workloads: Sequence[Workload],
    settings: Settings,
    finished: Mapping[str, Any],
    path: Path,
    device: Any,
) -> None:
    wide = max(len(w.name) for w in workloads), max(len(e.name) for e in entrants)
    for w in workloads:
        for e in entrants:
            there = finished.get(row_key(e, w, settings), {}).get("status", NOT_RUN) != NOT_RUN
            missing = why_not(e, w, device)
            state = "there" if there else f"not run: {missing}" if missing else "to measure"
            line = f"{settings.facts['model']}  {w.name:<{wide[0]}}  {e.name:<{wide[1]}}  {state}"
            print(textwrap.fill(line, 100, subsequent_indent="    ", drop_whitespace=True))
    print(f"Rows: {path}")


def _workloads(text: str) -> list[Workload]:
    return [parse(part) for part in split_list(text)]


def _name(text: str) -> str:
    if not text or "/" in text or text.startswith("."):
        raise UsageError(f"name={text} is not possible: the name of a file in folder=, as in name=think")
    return text


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
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise UsageError(f"memory_limit={text} is not possible: GiB, a number above 0, as in memory_limit=40")
    return found


def _refuse_keys(given: Mapping[str, str]) -> None:
    """Refuse what belongs to runs: no dataset is read, nothing is scored."""
    for key in given:
        group = key.partition(".")[0]
        if group in ("dataset", "prompt") or (key in top_level() and key not in OTHERS):
            raise unknown("key of bench time", key, ("model", "method", "preset", "dtype", "weights", *OTHERS, *OWN))


def shape_of(cfg: RunConfig) -> Shape:
    """The shape in conf/model, else the checkpoint's."""
    if cfg.model.shape is not None:
        return from_entry(cfg.model.shape)

    return from_config(load.locate(cfg.model).config)


def alias(override: str) -> str:
    """An override whose dtype may be written short: fp16, bf16, fp32."""
    key, sign, value = override.partition("=")
    return f"{key}={DTYPES.get(value, value)}" if sign and key in ("dtype", "model.dtype") else override
