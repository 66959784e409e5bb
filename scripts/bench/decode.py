"""Compare the time of one decode step's attention by storage format with the full cache's, in one run.

    python scripts/bench/decode.py [--tokens 1024 4096 16384] [--batch 1 8] [--heads 8] [--query-heads 32]

One layer of the given shape holds random keys and values, compressed by the real stages. A format's steps are
interleaved with the full cache's, and medians are compared. ``a byte`` compares the time for each byte that is held.
Only attention is timed: the projections of a model cost all formats the same, so ratios of whole steps lie between
these and 1.

On a GPU with Triton the steps are those of the kernels, and the same by plain PyTorch and dense SDPA over the whole
cache are interleaved with them. The GPU's cache is flushed before each, in which time launches queue up. ``reached`` is
the time that the bytes a format holds need at the bandwidth of a large copy, over the kernels' time.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F
from ratio import compared_methods, finish, options

from kvbench.bench.clock import Clock
from kvbench.bench.layers import draw_layer
from kvbench.bench.roofline import measure_bandwidth
from kvbench.engine.decode_layer import RowLayer
from kvbench.kv.model_shape import Shape
from kvbench.methods.core.resolve import chain_of
from kvbench.report import writers
from kvbench.report.table import Table
from kvbench.storage import kernels
from kvbench.storage.format import Room, StoredRow
from kvbench.storage.kernels import SWITCH, on_cpu

FORMATS = compared_methods("decode")
LIMITS = {
    ("think 0.4", 4096, 1): 1.2,
    ("think 0.4", 16384, 8): 1.0,
    ("kivi 2 bits", 16384, 8): 2.0,
    ("kivi 4 bits", 16384, 8): 2.0,
    ("kivi 8 bits", 16384, 8): 2.0,
    ("flexgen 4 bits", 16384, 8): 2.0,
    ("think 0.4 + kivi 2", 16384, 8): 2.0,
}
"""The largest ratios to the full cache on a CPU, by (format, tokens, batch)."""
WARM_UP = 3
# more than any GPU's last-level cache
FLUSH_BYTES = 2**28
PLAIN = """Packed formats are read by plain PyTorch on a CPU: it unpacks block by block, a few passes over each more
than a product with dense keys, in dozens of calls a step. kvbench-kernels (pip install ./kernels) reads them in C."""
IN_C = "Packed formats are read by kvbench-kernels, in C; KVBENCH_KERNELS=off times plain PyTorch."

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
    """The median seconds of a step in one format, and the values that they are compared with.

    step, full: seconds in the format, and over the full cache.
    moved, full_bytes: the bytes that all rows hold in the format, and as the full cache.
    plain: seconds of the same step without kernels; None if no kernels are timed.
    sdpa: seconds of dense SDPA over the whole cache; None if no kernels are timed.
    """

    step: float
    full: float
    moved: int
    full_bytes: int
    plain: float | None = None
    sdpa: float | None = None

    def cells(self, bandwidth: float) -> list[str]:
        """Return the times and ratios as cells of the table. ``bandwidth`` is in bytes a second."""
        texts = [
            _milliseconds(self.step),
            _times(self.step, self.full),
            _times(self.step / self.moved, self.full / self.full_bytes),
        ]
        if self.plain is None or self.sdpa is None:
            return texts
        for seconds in (self.plain, self.sdpa):
            texts += [_milliseconds(seconds), _times(self.step, seconds)]
        # the time that moving the bytes takes, over the step's
        reached = 100 * self.moved / bandwidth / self.step
        texts.append(f"{reached:.0f} %")
        return texts


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3f} ms"


def _times(seconds: float, other: float) -> str:
    return f"{seconds / other:.2f}x"


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

    def build_rows(format_name: str) -> RowLayer:
        chain = chain_of(FORMATS[format_name])
        layer_shape = Shape(layers=1, query_heads=shape.query_heads, kv_heads=shape.heads, head_dim=shape.head_dim)
        observation, dense = draw_layer(chain, layer_shape, shape.tokens, dtype=shape.dtype, device=device)
        row = StoredRow(cache=chain.compress(dense, observation), coder=chain.coder)
        return RowLayer([row] * shape.batch, Room(tokens=repeats + WARM_UP))

    def draw(heads: int, tokens: int) -> torch.Tensor:
        return torch.randn(shape.batch, heads, tokens, shape.head_dim, dtype=shape.dtype, device=device)

    batch, full_batch = build_rows(name), build_rows("full")
    plain_batch: RowLayer | None = None
    if kernels.serves(device):
        # build the plain rows without kernels, too, as for a user without kernels
        with switched("off"):
            plain_batch = build_rows(name)
        # SDPA reads the whole cache and the new token
        all_keys, all_values = draw(shape.heads, shape.tokens + 1), draw(shape.heads, shape.tokens + 1)
    moved, full_bytes = sum(batch.payload()), sum(full_batch.payload())
    step_s, full_s, plain_s, sdpa_s = [], [], [], []
    for _ in range(WARM_UP + repeats):
        # one token: the query [batch, query heads, 1, head dim], its key and its value
        q, k, v = draw(shape.query_heads, 1), draw(shape.heads, 1), draw(shape.heads, 1)
        step_s.append(timer(partial(_step, batch, q, k, v)))
        full_s.append(timer(partial(_step, full_batch, q, k, v)))
        if plain_batch is not None:
            with switched("off"):
                plain_s.append(timer(partial(_step, plain_batch, q, k, v)))
            sdpa_s.append(timer(partial(F.scaled_dot_product_attention, q, all_keys, all_values, enable_gqa=True)))
    times = StepTimes(step=median(step_s[WARM_UP:]), full=median(full_s[WARM_UP:]), moved=moved, full_bytes=full_bytes)
    if plain_batch is None:
        return times
    return replace(times, plain=median(plain_s[WARM_UP:]), sdpa=median(sdpa_s[WARM_UP:]))


def _step(batch: RowLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Add one token to every row and attend all tokens."""
    batch.add(k, v)
    # softmax(q k^T / sqrt(d)) v
    batch.attend(q, q.shape[3] ** -0.5, None)


