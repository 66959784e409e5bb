"""The rows of kvbench.bench.tables and real_table through kvpress one by one: seconds by row, as JSON, the last line.

Run in an environment that has kvpress, which pins older transformers than kvbench's own has.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from kvbench.bench.ratio import options, seconds
from kvbench.models.releases import named_cache

THINK = 0.4


def press_of(row: str) -> Any:
    """Return kvpress's press for a row, a method with the part of the tokens that it keeps; None for the full cache."""
    import kvpress

    method, _, budget = row.partition(" ")
    if method == "full":
        return None
    removed = 1 - float(budget)
    if method in ("snapkv", "snapkv+think"):
        snapkv = kvpress.SnapKVPress(removed, window_size=32, kernel_size=7)
        think = kvpress.ThinKPress(key_channel_compression_ratio=THINK, window_size=32)
        return kvpress.ComposedPress([snapkv, think]) if method == "snapkv+think" else snapkv
    if method == "streamingllm":
        return kvpress.StreamingLLMPress(removed, n_sink=4)
    classes = {"keynorm": "KnormPress", "h2o": "ObservedAttentionPress", "expectedattention": "ExpectedAttentionPress"}
    return getattr(kvpress, classes[method])(removed)


def answer(model: Any, press: Any, ids: torch.Tensor, new: int) -> None:
    """Prefill under the press, then decode greedily, as kvpress's own pipeline does."""
    # column sums are read from attention weights, which only eager attention returns
    eager = type(press).__name__ == "ObservedAttentionPress"
    model.set_attn_implementation("eager" if eager else "sdpa")
    cache = DynamicCache()
    with torch.no_grad():
        with press(model) if press is not None else nullcontext():
            options = {"output_attentions": True} if eager else {}
            out = model(ids[None], logits_to_keep=1, **named_cache(cache), **options)
        token = out.logits[:, -1].argmax(dim=-1, keepdim=True)
        del out
        for i in range(new - 1):
            position = torch.tensor([[len(ids) + i]])
            out = model(token, position_ids=position, **named_cache(cache))
            token = out.logits[:, -1].argmax(dim=-1, keepdim=True)
            del out


def main() -> None:
    """Read the checkpoint and the prompts and print the seconds of every row over all prompts."""
    parser = options(__doc__, threads=1)
    parser.add_argument("folder", type=Path, help="the checkpoint")
    parser.add_argument("--prompts", type=Path, required=True, help='a line of JSON each, {"prompt": ...}')
    parser.add_argument("--n", type=int, required=True)
    parser.add_argument("--new", type=int, required=True)
    parser.add_argument("--rows", nargs="+", required=True, help='"full", "snapkv 0.5", ...')
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.folder)
    texts = [json.loads(line)["prompt"] for line in args.prompts.read_text(encoding="utf-8").splitlines()]
    prompts = [torch.tensor(tokenizer.encode(text)[: args.n]) for text in texts]
    seconds_by_row = {
        row: sum(seconds(partial(answer, model, press_of(row), ids, args.new)) for ids in prompts) for row in args.rows
    }
    print(json.dumps(seconds_by_row))


if __name__ == "__main__":
    main()
