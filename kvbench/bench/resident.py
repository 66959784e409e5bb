"""Resident memory of many caches held at once, against the accounted bytes, each method in a process of its own.

    python -m kvbench.bench.resident [--caches 64] [--tokens 4096] [--only kivi]

Caches are made of random layers by the real stages, in fp16 (full: 2 GiB in all), and stay alive while the process
is measured; as many processes run at once as processors and memory allow. A method's ratio is what its process grew by
over what the full cache's process grew by; it must be that of the accounted bytes (payload and overhead) within 5 %.
The status is 1 if one is not.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from kvbench.audit.accounting import bytes_held
from kvbench.bench.layers import all_layers
from kvbench.bench.memory import MIB, in_use
from kvbench.bench.ratio import compared_methods, in_process, options
from kvbench.engine.memory import free_bytes
from kvbench.kv.model_shape import Shape
from kvbench.methods.resolve import chain_of

LIMIT = 0.05
WARM = 4
SHAPE = Shape(layers=2, query_heads=32, kv_heads=8, head_dim=128)
WHY = """\
As large as 64 full caches fit into 2 GiB. A process pays more than a tensor's bytes: large ones are
rounded up to pages (4 KiB) of a mapping of their own, small ones share pages with what was freed
before. That is a share of a small tensor that shows, and next to nothing of a large one.
"""
METHODS = compared_methods("resident")
# large tensors in mappings of their own, which are given back when freed, and cost a page more each; small ones packed
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_ARENA_MAX": "1"}


def hold(name: str, caches: int, tokens: int) -> dict[str, float]:
    """Return the bytes that this process grows by while it holds ``caches`` caches, and those accounted for them."""
    build = partial(all_layers, chain_of(METHODS[name]), SHAPE, tokens, torch.float16)
    # the first ones load code and leave the allocator's free lists as all later ones find them
    first = [build() for _ in range(WARM)]
    baseline = in_use()
    held_caches = [build() for _ in range(caches)]
    grown = in_use() - baseline
    assert len(first) == WARM
    return {"grown": grown, "accounted": sum(bytes_held(layer).total for cache in held_caches for layer in cache)}


def report(results: Iterable[tuple[str, dict[str, float]]]) -> int:
    """Print each method's ratios to ``full``, the first, as results come. Return 1 if one is off by over LIMIT."""
    full, status = None, 0
    print(f"{'':26}{'resident':>12}{'accounted':>12}{'measured':>10}{'accounted':>11}{'off':>8}")
    print(f"{'':26}{'MiB':>12}{'MiB':>12}{': full':>10}{': full':>11}{'%':>8}")
    for name, result in results:
        full = full or result
        measured, accounted = result["grown"] / full["grown"], result["accounted"] / full["accounted"]
        off = measured / accounted - 1
        # the full cache is what the others are compared with, so its own bytes must be right
        missed = abs(result["grown"] / result["accounted"] - 1 if name == "full" else off) > LIMIT
        status |= missed
        verdict = "  MISSED" if missed else "  ok"
        row = f"{result['grown'] / MIB:12.1f}{result['accounted'] / MIB:12.1f}{measured:10.4f}{accounted:11.4f}"
        print(f"{name:26}{row}{100 * off:+8.1f}{verdict}", flush=True)
    return int(status)


def _at_once(caches: int, tokens: int) -> int:
    """Return how many processes fit into memory at once, each with full caches and 1 GiB of scratch memory."""
    most = (caches + WARM) * SHAPE.full_bytes(tokens, 2) + 2**30
    return max(1, min(len(os.sched_getaffinity(0)), int(free_bytes(torch.device("cpu")) // most)))


def main() -> int:
    """Measure and print. Return exit status 1 if resident memory differs from the accounts, else 0."""
    parser = options(__doc__)
    parser.add_argument("--caches", type=int, default=64, help="caches held at once (default 64)")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of each prompt (default 4096)")
    parser.add_argument("--only", default="", help="methods whose name contains this, besides full")
    parser.add_argument("--one", choices=METHODS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        torch.set_num_threads(1)
        print(json.dumps(hold(args.one, args.caches, args.tokens)))
        return 0
    names = [m for m in METHODS if m == "full" or args.only in m]
    print(f"{args.caches} caches of {args.tokens} tokens each: {SHAPE}, float16")
    print(WHY, flush=True)
    sizes = ["--caches", args.caches, "--tokens", args.tokens]

    def measure(name: str) -> dict[str, float]:
        return dict(in_process("resident", "--one", name, *sizes, env=ALLOCATOR))

    with ThreadPoolExecutor(_at_once(args.caches, args.tokens)) as pool:
        return report(zip(names, pool.map(measure, names), strict=True))


if __name__ == "__main__":
    raise SystemExit(main())
