"""Presses of the package kvpress as methods, ``kvpress:NAME``: the press scores tokens, kvbench stores the best.

``kvpress:snapkv`` is SnapKVPress with its own fields as knobs, ``kvpress:adakv:snapkv`` AdaKVPress around it. In our
prefill the press sees the same data as in its own: the attention module with the arguments of its call, its input, its
keys and its values. Tokens that the press only masks or drops are really freed here.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, make_dataclass, replace
from functools import cache
from statistics import fmean
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvbench.base.errors import KvbenchError, Refused, UsageError, headline
from kvbench.base.formatting import format_size
from kvbench.base.numbers import ceil_div
from kvbench.kv import ops
from kvbench.kv.content import mark_kept_rows
from kvbench.kv.exact_attention import causal_softmax
from kvbench.kv.observation import Needs, Observation
from kvbench.kv.segment import LayerCache
from kvbench.methods.core.base import Selector
from kvbench.methods.core.contract import Capacity, Expected, top_indices
from kvbench.methods.core.kvpress_package import (
    BY_LAYER,
    MASKS,
    REMOVES,
    canonicalise_name,
    count_kept,
    find_types,
    installed_version,
    list_fields,
    shorten_name,
)
from kvbench.methods.core.statistics import at_heads
from kvbench.models.releases import CACHE_NAMES

WITH_ATTENTION = "observedattention"
"""The press that reads the whole attention matrix."""
ATTENTION_LIMIT = 4 << 30
"""The most bytes that one layer's attention matrix may take."""
LENT = ("rotary_emb", "masked_key_indices")
"""Attributes of an attention module: the first is lent to a press, and the second is what a masking press sets."""


