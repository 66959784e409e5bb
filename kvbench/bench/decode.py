"""Compare the time of one decode step's attention by storage format with the full cache's, in one run.

    python -m kvbench.bench.decode [--tokens 1024 4096 16384] [--batch 1 8] [--heads 8] [--query-heads 32]

One layer of the given shape holds random keys and values, compressed by the real stages. A format's steps are
interleaved with the full cache's, and medians are compared. Only attention is timed: the projections of a model cost
all formats the same, so ratios of whole steps lie between these and 1.

On a GPU with Triton the steps are those of the kernels, and the same by plain PyTorch and dense SDPA over the whole
cache are interleaved with them. The GPU's cache is flushed before each, in which time launches queue up. ``reached`` is
the time that the bytes a format holds need at the bandwidth of a large copy, over the kernels' time.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F

from kvbench.bench.clock import Clock
from kvbench.bench.layers import random_layer
from kvbench.bench.ratio import compared_methods, finish, options
from kvbench.bench.roofline import copy_bandwidth
from kvbench.engine.decode_layer import RowLayer
from kvbench.kv.model_shape import Shape
from kvbench.methods.core.resolve import chain_of
from kvbench.storage import kernels
from kvbench.storage.format import Room, StoredRow
from kvbench.storage.kernels import SWITCH

FORMATS = compared_methods("decode")
PACKED = ("kivi 2 bits", "kivi 4 bits", "kivi 8 bits", "flexgen 4 bits", "think 0.4 + kivi 2")
# at most these ratios on a CPU, by (format, tokens, batch); on a GPU none may be slower than full at 16k x 8
LIMITS = {
    ("think 0.4", 4096, 1): 1.2,
    ("think 0.4", 16384, 8): 1.0,
    **{(name, 16384, 8): 2.0 for name in PACKED},
}
WARM_UP = 3
FLUSH_BYTES = 2**28  # more than any GPU's last-level cache
WHY = """Packed formats are read by plain PyTorch on a CPU: it unpacks block by block, a few passes over each more
than a product with dense keys, in dozens of calls a step."""

Timer = Callable[[Callable[[], object]], float]


@dataclass(frozen=True)
class StepShape:
    """The shape of one measurement: tokens held, rows of the batch, heads, head dimension and dtype."""

    tokens: int
    batch: int
    heads: int
    query_heads: int
    head_dim: int
    dtype: torch.dtype


@dataclass(frozen=True)
class StepTimes:
    """The median seconds of a step in one format, and what they are compared with.

    step, full: seconds in the format, and over the full cache.
    moved: the bytes that all rows hold in the format.
    plain: seconds of the same step without kernels; None if no kernels are timed.
    sdpa: seconds of dense SDPA over the whole cache; None if no kernels are timed.
    """

    step: float
    full: float
    moved: int
    plain: float | None = None
    sdpa: float | None = None

    def line(self, bandwidth: float) -> str:
        """Return the times and ratios as a line of the table. ``bandwidth`` is in bytes a second."""
        text = f"{1000 * self.step:>9.3f} ms{self.step / self.full:>9.2f}x"
        if self.plain is None or self.sdpa is None:
            return text
        others = "".join(f"{1000 * t:>9.3f} ms{self.step / t:>9.2f}x" for t in (self.plain, self.sdpa))
        return f"{text}{others}{100 * self.moved / bandwidth / self.step:>8.0f} %"


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


def measure(name: str, shape: StepShape, repeats: int, timer: Timer, device: torch.device) -> StepTimes:
    """Return the median times of a step in the format ``name`` of FORMATS, timed in turns with the full cache's."""

    def rows(format_name: str) -> RowLayer:
        chain = chain_of(FORMATS[format_name])
        layer_shape = Shape(layers=1, query_heads=shape.query_heads, kv_heads=shape.heads, head_dim=shape.head_dim)
        obs, dense = random_layer(chain, layer_shape, shape.tokens, shape.dtype, device=device)
        row = StoredRow(cache=chain.compress(dense, obs), coder=chain.coder)
        return RowLayer([row] * shape.batch, Room(tokens=repeats + WARM_UP))

    def draw(heads: int, tokens: int) -> torch.Tensor:
        return torch.randn(shape.batch, heads, tokens, shape.head_dim, dtype=shape.dtype, device=device)

    batches = {"step": rows(name), "full": rows("full")}
    full: tuple[torch.Tensor, torch.Tensor] | None = None
    if kernels.serves(device):
        with switched("off"):
            batches["plain"] = rows(name)
        full = draw(shape.heads, shape.tokens + 1), draw(shape.heads, shape.tokens + 1)
    moved = sum(batches["step"].payload())
    seconds: dict[str, list[float]] = {}
    for _ in range(WARM_UP + repeats):
        q, k, v = draw(shape.query_heads, 1), draw(shape.heads, 1), draw(shape.heads, 1)
        for way, batch in batches.items():
            with switched("off" if way == "plain" else os.environ.get(SWITCH, "on")):
                seconds.setdefault(way, []).append(timer(partial(_step, batch, q, k, v)))
        if full is not None:
            sdpa = partial(F.scaled_dot_product_attention, q, full[0], full[1], enable_gqa=True)
            seconds.setdefault("sdpa", []).append(timer(sdpa))
    return StepTimes(**{way: median(times[WARM_UP:]) for way, times in seconds.items()}, moved=moved)


