"""A transformers Cache that plain ``model.generate`` fills: kvbench reads, compresses and audits the prompt.

Each call of ``generate`` with such a cache is a turn. Its first forward pass reads the prompt by ``prefill_chains``. If
the cache has already read tokens, ``extend_cache`` reads the text after them instead. Each later pass feeds one token
to the decode batch. During a turn the model's forward pass is redirected to this file. Afterwards the model is as
before.
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
from kvbench.engine.decode import check_continuation, continue_cache, extend_cache
from kvbench.engine.decode_layer import select_compressed
from kvbench.engine.finite import build_answer_refusal
from kvbench.engine.limits import check_precision, read_token_count, warn_beyond_context
from kvbench.engine.patches import adapted
from kvbench.engine.prefill import prefill_chains, prepare_ids
from kvbench.engine.shared_prefix import SharedPrefix
from kvbench.engine.step import BatchLayers, build, step
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.prompt_cache import PromptCache
from kvbench.methods.core.walls import contained
from kvbench.models.interface import TURN, attached, cache_shape
from kvbench.models.releases import CACHE_NAMES, caches_among, named_cache

ROOM = 20  # generate's own default length of an answer; a longer answer gets more room as it grows
READS = "reads one prompt whole, then one token a step"  # every refusal gives this reason


class TransformersCache(HFCache):
    """The cache of one prompt under one method, for ``model.generate(..., cache=cache)``.

    chain: the method, or the combination of methods.
    model: a weak reference to the model for which the cache was made.
    state: the compressed cache of the text read so far, as ``prefill`` returns it; None before the first prompt.
    ids: [n], the tokens read so far. The last token of an answer is read with the next turn.
    measured: the audited tokens and bytes of the compressed prompt; None before the first prompt.
    prefix: the first tokens of the previous prompt, which prompts that begin alike share; None: each is read whole.
    """

    def __init__(self, model: PreTrainedModel, chain: Chain, prefix: SharedPrefix | None = None) -> None:
        super().__init__(layers=[])
        self.chain = chain
        self.model = weakref.ref(model)
        self.prefix = prefix
        self.reset()
        if model not in _OPEN:
            # a model's first open cache gives the model a ``generate`` of its own; ``close`` removes it
            _OPEN[model] = weakref.WeakSet()
            serving = _make_serving_generate(type(model), vars(model).get("generate"))
            vars(model)["generate"] = MethodType(serving, model)
        _OPEN[model].add(self)

    def __repr__(self) -> str:
        content = f"{self.state}" if self.state is not None else "nothing read yet"
        return f"<TransformersCache {self.chain.name}: {content}>"

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError(
            "a kvbench cache for generate can be neither pickled nor copied: its method is code and it belongs to a "
            "model object. Make another by kvbench.cache and read the text again"
        )

    def __enter__(self) -> TransformersCache:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def reset(self) -> None:
        """Forget the text read so far, so that another prompt can be read."""
        self.state: PromptCache | None = None
        self.measured: MeasuredBytes | None = None
        self.ids = torch.empty(0, dtype=torch.int64)

    def close(self) -> None:
        """Free the cache. If it was the model's last open cache, the model gets its own ``generate`` back."""
        self.reset()
        # the cache holds its model by a weak reference: the model may be gone
        model = self.model()
        # a cache may be closed twice
        if model is None or self not in _OPEN.get(model, ()):
            return
        _OPEN[model].discard(self)
        if not _OPEN[model]:
            del _OPEN[model]
            # the function that __init__ has put there remembers another library's ``generate``, if there was one
            serving = vars(model).pop("generate")
            if serving.former is not None:
                vars(model)["generate"] = serving.former

    def read(self, input_ids: Tensor | Sequence[int]) -> None:
        """Read ``input_ids`` without an answer: a first prompt, or the text read so far with more text after it."""
        # only one thread at a time may change a model's attention
        with TURN:
            model = self.model()
            # the check raises if the model is gone
            new_ids = _check_new_ids(model, self, input_ids)
            assert model is not None
            self.take(model, new_ids)

    def take(self, model: PreTrainedModel, new_ids: Tensor) -> Tensor:
        """Read the new tokens ``new_ids`` [n], and return the logits [V] after the last of them.

        The first tokens are the prompt: they are compressed, and the cache is audited. Later tokens follow it.
        """
        if self.state is None:
            (state,) = prefill_chains(model, new_ids, [self.chain], prefix=self.prefix)
            with contained(self.chain.name, self.chain.foreign):
                self.measured = audit(state, cache_shape(model))
        else:
            state = extend_cache(model, self.state, new_ids)
        self.state = state
        self.ids = torch.cat([self.ids, new_ids.cpu()])
        return state.logits

    def nbytes(self) -> int:
        """Return the bytes that the cache takes after the last turn.

        They are those of keys, values, their overhead (such as positions and scales), and the states that some layers
        hold in place of keys.
        """
        if self.state is None:
            return 0
        return self.state.nbytes()

    def kept_positions(self) -> list[list[Tensor]]:
        """Return the positions of the tokens held, as one tensor for each layer and stored head."""
        if self.state is None:
            return []
        return [layer.kept_positions() for layer in self.state.layers]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return len(self.ids)

    @property
    def is_croppable(self) -> bool:
        return False

    @property
    def is_linear(self) -> list[bool]:
        """The list [False]: no layer has linear attention.

        If all layers had it, generate would feed only the end of a text. An empty list would count as all layers.
        """
        return [False]

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """Raise UsageError: a model has passed this cache to its own layers."""
        raise UsageError(
            "a kvbench cache is filled by generate of the model that it was made for, until it is closed: this is "
            "another model, a forward pass outside generate, or a cache made within the call: make it on a line before"
        )

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        """Raise UsageError: the methods that share this body change tokens that were read already."""
        raise UsageError(f"a kvbench cache {READS}: beam search and assisted decoding take tokens back")

    reorder_cache = crop = activate_past_recording = batch_repeat_interleave = batch_select_indices = _refuse