def timer_of(device: torch.device) -> Timer:
    """Return a timer of one call's seconds on the device. A GPU's cache is flushed before the call."""
    clock = Clock(device)
    flush: torch.Tensor | None = None
    if device.type == "cuda":
        flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)

    def timed(call: Callable[[], object]) -> float:
        if flush is not None:
            # replaces the step's tensors in the cache, and keeps the GPU busy while launches queue up
            flush.zero_()
        start = clock.mark()
        call()
        end = clock.mark()
        clock.wait()
        return clock.seconds(start, end)

    return timed


def table(rows: Mapping[str, StepTimes], shape: StepShape, bandwidth: float) -> str:
    """Return the table of one shape: a row of times and ratios for each format."""
    heads = ["format", "step", "of full", "a byte"]
    if any(times.plain is not None for times in rows.values()):
        heads += ["plain", "of plain", "SDPA", "of SDPA", "reached"]
    texts = []
    for name, times in rows.items():
        cells = [name]
        cells += times.cells(bandwidth)
        texts.append(tuple(cells))
    return f"{shape.tokens} tokens x {shape.batch}\n\n{writers.text(Table(tuple(heads), tuple(texts)))}"


def limit(name: str, n: int, b: int, device: torch.device) -> float:
    """Return the largest allowed ratio of a format to the full cache, for n tokens and b rows; inf if there is none."""
    if device.type != "cuda":
        return LIMITS.get((name, n, b), math.inf)
    # kernels read fewer bytes than the full cache has, so at this size no format may be slower
    if (n, b) == (16384, 8) and name != "full":
        return 1.0
    return math.inf


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
    if torch.cuda.is_available():
        device, usual_dtype = torch.device("cuda"), "bfloat16"
        machine = torch.cuda.get_device_name(device)
    else:
        device, usual_dtype = torch.device("cpu"), "float32"
        machine = f"{torch.get_num_threads()} threads"
    dtype = args.dtype or usual_dtype
    bandwidth = measure_bandwidth(device)
    print(
        f"attention of one step, {args.query_heads} query heads on {args.heads} kv heads of {args.head_dim}, {dtype}, "
        f"{machine}, copies at {bandwidth / 1e9:.0f} GB/s; median of {args.repeats}"
    )
    missed = []
    timer = timer_of(device)
    for n in args.tokens:
        for b in args.batch:
            shape = StepShape(
                tokens=n,
                batch=b,
                heads=args.heads,
                query_heads=args.query_heads,
                head_dim=args.head_dim,
                dtype=getattr(torch, dtype),
            )
            rows = {name: measure(name, shape, args.repeats, timer=timer, device=device) for name in args.formats}
            print(f"\n{table(rows, shape, bandwidth)}", flush=True)
            for name, times in rows.items():
                ratio, most = times.step / times.full, limit(name, n, b, device)
                if ratio > most:
                    missed.append(f"MISSED {name} at {n} tokens, batch {b}: {ratio:.2f}x, at most {most:.2f}x")
    last_lines = list(missed)
    if device.type == "cpu":
        last_lines.insert(0, IN_C if on_cpu.installed() and kernels.enabled() else PLAIN)
    print("\n".join(last_lines))
    return 1 if missed else 0


if __name__ == "__main__":
    finish(main)
