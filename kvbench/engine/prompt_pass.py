"""One pass of the model over a prompt, which hands every layer on as it ends."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import repeat
from types import MappingProxyType

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache as HFCache

from kvbench.base.errors import UsageError
from kvbench.engine.finite import check_finite
from kvbench.engine.prompt_layer import LayerStart, PromptLayer, alone
from kvbench.kv import ops
from kvbench.kv.model_shape import from_config, local_layers
from kvbench.kv.observation import AttentionCall, Needs, Observation
from kvbench.kv.segment import LayerCache
from kvbench.methods.core.base import Stage
from kvbench.methods.core.chain import Chain
from kvbench.models.interface import Rows, attached, call_hooks, layer_hooks, mlps_in_parts, row_hooks
from kvbench.models.lowrank import lifts
from kvbench.models.releases import named_cache

OnLayer = Callable[[Observation, Tensor, Tensor], None]
LONG = 8192
"""Tokens of a prompt from which on MLPs compute ``MLP_TOKENS`` at a time. No digit of shorter ones depends on it."""
MLP_TOKENS = 2048


def observe(
    model: PreTrainedModel,
    input_ids: Tensor,
    needs: Needs,
    on_layer: OnLayer,
    plain: bool = False,
    chain: Chain | None = None,
    on_local: Callable[[LayerCache, int], None] = lambda layer, n: None,
    parts: Mapping[int, Needs] = MappingProxyType({}),
    starts: Sequence[LayerStart] = (),
) -> tuple[dict[int, Tensor], dict[tuple[int, int], float]]:
    """Read ``input_ids`` [n] once and hand every finished layer to ``on_layer``, and local ones to ``on_local``.

    Returns the next token's logits [V] by the number of tokens read, and the seconds that column sums took, by that
    number and the bit width of the keys. ``plain`` attends by fp32 softmax rows instead of PyTorch's fused attention.
    The prompt is computed under ``chain``: its stages may read other keys and values than are stored, drop hidden
    states, or let heads share logits. None of this concerns local layers: the others are numbered as if there were no
    local ones. Layers of the first tokens alone are handed on, too, for each number of tokens in ``parts``, with what
    it needs: later tokens change nothing of earlier ones. Nothing but plain attention may compute these.
    ``starts`` are the layers of the prompt's first tokens, where these were read before: fewer than any length wanted.
    """
    shape = from_config(model.config)
    n_layers, local = shape.layers, local_layers(model.config)
    number = {layer: i for i, layer in enumerate(i for i in range(shape.all_layers) if i not in local)}
    chain = chain or Chain()
    n = input_ids.shape[0]
    read = chain.read if any(type(s).read is not Stage.read for s in chain.stages) else None
    sharer = chain.sharer
    shares = [partial(sharer.leads, n=n, layer=i, n_layers=n_layers) if sharer else None for i in range(n_layers)]
    heads = chain.heads(shape.kv_heads, shape.query_heads)
    reader = chain.block_reader
    blocks = [
        partial(reader.blocks, n=n, layer=i, n_layers=n_layers, heads=heads) if reader else None
        for i in range(n_layers)
    ]
    wanted = {**parts, n: needs}
    read_before = starts[0].keys.shape[1] if starts else 0
    compressed = [
        PromptLayer(wanted, plain, read, *hooks)
        for hooks in zip(shares, blocks, starts or repeat(None, n_layers), strict=True)
    ]
    layers = [PromptLayer({}, plain) if i in local else compressed[number[i]] for i in range(shape.all_layers)]
    rows: list[Rows | None] = [None] * (n_layers + 1)  # tokens that each layer reads; None: all
    tokens = input_ids.to("cpu", torch.int64).numpy()

    lifted = lifts(model)
    inv_freq = next((m.get_buffer("inv_freq") for m in model.modules() if hasattr(m, "inv_freq")), None)

    calls: dict[int, AttentionCall] = {}

    def finished(index: int, hidden: Tensor) -> None:
        layer = layers[index]
        states = layer.states(hidden[0])
        k, v = layer.take()
        expected_shape = (shape.kv_heads, k.shape[1], shape.head_dim)
        if k.shape != expected_shape or v.shape != expected_shape:
            raise UsageError(
                f"layer {index} caches keys {tuple(k.shape)} and values {tuple(v.shape)} where config.json says "
                f"{expected_shape}: kvbench cannot run this model"
            )
        if index in local:
            for length in wanted:
                on_local(ops.local(alone(k[:, :length]), alone(v[:, :length]), shape.window, shape.query_heads), length)
            return
        place = number[index]
        own_rows = rows[place]
        call = calls.pop(index, None)
        # those of parts first: the last is of all tokens that this layer read
        for length, needed in wanted.items():
            part_k, part_v = alone(k[:, :length]), alone(v[:, :length])
            observation = Observation(
                layer=place,
                n_layers=n_layers,
                n=part_k.shape[1],
                prompt=zlib.crc32(tokens[:length].tobytes()),
                hidden=states[:length].clone() if needed.hidden else None,
                latents=(lifted[place].k.take(), lifted[place].v.take()) if lifted else None,
                inv_freq=inv_freq,
                length=length,
                positions=None if own_rows is None else own_rows.positions,
                call=call if needed.call else None,
                **layer.observed.pop(length),
            )
            try:
                if length == n:
                    rows[place + 1] = _next_rows(chain, observation, k)
                on_layer(observation, part_k, part_v)
            except Exception:
                check_finite(chain, "keys or values", k, v)  # no stage is at fault where these are not finite
                raise

    dropping = row_hooks(model, rows.__getitem__) if chain.hidden else nullcontext()
    noting = call_hooks(model, calls) if needs.call else nullcontext()
    inner = mlps_in_parts(model, MLP_TOKENS) if n > LONG else nullcontext()
    with torch.no_grad(), attached(model), layer_hooks(model, finished), dropping, noting, inner:
        out = model(
            input_ids=input_ids[None, read_before:],
            position_ids=torch.arange(read_before, n, device=input_ids.device)[None],
            use_cache=True,
            logits_to_keep=torch.tensor([length - 1 - read_before for length in wanted]) if parts else 1,
            **named_cache(HFCache(layers=list(layers))),
        )
    seconds = {place: sum(layer.colsums_s[place] for layer in compressed) for place in compressed[0].colsums_s}
    return {length: logits.clone() for length, logits in zip(wanted, out.logits[0], strict=True)}, seconds


def _next_rows(chain: Chain, obs: Observation, keys: Tensor) -> Rows | None:
    """Return the tokens that the layer after ``obs`` reads, by the attention in this layer; None if it reads all."""
    if chain.hidden is None or obs.layer + 1 == obs.n_layers:
        return None
    positions = obs.token_positions(keys.device)
    if chain.tokens_read(obs.prompt_tokens, obs.layer + 1, obs.n_layers) == obs.n:
        return None if obs.positions is None else Rows(None, positions)
    index = chain.hidden.keep_hidden(keys if obs.read_k is None else obs.read_k, obs)
    return Rows(index, positions[index])
