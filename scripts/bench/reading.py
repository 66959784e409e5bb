"""Measure what reading a prompt costs beside a model's own pass over it, and what would make that pass faster.

    python scripts/bench/reading.py [--model NAME] [--lengths 512 2048] [--repeats 3] [--threads 2]

Per length, medians over repeats in turns: the seconds of each method's statistics and choice over those of the pass,
at a quarter of the tokens (at most 0.10); the pass in bfloat16 over float32; the pass of a bare model over four prompts
of one length at once over four passes. Then eight prompts that begin alike, each read whole, over the same with their
beginning read once. Then a layer with a sliding window, over all pairs of tokens and over the window's band.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from statistics import median

import torch
from ratio import finish, in_turns, median_ratio, options, seconds, verdict
from tables import load_host, plan_run
from transformers import PreTrainedModel

from kvbench.engine.prefill import prefill_chains
from kvbench.engine.shared_prefix import SharedPrefix
from kvbench.kv.exact_attention import attend_rows, causal_softmax
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.prompt_cache import PromptCache
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
"""The number of prompts that a bare model reads at once."""
ALIKE = {"prompts": 8, "tokens": 1024, "first": 896, "pieces": 128}
"""Prompts that begin alike: their number, their tokens, those of the common beginning, and of a piece that is read."""


def statistics(model: PreTrainedModel, ids: torch.Tensor, repeats: int) -> bool:
    """Print each method's own time over that of the pass. Return True if all keep to LIMIT."""
    # all methods share one pass, so each of their caches has the same time of the pass
    chains = [chain_of({"method": name, "kv_ratio": 0.25}) for name in METHODS]
    return judge_statistics([prefill_chains(model, ids, chains) for _ in range(repeats)])


def judge_statistics(passes: Sequence[Sequence[PromptCache]]) -> bool:
    """Print the time of each of METHODS over the pass's time. ``passes`` holds the methods' caches for every repeat."""
    ok = True
    for i, name in enumerate(METHODS):
        share = median(caches[i].compress_s / caches[i].prefill_s for caches in passes)
        ok &= verdict(f"{name} / the pass", share, share <= LIMIT, f"at most {LIMIT:g}x")
    return ok


def passes(models: Sequence[PreTrainedModel], ids: torch.Tensor, repeats: int) -> None:
    """Print the time of the pass in bfloat16 over float32, and of several prompts at once over one by one.

    The first of ``models`` is in float32, the second in bfloat16.
    """
    exact, rounded = models

    def read_bare(rows: int) -> None:
        with torch.no_grad():
            exact(ids.expand(rows, -1), logits_to_keep=1)

    variants = {
        "float32": partial(seconds, partial(prefill_chains, exact, ids, [Chain()])),
        "bfloat16": partial(seconds, partial(prefill_chains, rounded, ids, [Chain()])),
        "one": partial(seconds, partial(read_bare, 1)),
        "together": partial(seconds, partial(read_bare, TOGETHER)),
    }
    times = in_turns(variants, repeats)
    print(f"  bfloat16 / float32: {median_ratio(times['bfloat16'], times['float32']):.2f}x")
    # one by one takes TOGETHER times as long as one
    together = median_ratio(times["together"], times["one"]) / TOGETHER
    print(f"  {TOGETHER} at once / one by one: {together:.2f}x")


def beginnings(model: PreTrainedModel, repeats: int, sizes: Mapping[str, int] = ALIKE) -> None:
    """Print the time of reading prompts that begin alike whole over reading their beginning once.

    A second ratio concerns one prompt alone: reading it in pieces, with nothing to share, over reading it whole.
    """
    chains = [chain_of({"method": name}) for name in ("full", "snapkv")]
    generator = torch.Generator().manual_seed(0)
    vocabulary = int(model.config.vocab_size)
    beginning = torch.randint(vocabulary, (sizes["first"],), generator=generator)
    # the end of each prompt, [prompts, tokens behind the beginning]
    ends = torch.randint(vocabulary, (sizes["prompts"], sizes["tokens"] - sizes["first"]), generator=generator)

    def read(prompt_ends: torch.Tensor, share: bool) -> None:
        # keeps the layers of the last prompt's beginning; the next prompt continues from them
        prefix = SharedPrefix(model, sizes["pieces"]) if share else None
        for end in prompt_ends:
            prefill_chains(model, torch.cat([beginning, end]), chains, prefix=prefix)

    variants = {
        "whole": partial(seconds, partial(read, ends, share=False)),
        "once": partial(seconds, partial(read, ends, share=True)),
        "one whole": partial(seconds, partial(read, ends[:1], share=False)),
        "one in pieces": partial(seconds, partial(read, ends[:1], share=True)),
    }
    times = in_turns(variants, repeats)
    text = "{prompts} prompts of {tokens} tokens, of which {first} are alike, whole / shared_prefix={pieces}"
    print(f"{text.format(**sizes)}: {median_ratio(times['whole'], times['once']):.2f}x")
    print(f"one of them alone, in pieces / whole: {median_ratio(times['one in pieces'], times['one whole']):.2f}x")


def bands(repeats: int, tokens: int = 8192, window: int = 512) -> None:
    """Print the time of a local layer over all pairs of tokens, hidden afterwards, over that of its band alone.

    The heads are those of Gemma 3 270M: 4 query heads on one kv head of 256 channels.
    """
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(4, tokens, 256, generator=generator)
    keys, values = torch.randn(2, 1, tokens, 256, generator=generator)

    def attend_pairs() -> None:
        for start in range(0, tokens, 128):
            end = start + 128
            rows = causal_softmax(query[:, start:end], keys[:, :end], 256**-0.5, window)
            rows.flatten(0, 1) @ values[0, :end]

    times = in_turns(
        {
            "pairs": partial(seconds, attend_pairs),
            "band": partial(seconds, partial(attend_rows, query, keys, values, 256**-0.5, window)),
        },
        repeats,
    )
    gain = median_ratio(times["pairs"], times["band"])
    print(f"a window of {window} over {tokens} tokens, all pairs / band: {gain:.1f}x")


def main() -> int:
    """Print the ratios. Return exit status 1 if one misses its limit, else 0."""
    parser = options(__doc__, repeats=3, threads=2)
    parser.add_argument("--model", default="smollm2-135m-q4_1")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    models = []
    for kind in ("float32", "bfloat16"):
        # a run names a dataset, but no dataset is read here
        run = plan_run(f"model={args.model}", f"model.dtype={kind}", "dataset=tiny")
        models.append(load_host(run).model)
    ok = True
    for length in args.lengths:
        ids = torch.randint(10, 1000, (length,), generator=torch.Generator().manual_seed(0))
        print(f"{args.model}, {length} tokens, {args.threads} threads, {args.repeats} repeats")
        ok &= statistics(models[0], ids, args.repeats)
        passes(models, ids, args.repeats)
    beginnings(models[0], args.repeats)
    bands(args.repeats)
    return 0 if ok else 1


if __name__ == "__main__":
    finish(main)
