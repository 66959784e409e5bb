"""How far the next-token distributions of compressed caches are from the full cache's, position by position."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from kvbench.base.errors import UsageError
from kvbench.kv.segment import Segment
from kvbench.methods.core.prompt_cache import Cache

BLOCK = 64
"""Positions compared at a time: their distributions in fp64 take 64 MiB at 128k tokens of vocabulary."""


@dataclass(frozen=True)
class Divergence:
    """The distributions ``q`` of one row beside the full cache's ``p``, at each of T scored positions.

    kl: [T] fp64, ``sum_v p(v) (ln p(v) - ln q(v))`` in nats.
    log_ratio: [T] fp64, ``ln p(y) - ln q(y)`` of the true next token y.
    shift: [T] fp64, ``q(y) - p(y)``.
    same: [T] bool, whether both have the same first choice; of equals the lower id counts.
    """

    kl: Tensor
    log_ratio: Tensor
    shift: Tensor
    same: Tensor

    @classmethod
    def empty(cls, tokens: int) -> Divergence:
        """Return room for so many positions, which ``put`` fills.

        Results of single steps, kept between the logits of one step and the next, would split the heap: each step's
        logits would then need memory of their own.
        """
        kl, log_ratio, shift = torch.empty(3, tokens, dtype=torch.float64)
        return cls(kl, log_ratio, shift, torch.empty(tokens, dtype=torch.bool))

    def put(self, start: int, part: Divergence) -> None:
        """Write the positions of ``part`` behind the first ``start``."""
        for name in self.__dataclass_fields__:
            values = getattr(part, name)
            getattr(self, name)[start : start + len(values)] = values

    @classmethod
    def joined(cls, parts: Sequence[Divergence]) -> Divergence:
        """Return the positions of all parts, one after the other."""
        names = cls.__dataclass_fields__
        return cls(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})


def compare(full: Tensor, rows: Tensor, targets: Tensor) -> list[Divergence]:
    """Return the divergence of each row's logits [B, T, V] from the full cache's [T, V]; ``targets`` [T] are true.

    With ``x = z_q - z_p`` and ``m = sum_v p(v) x(v)``, ``KL = ln sum_v p(v) exp(x(v) - m)``: the first-order terms of
    the definition cancel before they are rounded, so that equal logits give 0 and close ones no negative values.
    """
    starts = range(0, len(targets), BLOCK)
    blocks = [_compare_block(full[i : i + BLOCK], rows[:, i : i + BLOCK], targets[i : i + BLOCK]) for i in starts]
    return [Divergence.joined(parts) for parts in zip(*blocks, strict=True)]


def _compare_block(full: Tensor, rows: Tensor, targets: Tensor) -> list[Divergence]:
    logits, y = full.double(), targets[:, None]
    p, masked = logits.softmax(dim=-1), logits.isneginf()  # models mask ids that pad their vocabulary
    p_true, choice = p.gather(1, y)[:, 0], full.argmax(dim=-1)
    compared = []
    for row in rows:
        x = row.double() - logits
        if masked.any():
            x.masked_fill_(masked & row.isneginf(), 0)
        mean = (p * x).sum(dim=-1)
        x_true = x.gather(1, y)[:, 0]
        kl = (p * x.sub_(mean[:, None]).expm1_()).sum(dim=-1).log1p()
        # ln p(y) - ln q(y) = ln sum_v p(v) exp(x(v)) - x(y)
        log_ratio = kl + mean - x_true
        values = (kl, log_ratio, p_true * (-log_ratio).expm1(), row.argmax(dim=-1) == choice)
        compared.append(Divergence(*(v.cpu() for v in values)))
    return compared


def nudged(cache: Cache) -> Cache:
    """Return a full cache of which one element of each key of the first layer is moved by one unit in the last place.

    Its divergence is what rounding alone does to this model: the floor below which divergences say nothing.
    """
    first, *others = cache.layers
    segment = first.segments[0]
    k = segment.k.clone()
    k[..., 0] = torch.nextafter(k[..., 0], torch.full_like(k[..., 0], torch.inf))
    moved = replace(first, segments=(replace(segment, k=k), *first.segments[1:]))
    return replace(cache, layers=(moved, *others))


def with_one_layer(full: Cache, cache: Cache, layer: int) -> Cache:
    """Return the full cache with one layer as another cache of the same prompt holds it; new tokens stay exact.

    Raises UsageError for a method that does more than change what the layers of a prompt hold.
    """
    chain = cache.chain
    if chain.adaptation or chain.masks or chain.lowrank or chain.sharer or chain.hidden:
        raise UsageError(
            f"method {chain.name} changes more than what each layer holds: its layers cannot be told apart"
        )
    segments = tuple(_exact(s, chain.name) for s in cache.layers[layer].segments)
    layers = [*full.layers]
    layers[layer] = replace(cache.layers[layer], segments=segments)
    return replace(full, layers=tuple(layers))


def _exact(segment: Segment, name: str) -> Segment:
    """Return a segment with its packed tokens as they are read."""
    codes = segment.codes
    if codes is None:
        return segment
    if segment.lengths is not None or segment.key_channels is not None or segment.value_channels is not None:
        raise UsageError(f"method {name} packs tokens of ragged heads or thin keys: its layers cannot be told apart")
    k, v = (
        exact if packed is None else torch.cat([packed.dequantise(exact.dtype), exact], dim=1)
        for packed, exact in ((codes.k, segment.k), (codes.v, segment.v))
    )
    return replace(segment, k=k, v=v, codes=None)


@contextmanager
def exact_head(model: PreTrainedModel) -> Iterator[None]:
    """Compute the model's logits in fp32, whatever its dtype: rounded to bf16, they alone diverge by 1e-3 nats."""
    head = model.get_output_embeddings()
    if model.dtype == torch.float32 or not isinstance(head, torch.nn.Linear):
        yield
        return
    weight = head.weight.float()
    bias = None if head.bias is None else head.bias.float()
    forward = head.forward
    head.forward = lambda input: functional.linear(input.float(), weight, bias)  # type: ignore[method-assign]
    try:
        yield
    finally:
        head.forward = forward  # type: ignore[method-assign]