@dataclass(frozen=True, kw_only=True)
class PressSelector(Selector):
    """A selector whose scores come from a press of kvpress. kvbench itself stores the tokens that score highest.

    compression_ratio: kvpress's own way to state the budget, the share removed, rounded as kvpress rounds.

    ``stage_class`` makes a subclass for each press and sets two attributes:

    types: the classes of the presses, the outermost first.
    names: for each of these classes, {name of a field: knob that sets the field}.
    """

    types: ClassVar[tuple[type, ...]] = ()
    names: ClassVar[tuple[Mapping[str, str], ...]] = ()

    compression_ratio: float | None = None

    def protected(self) -> tuple[int, int]:
        # the press's scores decide, and its fields may be called window_size and sink_size
        return 0, 0

    def require(self, knob: str, ok: bool, allowed: str) -> None:
        # a press has no file in conf/method to which the error could point
        if not ok:
            value = getattr(self, knob)
            raise UsageError(f"{self.id}.{knob}={value!r} is not possible: {allowed} (see run --help {self.id})")

    @property
    def kind(self) -> str:
        """The outermost press by its name in ``kvpress:NAME``, such as ``adakv``."""
        return shorten_name(self.types[0].__name__)

    def check(self) -> None:
        super().check()
        if self.compression_ratio is not None:
            self.require("compression_ratio", 0 <= self.compression_ratio < 1, "the share removed, from 0 to below 1")
            self.require_one_budget("compression_ratio")
        for names in self.names:
            for knob in names.values():
                # a stage must be hashable, and a list is not
                if isinstance(getattr(self, knob), list):
                    object.__setattr__(self, knob, tuple(getattr(self, knob)))
        try:
            # kvpress checks the fields of a press when it is made, at any share
            self.press(0.5)
        except Exception as error:
            raise UsageError(f"method.{self.id}: kvpress does not take these options: {headline(error)}") from None

    def check_layers(self, n_layers: int) -> None:
        super().check_layers(n_layers)
        if self.kind == BY_LAYER:
            ratios = self._read_layer_ratios()
            fits = len(ratios) == n_layers and all(0 <= r < 1 for r in ratios)
            self.require("compression_ratios", fits, f"a list of {n_layers} shares removed, one for each layer")

    def _read_layer_ratios(self) -> tuple[float, ...]:
        """Return the share removed from each layer under the wrapper ``BY_LAYER``, or () if none are set."""
        # only this wrapper has the field, so that the base class declares none
        return tuple(getattr(self, "compression_ratios", ()))

    def identity(self) -> dict[str, object]:
        identity = super().identity()
        identity["presses"] = [t.__name__ for t in self.types]
        identity["kvpress"] = installed_version()
        return identity

    def press(self, ratio: float) -> Any:
        """Return the press that scores: the stage's presses, one inside the other, at the share ``ratio`` removed."""
        classes = list(zip(self.types, self.names, strict=True))
        if self.kind == BY_LAYER:
            # that wrapper only hands a layer's share to the press in it, which ``budget`` does here
            classes = classes[1:]
        press: Any = None
        # from the inside out: each press is made around the previous one
        for cls, names in reversed(classes):
            settings = {name: getattr(self, knob) for name, knob in names.items()}
            if press is not None:
                settings["press"] = press
            press = cls(**settings)
        press.compression_ratio = ratio
        return press

    def capacity(self, n: int) -> Capacity:
        if self.kind == BY_LAYER and self._read_layer_ratios():
            # each layer has a budget of its own, see ``budget``; the capacity is their mean
            tokens = [count_kept(n, ratio) for ratio in self._read_layer_ratios()]
            return Capacity(round(fmean(tokens)), sinks=0, window=0)
        if self.compression_ratio is not None:
            return Capacity(count_kept(n, self.compression_ratio), sinks=0, window=0)
        return super().capacity(n)

    def budget(self, n: int, layer: int, n_layers: int) -> int:
        if layer in self.frozen_layers or self.capacity(n).tokens >= n:
            return n
        if self.kind == BY_LAYER:
            return count_kept(n, self._read_layer_ratios()[layer])
        # a press whose layers have different budgets, such as PyramidKVPress, has this method
        if hasattr(self.types[0], "get_layer_budget"):
            # the press asks the module for its layer and the number of layers
            module = SimpleNamespace(layer_idx=layer, config=SimpleNamespace(num_hidden_layers=n_layers))
            # 1 - C / n, without the half token of ``_compute_ratio``: the press rounds its sizes to the nearest number
            ratio = self.compression_ratio
            if ratio is None:
                ratio = 1 - self.capacity(n).tokens / n
            budget = self.press(ratio).get_layer_budget(module, n)
            return min(n, int(budget))
        return self.capacity(n).tokens

    def expected(self, n: int, layer: int, n_layers: int, heads: int) -> Expected | None:
        size = self.budget(n, layer, n_layers)
        # all other presses only score, and kvbench keeps the best ``size`` tokens of every head
        if size >= n or self.kind not in MASKS + REMOVES:
            return super().expected(n, layer, n_layers, heads)
        if self.kind in MASKS:
            # each head's floor(alpha C) best tokens are safe, the others compete over the heads of the layer; alpha is
            # a field of these presses, so that the base class does not declare it
            least = int(size * getattr(self, "alpha_safeguard", 0))
            most = min(n, size * heads)
            return Expected(low=(least,) * heads, high=(most,) * heads, total=size * heads)
        return self._expect_of_remover(n, size, heads)

    def _expect_of_remover(self, n: int, size: int, heads: int) -> Expected:
        """Return how many tokens of n each head holds under a press in REMOVES, at a budget of ``size`` tokens."""
        # the share removed, as the press takes it
        ratio = self._compute_ratio(n, read=n, budget=size)
        # two of these presses choose by chunks of ``chunk_length`` tokens
        length = getattr(self, "chunk_length", n)
        if self.kind == "chunk":
            # every chunk of m tokens keeps max(1, floor(m (1 - ratio))) of them
            tokens = 0
            for start in range(0, n, length):
                chunk_tokens = min(length, n - start)
                tokens += max(1, int(chunk_tokens * (1 - ratio)))
            return Expected.exactly(tokens, heads)
        if self.kind == "chunkkv" and n >= length:
            # max(1, floor(chunks (1 - ratio))) of all ceil(n / length) chunks stay
            all_chunks = ceil_div(n, length)
            staying_chunks = max(1, int(all_chunks * (1 - ratio)))
            # the last chunk, which may lack tokens, may be one of them
            missing = all_chunks * length - n
            most = staying_chunks * length
            return Expected(low=(most - missing,) * heads, high=(most,) * heads)
        return Expected.exactly(size, heads)

    def needs(self, n: int) -> Needs:
        reads_attention = any(shorten_name(t.__name__) == WITH_ATTENTION for t in self.types)
        # the attention matrix has a row for each query of the prompt
        return Needs(hidden=True, call=True, last_q=n if reads_attention else 0)

    def _compute_ratio(self, n: int, read: int, budget: int) -> float:
        """Return the compression ratio, the share removed, at which a press keeps ``budget`` tokens of a layer.

        n is the length of the prompt, and ``read`` the tokens that the layer read: fewer than n behind a stage that
        drops hidden states.
        """
        if self.compression_ratio is not None and read == n:
            return self.compression_ratio
        if budget >= read:
            return 0.0
        # half a token more than the budget: kvpress cuts the product read * (1 - ratio) to a whole number
        return 1 - (budget + 0.5) / read

    def scores(self, cache: LayerCache, obs: Observation, capacity: Capacity) -> Tensor:
        """Return the press's scores [heads, n]; of a press that masks or drops tokens, 1 for each token that it keeps.

        Raises Refused if the press fails, or if its scores have another shape or are not finite.
        """
        segment = ops.only_segment(cache)
        keys, values = segment.k[None], segment.v[None]
        if obs.call is None or obs.hidden is None:
            raise Refused(f"{self.id} reads a model's attention module, and there is none here")
        # latents are stored as one head: it gets the mean of all kv heads' scores below
        if cache.heads not in (1, keys.shape[1]):
            raise Refused(f"{self.id} scores kv heads: per=kv_head")
        scores = self._run_press(keys, values, obs)
        if scores.shape != keys.shape[:3]:
            shape, wanted = list(scores.shape), list(keys.shape[:3])
            raise Refused(f"{self.id} returns scores {shape} in layer {obs.layer}, not {wanted}")
        if not bool(scores.isfinite().all()):
            raise Refused(f"{self.id} returns scores in layer {obs.layer} that are not finite")
        return at_heads(scores[0].float(), cache.heads)

    def _run_press(self, keys: Tensor, values: Tensor, obs: Observation) -> Tensor:
        """Return the scores [1, Hk, n] of the press: its own, or 1 for the tokens that it keeps and 0 for the others.

        keys, values: [1, Hk, n, D], since a press takes a batch of prompts.
        """
        assert obs.call is not None and obs.hidden is not None
        budget = self.budget(obs.prompt_tokens, obs.layer, obs.n_layers)
        press = self.press(self._compute_ratio(obs.prompt_tokens, read=obs.n, budget=budget))
        module = obs.call.module
        attention = self._compute_attention(keys[0], obs)
        arguments = (module, obs.hidden[None], keys, values, attention, self._build_kwargs(obs))
        with self._prepare_module(module, obs.call.rotary, obs):
            if self.kind in MASKS:
                # these presses name the pairs of (head, token) that attention is to pass over
                press.compress(*arguments)
                scores = torch.ones(keys.shape[:3], device=keys.device)
                scores[module.masked_key_indices] = 0
                return scores
            if self.kind in REMOVES:
                # these presses return fewer keys and values: those that are left score 1
                new_keys, new_values = press.compress(*arguments)
                return mark_kept_rows(keys[0], values[0], new_keys[0], new_values[0])[None]
            own_scores: Tensor = press.score(*arguments)
            return own_scores

    def _build_kwargs(self, obs: Observation) -> dict[str, object]:
        """Return the keyword arguments of the attention module's call, as a press finds them in kvpress's prefill."""
        assert obs.call is not None and obs.hidden is not None
        positions = obs.token_positions(obs.hidden.device)
        kwargs: dict[str, object] = dict(obs.call.kwargs)
        # our prefill has no cache of transformers to hand on
        kwargs |= dict.fromkeys(CACHE_NAMES)
        kwargs |= {"attention_mask": None, "use_cache": True, "cache_position": positions}
        kwargs |= {"hidden_states": obs.hidden[None], "position_ids": positions[None]}
        return kwargs

    def _compute_attention(self, keys: Tensor, obs: Observation) -> Tensor | None:
        """Return the attention matrix [1, Hq, n, n] for the press WITH_ATTENTION, or None for any other press.

        Raises Refused if it would take more than ATTENTION_LIMIT bytes.
        """
        if not self.needs(obs.n).last_q:
            return None
        queries = obs.queries(obs.n)
        # Hq n^2 numbers in fp32
        size = 4 * len(queries) * obs.n**2
        if size > ATTENTION_LIMIT:
            raise Refused(f"{self.id} reads the whole attention matrix, {format_size(size)} a layer at {obs.n} tokens")
        return causal_softmax(queries, keys, obs.scale)[None]

    @contextmanager
    def _prepare_module(self, module: Any, rotary: Any, obs: Observation) -> Iterator[None]:
        """While the context is open, give the module the attributes that kvpress's own context gives it.

        On exit the attributes are as before. Random draws inside are seeded by prompt and layer, so that every run
        draws the same. Raises Refused for an error of the press.
        """
        device = next(module.parameters()).device
        before = {name: module.__dict__[name] for name in LENT if name in module.__dict__}
        if rotary is not None:
            # a plain attribute: setattr would make the rotary module a part of the model
            module.__dict__["rotary_emb"] = rotary
        devices = [device] if device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices=devices):
                torch.manual_seed(zlib.crc32(f"{obs.prompt} {obs.layer}".encode()))
                yield
        except KvbenchError:
            raise
        except Exception as error:
            raise Refused(f"{self.id} fails in layer {obs.layer}: {type(error).__name__}: {headline(error)}") from error
        finally:
            for name in LENT:
                module.__dict__.pop(name, None)
            module.__dict__.update(before)

    def pick(self, cache: LayerCache, scores: Tensor, budget: int) -> LayerCache:
        if self.kind in MASKS:
            # a head keeps all tokens that the press did not mask
            order = scores.sort(dim=-1, descending=True, stable=True).indices
            return ops.select_first(cache, order, (scores > 0).sum(dim=-1))
        if self.kind in REMOVES:
            # the press itself decides how many tokens it removes, in all heads alike
            budget = int((scores[0] > 0).sum())
            chosen = ops.select(cache, top_indices(scores, budget))
            return replace(chosen, decided=(budget,) * cache.heads)
        return ops.select(cache, top_indices(scores, budget))


