"""A transformers Cache that plain ``model.generate`` fills: the prompt is read, compressed and audited by kvbench.

Each call of ``generate`` with such a cache is a turn. Its first forward pass reads the prompt, or what follows the text
that the cache has read already, by ``prefill_chains`` and ``extend_cache``; each later one feeds one token to the
decode batch. While the turn lasts the model's forward pass leads here; after it the model is as it was.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache as HFCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from kvbench.audit.decode_audit import Stored, check_bytes, check_peak
from kvbench.audit.prompt_audit import MeasuredBytes, audit
from kvbench.base.errors import UsageError
from kvbench.engine.decode import check_continuation, extend_cache, settled
from kvbench.engine.decode_layer import RowLayer, compressed
from kvbench.engine.finite import no_answer
from kvbench.engine.limits import check_precision, tokens_of, warn_beyond_context
from kvbench.engine.patches import adapted
from kvbench.engine.prefill import as_prompt, prefill_chains
from kvbench.engine.shared_prefix import SharedPrefix
from kvbench.engine.step import build, step
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.prompt_cache import Cache
from kvbench.methods.core.walls import contained
from kvbench.models.interface import TURN, attached, cache_shape
from kvbench.models.releases import CACHE_NAMES, caches_among, named_cache

ROOM = 20  # tokens of an answer where nothing says so, as in generate; a longer one gets more room
READS = "reads one prompt whole, then one token a step"  # why something is refused


class TransformersCache(HFCache):
    """The cache of one prompt under one chain, for ``model.generate(..., cache=cache)``.

    state: what is kept of the text read so far, as ``prefill`` returns it; None before the first prompt.
    ids: the tokens read so far [n]. The last token of an answer is read with the next turn.
    measured: the audited tokens and bytes of the compressed prompt.
    prefix: the first tokens of the prompt read last, if prompts that begin alike share them.
    """

    def __init__(self, model: PreTrainedModel, chain: Chain, prefix: SharedPrefix | None = None) -> None:
        super().__init__(layers=[])
        self.chain, self.model, self.prefix = chain, weakref.ref(model), prefix
        self.reset()
        if model not in _OPEN:
            _OPEN[model] = weakref.WeakSet()
            vars(model)["generate"] = MethodType(_serving(type(model), vars(model).get("generate")), model)
        _OPEN[model].add(self)

    def __repr__(self) -> str:
        return f"<TransformersCache {self.chain.name}: {'nothing read yet' if self.state is None else self.state}>"

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError(
            "a kvbench cache for generate can be neither pickled nor copied: its chain is code and it belongs to a "
            "model object. Make another by kvbench.cache and read the text again"
        )

    def __enter__(self) -> TransformersCache:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def reset(self) -> None:
        """Forget everything, so that another prompt can be read."""
        self.state: Cache | None = None
        self.measured: MeasuredBytes | None = None
        self.ids = torch.empty(0, dtype=torch.int64)

    def close(self) -> None:
        """Free what is held. With its last open cache the model gets its own ``generate`` back."""
        self.reset()
        model = self.model()
        if model is None or self not in _OPEN.get(model, ()):
            return
        _OPEN[model].discard(self)
        if not _OPEN[model]:
            del _OPEN[model]
            former = vars(model).pop("generate").former
            vars(model).update({} if former is None else {"generate": former})

    def read(self, input_ids: Tensor | Sequence[int]) -> None:
        """Read a prompt, or the text so far and more behind it, without an answer: the next turn's text is withheld."""
        with TURN:
            model = self.model()
            new_ids = _new_ids(model, self, input_ids)
            assert model is not None
            self.take(model, new_ids)

    def take(self, model: PreTrainedModel, new_ids: Tensor) -> Tensor:
        """Read a prompt [n] and audit what is kept of it, or the text behind it. Return the logits [V] that follow."""
        if self.state is None:
            (state,) = prefill_chains(model, new_ids, [self.chain], prefix=self.prefix)
            with contained(self.chain.name, self.chain.foreign):
                self.measured = audit(state, *cache_shape(model))
        else:
            state = extend_cache(model, self.state, new_ids)
        self.state, self.ids = state, torch.cat([self.ids, new_ids.cpu()])
        return state.logits

    def nbytes(self) -> int:
        """Return the bytes of keys, values and their overhead after the last turn."""
        return 0 if self.state is None else self.state.nbytes()

    def kept_positions(self) -> list[list[Tensor]]:
        """Return the positions of the tokens held, by layer and stored head."""
        return [] if self.state is None else [layer.kept_positions() for layer in self.state.layers]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return len(self.ids)

    @property
    def is_croppable(self) -> bool:
        return False

    @property
    def is_linear(self) -> list[bool]:
        """Say that no layer is of linear attention: generate feeds a text whole, not its end, where all of them are."""
        return [False]  # all of no layers would be

    def update(self, *args: Any, **kwargs: Any) -> Any:
        raise UsageError(
            "a kvbench cache is filled by generate of the model that it was made for, until it is closed: this is "
            "another model, a forward pass outside generate, or a cache made within the call: make it on a line before"
        )

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise UsageError(f"a kvbench cache {READS}: beam search and assisted decoding take tokens back")

    reorder_cache = crop = activate_past_recording = batch_repeat_interleave = batch_select_indices = _refuse


