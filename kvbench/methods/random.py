"""Random selection: the control that a method must beat to show that its scores mean something.

It has no paper of its own. The same control is RandomPress in https://github.com/NVIDIA/kvpress.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import ClassVar

import torch

from kvbench.base.errors import Refused
from kvbench.kv.observation import Observation
from kvbench.kv.ops import only_segment
from kvbench.kv.segment import LayerCache
from kvbench.methods.core.base import Modifier, Selector
from kvbench.methods.core.contract import Capacity
from kvbench.methods.core.knobs import at_least, knob


@dataclass(frozen=True, kw_only=True)
class Random(Selector):
    """Score = uniform noise per head and token: C tokens drawn without replacement.

    The draw depends on (seed, prompt, layer) alone. It is equal between runs and devices, and different between prompts
    and layers. A larger budget keeps all tokens of a smaller one.

    keep_window: how many last tokens of the prompt always stay, within the budget, also while decoding. It is the
    control for methods that protect a window.
    keep_prompt: True keeps the whole prompt, and ``decode_budget`` alone limits the tokens. At each choice while
    decoding, tokens of the answer are drawn for the part of the budget that the prompt leaves.
    """

    id: ClassVar[str] = "random"

    seed: int = knob(0, at_least(0))
    keep_window: int | None = knob(None, at_least(0, "tokens", null=True))
    keep_prompt: bool | None = None

    def check(self) -> None:
        # a default that the user writes out becomes None, so that it does not change the identity; a frozen dataclass
        # can set its own fields only by object.__setattr__
        if not self.keep_window or self.keep_prompt:
            # a prompt that stays whole keeps its last tokens anyway
            object.__setattr__(self, "keep_window", None)
        if not self.keep_prompt:
            object.__setattr__(self, "keep_prompt", None)
        super().check()
        if self.keep_prompt:
            # under decode_ratio a prompt alone would exceed the budget at first
            self.require("keep_prompt", self.decode_budget is not None, "given together with decode_budget")
            self.require_one_budget("keep_prompt")

    def window_size(self) -> int:
        return self.keep_window or 0

    def capacity(self, n: int) -> Capacity:
        if self.keep_prompt:
            return Capacity(tokens=n, sinks=0, window=0)
        return super().capacity(n)

    def while_decoding(self) -> Selector:
        # the copy has no ``decode_budget``, and ``check`` refuses keep_prompt without one
        without_prompt = replace(self, keep_prompt=None)
        # the base class's method, because this one would call itself
        plain = super(Random, without_prompt).while_decoding()
        if not self.keep_prompt and not self.keep_window:
            return plain
        # the same fields, in a class that also protects tokens of the prompt
        values = {f.name: getattr(plain, f.name) for f in fields(plain)}
        return _RandomAgain(**values, whole_prompt=bool(self.keep_prompt))

    def choose(self, cache: LayerCache, obs: Observation, modifiers: Sequence[Modifier]) -> LayerCache:
        if self.keep_prompt and self.decode_budget is not None and obs.prompt_tokens >= self.decode_budget:
            raise Refused(
                f"{self.id}: keep_prompt=true keeps the whole prompt of {obs.prompt_tokens} tokens, and "
                f"decode_budget={self.decode_budget} leaves no token for the answer: give a larger decode_budget"
            )
        return super().choose(cache, obs, modifiers)

    def scores(self, cache: LayerCache, obs: Observation, capacity: Capacity) -> torch.Tensor:
        # the seed is hashed, because the numbers of neighbouring seeds start alike
        digest = hashlib.blake2b(f"{self.seed}/{obs.prompt}/{obs.layer}".encode(), digest_size=4).digest()
        # the noise is drawn on the CPU, because devices draw differently
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
        # score[h, j] ~ U(0, 1): the C largest are C tokens without replacement
        noise = torch.rand(cache.heads, obs.n, generator=generator)
        return noise.to(cache.segments[0].k.device)


@dataclass(frozen=True, kw_only=True)
class _RandomAgain(Random):
    """The control as it chooses again while decoding, with protected tokens of the prompt among the tokens held.

    whole_prompt: True protects every token of the prompt, False its last ``keep_window``.
    """

    whole_prompt: bool = field(default=False, metadata={"knob": False})

    def window_size(self) -> int:
        # a selector's window are the newest tokens held, and none of these is protected here
        return 0

    def scores(self, cache: LayerCache, obs: Observation, capacity: Capacity) -> torch.Tensor:
        noise = super().scores(cache, obs, capacity)
        # the window here is that of the prompt: its last ``keep_window`` tokens
        window = self.keep_window or 0
        if capacity.tokens <= window:
            # a share of all tokens may be too small for the window, which then gets half of it, as after the prompt
            window = capacity.tokens // 2
        first_protected = 0 if self.whole_prompt else cache.prompt_tokens - window
        positions = only_segment(cache).positions
        is_protected = (positions >= first_protected) & (positions < cache.prompt_tokens)
        # a token at +inf always stays
        return noise.masked_fill(is_protected, torch.inf)
