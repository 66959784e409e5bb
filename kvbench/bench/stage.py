"""Time of a prompt whose hidden states are dropped between layers, as a ratio to the full prompt's, in one run.

    python -m kvbench.bench.stage [--tokens 4096] [--least-size 512 1536] [--layers 32] [--hidden 256]

A Llama of random weights reads one prompt as it is and under UNComp's stage (its paper's schedule, scaled to the
prompt), in turns; medians are compared. Beside the speed-up stand two limits of arithmetic: that of the tokens alone
(what matrix products of projections and MLPs can gain) and that of all products, attention's quadratic ones included.
The paper reports 1.58x with 63.09 % of the hidden states kept, on LLaMA-2-7B.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from kvbench.methods.chain import Chain
from kvbench.methods.uncomp_stage import STARTS, UncompStage
from kvbench.model.interface import synchronise
from kvbench.model.prefill import prefill_chains

FULL = "full"
# arXiv 2410.03090, A.3: the schedule is of prompts of this length
PAPER_TOKENS = 4096


@dataclass(frozen=True)
class Limits:
    """What the arithmetic of one schedule allows: hidden states kept (a fraction) and two speed-ups."""

    kept: float
    tokens: float
    products: float


def limits(sizes: Sequence[int], n: int, hidden: int, mlp: int, kv_share: float) -> Limits:
    """Of ``sizes`` tokens by layer of a prompt of n; ``kv_share`` is kv heads / query heads."""
    per_token = 2 * hidden * (2 * hidden + 2 * kv_share * hidden + 3 * mlp)

    def cost(m: int) -> float:
        # causal attention: half of q k' and of a v
        return per_token * m + 2 * hidden * m * m

    kept = sum(sizes) / (n * len(sizes))
    return Limits(kept, 1 / kept, len(sizes) * cost(n) / sum(cost(m) for m in sizes))


def stage(n: int, least_size: int) -> UncompStage:
    """The paper's schedule with S_min = ``least_size``, in proportion to a prompt of n tokens."""
    scaled = max(1, least_size * n // PAPER_TOKENS)
    return UncompStage(schedule="paper", most=n, least_size=scaled)


def build(args: argparse.Namespace, device: torch.device) -> PreTrainedModel:
    """A Llama of random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=args.hidden,
        intermediate_size=args.mlp or 11 * args.hidden // 4,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // args.head_dim,
        num_key_value_heads=args.hidden // args.head_dim,
        max_position_embeddings=2 * args.tokens,
    )
    with torch.device(device):
        model = LlamaForCausalLM(config)
    return model.to(getattr(torch, args.dtype)).eval()


def times(model: PreTrainedModel, ids: torch.Tensor, chains: Mapping[str, Chain], repeats: int) -> dict[str, float]:
    """Median seconds of a prefill by name, the chains in turns; the first round does not count."""
    spent: dict[str, list[float]] = {name: [] for name in chains}
    for _ in range(repeats + 1):
        for name, chain in chains.items():
            synchronise(ids.device)
            start = time.perf_counter()
            prefill_chains(model, ids, [chain])
            synchronise(ids.device)
            spent[name].append(time.perf_counter() - start)
    return {name: median(found[1:]) for name, found in spent.items()}


def main() -> int:
    """Print the speed-ups; the status is 1 if a schedule is slower than the full prompt."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=PAPER_TOKENS)
    parser.add_argument("--least-size", type=int, nargs="+", default=[512, 1536], help="S_min of a prompt of 4096")
    parser.add_argument("--layers", type=int, choices=tuple(STARTS), default=32)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--mlp", type=int, default=None, help="default: 2.75 times hidden")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default=None)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    args.dtype = args.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    model = build(args, device)
    mlp = model.config.intermediate_size
    ids = torch.randint(0, 1024, (args.tokens,), generator=torch.Generator().manual_seed(0)).to(device)
    stages = {f"S_min {size}": stage(args.tokens, size) for size in args.least_size}
    chains = {FULL: Chain(), **{name: Chain((s,)) for name, s in stages.items()}}
    where = f"{torch.get_num_threads()} threads" if device.type == "cpu" else torch.cuda.get_device_name(device)
    print(f"prefill of {args.tokens} tokens, {args.layers} layers of {args.hidden} (MLP {mlp}), {args.dtype}, {where};")
    print(f"medians of {args.repeats}, in turns; the paper: 63.09 % of the hidden states, 1.58x")
    found = times(model, ids, chains, args.repeats)
    print(f"{'':<12}{'seconds':>9}{'speed-up':>10}{'kept':>10}{'limit, tokens':>15}{'limit, products':>17}")
    print(f"{FULL:<12}{found[FULL]:>9.3f}{'1.00x':>10}{'100.00 %':>10}{'1.00x':>15}{'1.00x':>17}")
    slower = []
    for name, s in stages.items():
        bound = limits(s.sizes(args.tokens, args.layers), args.tokens, args.hidden, mlp, 1.0)
        gain = found[FULL] / found[name]
        print(
            f"{name:<12}{found[name]:>9.3f}{f'{gain:.2f}x':>10}{f'{100 * bound.kept:.2f} %':>10}"
            f"{f'{bound.tokens:.2f}x':>15}{f'{bound.products:.2f}x':>17}"
        )
        if gain < 1:
            slower.append(name)
    for name in slower:
        print(f"MISSED {name} is slower than the full prompt")
    return 1 if slower else 0


if __name__ == "__main__":
    raise SystemExit(main())