class GeneratedTurn:
    """One call of ``generate``. Its first forward pass reads the prompt, each later pass one token of the answer.

    cache: the cache that the call fills, for ``model``.
    new_ids: [n], the tokens of the text that the cache has not read before the call.
    has_read: True once the first forward pass has read ``new_ids``.
    room: how many tokens the decode batch has room for.
    contexts: the contexts in which the model is changed for the decode batch. They are open while the batch is in use.
    batch: the layers of the decode batch; None while there is none.
    fed: the tokens [1] that the decode batch has read.
    logits: [V], the logits of the next token.
    """

    def __init__(self, cache: TransformersCache, model: PreTrainedModel, new_ids: Tensor, room: int) -> None:
        self.cache = cache
        self.model = model
        self.new_ids = new_ids
        self.room = room
        self.contexts = ExitStack()
        self.has_read = False
        self.batch: BatchLayers | None = None
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
        """Return the logits [1, 1, V] after ``input_ids`` [1, T]. T is 1 in all passes except the first.

        Raises UsageError for any other use of the model, such as padding, several rows or unexpected tokens.
        """
        ids = self._check_inputs(
            input_ids, attention_mask, position_ids, asks_for_more=output_attentions or output_hidden_states
        )
        if self.has_read:
            self._decode(ids)
        else:
            self.logits = self.cache.take(self.model, self.new_ids)
            self.has_read = True
        return CausalLMOutputWithPast(logits=self.logits[None, None], **named_cache(self.cache))

    def _check_inputs(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        *,
        asks_for_more: bool,
    ) -> Tensor:
        """Return the ids [1, T] that a forward pass is given. Raises UsageError unless they are those that come next.

        The tensors are those of ``forward``.

        asks_for_more: True if the pass shall return attentions or hidden states beside logits.
        """
        if attention_mask is not None and not bool(attention_mask.bool().all()):
            raise UsageError(
                f"a kvbench cache {READS}, without padding: generate takes the text's own padding tokens for such "
                "unless attention_mask is given, all ones"
            )
        if input_ids is None or asks_for_more:
            raise UsageError(f"a kvbench cache {READS}: input_ids come in, logits go out, no embeddings or attentions")
        if len(input_ids) > 1:
            raise UsageError(
                f"a kvbench cache {READS}, and here are {len(input_ids)} rows: num_beams and num_return_sequences "
                "above 1 are not served"
            )
        tokens = input_ids.shape[1]
        start = len(self.cache.ids) + len(self.fed)
        # an answer may contain any token, but one at a time
        expected = input_ids[0, :1] if self.has_read else self.new_ids
        if input_ids[0].tolist() != expected.tolist():
            raise UsageError(
                f"a kvbench cache {READS}, and here are {tokens} tokens for {len(expected)}: assisted decoding, "
                "prefill_chunk_size, token_healing and use_cache=False are not served"
            )
        if position_ids is not None and position_ids.flatten().tolist() != list(range(start, start + tokens)):
            raise UsageError(f"a kvbench cache {READS}, at positions 0, 1, 2 and on: give no position_ids")
        return input_ids

    def _decode(self, input_ids: Tensor) -> None:
        """Feed one token [1, 1] to the decode batch, and set ``logits``.

        A full batch is settled first, and a larger batch replaces it.
        """
        cache, model, chain = self.cache, self.model, self.cache.chain
        # an answer that is longer than expected goes on in a batch with twice the room
        if len(self.fed) == self.room:
            self.settle()
            self.room *= 2
        # the first forward pass has read the prompt
        assert cache.state is not None
        check_continuation(model, cache.state, len(self.fed) + 1)
        with contained(chain.name, chain.foreign), torch.no_grad():
            if self.batch is None:
                # the model stays adapted and attached until the batch is settled
                self.contexts.enter_context(adapted(model, chain))
                self.contexts.enter_context(attached(model))
                self.batch = build(model, [cache.state], capacity=self.room)
            ids = input_ids.to(model.device)
            position = torch.full_like(ids, cache.state.seen + len(self.fed))
            self.logits = step(model, self.batch, ids, position)[0, -1]
        self.fed.append(input_ids[0].cpu())
        if not bool(self.logits.max().isfinite()):  # NaN or +inf is always the largest logit
            raise build_answer_refusal(chain, model.dtype)

    def settle(self) -> None:
        """End the decode batch: audit its storage, and write its tokens back into the cache."""
        cache = self.cache
        if self.batch is not None:
            # a batch is built from the cache of a prompt
            assert cache.state is not None
            # the most tokens of a head, and the bytes of keys and values, layer by layer
            peaks: list[int] = []
            payload: list[int] = []
            for layer in select_compressed(self.batch.with_keys):
                peaks.append(int(layer.held()))
                payload.extend(layer.payload())  # one number per layer, because the batch has one row
            check_peak(cache.state, peaks, len(self.fed))
            check_bytes(cache.state, Stored(len(self.fed), payload), cache_shape(self.model))
            cache.state = continue_cache(cache.state, self.batch, self.logits)
            cache.ids = torch.cat([cache.ids] + self.fed)
        self.batch = None
        self.fed = []
        self.contexts.close()


