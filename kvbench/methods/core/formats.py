"""Storage formats of inference engines as stages. A codec (``kv.coded``) stores each token of a head by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from kvbench.base.errors import UsageError
from kvbench.kv.codecs import NAMED
from kvbench.kv.coded import FROZEN_BYTES, Codec
from kvbench.kv.own_values import are_stored
from kvbench.kv.packed import Packed
from kvbench.kv.partly_packed import Residual
from kvbench.kv.rotation import ROTATIONS
from kvbench.methods.core.knobs import Rule, at_least, knob, one_of
from kvbench.methods.core.quantiser import Quantiser

ROTATE = Rule(
    "none, hadamard (plain), signed (random signs, then Hadamard) or haar (a random rotation)",
    lambda name: name in ROTATIONS,
)
"""The rule of the knob ``rotate`` of formats that rotate keys and values before they code them."""


@dataclass(frozen=True, kw_only=True)
class StorageFormat(Quantiser):
    """A stage that stores every token in a format as it enters the cache. All such stages have these knobs:

    decode: ``coded`` stores new tokens in the format before their own step reads them, as engines do. ``exact`` keeps
    all tokens after the prompt exact.
    residual: R, the number of new tokens that gather exactly before all R are stored together. 0 stores each at once.
    values: another format for values by its name, such as ``q4_0`` beside keys in q8_0. Null keeps the method's own.
    exact_layers: the numbers of layers whose tokens all stay exact.
    local: ``exact`` leaves local layers (sliding windows, chunks) exact. Null codes their tokens, too, as engines do.
    code_prefill: True lets the prompt's own attention read stored keys and values as well, as in engines that read a
    prompt in pieces.

    After a pruner, its newest ``recent`` tokens stay exact. Blocks and rotations then pad the channels that are left,
    and the padding is counted.
    """

    packs_after_step: ClassVar[bool] = False
    on_latents: ClassVar[str] = ""

    decode: str = knob("coded", one_of("coded", "exact"))
    residual: int = knob(0, at_least(0, "tokens"))
    values: str | None = knob(None, one_of(*NAMED))
    code_prefill: bool = False
    exact_layers: tuple[int, ...] = ()
    local: str | None = knob(None, one_of("exact"))

    def check(self) -> None:
        super().check()
        self.sort_layers("exact_layers")
        # under only=keys no value is coded, in this format or another
        self.require("values", self.values is None or self.only != "keys", "null where only=keys")
        # ``read`` codes the keys and values of every layer
        self.require("code_prefill", not (self.code_prefill and self.exact_layers), "false beside exact_layers")

    def check_layers(self, n_layers: int) -> None:
        self.require_layers("exact_layers", n_layers)

    @property
    def codes_local(self) -> bool:  # type: ignore[override]
        return self.local is None

    def packs_in(self, layer: int) -> bool:
        return layer not in self.exact_layers

    def codecs(self) -> tuple[Codec, Codec]:
        """Return the method's own (codec of keys, codec of values). The knob ``values`` may override the latter."""
        raise TypeError(f"{type(self).__name__} does not say how it stores tokens")

    def codec(self, half: Literal["k", "v"]) -> Codec:
        """Return the codec of keys (``k``) or of values (``v``), with the knob ``values`` applied."""
        if half == "v" and self.values:
            return NAMED[self.values]
        key_codec, value_codec = self.codecs()
        if half == "k":
            return key_codec
        return value_codec

    @property
    def partly_exact(self) -> bool:
        """True if some tokens may stay exact beside those in the format."""
        return self.decode == "exact" or self.residual > 0 or bool(self.exact_layers)

    # ``by_token`` and ``grows`` are attributes of the class elsewhere; here they follow from knobs
    @property
    def by_token(self) -> bool:  # type: ignore[override]
        return not self.partly_exact

    @property
    def grows(self) -> bool:  # type: ignore[override]
        return self.decode == "coded"

    def residuals(self) -> tuple[Residual, Residual]:
        # R tokens are stored together when R have gathered; without a residual each token is stored at once
        rule = Residual(keep=0, block=max(self.residual, 1), unit=1)
        return rule, rule

    @property
    def prefill_key(self) -> str:
        if not self.code_prefill:
            return ""
        # a codec as text states everything that decides what it stores
        key = f"{self.codec('k')} {self.codec('v')}"
        if self.only:
            key += f" only={self.only}"
        if self.local:
            key += f" local={self.local}"
        return key

    def read(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.code_prefill:
            return k, v
        # ``only`` leaves the other half exact; a model that holds latents stores no values beside them
        if self.only != "values":
            k = self.pack_keys(k).dequantise(k.dtype)
        if self.only != "keys" and are_stored(v):
            v = self.pack_values(v).dequantise(v.dtype)
        return k, v

    def check_width(self, head_dim: int) -> None:
        for half in ("k", "v"):
            # blocks and rotations fit only some numbers of channels
            allowed = self.codec(half).allowed_channels(head_dim)
            if allowed:
                raise UsageError(
                    f"method {self.id} does not fit heads of {head_dim} channels: it takes {allowed}; give another "
                    "group=, or use method=int8 or int4"
                )

    def pack_keys(self, x: torch.Tensor, frozen: torch.Tensor | None = None) -> Packed:
        return self.codec("k").pack(x, frozen)

    def pack_values(self, x: torch.Tensor, frozen: torch.Tensor | None = None) -> Packed:
        return self.codec("v").pack(x, frozen)

    def key_bytes(self, tokens: int, channels: int) -> int:
        return tokens * self.codec("k").token_bytes(channels)

    def value_bytes(self, tokens: int, channels: int) -> int:
        return tokens * self.codec("v").token_bytes(channels)

    def frozen_bytes(self, half: Literal["k", "v"]) -> int:
        # a half whose codec takes a scale from the prompt stores it
        if self.codec(half).settles:
            return FROZEN_BYTES
        return 0

    def frozen(self, half: Literal["k", "v"], t: torch.Tensor, lengths: torch.Tensor | None) -> torch.Tensor | None:
        codec = self.codec(half)
        if not codec.settles:
            return None
        # the scale belongs to the stored numbers, so it is taken after the codec's rotation
        return codec.find_settled_scales(codec.to_basis(t), lengths)
