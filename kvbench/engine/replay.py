"""Passes over a prompt that is read again behind its own cache, and the attention that the cache receives in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache as HFCache

from kvbench.base.errors import UsageError
from kvbench.kv.exact_attention import BLOCK_BYTES, causal_softmax
from kvbench.kv.segment import LayerCache, per_head
from kvbench.methods.core.replaying import QUOTED, Replay
from kvbench.models.interface import KvbenchLayer, attached
from kvbench.models.lowrank import lifts
from kvbench.models.releases import named_cache
from kvbench.storage import split

# the words of KVzip's passes (arXiv 2505.23416, section 3.2, and its released code), which are part of the method
REPEAT = "\n\nRepeat the previous context exactly."
REPEAT_FROM = "\n\nRepeat the part of the previous context exactly, starting with"
MARK = "kvbench5entinel"


class ReplayLayer(KvbenchLayer):
    """One layer of a pass: attention over the whole prompt and the pass's own tokens, which are then forgotten.

    k, v: the prompt's keys and values [Hk, n, D].
    span: (start, end) of the prompt's tokens that the pass repeats.
    received: [Hq, end - start], the most attention of any query to each of them, among ``sinks``, them and own tokens.
    """

    def __init__(self, k: Tensor, v: Tensor, span: tuple[int, int], sinks: int) -> None:
        super().__init__()
        self.k, self.v, self.span, self.sinks = k, v, span, min(sinks, span[0])
        self.received: Tensor | None = None

    def add(self, k: Tensor, v: Tensor) -> None:
        self.own_k, self.own_v, self.seen = k[0], v[0], self.k.shape[1] + k.shape[2]

    def attend(self, query: Tensor, scale: float, window: int | None) -> Tensor:
        if window is not None:
            raise UsageError("a prompt cannot be read again past the model's sliding window: use a shorter prompt")
        q = query[0]
        self.received = self._best(q, scale)
        fused = split.behind(q, (self.k, self.v), (self.own_k, self.own_v), scale)
        if fused is not None:
            return fused[0][None]
        n, t = self.k.shape[1], q.shape[1]
        k, v = (per_head(torch.cat(x, dim=1), len(q)) for x in ((self.k, self.own_k), (self.v, self.own_v)))
        out = torch.empty_like(q)
        for first, last in self._blocks(q, n + t):
            seen = torch.ones(last - first, n + last, dtype=torch.bool, device=q.device).tril(n + first)
            block, keys, values = q[None, :, first:last], k[None, :, : n + last], v[None, :, : n + last]
            out[:, first:last] = F.scaled_dot_product_attention(block, keys, values, seen, scale=scale)[0]
        return out[None]

    def _best(self, q: Tensor, scale: float) -> Tensor:
        """Return ``received`` of the pass's queries [Hq, t, D]."""
        start, end = self.span
        competing = torch.cat([self.k[:, : self.sinks], self.k[:, start:end], self.own_k], dim=1)
        before = competing.shape[1] - q.shape[1]
        best = torch.zeros(q.shape[0], end - start, device=q.device)
        for first, last in self._blocks(q, competing.shape[1]):
            rows = causal_softmax(q[:, first:last], competing[:, : before + last], scale)
            best = torch.maximum(best, rows[:, :, self.sinks : before].amax(dim=1))
        return best

    def _blocks(self, q: Tensor, tokens: int) -> Iterator[tuple[int, int]]:
        """Yield (first, last) of blocks of queries [Hq, t, D] whose rows over ``tokens`` take at most BLOCK_BYTES."""
        size = max(1, BLOCK_BYTES // (4 * q.shape[0] * tokens))
        for first in range(0, q.shape[1], size):
            yield first, min(first + size, q.shape[1])


def replay(
    model: PreTrainedModel, ids: Tensor, layers: Sequence[LayerCache], plan: Replay, tokenizer: Any
) -> list[Tensor]:
    """Return for each layer the most attention [Hq, n] that each token of a prompt ``ids`` [n] receives in the passes.

    ``layers`` are its whole caches. Raises UsageError if the instruction needs a tokenizer that is not there.
    """
    n = len(ids)
    words = _instructions(tokenizer, plan.instruction)
    lifted = lifts(model)
    received: list[list[Tensor]] = [[] for _ in layers]
    for span in plan.spans(n):
        text = _text(ids, span, words)
        segments = [layer.segments[0] for layer in layers]
        passing = [ReplayLayer(s.k, s.v, span, plan.sinks) for s in segments]
        with torch.no_grad(), attached(model):
            model(
                input_ids=text[None],
                position_ids=torch.arange(n, n + len(text), device=ids.device)[None],
                use_cache=True,
                logits_to_keep=1,
                **named_cache(HFCache(layers=list(passing))),
            )
        for lift in lifted:
            lift.k.take(), lift.v.take()
        for parts, layer in zip(received, passing, strict=True):
            assert layer.received is not None
            parts.append(layer.received)
    return [torch.cat(parts, dim=1) for parts in received]


def longest_pass(plan: Replay, n: int, tokenizer: Any) -> int:
    """Return the most tokens that a pass reads behind a prompt of n tokens."""
    first, later, header = _instructions(tokenizer, plan.instruction)
    return min(plan.chunk, n) + max(len(first), len(later) + QUOTED) + len(header)


def _text(ids: Tensor, span: tuple[int, int], words: tuple[list[int], list[int], list[int]]) -> Tensor:
    """Return the tokens of one pass: an instruction, the tokens before its chunk, the answer's header, the chunk."""
    start, end = span
    first, later, header = (torch.tensor(w, dtype=ids.dtype, device=ids.device) for w in words)
    quoted = ids[max(0, start - QUOTED) : start]
    return torch.cat([later if start else first, quoted, header, ids[start:end]])


def _instructions(tokenizer: Any, instruction: str) -> tuple[list[int], list[int], list[int]]:
    """Return the ids of the first instruction, of later ones, and of the header of an answer."""
    if instruction == "none":
        return [], [], []
    if tokenizer is None:
        raise UsageError(
            f"method.kvzip.instruction={instruction} puts words before the prompt that is read again, which needs the "
            "tokenizer: kvbench.prefill(..., tokenizer=tokenizer), or instruction=none"
        )
    header = "\n"
    if instruction == "chat":
        if getattr(tokenizer, "chat_template", None) is None:
            raise UsageError(
                "method.kvzip.instruction=chat: this tokenizer has no chat template; use instruction=plain"
            )
        message = [{"role": "user", "content": MARK}]
        rendered = tokenizer.apply_chat_template(
            message, add_generation_prompt=True, tokenize=False, enable_thinking=False
        )
        header = rendered.rpartition(MARK)[2]
    first, later, answer = (
        list(tokenizer.encode(text, add_special_tokens=False)) for text in (REPEAT, REPEAT_FROM, header)
    )
    return first, later, answer
