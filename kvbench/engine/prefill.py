"""One pass of the model over a prompt, shared by all chains that compress it.

When a layer ends, its keys, values and statistics go to all chains. The dense layer is then dropped.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.base.errors import UsageError, headline
from kvbench.engine.draws import seed_generators, seeded
from kvbench.engine.finite import check_finite
from kvbench.engine.handed import check_unwritten, note_versions
from kvbench.engine.layer_by_layer import CompressedLayers
from kvbench.engine.limits import check_capacity, check_window, is_beyond_turn
from kvbench.engine.patches import adapted
from kvbench.engine.prompt_layer import EXACT, LayerStart
from kvbench.engine.prompt_pass import OnLayer, observe_prompt
from kvbench.engine.replay import count_longest_pass, replay_prompt
from kvbench.engine.shared_prefix import PieceEnd, SharedPrefix
from kvbench.engine.weights_digest import check_calibrated
from kvbench.kv import ops
from kvbench.kv.model_shape import state_layers
from kvbench.kv.observation import Needs, Observation
from kvbench.kv.segment import LayerCache
from kvbench.kv.state import LayerState
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.prompt_cache import PromptCache
from kvbench.methods.core.recipe import Observe
from kvbench.methods.core.replaying import Replay
from kvbench.models import traits
from kvbench.models.interface import synchronise
from kvbench.models.traits import ModelTraits

NO_CHAIN = -1
"""The index of the seconds of copies and checks, which are the last number of ``_PassReceiver.spent``."""


def prefill_chains(
    model: PreTrainedModel,
    input_ids: Tensor,
    chains: Sequence[Chain],
    plain: bool = False,
    tokenizer: Any = None,
    lengths: Sequence[int] | None = None,
    prefix: SharedPrefix | None = None,
    model_traits: ModelTraits | None = None,
) -> list[PromptCache]:
    """Read the prompt ``input_ids`` [n], and return the cache of each chain, in order, with as few passes as possible.

    One pass serves all chains with the same ``prefill_key`` that can read the same number of tokens.

    plain: True attends by fp32 softmax rows instead of PyTorch's fused attention.
    tokenizer: the model's tokenizer, for methods that add words of their own to further passes.
    lengths: for each chain, how many of the first tokens its cache covers (default: all n). Shorter caches come from
    the same pass, unless the chain changes the prompt's computation.
    prefix: the first tokens of the previous prompt. Those with which this prompt begins as well are not read again.
    model_traits: the traits of the model, if the caller has found them (default: they are found here).

    Raises UsageError if the prompt is too long for the model or a chain, and Refused if a chain cannot run on it.
    """
    ids = prepare_ids(model, input_ids)
    lengths = lengths or [len(ids)] * len(chains)
    reading = _Reading(plain=plain, tokenizer=tokenizer, prefix=prefix)
    _check_readable(model, model_traits, len(ids), chains, lengths, tokenizer)
    caches: dict[int, PromptCache] = {}
    # the indices of the chains that one pass serves, by the chains' prefill key and the tokens that the pass reads
    passes: dict[tuple[str, int], list[int]] = {}
    for i, (chain, n) in enumerate(zip(chains, lengths, strict=True)):
        tokens_read = n if _must_end_with_cache(model, chain, n) else len(ids)
        passes.setdefault((chain.prefill_key, tokens_read), []).append(i)
    for members in passes.values():
        pass_chains = [chains[i] for i in members]
        pass_lengths = [lengths[i] for i in members]
        # chains of one prefill key compute the prompt alike, so the first may adapt the model for all
        with seeded(), adapted(model, pass_chains[0]):
            pass_caches = _run_shared_pass(model, ids[: max(pass_lengths)], pass_chains, pass_lengths, reading)
        caches.update(zip(members, pass_caches, strict=True))
    return [caches[i] for i in range(len(chains))]


def _check_readable(
    model: PreTrainedModel,
    model_traits: ModelTraits | None,
    ids: int,
    chains: Sequence[Chain],
    lengths: Sequence[int],
    tokenizer: Any,
) -> None:
    """Raise UsageError if a prompt is too long for the model or a chain, and Refused if a chain cannot run on it.

    The checks come before any token is read.

    model_traits: the traits of the model; None: they are found here.
    ids: the number of the prompt's tokens.
    lengths: for each chain, how many of these tokens its cache covers.
    """
    for chain, n in zip(chains, lengths, strict=True):
        check_window(model, n, [chain])
        # a chain may read the prompt again behind itself, and then needs room for the longest such pass
        later_passes = chain.replayer.replay(n) if chain.replayer else None
        if later_passes is not None:
            tokens_read = n + count_longest_pass(later_passes, n, tokenizer)
            check_window(model, tokens_read, [chain])
            check_capacity(model, tokens_read)
    if model_traits is None:
        model_traits = traits.of_model(model)
    check_capacity(model, ids)
    for chain in chains:
        chain.check_model(model_traits)
        check_calibrated(chain, model)


def _must_end_with_cache(model: PreTrainedModel, chain: Chain, n: int) -> bool:
    """Return True if the pass for a chain must end with the last of the ``n`` tokens that the chain's cache covers.

    All other caches can be cut out of a pass over a longer prompt.
    """
    # in a longer pass, such chains would see or change more than the first n tokens
    if chain.prefill_key or chain.replayer or chain.needs(n).call:
        return True
    # a state at the end of a longer prompt cannot be cut back to n tokens
    return bool(state_layers(model.config))


@dataclass(frozen=True)
class _Reading:
    """The parameters of ``prefill_chains`` that say how a prompt is read. Their meaning is described there."""

    plain: bool
    tokenizer: Any
    prefix: SharedPrefix | None


class _PassReceiver:
    """Receive the layers of one pass, hand each to every chain of the pass, and count the seconds that this takes.

    members: the chains of the pass, each as (chain, number of tokens that its cache covers).
    layers: the compressed layers of each chain.
    local: the local layers by number of tokens, exact. All chains share them.
    local_of: the local layers of each chain, as its format stores them.
    states: the states at the end of the prompt, of the layers that hold a state. All chains share them.
    spent: the seconds of each chain, and as the last number the seconds of copies and checks.
    """

    def __init__(self, chains: Sequence[Chain], lengths: Sequence[int], query_heads: int) -> None:
        self.members = list(zip(chains, lengths, strict=True))
        self.query_heads = query_heads
        self.layers = [CompressedLayers(chain) for chain in chains]
        self.local: dict[int, list[LayerCache]] = {}
        self.local_of: list[list[LayerCache]] = [[] for _ in chains]
        self.states: tuple[LayerState, ...] = ()
        self.spent = [0.0] * (len(chains) + 1)

    def on_layer(self, obs: Observation, k: Tensor, v: Tensor) -> None:
        """Hand a layer's keys and values [Hk, n, D] to each chain whose cache covers that many tokens."""
        for i, (chain, n) in enumerate(self.members):
            if n != obs.length:
                continue
            # chains that store the same heads share one dense cache
            heads = chain.heads(k.shape[0], self.query_heads)
            dense = partial(
                ops.dense,
                k,
                v,
                heads=heads,
                query_heads=self.query_heads,
                positions=obs.positions,
                length=obs.length,
            )
            # the time of the shared dense cache is charged to no chain
            with _clock(k.device, self.spent, NO_CHAIN):
                shared_cache = obs.once((ops.dense, heads), dense)
                versions = note_versions(shared_cache, obs)
                # a method's draws depend on no other method and no other prompt
                seed_generators(obs.prompt, obs.layer)
            with _clock(k.device, self.spent, i):
                self.layers[i].add_layer(shared_cache, obs)
            # the check must come while the prompt's own keys and values still exist
            with _clock(k.device, self.spent, NO_CHAIN):
                check_unwritten(versions, chain, obs.layer)
                self.layers[i].compare_newest(shared_cache.segments[0], obs)

    def on_local(self, layer: LayerCache, n: int) -> None:
        """Keep the next local layer, as it is after the first n tokens."""
        self.local.setdefault(n, []).append(layer)

    def store_local(self) -> None:
        """Store the local layers of each chain as its format does, and charge the chain for it."""
        for i, (chain, n) in enumerate(self.members):
            for layer in self.local.get(n, ()):
                with _clock(layer.segments[0].k.device, self.spent, i):
                    self.local_of[i].append(chain.store_local(layer))

    def on_states(self, states: tuple[LayerState, ...]) -> None:
        """Keep the states at the end of the prompt."""
        self.states = states

    def build_caches(
        self,
        model: PreTrainedModel,
        logits: Mapping[int, Tensor],
        forward_s: float,
        colsums_s: Mapping[tuple[int, int], float],
    ) -> list[PromptCache]:
        """Return the cache of each chain. All of its layers must be compressed.

        logits: the next token's logits [V], by the number of tokens read.
        forward_s: the seconds of the forward pass. All chains share it.
        colsums_s: the seconds of column sums, by the number of tokens and the bit width of the keys.
        """
        caches = []
        for i, (chain, n) in enumerate(self.members):
            needs = chain.needs(n)
            widths = set(needs.colsums_bits)
            if needs.colsums:
                widths.add(EXACT)
            cache = PromptCache(
                layers=tuple(self.layers[i].caches),
                logits=logits[n],
                chain=chain,
                prompt_tokens=n,
                prefill_s=forward_s,
                # each chain pays in full for column sums, even if it shares them with other chains
                compress_s=self.spent[i] + sum(colsums_s[n, bits] for bits in widths),
                model=weakref.ref(model),
                mismatch=self.layers[i].mismatch,
                local=tuple(self.local_of[i]),
                states=self.states,
                long=is_beyond_turn(model, n),
            )
            caches.append(cache)
        return caches


