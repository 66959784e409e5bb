"""The most memory that a pass takes, and the largest batch that fits.

On a GPU by PyTorch's allocator. On a CPU in a process of its own, by the most that was resident: ``allocated`` is what
the process grew by above a Python with everything imported (weights included, as on a GPU), ``reserved`` all of it.
"""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvbench.bench import architecture, generation_pass, peers
from kvbench.bench.sampling import moves, skip
from kvbench.bench.workload import Workload, parse, prompts
from kvbench.engine.memory import GIB, is_out_of_memory, process_memory, release
from kvbench.engine.patches import adapted
from kvbench.engine.prefill import prefill_chains
from kvbench.engine.step import build, step
from kvbench.errors import KvbenchError
from kvbench.methods.chain import Chain
from kvbench.models.interface import attached
from kvbench.run import config

MOST_ROWS = 4096
T = TypeVar("T")


@dataclass(frozen=True)
class Peak:
    """Bytes: see above."""

    allocated: int
    reserved: int


def watched(run: Callable[[], T], device: torch.device) -> tuple[T, Peak | None]:
    """What ``run`` returns, and the most memory meanwhile; None on a CPU (``Processes`` is for that)."""
    release()
    if device.type != "cuda":
        return run(), None
    torch.cuda.reset_peak_memory_stats(device)
    found = run()
    return found, Peak(torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device))


def largest(fits: Callable[[int], bool], most: int = MOST_ROWS) -> int:
    """The largest batch that fits, by doubling and then halving the gap; 0 if not even one row does."""
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def fits(model: PreTrainedModel, chain: Chain, workload: Workload, seed: int) -> bool:
    """Whether ``workload`` runs in the memory there is: its caches, one more prompt being read, its last steps."""
    full = False
    try:
        _fill(model, chain, workload, prompts(workload.sized(1), int(model.config.vocab_size), seed)[0])
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        full = True
    # only now nobody holds what the failed attempt had
    release()
    return not full


@torch.no_grad()
def _fill(model: PreTrainedModel, chain: Chain, workload: Workload, prompt: Tensor) -> None:
    """Hold what ``workload`` holds: ``prompt`` [n] is read once, and its cache copied for each other row."""
    assert workload.batch is not None
    (cache,) = prefill_chains(model, prompt, [chain])
    caches = [replace(cache, layers=copy.deepcopy(cache.layers)) for _ in range(workload.batch - 1)]
    del cache
    caches += prefill_chains(model, prompt, [chain])
    with adapted(model, chain), attached(model):
        moving, seen = moves(caches), caches[0].seen
        batch = build(model, caches, workload.new - 1, give_up=True)
        if moving:
            skip(model, batch, workload.new - 2)
        token = torch.zeros(workload.batch, 1, dtype=torch.int64, device=model.device)
        step(model, batch, token, torch.full_like(token, seen + batch[0].used))


@contextmanager
def limited(limit: float | None, device: torch.device) -> Iterator[None]:
    """At most ``limit`` GiB for this process on a GPU, weights included; lifted on exit. On a CPU: of the process."""
    if limit is None:
        yield
    elif device.type == "cuda":
        whole = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit * GIB / whole), device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, device)
    else:
        import resource

        before = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (int(process_memory("VmData") + limit * GIB), before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, before)


class Processes:
    """A process that has imported everything and does each request in a copy of itself, which may die of it."""

    def __init__(self) -> None:
        self.server: subprocess.Popen[str] | None = None

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        if self.server is not None:
            self.server.communicate()
            self.server = None

    def ask(
        self, what: str, overrides: Sequence[str], label: str, workload: Workload, options: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Do ``what`` (peak, largest; "peak of a peer") for one chain or peer; what was found, or ``{"oom": True}``.

        Raises KvbenchError where it failed otherwise.
        """
        if self.server is None:
            command = [sys.executable, "-m", "kvbench.bench.peak"]
            self.server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        asked = {"what": what, "overrides": list(overrides), "label": label, "workload": workload.name, **options}
        asked["threads"] = torch.get_num_threads()
        assert self.server.stdin is not None and self.server.stdout is not None
        self.server.stdin.write(json.dumps(asked) + "\n")
        self.server.stdin.flush()
        answer = self.server.stdout.readline()
        found = dict(json.loads(answer)) if answer else {"error": "its process ended"}
        if "error" in found:
            raise KvbenchError(f"{label} at {workload.name}: {found['error']}")
        return found


def main() -> int:
    """Answer the requests on standard input, each in a copy of this process, by one line of JSON."""
    for line in sys.stdin:
        asked = json.loads(line)
        cfg = config.parse(config.compose_config(asked["overrides"]))
        # a model without storage has everything imported
        with torch.device("meta"):
            AutoModelForCausalLM.from_config(architecture.model_config(cfg.model))
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            # standard output is for answers, whatever others write there
            os.dup2(2, 1)
            sys.stdout = sys.stderr
            os.write(writer, json.dumps(_answer(cfg, asked)).encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            answer = pipe.read()
        _, status = os.waitpid(child, 0)
        # killed: by the kernel, for want of memory, or after an allocation that C++ could not make
        ended = '{"oom": true}' if os.WIFSIGNALED(status) else '{"error": "its process failed"}'
        print(answer or ended, flush=True)
    return 0


def _answer(cfg: config.RunConfig, asked: Mapping[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(asked["threads"])
    chains = {"full": Chain(), **{c.label: c.chain for c in cfg.chains}}
    workload, device = parse(asked["workload"]), torch.device("cpu")
    if asked["what"] == "peak of a peer":
        # what it imports is not what it takes
        for package in peers.find(asked["label"]).packages:
            import_module(package)
    release()
    before = process_memory("VmRSS")
    try:
        with limited(asked["limit"], device):
            model = architecture.build(cfg.model, device, asked["layers"])
            if asked["what"] == "largest":
                return {
                    "batch": largest(lambda b: fits(model, chains[asked["label"]], workload.sized(b), asked["seed"]))
                }
            ids = prompts(workload, int(model.config.vocab_size), asked["seed"])
            if asked["what"] == "peak":
                generation_pass.run(
                    model, chains[asked["label"]], ids, workload.new, asked["sample"], graph=asked["graph"]
                )
            else:
                peers.run(model, peers.find(asked["label"]), ids, workload.new)
            high = process_memory("VmHWM")
            return asdict(Peak(high - before, high))
    except KvbenchError as error:
        return {"error": str(error)}
    except Exception as error:
        return (
            {"oom": True} if is_out_of_memory(error) else {"error": f"{type(error).__name__}: {error}".split("\n")[0]}
        )


if __name__ == "__main__":
    # an interrupt from the keyboard ends it, too, and is for the process that asks to report
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    raise SystemExit(main())