def _step(batch: RowLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Add one token to every row and attend all tokens."""
    batch.add(k, v)
    batch.attend(q, q.shape[3] ** -0.5, None)


def timer_of(device: torch.device) -> Timer:
    """Return a timer of one call's seconds on the device; a GPU's cache is flushed before the call."""
    clock = Clock(device)
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device) if device.type == "cuda" else None

    def timed(call: Callable[[], object]) -> float:
        if flush is not None:
            flush.zero_()
        start = clock.mark()
        call()
        end = clock.mark()
        clock.wait()
        return clock.seconds(start, end)

    return timed


def table(rows: Mapping[str, StepTimes], shape: StepShape, bandwidth: float) -> str:
    """Return the table of one shape: a line of times and ratios for each format."""
    head = f"{'step':>12}{'of full':>10}"
    if any(r.plain is not None for r in rows.values()):
        head += f"{'plain':>12}{'of plain':>10}{'SDPA':>12}{'of SDPA':>10}{'reached':>10}"
    lines = [f"{name:<22}{r.line(bandwidth)}" for name, r in rows.items()]
    return "\n".join([f"{shape.tokens} tokens x {shape.batch}", f"{'':<22}{head}", *lines])


def limit(name: str, n: int, b: int, device: torch.device) -> float:
    """Return the largest allowed ratio of a format to the full cache, for n tokens and b rows; inf if there is none."""
    if device.type == "cuda":
        return 1.0 if (n, b) == (16384, 8) and name != "full" else math.inf
    return LIMITS.get((name, n, b), math.inf)


def main() -> int:
    """Print times and ratios. Return exit status 1 if a format misses its limit, else 0."""
    parser = options(__doc__, repeats=15)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--heads", type=int, default=8, help="kv heads")
    parser.add_argument("--query-heads", type=int, default=32)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--formats", nargs="+", choices=tuple(FORMATS), default=list(FORMATS), metavar="FORMAT")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    dtype = args.dtype or ("bfloat16" if on_gpu else "float32")
    bandwidth = copy_bandwidth(device)
    machine = torch.cuda.get_device_name(device) if on_gpu else f"{torch.get_num_threads()} threads"
    print(
        f"attention of one step, {args.query_heads} query heads on {args.heads} kv heads of {args.head_dim}, {dtype}, "
        f"{machine}, copies at {bandwidth / 1e9:.0f} GB/s; median of {args.repeats}"
    )
    missed = []
    timer = timer_of(device)
    for n in args.tokens:
        for b in args.batch:
            shape = StepShape(n, b, args.heads, args.query_heads, args.head_dim, getattr(torch, dtype))
            rows = {name: measure(name, shape, args.repeats, timer, device) for name in args.formats}
            print(f"\n{table(rows, shape, bandwidth)}", flush=True)
            for name, r in rows.items():
                ratio, most = r.step / r.full, limit(name, n, b, device)
                if ratio > most:
                    missed.append(f"MISSED {name} at {n} tokens, batch {b}: {ratio:.2f}x, at most {most:.2f}x")
    print("\n".join([*([] if on_gpu else [WHY]), *missed]))
    return 1 if missed else 0


if __name__ == "__main__":
    finish(main)