def _run_shared_pass(
    model: PreTrainedModel, ids: Tensor, chains: Sequence[Chain], lengths: Sequence[int], reading: _Reading
) -> list[PromptCache]:
    """Return the cache of each chain, in order, from one pass over ``ids`` [n]. All chains must compute it alike.

    ``lengths`` has for each chain how many of the tokens its cache covers; the largest is n.
    """
    needs_by_length: dict[int, Needs] = {}
    for n in sorted(set(lengths)):
        needs_by_length[n] = Needs.union(
            chain.needs(n) for chain, length in zip(chains, lengths, strict=True) if length == n
        )
    starts: Sequence[LayerStart] = ()
    prefix_states: Sequence[LayerState] = ()
    prefix_end: PieceEnd | None = None
    known_pieces = _read_prefix(model, ids, chains[0], needs_by_length, reading)
    if known_pieces is not None:
        starts, prefix_end = known_pieces
        prefix_states = prefix_end.states
    # the pass reads as many tokens as the longest cache has, and shorter lengths are parts of it
    needs_of_all_tokens = needs_by_length.pop(len(ids))
    receiver = _PassReceiver(chains, lengths, int(model.config.num_attention_heads))
    total = [0.0]  # a list, because ``_clock`` adds to its first number
    with _clock(ids.device, total, 0):
        logits, colsums_s = observe_prompt(
            model,
            ids,
            needs_of_all_tokens,
            on_layer=receiver.on_layer,
            plain=reading.plain,
            chain=chains[0],  # chains of one prefill key compute the prompt alike
            on_local=receiver.on_local,
            parts=needs_by_length,
            starts=starts,
            states=prefix_states,
            on_states=receiver.on_states,
        )
        for last_logits in logits.values():
            check_finite(chains[0], "logits", last_logits)
    # the forward pass alone: each chain pays for compression, checks and column sums itself; rounding must not make the
    # difference negative
    forward_s = max(total[0] - sum(receiver.spent) - sum(colsums_s.values()), 0.0)
    if prefix_end is not None:
        # all chains pay for the known pieces as if they had been read now
        forward_s += prefix_end.forward_s
        for n, bits in colsums_s:
            colsums_s[n, bits] += prefix_end.colsums_s[bits]
    _replay_prompt(model, ids, receiver, reading.tokenizer)
    receiver.store_local()
    return receiver.build_caches(model, logits, forward_s, colsums_s)


