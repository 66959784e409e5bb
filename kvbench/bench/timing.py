"""Time methods and peers in turns on one workload: warm-up, repeats in shuffled order, medians with quartiles."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch
from transformers import PreTrainedModel

from kvbench.base.errors import KvbenchError
from kvbench.base.visible import say
from kvbench.bench import environment, generation_pass, peak, peers, roofline
from kvbench.bench.architecture import weight_bytes
from kvbench.bench.generation_pass import Pass
from kvbench.bench.peak import Peak, PeakAnswer
from kvbench.bench.records import (
    FAILED,
    FINISHED,
    MEASURED,
    NOT_RUN,
    OOM,
    REFUSED,
    RepeatSpread,
    Row,
    hash_identity,
    summarise_repeats,
)
from kvbench.bench.workload import Workload, draw_prompts
from kvbench.engine.memory import is_out_of_memory, release
from kvbench.methods.core.resolve import ChainConfig

TOGETHER = "its prompts are read all at once, kvbench's one by one"
GRAPH = "recording the graph is part of build"
ON_CPU = "a CPU runs the graph's operations one by one: a check of its answers, not of its speed"
# the fields of a pass that become quantities of its row
SECONDS = ("ttft", "prefill", "compress", "build", "decode", "tpot", "attention", "total")
T = TypeVar("T")


@dataclass(frozen=True)
class Settings:
    """The settings of a session.

    overrides: the arguments of the run that defines the chains, for child processes.
    facts: the machine, versions and model, for every row.
    repeats: how many passes of each entrant are timed.
    warmup: how many passes of each entrant run before, without being timed.
    sample: how many steps run at each cache length; None to run all.
    check: whether one full generation runs beside sampled ones.
    seed: the seed of the random prompts and of the order of entrants.
    limit: GiB for the whole process; None for no limit.
    layers: how many layers the model is cut to; None for all.
    """

    overrides: tuple[str, ...]
    facts: Mapping[str, object]
    repeats: int = 3
    warmup: int = 1
    sample: int | None = None
    check: bool = False
    seed: int = 0
    limit: float | None = None
    layers: int | None = None

    def identity(self) -> dict[str, object]:
        """Return the settings that decide a row's numbers, besides its entrant and workload."""
        return {"sample": self.sample, "limit": self.limit, "layers": self.layers, "seed": self.seed}


@dataclass(frozen=True)
class Entrant:
    """One entrant to be timed: a peer, or a chain of kvbench.

    name: the entrant's name in rows and tables.
    config: the chain of kvbench with its label; None for a peer.
    peer: the peer; None for a chain.
    graph: whether one recorded decode step is replayed in place of plain steps.
    """

    name: str
    config: ChainConfig | None = None
    peer: peers.Peer | None = None
    graph: bool = False

    def identity(self) -> dict[str, object]:
        """Return the facts that decide the entrant's numbers, besides model, workload and settings."""
        if self.config is None:
            return {"peer": self.name}
        chain = self.config.chain
        facts: dict[str, object] = {"method": chain.name}
        facts |= chain.identity()
        # state only a graph, since stored rows of plain steps have keys without it
        if self.graph:
            facts["step"] = "graph"
        return facts

    def marks(self, device: torch.device) -> list[str]:
        """Return the remarks that belong beside the entrant's row."""
        remarks = []
        on_cpu = device.type == "cpu"
        if self.peer is not None:
            remarks.append(TOGETHER)
            remarks.extend(self.peer.marks)
            if on_cpu:
                remarks.extend(self.peer.cpu_marks)
        elif self.graph:
            remarks.append(GRAPH)
            if on_cpu:
                remarks.append(ON_CPU)
        return remarks


def make_row_key(entrant: Entrant, workload: Workload, settings: Settings) -> str:
    """Return the key of a row's identity: entrant, workload, settings and machine."""
    # another machine measures a row again; other versions or another number of repeats do not
    identity: dict[str, object] = {"who": entrant.identity(), "workload": workload.name}
    identity |= settings.identity()
    for name in ("model", "weights", "dtype", "device", "threads", "paths"):
        identity[name] = settings.facts.get(name)
    return hash_identity(identity)


