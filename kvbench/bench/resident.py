"""Resident memory of many caches held at once, against the accounted bytes, each method in a process of its own.

    python -m kvbench.bench.resident [--caches 64] [--tokens 4096] [--only kivi]
    python -m kvbench.bench.resident --decode 256 [--caches 64] [--tokens 1024] [--only kivi]

Caches are made of random layers by the real stages, in fp16 (full: 2 GiB in all), and stay alive while the process
is measured; as many processes run at once as processors and memory allow. A method's ratio is what its process grew by
over what the full cache's process grew by; it must be that of the accounted bytes (payload and overhead) within 5 %.
The status is 1 if one is not.

With ``--decode`` as many rows decode in one batch, of one method or of several, which takes the caches over. What the
process grew by is compared with what was accounted at the largest moment: bytes after the prompt and of the new tokens,
and where tokens are packed or evicted those of the moment that takes most. It must be that within 10 %.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import torch

from kvbench.audit.accounting import bytes_held
from kvbench.base.errors import unknown
from kvbench.bench.layers import all_layers
from kvbench.bench.memory import MIB, in_use
from kvbench.bench.ratio import compared_methods, finish, in_process, options
from kvbench.engine.decode_layer import RowLayer, allocated
from kvbench.engine.memory import free_bytes
from kvbench.kv.model_shape import Shape
from kvbench.kv.segment import LayerCache
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.resolve import chain_of
from kvbench.storage.evicting_rows import EvictingRows
from kvbench.storage.format import Room, StoredRow
from kvbench.storage.packed_rows import PackedRows
from kvbench.storage.roles import Rotary

LIMIT = 0.05
WARM = 4
SHAPE = Shape(layers=2, query_heads=32, kv_heads=8, head_dim=128)
DECODED = Shape(layers=2, query_heads=8, kv_heads=2, head_dim=128)
DECODE_LIMIT = 1.10
WHY = """\
As large as 64 full caches fit into 2 GiB. A process pays more than a tensor's bytes: large ones are
rounded up to pages (4 KiB) of a mapping of their own, small ones share pages with what was freed
before. That is a share of a small tensor that shows, and next to nothing of a large one.
"""
METHODS = compared_methods("resident")
EVICTING = {name: {**m, "kv_ratio": 0.125} for name, m in compared_methods("memory").items() if name not in METHODS}
DECODING = {**METHODS, **EVICTING}
MIXES = {name: mix["of"] for name, mix in compared_methods("mixes").items()}
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


def decode(name: str, rows: int, tokens: int, new: int) -> dict[str, float]:
    """Return what this process grew by once ``rows`` rows of one batch have read ``new`` tokens, and what is accounted.

    allocated: the storages of the batch. accounted: the bytes of the step that holds most. The rows of a mix are
    equally many of each of its methods.
    """
    chains = [chain_of(DECODING[part]) for part in MIXES.get(name, [name])]
    rotary = Rotary(1e4 ** (-torch.arange(0, DECODED.head_dim, 2) / DECODED.head_dim))

    def build(chain: Chain) -> list[LayerCache]:
        return all_layers(chain, DECODED, tokens, torch.float16)

    def batch_of(count: int) -> list[RowLayer]:
        caches = [[build(chain) for _ in range(count // len(chains))] for chain in chains]
        return [
            RowLayer([row for chain, own in zip(chains, caches, strict=True) for row in column(chain, own, i)], room)
            for i in range(DECODED.layers)
        ]

    def column(chain: Chain, caches: Sequence[list[LayerCache]], i: int) -> list[StoredRow]:
        """Return the rows of layer i, which leaves ``caches``."""
        stored = StoredRow(
            cache=caches[0].pop(0),
            layer=i,
            masker=chain.masker(i),
            coder=chain.coder_at(i),
            evictor=chain.evictor,
            rotary=rotary if chain.evictor is not None and chain.evictor.rolled else None,
        )
        return [stored, *(replace(stored, cache=cache.pop(0)) for cache in caches[1:])]

    def feed(layers: Sequence[RowLayer], count: int) -> int:
        """Read one token in every row; return the bytes of keys and values held then."""
        k, v = torch.randn(2, count, DECODED.kv_heads, 1, DECODED.head_dim).half()
        query = torch.randn(count, DECODED.query_heads, 1, DECODED.head_dim).half()
        for layer in layers:
            for entries, stored in layer.formats:
                if isinstance(stored, PackedRows):  # what codes say does not matter here, and packing takes minutes
                    stored.skip(1)
                    continue
                stored.add(entries.tokens(k), entries.tokens(v), entries.of_rows(layer.next[:, None]))
                if isinstance(stored, EvictingRows):
                    stored.attend(entries.query(query), DECODED.head_dim**-0.5, None)
            layer.grow(1)
        return sum(sum(layer.payload()) for layer in layers)

    room = Room(tokens=new)
    templates = [build(chain) for chain in chains]
    warm_rows = max(WARM, len(chains))
    warm = batch_of(warm_rows)
    feed(warm, warm_rows)
    baseline = in_use()
    layers = batch_of(rows)
    payloads = [feed(layers, rows) for _ in range(new)]
    grown = in_use() - baseline
    # a method's rows hold the same random numbers: the last state of its first stands for all
    each = rows // len(chains)
    accounted = each * sum(
        bytes_held(layer.continued(cache, row=each * part)).total
        for part, template in enumerate(templates)
        for layer, cache in zip(layers, template, strict=True)
    )
    return {"grown": grown, "allocated": allocated(layers), "accounted": accounted + max(payloads) - payloads[-1]}


def report_decoding(results: Iterable[tuple[str, dict[str, float]]]) -> int:
    """Print each method's resident memory over what is accounted. Return 1 if one is off by over DECODE_LIMIT."""
    status = 0
    print(f"{'':26}{'resident MiB':>14}{'allocated MiB':>15}{'accounted MiB':>15}{'ratio':>8}")
    for name, result in results:
        ratio = result["grown"] / result["accounted"]
        missed = ratio > DECODE_LIMIT
        status |= missed
        numbers = (result[key] / MIB for key in ("allocated", "accounted"))
        row = f"{result['grown'] / MIB:14.1f}{''.join(f'{x:15.1f}' for x in numbers)}{ratio:8.2f}"
        print(f"{name:26}{row}{'  MISSED' if missed else '  ok'}", flush=True)
    print(f"ok: at most {DECODE_LIMIT:.2f}")
    return int(status)


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
    print(f"ok: off by at most {100 * LIMIT:g} %")
    return int(status)


