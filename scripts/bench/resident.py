"""Resident memory of many caches held at once, against the accounted bytes, each method in a process of its own.

    python scripts/bench/resident.py [--caches 64] [--tokens 4096] [--only kivi]
    python scripts/bench/resident.py --decode 256 [--caches 64] [--tokens 1024] [--only kivi]

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
from typing import Any

import torch
from memory import MIB, in_use
from ratio import compared_methods, finish, in_process, options

from kvbench.audit.accounting import bytes_held
from kvbench.base.errors import unknown
from kvbench.bench.layers import build_layers
from kvbench.engine.decode_layer import RowLayer, count_allocated
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
"""The largest distance of a method's measured ratio to the full cache from the accounted one."""
DECODE_LIMIT = 1.10
"""The largest growth of a decoding process, in multiples of the accounted bytes."""
WARM = 4
"""The number of caches, or rows, that a process builds before it is measured."""
SHAPE = Shape(layers=2, query_heads=32, kv_heads=8, head_dim=128)
DECODED = Shape(layers=2, query_heads=8, kv_heads=2, head_dim=128)
WHY = """\
As large as 64 full caches fit into 2 GiB. A process pays more than a tensor's bytes: large ones are
rounded up to pages (4 KiB) of a mapping of their own, small ones share pages with what was freed
before. That is a share of a small tensor that shows, and next to nothing of a large one.
"""
# large tensors get mappings of their own: these are given back when freed, but each costs a page more; small ones are
# packed
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_ARENA_MAX": "1"}

METHODS = compared_methods("resident")
"""The methods whose caches are held."""


def _decoding_methods() -> dict[str, dict[str, Any]]:
    """Return METHODS and the methods that evict while decoding, as named by the benchmark of memory."""
    methods = dict(METHODS)
    for name, entry in compared_methods("memory").items():
        if name not in METHODS:
            methods[name] = entry | {"kv_ratio": 0.125}
    return methods


DECODING = _decoding_methods()
MIXES: dict[str, list[str]] = {name: mix["of"] for name, mix in compared_methods("mixes").items()}
"""The names of the methods in each batch of several methods."""


def hold(name: str, caches: int, tokens: int, shape: Shape = SHAPE, warm: int = WARM) -> dict[str, float]:
    """Return the bytes that this process grows by while it holds ``caches`` caches, and those accounted for them."""
    build = partial(build_layers, chain_of(METHODS[name]), shape, tokens, torch.float16)
    # the first caches load code and leave the allocator's free lists in the state in which all later ones find them
    first = [build() for _ in range(warm)]
    baseline = in_use()
    held_caches = [build() for _ in range(caches)]
    grown = in_use() - baseline
    # keep the first caches alive, so that the growth is that of the others alone
    assert len(first) == warm
    accounted = 0
    for layers in held_caches:
        accounted += sum(bytes_held(layer).total for layer in layers)
    return {"grown": grown, "accounted": accounted}


def decode(
    name: str, rows: int, tokens: int, new: int, *, shape: Shape = DECODED, warm: int = WARM
) -> dict[str, float]:
    """Return this process's growth once ``rows`` rows of one batch have read ``new`` tokens, and the accounted bytes.

    allocated: the storages of the batch.
    accounted: the bytes of the step that holds most. The rows of a mix are equally many of each of its methods.
    """
    chains = [chain_of(DECODING[part]) for part in MIXES.get(name, [name])]
    room = Room(tokens=new)
    templates = [build_layers(chain, shape, tokens, torch.float16) for chain in chains]
    # a first batch loads code and leaves the allocator's free lists in the state in which the second finds them; it
    # stays alive, too
    warm_rows = max(warm, len(chains))
    warm_layers = build_batch(chains, warm_rows, tokens, room=room, shape=shape)
    feed(warm_layers, warm_rows, shape)
    baseline = in_use()
    layers = build_batch(chains, rows, tokens, room=room, shape=shape)
    payloads = [feed(layers, rows, shape) for _ in range(new)]
    grown = in_use() - baseline
    # a method's rows hold the same random numbers, so the last state of its first row stands for all
    rows_of_method = rows // len(chains)
    bytes_of_first_rows = 0
    for number, template in enumerate(templates):
        for layer, cache in zip(layers, template, strict=True):
            state = layer.continue_cache(cache, row=rows_of_method * number)
            bytes_of_first_rows += bytes_held(state).total
    # when tokens are packed or evicted, an earlier step can have held more than the last
    accounted = rows_of_method * bytes_of_first_rows + max(payloads) - payloads[-1]
    return {"grown": grown, "allocated": count_allocated(layers), "accounted": accounted}