def stage_class(method: str) -> type[PressSelector]:
    """Return the class of ``kvpress:NAME``, whose knobs are the fields of its presses.

    Raises UsageError for a press that kvpress lacks, or that does not run here.
    """
    # other spellings of the name share the class of the canonical name
    return _make_class(canonicalise_name(method))


@cache
def _make_class(method: str) -> type[PressSelector]:
    """Return the class of a method by its canonical name, as ``stage_class`` describes it."""
    types = find_types(method)
    # the dataclass fields of the class: (name, type, default) of each knob
    knobs: list[tuple[str, str, Any]] = []
    used_names: set[str] = set()
    # for each press, the knob that sets each of its fields (``PressSelector.names``)
    knobs_by_press: list[dict[str, str]] = []
    for press in types:
        knob_of_field: dict[str, str] = {}
        for field_name, declared, default in list_fields(press):
            # a field of an inner press that is called like one of an outer press gets a name of its own
            knob = f"press_{field_name}" if field_name in used_names else field_name
            knob_of_field[field_name] = knob
            knobs.append((knob, declared, field(default=default)))
            used_names.add(knob)
        knobs_by_press.append(knob_of_field)
    namespace = {"id": method, "types": types, "names": tuple(knobs_by_press), "__doc__": types[0].__doc__}
    cls = make_dataclass("Press", knobs, bases=(PressSelector,), namespace=namespace, frozen=True, kw_only=True)
    cls.__module__, cls.__name__, cls.__qualname__ = __name__, method, method
    # the registry imports the class from this module by its name
    globals()[method] = cls
    return cls
