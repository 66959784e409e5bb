"""Methods and peers timed in turns on one workload: warm-up, repeats in shuffled order, medians with quartiles."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from kvbench.bench import environment, generation_pass, peak, peers, roofline
from kvbench.bench.architecture import weight_bytes
from kvbench.bench.generation_pass import Pass
from kvbench.bench.peak import Peak
from kvbench.bench.records import FAILED, FINISHED, FULL, MEASURED, NOT_RUN, OOM, REFUSED, Row, key, spread
from kvbench.bench.workload import Workload, prompts
from kvbench.engine.memory import is_out_of_memory, release
from kvbench.errors import KvbenchError
from kvbench.methods.resolve import ChainConfig

TOGETHER = "its prompts are read all at once, kvbench's one by one"
GRAPH = "recording the graph is part of build"
ON_CPU = "a CPU runs the graph's operations one by one: a check of its answers, not of its speed"
SECONDS = ("ttft", "prefill", "compress", "build", "decode", "tpot", "attention", "total")


@dataclass(frozen=True)
class Settings:
    """How a session measures.

    overrides: of the run that the chains come from, for processes of their own. sample: steps at each cache length, or
    None to run all. check: one full generation beside the sampled ones. limit: GiB for the whole process.
    """

    overrides: tuple[str, ...]
    facts: Mapping[str, Any]
    repeats: int = 3
    warmup: int = 1
    sample: int | None = None
    check: bool = False
    seed: int = 0
    limit: float | None = None
    layers: int | None = None


@dataclass(frozen=True)
class Entrant:
    """What is timed: a chain of kvbench, its decode steps plain or by a recorded graph, or a peer."""

    name: str
    chain: ChainConfig | None = None
    peer: peers.Peer | None = None
    graph: bool = False

    def identity(self) -> dict[str, Any]:
        """What decides its numbers beside model, workload and settings."""
        if self.chain is None:
            return {"peer": self.name}
        by = {"step": "graph"} if self.graph else {}
        return {"method": self.chain.chain.name, **self.chain.chain.identity(), **by}

    @property
    def label(self) -> str:
        """Of its chain, or the peer's name."""
        return self.name if self.chain is None else self.chain.label

    def marks(self, device: torch.device) -> tuple[str, ...]:
        """What a reader of its row must know."""
        if self.peer is not None:
            return (TOGETHER, *self.peer.marks(device))
        return (GRAPH, *([ON_CPU] if device.type == "cpu" else [])) if self.graph else ()


@dataclass
class _Tried:
    """What has come of one entrant so far."""

    entrant: Entrant
    workload: Workload
    status: str = MEASURED
    reason: str = ""
    peak: Peak | None = None
    full: Pass | None = None


def row_key(entrant: Entrant, workload: Workload, settings: Settings) -> str:
    """Of a row's identity: who, on what, how and where."""
    how = {"sample": settings.sample, "limit": settings.limit, "layers": settings.layers, "seed": settings.seed}
    where = {k: settings.facts.get(k) for k in ("model", "weights", "dtype", "device", "threads", "paths")}
    return key({"who": entrant.identity(), "workload": workload.name, **how, **where})


def why_not(entrant: Entrant, workload: Workload, device: torch.device) -> str:
    """Why a peer does not run here; '' if it does, and for kvbench's own methods."""
    if entrant.peer is None:
        return ""
    searched = "the largest batch is searched for kvbench's methods alone" if workload.batch is None else ""
    return entrant.peer.missing(device) or searched


