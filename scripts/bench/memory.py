"""Measure memory while a long prompt is read and while many tokens are generated, each in its own process.

    python scripts/bench/memory.py prefill [--tokens 16384]     peak of H2O's prefill over SnapKV's (at most 1.30x)
    python scripts/bench/memory.py decode [--new 2000]          tokens and memory over a long answer (at most 2 MiB
                                                                more, and the budget, where tokens are evicted)
    python scripts/bench/memory.py long [--lengths 8192 32768]  peak of every method by the prompt's length (at most
                                                                1.30x the full cache's), beside the bare model's

Peaks are the growth of a process above its loaded model: CUDA's allocator on a GPU, resident memory on a CPU.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from ratio import compared_methods, finish, in_process, options, verdict
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from kvbench import api
from kvbench.engine import prompt_pass
from kvbench.engine.decode_layer import RowLayer
from kvbench.engine.memory import process_memory
from kvbench.engine.step import build, step
from kvbench.methods.core import registry
from kvbench.models import checkpoint
from kvbench.models.interface import attached
from kvbench.models.load import EMBEDDED
from kvbench.models.releases import CACHE_NAME
from kvbench.storage.evicting_rows import EvictingRows

MIB = 2**20
LIMIT = 1.30
"""The largest peak over that of SnapKV (prefill) or of the full cache (long)."""
GROWTH_LIMIT = 2 * MIB
PREFILL = ("snapkv", "h2o", "streamingllm")

# tokens of the budget and of the prompt before a long answer
SIZE = 256
PROMPT = 512
DECODE = compared_methods("memory")

LONG_SIZE = 1024
BARE, WHOLE = "bare model", "full, MLPs whole"
# these need another method, or a knob, to run without a calibration
IN_COMPANY = {"vatp": {"method": "h2o+vatp"}, "uncomp-group": {"method": "uncomp-group", "grouping": "random"}}
# calibrated here over a little of this file's text
CALIBRATED = ("asvd", "palu")
# an MLP of Llama 3's width relative to its heads, since its scratch memory decides the peak
MLP = {"hidden_size": 512, "intermediate_size": 1792, "num_key_value_heads": 2}


def long_entries() -> dict[str, dict[str, object]]:
    """Return an entry for every method in the benchmark of long prompts. A budget, if it has one, is LONG_SIZE."""
    entries = {}
    for name in registry.available():
        knobs = IN_COMPANY.get(name, {"method": name})
        entry: dict[str, object] = dict(knobs)
        if any("kv_size" in registry.defaults(stage) for stage in knobs["method"].split("+")):
            entry["kv_size"] = LONG_SIZE
        entries[name] = entry
    return entries


def model(**sizes: int) -> LlamaForCausalLM:
    """Return a Llama of 2 layers with grouped heads: small weights, so that caches and scratch memory stand out."""
    torch.manual_seed(0)
    settings = {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 1024,
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "max_position_embeddings": 2**20,
    }
    config = LlamaConfig(**(settings | sizes))  # type: ignore[arg-type]
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        return LlamaForCausalLM(config).eval()


def prompt(tokens: int) -> torch.Tensor:
    """Return random token ids [tokens]."""
    return torch.randint(3, 512, (tokens,), generator=torch.Generator().manual_seed(0))


def in_use() -> int:
    """Return the bytes in use now, after scratch memory is released."""
    gc.collect()
    if torch.cuda.is_available():
        return torch.cuda.memory_allocated()
    # glibc keeps freed memory; this call returns it to the system
    ctypes.CDLL(None).malloc_trim(0)
    return process_memory("VmRSS")


def reset_resident_peak() -> None:
    """Reset VmHWM, the peak of this process's resident memory, to its present resident memory."""
    # 5 is the kernel's code for this (man 5 proc)
    Path("/proc/self/clear_refs").write_text("5")


def prefill_peak(method: str, tokens: int) -> dict[str, float]:
    """Return this process's growth at its peak while it reads ``tokens``, and the bytes of the cache."""
    torch.set_num_threads(2)
    llama = model()
    # a first prompt loads code and fills PyTorch's own buffers
    api.prefill(llama, prompt(512), [method])
    before = in_use()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        (cache,) = api.prefill(llama, prompt(tokens), [method], kv_size=512)
        peak = torch.cuda.max_memory_allocated()
    else:
        reset_resident_peak()
        (cache,) = api.prefill(llama, prompt(tokens), [method], kv_size=512)
        peak = process_memory("VmHWM")
    return {"peak": peak - before, "cache": cache.nbytes()}


