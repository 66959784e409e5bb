"""Compare the next-token distributions of compressed caches with the full cache's, position by position."""

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
from kvbench.methods.core.prompt_cache import PromptCache

BLOCK = 64
"""Positions compared at a time. Their fp64 distributions take 64 MiB at a vocabulary of 128k tokens."""


@dataclass(frozen=True)
class Divergence:
    """The distributions ``q`` of one row compared with the full cache's ``p``, at each of T scored positions.

    kl: [T] fp64, ``sum_v p(v) (ln p(v) - ln q(v))`` in nats.
    log_ratio: [T] fp64, ``ln p(y) - ln q(y)`` of the true next token y.
    shift: [T] fp64, ``q(y) - p(y)``.
    same: [T] bool, True if p and q have the same first choice. Among equal logits the lowest id is the choice.
    """

    kl: Tensor
    log_ratio: Tensor
    shift: Tensor
    same: Tensor

    @classmethod
    def empty(cls, tokens: int) -> Divergence:
        """Return room for ``tokens`` positions. ``put`` fills it.

        The room is allocated once, because small tensors that are created between two steps and kept would split the
        heap. The next step's logits could then not reuse the memory of the previous step's logits.
        """
        kl, log_ratio, shift = torch.empty(3, tokens, dtype=torch.float64)
        same = torch.empty(tokens, dtype=torch.bool)
        return cls(kl=kl, log_ratio=log_ratio, shift=shift, same=same)

    def put(self, start: int, part: Divergence) -> None:
        """Write the values of ``part`` for the positions from ``start`` on."""
        end = start + len(part.kl)
        self.kl[start:end] = part.kl
        self.log_ratio[start:end] = part.log_ratio
        self.shift[start:end] = part.shift
        self.same[start:end] = part.same

    @classmethod
    def joined(cls, parts: Sequence[Divergence]) -> Divergence:
        """Return one divergence with the positions of all parts, in order."""
        return cls(
            kl=torch.cat([part.kl for part in parts]),
            log_ratio=torch.cat([part.log_ratio for part in parts]),
            shift=torch.cat([part.shift for part in parts]),
            same=torch.cat([part.same for part in parts]),
        )


def compare_logits(full: Tensor, rows: Tensor, targets: Tensor) -> list[Divergence]:
    """Return the divergence of each row's logits [B, T, V] from the full cache's logits [T, V].

    ``targets`` [T] are the true next tokens.

    With ``x = z_q - z_p`` and ``m = sum_v p(v) x(v)``, ``KL = ln sum_v p(v) exp(x(v) - m)``. In this form the
    first-order terms of the definition cancel before they are rounded. Equal logits give 0, and close logits no
    negative values.
    """
    parts_by_row: list[list[Divergence]] = [[] for _ in rows]
    for start in range(0, len(targets), BLOCK):
        block = slice(start, start + BLOCK)
        compared_rows = _compare_block(full[block], rows[:, block], targets[block])
        for parts, compared in zip(parts_by_row, compared_rows, strict=True):
            parts.append(compared)
    return [Divergence.joined(parts) for parts in parts_by_row]


def _compare_block(full: Tensor, rows: Tensor, targets: Tensor) -> list[Divergence]:
    """Compare the rows of one block of t <= BLOCK positions with the full cache. Return a divergence for each row.

    full: [t, V], the full cache's logits.
    rows: [B, t, V], the logits to compare.
    targets: [t], the true next tokens.
    """
    logits = full.double()
    y = targets[:, None]
    p = logits.softmax(dim=-1)
    # models mask the ids that pad their vocabulary by -inf
    masked = logits.isneginf()
    p_true = p.gather(1, y)[:, 0]
    choice = full.argmax(dim=-1)
    compared = []
    for row in rows:
        # x = z_q - z_p; ids masked in both have p(v) = 0, but -inf - -inf would be nan, so their x is set to 0
        x = row.double() - logits
        if masked.any():
            x.masked_fill_(masked & row.isneginf(), 0)
        # m = sum_v p(v) x(v)
        mean = (p * x).sum(dim=-1)
        x_true = x.gather(1, y)[:, 0]
        # KL = ln (1 + sum_v p(v) (exp(x(v) - m) - 1)), as p sums to 1; x is overwritten to save memory
        kl = (p * x.sub_(mean[:, None]).expm1_()).sum(dim=-1).log1p()
        # ln p(y) - ln q(y) = ln sum_v p(v) exp(x(v)) - x(y)
        log_ratio = kl + mean - x_true
        # q(y) - p(y) = p(y) (q(y) / p(y) - 1)
        shift = p_true * (-log_ratio).expm1()
        same = row.argmax(dim=-1) == choice
        compared.append(Divergence(kl=kl.cpu(), log_ratio=log_ratio.cpu(), shift=shift.cpu(), same=same.cpu()))
    return compared


