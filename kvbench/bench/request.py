"""Read and measure the requests of ``bench time``: seconds, tokens a second and peaks, end to end."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from kvbench.base.conf import top_level
from kvbench.base.errors import UsageError, say, unknown
from kvbench.bench import architecture, environment, records, timing
from kvbench.bench.peers import PEERS, Peer, find
from kvbench.bench.records import NOT_RUN
from kvbench.bench.timing import Entrant, Settings, row_key, settled, why_not
from kvbench.bench.workload import Workload, parse
from kvbench.kv.model_shape import Shape, from_config, from_entry
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.resolve import ChainConfig
from kvbench.models import load
from kvbench.plan import config
from kvbench.plan.config import RunConfig
from kvbench.plan.keys import Key, choice, flag, one_of, optional, pairs, values, whole
from kvbench.plan.words import RunRequest, read, split_list


def _read_gib(text: str) -> float:
    """Return a number above 0 that a text states. Raises ValueError for any other text."""
    if not 0 < float(text) < float("inf"):
        raise ValueError(text)
    return float(text)


def _read_file_name(text: str) -> str:
    """Return the text if it can name a visible file in a folder. Raises ValueError if it cannot."""
    if not text or "/" in text or text.startswith("."):
        raise ValueError(text)
    return text


GROUPS: dict[str, list[str]] = {"all": list(PEERS), "none": []}
"""The words that name several peers."""
OWN = {
    key.name: key
    for key in (
        Key("workloads", "128+16x4", lambda text: [parse(w) for w in split_list(text)]),
        whole("repeats", 1, "3"),
        whole("warmup", 0, "1"),
        choice("generate", ("full", "sampled")),
        whole("steps", 1, "64"),
        flag("check"),
        Key("step", "plain", lambda text: [one_of("value of step", ("plain", "graph"), w) for w in split_list(text)]),
        Key("peers", "dynamic,static", lambda text: [find(name) for name in GROUPS.get(text, split_list(text))]),
        Key("over", records.FULL),
        optional(Key("memory_limit", None, _read_gib, "GiB, a number above 0, as in memory_limit=40")),
        optional(whole("layers", 1)),
        whole("seed", 0, "0"),
        Key("name", "time", _read_file_name, "the name of a file in folder=, as in name=think"),
        Key("folder", "results/bench", Path),
        flag("again"),
    )
}
OTHERS = ("device", "per", "match", "reference", "threads")
METHODS = "full,snapkv,kivi"
DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}


def measure(words: Sequence[str], plan: bool = False, beside: bool = True) -> tuple[list[dict[str, Any]], Path]:
    """Measure the missing rows that ``bench time``'s words ask for. Return (all rows asked for, the file with them).

    With ``plan`` only the rows that would be measured are printed. With ``beside`` each older row comes with the full
    cache of its own session.
    """
    # results= means the same folder as in all other verbs, of which folder= is a part
    words = [f"folder={w.removeprefix('results=')}/bench" if w.startswith("results=") else w for w in words]
    arguments = pairs(words)
    refuse_keys("time", arguments, OTHERS, ("model", "method", "preset", "dtype", "weights", *OTHERS, *OWN))
    settings = values(OWN.values(), arguments)
    run_words = [alias(o) for o in words if o.partition("=")[0] not in OWN]
    if "method" not in arguments:
        run_words.append(f"method={METHODS}")
    if not {"weights", "model.weights"} & set(arguments):
        run_words.append("weights=random")
    path = settings["folder"] / f"{settings['name']}.jsonl"
    try:
        if not plan:
            settings["folder"].mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"folder={settings['folder']} cannot be made: {error.strerror}") from None
    return [
        row for request in read(run_words).runs for row in _measure_model(request, settings, path, plan, beside)
    ], path


def _measure_model(
    request: RunRequest, options: Mapping[str, Any], path: Path, plan: bool, older: bool
) -> list[dict[str, Any]]:
    """Measure the missing rows of one model and return all rows asked for."""
    cfg = config.parse(request)
    if cfg.threads is not None:
        torch.set_num_threads(cfg.threads)
    device = load.resolve_device(cfg.device)
    workloads = options["workloads"]
    entrants = _entrants(cfg, options["peers"], options["step"])
    one_of("value of over", [e.name for e in entrants], options["over"])
    beside = (records.FULL, options["over"])
    settings = _settings(cfg, request.words, options, device)
    requested = [(w, e, row_key(e, w, settings)) for w in workloads for e in entrants]
    known = {} if options["again"] else records.latest(records.read(path))
    finished = {key for w, e, key in requested if settled(known.get(key), e, w, settings)}
    if plan:
        _print_plan(requested, {key for key in finished if known[key]["status"] != NOT_RUN}, settings, path)
        return []
    model: PreTrainedModel | None = None
    for workload in workloads:
        keys = {e.name: key for w, e, key in requested if w == workload}
        missing = [name for name, key in keys.items() if key not in finished]
        if not missing:
            continue
        if model is None:
            say(f"building {cfg.model.name}")
            model = architecture.build(cfg.model, device, settings.layers)
        chosen = [e for e in entrants if e.name in (*missing, *beside)]
        rows = timing.measure(model, chosen, workload, settings)
        records.append(path, [row | {"key": keys[row["method"]], "workload": workload.name} for row in rows])
    known = records.latest(records.read(path))
    wanted = [known[key] for *_, key in requested if key in known]
    if not older:
        return wanted
    # rows of earlier sessions come with the full cache of their own session
    shown = {(r["session"], r["key"]) for r in wanted}
    sessions = {r["session"] for r in wanted}
    session_rows = [r for r in records.read(path) if r["session"] in sessions and r["method"] in beside]
    return [*wanted, *(r for r in session_rows if (r["session"], r["key"]) not in shown)]


def _entrants(cfg: RunConfig, peers: Sequence[Peer], ways: Sequence[str]) -> list[Entrant]:
    """Return what is timed: the full cache, then the methods, each in all ``ways`` to run a step, then the peers."""
    full = ChainConfig(Chain(), "full")
    chains = [full, *(c for c in cfg.chains if c.chain.stages)]
    timed = {"plain": [Entrant(c.label, c) for c in chains]}
    timed["graph"] = [Entrant(f"{c.label} step=graph", c, graph=True) for c in chains]
    return [
        *timed["plain"][: "plain" not in ways],
        *(entrant for way in dict.fromkeys(ways) for entrant in timed[way]),
        *(Entrant(p.name, peer=p) for p in peers),
    ]


def _settings(cfg: RunConfig, overrides: Sequence[str], options: Mapping[str, Any], device: torch.device) -> Settings:
    dtype = load.resolve_dtype(cfg.model, device, architecture.model_config(cfg.model))
    facts = {
        "model": cfg.model_name,
        "weights": cfg.model.weights,
        "dtype": str(dtype).removeprefix("torch."),
        **environment.facts(device),
    }
    return Settings(
        tuple(overrides),
        facts,
        sample=options["steps"] if options["generate"] == "sampled" else None,
        limit=options["memory_limit"],
        **{name: options[name] for name in ("repeats", "warmup", "check", "seed", "layers")},
    )


def _print_plan(
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


def refuse_keys(what: str, given: Iterable[str], top: Collection[str], allowed: Sequence[str]) -> None:
    """Raise UsageError for a key that only runs use, unless it is in ``top``. Benchmarks read and score no answers."""
    for key in given:
        if key.partition(".")[0] in ("dataset", "prompt") or (key in top_level() and key not in top):
            raise unknown(f"key of bench {what}", key, allowed)


def shape_of(cfg: RunConfig) -> Shape:
    """Return the model's shape as its entry in conf/model states it, or else as its checkpoint does."""
    if cfg.model.shape is not None:
        return from_entry(cfg.model.shape)
    return from_config(load.locate(cfg.model).config)


def alias(override: str) -> str:
    """Return an override with a short dtype (fp16, bf16, fp32) written in full."""
    key, sign, value = override.partition("=")
    return f"{key}={DTYPES.get(value, value)}" if sign and key in ("dtype", "model.dtype") else override
