"""Measure memory while a long prompt is read and while many tokens are generated, each in its own process.

    python -m kvbench.bench.memory prefill [--tokens 16384]     peak of H2O's prefill over SnapKV's (at most 1.30x)
    python -m kvbench.bench.memory decode [--new 2000]          tokens and memory over a long answer (at most 2 MiB
                                                                more, and the budget, where tokens are evicted)
    python -m kvbench.bench.memory long [--lengths 8192 32768]  peak of every method by the prompt's length (at most
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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from kvbench import api
from kvbench.bench.ratio import compared_methods, finish, in_process, options, verdict
from kvbench.engine import prompt_pass
from kvbench.engine.decode_layer import RowLayer
from kvbench.engine.memory import process_memory
from kvbench.engine.step import build, step
from kvbench.methods.core import registry
from kvbench.models.interface import attached
from kvbench.models.load import EMBEDDED
from kvbench.models.releases import CACHE_NAME
from kvbench.storage.evicting_rows import EvictingRows

LIMIT = 1.30
MIB = 2**20
GROWTH_LIMIT = 2 * MIB
SIZE = 256
PROMPT = 512
PREFILL = ("snapkv", "h2o", "streamingllm")
DECODE = compared_methods("memory")
LONG_SIZE = 1024
BARE, WHOLE = "bare model", "full, MLPs whole"
IN_COMPANY = {"vatp": {"method": "h2o+vatp"}, "uncomp-group": {"method": "uncomp-group", "grouping": "random"}}
CALIBRATED = ("asvd", "palu")  # here over a little of this file's text
MLP = {"hidden_size": 512, "intermediate_size": 1792, "num_key_value_heads": 2}  # as wide to heads as Llama 3's


def long_entries() -> dict[str, dict[str, Any]]:
    """Return an entry of every method for the benchmark of long prompts, at LONG_SIZE tokens where it has a budget."""
    entries = {}
    for name in registry.available():
        entry = IN_COMPANY.get(name, {"method": name})
        budget = any("kv_size" in registry.defaults(part) for part in entry["method"].split("+"))
        entries[name] = {**entry, **({"kv_size": LONG_SIZE} if budget else {})}
    return entries


def model(**sizes: int) -> LlamaForCausalLM:
    """Return a Llama of 2 layers with grouped heads: small weights, so that caches and scratch memory stand out."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    small = {"vocab_size": 1024, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
    config = LlamaConfig(**{**heads, **small, **sizes}, max_position_embeddings=2**20)  # type: ignore[arg-type]
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
    ctypes.CDLL(None).malloc_trim(0)
    return process_memory("VmRSS")


def prefill_peak(method: str, tokens: int) -> dict[str, float]:
    """Return how much this process grows at its peak while it reads ``tokens``, and the bytes of the cache."""
    torch.set_num_threads(2)
    llama = model()
    api.prefill(llama, prompt(512), [method])
    loaded = in_use()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, the peak of resident memory
    (cache,) = api.prefill(llama, prompt(tokens), [method], kv_size=512)
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else process_memory("VmHWM")
    return {"peak": peak - loaded, "cache": cache.nbytes()}


def long_peak(name: str, tokens: int, threads: int) -> dict[str, float]:
    """Return the peak growth of this process and the seconds while it reads ``tokens``, and the bytes of the cache."""
    torch.set_num_threads(threads)
    llama = model(**MLP)
    if name == WHOLE:
        prompt_pass.LONG = tokens
    entry: api.Entry | None = {"method": "full"} if name == WHOLE else long_entries().get(name)
    if name in CALIBRATED:
        tokenizer = AutoTokenizer.from_pretrained(EMBEDDED / "tiny")
        with TemporaryDirectory() as folder:
            entry = api.calibrate(llama, tokenizer, name, folder, text=__file__, samples=4, tokens=256)

    def read(ids: torch.Tensor) -> int:
        if entry is None:
            with torch.no_grad():
                caches = llama(ids[None], use_cache=True, logits_to_keep=1)[CACHE_NAME]
            return sum(layer.keys.nbytes + layer.values.nbytes for layer in caches.layers)
        return api.prefill(llama, ids, [entry])[0].nbytes()

    read(prompt(2 * LONG_SIZE))
    loaded = in_use()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, the peak of resident memory
    start = time.perf_counter()
    held = read(prompt(tokens))
    seconds = time.perf_counter() - start
    return {"peak": process_memory("VmHWM") - loaded, "cache": held, "seconds": seconds}


def decode_growth(name: str, new: int) -> dict[str, float]:
    """Return the bytes in use after a tenth of ``new`` tokens and after all, and the tokens held at the end.

    ``tokens`` is the mean over layers and heads. ``excess`` is by how many tokens the worst head exceeds its promise.
    """
    torch.set_num_threads(1)
    llama = model()
    entry = DECODE[name] if name == "full" else {**DECODE[name], "kv_size": SIZE}
    (cache,) = api.prefill(llama, prompt(PROMPT), [entry])
    batch = build(llama, [cache], new)
    token = torch.tensor([[5]], device=llama.device)
    early = 0
    with torch.no_grad(), attached(llama):
        for t in range(new):
            logits = step(llama, batch, token, torch.tensor([[PROMPT + t]], device=llama.device))
            token = logits[:, -1].argmax(dim=-1)[:, None]
            if t == new // 10:
                early = in_use()
    growth = {"early": early, "late": in_use(), "tokens": float(PROMPT + new), "excess": 0.0}
    evictor = cache.chain.evictor
    if evictor is not None:
        promised = [torch.tensor(evictor.head_budgets(c, i)) for i, c in enumerate(cache.layers)]
        counts = [held_by_head(layer, len(p)) for layer, p in zip(batch, promised, strict=True)]
        growth["tokens"] = float(torch.cat(counts).float().mean())
        growth["excess"] = float(max(int((c - p).max()) for c, p in zip(counts, promised, strict=True)))
    return growth


