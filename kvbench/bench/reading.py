"""What reading a prompt costs beside a model's own pass over it, and what would make that pass faster.

    python -m kvbench.bench.reading [--model NAME] [--lengths 512 2048] [--repeats 3] [--threads 2]

Per length, medians over repeats in turns: the seconds of each method's statistics and choice over those of the pass,
at a quarter of the tokens (at most 0.10); the pass in bfloat16 over float32; the pass of a bare model over four prompts
of one length at once over four passes. Then eight prompts that begin alike, each read whole, over the same with their
beginning read once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import torch
from transformers import PreTrainedModel

from kvbench.bench.ratio import finish, in_turns, median_ratio, options, seconds, verdict
from kvbench.bench.tables import loaded, planned
from kvbench.engine.prefill import prefill_chains
from kvbench.engine.shared_prefix import SharedPrefix
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.resolve import chain_of

LIMIT = 0.10
METHODS = (
    "streamingllm",
    "keynorm",
    "keydiff",
    "snapkv",
    "pyramidkv",
    "adakv",
    "tova",
    "cake",
    "expectedattention",
    "h2o",
)
TOGETHER = 4
ALIKE = {"prompts": 8, "tokens": 1024, "first": 896, "pieces": 128}


def statistics(model: PreTrainedModel, ids: torch.Tensor, repeats: int) -> bool:
    """Print each method's own time over that of the pass. Return True if all keep to LIMIT."""
    chains = [chain_of({"method": name, "kv_ratio": 0.25}) for name in METHODS]
    passes = [prefill_chains(model, ids, chains) for _ in range(repeats)]
    shares = {n: median(c[i].compress_s / c[i].prefill_s for c in passes) for i, n in enumerate(METHODS)}
    terms = f"at most {LIMIT:g}x"
    kept = [verdict(f"{name} / the pass", share, share <= LIMIT, terms) for name, share in shares.items()]
    return all(kept)


def passes(models: Sequence[PreTrainedModel], ids: torch.Tensor, repeats: int) -> None:
    """Print what bfloat16 (of the second model) and several prompts at once make of the pass."""
    exact, rounded = models

    def bare(rows: int) -> None:
        with torch.no_grad():
            exact(ids.expand(rows, -1), logits_to_keep=1)

    runs: dict[str, Callable[[], object]] = {
        "float32": partial(prefill_chains, exact, ids, [Chain()]),
        "bfloat16": partial(prefill_chains, rounded, ids, [Chain()]),
        "one": partial(bare, 1),
        "together": partial(bare, TOGETHER),
    }
    times = in_turns({name: partial(seconds, run) for name, run in runs.items()}, repeats)
    print(f"  bfloat16 / float32: {median_ratio(times['bfloat16'], times['float32']):.2f}x")
    print(f"  {TOGETHER} at once / one by one: {median_ratio(times['together'], times['one']) / TOGETHER:.2f}x")


def beginnings(model: PreTrainedModel, repeats: int) -> None:
    """Print what prompts that begin alike cost when each is read whole over reading their beginning once.

    And what reading in pieces costs where nothing is known of a prompt.
    """
    chains = [chain_of({"method": name}) for name in ("full", "snapkv")]
    generator = torch.Generator().manual_seed(0)
    words = int(model.config.vocab_size)
    first = torch.randint(words, (ALIKE["first"],), generator=generator)
    rest = torch.randint(words, (ALIKE["prompts"], ALIKE["tokens"] - ALIKE["first"]), generator=generator)

    def read(prompts: torch.Tensor, share: bool) -> None:
        prefix = SharedPrefix(model, ALIKE["pieces"]) if share else None
        for own in prompts:
            prefill_chains(model, torch.cat([first, own]), chains, prefix=prefix)

    runs = {
        "whole": partial(read, rest, False),
        "once": partial(read, rest, True),
        "one whole": partial(read, rest[:1], False),
        "one in pieces": partial(read, rest[:1], True),
    }
    times = in_turns({name: partial(seconds, run) for name, run in runs.items()}, repeats)
    what = "{prompts} prompts of {tokens} tokens, of which {first} are alike, whole / shared_prefix={pieces}"
    print(f"{what.format(**ALIKE)}: {median_ratio(times['whole'], times['once']):.2f}x")
    print(f"one of them alone, in pieces / whole: {median_ratio(times['one in pieces'], times['one whole']):.2f}x")


def main() -> int:
    """Print the ratios. Return exit status 1 if one misses its limit, else 0."""
    parser = options(__doc__, repeats=3, threads=2)
    parser.add_argument("--model", default="smollm2-135m-q4_1")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    kinds = ("float32", "bfloat16")
    models = [loaded(planned(f"model={args.model}", f"model.dtype={kind}", "dataset=tiny")).model for kind in kinds]
    ok = True
    for length in args.lengths:
        ids = torch.randint(10, 1000, (length,), generator=torch.Generator().manual_seed(0))
        print(f"{args.model}, {length} tokens, {args.threads} threads, {args.repeats} repeats")
        ok &= statistics(models[0], ids, args.repeats)
        passes(models, ids, args.repeats)
    beginnings(models[0], args.repeats)
    return 0 if ok else 1


if __name__ == "__main__":
    finish(main)