def build_batch(chains: Sequence[Chain], rows: int, tokens: int, *, room: Room, shape: Shape) -> list[RowLayer]:
    """Return the layers of a decode batch of ``rows`` rows after a prompt of ``tokens``, equally many of each chain."""
    caches_by_chain = []
    for chain in chains:
        build = partial(build_layers, chain, shape, tokens, torch.float16)
        caches_by_chain.append([build() for _ in range(rows // len(chains))])
    # theta_i = 10000^(-2i / d)
    rotary = Rotary(1e4 ** (-torch.arange(0, shape.head_dim, 2) / shape.head_dim))
    layers = []
    for i in range(shape.layers):
        stored: list[StoredRow] = []
        for chain, caches in zip(chains, caches_by_chain, strict=True):
            stored += take_rows(chain, caches, i, rotary)
        layers.append(RowLayer(stored, room))
    return layers


def take_rows(chain: Chain, caches: Sequence[list[LayerCache]], i: int, rotary: Rotary) -> list[StoredRow]:
    """Return the rows of layer i, one for each cache. The layer leaves the caches, so its memory is held once.

    Layers are taken in order: layer i is the first that is still in each cache.
    """
    evictor = chain.evictor
    first = StoredRow(
        cache=caches[0].pop(0),
        layer=i,
        masker=chain.masker(i),
        coder=chain.coder_at(i),
        evictor=evictor,
        rotary=rotary if evictor is not None and evictor.rolled else None,
    )
    rows = [first]
    for cache in caches[1:]:
        rows.append(replace(first, cache=cache.pop(0)))
    return rows


def feed(layers: Sequence[RowLayer], rows: int, shape: Shape) -> int:
    """Read one random token in each of ``rows`` rows. Return the bytes of keys and values held then."""
    k, v = torch.randn(2, rows, shape.kv_heads, 1, shape.head_dim).half()
    query = torch.randn(rows, shape.query_heads, 1, shape.head_dim).half()
    payload = 0
    for layer in layers:
        for entries, stored in layer.formats:
            if isinstance(stored, PackedRows):
                # the values of codes do not matter here, and packing takes minutes
                stored.skip(1)
                continue
            stored.add(entries.select_tokens(k), entries.select_tokens(v), entries.select_rows(layer.next[:, None]))
            if isinstance(stored, EvictingRows):
                # only attention decides what is evicted
                stored.attend(entries.select_queries(query), shape.head_dim**-0.5, None)
        layer.grow(1)
    for layer in layers:
        payload += sum(layer.payload())
    return payload


def report_decoding(results: Iterable[tuple[str, dict[str, float]]]) -> int:
    """Print each method's resident memory over the accounted bytes. Return 1 if one is off by over DECODE_LIMIT."""
    status = 0
    print(f"{'':26}{'resident MiB':>14}{'allocated MiB':>15}{'accounted MiB':>15}{'ratio':>8}")
    for name, result in results:
        ratio = result["grown"] / result["accounted"]
        mark = "  ok"
        if ratio > DECODE_LIMIT:
            mark, status = "  MISSED", 1
        grown, held, accounted = (result[key] / MIB for key in ("grown", "allocated", "accounted"))
        print(f"{name:26}{grown:14.1f}{held:15.1f}{accounted:15.1f}{ratio:8.2f}{mark}", flush=True)
    print(f"ok: at most {DECODE_LIMIT:.2f}")
    return status


def report(results: Iterable[tuple[str, dict[str, float]]]) -> int:
    """Print each method's ratios to ``full``, the first, as results come. Return 1 if one is off by over LIMIT."""
    full: dict[str, float] | None = None
    status = 0
    print(f"{'':26}{'resident':>12}{'accounted':>12}{'measured':>10}{'accounted':>11}{'off':>8}")
    print(f"{'':26}{'MiB':>12}{'MiB':>12}{': full':>10}{': full':>11}{'%':>8}")
    for name, result in results:
        if full is None:
            full = result
        measured = result["grown"] / full["grown"]
        accounted = result["accounted"] / full["accounted"]
        off = measured / accounted - 1
        error = off
        if name == "full":
            # all others are compared with the full cache, so its own bytes must be right
            error = result["grown"] / result["accounted"] - 1
        mark = "  ok"
        if not abs(error) <= LIMIT:
            mark, status = "  MISSED", 1
        row = f"{result['grown'] / MIB:12.1f}{result['accounted'] / MIB:12.1f}{measured:10.4f}{accounted:11.4f}"
        print(f"{name:26}{row}{100 * off:+8.1f}{mark}", flush=True)
    print(f"ok: off by at most {100 * LIMIT:g} %")
    return status


def count_processes(caches: int, tokens: int, free: int, processors: int) -> int:
    """Return how many processes run at once in ``free`` bytes, each with full caches and 1 GiB of scratch memory."""
    process_bytes = (caches + WARM) * SHAPE.full_bytes(tokens, 2) + 2**30
    return max(1, min(processors, free // process_bytes))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print. Return exit status 1 if resident memory differs from the accounts, else 0."""
    parser = options(__doc__)
    parser.add_argument("--caches", type=int, default=64, help="caches held at once (default 64)")
    parser.add_argument("--tokens", type=int, help="tokens of each prompt (default 4096, with --decode 1024)")
    parser.add_argument("--decode", type=int, default=0, help="new tokens of each row; 0: hold prompts alone")
    parser.add_argument("--only", default="", help="methods whose name contains this, besides full")
    parser.add_argument("--one", choices=list(DECODING) + list(MIXES), help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.decode:
        measurable = list(DECODING) + list(MIXES)
        tokens = args.tokens or 1024
    else:
        measurable = list(METHODS)
        tokens = args.tokens or 4096
    names = [name for name in measurable if name == "full" or args.only in name]
    if args.only and not any(args.only in name for name in names):
        raise unknown("--only", args.only, measurable)
    if args.one:
        # the child of a report measures one method and prints JSON
        torch.set_num_threads(1)
        if args.decode:
            result = decode(args.one, args.caches, tokens, args.decode)
        else:
            result = hold(args.one, args.caches, tokens)
        print(json.dumps(result))
        return 0
    sizes = ["--caches", args.caches, "--tokens", tokens]
    if args.decode:
        print(f"{args.caches} rows of {tokens} tokens decode {args.decode} more: {DECODED}, float16", flush=True)
        sizes += ["--decode", args.decode]
    else:
        print(f"{args.caches} caches of {tokens} tokens each: {SHAPE}, float16")
        print(WHY, flush=True)

    def measure(name: str) -> dict[str, float]:
        return dict(in_process("resident", "--one", name, *sizes, env=ALLOCATOR))

    free, processors = free_bytes(torch.device("cpu")), len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(count_processes(args.caches, tokens, free, processors)) as pool:
        results = zip(names, pool.map(measure, names), strict=True)
        if args.decode:
            return report_decoding(results)
        return report(results)


if __name__ == "__main__":
    finish(main)
