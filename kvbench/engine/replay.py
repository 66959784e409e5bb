"""Passes that read a prompt again after its own cache, to measure how much attention each cached token receives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.base.errors import UsageError
from kvbench.engine.decode_layer import RowLayer
from kvbench.kv.exact_attention import BLOCK_BYTES, attend_rows, causal_softmax
from kvbench.kv.model_shape import in_key_order
from kvbench.kv.own_values import values_or_keys
from kvbench.kv.scale import is_plain
from kvbench.kv.segment import LayerCache, per_head
from kvbench.kv.state import LayerState
from kvbench.methods.core.replaying import QUOTED, Replay
from kvbench.models.interface import KvbenchLayer, attached, model_cache
from kvbench.models.lowrank import lifts
from kvbench.models.state_layer import in_model_order, state_layers_of
from kvbench.storage import split
from kvbench.storage.format import Room, StoredRow

# the words of KVzip's passes are part of the method (arXiv 2505.23416, section 3.2, and its released code)
REPEAT = "\n\nRepeat the previous context exactly."
REPEAT_FROM = "\n\nRepeat the part of the previous context exactly, starting with"
MARK = "kvbench5entinel"  # stands for a user's message; the chat template writes the answer's header after it


class InstructionIds(NamedTuple):
    """The token ids of the words that kvbench writes around the part of the prompt that a pass repeats.

    first: the instruction of the first pass.
    later: the instruction of later passes. The prompt's tokens just before the repeated part are quoted behind it.
    header: the header of an answer. The repeated part follows it.
    """

    first: list[int]
    later: list[int]
    header: list[int]


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
        span_start, _ = span
        self.sinks = min(sinks, span_start)  # a sink that the pass repeats counts once
        self.received: Tensor | None = None

    def add(self, k: Tensor, v: Tensor) -> None:
        """Take the keys and values [1, Hk, t, D] of the pass's own tokens, which follow the prompt."""
        self.own_k, self.own_v = k[0], v[0]
        self.seen = self.k.shape[1] + k.shape[2]

    def attend(self, query: Tensor, scale: float, window: int | None) -> Tensor:
        """Return the attention of the pass's tokens over the prompt and themselves, and set ``received``."""
        if window is not None:
            raise UsageError("a prompt cannot be read again past the model's sliding window: use a shorter prompt")
        q = query[0]
        self.received = self._find_received(q, scale)
        if not is_plain(scale):
            # fused attention knows neither caps nor sinks
            keys, values = torch.cat([self.k, self.own_k], dim=1), torch.cat([self.v, self.own_v], dim=1)
            return attend_rows(q, keys, values, scale)[None]
        fused = split.attend_after(q, (self.k, self.v), (self.own_k, self.own_v), scale)
        if fused is not None:
            out, _ = fused
            return out[None]
        n, t = self.k.shape[1], q.shape[1]
        k = per_head(torch.cat([self.k, self.own_k], dim=1), len(q))
        v = per_head(torch.cat([self.v, self.own_v], dim=1), len(q))
        v = values_or_keys(k, v)
        out = torch.empty_like(q)
        for first, end in self._divide_queries(q, n + t):
            # query i of the pass attends the prompt and the pass's tokens up to its own: tokens 0 .. n + i
            mask = torch.ones(end - first, n + end, dtype=torch.bool, device=q.device).tril(n + first)
            block = q[None, :, first:end]
            keys = k[None, :, : n + end]
            values = v[None, :, : n + end]
            out[:, first:end] = F.scaled_dot_product_attention(block, keys, values, mask, scale=scale)[0]
        return out[None]

    def _find_received(self, q: Tensor, scale: float) -> Tensor:
        """Return the field ``received`` for the pass's queries q [Hq, t, D]."""
        span_start, span_end = self.span
        # the columns are sinks, then repeated tokens, then own tokens
        competing = torch.cat([self.k[:, : self.sinks], self.k[:, span_start:span_end], self.own_k], dim=1)
        # own tokens begin at this column
        n_before = competing.shape[1] - q.shape[1]
        most = torch.zeros(q.shape[0], span_end - span_start, device=q.device)
        for first, end in self._divide_queries(q, competing.shape[1]):
            rows = causal_softmax(q[:, first:end], competing[:, : n_before + end], scale)
            # rows [Hq, end - first, n_before + end]: take the columns of repeated tokens and the maximum over queries
            most = torch.maximum(most, rows[:, :, self.sinks : n_before].amax(dim=1))
        return most

    def _divide_queries(self, q: Tensor, tokens: int) -> Iterator[tuple[int, int]]:
        """Yield (first, end) of blocks of the queries q [Hq, t, D], so that a block's logits fit into BLOCK_BYTES.

        A block has the queries first .. end - 1, and its logits are over ``tokens`` tokens.
        """
        # the logits of one query are fp32 [Hq, tokens]
        query_bytes = 4 * q.shape[0] * tokens
        size = max(1, BLOCK_BYTES // query_bytes)
        for first in range(0, q.shape[1], size):
            yield first, min(first + size, q.shape[1])


def replay_prompt(
    model: PreTrainedModel,
    ids: Tensor,
    layers: Sequence[LayerCache],
    passes: Replay,
    tokenizer: Any,
    states: Sequence[LayerState] = (),
    local: Sequence[LayerCache] = (),
) -> list[Tensor]:
    """Read a prompt ``ids`` [n] again in passes, and return for each of ``layers`` the attention [Hq, n] of its tokens.

    A token's number is the most attention that it receives from any query of the passes.

    layers: the prompt's cache in each layer that methods compress. It must hold all tokens.
    passes: the passes to make.
    tokenizer: the model's tokenizer; None is enough if the passes have no instruction.
    states: the states at the prompt's end, of the layers that hold a state. Each pass begins from a copy of them.
    local: the caches of local layers. In a pass they attend their windows, as while decoding.

    Raises UsageError if the instruction needs a tokenizer and ``tokenizer`` is None.
    """
    instructions = _encode_instructions(tokenizer, passes.instruction)
    received: list[list[Tensor]] = [[] for _ in layers]
    for span in passes.spans(len(ids)):
        replay_layers: list[ReplayLayer] = []
        for layer in layers:
            segment = layer.segments[0]
            replay_layers.append(ReplayLayer(segment.k, segment.v, span, passes.sinks))
        text = _write_pass(ids, span, instructions)
        room = Room(tokens=len(text), at_once=len(text))
        # a local layer's window moves on with the pass, in a copy of its own
        windows: list[KvbenchLayer] = [RowLayer([StoredRow(cache=layer)], room) for layer in local]
        key_layers = in_key_order(model.config, replay_layers, windows)
        _run_pass(model, text, key_layers, prompt_tokens=len(ids), states=states)
        for layer_received, replay_layer in zip(received, replay_layers, strict=True):
            # the forward pass has called every layer's attention
            assert replay_layer.received is not None
            layer_received.append(replay_layer.received)
    # the spans of all passes, one after the other, are the prompt
    return [torch.cat(layer_received, dim=1) for layer_received in received]


def _run_pass(
    model: PreTrainedModel,
    text: Tensor,
    layers: Sequence[KvbenchLayer],
    *,
    prompt_tokens: int,
    states: Sequence[LayerState],
) -> None:
    """Let the model read the tokens ``text`` [t] of one pass, so that each ``ReplayLayer`` sets its ``received``.

    layers: the layers that hold keys, in the model's order.
    prompt_tokens: the prompt's length. The pass takes the positions after it.
    states: the states at the prompt's end, of the layers that hold a state.
    """
    columns = None
    if states:
        # a column has one layer's states of all rows, and a prompt is one row
        columns = [[state] for state in states]
    state_layers = state_layers_of(model.config, layers, columns)
    with torch.no_grad(), attached(model):
        model(
            input_ids=text[None],
            position_ids=torch.arange(prompt_tokens, prompt_tokens + len(text), device=text.device)[None],
            use_cache=True,
            logits_to_keep=1,
            **model_cache(model.config, in_model_order(model.config, layers, state_layers)),
        )
    # low-rank projections keep their last latents until they are taken; a pass needs none, so they are dropped
    for lift in lifts(model):
        lift.k.take()
        lift.v.take()


def count_longest_pass(passes: Replay, n: int, tokenizer: Any) -> int:
    """Return the most tokens that one of ``passes`` reads after a prompt of n tokens."""
    instructions = _encode_instructions(tokenizer, passes.instruction)
    # only later passes quote tokens before the part that they repeat
    most_before_header = max(len(instructions.first), len(instructions.later) + QUOTED)
    return min(passes.chunk, n) + most_before_header + len(instructions.header)


def _write_pass(ids: Tensor, span: tuple[int, int], instructions: InstructionIds) -> Tensor:
    """Return the tokens of one pass: an instruction, quoted tokens, the answer's header, the part that it repeats.

    ids: [n], the prompt.
    span: the (start, end) in ``ids`` of the part that the pass repeats. The tokens just before it are quoted.
    """
    start, end = span
    # the first pass repeats the prompt from its beginning, and has nothing to quote
    instruction = instructions.later if start else instructions.first
    quoted = ids[max(0, start - QUOTED) : start]
    words_before = torch.tensor(instruction, dtype=ids.dtype, device=ids.device)
    header = torch.tensor(instructions.header, dtype=ids.dtype, device=ids.device)
    return torch.cat([words_before, quoted, header, ids[start:end]])


def _encode_instructions(tokenizer: Any, instruction: str) -> InstructionIds:
    """Return the token ids of the words around a pass. ``instruction`` is none, plain or chat (method.kvzip).

    Raises UsageError without a tokenizer, or if the instruction is a chat and the tokenizer has no chat template.
    """
    if instruction == "none":
        return InstructionIds(first=[], later=[], header=[])
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

    return InstructionIds(first=encode(REPEAT), later=encode(REPEAT_FROM), header=encode(header))