def _at_once(caches: int, tokens: int) -> int:
    """Return how many processes fit into memory at once, each with full caches and 1 GiB of scratch memory."""
    most = (caches + WARM) * SHAPE.full_bytes(tokens, 2) + 2**30
    return max(1, min(len(os.sched_getaffinity(0)), int(free_bytes(torch.device("cpu")) // most)))


def main() -> int:
    """Measure and print. Return exit status 1 if resident memory differs from the accounts, else 0."""
    parser = options(__doc__)
    parser.add_argument("--caches", type=int, default=64, help="caches held at once (default 64)")
    parser.add_argument("--tokens", type=int, help="tokens of each prompt (default 4096, with --decode 1024)")
    parser.add_argument("--decode", type=int, default=0, help="new tokens of each row; 0: hold prompts alone")
    parser.add_argument("--only", default="", help="methods whose name contains this, besides full")
    parser.add_argument("--one", choices=[*DECODING, *MIXES], help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.tokens = args.tokens or (1024 if args.decode else 4096)
    measurable = [*DECODING, *MIXES] if args.decode else [*METHODS]
    names = [m for m in measurable if m == "full" or args.only in m]
    if args.only and not any(args.only in m for m in names):
        raise unknown("--only", args.only, measurable)
    if args.one:
        torch.set_num_threads(1)
        decoding = partial(decode, args.one, args.caches, args.tokens, args.decode)
        print(json.dumps(decoding() if args.decode else hold(args.one, args.caches, args.tokens)))
        return 0
    if args.decode:
        print(f"{args.caches} rows of {args.tokens} tokens decode {args.decode} more: {DECODED}, float16", flush=True)
        sizes = ["--caches", args.caches, "--tokens", args.tokens, "--decode", args.decode]

        def run(name: str) -> dict[str, float]:
            return dict(in_process("resident", "--one", name, *sizes, env=ALLOCATOR))

        with ThreadPoolExecutor(_at_once(args.caches, args.tokens)) as pool:
            return report_decoding(zip(names, pool.map(run, names), strict=True))
    print(f"{args.caches} caches of {args.tokens} tokens each: {SHAPE}, float16")
    print(WHY, flush=True)
    sizes = ["--caches", args.caches, "--tokens", args.tokens]

    def measure(name: str) -> dict[str, float]:
        return dict(in_process("resident", "--one", name, *sizes, env=ALLOCATOR))

    with ThreadPoolExecutor(_at_once(args.caches, args.tokens)) as pool:
        return report(zip(names, pool.map(measure, names), strict=True))


if __name__ == "__main__":
    finish(main)
