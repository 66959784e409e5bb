"""One pass of the model over a prompt, shared by every chain that wants to compress it.

As each layer ends, its keys, values and statistics go to all chains, and the dense layer is dropped.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.base.errors import UsageError, headline
from kvbench.engine.finite import check_finite
from kvbench.engine.handed import Handed
from kvbench.engine.layer_by_layer import CompressedLayers
from kvbench.engine.limits import beyond_turn, check_capacity, check_window
from kvbench.engine.patches import adapted
from kvbench.engine.prompt_layer import EXACT
from kvbench.engine.prompt_pass import observe
from kvbench.engine.replay import longest_pass, replay
from kvbench.engine.shared_prefix import SharedPrefix
from kvbench.engine.weights_digest import check_calibrated
from kvbench.kv import ops
from kvbench.kv.observation import Needs, Observation
from kvbench.kv.segment import LayerCache
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.prompt_cache import Cache
from kvbench.methods.core.recipe import Observe
from kvbench.methods.core.replaying import Replay
from kvbench.methods.core.walls import contained, seed_of
from kvbench.models import traits
from kvbench.models.interface import synchronise


def prefill_chains(
    model: PreTrainedModel,
    input_ids: Tensor,
    chains: Sequence[Chain],
    plain: bool = False,
    tokenizer: Any = None,
    lengths: Sequence[int] | None = None,
    prefix: SharedPrefix | None = None,
) -> list[Cache]:
    """Return one cache per chain, in order, from one pass over ``input_ids`` [n] per distinct ``prefill_key``.

    ``tokenizer`` is the model's, for methods that put words of their own into further passes. With ``lengths`` a
    chain's cache is of that many first tokens, from the same pass where the chain changes nothing of it. ``prefix``
    holds the first tokens of the prompt read last, which are not read again.
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
        # the model takes most of the time in here, so that a long wait is no method's fault
        with contained(", ".join(foreign), bool(foreign), seed=0, watched=False), adapted(model, own[0]):
            shared = _shared_pass(model, ids[: max(of)], own, of, plain, tokenizer, prefix)
        caches.update(zip(members, shared, strict=True))
    return [caches[i] for i in range(len(chains))]


def _shared_pass(
    model: PreTrainedModel,
    ids: Tensor,
    chains: Sequence[Chain],
    lengths: Sequence[int],
    plain: bool,
    tokenizer: Any,
    prefix: SharedPrefix | None,
) -> list[Cache]:
    """Return one cache per chain from one prefill, for chains under which the prompt is computed alike."""
    members = [*zip(chains, lengths, strict=True)]
    needs = {n: Needs.union(chain.needs(n) for chain, own in members if own == n) for n in sorted({*lengths})}
    start = None
    if prefix is not None and not chains[0].prefill_key and not any(wants.call for wants in needs.values()):
        start = prefix.read(model, ids, Needs.union(needs.values()), min(lengths) - 1, plain)
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
            with contained(chain.name, chain.foreign, seed_of(obs.prompt, obs.layer)), _clock(k.device, spent, i):
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

        starts = start[0] if start else ()
        logits, colsums_s = observe(model, ids, whole, on_layer, plain, chains[0], on_local, needs, starts)
        for part in logits.values():
            check_finite(chains[0], "logits", part)
    # the forward pass alone: without compression, checks and column sums, which chains pay for themselves
    forward = max(total[0] - sum(spent) - sum(colsums_s.values()), 0.0)
    if start is not None:  # all chains pay for it, as if it was read for them
        _, end = start
        forward += end.forward_s
        colsums_s = {(n, bits): s + end.colsums_s[bits] for (n, bits), s in colsums_s.items()}
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
