"""Time methods and peers in turns on one workload: warm-up, repeats in shuffled order, medians with quartiles."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from kvbench.base.errors import KvbenchError, say
from kvbench.bench import environment, generation_pass, peak, peers, roofline
from kvbench.bench.architecture import weight_bytes
from kvbench.bench.generation_pass import Pass
from kvbench.bench.peak import Peak
from kvbench.bench.records import FAILED, FINISHED, MEASURED, NOT_RUN, OOM, REFUSED, Row, key, spread
from kvbench.bench.workload import Workload, prompts
from kvbench.engine.memory import is_out_of_memory, release
from kvbench.methods.core.resolve import ChainConfig

TOGETHER = "its prompts are read all at once, kvbench's one by one"
GRAPH = "recording the graph is part of build"
ON_CPU = "a CPU runs the graph's operations one by one: a check of its answers, not of its speed"
SECONDS = ("ttft", "prefill", "compress", "build", "decode", "tpot", "attention", "total")


@dataclass(frozen=True)
class Settings:
    """The settings of a session.

    overrides: the arguments of the run that the chains come from, for child processes.
    facts: the machine, versions and model, for every row.
    sample: how many steps run at each cache length; None to run all.
    check: whether one full generation runs beside sampled ones.
    limit: GiB for the whole process; None for no limit.
    layers: how many layers the model is cut to; None for all.
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

    def identity(self) -> dict[str, Any]:
        """Return the settings that decide a row's numbers, besides its entrant and workload."""
        return {k: getattr(self, k) for k in ("sample", "limit", "layers", "seed")}


@dataclass(frozen=True)
class Entrant:
    """One entrant to be timed: a chain of kvbench, its decode steps plain or by a recorded graph, or a peer."""

    name: str
    chain: ChainConfig | None = None
    peer: peers.Peer | None = None
    graph: bool = False

    def identity(self) -> dict[str, Any]:
        """Return the facts that decide its numbers, besides model, workload and settings."""
        if self.chain is None:
            return {"peer": self.name}
        by = {"step": "graph"} if self.graph else {}
        return {"method": self.chain.chain.name, **self.chain.chain.identity(), **by}

    def marks(self, device: torch.device) -> tuple[str, ...]:
        """Return the remarks that belong beside its row."""
        on_cpu = device.type == "cpu"
        if self.peer is not None:
            return (TOGETHER, *self.peer.marks, *(self.peer.cpu_marks if on_cpu else ()))
        return (GRAPH, *([ON_CPU] if on_cpu else [])) if self.graph else ()


def row_key(entrant: Entrant, workload: Workload, settings: Settings) -> str:
    """Return the key of a row's identity: entrant, workload, settings and machine."""
    where = {k: settings.facts.get(k) for k in ("model", "weights", "dtype", "device", "threads", "paths")}
    return key({"who": entrant.identity(), "workload": workload.name, **settings.identity(), **where})


def why_not(entrant: Entrant, workload: Workload) -> str:
    """Return why a peer does not run here. Return '' if it does, and for kvbench's own methods."""
    if entrant.peer is None:
        return ""
    searched = "the largest batch is searched for kvbench's methods alone" if workload.batch is None else ""
    return entrant.peer.missing() or searched


