"""Memory while a long prompt is read and while many tokens are generated, each in a process of its own.

    python -m kvbench.bench.memory prefill [--tokens 16384]     peak of H2O's prefill over SnapKV's (at most 1.30x)
    python -m kvbench.bench.memory decode [--new 2000]          tokens and memory over a long answer (at most 2 MiB
                                                                more, and the budget, where tokens are evicted)

Peaks are what a process grows by above its loaded model: CUDA's allocator on a GPU, resident memory on a CPU.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvbench import api
from kvbench.engine.memory import process_memory
from kvbench.engine.step import build, step
from kvbench.models.interface import attached

LIMIT = 1.30
GROWTH_LIMIT = 2 * 2**20
SIZE = 256
PROMPT = 512
PREFILL = ("snapkv", "h2o", "streamingllm")
DECODE: dict[str, dict[str, Any]] = {
    "full": {"method": "full"},
    "h2o orig": {"method": "h2o", "variant": "orig"},
    "h2o uncomp": {"method": "h2o", "variant": "uncomp"},
    "scissorhands code": {"method": "scissorhands", "variant": "code"},
    "scissorhands paper": {"method": "scissorhands", "variant": "paper"},
    "cake": {"method": "cake"},
    "tova": {"method": "tova"},
    "streamingllm mask": {"method": "streamingllm", "mode": "mask"},
    "streamingllm rolled": {"method": "streamingllm", "mode": "rolled"},
    "qhitter code": {"method": "qhitter"},
    "qhitter paper": {"method": "qhitter", "variant": "paper"},
    "h2o+flexgen orig": {"method": "h2o+flexgen", "variant": "orig"},
    "uncomp-group": {"method": "uncomp-group", "grouping": "random"},
    "vatp+h2o orig": {"method": "vatp+h2o", "variant": "orig"},
}


def model() -> LlamaForCausalLM:
    """A Llama of 2 layers with grouped heads: small weights, so that caches and scratch memory stand out."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=65536,
    )
    built = LlamaForCausalLM(config).eval()
    built.to(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    return built


def prompt(tokens: int) -> torch.Tensor:
    """Random token ids."""
    return torch.randint(3, 512, (tokens,), generator=torch.Generator().manual_seed(0))


def reset_peak() -> int:
    """Forget the peak so far; returns the bytes in use now."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return process_memory("VmRSS")


def peak() -> int:
    """The most bytes in use since ``reset_peak``."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else process_memory("VmHWM")


def held() -> int:
    """Bytes in use now, scratch memory given back."""
    gc.collect()
    if torch.cuda.is_available():
        return torch.cuda.memory_allocated()
    ctypes.CDLL(None).malloc_trim(0)
    return process_memory("VmRSS")


def prefill_peak(method: str, tokens: int) -> dict[str, float]:
    """What reading ``tokens`` for one method grows this process by at most."""
    m = model()
    api.prefill(m, prompt(512), [method])
    before = reset_peak()
    (cache,) = api.prefill(m, prompt(tokens), [method], kv_size=512)
    return {"peak": peak() - before, "cache": cache.nbytes()}


def decode_growth(name: str, new: int) -> dict[str, float]:
    """Bytes in use after a tenth of ``new`` tokens and after all of them; the tokens held at the end, per head.

    ``tokens`` is the mean over layers and heads; ``excess`` is by how much the worst head exceeds its layer's promise.
    """
    m = model()
    entry = DECODE[name] if name == "full" else {**DECODE[name], "kv_size": SIZE}
    (cache,) = api.prefill(m, prompt(PROMPT), [entry])
    batch = build(m, [cache], new)
    token = torch.tensor([[5]], device=m.device)
    early = 0
    with torch.no_grad(), attached(m):
        for t in range(new):
            logits = step(m, batch, token, torch.tensor([[PROMPT + t]], device=m.device))
            token = logits[:, -1].argmax(dim=-1)[:, None]
            if t == new // 10:
                early = held()
    found = {"early": early, "late": held(), "tokens": float(PROMPT + new), "excess": 0.0}
    evictor = cache.chain.evictor
    if evictor is not None:
        counts = [layer.slots[0][1].held() for layer in batch]
        promised = [torch.tensor(evictor.head_budgets(c, i)) for i, c in enumerate(cache.layers)]
        found["tokens"] = float(torch.cat([c.flatten().float() for c in counts]).mean())
        found["excess"] = float(max(int((c.cpu() - p).max()) for c, p in zip(counts, promised, strict=True)))
    return found


def _in_process(*arguments: str) -> dict[str, float]:
    command = [sys.executable, "-m", "kvbench.bench.memory", "one", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


def main() -> int:
    """Print the measurements; the status is 1 if one is above its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("prefill", "decode", "one"))
    parser.add_argument("rest", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--tokens", type=int, default=16384, help="prompt of the prefill benchmark")
    parser.add_argument("--new", type=int, default=2000, help="tokens of the decode benchmark")
    args = parser.parse_args()
    if args.what == "one":
        kind, name, number = args.rest
        torch.set_num_threads(2 if kind == "prefill" else 1)
        print(json.dumps((prefill_peak if kind == "prefill" else decode_growth)(name, int(number))))
        return 0
    mib = 2**20
    if args.what == "prefill":
        found = {m: _in_process("prefill", m, str(args.tokens)) for m in PREFILL}
        print(f"prefill of {args.tokens} tokens, 2 layers, 8 query and 4 kv heads of dimension 64, fp32")
        for method, f in found.items():
            kept = f"cache kept {f['cache'] / mib:6.1f} MiB"
            print(f"  {method:<14} peak above the model {f['peak'] / mib:8.1f} MiB, {kept}")
        ratio = found["h2o"]["peak"] / found["snapkv"]["peak"]
        print(f"  h2o / snapkv: {ratio:.2f}x (at most {LIMIT:.2f}x: {'ok' if ratio <= LIMIT else 'MISSED'})")
        return 0 if ratio <= LIMIT else 1
    return decode_report(args.new)


def decode_report(new: int) -> int:
    """Print what each method holds and grows by over ``new`` tokens; 1 if one that evicts grows or holds too much."""
    mib = 2**20
    limit = f"at most {SIZE} tokens and {GROWTH_LIMIT / mib:.0f} MiB"
    print(f"{new} new tokens after a prompt of {PROMPT}, kv_size={SIZE}; evicting methods: {limit}")
    status = 0
    for name in DECODE:
        f = _in_process("decode", name, str(new))
        grown = f["late"] - f["early"]
        missed = name != "full" and (f["tokens"] > SIZE or f["excess"] > 0 or grown > GROWTH_LIMIT)
        status |= missed
        verdict = "" if name == "full" else "  MISSED" if missed else "  ok"
        memory = f"memory over the last 90 %: {grown / mib:+7.2f} MiB"
        print(f"  {name:<20} {f['tokens']:7.1f} tokens held per head at the end, {memory}{verdict}")
    return status


if __name__ == "__main__":
    raise SystemExit(main())
