"""One pass of the model over a prompt, shared by every chain that wants to compress it.

As each layer ends, its keys, values and statistics go to all chains, and the dense layer is dropped.
"""

from __future__ import annotations

import time
import weakref
import zlib
from collections.abc import Callable, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache as HFCache

from kvbench.engine.finite import check_finite
from kvbench.engine.handed import Handed
from kvbench.engine.layer_by_layer import CompressedLayers
from kvbench.engine.limits import beyond_turn, check_capacity, check_window
from kvbench.engine.patches import adapted
from kvbench.engine.weights_digest import check_calibrated
from kvbench.errors import UsageError, headline
from kvbench.kv import ops
from kvbench.kv.exact_attention import attend_rows, attend_with_lse, column_sums
from kvbench.kv.model_shape import from_config, local_layers
from kvbench.kv.observation import AttentionCall, Needs, Observation
from kvbench.kv.packed import quantise_zero_point
from kvbench.kv.scale import cap_of
from kvbench.kv.segment import LayerCache, per_head
from kvbench.methods.base import Stage
from kvbench.methods.chain import Chain
from kvbench.methods.foreign import contained
from kvbench.methods.prompt_cache import Cache
from kvbench.methods.recipe import Observe
from kvbench.models import traits
from kvbench.models.interface import (
    KvbenchLayer,
    Rows,
    attached,
    call_hooks,
    layer_hooks,
    row_hooks,
    synchronise,
)
from kvbench.models.lowrank import lifts

EXACT = 0  # the bit width under which column sums over unquantised keys are recorded
GROUPED_BY = 5  # first tokens by which heads are grouped
OnLayer = Callable[[Observation, Tensor, Tensor], None]
Read = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
Share = Callable[..., Tensor | None]


class PromptLayer(KvbenchLayer):
    """One layer while the prompt is read: causal attention, and the statistics that stages need.

    Attention is over the keys and values that ``read`` makes of the layer's own; None: the layer's own. ``share``
    is ``HeadSharer.leads`` of the layer, which returns the query head whose logits each head takes.
    """

    def __init__(self, needs: Needs, plain: bool = False, read: Read | None = None, share: Share | None = None) -> None:
        super().__init__()
        self.needs, self.plain, self.read, self.share = needs, plain, read, share
        self.observed: dict[str, Any] = {}  # fields of Observation
        self.colsums_s: dict[int, float] = {}  # seconds by bit width of the keys, EXACT for those as they are

    def add(self, k: Tensor, v: Tensor) -> None:
        self.keys, self.values, self.seen = k, v, k.shape[2]

    def attend(self, query: Tensor, scale: float, window: int | None) -> Tensor:
        assert self.keys is not None and self.values is not None
        q, observed = query[0], self.observed
        observed["scale"] = scale
        if self.needs.last_q:
            observed["last_q"] = q[:, -min(self.needs.last_q, q.shape[1]) :].clone()
        if self.needs.first_q:
            observed["first_q"] = q[:, : min(self.needs.first_q, q.shape[1])].clone()
        keys, values = self.keys[0], self.values[0]
        if self.read is not None:
            keys, values = self.read(keys, values)
            observed["read_k"] = keys
        # where column sums are needed, fused attention gives the log-sum-exp of each row with its output
        fused = not self.plain and window is None and self.share is None and self.needs.colsums
        with_lse = attend_with_lse(q, keys, values, scale) if fused else None
        if self.needs.colsums:
            observed["colsums"] = self._column_sums(q, keys, EXACT, None if with_lse is None else with_lse[1])
        observed["colsums_q"] = {}
        for bits in sorted(self.needs.colsums_bits):
            quantised = quantise_zero_point(keys, bits).dequantise(torch.float32)
            observed["colsums_q"][bits] = self._column_sums(q, quantised, bits)
        if with_lse is not None:
            return with_lse[0][None]
        leads = None
        if self.share is not None:
            leads = self.share(q[:, :GROUPED_BY], keys[:, :GROUPED_BY], scale=scale)
        if leads is not None:
            # each head attends by its leading head's query and key, over its own values
            keys, values = per_head(keys, len(q))[leads], per_head(values, len(q))
            q = q[leads]
        if self.plain or window is not None or cap_of(scale) is not None:
            return attend_rows(q, keys, values, scale, window)[None]
        gqa = q.shape[0] != keys.shape[0]
        return F.scaled_dot_product_attention(
            q[None], keys[None], values[None], is_causal=True, scale=scale, enable_gqa=gqa
        )

    def _column_sums(self, query: Tensor, keys: Tensor, bits: int, lse: Tensor | None = None) -> Tensor:
        synchronise(query.device)
        start = time.perf_counter()
        sums = column_sums(query, keys, self.observed["scale"], lse=lse)
        synchronise(query.device)
        self.colsums_s[bits] = time.perf_counter() - start
        return sums

    def take(self) -> tuple[Tensor, Tensor]:
        """Return the dense keys and values [Hk, n, D], each alone in its storage; the layer drops them."""
        assert self.keys is not None and self.values is not None
        k, v = _alone(self.keys[0]), _alone(self.values[0])
        self.keys = self.values = None
        return k, v


