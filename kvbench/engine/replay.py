"""Passes that read a prompt again after its own cache, to measure how much attention each cached token receives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.base.errors import UsageError
from kvbench.kv.exact_attention import BLOCK_BYTES, causal_softmax
from kvbench.kv.own_values import values_or_keys
from kvbench.kv.segment import LayerCache, per_head
from kvbench.kv.state import LayerState
from kvbench.methods.core.replaying import QUOTED, Replay
from kvbench.models.interface import KvbenchLayer, attached, model_cache
from kvbench.models.lowrank import lifts
from kvbench.models.state_layer import in_model_order, state_layers_of
from kvbench.storage import split

# the words of KVzip's passes are part of the method (arXiv 2505.23416, section 3.2, and its released code)
REPEAT = "\n\nRepeat the previous context exactly."
REPEAT_FROM = "\n\nRepeat the part of the previous context exactly, starting with"
MARK = "kvbench5entinel"  # stands for a user's message; the chat template writes the answer's header after it


class ReplayLayer(KvbenchLayer):
    """One layer of a pass. The pass's own tokens attend the whole prompt and themselves, and are not stored.

    k, v: the prompt's keys and values [Hk, n, D].
    own_k, own_v: the keys and values [Hk, t, D] of the pass's own tokens.
    span: (start, end) of the prompt's tokens that the pass repeats.
    sinks: how many of the prompt's first tokens compete for attention with the repeated tokens.
    received: [Hq, end - start], the most attention that each repeated token receives from any query of the pass. The
        softmax is over sinks, repeated tokens and own tokens only.
    """

    def __init__(self, k: Tensor, v: Tensor, span: tuple[int, int], sinks: int) -> None:
        super().__init__()
        self.k, self.v, self.span = k, v, span
        self.sinks = min(sinks, span[0])  # a sink that the pass repeats counts once
        self.received: Tensor | None = None

    def add(self, k: Tensor, v: Tensor) -> None:
        self.own_k, self.own_v = k[0], v[0]
        self.seen = self.k.shape[1] + k.shape[2]

    def attend(self, query: Tensor, scale: float, window: int | None) -> Tensor:
        """Return the attention of the pass's tokens over the prompt and themselves, and set ``received``."""
        if window is not None:
            raise UsageError("a prompt cannot be read again past the model's sliding window: use a shorter prompt")
        q = query[0]
        self.received = self._find_received(q, scale)
        fused = split.attend_after(q, (self.k, self.v), (self.own_k, self.own_v), scale)
        if fused is not None:
            out, _ = fused
            return out[None]
        n, t = self.k.shape[1], q.shape[1]
        k = per_head(torch.cat([self.k, self.own_k], dim=1), len(q))
        v = per_head(torch.cat([self.v, self.own_v], dim=1), len(q))
        v = values_or_keys(k, v)
        out = torch.empty_like(q)
        for first, last in self._blocks(q, n + t):
            # query i of the pass attends the prompt and the pass's tokens up to its own: tokens 0 .. n + i
            mask = torch.ones(last - first, n + last, dtype=torch.bool, device=q.device).tril(n + first)
            block = q[None, :, first:last]
            keys = k[None, :, : n + last]
            values = v[None, :, : n + last]
            out[:, first:last] = F.scaled_dot_product_attention(block, keys, values, mask, scale=scale)[0]
        return out[None]

    def _find_received(self, q: Tensor, scale: float) -> Tensor:
        """Return the field ``received`` for the pass's queries q [Hq, t, D]."""
        start, end = self.span
        # the columns are sinks, then repeated tokens, then own tokens
        competing = torch.cat([self.k[:, : self.sinks], self.k[:, start:end], self.own_k], dim=1)
        before = competing.shape[1] - q.shape[1]
        most = torch.zeros(q.shape[0], end - start, device=q.device)
        for first, last in self._blocks(q, competing.shape[1]):
            rows = causal_softmax(q[:, first:last], competing[:, : before + last], scale)
            # take the maximum of rows [Hq, last - first, before + last] over queries, in the repeated tokens' columns
            most = torch.maximum(most, rows[:, :, self.sinks : before].amax(dim=1))
        return most

    def _blocks(self, q: Tensor, tokens: int) -> Iterator[tuple[int, int]]:
        """Yield (first, last) of blocks of the queries q [Hq, t, D], so that a block's logits fit into BLOCK_BYTES.

        A block has the queries first .. last - 1, and its logits are over ``tokens`` tokens.
        """
        # the rows of one query take fp32 [Hq, tokens]
        size = max(1, BLOCK_BYTES // (4 * q.shape[0] * tokens))
        for first in range(0, q.shape[1], size):
            yield first, min(first + size, q.shape[1])


def replay_prompt(
    model: PreTrainedModel,
    ids: Tensor,
    layers: Sequence[LayerCache],
    passes: Replay,
    tokenizer: Any,
    states: Sequence[LayerState] = (),
) -> list[Tensor]:
    """Read a prompt ``ids`` [n] again in passes, and return for each layer the attention [Hq, n] of its tokens.

    A token's number is the most attention that it receives from any query of the passes.

    layers: the prompt's cache in each layer. It must hold all tokens.
    passes: the passes to make.
    tokenizer: the model's tokenizer; None is enough if the passes have no instruction.
    states: the states at the prompt's end, of the layers that hold a state. Each pass begins from a copy of them.

    Raises UsageError if the instruction needs a tokenizer and ``tokenizer`` is None.
    """
    n = len(ids)
    words = _encode_instructions(tokenizer, passes.instruction)
    lifted = lifts(model)
    received: list[list[Tensor]] = [[] for _ in layers]
    for span in passes.spans(n):
        text = _write_pass(ids, span, words)
        replay_layers: list[ReplayLayer] = []
        for layer in layers:
            segment = layer.segments[0]
            replay_layers.append(ReplayLayer(segment.k, segment.v, span, passes.sinks))
        columns = None
        if states:
            # a column has one layer's states of all rows, and a prompt is one row
            columns = [[state] for state in states]
        state_layers = state_layers_of(model.config, replay_layers, columns)
        with torch.no_grad(), attached(model):
            model(
                input_ids=text[None],
                position_ids=torch.arange(n, n + len(text), device=ids.device)[None],
                use_cache=True,
                logits_to_keep=1,
                **model_cache(model.config, in_model_order(model.config, replay_layers, state_layers)),
            )
        # low-rank projections keep their last latents until they are taken; a pass needs none, so they are dropped
        for lift in lifted:
            lift.k.take()
            lift.v.take()
        for layer_received, replay_layer in zip(received, replay_layers, strict=True):
            # the forward pass has called every layer's attention
            assert replay_layer.received is not None
            layer_received.append(replay_layer.received)
    # the spans of all passes, one after the other, are the prompt
    return [torch.cat(layer_received, dim=1) for layer_received in received]


def count_longest_pass(passes: Replay, n: int, tokenizer: Any) -> int:
    """Return the most tokens that one of ``passes`` reads after a prompt of n tokens."""
    first, later, header = _encode_instructions(tokenizer, passes.instruction)
    # the first pass has its own instruction; later passes quote the tokens before their chunk
    return min(passes.chunk, n) + max(len(first), len(later) + QUOTED) + len(header)


def _write_pass(ids: Tensor, span: tuple[int, int], words: tuple[list[int], list[int], list[int]]) -> Tensor:
    """Return the tokens of one pass: an instruction, the tokens before its chunk, the answer's header, the chunk.

    span: the chunk's (start, end) in ``ids``.
    words: the ids of (the first pass's instruction, the later passes' instruction, the answer's header).
    """
    start, end = span
    first, later, header = (torch.tensor(w, dtype=ids.dtype, device=ids.device) for w in words)
    instruction = later if start else first
    quoted = ids[max(0, start - QUOTED) : start]
    return torch.cat([instruction, quoted, header, ids[start:end]])


def _encode_instructions(tokenizer: Any, instruction: str) -> tuple[list[int], list[int], list[int]]:
    """Return the token ids of (the first pass's instruction, the later passes' instruction, an answer's header).

    Raises UsageError without a tokenizer, or if the instruction is a chat and the tokenizer has no chat template.
    """
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
        # templates with a switch for thinking (Qwen3) would else let thoughts come before the answer
        rendered = tokenizer.apply_chat_template(
            message, add_generation_prompt=True, tokenize=False, enable_thinking=False
        )
        # the header is everything after the message: the end of the user's turn and the start of the assistant's
        header = rendered.rpartition(MARK)[2]

    def encode(text: str) -> list[int]:
        """Return the token ids of a text in the middle of another, that is, without BOS."""
        return list(tokenizer.encode(text, add_special_tokens=False))

    return encode(REPEAT), encode(REPEAT_FROM), encode(header)