def _read_prefix(
    model: PreTrainedModel, ids: Tensor, chain: Chain, needs_by_length: Mapping[int, Needs], reading: _Reading
) -> tuple[Sequence[LayerStart], PieceEnd] | None:
    """Return (layers, end of the last piece) of the prompt's first tokens that a shared prefix has read or reads now.

    Returns None if no prefix is shared, or if it cannot serve this pass.

    chain: a chain of the pass. All of its chains compute the prompt alike.
    needs_by_length: the statistics that stages need, by the number of the prompt's first tokens.
    """
    calls_needed = any(needs.call for needs in needs_by_length.values())
    # a kept prefix was read without any stage, and without the calls of attention modules
    if reading.prefix is None or chain.prefill_key or calls_needed:
        return None
    all_needs = Needs.union(needs_by_length.values())
    # the last token of the shortest prompt must be read in the pass itself, because its logits are needed
    most = min(needs_by_length) - 1
    return reading.prefix.read(model, ids, all_needs, most, reading.plain)


def _replay_prompt(model: PreTrainedModel, ids: Tensor, receiver: _PassReceiver, tokenizer: Any) -> None:
    """Read the prompt ``ids`` [n] again for chains that score tokens by further passes over it, and finish the chains.

    Equal passes are made once. Their seconds are charged to the first chain that needs them.
    """
    received: dict[Replay, list[Tensor]] = {}
    for i, compressed in enumerate(receiver.layers):
        selector = compressed.chain.replayer
        if selector is None:
            continue
        with _clock(ids.device, receiver.spent, i):
            passes = selector.replay(len(ids))
            if passes is None:
                compressed.finish_replay(None)
                continue
            if passes not in received:
                received[passes] = replay_prompt(
                    model,
                    ids,
                    compressed.caches,
                    passes,
                    tokenizer,
                    states=receiver.states,
                    local=receiver.local.get(len(ids), ()),
                )
            compressed.finish_replay(received[passes])