def observe(
    model: PreTrainedModel,
    input_ids: Tensor,
    needs: Needs,
    on_layer: OnLayer,
    plain: bool = False,
    chain: Chain | None = None,
    on_local: Callable[[LayerCache], None] = lambda layer: None,
) -> tuple[Tensor, dict[int, float]]:
    """Read ``input_ids`` [n] once and hand every finished layer to ``on_layer``, and local ones to ``on_local``.

    Returns the next token's logits [V] and the seconds that column sums took, by bit width of the keys. ``plain``
    attends by fp32 softmax rows instead of PyTorch's fused attention. The prompt is computed under ``chain``: its
    stages may read other keys and values than are stored, drop hidden states, or let heads share logits. None of this
    concerns local layers: the others are numbered as if there were no local ones.
    """
    shape = from_config(model.config)
    n_layers, local = shape.layers, local_layers(model.config)
    number = {layer: i for i, layer in enumerate(i for i in range(shape.all_layers) if i not in local)}
    chain = chain or Chain()
    n = input_ids.shape[0]
    read = chain.read if any(type(s).read is not Stage.read for s in chain.stages) else None
    sharer = chain.sharer
    shares = [partial(sharer.leads, n=n, layer=i, n_layers=n_layers) if sharer else None for i in range(n_layers)]
    compressed = [PromptLayer(needs, plain, read, share) for share in shares]
    layers = [PromptLayer(Needs(), plain) if i in local else compressed[number[i]] for i in range(shape.all_layers)]
    rows: list[Rows | None] = [None] * (n_layers + 1)  # tokens that each layer reads; None: all
    prompt = zlib.crc32(input_ids.to("cpu", torch.int64).numpy().tobytes())

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
            layer.observed = {}
            on_local(ops.local(k, v, shape.window, shape.query_heads))
            return
        place = number[index]
        own_rows = rows[place]
        observation = Observation(
            layer=place,
            n_layers=n_layers,
            n=k.shape[1],
            prompt=prompt,
            hidden=hidden[0].clone() if needs.hidden else None,
            latents=(lifted[place].k.take(), lifted[place].v.take()) if lifted else None,
            inv_freq=inv_freq,
            length=n,
            positions=None if own_rows is None else own_rows.positions,
            call=calls.pop(index, None),
            **layer.observed,
        )
        layer.observed = {}
        try:
            rows[place + 1] = _next_rows(chain, observation, k)
            on_layer(observation, k, v)
        except Exception:
            check_finite(chain, "keys or values", k, v)  # no stage is at fault where these are not finite
            raise

    dropping = row_hooks(model, rows.__getitem__) if chain.hidden else nullcontext()
    noting = call_hooks(model, calls) if needs.call else nullcontext()
    with torch.no_grad(), attached(model), layer_hooks(model, finished), dropping, noting:
        out = model(
            input_ids=input_ids[None],
            position_ids=torch.arange(n, device=input_ids.device)[None],
            past_key_values=HFCache(layers=list(layers)),
            use_cache=True,
            logits_to_keep=1,
        )
    seconds = {bits: sum(layer.colsums_s[bits] for layer in compressed) for bits in compressed[0].colsums_s}
    return out.logits[0, -1].clone(), seconds


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
    model: PreTrainedModel, input_ids: Tensor, chains: Sequence[Chain], plain: bool = False
) -> list[Cache]:
    """Return one cache per chain, in order, from one pass over ``input_ids`` [n] per distinct ``prefill_key``."""
    ids = as_prompt(model, input_ids)
    check_window(model, ids.shape[0], chains)
    model_traits = traits.of_model(model)
    check_capacity(model, ids.shape[0])
    for chain in chains:
        chain.check_model(model_traits)
        check_calibrated(chain, model)
    caches: dict[int, Cache] = {}
    for key in dict.fromkeys(chain.prefill_key for chain in chains):
        members = [i for i, chain in enumerate(chains) if chain.prefill_key == key]
        foreign = [chains[i].name for i in members if chains[i].foreign]
        with contained(", ".join(foreign), bool(foreign)), adapted(model, chains[members[0]]):
            shared = _shared_pass(model, ids, [chains[i] for i in members], plain)
        caches.update(zip(members, shared, strict=True))
    return [caches[i] for i in range(len(chains))]


def _shared_pass(model: PreTrainedModel, ids: Tensor, chains: Sequence[Chain], plain: bool) -> list[Cache]:
    """Return one cache per chain from one prefill, for chains under which the prompt is computed alike."""
    n = ids.shape[0]
    needs = Needs.union(chain.needs(n) for chain in chains)
    layers = [CompressedLayers(chain) for chain in chains]
    spent = [0.0] * (len(chains) + 1)  # seconds of each chain, and of copies and checks
    query_heads = int(model.config.num_attention_heads)

    def on_layer(obs: Observation, k: Tensor, v: Tensor) -> None:
        def dense(heads: int) -> LayerCache:
            positions, length = obs.positions, obs.prompt_tokens
            return ops.dense(k, v, heads=heads, query_heads=query_heads, positions=positions, length=length)

        for i, chain in enumerate(chains):
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
        local: list[LayerCache] = []  # which all chains share
        logits, colsums_s = observe(model, ids, needs, on_layer, plain, chains[0], local.append)
        check_finite(chains[0], "logits", logits)
    # the forward pass alone: without compression, checks and column sums, which chains pay for themselves
    forward = max(total[0] - sum(spent) - sum(colsums_s.values()), 0.0)
    owner = weakref.ref(model)
    caches = []
    for chain, compressed, seconds in zip(chains, layers, spent[:-1], strict=True):
        wants = chain.needs(n)
        seconds += sum(colsums_s[bits] for bits in {*wants.colsums_bits, *([EXACT] if wants.colsums else [])})
        parts = tuple(compressed.caches), logits, chain, n, forward, seconds, owner, compressed.mismatch, tuple(local)
        caches.append(Cache(*parts, long=beyond_turn(model, n)))
    return caches


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


def _alone(t: Tensor) -> Tensor:
    """Return t [H, n, D] contiguous and alone in its storage (fused projections return views of a larger one)."""
    if t.is_contiguous() and t.untyped_storage().nbytes() == t.nbytes:
        return t
    return t.clone(memory_format=torch.contiguous_format)