def long_peak(name: str, tokens: int, threads: int) -> dict[str, float]:
    """Return the peak growth of this process and the seconds while it reads ``tokens``, and the bytes of the cache."""
    torch.set_num_threads(threads)
    llama = model(**MLP)
    # the bare model has no entry
    entry: api.Entry | None = long_entries().get(name)
    if name == WHOLE:
        # prompts of more than LONG tokens go through the MLPs in parts; with this setting no prompt is longer
        prompt_pass.LONG = tokens
        entry = {"method": "full"}
    if name in CALIBRATED:
        tokenizer = checkpoint.read(AutoTokenizer, "tiny", EMBEDDED / "tiny")
        with TemporaryDirectory() as folder:
            entry = api.calibrate(llama, tokenizer, name, folder, text=__file__, samples=4, tokens=256)

    def read(ids: torch.Tensor) -> int:
        """Read a prompt and return the bytes of its cache."""
        if entry is None:
            with torch.no_grad():
                cache = llama(ids[None], use_cache=True, logits_to_keep=1)[CACHE_NAME]
            return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        return api.prefill(llama, ids, [entry])[0].nbytes()

    # a first prompt, longer than a budget, loads code and fills PyTorch's own buffers
    read(prompt(2 * LONG_SIZE))
    before = in_use()
    reset_resident_peak()
    start = time.perf_counter()
    cache_bytes = read(prompt(tokens))
    seconds = time.perf_counter() - start
    return {"peak": process_memory("VmHWM") - before, "cache": cache_bytes, "seconds": seconds}


def decode_growth(name: str, new: int) -> dict[str, float]:
    """Return the bytes in use after a tenth of ``new`` tokens and after all, and the tokens held at the end.

    ``tokens`` is the mean over layers and heads. ``excess`` is the number of tokens by which the worst head exceeds its
    promise.
    """
    torch.set_num_threads(1)
    llama = model()
    entry = dict(DECODE[name])
    if name != "full":
        entry["kv_size"] = SIZE
    (cache,) = api.prefill(llama, prompt(PROMPT), [entry])
    batch = build(llama, [cache], new)
    token = torch.tensor([[5]], device=llama.device)
    early = 0
    with torch.no_grad(), attached(llama):
        for t in range(new):
            logits = step(llama, batch, token, torch.tensor([[PROMPT + t]], device=llama.device))
            token = logits[:, -1].argmax(dim=-1)[:, None]
            # after a tenth, rings and buffers have their final size, so later growth is a leak
            if t == new // 10:
                early = in_use()
    growth = {"early": early, "late": in_use(), "tokens": float(PROMPT + new), "excess": 0.0}
    evictor = cache.chain.evictor
    if evictor is not None:
        counts, excesses = [], []
        for i, layer in enumerate(cache.layers):
            budgets = torch.tensor(evictor.head_budgets(layer, i))
            tokens_by_head = count_by_head(batch.with_keys[i], len(budgets))
            counts.append(tokens_by_head)
            excesses.append(int((tokens_by_head - budgets).max()))
        growth["tokens"] = float(torch.cat(counts).float().mean())
        growth["excess"] = float(max(excesses))
    return growth


def count_by_head(layer: RowLayer, heads: int) -> torch.Tensor:
    """Return how many tokens each head of a layer's only row holds, [heads]. Heads can be in several formats."""
    counts = torch.zeros(heads, dtype=torch.int64)
    for entries, rows in layer.formats:
        if not isinstance(rows, EvictingRows):
            continue
        held_tokens = rows.held().flatten().cpu()
        if entries.heads is None:
            counts[:] = held_tokens
        else:
            counts[entries.heads.cpu()] = held_tokens
    return counts


def prefill_report(tokens: int) -> int:
    """Print the peaks of reading ``tokens``. Return exit status 1 if H2O's is too far above SnapKV's."""
    peaks = {method: in_process("memory", "one", "prefill", method, tokens) for method in PREFILL}
    print(f"prefill of {tokens} tokens, 2 layers, 8 query and 4 kv heads of dimension 64, fp32")
    for method, result in peaks.items():
        cache = f"cache kept {result['cache'] / MIB:6.1f} MiB"
        print(f"  {method:<14} peak above the model {result['peak'] / MIB:8.1f} MiB, {cache}")
    # H2O's column sums need all attention weights [n, n], but these must not be held whole
    ratio = peaks["h2o"]["peak"] / peaks["snapkv"]["peak"]
    ok = verdict("h2o / snapkv", ratio, ratio <= LIMIT, f"at most {LIMIT:.2f}x")
    return 0 if ok else 1


def measure_long(name: str, tokens: int, threads: int) -> dict[str, float]:
    """Return the measurements of ``long_peak``, taken in a process of its own."""
    return dict(in_process("memory", "one", "long", name, tokens, "--threads", threads))


def measure_growth(name: str, new: int) -> dict[str, float]:
    """Return the measurements of ``decode_growth``, taken in a process of its own."""
    return dict(in_process("memory", "one", "decode", name, new))


