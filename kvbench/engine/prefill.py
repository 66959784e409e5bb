"""One pass of the model over a prompt, shared by every chain that wants to compress it.

As each layer ends, its keys, values and statistics go to all chains, and the dense layer is dropped.
"""

from __future__ import annotations

import time
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache as HFCache

from kvbench.engine.finite import check_finite
from kvbench.engine.handed import Handed
from kvbench.engine.layer_by_layer import CompressedLayers
from kvbench.engine.limits import beyond_turn, check_capacity, check_window
from kvbench.engine.patches import adapted
from kvbench.engine.prompt_layer import EXACT, PromptLayer, alone
from kvbench.engine.replay import longest_pass, replay
from kvbench.engine.weights_digest import check_calibrated
from kvbench.errors import UsageError, headline
from kvbench.kv import ops
from kvbench.kv.model_shape import from_config, local_layers
from kvbench.kv.observation import AttentionCall, Needs, Observation
from kvbench.kv.segment import LayerCache
from kvbench.methods.base import Stage
from kvbench.methods.chain import Chain
from kvbench.methods.foreign import contained
from kvbench.methods.prompt_cache import Cache
from kvbench.methods.recipe import Observe
from kvbench.methods.replaying import Replay
from kvbench.models import traits
from kvbench.models.interface import (
    Rows,
    attached,
    call_hooks,
    layer_hooks,
    mlps_in_parts,
    row_hooks,
    synchronise,
)
from kvbench.models.lowrank import lifts

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
) -> tuple[dict[int, Tensor], dict[tuple[int, int], float]]:
    """Read ``input_ids`` [n] once and hand every finished layer to ``on_layer``, and local ones to ``on_local``.

    Returns the next token's logits [V] by the number of tokens read, and the seconds that column sums took, by that
    number and the bit width of the keys. ``plain`` attends by fp32 softmax rows instead of PyTorch's fused attention.
    The prompt is computed under ``chain``: its stages may read other keys and values than are stored, drop hidden
    states, or let heads share logits. None of this concerns local layers: the others are numbered as if there were no
    local ones. Layers of the first tokens alone are handed on, too, for each number of tokens in ``parts``, with what
    it needs: later tokens change nothing of earlier ones. Nothing but plain attention may compute these.
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
    compressed = [PromptLayer(wanted, plain, read, *hooks) for hooks in zip(shares, blocks, strict=True)]
    layers = [PromptLayer({}, plain) if i in local else compressed[number[i]] for i in range(shape.all_layers)]
    rows: list[Rows | None] = [None] * (n_layers + 1)  # tokens that each layer reads; None: all
    tokens = input_ids.to("cpu", torch.int64).numpy()

    lifted = lifts(model)
    inv_freq = next((m.get_buffer("inv_freq") for m in model.modules() if hasattr(m, "inv_freq")), None)

    calls: dict[int, AttentionCall] = {}

    def finished(index: int, hidden: Tensor) -> None:
        layer = layers[index]
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
                hidden=hidden[0, :length].clone() if needed.hidden else None,
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
            input_ids=input_ids[None],
            position_ids=torch.arange(n, device=input_ids.device)[None],
            past_key_values=HFCache(layers=list(layers)),
            use_cache=True,
            logits_to_keep=torch.tensor([length - 1 for length in wanted]) if parts else 1,
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


def prefill_chains(
    model: PreTrainedModel,
    input_ids: Tensor,
    chains: Sequence[Chain],
    plain: bool = False,
    tokenizer: Any = None,
    lengths: Sequence[int] | None = None,
) -> list[Cache]:
    """Return one cache per chain, in order, from one pass over ``input_ids`` [n] per distinct ``prefill_key``.

    ``tokenizer`` is the model's, for methods that put words of their own into further passes. With ``lengths`` a
    chain's cache is of that many first tokens, from the same pass where the chain changes nothing of it.
    """
    ids = as_prompt(model, input_ids)
    lengths = lengths or [len(ids)] * len(chains)
    for chain, n in zip(chains, lengths, strict=True):
        check_window(model, n, [chain])
        plan = chain.replayer.replay(n) if chain.replayer else None
        if plan is not None:
            read = n + longest_pass(plan, n, tokenizer)
            check_window(model, read, [chain])
            check_capacity(model, read)
    model_traits = traits.of_model(model)
    check_capacity(model, ids.shape[0])
    for chain in chains:
        chain.check_model(model_traits)
        check_calibrated(chain, model)
    passes: dict[tuple[str, int], list[int]] = {}
    for i, (chain, n) in enumerate(zip(chains, lengths, strict=True)):
        apart = bool(chain.prefill_key or chain.replayer or chain.foreign or chain.needs(n).call)
        passes.setdefault((chain.prefill_key, n if apart else len(ids)), []).append(i)
    caches: dict[int, Cache] = {}
    for members in passes.values():
        foreign = [chains[i].name for i in members if chains[i].foreign]
        own, of = [chains[i] for i in members], [lengths[i] for i in members]
        with contained(", ".join(foreign), bool(foreign)), adapted(model, own[0]):
            shared = _shared_pass(model, ids[: max(of)], own, of, plain, tokenizer)
        caches.update(zip(members, shared, strict=True))
    return [caches[i] for i in range(len(chains))]


def _shared_pass(
    model: PreTrainedModel, ids: Tensor, chains: Sequence[Chain], lengths: Sequence[int], plain: bool, tokenizer: Any
) -> list[Cache]:
    """Return one cache per chain from one prefill, for chains under which the prompt is computed alike."""
    members = [*zip(chains, lengths, strict=True)]
    needs = {n: Needs.union(chain.needs(n) for chain, own in members if own == n) for n in sorted({*lengths})}
    whole = needs.pop(len(ids))
    layers = [CompressedLayers(chain) for chain in chains]
    spent = [0.0] * (len(chains) + 1)  # seconds of each chain, and of copies and checks
    query_heads = int(model.config.num_attention_heads)

    def on_layer(obs: Observation, k: Tensor, v: Tensor) -> None:
        def dense(heads: int) -> LayerCache:
            positions, length = obs.positions, obs.prompt_tokens
            return ops.dense(k, v, heads=heads, query_heads=query_heads, positions=positions, length=length)

        for i, (chain, n) in enumerate(members):
            if n != obs.length:
                continue
            heads = chain.heads(k.shape[0], query_heads)
            # the dense cache is shared by all chains, and counted for none of them
            with _clock(k.device, spent, -1):
                shared = obs.once((ops.dense, heads), partial(dense, heads))
                handed = Handed(chain, shared, obs)
            with _clock(k.device, spent, i), contained(chain.name, chain.foreign):
                layers[i].add(handed.cache, handed.obs)
            with _clock(k.device, spent, -1):
                handed.check()
                layers[i].compare(shared.segments[0], obs)

    total = [0.0]
    with _clock(ids.device, total, 0):
        # chains of one prefill key compute the prompt alike
        local: dict[int, list[LayerCache]] = {}  # which all chains share, by the number of tokens

        def on_local(layer: LayerCache, n: int) -> None:
            local.setdefault(n, []).append(layer)

        logits, colsums_s = observe(model, ids, whole, on_layer, plain, chains[0], on_local, needs)
        for part in logits.values():
            check_finite(chains[0], "logits", part)
    # the forward pass alone: without compression, checks and column sums, which chains pay for themselves
    forward = max(total[0] - sum(spent) - sum(colsums_s.values()), 0.0)
    _replay(model, ids, layers, tokenizer, spent)
    owner = weakref.ref(model)
    caches = []
    for (chain, n), compressed, seconds in zip(members, layers, spent[:-1], strict=True):
        wants = chain.needs(n)
        seconds += sum(colsums_s[n, bits] for bits in {*wants.colsums_bits, *([EXACT] if wants.colsums else [])})
        found = tuple(compressed.caches), logits[n], chain, n, forward, seconds, owner, compressed.mismatch
        caches.append(Cache(*found, tuple(local.get(n, ())), long=beyond_turn(model, n)))
    return caches


def _replay(
    model: PreTrainedModel, ids: Tensor, layers: Sequence[CompressedLayers], tokenizer: Any, spent: list[float]
) -> None:
    """Read the prompt again for the chains that score by it. Equal passes are made once, in the first chain's time."""
    received: dict[Replay, list[Tensor]] = {}
    for i, compressed in enumerate(layers):
        selector = compressed.chain.replayer
        if selector is None:
            continue
        with _clock(ids.device, spent, i):
            plan = selector.replay(len(ids))
            if plan is not None and plan not in received:
                received[plan] = replay(model, ids, compressed.caches, plan, tokenizer)
            compressed.replayed(None if plan is None else received[plan])


