"""Read and measure the requests of ``bench time``: seconds, tokens a second and peaks, end to end."""

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
    arguments = dict(w.partition("=")[::2] for w in words)
    return {key: arguments.get(key, default) for key, default in OWN.items()}


def measure(words: Sequence[str], plan: bool = False, beside: bool = True) -> tuple[list[dict[str, Any]], Path]:
    """Measure the missing rows of ``bench time``'s words. Return all rows asked for, and the file that stores them.

    With ``plan`` only print the rows that would be measured. With ``beside`` each older row comes with the full cache
    of its own session.
    """
    arguments, settings = dict(w.partition("=")[::2] for w in words), options(words)
    refuse_keys("time", arguments, OTHERS, ("model", "method", "preset", "dtype", "weights", *OTHERS, *OWN))
    if not settings["name"] or "/" in settings["name"] or settings["name"].startswith("."):
        raise UsageError(f"name={settings['name']} is not possible: the name of a file in folder=, as in name=think")
    run_words = [alias(o) for o in words if o.partition("=")[0] not in OWN]
    if "method" not in arguments:
        run_words.append(f"method={METHODS}")
    if not {"weights", "model.weights"} & set(arguments):
        run_words.append("weights=random")
    path = Path(settings["folder"]) / f"{settings['name']}.jsonl"
    return [row for request in read(run_words).runs for row in _one_model(request, settings, path, plan, beside)], path


def _one_model(
    request: RunRequest, options: Mapping[str, str], path: Path, plan: bool, older: bool
) -> list[dict[str, Any]]:
    """Measure the missing rows of one model and return all rows asked for."""
    cfg = config.parse(request)
    if cfg.threads is not None:
        torch.set_num_threads(cfg.threads)
    device = load.resolve_device(cfg.device)
    workloads, entrants = (
        [parse(w) for w in split_list(options["workloads"])],
        _entrants(cfg, options["peers"], options["step"]),
    )
    if options["over"] not in [e.name for e in entrants]:
        raise unknown("value of over", options["over"], [e.name for e in entrants])
    beside = (records.FULL, options["over"])
    settings = _settings(cfg, request.words, options, device)
    requested = [(w, e, row_key(e, w, settings)) for w in workloads for e in entrants]
    known = {} if _flag(options, "again") else records.latest(records.read(path))
    finished = {key for w, e, key in requested if settled(known.get(key), e, w, settings)}
    if plan:
        _plan(requested, {key for key in finished if known[key]["status"] != NOT_RUN}, settings, path)
        return []
    model: PreTrainedModel | None = None
    for workload in workloads:
        keys = {e.name: key for w, e, key in requested if w == workload}
        missing = [name for name, key in keys.items() if key not in finished]
        if not missing:
            continue
        if model is None:
            _say(f"building {cfg.model.name}")
            model = architecture.build(cfg.model, device, settings.layers)
        chosen = [e for e in entrants if e.name in (*missing, *beside)]
        rows = timing.measure(model, chosen, workload, settings, _say)
        records.append(path, [row | {"key": keys[row["method"]], "workload": workload.name} for row in rows])
    known = records.latest(records.read(path))
    wanted = [known[key] for *_, key in requested if key in known]
    if not older:
        return wanted
    # rows of earlier sessions come with the full cache of their own session
    shown, sessions = {(r["session"], r["key"]) for r in wanted}, {r["session"] for r in wanted}
    session_rows = [r for r in records.read(path) if r["session"] in sessions and r["method"] in beside]
    return [*wanted, *(r for r in session_rows if (r["session"], r["key"]) not in shown)]


def _say(text: str) -> None:
    print(f"kvbench: {text}", file=sys.stderr)


def _entrants(cfg: RunConfig, peers: str, step: str) -> list[Entrant]:
    """Return the full cache, then the methods, each in the ways of ``step``, then the peers."""
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


def _settings(cfg: RunConfig, overrides: Sequence[str], options: Mapping[str, str], device: torch.device) -> Settings:
    if options["generate"] not in ("full", "sampled"):
        raise unknown("value of generate", options["generate"], ("full", "sampled"))
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
        repeats=_count(options, "repeats", 1),
        warmup=_count(options, "warmup", 0),
        sample=_count(options, "steps", 1) if options["generate"] == "sampled" else None,
        check=_flag(options, "check"),
        seed=_count(options, "seed", 0),
        limit=_gib(options["memory_limit"]),
        layers=None if options["layers"] == "null" else _count(options, "layers", 1),
    )


def _plan(
    requested: Sequence[tuple[Workload, Entrant, str]],
    measured: Collection[str],
    settings: Settings,
    path: Path,
) -> None:
    widths = (
        max(len(workload.name) for workload, *_ in requested),
        max(len(entrant.name) for _, entrant, _ in requested),
    )
    for workload, entrant, key in requested:
        missing = why_not(entrant, workload)
        state = f"not run: {missing}" if missing else "to measure"
        if key in measured:
            state = "there"
        line = f"{settings.facts['model']}  {workload.name:<{widths[0]}}  {entrant.name:<{widths[1]}}  {state}"
        print(textwrap.fill(line, 100, subsequent_indent="    ", drop_whitespace=True))
    print(f"Rows: {path}")


def _count(options: Mapping[str, str], key: str, least: int) -> int:
    if not options[key].isdigit() or int(options[key]) < least:
        raise UsageError(f"{key}={options[key]} is not possible: a whole number, {least} or more")
    return int(options[key])


def _flag(options: Mapping[str, str], key: str) -> bool:
    if options[key] not in ("true", "false"):
        raise UsageError(f"{key}={options[key]} is not possible: true or false")
    return options[key] == "true"


def _gib(text: str) -> float | None:
    if text == "null":
        return None
    with suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return float(text)
    raise UsageError(f"memory_limit={text} is not possible: GiB, a number above 0, as in memory_limit=40")


def refuse_keys(what: str, given: Iterable[str], top: Collection[str], allowed: Sequence[str]) -> None:
    """Raise UsageError for keys that only runs use: a benchmark reads, scores and stores no answers."""
    for key in given:
        if key.partition(".")[0] in ("dataset", "prompt") or (key in top_level() and key not in top):
            raise unknown(f"key of bench {what}", key, allowed)


def shape_of(cfg: RunConfig) -> Shape:
    """Return the shape in conf/model, or else the checkpoint's."""
    if cfg.model.shape is not None:
        return from_entry(cfg.model.shape)
    return from_config(load.locate(cfg.model).config)


def alias(override: str) -> str:
    """Return an override with a short dtype (fp16, bf16, fp32) written in full."""
    key, sign, value = override.partition("=")
    return f"{key}={DTYPES.get(value, value)}" if sign and key in ("dtype", "model.dtype") else override
