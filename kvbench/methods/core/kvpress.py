"""Presses of the package kvpress as methods, ``kvpress:NAME``: the press scores tokens, kvbench stores what stays.

``kvpress:snapkv`` is SnapKVPress with its own fields as knobs, ``kvpress:adakv:snapkv`` AdaKVPress around it. The press
sees in our prefill what it would see in its own: the attention module with the arguments of its call, its input, its
keys and its values. What it only masks or drops is then really freed.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, make_dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvbench.base.errors import KvbenchError, Refused, UsageError, headline
from kvbench.kv import ops
from kvbench.kv.content import rows_kept
from kvbench.kv.exact_attention import causal_softmax
from kvbench.kv.observation import Needs, Observation
from kvbench.kv.segment import LayerCache
from kvbench.methods.core.base import Capacity, Expected, Selector, top_indices
from kvbench.methods.core.kvpress_package import (
    BY_LAYER,
    MASKS,
    REMOVES,
    canonical,
    fields_of,
    installed_version,
    kept,
    short,
    types_of,
)
from kvbench.methods.core.statistics import at_heads
from kvbench.models.releases import CACHE_NAMES

WITH_ATTENTION = "observedattention"
ATTENTION_LIMIT = 4 << 30  # bytes of one layer's attention matrix


@dataclass(frozen=True, kw_only=True)
class PressSelector(Selector):
    """The tokens that a press scores highest, in kvbench's storage.

    compression_ratio: kvpress's own way to state the budget, the share removed, rounded as kvpress rounds.
    """

    types: ClassVar[tuple[type, ...]] = ()
    names: ClassVar[tuple[Mapping[str, str], ...]] = ()  # for each press the knob of each of its fields

    compression_ratio: float | None = None

    def protected(self) -> tuple[int, int]:
        return 0, 0  # the press's scores decide, and its fields may be called window_size and sink_size

    def require(self, knob: str, ok: bool, allowed: str) -> None:
        if not ok:
            value = getattr(self, knob)
            raise UsageError(f"{self.id}.{knob}={value!r} is not possible: {allowed} (see run --help {self.id})")

    @property
    def kind(self) -> str:
        """The outermost press."""
        return short(self.types[0].__name__)

    def check(self) -> None:
        super().check()
        if self.compression_ratio is not None:
            self.require("compression_ratio", 0 <= self.compression_ratio < 1, "the share removed, from 0 to below 1")
            self.require_one_budget("compression_ratio")
        for knob in (k for names in self.names for k in names.values()):
            if isinstance(getattr(self, knob), list):
                object.__setattr__(self, knob, tuple(getattr(self, knob)))
        try:
            self.press(0.5)
        except Exception as error:
            raise UsageError(f"method.{self.id}: kvpress does not take these knobs: {headline(error)}") from None

    def check_layers(self, n_layers: int) -> None:
        super().check_layers(n_layers)
        if self.kind == BY_LAYER:
            ratios = self._by_layer()
            fits = len(ratios) == n_layers and all(0 <= r < 1 for r in ratios)
            self.require("compression_ratios", fits, f"a list of {n_layers} shares removed, one for each layer")

    def _by_layer(self) -> tuple[float, ...]:
        return tuple(getattr(self, "compression_ratios", ()))

    def identity(self) -> dict[str, Any]:
        presses = [t.__name__ for t in self.types]
        return {**super().identity(), "presses": presses, "kvpress": installed_version()}

    def press(self, ratio: float) -> Any:
        """Return the press that scores, with its knobs, at the share ``ratio`` removed."""
        press: Any = None
        first = int(self.kind == BY_LAYER)  # that wrapper only hands a layer's share to the press in it
        for cls, names in reversed(list(zip(self.types, self.names, strict=True))[first:]):
            settings = {name: getattr(self, knob) for name, knob in names.items()}
            press = cls(**settings) if press is None else cls(press=press, **settings)
        press.compression_ratio = ratio
        return press

    def capacity(self, n: int) -> Capacity:
        if self.kind == BY_LAYER and self._by_layer():
            tokens = [kept(n, ratio) for ratio in self._by_layer()]
            return Capacity(round(sum(tokens) / len(tokens)), 0, 0)
        if self.compression_ratio is not None:
            return Capacity(kept(n, self.compression_ratio), 0, 0)
        return super().capacity(n)

    def budget(self, n: int, layer: int, n_layers: int) -> int:
        if layer in self.frozen_layers or self.capacity(n).tokens >= n:
            return n
        if self.kind == BY_LAYER:
            return kept(n, self._by_layer()[layer])
        if hasattr(self.types[0], "get_layer_budget"):
            module = SimpleNamespace(layer_idx=layer, config=SimpleNamespace(num_hidden_layers=n_layers))
            # its sizes are rounded to the nearest number, so that the plain share is right
            ratio = self.compression_ratio
            budget = self.press(1 - self.capacity(n).tokens / n if ratio is None else ratio).get_layer_budget(module, n)
            return min(n, int(budget))
        return self.capacity(n).tokens

    def expected(self, n: int, layer: int, n_layers: int, heads: int) -> Expected | None:
        size = self.budget(n, layer, n_layers)
        if size >= n or self.kind not in MASKS + REMOVES:
            return super().expected(n, layer, n_layers, heads)
        if self.kind in MASKS:
            least = int(size * getattr(self, "alpha_safeguard", 0))
            return Expected((least,) * heads, (min(n, size * heads),) * heads, size * heads)
        ratio, length = self._ratio(n, n, size), getattr(self, "chunk_length", n)
        if self.kind == "chunk":
            sizes = (min(length, n - start) for start in range(0, n, length))
            return Expected.exactly(sum(max(1, int(m * (1 - ratio))) for m in sizes), heads)
        if self.kind == "chunkkv" and n >= length:
            chunks = max(1, int(-(-n // length) * (1 - ratio)))
            least = chunks * length - (-n % length)  # where the last, shorter chunk is one of them
            return Expected((least,) * heads, (chunks * length,) * heads)
        return Expected.exactly(size, heads)

    def needs(self, n: int) -> Needs:
        reads_all = any(short(t.__name__) == WITH_ATTENTION for t in self.types)
        return Needs(hidden=True, call=True, last_q=n if reads_all else 0)

    def _ratio(self, n: int, read: int, budget: int) -> float:
        """Return the share that the press is told, by which it keeps ``budget`` of the ``read`` tokens of a layer."""
        if self.compression_ratio is not None and read == n:
            return self.compression_ratio
        # half a token more than the budget: the product is cut to a whole number
        return 0.0 if budget >= read else 1 - (budget + 0.5) / read

    def scores(self, cache: LayerCache, obs: Observation, capacity: Capacity) -> Tensor:
        segment = ops.only_segment(cache)
        keys, values = segment.k[None], segment.v[None]
        if obs.call is None or obs.hidden is None:
            raise Refused(f"{self.id} reads a model's attention module, and there is none here")
        if cache.heads not in (1, keys.shape[1]):
            raise Refused(f"{self.id} scores kv heads: per=kv_head")
        budget = self.budget(obs.prompt_tokens, obs.layer, obs.n_layers)
        press = self.press(self._ratio(obs.prompt_tokens, obs.n, budget))
        module, kwargs = obs.call.module, self._kwargs(obs)
        given = module, obs.hidden[None], keys, values, self._attention(keys[0], obs), kwargs
        with self._lent(module, obs.call.rotary, obs):
            if self.kind in MASKS:
                press.compress(*given)
                scores = torch.ones(keys.shape[:3], device=keys.device)
                scores[module.masked_key_indices] = 0
            elif self.kind in REMOVES:
                scores = rows_kept(keys[0], values[0], *(t[0] for t in press.compress(*given)))[None]
            else:
                scores = press.score(*given)
        if scores.shape != keys.shape[:3] or not bool(scores.isfinite().all()):
            raise Refused(f"{self.id} scores layer {obs.layer} as {[*scores.shape]}, or not all by finite numbers")
        return at_heads(scores[0].float(), cache.heads)

    def _kwargs(self, obs: Observation) -> dict[str, Any]:
        assert obs.call is not None and obs.hidden is not None
        positions = obs.token_positions(obs.hidden.device)
        own = {**dict.fromkeys(CACHE_NAMES), "attention_mask": None, "use_cache": True, "cache_position": positions}
        return {**obs.call.kwargs, **own, "hidden_states": obs.hidden[None], "position_ids": positions[None]}

    def _attention(self, keys: Tensor, obs: Observation) -> Tensor | None:
        """Return the attention matrix [1, Hq, n, n] for the one press that reads it."""
        if not self.needs(obs.n).last_q:
            return None
        queries = obs.queries(obs.n)
        size = 4 * len(queries) * obs.n**2
        if size > ATTENTION_LIMIT:
            raise Refused(
                f"{self.id} reads the whole attention matrix, {size / 2**30:.0f} GiB a layer at {obs.n} tokens"
            )
        return causal_softmax(queries, keys, obs.scale)[None]

    @contextmanager
    def _lent(self, module: Any, rotary: Any, obs: Observation) -> Iterator[None]:
        """Give the module what kvpress's own context gives it, and seed the draws by prompt and layer."""
        device = next(module.parameters()).device
        before = {
            name: module.__dict__[name] for name in ("rotary_emb", "masked_key_indices") if name in module.__dict__
        }
        if rotary is not None:
            module.__dict__["rotary_emb"] = rotary  # as a plain attribute, which is no part of the model
        try:
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                torch.manual_seed(zlib.crc32(f"{obs.prompt} {obs.layer}".encode()))
                yield
        except KvbenchError:
            raise
        except Exception as error:
            raise Refused(f"{self.id} fails in layer {obs.layer}: {type(error).__name__}: {headline(error)}") from error
        finally:
            for name in ("rotary_emb", "masked_key_indices"):
                module.__dict__.pop(name, None)
            module.__dict__.update(before)

    def pick(self, cache: LayerCache, scores: Tensor, budget: int) -> LayerCache:
        if self.kind in MASKS:
            order = scores.sort(dim=-1, descending=True, stable=True).indices
            return ops.select_first(cache, order, (scores > 0).sum(dim=-1))
        if self.kind in REMOVES:
            budget = int((scores[0] > 0).sum())
        chosen = ops.select(cache, top_indices(scores, budget))
        return replace(chosen, decided=(budget,) * cache.heads) if self.kind in REMOVES else chosen


@cache
def stage_class(method: str) -> type[PressSelector]:
    """Return the class of ``kvpress:NAME``, whose knobs are the fields of its presses."""
    if method != canonical(method):
        return stage_class(canonical(method))
    types = types_of(method)
    knobs: list[tuple[str, str, Any]] = []
    names = []
    for press in types:
        own = {}
        for name, declared, default in fields_of(press):
            own[name] = f"press_{name}" if name in (taken for taken, *_ in knobs) else name
            knobs.append((own[name], declared, field(default=default)))
        names.append(own)
    namespace = {"id": method, "types": types, "names": tuple(names), "__doc__": types[0].__doc__}
    cls = make_dataclass("Press", knobs, bases=(PressSelector,), namespace=namespace, frozen=True, kw_only=True)
    cls.__module__, cls.__name__, cls.__qualname__ = __name__, method, method
    globals()[method] = cls  # where the registry looks for it
    return cls
