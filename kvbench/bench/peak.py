"""Measure the peak memory of a pass, and find the largest batch that fits.

On a GPU peaks come from PyTorch's allocator. On a CPU they are a child process's peak resident memory. There
``reserved`` is all of it, and ``allocated`` is the growth above a Python with everything imported. Both include the
weights, as on a GPU.
"""

from __future__ import annotations

import copy
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import TypedDict, TypeVar

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from kvbench.base.errors import KvbenchError
from kvbench.bench import architecture, generation_pass, peers
from kvbench.bench.sampling import can_be_lengthened, lengthen
from kvbench.bench.workload import Workload, draw_prompts, parse_workload
from kvbench.engine.memory import GIB, is_out_of_memory, process_memory, release
from kvbench.engine.patches import adapted
from kvbench.engine.prefill import prefill_chains
from kvbench.engine.step import build, give_up_caches, step
from kvbench.methods.core.chain import Chain
from kvbench.models.interface import attached
from kvbench.plan import config

MOST_ROWS = 4096
"""The largest batch that a search tries."""
T = TypeVar("T")


@dataclass(frozen=True)
class Peak:
    """The peak bytes of a pass.

    allocated: given out by PyTorch's allocator; on a CPU, the growth of the process above its imports.
    reserved: held by PyTorch's allocator; on a CPU, all memory of the process.
    """

    allocated: int
    reserved: int


def watch_memory(run: Callable[[], T], device: torch.device) -> tuple[T, Peak | None]:
    """Return (result of ``run``, its peak memory). The peak is None on a CPU, where ``ask_child`` measures it."""
    release()
    if device.type != "cuda":
        return run(), None
    torch.cuda.reset_peak_memory_stats(device)
    result = run()
    return result, Peak(torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device))


def find_largest_batch(fits: Callable[[int], bool], most: int = MOST_ROWS) -> int:
    """Return the largest batch up to ``most`` that fits, found by doubling and then bisection; 0 if no row fits.

    fits: returns whether a batch with this number of rows fits. If one batch does not fit, larger ones must not fit
        either.
    """
    # invariant of the bisection: low rows fit, high rows do not fit or exceed the limit
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def fits_memory(model: PreTrainedModel, chain: Chain, workload: Workload, seed: int) -> bool:
    """Return True if ``workload`` fits into memory: all its caches, the read of its last prompt, its last step."""
    try:
        (prompt,) = draw_prompts(workload.sized(1), int(model.config.vocab_size), seed)
        _fill_memory(model, chain, workload, prompt)
        fitting = True
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        fitting = False
    # leave the except block first, so that no traceback keeps the failed attempt's tensors alive
    release()
    return fitting


@torch.no_grad()
def _fill_memory(model: PreTrainedModel, chain: Chain, workload: Workload, prompt: Tensor) -> None:
    """Allocate the memory of ``workload``. ``prompt`` [n] is read twice, and its cache copied for the other rows."""
    assert workload.batch is not None, "a search tries one batch after the other"
    (first_cache,) = prefill_chains(model, prompt, [chain])
    caches = [copy.deepcopy(first_cache) for _ in range(workload.batch - 1)]
    # only its batch - 1 copies may take memory
    del first_cache
    # read the last row beside all other caches, since a read's scratch memory counts, too
    caches += prefill_chains(model, prompt, [chain])
    # the prompt gives the first token, so new tokens take new - 1 steps
    steps = workload.new - 1
    with adapted(model, chain), attached(model):
        # ask before the batch is built: building it empties the caches
        can_skip_steps = can_be_lengthened(caches)
        # all rows have read equally many tokens
        seen = caches[0].seen
        batch = build(model, give_up_caches(caches), steps)
        if can_skip_steps:
            # only the last step runs, over the longest cache
            lengthen(model, batch, steps - 1)
        # memory does not depend on which token is fed
        token = torch.zeros(workload.batch, 1, dtype=torch.int64, device=model.device)
        step(model, batch, token, torch.full_like(token, seen + batch.used))


@contextmanager
def limit_memory(limit: float | None, device: torch.device) -> Iterator[None]:
    """While the context is open, limit the memory of this process to ``limit`` GiB; None sets no limit.

    On a GPU the limit includes the weights. On a CPU it limits the further growth of the process's data.
    """
    if limit is None:
        yield
        return
    if device.type == "cuda":
        total_bytes = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit * GIB / total_bytes), device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, device)
    else:
        previous_soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        soft = int(process_memory("VmData") + limit * GIB)
        # the hard limit stays: once lowered, it cannot be raised again
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (previous_soft, hard))


@dataclass(frozen=True)
class PeakRequest:
    """The request of a measurement to a child process.

    quantity: ``peak`` for the peak of a chain's pass, ``largest`` for its largest batch, or ``peak of a peer``.
    overrides: the arguments of the run that defines the chains.
    label: the chain or the peer.
    workload: the workload as it is written on the command line.
    seed: the seed of the random prompts.
    sample: how many decode steps run at each of several cache lengths; None runs all steps.
    limit: the most memory in GiB; None sets no limit.
    layers: how many of the model's layers are built; None builds all.
    graph: whether decode steps replay a recorded graph.
    threads: PyTorch's number of threads.
    """

    quantity: str
    overrides: tuple[str, ...]
    label: str
    workload: str
    seed: int
    sample: int | None
    limit: float | None
    layers: int | None
    graph: bool
    threads: int


