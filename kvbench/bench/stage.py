"""Time of a prompt whose hidden states are dropped between layers, as a ratio to the full prompt's, in one run.

    python -m kvbench.bench.stage [--tokens 4096] [--least-size 512 1536] [--layers 32] [--hidden 256]

A Llama of random weights reads one prompt as it is and under UNComp's stage (its paper's schedule, scaled to the
prompt), in turns; medians are compared. Beside the speed-up stands what arithmetic allows: ``linear``, the products of
projections and MLPs by themselves; ``attention``, its products by themselves, which fall with the square of the tokens;
and between the two ``all``, where every product takes as long as any other. Attention also has a softmax and moves
more memory, so that a small model may gain more than ``all``; none gains more than ``attention``. The paper reports
1.58x with 63.09 % of the hidden states kept, on LLaMA-2-7B, where attention is a thirteenth of all products.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from kvbench.engine.prefill import prefill_chains
from kvbench.methods.chain import Chain
from kvbench.methods.uncomp_stage import STARTS, UncompStage
from kvbench.models.interface import synchronise

FULL = "full"
# arXiv 2410.03090, A.3: the schedule is of prompts of this length
PAPER_TOKENS = 4096
LLAMA_2_7B = (4096, 11008)  # hidden size, MLP


@dataclass(frozen=True)
class Limits:
    """What the arithmetic of one schedule allows.

    kept: hidden states, a fraction. tokens: speed-up of the linear products alone. products: of all, at one speed.
    attention: of attention alone, which nothing exceeds.
    """

    kept: float
    tokens: float
    products: float
    attention: float


def limits(sizes: Sequence[int], n: int, hidden: int, mlp: int, kv_share: float) -> Limits:
    """Of ``sizes`` tokens by layer of a prompt of n; ``kv_share`` is kv heads / query heads."""
    per_token = 2 * hidden * (2 * hidden + 2 * kv_share * hidden + 3 * mlp)

    def cost(m: int) -> float:
        # causal attention: half of q k' and of a v
        return per_token * m + 2 * hidden * m * m

    kept = sum(sizes) / (n * len(sizes))
    products = len(sizes) * cost(n) / sum(cost(m) for m in sizes)
    return Limits(kept, 1 / kept, products, len(sizes) * n**2 / sum(m**2 for m in sizes))


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


Times = dict[str, tuple[float, float]]


def times(model: PreTrainedModel, ids: torch.Tensor, chains: Mapping[str, Chain], repeats: int) -> Times:
    """Median seconds of a prefill by name, on the clock and of the processor; the chains in turns, a first round aside.

    Where other programs share the processor, only its own time is comparable.
    """
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in chains}
    for _ in range(repeats + 1):
        for name, chain in chains.items():
            synchronise(ids.device)
            start, worked = time.perf_counter(), time.process_time()
            prefill_chains(model, ids, [chain])
            synchronise(ids.device)
            spent[name].append((time.perf_counter() - start, time.process_time() - worked))
    return {name: (median(c for c, _ in found[1:]), median(p for _, p in found[1:])) for name, found in spent.items()}


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
    theirs = limits(stage(PAPER_TOKENS, 512).sizes(PAPER_TOKENS, 32), PAPER_TOKENS, *LLAMA_2_7B, 1.0)
    print(f"medians of {args.repeats}, in turns; the paper (LLaMA-2-7B): {100 * theirs.kept:.2f} % kept, 1.58x,")
    print(f"where arithmetic allows {theirs.tokens:.2f}x (linear), {theirs.products:.2f}x (all)")
    found = times(model, ids, chains, args.repeats)
    on_cpu = device.type == "cpu"
    print(
        f"{'':<12}{'seconds':>9}{'speed-up':>10}{'CPU s':>9}{'speed-up':>10}{'kept':>10}"
        f"{'linear':>9}{'all':>8}{'attention':>11}"
    )
    slower = []
    for name, (clock, worked) in found.items():
        sizes = stages[name].sizes(args.tokens, args.layers) if name in stages else [args.tokens] * args.layers
        bound = limits(sizes, args.tokens, args.hidden, mlp, 1.0)
        gains = [full / own for full, own in zip(found[FULL], (clock, worked), strict=True)]
        processor = (f"{worked:.3f}", f"{gains[1]:.2f}x") if on_cpu else ("-", "-")
        print(
            f"{name:<12}{clock:>9.3f}{f'{gains[0]:.2f}x':>10}{processor[0]:>9}{processor[1]:>10}"
            f"{f'{100 * bound.kept:.2f} %':>10}{f'{bound.tokens:.2f}x':>9}{f'{bound.products:.2f}x':>8}"
            f"{f'{bound.attention:.2f}x':>11}"
        )
        if gains[1 if on_cpu else 0] < 1:
            slower.append(name)
    for name in slower:
        print(f"MISSED {name} is slower than the full prompt")
    return 1 if slower else 0


if __name__ == "__main__":
    raise SystemExit(main())
