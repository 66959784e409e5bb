"""The boundary to transformers: one registered attention function, its mask, and hooks that see a layer end.

transformers passes post-RoPE queries to ``attention``. Instead of keys and values it passes the result of the cache
layer's ``update``, and kvbench's layers return themselves there. ``attention`` calls their ``attend``. It is therefore
the same function for Llama, Mistral, Qwen2, GPT-NeoX and OPT.

Shapes: B rows, Hq query heads, Hk kv heads, T new tokens, n prompt tokens, D head dimension, d hidden size.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import Cache as HFCache
from transformers.cache_utils import CacheLayerMixin
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvbench.base.errors import UsageError
from kvbench.kv.model_shape import (
    CacheShape,
    compressed_layers,
    from_config,
    indexer_reach,
    key_layers,
    latent_width,
    layer_types,
    local_layers,
    sharing_layers,
)
from kvbench.kv.observation import AttentionCall
from kvbench.kv.scale import LogitScale
from kvbench.models.indexer import choosing_all
from kvbench.models.latent import LatentCache, absorb_query, expands_after_caching, head_outputs, pass_latents_on
from kvbench.models.releases import named_cache, tell_untried
from kvbench.models.temperature import scale_queries, scaled_here

NAME = "kvbench"
"""The name under which the attention function and its mask are registered with transformers."""
UNSERVED = ("sinks", "position_bias", "attention_bias", "head_mask")
"""Arguments of some models' attention functions whose effect kvbench's function does not compute."""
TENSOR_PARTS = ("shape", "transpose", "view", "reshape", "repeat", "expand", "permute", "contiguous")
"""Attributes of tensors that a model reads if it computes with the return value of ``update`` itself."""
TURN = threading.RLock()
"""The lock to hold while a model runs under kvbench's attention, because all threads share that setting."""
ELSEWHERE = "this model's attention reads its keys and values outside the attention function: kvbench cannot run it"


class KvbenchLayer(CacheLayerMixin):
    """A cache layer that computes its own attention. Subclasses set ``seen`` and implement ``add`` and ``attend``.

    seen: the number of tokens that the layer has read.

    The other methods are those that transformers expects of a cache layer.
    """

    is_sliding = False
    seen: int = 0

    @abstractmethod
    def add(self, k: Tensor, v: Tensor) -> None:
        """Store the keys and values [B, Hk, T, D] of T new tokens, and count the tokens in ``seen``."""

    @abstractmethod
    def attend(self, query: Tensor, scale: float, window: int | None) -> Tensor:
        """Return the attention [B, Hq, T, D] of query [B, Hq, T, D] over all tokens that the layer holds.

        scale: the factor of q.k, which carries the model's cap on logits and its sinks if it has any (``LogitScale``).
        window: the model's sliding window if the text has outgrown it, else None.
        """

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        """Raise UsageError: a model has passed the layer to a function of torch, as if it were keys or values."""
        raise UsageError(ELSEWHERE)

    def __getattr__(self, name: str) -> Any:
        """Raise UsageError for an attribute that only tensors have, and AttributeError for any other."""
        if name in TENSOR_PARTS:
            raise UsageError(ELSEWHERE)
        raise AttributeError(name)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Store new keys and values, and return the layer itself in the place of all keys, and of all values."""
        self.add(key_states, value_states)
        return self, self

    def newest_positions(self, tokens: int) -> Tensor:
        """Return the positions [1 or B, tokens] of the newest tokens of each row. Here all rows are equally long."""
        return torch.arange(self.seen - tokens, self.seen)[None]

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing, because the constructor has allocated everything."""

    def get_seq_length(self, *args: Any) -> int:
        """Return the number of tokens read so far."""
        return self.seen

    def get_mask_sizes(self, *args: Any) -> tuple[int, int]:
        """Return (number of keys, position of the first key). transformers asks for them, but ``mask`` ignores them."""
        return self.seen, 0

    def get_max_length(self) -> int:
        """Return -1, by which transformers understands that the cache has no limit."""
        return -1

    def get_max_cache_shape(self) -> int:
        """Return -1, by which transformers understands that the cache has no limit."""
        return -1