class GeneratedTurn:
    """One call of ``generate``: its first forward pass reads ``new_ids`` [n], each later one a token of the answer.

    room: how many tokens the decode batch has room for.
    contexts: open while the decode batch is used, and the model is changed for it.
    """

    def __init__(self, cache: TransformersCache, model: PreTrainedModel, new_ids: Tensor, room: int) -> None:
        self.cache, self.model, self.new_ids, self.room = cache, model, new_ids, room
        self.contexts = ExitStack()
        self.has_read = False
        self.batch: list[RowLayer] = []
        self.fed: list[Tensor] = []
        self.logits = torch.empty(0)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Return the logits [1, 1, V] after ``input_ids`` [1, T]; T is 1 in all passes but the first."""
        if attention_mask is not None and not bool(attention_mask.bool().all()):
            raise UsageError(
                f"a kvbench cache {READS}, without padding: generate takes the text's own padding tokens for such "
                "unless attention_mask is given, all ones"
            )
        if input_ids is None or output_attentions or output_hidden_states:
            raise UsageError(f"a kvbench cache {READS}: input_ids come in, logits go out, no embeddings or attentions")
        if len(input_ids) > 1:
            raise UsageError(
                f"a kvbench cache {READS}, and here are {len(input_ids)} rows: num_beams and num_return_sequences "
                "above 1 are not served"
            )
        tokens, start = input_ids.shape[1], len(self.cache.ids) + len(self.fed)
        expected = input_ids[0, :1] if self.has_read else self.new_ids
        if input_ids[0].tolist() != expected.tolist():
            raise UsageError(
                f"a kvbench cache {READS}, and here are {tokens} tokens for {len(expected)}: assisted decoding, "
                "prefill_chunk_size, token_healing and use_cache=False are not served"
            )
        if position_ids is not None and position_ids.flatten().tolist() != [*range(start, start + tokens)]:
            raise UsageError(f"a kvbench cache {READS}, at positions 0, 1, 2 and on: give no position_ids")
        if self.has_read:
            self._decode(input_ids)
        else:
            self.logits, self.has_read = self.cache.take(self.model, self.new_ids), True
        return CausalLMOutputWithPast(logits=self.logits[None, None], **named_cache(self.cache))

    def _decode(self, input_ids: Tensor) -> None:
        """Feed one token [1, 1] to the decode batch. A full batch is settled first, and a larger one follows it."""
        cache, model, chain = self.cache, self.model, self.cache.chain
        if len(self.fed) == self.room:
            self.settle()
            self.room *= 2
        assert cache.state is not None
        check_continuation(model, cache.state, len(self.fed) + 1)
        with contained(chain.name, chain.foreign), torch.no_grad():
            if not self.batch:
                self.contexts.enter_context(adapted(model, chain))
                self.contexts.enter_context(attached(model))
                self.batch = build(model, [cache.state], self.room)
            ids = input_ids.to(model.device)
            position = torch.full_like(ids, cache.state.seen + len(self.fed))
            self.logits = step(model, self.batch, ids, position)[0, -1]
        self.fed.append(input_ids[0].cpu())
        if not bool(self.logits.max().isfinite()):  # NaN and +inf are always the largest
            raise no_answer(chain, model.dtype)

    def settle(self) -> None:
        """End the decode batch: audit what it stored, and write the tokens fed back into the cache."""
        cache, batch = self.cache, self.batch
        if batch:
            assert cache.state is not None
            check_peak(cache.state, [int(layer.held()) for layer in compressed(batch)], len(self.fed))
            stored = Stored(len(self.fed), [size for layer in compressed(batch) for size in layer.payload()])
            check_bytes(cache.state, stored, *cache_shape(self.model))
            cache.state = settled(cache.state, batch, self.logits)
            cache.ids = torch.cat([cache.ids, *self.fed])
        self.batch, self.fed = [], []
        self.contexts.close()


_OPEN: weakref.WeakKeyDictionary[PreTrainedModel, weakref.WeakSet[TransformersCache]] = weakref.WeakKeyDictionary()
"""The open caches of each model. Its ``generate`` serves them."""


def _serving(cls: type[Any], former: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return a ``generate`` for a model of ``cls`` that serves its open caches, and passes all other calls on.

    These go to ``former``, which another library gave the model, or else to the class. The function holds no model, so
    that a copy of one is a model of its own.
    """

    @functools.wraps(cls.generate)
    def generate(self: PreTrainedModel, inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        target = former or functools.partial(cls.generate, self)
        caches = caches_among(kwargs)
        cache = next((c for c in caches if isinstance(c, TransformersCache)), None)
        if cache is None:
            return target(inputs, *args, **kwargs)
        if any(c is not cache for c in caches):
            raise UsageError(f"{' and '.join(CACHE_NAMES)} are two names of one argument: give one cache")
        others = {name: value for name, value in kwargs.items() if name not in CACHE_NAMES}
        with TURN:
            new_ids = _new_ids(self, cache, kwargs.get("input_ids") if inputs is None else inputs)
            turn = GeneratedTurn(
                cache, self, new_ids, _room(cache, new_ids, [*args[:1], self.generation_config], kwargs)
            )
            with turn.contexts, _forwarding(self, turn):
                result = target(inputs, *args, **others, **named_cache(cache))
                turn.settle()
        return result

    generate.former = former  # type: ignore[attr-defined]
    return generate


@contextmanager
def _forwarding(model: PreTrainedModel, turn: GeneratedTurn) -> Iterator[None]:
    """Lead the forward passes of a turn to it; those that kvbench itself calls go through the model."""
    own, forward = vars(model).get("forward"), model.forward

    @functools.wraps(forward)
    def forwarding(*args: Any, **kwargs: Any) -> Any:
        return (turn.forward if caches_among(kwargs) == [turn.cache] else forward)(*args, **kwargs)

    vars(model)["forward"] = forwarding
    try:
        yield
    finally:
        del vars(model)["forward"]
        vars(model).update({} if own is None else {"forward": own})


def _new_ids(model: PreTrainedModel | None, cache: TransformersCache, input_ids: Any) -> Tensor:
    """Return the tokens [n] of one prompt that the cache has not read. Raises UsageError for another model or text."""
    check_precision()
    if model is None or cache not in _OPEN.get(model, ()):
        raise UsageError("this cache was made for another model object, or is closed: kvbench.cache(model, ...)")
    ids = as_prompt(model, input_ids)
    read = cache.ids.to(ids.device)
    shared = min(len(ids), len(read))
    differ = (ids[:shared] != read[:shared]).nonzero().flatten().tolist()
    if differ or len(ids) <= len(read):
        raise UsageError(
            f"the cache has read {len(read)} tokens, which the {len(ids)} of this prompt leave at token "
            f"{(differ or [shared])[0]}: give the text so far (cache.ids and its last token) with the new one behind "
            "it, or another prompt a cache of its own (cache.reset() empties this one)"
        )
    if cache.state is None or not cache.chain.rolled:
        warn_beyond_context(model, len(ids), stacklevel=3)
    return ids[len(read) :]


def _room(cache: TransformersCache, new_ids: Tensor, configs: Sequence[Any], options: Mapping[str, Any]) -> int:
    """Return how many tokens of an answer are to be fed, which are all but its last; ROOM where nothing says so."""
    new, length = (
        None if options.get(key) is None else tokens_of(key, options[key]) for key in ("max_new_tokens", "max_length")
    )
    sizes = [new, length and length - len(cache.ids) - len(new_ids)]
    sizes += [getattr(config, "max_new_tokens", None) for config in (options.get("generation_config"), *configs)]
    return max(next((size for size in sizes if size), ROOM) - 1, 1)