def find_obstacle(entrant: Entrant, workload: Workload) -> str:
    """Return why an entrant cannot run here; '' if it can. Only peers have obstacles, such as a missing package."""
    if entrant.peer is None:
        return ""
    reason = entrant.peer.reason_against()
    if not reason and workload.batch is None:
        return "the largest batch is searched for kvbench's methods alone"
    return reason


@dataclass
class Trial:
    """The measurement of one entrant on one workload, as far as it has come.

    model: the model, which all entrants share.
    entrant: the entrant.
    settings: the settings of the session.
    workload: the workload; where the largest batch is asked for, that batch is set once it is found.
    ask_process: measures memory in a process of its own, so that this process's other tensors do not count.
    status: MEASURED, or how the measurement ended early.
    reason: the reason why it ended early; '' for none.
    peak: the peak of memory; None until it is measured.
    passes: the timed passes so far.
    full: a pass in which every step ran, to check passes that run only samples of their steps; None without such a
    check.
    """

    model: PreTrainedModel
    entrant: Entrant
    workload: Workload
    settings: Settings
    # a test can replace the child process
    ask_process: Callable[..., PeakAnswer] = peak.ask_child
    status: str = MEASURED
    reason: str = ""
    peak: Peak | None = None
    passes: list[Pass] = field(default_factory=list)
    full: Pass | None = None

    @property
    def going(self) -> bool:
        """True unless something has ended the trial."""
        return self.status == MEASURED

    def tell(self, text: str) -> None:
        """Print a line of progress, with the workload and the entrant in front of ``text``."""
        say(f"{self.workload.name} {self.entrant.name}: {text}")

    def end(self, status: str, reason: str) -> None:
        """Record that the trial has ended early, with a ``status`` other than MEASURED and the ``reason``."""
        self.status, self.reason = status, reason

    def attempt(self, run: Callable[[], T]) -> T | None:
        """Return the result of ``run``. If it fails, end the trial and return None."""
        try:
            return run()
        except KvbenchError as error:
            self.end(REFUSED, str(error))
        except Exception as error:
            # a failing peer, or a user's method, must not end the measurement of the others
            if is_out_of_memory(error):
                self.end(OOM, "")
            else:
                # the reason stands in a note of the table, so only its first line is kept
                first_line, *_ = f"{type(error).__name__}: {error}".split("\n")
                self.end(FAILED, first_line)
        # leave the except blocks first, so that no traceback keeps the failed attempt's tensors alive
        release()
        return None

    def ask(self, quantity: str) -> PeakAnswer:
        """Measure memory in a child process and return its answer. ``quantity`` is that of a ``PeakRequest``."""
        # the child finds a chain by its label: the name of a graph's row also says how it steps
        label = self.entrant.name if self.entrant.config is None else self.entrant.config.label
        return self.ask_process(
            quantity,
            self.settings.overrides,
            label,
            self.workload.name,
            seed=self.settings.seed,
            sample=self.settings.sample,
            limit=self.settings.limit,
            layers=self.settings.layers,
            graph=self.entrant.graph,
        )

    def prepare(self) -> None:
        """Determine the batch and run the warm-up. If the entrant cannot run, end the trial."""
        why = find_obstacle(self.entrant, self.workload)
        if why:
            self.end(NOT_RUN, why)
        elif self.workload.batch is not None:
            self.warm_up()
        else:
            self._prepare_largest_batch()

    def _prepare_largest_batch(self) -> None:
        """Find the largest batch that survives the warm-up. If there is none, end the trial."""
        self.tell("the largest batch")
        batch = self.attempt(self.find_largest_batch)
        if not batch:
            # a failed search has ended the trial already
            if self.going:
                self.end(OOM, "not even one row fits")
            return
        self.workload = self.workload.sized(batch)
        self.warm_up()
        # a whole pass can take a little more than the search tried; then leave a twentieth of the rows out
        while self.status == OOM and batch > 1:
            self.status, self.reason = MEASURED, ""
            batch = min(batch - 1, int(0.95 * batch))
            self.workload = self.workload.sized(batch)
            self.warm_up()

    def find_largest_batch(self) -> int:
        """Return the largest batch that fits; 0 if not even one row fits."""
        if self.model.device.type == "cpu":
            return int(self.ask("largest").get("batch", 0))
        # ``find_obstacle`` has ended the trial of a peer whose largest batch is asked for
        assert self.entrant.config is not None
        chain, seed = self.entrant.config.chain, self.settings.seed

        def rows_fit(rows: int) -> bool:
            return peak.fits_memory(self.model, chain, self.workload.sized(rows), seed)

        return peak.find_largest_batch(rows_fit)

    def warm_up(self) -> None:
        """Run the passes that are not timed. On a CPU, measure the peak of memory before, in a child process."""
        if self.model.device.type == "cpu":
            self.tell("memory")
            quantity = "peak" if self.entrant.config is not None else "peak of a peer"
            answer = self.attempt(lambda: self.ask(quantity))
            if answer is None:
                return
            if answer.get("oom"):
                self.end(OOM, "out of memory in a process of its own")
                return
            self.peak = Peak(answer["allocated"], answer["reserved"])
        # the first passes compile kernels and fill the allocator's pools
        for _ in range(self.settings.warmup):
            self.tell("warm-up")
            if self.attempt(self.run_pass) is None:
                return

    def generate(self, sample: int | None) -> Pass:
        """Run the workload once and return its pass.

        sample: how many steps run at each of several cache lengths; None to run all. Peers always run all.
        """
        ids = draw_prompts(self.workload, int(self.model.config.vocab_size), self.settings.seed)
        if self.entrant.peer is not None:
            return peers.run(self.model, self.entrant.peer, ids, self.workload.new)
        assert self.entrant.config is not None
        chain, new = self.entrant.config.chain, self.workload.new
        return generation_pass.run(self.model, chain, ids, new=new, sample=sample, graph=self.entrant.graph)

    def run_pass(self) -> Pass:
        """Run the workload as it is timed and return its pass. The first time, also measure a GPU's peak of memory."""
        if self.peak is not None:
            return self.generate(self.settings.sample)
        cost, self.peak = peak.watch_memory(lambda: self.generate(self.settings.sample), self.model.device)
        return cost

    def build_row(self, bandwidth: float) -> Row:
        """Return the row of the trial. Its quantities are empty if the trial did not run to its end.

        bandwidth: the bytes that the device reads and writes in a second.
        """
        facts, batch = self.settings.facts, self.workload.batch
        row: Row = {
            "key": "",  # ``bench time`` sets it when it stores the row
            "method": self.entrant.name,
            "kind": "kvbench" if self.entrant.peer is None else "peer",
            "model": facts.get("model"),
            "weights": facts.get("weights"),
            "dtype": facts.get("dtype"),
            "prompt": self.workload.prompt,
            "new": self.workload.new,
            "batch": batch,
            "status": self.status,
            "reason": self.reason,
            "marks": [],
            "quantities": {},
        }
        if not self.going or not self.passes:
            return row
        assert batch is not None, "the batch was found before the first pass"
        row["quantities"] = self._summarise_quantities(batch)
        if any(cost.integrated for cost in self.passes):
            row["marks"].append("integrated")
        row["marks"].extend(self.entrant.marks(self.model.device))
        # compare the typical step with the bytes that a step reads on average
        step = row["quantities"]["tpot"]["median"]
        read_bytes = sum(cost.read_bytes for cost in self.passes) / len(self.passes)
        row["roofline"] = roofline.compute_roofline(self.model, batch, read_bytes, bandwidth=bandwidth, step=step)
        row["sampled"] = []
        for cost in self.passes:
            sampled = cost.sampled
            if sampled is not None:
                row["sampled"].append({"starts": sampled.starts, "width": sampled.width, "times": sampled.times})
        return row

    def _summarise_quantities(self, batch: int) -> dict[str, RepeatSpread]:
        """Return the distribution over the passes of every measured quantity, for ``batch`` rows."""
        values: dict[str, list[float]] = {}
        for name in SECONDS:
            seconds = [getattr(cost, name) for cost in self.passes]
            # attention inside a recorded or compiled step has no time of its own
            if None not in seconds:
                values[name] = seconds
        # new tokens of all rows a second: over the total, and over the decode steps alone
        values["throughput"] = [batch * self.workload.new / cost.total for cost in self.passes]
        values["decode_throughput"] = [batch / cost.tpot for cost in self.passes]
        values["cache_bytes"] = [float(cost.cache_bytes) for cost in self.passes]
        values["weight_bytes"] = [float(weight_bytes(self.model))]
        values["batch"] = [float(batch)]
        if self.peak is not None:
            values["peak_allocated"] = [float(self.peak.allocated)]
            values["peak_reserved"] = [float(self.peak.reserved)]
        if self.full is not None:
            # the estimated total over the total of a generation in which all steps ran
            values["check"] = [cost.total / self.full.total for cost in self.passes]
        return {name: summarise_repeats(samples) for name, samples in values.items()}