_OPEN: weakref.WeakKeyDictionary[PreTrainedModel, weakref.WeakSet[TransformersCache]] = weakref.WeakKeyDictionary()
"""The open caches of each model. The model's replaced ``generate`` serves them."""


def _make_serving_generate(cls: type[Any], former: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return a ``generate`` for a model of ``cls`` that serves the model's open caches and passes other calls on.

    Other calls go to ``former``, if another library gave the model one, or else to the class. The function refers to no
    model, so that a copied model does not generate with the original.
    """

    @functools.wraps(cls.generate)
    def generate(self: PreTrainedModel, inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """Answer from kvbench's cache if one is among the arguments. Otherwise generate as before."""
        target = former or functools.partial(cls.generate, self)
        cache = _find_our_cache(kwargs)
        if cache is None:
            return target(inputs, *args, **kwargs)
        other_options = {name: value for name, value in kwargs.items() if name not in CACHE_NAMES}
        # the text may come under either name
        text = inputs if inputs is not None else kwargs.get("input_ids")
        configs = [self.generation_config]
        if args:
            # generate's second argument is a configuration, too, and comes before the model's own
            configs.insert(0, args[0])
        with TURN:
            new_ids = _check_new_ids(self, cache, text)
            room = _count_room(cache, new_ids, configs, kwargs)
            turn = GeneratedTurn(cache, self, new_ids, room)
            with turn.contexts, _redirect_forward_passes(self, turn):
                result = target(inputs, *args, **other_options, **named_cache(cache))
                turn.settle()
        return result

    generate.former = former  # type: ignore[attr-defined]
    return generate


def _find_our_cache(options: Mapping[str, Any]) -> TransformersCache | None:
    """Return kvbench's cache among the options of ``generate``, or None if there is none.

    Raises UsageError if the options hold another cache beside it: an option for caches has two names.
    """
    caches = caches_among(options)
    our_caches = [cache for cache in caches if isinstance(cache, TransformersCache)]
    if not our_caches:
        return None
    our_cache = our_caches[0]
    if any(cache is not our_cache for cache in caches):
        raise UsageError(f"{' and '.join(CACHE_NAMES)} are two names of one argument: give one cache")
    return our_cache


@contextmanager
def _redirect_forward_passes(model: PreTrainedModel, turn: GeneratedTurn) -> Iterator[None]:
    """While the context is open, redirect forward passes with the turn's cache to the turn.

    Passes with other caches, such as kvbench's own, still use the model.
    """
    # a ``forward`` in the object's own attributes comes from another library, and hides the class's
    former, forward = vars(model).get("forward"), model.forward

    @functools.wraps(forward)
    def forwarding(*args: Any, **kwargs: Any) -> Any:
        """Return the output of a forward pass: by the turn if it has the turn's cache, else by the model."""
        # kvbench's own passes use caches of other classes
        if caches_among(kwargs) == [turn.cache]:
            return turn.forward(*args, **kwargs)
        return forward(*args, **kwargs)

    vars(model)["forward"] = forwarding
    try:
        yield
    finally:
        del vars(model)["forward"]
        if former is not None:
            vars(model)["forward"] = former


def _check_new_ids(model: PreTrainedModel | None, cache: TransformersCache, input_ids: Any) -> Tensor:
    """Return the tokens [n] of the text ``input_ids`` that the cache has not read yet.

    Raises UsageError if the cache belongs to another model, or if the text does not continue the text read so far.
    """
    check_precision()
    if model is None or cache not in _OPEN.get(model, ()):
        raise UsageError("this cache was made for another model object, or is closed: kvbench.cache(model, ...)")
    ids = prepare_ids(model, input_ids)
    ids_read = cache.ids.to(ids.device)
    overlap = min(len(ids), len(ids_read))
    differing = (ids[:overlap] != ids_read[:overlap]).nonzero().flatten().tolist()
    if differing or len(ids) <= len(ids_read):
        # a prompt that is too short differs from the text read at the prompt's own end
        first_difference = differing[0] if differing else overlap
        raise UsageError(
            f"the cache has read {len(ids_read)} tokens, and the {len(ids)} tokens of this prompt differ from them "
            f"at token {first_difference}: give the text so far (cache.ids and its last token) followed by the new "
            "text, or make another cache for another prompt (cache.reset() empties this one)"
        )
    # rolled positions stay within the context, however long the text is, so they need no warning
    if cache.state is None or not cache.chain.rolled:
        # 3: the user's line, which calls ``generate`` or ``read``, which call this function
        warn_beyond_context(model, len(ids), stacklevel=3)
    return ids[len(ids_read) :]


def _count_room(
    cache: TransformersCache, new_ids: Tensor, configs: Sequence[Any], options: Mapping[str, object]
) -> int:
    """Return for how many tokens of an answer to make room: all except the last, which is never fed.

    The answer's length is taken from the ``options`` of ``generate``, else from its ``configs``, else it is ROOM.
    """
    sizes: list[int | None] = []
    if options.get("max_new_tokens") is not None:
        sizes.append(read_token_count("max_new_tokens", options["max_new_tokens"]))
    if options.get("max_length") is not None:
        # max_length also counts the text read so far and the new prompt
        length = read_token_count("max_length", options["max_length"])
        sizes.append(length - len(cache.ids) - len(new_ids))
    sizes.append(getattr(options.get("generation_config"), "max_new_tokens", None))
    for config in configs:
        sizes.append(getattr(config, "max_new_tokens", None))
    # sizes are in order of precedence, so the first that was given counts; null and 0 count as not given
    given_sizes = [size for size in sizes if size]
    given_sizes.append(ROOM)
    # max_length may be less than the tokens before the answer
    return max(given_sizes[0] - 1, 1)