def nudge_cache(cache: PromptCache) -> PromptCache:
    """Return a full cache in which one element of each of the first layer's keys is moved by one rounding unit.

    The divergence of this cache is the effect of rounding alone on this model. It is the floor of all divergences:
    smaller ones mean nothing.
    """
    first_layer = cache.layers[0]
    segment = first_layer.segments[0]
    k = segment.k.clone()
    # the next number of the dtype towards +inf
    k[..., 0] = torch.nextafter(k[..., 0], torch.full_like(k[..., 0], torch.inf))
    segments = list(first_layer.segments)
    segments[0] = replace(segment, k=k)
    layers = list(cache.layers)
    layers[0] = replace(first_layer, segments=tuple(segments))
    return replace(cache, layers=tuple(layers))


def replace_layer(full: PromptCache, cache: PromptCache, layer: int) -> PromptCache:
    """Return the full cache with layer ``layer`` taken from ``cache``, a compressed cache of the same prompt.

    Tokens that the result reads later stay exact. Raises UsageError for a method that changes more than the keys and
    values of the prompt's layers.
    """
    chain = cache.chain
    changes_attention = chain.masks or chain.sharer
    changes_model = chain.adaptation or chain.lowrank
    # a stage that drops hidden states changes what later layers read
    if changes_attention or changes_model or chain.hidden:
        raise UsageError(
            f"method {chain.name} changes more than what each layer holds: its layers cannot be told apart"
        )
    segments = tuple(_unpack_segment(segment, chain.name) for segment in cache.layers[layer].segments)
    layers = list(full.layers)
    layers[layer] = replace(cache.layers[layer], segments=segments)
    return replace(full, layers=tuple(layers))


def _unpack_segment(segment: Segment, name: str) -> Segment:
    """Return a segment with its packed tokens made exact: they get the numbers that attention reads from the codes.

    Raises UsageError with the method's ``name`` for ragged heads, and for keys or values without all channels.
    """
    codes = segment.codes
    if codes is None:
        return segment
    if segment.lengths is not None or segment.key_channels is not None or segment.value_channels is not None:
        raise UsageError(
            f"method {name} quantises tokens of ragged heads or thin keys: its layers cannot be told apart"
        )
    # packed tokens are the older ones, so they come first
    k = torch.cat([codes.k.dequantise(segment.k.dtype), segment.k], dim=1)
    v = torch.cat([codes.v.dequantise(segment.v.dtype), segment.v], dim=1)
    return replace(segment, k=k, v=v, codes=None)


@contextmanager
def exact_head(model: PreTrainedModel) -> Iterator[None]:
    """While the context is open, compute the model's logits in fp32, whatever its dtype.

    Rounding logits to bf16 alone costs 1e-3 nats.
    """
    head = model.get_output_embeddings()
    if model.dtype == torch.float32 or not isinstance(head, torch.nn.Linear):
        yield
        return
    weight = head.weight.float()
    bias: Tensor | None = head.bias
    if bias is not None:
        bias = bias.float()
    forward = head.forward

    def compute_logits(input: Tensor) -> Tensor:
        """Return the logits of hidden states in fp32."""
        return functional.linear(input.float(), weight, bias)

    head.forward = compute_logits  # type: ignore[method-assign]
    try:
        yield
    finally:
        head.forward = forward  # type: ignore[method-assign]
