"""Compare the time of a decode step's attention by Triton kernels, by plain PyTorch and by dense SDPA, on a GPU.

    python -m kvbench.bench.kernels [--tokens 1024 4096 16384] [--batch 1 8] [--dtype bfloat16]

One layer of the given shape holds random keys and values, compressed by the real stages. Steps by kernels, by plain
PyTorch and by SDPA over the whole cache are interleaved and timed by CUDA events. Before each the GPU's cache is
flushed, in which time launches queue up. ``reached`` is the time that the bytes a format holds need at the measured
bandwidth of a large copy, over the kernels' time. Attention and, in packed formats, the packing of new tokens are
timed, and nothing else of a model.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F

from kvbench.bench.decode import FORMATS, layer, step_options
from kvbench.bench.roofline import copy_bandwidth
from kvbench.engine.decode_layer import RowLayer
from kvbench.methods.chain import Chain
from kvbench.methods.resolve import chain_of
from kvbench.storage import kernels
from kvbench.storage.format import Room, StoredRow
from kvbench.storage.kernels import SWITCH

FULL = "full"
FLUSH_BYTES = 2**28  # more than any GPU's last-level cache
WARM_UP = 3
NO_GPU = (
    "the benchmark of kernels needs a GPU and Triton (extra gpu): not to be had here; kvbench.bench.decode needs none"
)

Timer = Callable[[Callable[[], object]], float]


@dataclass(frozen=True)
class KernelShape:
    """The shape of one measurement: tokens held, rows of the batch, heads, head dimension and dtype."""

    tokens: int
    batch: int
    heads: int
    query_heads: int
    head_dim: int
    dtype: torch.dtype


@dataclass(frozen=True)
class KernelRow:
    """The median seconds of a step in one format by kernels, by plain PyTorch and by SDPA over the whole cache.

    ``moved`` is the bytes held of all rows, which a step reads.
    """

    kernel: float
    plain: float
    sdpa: float
    moved: int

    def reached(self, bandwidth: float) -> float:
        """Return the fraction of ``bandwidth``, bytes a second, at which the kernels read what is held."""
        return self.moved / bandwidth / self.kernel


@contextmanager
def switched(state: str) -> Iterator[None]:
    """Set the environment variable KVBENCH_KERNELS to ``state`` and restore it on exit."""
    previous = os.environ.get(SWITCH)
    os.environ[SWITCH] = state
    try:
        yield
    finally:
        if previous is None:
            del os.environ[SWITCH]
        else:
            os.environ[SWITCH] = previous


def measure(name: str, shape: KernelShape, repeats: int, device: torch.device, timer: Timer) -> KernelRow:
    """Time the format ``name`` of FORMATS, or the whole cache, at one shape."""
    chain = Chain() if name == FULL else chain_of(FORMATS[name])
    cache = layer(chain, shape.tokens, shape.heads, shape.query_heads, shape.head_dim, shape.dtype, device)
    room, rows = repeats + WARM_UP, shape.batch
    batches = {}
    for state in ("on", "off"):
        with switched(state):
            batches[state] = RowLayer([StoredRow(cache=cache, coder=chain.coder)] * rows, Room(tokens=room))
    moved = sum(batches["on"].payload())

    def draw(heads: int, tokens: int) -> torch.Tensor:
        return torch.randn(rows, heads, tokens, shape.head_dim, dtype=shape.dtype, device=device)

    dense = draw(shape.heads, shape.tokens + 1), draw(shape.heads, shape.tokens + 1)
    seconds: dict[str, list[float]] = {"on": [], "off": [], "sdpa": []}
    for _ in range(room):
        q, k, v = draw(shape.query_heads, 1), draw(shape.heads, 1), draw(shape.heads, 1)
        for state, batch in batches.items():
            with switched(state):
                seconds[state].append(timer(partial(_step, batch, q, k, v)))
        seconds["sdpa"].append(timer(partial(F.scaled_dot_product_attention, q, *dense, enable_gqa=True)))
    kernel, plain, sdpa = (median(times[WARM_UP:]) for times in seconds.values())
    return KernelRow(kernel, plain, sdpa, moved)


def _step(batch: RowLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    batch.add(k, v)
    batch.attend(q, q.shape[3] ** -0.5, None)


def cuda_timer(device: torch.device) -> Timer:
    """Return a timer of one call's seconds on the GPU, with the GPU's cache flushed before each call."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)

    def timed(call: Callable[[], object]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        start.record()
        call()
        end.record()
        torch.cuda.synchronize(device)
        return start.elapsed_time(end) / 1000  # ms to s

    return timed


def table(rows: Mapping[str, KernelRow], shape: KernelShape, bandwidth: float) -> str:
    """Return the table of one shape: a line of times and ratios for each format."""
    lines = [
        f"{shape.tokens} tokens x {shape.batch}",
        f"{'':<22}{'kernel':>11}{'plain':>11}{'SDPA':>11}{'of plain':>10}{'of SDPA':>10}{'reached':>10}",
    ]
    for name, r in rows.items():
        times = "".join(f"{1e6 * t:>8.0f} us" for t in (r.kernel, r.plain, r.sdpa))
        ratios = f"{r.kernel / r.plain:>9.2f}x{r.kernel / r.sdpa:>9.2f}x{100 * r.reached(bandwidth):>8.0f} %"
        lines.append(f"{name:<22}{times}{ratios}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Print times, ratios and the fraction of the bandwidth reached. Return exit status 2 without a GPU, else 0."""
    parser = step_options(__doc__, 30, [FULL, *FORMATS], "bfloat16")
    args = parser.parse_args(argv)
    with switched("on"):
        if not torch.cuda.is_available() or not kernels.serves(torch.device("cuda")):
            print(NO_GPU, file=sys.stderr)
            return 2
    device = torch.device("cuda")
    timer = cuda_timer(device)
    bandwidth = copy_bandwidth(device)
    gpu = f"{torch.cuda.get_device_name(device)}, copies at {bandwidth / 1e9:.0f} GB/s"
    print(f"{gpu}; {args.dtype}, {args.query_heads}")
    print(f"query heads on {args.heads} kv heads of {args.head_dim}; one step's attention, median of {args.repeats}")
    dtype = getattr(torch, args.dtype)
    for tokens in args.tokens:
        for batch in args.batch:
            shape = KernelShape(tokens, batch, args.heads, args.query_heads, args.head_dim, dtype)
            rows = {name: measure(name, shape, args.repeats, device, timer) for name in args.formats}
            print(f"\n{table(rows, shape, bandwidth)}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
