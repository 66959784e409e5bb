"""Compare the time of one decode step's attention by storage format with the full cache's, in one run.

    python -m kvbench.bench.decode [--tokens 1024 4096 16384] [--batch 1 8] [--heads 8] [--query-heads 32]

One layer of the given shape holds random keys and values, compressed by the real stages. Each format's steps are
interleaved with the full cache's, and medians are compared. Only attention is timed: the projections of a model cost
all formats the same, so ratios of whole steps lie between these and 1.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch

from kvbench.bench.layers import random_layer
from kvbench.bench.ratio import options
from kvbench.cache.model_shape import Shape
from kvbench.cache.segment import LayerCache
from kvbench.engine.decode_layer import RowLayer
from kvbench.methods.chain import Chain
from kvbench.methods.resolve import chain_of
from kvbench.models.interface import synchronise
from kvbench.storage.format import Room, StoredRow

FORMATS: dict[str, dict[str, Any]] = {
    "think 0.4": {"method": "think", "ratio": 0.4},
    "think 0.6": {"method": "think", "ratio": 0.6},
    "kivi 2 bits": {"method": "kivi", "bits": 2},
    "kivi 4 bits": {"method": "kivi", "bits": 4},
    "kivi 8 bits": {"method": "kivi", "bits": 8},
    "flexgen 4 bits": {"method": "flexgen", "bits": 4},
    "think 0.4 + kivi 2": {"method": "think+kivi", "think.ratio": 0.4, "bits": 2},
    "snapkv 12.5 %": {"method": "snapkv", "kv_ratio": 0.125},
    "adakv 12.5 %": {"method": "adakv", "kv_ratio": 0.125},
}
PACKED = ("kivi 2 bits", "kivi 4 bits", "kivi 8 bits", "flexgen 4 bits", "think 0.4 + kivi 2")
# at most these ratios on a CPU, by (format, tokens, batch); on a GPU none may be slower than full at 16k x 8
LIMITS = {
    ("think 0.4", 4096, 1): 1.2,
    ("think 0.4", 16384, 8): 1.0,
    **{(name, 16384, 8): 2.0 for name in PACKED},
}
CLOCKS = {"wall": time.perf_counter, "cpu": time.thread_time}
WHY = """Packed formats are read by plain PyTorch on a CPU: it unpacks block by block, a few passes over each more
than a product with dense keys, in dozens of calls a step."""


def layer(
    chain: Chain, n: int, heads: int, query_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> LayerCache:
    """Return one layer of random keys and values compressed by ``chain``."""
    obs, dense = random_layer(chain, Shape(1, query_heads, heads, head_dim), n, dtype, device=device)
    return chain.compress(dense, obs)


def step_times(
    batches: Mapping[str, RowLayer],
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    repeats: int,
    now: Callable[[], float],
) -> dict[str, float]:
    """Return median seconds of a step's attention by format; shape is (batch, query heads, kv heads, head dim)."""
    b, hq, hk, d = shape
    device = next(iter(batches.values())).next.device
    seconds: dict[str, list[float]] = {name: [] for name in batches}
    for _ in range(repeats):
        q, k, v = (torch.randn(b, h, 1, d, dtype=dtype, device=device) for h in (hq, hk, hk))
        for name, batch in batches.items():
            synchronise(device)
            start = now()
            batch.add(k, v)
            batch.attend(q, d**-0.5, None)
            synchronise(device)
            seconds[name].append(now() - start)
    # the first two steps warm up
    return {name: median(times[2:]) for name, times in seconds.items()}


def measure(
    names: Sequence[str], n: int, b: int, args: argparse.Namespace, device: torch.device
) -> tuple[float, dict[str, float]]:
    """Return (full cache's seconds a step, ratio to it by format) at n tokens and batch b."""
    dtype = getattr(torch, args.dtype)
    shape = (b, args.query_heads, args.heads, args.head_dim)
    ratios = {}
    seconds = 0.0
    full = layer(Chain(), n, args.heads, args.query_heads, args.head_dim, dtype, device)
    for name in names:
        chain = chain_of(FORMATS[name])
        compressed = layer(chain, n, args.heads, args.query_heads, args.head_dim, dtype, device)
        room = Room(tokens=args.repeats + 2)
        batches = {
            "full": RowLayer([StoredRow(cache=full)] * b, room),
            name: RowLayer([StoredRow(cache=compressed, coder=chain.coder)] * b, room),
        }
        times = step_times(batches, shape, dtype, room.tokens, CLOCKS[args.clock])
        seconds = times.pop("full")
        ratios.update({named: time / seconds for named, time in times.items()})
    return seconds, ratios


def limit(name: str, n: int, b: int, device: torch.device) -> float:
    """Return the largest allowed ratio of a format, by its name in the table."""
    if device.type == "cuda":
        return 1.0 if (n, b) == (16384, 8) else math.inf
    return LIMITS.get((name, n, b), math.inf)


def step_options(doc: str | None, repeats: int, formats: Sequence[str], dtype: str | None) -> argparse.ArgumentParser:
    """Return the options of a benchmark of decode steps: the layer's shape, the rows and the formats."""
    parser = options(doc, repeats=repeats)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--heads", type=int, default=8, help="kv heads")
    parser.add_argument("--query-heads", type=int, default=32)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default=dtype)
    parser.add_argument("--formats", nargs="+", choices=tuple(formats), default=list(formats), metavar="FORMAT")
    return parser


def main() -> int:
    """Print the ratios. Return exit status 1 if one misses its limit, else 0."""
    parser = step_options(__doc__, 15, list(FORMATS), None)
    parser.add_argument(
        "--clock", choices=tuple(CLOCKS), default="wall", help="cpu: of one thread, for a machine that others use too"
    )
    args = parser.parse_args()
    if args.clock == "cpu":
        torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    args.dtype = args.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    threads = f"{torch.get_num_threads()} threads" if device.type == "cpu" else torch.cuda.get_device_name(device)
    heads = f"{args.query_heads} query heads on {args.heads} kv heads of {args.head_dim}"
    timed = f"{args.clock} time over the full cache's, median of {args.repeats}"
    print(f"attention of one step, {heads}, {args.dtype}, {threads}; {timed}")
    sizes = [(n, b) for n in args.tokens for b in args.batch]
    table: dict[str, list[str]] = {"": [f"{n} x {b}" for n, b in sizes], "full": []}
    missed = []
    for n, b in sizes:
        seconds, ratios = measure(args.formats, n, b, args, device)
        table["full"].append(f"{1000 * seconds:.2f} ms")
        for name, ratio in ratios.items():
            table.setdefault(name, []).append(f"{ratio:.2f}x")
            most = limit(name, n, b, device)
            if ratio > most:
                missed.append(f"{name} at {n} tokens, batch {b}: {ratio:.2f}x, at most {most:.2f}x")
    for name, cells in table.items():
        print(f"{name:<26}" + "".join(f"{cell:>12}" for cell in cells))
    if device.type == "cpu":
        print(WHY)
    for line in missed:
        print(f"MISSED {line}")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
