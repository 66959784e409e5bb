"""A transformers Cache that plain ``model.generate`` fills: kvbench reads, compresses and audits the prompt.

While such a cache is open, the model's forward pass stands aside for passes with the cache. The first pass reads the
prompt by ``prefill_chains``. A later pass of one token feeds the decode batch, and a pass of several tokens is read by
``extend_cache``. Between passes the model is as before.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from kvbench.engine.limits import check_precision, warn_beyond_context
from kvbench.engine.patches import adapted
from kvbench.engine.prefill import prefill_chains, prepare_ids
from kvbench.engine.shared_prefix import SharedPrefix
from kvbench.engine.step import BatchLayers, build, step
from kvbench.kv.model_shape import CacheShape
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.prompt_cache import PromptCache
from kvbench.models.interface import TURN, attached, cache_shape
from kvbench.models.releases import caches_among, named_cache

ROOM = 64  # the tokens of an answer that a decode batch has room for; longer answers get twice the room, and so on
READS = "reads one prompt whole, then one token a step"  # every refusal gives this reason


class TransformersCache(HFCache):
    """The cache of one prompt under one method, for ``model.generate(..., cache=cache)``.

    chain: the method, or the combination of methods.
    model: a weak reference to the model for which the cache was made.
    state: the compressed cache of the text read so far, as ``prefill`` returns it; None before the first prompt.
    ids: [n], the tokens read so far. The last token of an answer is read with the next turn.
    measured: the audited tokens and bytes of the compressed prompt; None before the first prompt.
    prefix: the first tokens of the previous prompt, which prompts that begin alike share; None: each is read whole.

    ``state``, ``ids`` and ``measured`` raise UsageError once the cache is closed, and so does all that needs them.
    """

    def __init__(self, model: PreTrainedModel, chain: Chain, prefix: SharedPrefix | None = None) -> None:
        super().__init__(layers=[])
        self.chain = chain
        self.model = weakref.ref(model)
        self.prefix = prefix
        self.reset()
        _stand_in(model)
        # a cache that nobody refers to any more is closed, too, such as one made inside the call of generate
        self._closing = weakref.finalize(self, _step_back, self.model)
        self._closing.atexit = False

    def __repr__(self) -> str:
        if not self._closing.alive:
            content = "closed"
        elif self.state is None:
            content = "nothing read yet"
        else:
            content = f"{self.state}"
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

    @property
    def state(self) -> PromptCache | None:
        self._check_open()
        with TURN:
            self._settle()
        return self._state

    @property
    def ids(self) -> Tensor:
        self._check_open()
        return self._ids

    @property
    def measured(self) -> MeasuredBytes | None:
        self._check_open()
        return self._measured

    def _check_open(self) -> None:
        if not self._closing.alive:
            raise UsageError(
                "this cache is closed (its with block has ended): use it before, or make another by "
                "kvbench.cache(model, ...)"
            )

    def reset(self) -> None:
        """Forget the text read so far, so that another prompt can be read."""
        self._measured: MeasuredBytes | None = None
        # the cache without the tokens of the decode batch, and all tokens read
        self._state: PromptCache | None = None
        self._ids = torch.empty(0, dtype=torch.int64)
        # the decode batch, the number of tokens that it has read, and the number that it has room for
        self._batch: BatchLayers | None = None
        self._fed = 0
        self._room = ROOM

    def close(self) -> None:
        """Free the cache. If it was the model's last open cache, the model gets its own forward pass back."""
        self.reset()
        # only the first call does something
        self._closing()

    def read(self, input_ids: Tensor | Sequence[int]) -> None:
        """Read ``input_ids`` without an answer: a first prompt, or the text read so far with more text after it."""
        # only one thread at a time may change a model's attention
        with TURN:
            check_precision()
            model = self.model()
            if model is None:
                raise UsageError("the model of this cache is gone")
            ids = prepare_ids(model, input_ids)
            self.check_text(ids[None])
            self.take(model, ids[len(self.ids) :])

    def check_text(self, input_ids: Tensor) -> None:
        """Raise UsageError unless ``input_ids`` [1, n] are the text read so far, followed by at least one token."""
        # several rows, and embeddings in place of ids, are refused by the forward pass
        if len(input_ids) > 1 or not input_ids.numel():
            return
        text = input_ids[0].cpu()
        overlap = min(len(text), len(self.ids))
        differing = (text[:overlap] != self.ids[:overlap]).nonzero().flatten().tolist()
        if differing or len(text) <= len(self.ids):
            # a prompt that is too short differs from the text read at the prompt's own end
            first_difference = differing[0] if differing else overlap
            raise UsageError(
                f"the cache has read {len(self.ids)} tokens, and the {len(text)} tokens of this prompt differ from "
                f"them at token {first_difference}: give the text so far (cache.ids and its last token) followed by "
                "the new text, or make another cache for another prompt (cache.reset() empties this one). "
                "prefill_chunk_size is not served"
            )

    def forward(
        self,
        model: PreTrainedModel,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Return the logits [1, 1, V] after ``input_ids`` [1, T], which follow the text read so far.

        The arguments are those of the forward pass of ``model``, in whose place this is called.

        Raises UsageError for any other use of the model, such as padding, several rows or other positions.
        """
        with TURN:
            check_precision()
            if model is not self.model():
                raise UsageError("this cache was made for another model object: kvbench.cache(model, ...)")
            if attention_mask is not None and not bool(attention_mask.bool().all()):
                raise UsageError(
                    f"a kvbench cache {READS}, without padding: generate takes the text's own padding tokens for such "
                    "unless attention_mask is given, all ones"
                )
            if input_ids is None or output_attentions or output_hidden_states:
                raise UsageError(
                    f"a kvbench cache {READS}: input_ids come in, logits go out, no embeddings or attentions"
                )
            if len(input_ids) > 1:
                raise UsageError(
                    f"a kvbench cache {READS}, and here are {len(input_ids)} rows: give one unpadded prompt at a time; "
                    "num_beams and num_return_sequences above 1 are not served"
                )
            if use_cache is False:
                raise UsageError(f"a kvbench cache {READS}: use_cache=False is not served")
            ids = prepare_ids(model, input_ids)
            start = len(self.ids)
            if position_ids is not None and position_ids.flatten().tolist() != list(range(start, start + len(ids))):
                raise UsageError(f"a kvbench cache {READS}, at positions 0, 1, 2 and on: give no position_ids")
            if self._state is not None and len(ids) == 1:
                logits = self._decode(model, ids)
            else:
                logits = self.take(model, ids)
        return CausalLMOutputWithPast(logits=logits[None, None], **named_cache(self))

    def take(self, model: PreTrainedModel, new_ids: Tensor) -> Tensor:
        """Read the new tokens ``new_ids`` [n], and return the logits [V] after the last of them.

        The first tokens are the prompt: they are compressed, and the cache is audited. Later tokens follow it.
        """
        state = self.state
        # rolled positions stay within the context, however long the text is, so they need no warning
        if state is None or not self.chain.rolled:
            warn_beyond_context(model, len(self.ids) + len(new_ids), stacklevel=3)
        if state is None:
            (state,) = prefill_chains(model, new_ids, [self.chain], prefix=self.prefix)
            self._measured = audit(state, cache_shape(model))
        else:
            state = extend_cache(model, state, new_ids)
        self._state = state
        self._ids = torch.cat([self._ids, new_ids.cpu()])
        return state.logits

    def _decode(self, model: PreTrainedModel, ids: Tensor) -> Tensor:
        """Feed one token [1] to the decode batch, audit the batch, and return the logits [V] after the token.

        An error sets the cache back to what it was before the batch.
        """
        # an answer that is longer than expected goes on in a batch with twice the room
        if self._fed == self._room:
            self._settle()
            self._room *= 2
        chain, state = self.chain, self._state
        assert state is not None, "the first pass reads the prompt"
        check_continuation(model, state, self._fed + 1)
        try:
            with torch.no_grad(), adapted(model, chain), attached(model):
                if self._batch is None:
                    self._batch = build(model, [state], capacity=self._room)
                position = torch.full_like(ids, state.seen + self._fed)
                logits = step(model, self._batch, ids[None], position[None])[0, -1]
                self._fed += 1
                self._ids = torch.cat([self._ids, ids.cpu()])
                if not bool(logits.max().isfinite()):  # NaN or +inf is always the largest logit
                    raise build_answer_refusal(chain, model.dtype)
                _audit_batch(state, self._batch, self._fed, cache_shape(model))
        except BaseException:
            # some layers may have read the token and others not
            self._ids = self._ids[: len(self._ids) - self._fed]
            self._batch, self._fed = None, 0
            raise
        self._logits = logits
        if chain.adaptation:
            # the batch reads the projections of the changed model, which this pass alone has
            self._settle()
        return logits

    def _settle(self) -> None:
        """Write the tokens of the decode batch into the state, and free the batch."""
        if self._batch is not None:
            assert self._state is not None, "a batch is built from a state"
            self._state = continue_cache(self._state, self._batch, self._logits)
        self._batch, self._fed = None, 0

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
        self._check_open()
        raise UsageError("this cache was made for another model object: kvbench.cache(model, ...)")

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        """Raise UsageError: the methods that share this body change tokens that were read already."""
        raise UsageError(f"a kvbench cache {READS}: beam search and assisted decoding take tokens back")

    reorder_cache = crop = activate_past_recording = batch_repeat_interleave = batch_select_indices = _refuse


def _audit_batch(state: PromptCache, batch: BatchLayers, fed: int, shape: CacheShape) -> None:
    """Raise Refused unless the batch holds the tokens and bytes that are declared for ``state`` and ``fed`` tokens."""
    # the most tokens of a head, and the bytes of keys and values, layer by layer
    peaks: list[int] = []
    payload: list[int] = []
    for layer in select_compressed(batch.with_keys):
        peaks.append(int(layer.held()))
        payload.extend(layer.payload())  # one number per layer, because the batch has one row
    check_peak(state, peaks, fed)
    check_bytes(state, Stored(fed, payload), shape)


@dataclass
class _StandIn:
    """What stands in the place of a model's methods while caches are open.

    caches: the number of open caches.
    former: methods that another library had given the model object, by name.
    """

    former: dict[str, Any]
    caches: int = 0


_STAND_INS: weakref.WeakKeyDictionary[PreTrainedModel, _StandIn] = weakref.WeakKeyDictionary()
"""The models with open caches."""
HOOKED = ("forward", "prepare_inputs_for_generation")
"""The methods of a model that see a cache: its forward pass, and what ``generate`` calls before each pass."""


def _stand_in(model: PreTrainedModel) -> None:
    """Count one more open cache of the model. The first one gives the model methods that serve all of them."""
    with TURN:
        if model not in _STAND_INS:
            former = {name: vars(model)[name] for name in HOOKED if name in vars(model)}
            for name in HOOKED:
                hook = _make_hook(name, type(model), former.get(name))
                vars(model)[name] = MethodType(hook, model)
            _STAND_INS[model] = _StandIn(former)
        _STAND_INS[model].caches += 1


def _step_back(model_reference: weakref.ref[PreTrainedModel]) -> None:
    """Count one open cache less. After the last one the model gets back the methods that it had before."""
    with TURN:
        model = model_reference()
        # the cache holds its model by a weak reference: the model may be gone
        if model is None:
            return
        _STAND_INS[model].caches -= 1
        if not _STAND_INS[model].caches:
            for name in HOOKED:
                vars(model).pop(name, None)
            vars(model).update(_STAND_INS.pop(model).former)


def _make_hook(name: str, cls: type, former: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return the method ``name`` of HOOKED for a model of class ``cls``. It serves kvbench's caches.

    Other calls go to ``former``, if another library gave the model one, or else to the class. The method refers to no
    model, so that a copied model does not compute with the original.
    """
    own = getattr(cls, name)

    @functools.wraps(own)
    def hook(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        """Let kvbench's cache compute a forward pass, or check the text before it. Pass on what is without one."""
        our_caches = [cache for cache in caches_among(kwargs) if isinstance(cache, TransformersCache)]
        if our_caches and name == "forward":
            return our_caches[0].forward(self, *args, **kwargs)
        if our_caches:
            # generate's own text [B, T] comes first; of it, only the end is handed to the forward pass
            our_caches[0].check_text(args[0])
        if former is not None:
            return former(*args, **kwargs)
        return own(self, *args, **kwargs)

    return hook