@contextmanager
def _clock(device: torch.device, spent: list[float], i: int):  # type: ignore[no-untyped-def]
    synchronise(device)
    start = time.perf_counter()
    yield
    synchronise(device)
    spent[i] += time.perf_counter() - start


def observer(model: PreTrainedModel) -> Observe:
    """Return a reader of windows of ids, for stages that are calibrated on ``model``."""
    return lambda window, needs, on_layer: observe(model, as_prompt(model, window), needs, on_layer)


def as_prompt(model: PreTrainedModel, input_ids: Tensor | Sequence[int]) -> Tensor:
    """Return one unpadded prompt as int64 [n] on the model's device; [1, n] is accepted, several prompts are not."""
    traits.check_is_model(model)
    kind = type(input_ids).__name__
    try:
        ids = torch.as_tensor(input_ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"input_ids is {kind}, which holds no ids ({headline(error)}): give tokenizer(text).input_ids"
        ) from None
    if ids.layout != torch.strided or ids.is_meta or not ids.numel():
        raise UsageError(f"input_ids is {kind} without a token: give tokenizer(text).input_ids")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise UsageError(f"input_ids is {ids.dtype}: give whole numbers, the tokenizer's ids")
    if ids.dim() == 2 and ids.shape[0] == 1:
        ids = ids[0]
    if ids.dim() != 1:
        raise UsageError(
            f"input_ids has shape {tuple(ids.shape)}: kvbench reads one unpadded prompt at a time, [n] or [1, n]"
        )
    limit = getattr(model.config, "vocab_size", None)
    if limit is not None and (int(ids.min()) < 0 or int(ids.max()) >= limit):
        raise UsageError(f"input_ids holds ids outside the model's vocabulary of {limit}")
    return ids.to(model.device, torch.int64)