class PeakAnswer(TypedDict, total=False):
    """The answer of a child process.

    It holds the peak bytes ``allocated`` and ``reserved``, or the largest ``batch``, or ``oom`` if memory did not
    suffice, or the ``error`` that ended the process's work.
    """

    allocated: int
    reserved: int
    batch: int
    oom: bool
    error: str


def ask_child(
    quantity: str,
    overrides: Sequence[str],
    label: str,
    workload: str,
    *,
    seed: int,
    sample: int | None,
    limit: float | None,
    layers: int | None,
    graph: bool,
) -> PeakAnswer:
    """Measure memory in a child process and return its answer.

    All arguments are fields of ``PeakRequest``. ``quantity`` is ``peak``, ``largest`` or ``peak of a peer``, and
    ``label`` names the chain or the peer. If the child dies for lack of memory, the answer is ``{"oom": True}``.
    Raises KvbenchError if it fails otherwise.
    """
    # fork the child from a server that has imported everything, since imports take seconds
    server = get_context("forkserver")
    server.set_forkserver_preload([__name__, "transformers.models.llama.modeling_llama"])
    reader, writer = server.Pipe(duplex=False)
    request = PeakRequest(
        quantity=quantity,
        overrides=tuple(overrides),
        label=label,
        workload=workload,
        seed=seed,
        sample=sample,
        limit=limit,
        layers=layers,
        graph=graph,
        threads=torch.get_num_threads(),
    )
    process = server.Process(target=_send_answer, args=(writer, request), daemon=True)
    process.start()
    # the child holds its own end: after this one is closed, its death ends the wait below
    writer.close()
    try:
        answer: PeakAnswer = reader.recv()
    except EOFError:
        process.join()
        # a negative exit code is a signal: the kernel's, for lack of memory, or after an allocation that C++ could not
        # make
        if process.exitcode is not None and process.exitcode < 0:
            answer = {"oom": True}
        else:
            answer = {"error": "its process failed"}
    process.join()
    if "error" in answer:
        raise KvbenchError(f"{label} at {workload}: {answer['error']}")
    return answer


def _send_answer(writer: Connection, request: PeakRequest) -> None:
    # Ctrl-C kills this child; the parent reports it
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # the parent's standard output is for tables and JSON, so libraries' prints go to standard error
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    # a parent that was interrupted does not read
    with suppress(BrokenPipeError):
        writer.send(_answer_request(request))


def _answer_request(request: PeakRequest) -> PeakAnswer:
    """Return the answer to ``request``. Errors are part of it, since the parent cannot catch them."""
    torch.set_num_threads(request.threads)
    try:
        return _measure_request(request)
    except KvbenchError as error:
        return {"error": str(error)}
    except Exception as error:
        if is_out_of_memory(error):
            return {"oom": True}
        # the reason in a row is one line
        first_line, *_ = f"{type(error).__name__}: {error}".split("\n")
        return {"error": first_line}


def _measure_request(request: PeakRequest) -> PeakAnswer:
    """Build the model in this process, and return the largest batch or the peak bytes of one pass."""
    cfg = config.read(request.overrides)
    device = torch.device("cpu")
    _import_code(request, architecture.resolve_model_config(cfg.model))
    release()
    imported_bytes = process_memory("VmRSS")
    with limit_memory(request.limit, device):
        model = architecture.build_model(cfg.model, device, request.layers)
        workload = parse_workload(request.workload)
        if request.quantity == "peak of a peer":
            ids = draw_prompts(workload, int(model.config.vocab_size), request.seed)
            peers.run(model, peers.find_peer(request.label), ids, workload.new)
        else:
            chains = {"full": Chain()} | {c.label: c.chain for c in cfg.chains}
            chain = chains[request.label]
            if request.quantity == "largest":

                def rows_fit(rows: int) -> bool:
                    return fits_memory(model, chain, workload.sized(rows), request.seed)

                return {"batch": find_largest_batch(rows_fit)}
            ids = draw_prompts(workload, int(model.config.vocab_size), request.seed)
            generation_pass.run(model, chain, ids, new=workload.new, sample=request.sample, graph=request.graph)
        # the highest resident memory that this process ever had
        peak_bytes = process_memory("VmHWM")
        return {"allocated": peak_bytes - imported_bytes, "reserved": peak_bytes}


def _import_code(request: PeakRequest, model_config: PretrainedConfig) -> None:
    """Import all code that the pass uses, so that imports do not count as memory of the pass."""
    # building the model without storage imports all of its code
    with torch.device("meta"):
        AutoModelForCausalLM.from_config(model_config)
    if request.quantity == "peak of a peer":
        for package in peers.find_peer(request.label).packages:
            import_module(package)
