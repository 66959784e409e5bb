"""The rows of tables.py and real_table.py through kvpress one by one: seconds by row, as JSON, the last line.

Run in an environment that has kvpress, which pins older transformers than kvbench's own has.
"""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from ratio import options, seconds
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from kvbench.models import checkpoint
from kvbench.models.releases import named_cache

THINK = 0.4
PRESSES = {"keynorm": "KnormPress", "h2o": "ObservedAttentionPress", "expectedattention": "ExpectedAttentionPress"}
"""kvpress's names of methods that need no settings besides the part of the tokens that they remove."""


def press_of(row: str) -> Any:
    """Return kvpress's press for a row, given as a method with its share of tokens kept; None for the full cache."""
    import kvpress

    method, _, budget = row.partition(" ")
    if method == "full":
        return None
    # kvpress states the share that is removed
    removed = 1 - float(budget)
    if method == "streamingllm":
        return kvpress.StreamingLLMPress(removed, n_sink=4)
    if method not in ("snapkv", "snapkv+think"):
        return getattr(kvpress, PRESSES[method])(removed)
    snapkv = kvpress.SnapKVPress(removed, window_size=32, kernel_size=7)
    if method == "snapkv":
        return snapkv
    think = kvpress.ThinKPress(key_channel_compression_ratio=THINK, window_size=32)
    return kvpress.ComposedPress([snapkv, think])


def answer(model: Any, press: Any, ids: torch.Tensor, new: int) -> None:
    """Prefill ``ids`` [n] under the press, then decode ``new`` tokens greedily, as kvpress's own pipeline does."""
    implementation, extra = "sdpa", {}
    if type(press).__name__ == "ObservedAttentionPress":
        # column sums come from attention weights, and only eager attention returns these
        implementation, extra = "eager", {"output_attentions": True}
    model.set_attn_implementation(implementation)
    cache = DynamicCache()
    compression: AbstractContextManager[object] = nullcontext() if press is None else press(model)
    with torch.no_grad():
        with compression:
            out = model(ids[None], logits_to_keep=1, **named_cache(cache), **extra)
        token = out.logits[:, -1].argmax(dim=-1, keepdim=True)
        # the output holds eager attention's weights: free them before the next pass
        del out
        for i in range(new - 1):
            # positions continue behind the prompt, however few of its tokens are left
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
    model = checkpoint.read(AutoModelForCausalLM, str(args.folder), args.folder, dtype=torch.float32).eval()
    tokenizer = checkpoint.read(AutoTokenizer, str(args.folder), args.folder)
    texts = [json.loads(line)["prompt"] for line in args.prompts.read_text(encoding="utf-8").splitlines()]
    prompts = [torch.tensor(tokenizer.encode(text)[: args.n]) for text in texts]
    seconds_by_row = {}
    for row in args.rows:
        times = []
        for ids in prompts:
            # make a press for each prompt before the clock starts
            times.append(seconds(partial(answer, model, press_of(row), ids, args.new)))
        seconds_by_row[row] = sum(times)
    print(json.dumps(seconds_by_row))


if __name__ == "__main__":
    main()