def held_by_head(layer: RowLayer, heads: int) -> torch.Tensor:
    """Return how many tokens each of the heads of a layer's only row holds [heads]; heads can be in several formats."""
    counts = torch.zeros(heads, dtype=torch.int64)
    for entries, rows in layer.formats:
        if isinstance(rows, EvictingRows):
            counts[slice(None) if entries.heads is None else entries.heads.cpu()] = rows.held().flatten().cpu()
    return counts


def prefill_report(tokens: int) -> int:
    """Print the peaks of reading ``tokens``. Return exit status 1 if H2O's is too far above SnapKV's."""
    peaks = {method: in_process("memory", "one", "prefill", method, tokens) for method in PREFILL}
    print(f"prefill of {tokens} tokens, 2 layers, 8 query and 4 kv heads of dimension 64, fp32")
    for method, p in peaks.items():
        cache = f"cache kept {p['cache'] / MIB:6.1f} MiB"
        print(f"  {method:<14} peak above the model {p['peak'] / MIB:8.1f} MiB, {cache}")
    ratio = peaks["h2o"]["peak"] / peaks["snapkv"]["peak"]
    return 0 if verdict("h2o / snapkv", ratio, ratio <= LIMIT, f"at most {LIMIT:.2f}x") else 1


def long_report(lengths: Sequence[int], only: Sequence[str], threads: int) -> int:
    """Print each method's peaks by length. Return exit status 1 if the longest is too far above the full cache's."""
    chosen = [name for name in long_entries() if name != "full" and (not only or name in only)]
    rows = [BARE, WHOLE, "full", *chosen]
    print(f"2 layers of {MLP}, 8 query heads of dimension 64, fp32, {threads} threads a process")
    print(f"budgets of {LONG_SIZE} tokens")
    heads = [f"MiB at {n}" for n in lengths]
    titles = f"{'KiB a token':>13}{'cache MiB':>11}{'over full':>11}{'s':>9}"
    print(f"{'':20}{''.join(f'{head:>16}' for head in heads)}{titles}")

    def measure(name: str) -> list[dict[str, float]]:
        return [in_process("memory", "one", "long", name, n, "--threads", threads) for n in lengths]

    status, peaks = 0, {}
    with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) // threads)) as pool:
        for name, found in zip(rows, pool.map(measure, rows), strict=True):
            previous = max(0, len(lengths) - 2)
            last = peaks[name] = found[-1]["peak"]
            slope = (last - found[previous]["peak"]) / max(1, lengths[-1] - lengths[previous]) / 1024
            missed = name in chosen and last > LIMIT * peaks["full"]
            status |= missed
            mark = "  MISSED" if missed else "  ok" if name in chosen else ""
            over = f"{last / peaks['full']:11.2f}" if "full" in peaks else f"{'':11}"
            columns = "".join(f"{row['peak'] / MIB:16.1f}" for row in found)
            rest = f"{slope:13.2f}{found[-1]['cache'] / MIB:11.1f}{over}{found[-1]['seconds']:9.1f}"
            print(f"{name:20}{columns}{rest}{mark}", flush=True)
    print(f"ok: at most {LIMIT:.2f} times the full cache's at {lengths[-1]} tokens")
    for above in (BARE, WHOLE):
        print(f"  {above} / full at {lengths[-1]} tokens: {peaks[above] / peaks['full']:.2f}x")
    return int(status)


def decode_report(new: int) -> int:
    """Print each method's tokens and growth over ``new`` tokens. Return 1 if an evicting one exceeds a limit."""
    limit = f"at most {SIZE} tokens and {GROWTH_LIMIT / MIB:.0f} MiB"
    print(f"{new} new tokens after a prompt of {PROMPT}, kv_size={SIZE}; evicting methods: {limit}")
    status = 0
    for name in DECODE:
        growth = in_process("memory", "one", "decode", name, new)
        grown = growth["late"] - growth["early"]
        missed = name != "full" and (growth["tokens"] > SIZE or growth["excess"] > 0 or grown > GROWTH_LIMIT)
        status |= missed
        mark = "  MISSED" if missed else "  ok"
        if name == "full":
            mark = ""
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
        kind, name, number = args.rest
        if kind == "long":
            print(json.dumps(long_peak(name, int(number), args.threads)))
            return 0
        print(json.dumps((prefill_peak if kind == "prefill" else decode_growth)(name, int(number))))
        return 0
    return prefill_report(args.tokens) if args.what == "prefill" else decode_report(args.new)


if __name__ == "__main__":
    finish(main)