def measure(
    model: PreTrainedModel,
    entrants: Sequence[Entrant],
    workload: Workload,
    settings: Settings,
    say: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """One row per entrant, measured in turns in this process.

    Out of memory, a refusal or a failure is the row's status with its reason; the others go on.
    """
    session, order = f"{time.strftime('%Y%m%dT%H%M%S')}-{random.randrange(16**4):04x}", random.Random(settings.seed)
    tried = [_Tried(e, workload) for e in entrants]
    # on a CPU the limit is that of the processes in which peaks are measured
    limit = settings.limit if model.device.type == "cuda" else None
    with peak.limited(limit, model.device), peak.Processes() as processes:
        for t in tried:
            _enter(model, t, settings, processes, say)
        bandwidth = roofline.copy_bandwidth(model.device)
        found: dict[str, list[Pass]] = {e.name: [] for e in entrants}
        orders = []
        for i in range(settings.repeats):
            going = [t for t in tried if t.status == MEASURED]
            order.shuffle(going)
            orders.append([t.entrant.name for t in going])
            for t in going:
                say(f"{t.workload.name} {t.entrant.name}: {i + 1} of {settings.repeats}")
                done = _try(t, lambda t=t: _timed(model, t, settings))  # type: ignore[misc]
                if done is not None:
                    found[t.entrant.name].append(done)
        for t in tried:
            if settings.check and t.status == MEASURED and any(p.integrated for p in found[t.entrant.name]):
                say(f"{t.workload.name} {t.entrant.name}: all steps, to check")
                t.full = _try(t, lambda t=t: _pass(model, t, replace(settings, sample=None)))  # type: ignore[misc]
        facts = {**settings.facts, **environment.under_load(model.device)}
    together = {"session": session, "seed": settings.seed, "orders": orders, "facts": facts}
    return [_row(model, t, found[t.entrant.name], bandwidth, settings) | together for t in tried]


def _enter(
    model: PreTrainedModel, t: _Tried, settings: Settings, processes: peak.Processes, say: Callable[[str], None]
) -> None:
    """Settle the batch and get ready."""
    name, chain, asked = t.entrant.name, t.entrant.chain, t.workload.batch
    if why := why_not(t.entrant, t.workload, model.device):
        t.status, t.reason = NOT_RUN, why
        return
    options = {"seed": settings.seed, "limit": settings.limit, "layers": settings.layers, "sample": settings.sample}
    options["graph"] = t.entrant.graph
    if chain is not None and t.workload.batch is None:
        say(f"{t.workload.name} {name}: the largest batch")
        batch = _try(t, lambda: _largest(model, chain, t.workload, settings, processes, options))
        if not batch:
            t.status, t.reason = (OOM, "not even one row fits") if t.status == MEASURED else (t.status, t.reason)
            return
        t.workload = t.workload.sized(batch)
    searched = chain is not None and asked is None
    _ready(model, t, settings, processes, options, say)
    while searched and t.status == OOM and t.workload.batch is not None and t.workload.batch > 1:
        # the search stops short of a whole pass: a few rows less
        t.status, t.reason = MEASURED, ""
        t.workload = t.workload.sized(min(t.workload.batch - 1, int(0.95 * t.workload.batch)))
        _ready(model, t, settings, processes, options, say)


def _ready(
    model: PreTrainedModel,
    t: _Tried,
    settings: Settings,
    processes: peak.Processes,
    options: Mapping[str, Any],
    say: Callable[[str], None],
) -> None:
    """Measure the peak of memory, and warm up."""
    name = t.entrant.name
    if model.device.type == "cpu":
        say(f"{t.workload.name} {name}: memory")
        what = "peak" if t.entrant.chain is not None else "peak of a peer"
        asked = _try(t, lambda: processes.ask(what, settings.overrides, t.entrant.label, t.workload, options))
        if asked is None:
            return
        if asked.get("oom"):
            t.status, t.reason = OOM, "out of memory in a process of its own"
            return
        t.peak = Peak(asked["allocated"], asked["reserved"])
    for i in range(settings.warmup):
        say(f"{t.workload.name} {name}: warm-up")
        done = _try(t, lambda: peak.watched(lambda: _pass(model, t, settings), model.device))
        if done is None:
            return
        if i == 0 and done[1] is not None:
            t.peak = done[1]


def _largest(
    model: PreTrainedModel,
    c: ChainConfig,
    workload: Workload,
    settings: Settings,
    processes: peak.Processes,
    options: Mapping[str, Any],
) -> int:
    if model.device.type == "cpu":
        found = processes.ask("largest", settings.overrides, c.label, workload, options)
        return int(found.get("batch", 0))
    return peak.largest(lambda b: peak.fits(model, c.chain, workload.sized(b), settings.seed))


def _pass(model: PreTrainedModel, t: _Tried, settings: Settings) -> Pass:
    ids = prompts(t.workload, int(model.config.vocab_size), settings.seed)
    if t.entrant.peer is not None:
        return peers.run(model, t.entrant.peer, ids, t.workload.new)
    assert t.entrant.chain is not None
    return generation_pass.run(
        model, t.entrant.chain.chain, ids, t.workload.new, settings.sample, graph=t.entrant.graph
    )


def _timed(model: PreTrainedModel, t: _Tried, settings: Settings) -> Pass:
    if t.peak is not None:
        return _pass(model, t, settings)
    # without a warm-up nobody has seen yet how much memory it takes
    done, t.peak = peak.watched(lambda: _pass(model, t, settings), model.device)
    return done


def _try(t: _Tried, run: Callable[[], Any]) -> Any:
    """What ``run`` returns; None, with the status and reason noted, if it fails."""
    try:
        return run()
    except KvbenchError as error:
        t.status, t.reason = REFUSED, str(error)
    except Exception as error:
        full = is_out_of_memory(error)
        t.status, t.reason = (OOM, "") if full else (FAILED, f"{type(error).__name__}: {error}".split("\n")[0])
    release()
    return None


def _row(model: PreTrainedModel, t: _Tried, found: Sequence[Pass], bandwidth: float, settings: Settings) -> Row:
    asked = Workload(t.workload.prompt, t.workload.new, t.workload.batch)
    row: Row = {
        "key": "",
        "method": t.entrant.name,
        "kind": "peer" if t.entrant.peer is not None else "kvbench",
        **{k: settings.facts.get(k) for k in ("model", "weights", "dtype")},
        "prompt": asked.prompt,
        "new": asked.new,
        "batch": asked.batch,
        "status": t.status,
        "reason": t.reason,
        "marks": [],
        "quantities": {},
    }
    if t.status != MEASURED or not found:
        return row
    assert asked.batch is not None
    seconds = {name: [getattr(p, name) for p in found] for name in SECONDS}
    values: dict[str, list[float]] = {name: taken for name, taken in seconds.items() if None not in taken}
    values["throughput"] = [asked.batch * asked.new / p.total for p in found]
    values["decode_throughput"] = [asked.batch / p.tpot for p in found]
    values["cache_bytes"] = [float(p.cache_bytes) for p in found]
    values["weight_bytes"] = [float(weight_bytes(model))]
    values["batch"] = [float(asked.batch)]
    if t.peak is not None:
        values |= {"peak_allocated": [float(t.peak.allocated)], "peak_reserved": [float(t.peak.reserved)]}
    if t.full is not None:
        values["check"] = [p.total / t.full.total for p in found]
    row["quantities"] = {name: spread(v) for name, v in values.items()}
    row["marks"] = ["integrated"] if any(p.integrated for p in found) else []
    row["marks"] += t.entrant.marks(model.device)
    step = row["quantities"]["tpot"]["median"]
    read = sum(p.read_bytes for p in found) / len(found)
    row["roofline"] = roofline.of(model, asked.batch, read, bandwidth, step).as_json()
    row["sampled"] = [
        {"starts": p.sampled.starts, "width": p.sampled.width, "times": p.sampled.times} for p in found if p.sampled
    ]
    return row


def finished(
    known: Mapping[str, Row],
    entrants: Sequence[Entrant],
    workloads: Sequence[Workload],
    settings: Settings,
    device: torch.device,
) -> dict[str, Row]:
    """Of rows by key, those that need not be tried again: what ended, and peers that still cannot run.

    A row of fewer repeats than are asked for, or without the check that is, has not ended.
    """
    barred = {row_key(e, w, settings): why_not(e, w, device) for w in workloads for e in entrants}
    return {
        k: row
        for k, row in known.items()
        if (row["status"] in FINISHED and _enough(row, settings))
        or (row["status"] == NOT_RUN and row["reason"] == barred.get(k))
    }


def _enough(row: Row, settings: Settings) -> bool:
    if row["status"] != MEASURED:
        return True
    unchecked = settings.check and "integrated" in row["marks"] and "check" not in row["quantities"]
    return row["quantities"]["total"]["n"] >= settings.repeats and not unchecked


def sessions(
    model: Callable[[], PreTrainedModel],
    entrants: Sequence[Entrant],
    workloads: Sequence[Workload],
    settings: Settings,
    finished: Mapping[str, Row],
    say: Callable[[str], None] = lambda text: None,
    beside: Sequence[str] = (FULL,),
) -> Iterator[list[Row]]:
    """The rows that are missing of each workload, as they are ready; those of ``beside`` are measured with them again.

    Nothing is loaded where nothing is missing.
    """
    for workload in workloads:
        keys = {e.name: row_key(e, workload, settings) for e in entrants}
        missing = {e.name for e in entrants if keys[e.name] not in finished}
        if not missing:
            continue
        chosen = [e for e in entrants if e.name in missing or e.name in beside]
        rows = measure(model(), chosen, workload, settings, say)
        yield [row | {"key": keys[row["method"]], "workload": workload.name} for row in rows]