def measure_entrants(
    model: PreTrainedModel,
    entrants: Sequence[Entrant],
    workload: Workload,
    settings: Settings,
    ask_process: Callable[..., PeakAnswer] = peak.ask_child,
) -> list[Row]:
    """Return one row per entrant, measured in turns in this process.

    Running out of memory, a refusal or a failure becomes the row's status with its reason. The other entrants go on.
    ``ask_process`` measures memory in a process of its own.
    """
    # all rows of this call share a session: only times of one session are compared
    session = f"{time.strftime('%Y%m%dT%H%M%S')}-{random.randrange(16**4):04x}"
    trials = [Trial(model, entrant, workload, settings, ask_process) for entrant in entrants]
    # before the limit holds, since the copy needs memory of its own
    bandwidth = roofline.measure_bandwidth(model.device)
    # on a CPU the limit holds in the child processes that measure peaks
    limit = settings.limit if model.device.type == "cuda" else None
    with peak.limit_memory(limit, model.device):
        for trial in trials:
            trial.prepare()
        orders = _repeat_in_turns(trials, settings)
        if settings.check:
            for trial in trials:
                if trial.going and any(cost.integrated for cost in trial.passes):
                    trial.tell("all steps, to check")
                    trial.full = trial.attempt(partial(trial.generate, sample=None))
        # read the clocks while the device is still warm from the work
        facts = dict(settings.facts) | environment.read_facts_after_work(model.device)
    shared = {"session": session, "seed": settings.seed, "orders": orders, "facts": facts}
    return [trial.build_row(bandwidth) | shared for trial in trials]


