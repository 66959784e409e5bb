"""One pass of the model over a prompt. It hands each layer's keys, values and statistics on when the layer ends."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.base.errors import UsageError
from kvbench.engine.finite import check_finite
from kvbench.engine.limits import check_capacity
from kvbench.engine.prompt_layer import Blocks, LayerPlace, LayerStart, PromptLayer, Read, Share, isolate_tensor
from kvbench.kv import ops
from kvbench.kv.model_shape import (
    chunk_size,
    from_config,
    key_layers,
    lending_layers,
    local_layers,
    sharing_layers,
    state_layers,
)
from kvbench.kv.observation import AttentionCall, Needs, Observation
from kvbench.kv.segment import LayerCache
from kvbench.kv.state import LayerState
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.stage import Stage
from kvbench.models.interface import (
    TokensRead,
    attached,
    call_hooks,
    layer_hooks,
    mlps_in_parts,
    model_cache,
    token_hooks,
)
from kvbench.models.lowrank import lifts
from kvbench.models.state_layer import in_model_order, state_layers_of
from kvbench.models.traits import layer_frequencies

OnLayer = Callable[[Observation, Tensor, Tensor], None]  # takes a finished layer: its observation, keys and values
OnLocal = Callable[[LayerCache, int], None]  # takes a finished local layer, and how many of the first tokens it covers
OnStates = Callable[[tuple[LayerState, ...]], None]  # takes the states at the end of the prompt
LONG = 8192
"""For prompts longer than this, MLPs compute ``MLP_TOKENS`` tokens at a time. Shorter prompts are unaffected."""
MLP_TOKENS = 2048
"""The number of tokens of a long prompt that an MLP computes at a time."""


def observe_prompt(
    model: PreTrainedModel,
    input_ids: Tensor,
    needs: Needs,
    on_layer: OnLayer,
    plain: bool = False,
    chain: Chain | None = None,
    on_local: OnLocal = lambda layer, n: None,
    parts: Mapping[int, Needs] = MappingProxyType({}),
    starts: Sequence[LayerStart] = (),
    states: Sequence[LayerState] = (),
    on_states: OnStates = lambda states: None,
) -> tuple[dict[int, Tensor], dict[tuple[int, int], float]]:
    """Read ``input_ids`` [n] once, and hand every finished layer to ``on_layer``, or to ``on_local`` if it is local.

    Returns (logits, seconds). ``logits`` has the next token's logits [V] by the number of tokens read. ``seconds`` has
    the seconds of column sums by (number of tokens, bit width of the keys).

    Observations number the layers without local layers.

    needs: the statistics that stages need of all n tokens.
    plain: True attends by fp32 softmax rows instead of PyTorch's fused attention.
    chain: the chain under which the prompt is computed. Its stages may read other keys and values than are stored, drop
    hidden states, or let heads share logits. Local layers are never affected.
    parts: numbers m < n, each with the statistics that stages need of the first m tokens. The layers of the first m
        tokens are handed on as well, because later tokens do not change them. Parts require plain causal attention.
    starts: the layers of the prompt's first tokens, if these tokens were read earlier. They must be fewer than n and
        than each m.
    states: the states at the end of ``starts``, of the layers that hold a state.
    on_states: called with the states at the end of the prompt. A model with states can read no parts.
    """
    n = input_ids.shape[0]
    check_capacity(model, n)
    needs_by_length = dict(parts)
    needs_by_length[n] = needs  # it comes last: stages see the parts before the whole prompt
    prompt_pass = _PromptPass(
        model, input_ids, needs_by_length, chain=chain or Chain(), plain=plain, starts=starts, states=states
    )
    tokens_before = prompt_pass.tokens_before
    logits_to_keep: Tensor | int = 1  # transformers keeps the logits of that many last tokens
    # with a number here, Gemma 4's last layers would get the last query alone, but blocks are made of all queries
    later_layers_read_blocks = bool(prompt_pass.chain.block_reader and sharing_layers(model.config))
    # parts need the logits of their last tokens, too
    if parts or later_layers_read_blocks:
        logits_to_keep = torch.tensor([length - 1 - tokens_before for length in needs_by_length])

    def finish(index: int, hidden: Tensor) -> None:
        """Hand on layer ``index`` of the model, which has just ended."""
        prompt_pass.finish_layer(index, hidden, on_layer, on_local)

    with ExitStack() as contexts:
        contexts.enter_context(torch.no_grad())
        contexts.enter_context(attached(model))
        contexts.enter_context(layer_hooks(model, finish))
        # tokens_of_layer[i] is known when layer i - 1 has ended: later layers read only the tokens that a stage leaves
        if prompt_pass.chain.hidden:
            contexts.enter_context(token_hooks(model, prompt_pass.tokens_of_layer.__getitem__))
        if needs.call:
            contexts.enter_context(call_hooks(model, prompt_pass.calls))
        if n > LONG:
            contexts.enter_context(mlps_in_parts(model, MLP_TOKENS))
        # tokens of ``starts`` already have keys and values; the other tokens take the positions after them
        out = model(
            input_ids=input_ids[None, tokens_before:],
            position_ids=torch.arange(tokens_before, n, device=input_ids.device)[None],
            use_cache=True,
            logits_to_keep=logits_to_keep,
            **model_cache(model.config, prompt_pass.all_layers),
        )
    on_states(prompt_pass.take_states())
    logits: dict[int, Tensor] = {}
    for length, token_logits in zip(needs_by_length, out.logits[0], strict=True):
        # a view would keep the logits of all lengths alive
        logits[length] = token_logits.clone()
    return logits, prompt_pass.sum_seconds()


class _PromptPass:
    """One pass over a prompt: the cache layers that the model fills, and how each is handed on.

    needs_by_length: for each number m of first tokens that is observed, the statistics that stages need of them. The
        entry of the whole prompt comes last.
    chain: the chain under which the prompt is computed.
    layers: the layers that hold keys, local ones included, by their number in the model.
    state_layers: the layers that hold a state, in order.
    all_layers: the layers of the whole model, in order.
    compressed_layers: the layers that methods compress, in order.
    numbers: the number of each compressed layer among these, by its number in the model.
    prompts: the CRC-32 of the prompt's first tokens, by their number.
    tokens_before: how many of the prompt's first tokens were read earlier.
    tokens_of_layer: for each compressed layer, the tokens that it reads; None for all. One extra entry has no layer.
    calls: the calls of attention modules by layer of the model, if stages need them.
    lifted: the maps from latents to keys and values if projections are low-rank, else [].
    frequencies: for each compressed layer its rotary frequencies [r / 2]; None where positions are learned.
    chunk: the tokens of a chunk if local layers attend chunks; None: they attend a window.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        needs_by_length: Mapping[int, Needs],
        *,
        chain: Chain,
        plain: bool,
        starts: Sequence[LayerStart],
        states: Sequence[LayerState],
    ) -> None:
        self.chain = chain
        self.needs_by_length = needs_by_length
        tokens = input_ids.to("cpu", torch.int64).numpy()
        self.prompt_tokens = len(tokens)
        self.prompts = {length: zlib.crc32(tokens[:length].tobytes()) for length in needs_by_length}
        self.shape = from_config(model.config)
        self.tokens_before = 0
        if starts:
            self.tokens_before = starts[0].keys.shape[1]
        # one entry more, because the last layer writes the tokens of its successor without having one
        self.tokens_of_layer: list[TokensRead | None] = [None] * (self.shape.layers + 1)
        self.calls: dict[int, AttentionCall] = {}
        self.lifted = lifts(model)
        # copies, because methods get them, and the model's own must not change
        self.frequencies = [None if own is None else own.clone() for own in layer_frequencies(model)]
        self.chunk = chunk_size(model.config)
        self.numbers: dict[int, int] = {}
        self.layers: dict[int, PromptLayer] = {}
        self.compressed_layers: list[PromptLayer] = []
        self._add_key_layers(model.config, plain, starts)
        with_keys = list(self.layers.values())
        columns = None
        if starts and state_layers(model.config):
            assert len(states) == len(state_layers(model.config)), "a text goes on from all of its states"
            # a column has one layer's states of all rows, and a prompt is one row
            columns = [[state] for state in states]
        self.state_layers = state_layers_of(model.config, with_keys, columns)
        self.all_layers = in_model_order(model.config, with_keys, self.state_layers)

    def _add_key_layers(self, config: Any, plain: bool, starts: Sequence[LayerStart]) -> None:
        """Fill ``layers``, ``compressed_layers`` and ``numbers`` with the layers that hold keys."""
        local, lending = local_layers(config), lending_layers(config)
        for index in key_layers(config):
            if index in local:
                quantiser = self.chain.quantiser
                read = quantiser.read if quantiser is not None and quantiser.codes_local else None
                self.layers[index] = PromptLayer(
                    needs={}, plain=plain, read=read, lends=index in lending, chunk=self.chunk
                )
                continue
            number = len(self.compressed_layers)
            start = starts[number] if starts else None
            layer = self._build_layer(number, plain, start, lends=index in lending)
            self.numbers[index] = number
            self.layers[index] = layer
            self.compressed_layers.append(layer)

    def _build_layer(self, number: int, plain: bool, start: LayerStart | None, lends: bool) -> PromptLayer:
        """Return a layer that methods compress, with the functions by which the chain's stages change its attention.

        number: the layer's number among those that methods compress.
        """
        chain, shape, n = self.chain, self.shape, self.prompt_tokens
        # Stage.read returns keys and values unchanged, so only an override changes the prompt's attention
        read: Read | None = None
        if any(type(stage).read is not Stage.read for stage in chain.stages):
            read = chain.read
        share: Share | None = None
        if chain.sharer:
            share = partial(chain.sharer.leads, n=n, layer=number, n_layers=shape.layers)
        blocks: Blocks | None = None
        if chain.block_reader:
            heads = chain.heads(shape.kv_heads, shape.query_heads)
            blocks = partial(chain.block_reader.blocks, n=n, layer=number, n_layers=shape.layers, heads=heads)
        place = LayerPlace(number, layers=shape.layers, prompts=self.prompts)
        return PromptLayer(
            self.needs_by_length, plain, place, read, share=share, blocks=blocks, start=start, lends=lends
        )

    def finish_layer(self, index: int, hidden: Tensor, on_layer: OnLayer, on_local: OnLocal) -> None:
        """Hand a finished layer on, and drop its keys and values.

        Raises UsageError if the layer's keys and values do not have the shape that the model's configuration states.

        index: the layer's number in the model.
        hidden: [1, w, d], the input of its attention.
        """
        layer, shape = self.layers[index], self.shape
        states = layer.join_hidden(hidden[0])
        k, v = layer.take()
        self._check_shapes(index, k, v)
        # a local layer keeps its window, and methods do not see it
        if index not in self.numbers:
            for length in self.needs_by_length:
                part_k, part_v = isolate_tensor(k[:, :length]), isolate_tensor(v[:, :length])
                chunked = self.chunk is not None
                on_local(ops.local(part_k, part_v, shape.window, shape.query_heads, chunked), length)
            return
        number = self.numbers[index]
        call = self.calls.pop(index, None)
        # the last length is the whole prompt's, and its part has all tokens that this layer read
        for length in self.needs_by_length:
            part_k, part_v = isolate_tensor(k[:, :length]), isolate_tensor(v[:, :length])
            observation = self._complete_observation(number, length, states=states, call=call)
            try:
                if length == self.prompt_tokens:
                    self.tokens_of_layer[number + 1] = _choose_next_tokens(self.chain, observation, k)
                on_layer(observation, part_k, part_v)
            except Exception:
                check_finite(self.chain, "keys or values", k, v)  # if these are not finite, no stage is at fault
                raise

    def _check_shapes(self, index: int, k: Tensor, v: Tensor) -> None:
        """Raise UsageError unless layer ``index`` of the model has k and v of the shape that its configuration states.

        k, v: the layer's keys and values [Hk, n, D].
        """
        if index in self.numbers:
            kv_heads, head_dim, value_dim = self.shape.kv_heads, self.shape.head_dim, self.shape.value_dim
        else:
            kv_heads, head_dim = self.shape.local_heads
            value_dim = head_dim
        expected_keys, expected_values = (kv_heads, k.shape[1], head_dim), (kv_heads, k.shape[1], value_dim)
        if k.shape != expected_keys or v.shape != expected_values:
            raise UsageError(
                f"layer {index} caches keys {tuple(k.shape)} and values {tuple(v.shape)} where config.json says "
                f"{expected_keys} and {expected_values}: kvbench cannot run this model"
            )

    def _complete_observation(
        self, number: int, length: int, *, states: Tensor, call: AttentionCall | None
    ) -> Observation:
        """Return a layer's observation after the prompt's first ``length`` tokens, with all that stages need of it.

        states: the hidden states [n, d] of all tokens that the layer read.
        call: the call of the layer's attention module, if stages need it.
        """
        needs = self.needs_by_length[length]
        hidden, latents, positions = None, None, None
        if needs.hidden:
            hidden = states[:length].clone()
        # low-rank projections have remembered the latents of this layer's call
        if self.lifted:
            latents = self.lifted[number].k.take(), self.lifted[number].v.take()
        tokens_read = self.tokens_of_layer[number]
        if tokens_read is not None:
            positions = tokens_read.positions
        if not needs.call:
            call = None
        return replace(
            self.compressed_layers[number].observed.pop(length),
            hidden=hidden,
            latents=latents,
            inv_freq=self.frequencies[number],
            positions=positions,
            call=call,
        )

    def take_states(self) -> tuple[LayerState, ...]:
        """Return a copy of the states at the end of the prompt, in the order of the layers that hold a state."""
        return tuple(layer.state() for layer in self.state_layers)

    def sum_seconds(self) -> dict[tuple[int, int], float]:
        """Return the seconds of column sums over all layers, by (number of tokens, bit width of the keys)."""
        seconds: dict[tuple[int, int], float] = {}
        for place in self.compressed_layers[0].colsums_s:
            seconds[place] = sum(layer.colsums_s[place] for layer in self.compressed_layers)
        return seconds


def _choose_next_tokens(chain: Chain, obs: Observation, keys: Tensor) -> TokensRead | None:
    """Return the tokens that the next layer reads, as the chain chooses them; None if it reads the whole prompt.

    obs: the observation of the layer that has just ended, by whose attention tokens are chosen.
    keys: [Hk, n, D], that layer's keys.
    """
    next_layer = obs.layer + 1
    # without a stage that drops hidden states all layers read all tokens, and no layer follows the last one
    if chain.hidden is None or next_layer == obs.n_layers:
        return None
    positions = obs.token_positions(keys.device)
    if chain.tokens_read(obs.prompt_tokens, next_layer, obs.n_layers) == obs.n:
        # the next layer reads the same tokens as this one: all tokens, or those that an earlier layer left
        if obs.positions is None:
            return None
        return TokensRead(places=None, positions=positions)
    attended_keys = obs.read_k if obs.read_k is not None else keys
    index = chain.hidden.keep_hidden(attended_keys, obs)
    return TokensRead(places=index, positions=positions[index])