def attention(
    module: nn.Module,
    query: Tensor,
    key: Any,
    value: Any,
    attention_mask: WindowMask | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return (attention [B, T, Hq, D] of query [B, Hq, T, D], None), as transformers' attention functions do.

    key: the cache layer, which stands in the place of all keys and computes the attention.
    value: the same cache layer.
    attention_mask: the result of ``mask``.
    scaling: the factor of a logit q.k; None: 1 / sqrt(D).
    sliding_window: how many of the last tokens the layer attends; None: all.
    softcap: the limit of a logit for models that cap logits; None: no limit.
    s_aux: the logits [Hq] of learned sinks, to which heads of some models attend beside the tokens; None: no sinks.

    Raises UsageError if the model asks for more than these arguments, such as a mask of its own, or is called outside
    kvbench.
    """
    if not isinstance(key, KvbenchLayer):
        raise UsageError("inside kvbench's attention the model can only be called by kvbench (prefill, generate)")
    unserved = [name for name in UNSERVED if kwargs.get(name) is not None]
    # a WindowMask comes from ``mask``; any other mask is a tensor that the model has built by its own rule
    has_own_mask = attention_mask is not None and not isinstance(attention_mask, WindowMask)
    if has_own_mask or unserved:
        demands = " and ".join(unserved) or "a mask of its own"
        raise UsageError(f"{type(module).__name__} asks for {demands}, which kvbench does not compute")
    if attention_mask is not None:
        sliding_window = attention_mask.size
    if scaling is None:
        # 1 / sqrt(D)
        scaling = query.shape[-1] ** -0.5
    query = scale_queries(module, query, key.newest_positions)
    # the cache holds latents, so attention runs over them: see ``models.latent``
    over_latents = expands_after_caching(module)
    if over_latents:
        query = absorb_query(module, query)
    window = sliding_window
    # a window that is longer than the text changes nothing
    if window is not None and key.seen <= window:
        window = None
    # [Hq] -> [Hq, 1, 1], to meet logits [Hq, T, L]
    sinks = s_aux.detach()[:, None, None] if s_aux is not None else None
    out = key.attend(query, LogitScale.of(scaling, softcap, sinks), window)
    if over_latents:
        out = head_outputs(module, out)
    # [B, Hq, T, D] -> [B, T, Hq, D]
    return out.transpose(1, 2), None


def sliding_window(config: Any) -> int | None:
    """Return the sliding window, in tokens, of a model whose layers all attend that window; None for other models."""
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if types is None:
        # Qwen2 has a window that it may not use
        slides = getattr(config, "use_sliding_window", True)
    else:
        slides = "sliding_attention" in types
    # a model with local layers has other layers that attend everything
    if window is None or not slides or local_layers(config):
        return None
    return int(window)


@dataclass(frozen=True)
class WindowMask:
    """The mask of a layer. It attends the last ``size`` tokens, or all tokens if ``size`` is None."""

    size: int | None

    def __getitem__(self, part: object) -> WindowMask:
        """Return the mask itself, which holds for any part of the queries and heads.

        Gemma 4 drops queries from its mask, and indexers read the mask of one head.
        """
        return self


def mask(
    *args: Any, attention_mask: Tensor | None = None, local_size: int | None = None, **kwargs: Any
) -> WindowMask | None:
    """Return the mask of a layer: its window, or None if it attends all tokens. transformers calls this function.

    attention_mask: the caller's mask of padding; None: no padding.
    local_size: the window in tokens; None: the layer attends all tokens.

    The mask is not causal, because ``attention`` itself is. Raises UsageError for padding, and for masks that are
    neither causal nor windows.
    """
    if attention_mask is not None and not bool(attention_mask.bool().all()):
        raise UsageError("kvbench reads prompts one at a time, without padding; pass input_ids without padding")
    # transformers sets use_vmap for a mask function that the model itself supplies
    if kwargs.get("use_vmap"):
        raise UsageError("this model masks its attention by a rule of its own: kvbench cannot run it")
    # attention modules with an indexer read the mask, so it cannot be None for them
    if local_size is None and indexer_reach(kwargs.get("config")) is None:
        return None
    return WindowMask(local_size)


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, mask)


@contextmanager
def attached(model: PreTrainedModel) -> Iterator[None]:
    """While the context is open, the model runs under kvbench's attention and in eval mode.

    The model's own settings come back on exit. Such contexts may be nested.
    """
    # loading tells this, too, but the user may have loaded the model without kvbench
    tell_untried()
    previous = model.config._attn_implementation
    if previous == NAME:
        # an outer context has set everything, and restores it
        yield
        return
    if not ALL_ATTENTION_FUNCTIONS[NAME].__module__.startswith("kvbench."):
        # another library has wrapped the function: kvpress does so with every function registered before its import
        ALL_ATTENTION_FUNCTIONS[NAME] = attention
    model.set_attn_implementation(NAME)
    modules = attention_modules(model)
    try:
        with evaluating(model), pass_latents_on(modules), scaled_here(modules), choosing_all(modules):
            yield
    finally:
        model.set_attn_implementation(previous)


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """While the context is open, the model is in eval mode. Each module's own mode comes back on exit."""
    # not model.train() on exit: a user may train only some of the modules
    training = [module for module in model.modules() if module.training]
    if training:
        model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def layer_hooks(model: PreTrainedModel, finished: Callable[[int, Tensor], None]) -> Iterator[None]:
    """While the context is open, call ``finished(layer, hidden)`` after the forward of each attention module.

    ``layer`` is the number of the module's layer, and ``hidden`` [B, n, d] the input of the module.
    """

    def announce(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any], output: object) -> None:
        """Pass the number and the input of an attention module to ``finished`` (a forward hook)."""
        # families differ in how their layers pass hidden states
        if "hidden_states" in kwargs:
            hidden = kwargs["hidden_states"]
        else:
            hidden = args[0]
        finished(int(module.layer_idx), hidden)  # type: ignore[arg-type]

    handles = [module.register_forward_hook(announce, with_kwargs=True) for module in attention_modules(model)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def call_hooks(model: PreTrainedModel, calls: dict[int, AttentionCall]) -> Iterator[None]:
    """While the context is open, record in ``calls``, by layer number, how each attention module is called.

    A call is recorded before the module's forward.
    """
    # the model's rotary module; None if the model rotates no keys
    rotary = next((module for module in model.modules() if hasattr(module, "inv_freq")), None)

    def note(module: nn.Module, args: object, kwargs: Mapping[str, object]) -> None:
        """Record the call of an attention module (a forward pre-hook)."""
        calls[int(module.layer_idx)] = AttentionCall(module, kwargs, rotary)  # type: ignore[arg-type]

    handles = [module.register_forward_pre_hook(note, with_kwargs=True) for module in attention_modules(model)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def token_hooks(model: PreTrainedModel, tokens_read: Callable[[int], TokensRead | None]) -> Iterator[None]:
    """While the context is open, cut the inputs of each decoder layer to the tokens that the layer reads.

    tokens_read: returns the tokens that the layer of a number reads; None: all tokens.

    Hidden states, position ids and rotations are cut, so that later layers compute fewer tokens.
    """

    def make_hook(index: int) -> Callable[..., object]:
        """Return the forward pre-hook for layer ``index``."""

        def cut_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
            """Return the layer's inputs with only the tokens that it reads; None leaves them as they are."""
            tokens = tokens_read(index)
            if tokens is None:
                return None
            return _cut_inputs(tokens, args, kwargs)

        return cut_inputs

    handles = []
    for i, layer in enumerate(decoder_layers(model)):
        handles.append(layer.register_forward_pre_hook(make_hook(i), with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _cut_inputs(
    tokens: TokensRead, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return (args, kwargs) of a decoder layer's call with only these ``tokens``."""
    cut_kwargs = dict(kwargs)
    # families differ in how their layers pass hidden states
    if "hidden_states" in kwargs:
        cut_kwargs["hidden_states"] = tokens.of_previous(kwargs["hidden_states"])
    else:
        hidden, *other_args = args
        args = (tokens.of_previous(hidden), *other_args)
    # every layer receives the whole prompt's positions, not those of the layer before
    for name in ("position_ids", "position_embeddings"):
        if kwargs.get(name) is not None:
            cut_kwargs[name] = tokens.of_prompt(kwargs[name])
    # releases before 5.4 also pass positions without a batch axis, by which Ministral scales queries
    if kwargs.get("cache_position") is not None:
        # [n] -> [1, n] -> [1, m] -> [m]
        cut_kwargs["cache_position"] = tokens.of_prompt(kwargs["cache_position"][None])[0]
    return args, cut_kwargs


@contextmanager
def mlps_in_parts(model: PreTrainedModel, size: int) -> Iterator[None]:
    """While the context is open, compute each layer's MLP over ``size`` tokens at a time, to save memory.

    The inner states of an MLP are a Llama's largest tensors. They then exist only for one part of a long prompt at a
    time. An MLP that returns more than one tensor is computed as before.
    """

    def make_forward_in_parts(forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return an MLP's forward that calls ``forward`` for ``size`` tokens at a time."""

        def forward_in_parts(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            """Return the MLP's output for hidden states [B, n, d], computed in parts if ``forward`` allows it."""
            # further arguments may have a value for each token, and would have to be cut as well
            if args or kwargs or hidden.dim() != 3 or hidden.shape[1] <= size:
                return forward(hidden, *args, **kwargs)
            return _run_in_parts(forward, hidden, size)

        return forward_in_parts

    mlps: list[nn.Module] = []
    for layer in all_layers(model):
        # a layer of LongCat has an MLP behind each of its two attention modules
        for mlp in (getattr(layer, "mlp", None), *getattr(layer, "mlps", ())):
            if isinstance(mlp, nn.Module):
                mlps.append(mlp)
    # a ``forward`` in a module's own attributes comes from another library
    former_forwards = [mlp.__dict__.get("forward") for mlp in mlps]
    for mlp in mlps:
        mlp.forward = make_forward_in_parts(mlp.forward)
    try:
        yield
    finally:
        for mlp, former in zip(mlps, former_forwards, strict=True):
            # without an attribute of its own, the module has the forward of its class again
            del mlp.forward
            if former is not None:
                mlp.forward = former


def _run_in_parts(forward: Callable[[Tensor], Any], hidden: Tensor, size: int) -> Any:
    """Return ``forward(hidden)`` of hidden states [B, n, d], computed for ``size`` tokens at a time.

    If the first part shows that ``forward`` returns more than one tensor, all tokens are computed at once.
    """
    first = forward(hidden[:, :size])
    # a mixture of experts may return router logits, too
    if not isinstance(first, Tensor):
        return forward(hidden)
    # one tensor for all parts: joining them at the end would hold the output twice
    out = first.new_empty(*hidden.shape[:2], first.shape[-1])
    out[:, :size] = first
    for start in range(size, hidden.shape[1], size):
        out[:, start : start + size] = forward(hidden[:, start : start + size])
    return out


@dataclass(frozen=True)
class TokensRead:
    """The m tokens that a layer reads, out of a prompt's n tokens.

    places: [m], the tokens' indices among those that the layer before has read; None: the layer reads the same tokens.
    positions: [m], the tokens' positions in the prompt.
    """

    places: Tensor | None
    positions: Tensor

    def of_previous(self, hidden: Tensor) -> Tensor:
        """Return the hidden states [B, m, d] of these tokens, out of the states [B, m', d] of the layer before."""
        if self.places is None:
            return hidden
        return hidden.index_select(1, self.places.to(hidden.device))

    def of_prompt(self, by_token: Any) -> Any:
        """Return the entries [B, m, ...] of these tokens out of the whole prompt's [B, n, ...].

        ``by_token`` are position ids [B, n] or rotations [B, n, D], or a tuple of such tensors.
        """
        if isinstance(by_token, tuple):
            return tuple(self.of_prompt(tensor) for tensor in by_token)
        return by_token.index_select(1, self.positions.to(by_token.device))


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return for each attention module the decoder layer that holds it, in order.

    A layer with two attention modules is listed twice.
    """
    parents: dict[nn.Module, nn.Module] = {}
    for module in model.modules():
        for child in module.children():
            parents[child] = module
    layers = []
    for attention_module in attention_modules(model):
        layer = parents[attention_module]
        # the two attention modules of a layer of LongCat lie in a list
        if isinstance(layer, nn.ModuleList):
            layer = parents[layer]
        layers.append(layer)
    return layers


def all_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the modules of all layers, also of those without attention, in order."""
    layers = decoder_layers(model)
    # the list that holds a layer with attention holds all other layers as well
    for module in model.modules():
        children = list(module.children())
        if isinstance(module, nn.ModuleList) and layers[0] in children:
            return children
    return layers


def attention_modules(model: PreTrainedModel) -> list[nn.Module]:
    """Return the attention modules that store keys and values in the cache, in layer order."""
    # layers at the end may share the keys and values of an earlier one, and layers with a state may hold none
    all_numbers = range(len(layer_types(model.config)) + sharing_layers(model.config))
    keyless = set(all_numbers).difference(key_layers(model.config))
    modules = []
    for module in model.modules():
        # the class name is compared first, because asking a module for an attribute that it lacks is slow
        if not type(module).__name__.endswith(("Attention", "MLA")):
            continue
        # an attention module has a layer number; parts of it may have similar class names, but no number
        number = getattr(module, "layer_idx", None)
        # linear attention has a similar name and a number, but its layer holds no keys
        if isinstance(number, int) and number not in keyless:
            modules.append(module)
    return sorted(modules, key=lambda module: int(module.layer_idx))  # type: ignore[arg-type]


def compressed_modules(model: PreTrainedModel) -> list[nn.Module]:
    """Return the attention modules of the layers that methods compress, in layer order: local layers are left out."""
    compressed = set(compressed_layers(model.config))
    return [module for module in attention_modules(model) if module.layer_idx in compressed]


def model_cache(config: Any, layers: Sequence[Any]) -> dict[str, HFCache]:
    """Return {name: cache}, the keyword argument that gives a model's forward pass these cache ``layers`` in order.

    config: the model's configuration, which says whether layers hold latents.
    """
    if latent_width(config):
        return named_cache(LatentCache(layers=list(layers)))
    return named_cache(HFCache(layers=list(layers)))


def cache_shape(model: PreTrainedModel) -> CacheShape:
    """Return the heads, head dimensions and bytes per number of the model's own cache, by which caches are audited."""
    return from_config(model.config).cache_shape(model.dtype.itemsize)


def synchronise(device: torch.device) -> None:
    """Wait until a CUDA device has finished its work, so that a clock read next measures that work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