@dataclass
class Trial:
    """The trial of one entrant on one workload, with its passes so far."""

    model: PreTrainedModel
    entrant: Entrant
    workload: Workload
    settings: Settings
    status: str = MEASURED
    reason: str = ""
    peak: Peak | None = None
    passes: list[Pass] = field(default_factory=list)
    full: Pass | None = None

    @property
    def going(self) -> bool:
        """Return True unless something has ended the trial."""
        return self.status == MEASURED

    def tell(self, text: str) -> None:
        """Report the progress of the trial."""
        say(f"{self.workload.name} {self.entrant.name}: {text}")

    def attempt(self, run: Callable[[], Any]) -> Any:
        """Return the result of ``run``. If it fails, record status and reason, and return None."""
        try:
            return run()
        except KvbenchError as error:
            self.status, self.reason = REFUSED, str(error)
        except Exception as error:
            self.status, self.reason = FAILED, f"{type(error).__name__}: {error}".split("\n")[0]
            if is_out_of_memory(error):
                self.status, self.reason = OOM, ""
        release()
        return None

    def ask(self, what: str) -> dict[str, Any]:
        """Measure in a child process and return its answer."""
        label = self.entrant.name if self.entrant.chain is None else self.entrant.chain.label
        options = {**self.settings.identity(), "graph": self.entrant.graph}
        return peak.ask(what, self.settings.overrides, label, self.workload.name, **options)

    def enter(self) -> None:
        """Determine the batch and run the warm-up."""
        if why := why_not(self.entrant, self.workload):
            self.status, self.reason = NOT_RUN, why
            return
        searched = self.workload.batch is None
        if searched:
            self.tell("the largest batch")
            batch = self.attempt(self.largest)
            if not batch:
                if self.going:
                    self.status, self.reason = OOM, "not even one row fits"
                return
            self.workload = self.workload.sized(batch)
        self.ready()
        while searched and self.status == OOM and (batch := self.workload.batch or 0) > 1:
            # the search stops short of a whole pass: a few rows less
            self.status, self.reason = MEASURED, ""
            self.workload = self.workload.sized(min(batch - 1, int(0.95 * batch)))
            self.ready()

    def largest(self) -> int:
        """Return the largest batch that fits; 0 if not even one row does."""
        if self.model.device.type == "cpu":
            return int(self.ask("largest").get("batch", 0))
        assert self.entrant.chain is not None
        chain, seed = self.entrant.chain.chain, self.settings.seed
        return peak.largest(lambda rows: peak.fits(self.model, chain, self.workload.sized(rows), seed))

    def ready(self) -> None:
        """Measure the peak of memory in a child process on a CPU, and warm up."""
        if self.model.device.type == "cpu":
            self.tell("memory")
            what = "peak" if self.entrant.chain is not None else "peak of a peer"
            answer = self.attempt(lambda: self.ask(what))
            if answer is None:
                return
            if answer.get("oom"):
                self.status, self.reason = OOM, "out of memory in a process of its own"
                return
            self.peak = Peak(answer["allocated"], answer["reserved"])
        for _ in range(self.settings.warmup):
            self.tell("warm-up")
            if self.attempt(self.watched_pass) is None:
                return

    def generate(self, sample: int | None) -> Pass:
        """Run the workload once and return its pass."""
        ids = prompts(self.workload, int(self.model.config.vocab_size), self.settings.seed)
        if self.entrant.peer is not None:
            return peers.run(self.model, self.entrant.peer, ids, self.workload.new)
        assert self.entrant.chain is not None
        chain = self.entrant.chain.chain
        return generation_pass.run(self.model, chain, ids, self.workload.new, sample, graph=self.entrant.graph)

    def watched_pass(self) -> Pass:
        """Run the workload as it is timed and return its pass. The first time, measure a GPU's peak of memory, too."""
        if self.peak is not None:
            return self.generate(self.settings.sample)
        done, self.peak = peak.watched(lambda: self.generate(self.settings.sample), self.model.device)
        return done

    def row(self, bandwidth: float) -> Row:
        """Return the row of the trial. Its quantities are empty if it did not run to its end."""
        prompt, new, batch = self.workload.prompt, self.workload.new, self.workload.batch
        row: Row = {
            "key": "",
            "method": self.entrant.name,
            "kind": "peer" if self.entrant.peer is not None else "kvbench",
            **{k: self.settings.facts.get(k) for k in ("model", "weights", "dtype")},
            "prompt": prompt,
            "new": new,
            "batch": batch,
            "status": self.status,
            "reason": self.reason,
            "marks": [],
            "quantities": {},
        }
        if not self.going or not self.passes:
            return row
        assert batch is not None
        seconds = {name: [getattr(p, name) for p in self.passes] for name in SECONDS}
        values: dict[str, list[float]] = {name: samples for name, samples in seconds.items() if None not in samples}
        values["throughput"] = [batch * new / p.total for p in self.passes]
        values["decode_throughput"] = [batch / p.tpot for p in self.passes]
        values["cache_bytes"] = [float(p.cache_bytes) for p in self.passes]
        values["weight_bytes"] = [float(weight_bytes(self.model))]
        values["batch"] = [float(batch)]
        if self.peak is not None:
            values["peak_allocated"] = [float(self.peak.allocated)]
            values["peak_reserved"] = [float(self.peak.reserved)]
        if self.full is not None:
            values["check"] = [p.total / self.full.total for p in self.passes]
        row["quantities"] = {name: spread(v) for name, v in values.items()}
        row["marks"] = ["integrated"] if any(p.integrated for p in self.passes) else []
        row["marks"] += self.entrant.marks(self.model.device)
        step = row["quantities"]["tpot"]["median"]
        read = sum(p.read_bytes for p in self.passes) / len(self.passes)
        row["roofline"] = roofline.of(self.model, batch, read, bandwidth, step)
        sampled = [p.sampled for p in self.passes if p.sampled]
        row["sampled"] = [{"starts": s.starts, "width": s.width, "times": s.times} for s in sampled]
        return row


def measure(
    model: PreTrainedModel,
    entrants: Sequence[Entrant],
    workload: Workload,
    settings: Settings,
) -> list[Row]:
    """Return one row per entrant, measured in turns in this process.

    Out of memory, a refusal or a failure is the row's status with its reason; the others go on.
    """
    session = f"{time.strftime('%Y%m%dT%H%M%S')}-{random.randrange(16**4):04x}"
    order = random.Random(settings.seed)
    trials = [Trial(model, entrant, workload, settings) for entrant in entrants]
    # on a CPU the limit holds in the child processes that measure peaks
    limit = settings.limit if model.device.type == "cuda" else None
    with peak.limited(limit, model.device):
        for trial in trials:
            trial.enter()
        bandwidth = roofline.copy_bandwidth(model.device)
        orders = []
        for i in range(settings.repeats):
            going = [trial for trial in trials if trial.going]
            order.shuffle(going)
            orders.append([trial.entrant.name for trial in going])
            for trial in going:
                trial.tell(f"{i + 1} of {settings.repeats}")
                result = trial.attempt(trial.watched_pass)
                trial.passes += [] if result is None else [result]
        for trial in trials:
            if settings.check and trial.going and any(p.integrated for p in trial.passes):
                trial.tell("all steps, to check")
                trial.full = trial.attempt(lambda trial=trial: trial.generate(None))  # type: ignore[misc]
        facts = {**settings.facts, **environment.under_load(model.device)}
    together = {"session": session, "seed": settings.seed, "orders": orders, "facts": facts}
    return [trial.row(bandwidth) | together for trial in trials]


def settled(row: Row | None, entrant: Entrant, workload: Workload, settings: Settings) -> bool:
    """Return True if a row need not be measured again: it is finished, or its peer still cannot run.

    A row with fewer repeats than asked for, or without a check that is asked for, is not finished.
    """
    if row is None or row["status"] == NOT_RUN:
        return row is not None and row["reason"] == why_not(entrant, workload)
    if row["status"] != MEASURED:
        return row["status"] in FINISHED
    unchecked = settings.check and "integrated" in row["marks"] and "check" not in row["quantities"]
    return row["quantities"]["total"]["n"] >= settings.repeats and not unchecked
