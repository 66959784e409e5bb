"""A few tokens through a model of an untested family, to compare kvbench's results with the model's own."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache as HFCache

from kvbench.base.errors import UsageError
from kvbench.kv.exact_attention import attend_rows
from kvbench.models.interface import KvbenchLayer, attached, attention_modules
from kvbench.models.releases import named_cache
from kvbench.storage.roles import Rotary

TOKENS = 8
SHIFT = 5
"""Positions by which the second reading of the same tokens stands later."""


@dataclass(frozen=True)
class Probe:
    """Why cached keys cannot be rotated, and why keys and values are not projections; None where they are."""

    unrolled: str | None
    mixed: str | None


class ProbeLayer(KvbenchLayer):
    """A layer that keeps the queries, keys and values [1, H, T, D] of one reading."""

    def add(self, k: Tensor, v: Tensor) -> None:
        self.k, self.v, self.seen = k, v, k.shape[2]

    def attend(self, query: Tensor, scale: float, window: int | None) -> Tensor:
        self.query = query
        return attend_rows(query[0], self.k[0], self.v[0], scale, window)[None]


_PROBED: WeakKeyDictionary[PreTrainedModel, Probe] = WeakKeyDictionary()


def probe(model: PreTrainedModel) -> Probe:
    """Return the result of probing a model, which is done once for each model.

    Raises UsageError where the logits under kvbench's attention are not those under the model's own.
    """
    if model not in _PROBED:
        _PROBED[model] = _measure(model)
    return _PROBED[model]


def _measure(model: PreTrainedModel) -> Probe:
    ids = torch.arange(TOKENS, device=model.device) % model.config.vocab_size
    positions = torch.arange(TOKENS, device=model.device)[None]
    projected: dict[tuple[int, str], Tensor] = {}  # what k_proj and v_proj of each layer gave [1, T, H D]

    def record(key: tuple[int, str]) -> object:
        return lambda module, args, output: projected.update({key: output})

    with torch.no_grad(), attached(model), ExitStack() as stack:
        attention = model.config._attn_implementation
        model.set_attn_implementation("eager")
        try:
            own_logits = model(input_ids=ids[None], position_ids=positions, use_cache=False).logits[0]
        finally:
            model.set_attn_implementation(attention)
        later, _ = _read(model, ids, positions + SHIFT)
        for i, module in enumerate(attention_modules(model)):
            for name in ("k_proj", "v_proj"):
                if hasattr(module, name):
                    hook = getattr(module, name).register_forward_hook(record((i, name)))
                    stack.callback(hook.remove)
        first, logits = _read(model, ids, positions)
    near = 1e-3 if model.dtype == torch.float32 else 0.1
    if _distance(logits, own_logits) > near:
        raise UsageError(
            f"the model family {model.config.model_type!r} does not run in kvbench: under its attention function the "
            "logits are not the model's own"
        )
    frequencies = [m.get_buffer("inv_freq") for m in model.modules() if hasattr(m, "inv_freq")]
    rotary = Rotary(frequencies[0]) if len(frequencies) == 1 else None
    rolled = rotary is not None and all(
        _distance(rotary.turn(getattr(a, name), 0, SHIFT), getattr(b, name)) <= near
        for a, b in zip(first, later, strict=True)
        for name in ("k", "query")
    )
    linear = len(projected) == 2 * len(first)
    for (i, name), output in projected.items():
        cached = first[i].k if name == "k_proj" else first[i].v
        plain = output.unflatten(-1, (cached.shape[1], -1)).transpose(1, 2)
        if name == "k_proj" and rotary is not None:
            plain = rotary.turn(plain, 0, positions)
        linear = linear and _distance(plain, cached) <= near
    return Probe(
        None if rolled else "its keys at other positions are not its keys rotated",
        None if linear else "its cached keys and values are not what its projections give",
    )


def _read(model: PreTrainedModel, ids: Tensor, positions: Tensor) -> tuple[list[ProbeLayer], Tensor]:
    layers = [ProbeLayer() for _ in range(model.config.num_hidden_layers)]
    out = model(input_ids=ids[None], position_ids=positions, **named_cache(HFCache(layers=list(layers))))
    return layers, out.logits[0]


def _distance(a: Tensor, b: Tensor) -> float:
    """Return |a - b| / |b|, Euclidean norms."""
    b = b.float()
    return float((a.to(b.device).float() - b).norm() / b.norm().clamp_min(1e-30))