def _repeat_in_turns(trials: Sequence[Trial], settings: Settings) -> list[list[str]]:
    """Run and record the timed passes of all trials. Return the entrants' names in the order of each repeat.

    A repeat runs one pass of every trial that has not ended.
    """
    shuffler = random.Random(settings.seed)
    orders = []
    for i in range(settings.repeats):
        going = [trial for trial in trials if trial.going]
        # shuffle, so that no entrant always follows the same other one
        shuffler.shuffle(going)
        orders.append([trial.entrant.name for trial in going])
        for trial in going:
            trial.tell(f"{i + 1} of {settings.repeats}")
            cost = trial.attempt(trial.run_pass)
            if cost is not None:
                trial.passes.append(cost)
    return orders


def is_finished(row: Row | None, entrant: Entrant, workload: Workload, settings: Settings) -> bool:
    """Return True if a row need not be measured again: it is finished, or its peer still cannot run.

    A row with fewer repeats than asked for is not finished, nor a row that lacks the requested check.
    """
    if row is None:
        return False
    if row["status"] == NOT_RUN:
        return bool(row["reason"] == find_obstacle(entrant, workload))
    if row["status"] != MEASURED:
        # a row that was too large or refused stays so; a failure may have had a passing cause
        return row["status"] in FINISHED
    if settings.check and "integrated" in row["marks"] and "check" not in row["quantities"]:
        return False
    return bool(row["quantities"]["total"]["n"] >= settings.repeats)