@contextmanager
def _clock(device: torch.device, spent: list[float], i: int) -> Iterator[None]:
    """Add to ``spent[i]`` the seconds for which the context is open, with the work of ``device`` in that time."""
    # a GPU works on after a call has returned, so both ends wait for it
    synchronise(device)
    start = time.perf_counter()
    yield
    synchronise(device)
    spent[i] += time.perf_counter() - start


def make_observer(model: PreTrainedModel) -> Observe:
    """Return a function that reads windows of token ids with ``model``, by which stages are calibrated on the model."""

    def observe_window(window: Tensor, needs: Needs, on_layer: OnLayer) -> object:
        """Read a window of token ids, and hand each finished layer to ``on_layer`` with the statistics of ``needs``."""
        return observe_prompt(model, prepare_ids(model, window), needs, on_layer)

    return observe_window


def prepare_ids(model: PreTrainedModel, input_ids: Tensor | Sequence[int]) -> Tensor:
    """Return one unpadded prompt [n] or [1, n] as int64 [n] on the model's device.

    Raises UsageError for anything else, such as several prompts, and for ids outside the vocabulary.
    """
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
    # tokenizers return [1, n] with return_tensors="pt"
    if ids.dim() == 2 and ids.shape[0] == 1:
        ids = ids[0]
    if ids.dim() != 1:
        raise UsageError(
            f"input_ids has shape {tuple(ids.shape)}: kvbench reads one unpadded prompt at a time, [n] or [1, n]"
        )
    # the embedding would raise an index error, and on a GPU an assertion that makes the process unusable
    limit = getattr(model.config, "vocab_size", None)
    if limit is not None and (int(ids.min()) < 0 or int(ids.max()) >= limit):
        raise UsageError(f"input_ids holds ids outside the model's vocabulary of {limit}")
    return ids.to(model.device, torch.int64)