def long_report(
    lengths: Sequence[int],
    only: Sequence[str],
    threads: int,
    measure_peak: Callable[[str, int, int], dict[str, float]] = measure_long,
) -> int:
    """Print each method's peaks by length. Return exit status 1 if the longest is too far above the full cache's."""
    methods = [name for name in long_entries() if name != "full" and (not only or name in only)]
    # measure the full cache before the methods, since they are compared with it
    rows = [BARE, WHOLE, "full"]
    rows += methods
    print(f"2 layers of {MLP}, 8 query heads of dimension 64, fp32, {threads} threads a process")
    print(f"budgets of {LONG_SIZE} tokens")
    heads = "".join(f"{f'MiB at {n}':>16}" for n in lengths)
    print(f"{'':20}{heads}{'KiB a token':>13}{'cache MiB':>11}{'over full':>11}{'s':>9}")

    def measure(name: str) -> list[dict[str, float]]:
        return [measure_peak(name, n, threads) for n in lengths]

    # a single length has no slope: use the difference to itself, 0, over one token
    previous = max(0, len(lengths) - 2)
    step = max(1, lengths[-1] - lengths[previous])
    status = 0
    peaks: dict[str, float] = {}
    with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) // threads)) as pool:
        for name, by_length in zip(rows, pool.map(measure, rows), strict=True):
            longest = by_length[-1]
            peaks[name] = longest["peak"]
            slope = (longest["peak"] - by_length[previous]["peak"]) / step / 1024
            over_full, mark = "", ""
            if "full" in peaks:
                over_full = f"{longest['peak'] / peaks['full']:.2f}"
            if name in methods:
                mark = "  ok"
                if longest["peak"] > LIMIT * peaks["full"]:
                    mark, status = "  MISSED", 1
            columns = "".join(f"{result['peak'] / MIB:16.1f}" for result in by_length)
            rest = f"{slope:13.2f}{longest['cache'] / MIB:11.1f}{over_full:>11}{longest['seconds']:9.1f}"
            print(f"{name:20}{columns}{rest}{mark}", flush=True)
    print(f"ok: at most {LIMIT:.2f} times the full cache's at {lengths[-1]} tokens")
    for above in (BARE, WHOLE):
        print(f"  {above} / full at {lengths[-1]} tokens: {peaks[above] / peaks['full']:.2f}x")
    return status


def decode_report(new: int, measure: Callable[[str, int], dict[str, float]] = measure_growth) -> int:
    """Print each method's tokens and growth over ``new`` tokens. Return 1 if an evicting one exceeds a limit."""
    limit = f"at most {SIZE} tokens and {GROWTH_LIMIT / MIB:.0f} MiB"
    print(f"{new} new tokens after a prompt of {PROMPT}, kv_size={SIZE}; evicting methods: {limit}")
    status = 0
    for name in DECODE:
        growth = measure(name, new)
        grown = growth["late"] - growth["early"]
        mark = "  ok"
        if name == "full":
            # the full cache is only there to compare with, and may grow
            mark = ""
        elif growth["tokens"] > SIZE or growth["excess"] > 0 or grown > GROWTH_LIMIT:
            mark, status = "  MISSED", 1
        memory = f"memory over the last 90 %: {grown / MIB:+7.2f} MiB"
        print(f"  {name:<20} {growth['tokens']:7.1f} tokens held per head at the end, {memory}{mark}")
    return status


def main() -> int:
    """Print the measurements. Return exit status 1 if one is above its limit, else 0."""
    parser = options(__doc__)
    parser.add_argument("what", choices=("prefill", "decode", "long", "one"))
    parser.add_argument("rest", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--tokens", type=int, default=16384, help="prompt of the prefill benchmark")
    parser.add_argument("--new", type=int, default=2000, help="tokens of the decode benchmark")
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768], help="prompts of the long benchmark")
    parser.add_argument(
        "--only", nargs="+", choices=long_entries(), metavar="METHOD", default=[], help="its methods, besides full"
    )
    parser.add_argument("--threads", type=int, default=1, help="its threads for each process")
    args = parser.parse_args()
    if args.what == "long":
        return long_report(args.lengths, args.only, args.threads)
    if args.what == "one":
        # the child of a report measures one method and prints JSON
        kind, name, number = args.rest
        if kind == "long":
            result = long_peak(name, int(number), args.threads)
        elif kind == "prefill":
            result = prefill_peak(name, int(number))
        else:
            result = decode_growth(name, int(number))
        print(json.dumps(result))
        return 0
    if args.what == "prefill":
        return prefill_report(args.tokens)
    return decode_report(args.new)


if __name__ == "__main__":
    finish(main)
