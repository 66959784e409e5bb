"""Codes of a few bits packed into bytes, and the min-max quantisers of KIVI, FlexGen and Q-Hitter.

Shapes: L tokens, C channels of a token (D, or T after pruning), G elements that share one scale; ``...`` are leading
axes (heads, or rows and heads).

Layout of w bytes that hold m codes of 1, 2 or 4 bits: byte j holds codes j, j + w, j + 2w, ... from its lowest bits up.
Codes are unpacked in 8 / bits contiguous runs, never interleaved, and w = ceil(m bits / 8). Codes of 3 bits are stored
as their lower 2 bits in that layout, then their upper bit in that layout: ceil(m / 4) + ceil(m / 8) bytes, which is
3 bits a code wherever 8 divides m. Codes of 8 bits are bytes. Bits that no code fills are zero, and counted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from kvbench.base.errors import KvbenchError

BITS = (1, 2, 3, 4, 8)
SCALE_BYTES = 4  # of a group: its scale and its minimum (or zero point), fp16 each
BLOCK = 2**21  # elements dequantised together: 8 MiB in fp32 fit the last-level cache; smaller blocks cost calls

_PLANES = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 8: (8,)}


def packed_bytes(m: int, bits: int) -> int:
    """Return the bytes that hold m codes of ``bits`` bits."""
    return sum(-(-m * part // 8) for part in _parts(bits))


def run_bytes(m: int, bits: int, group: int) -> int:
    """Return the bytes of m consecutive quantised elements: packed codes, and scale and minimum of every group."""
    return packed_bytes(m, bits) + SCALE_BYTES * -(-m // group)


def pack(codes: Tensor, bits: int, dim: int = -1) -> Tensor:
    """Pack uint8 codes [..., m] below 2^bits into bytes [..., packed_bytes(m, bits)], along ``dim`` (-1, -2, ...).

    The result owns its storage. Bits above the lowest ``bits`` of a code would spill: callers keep codes in range.
    """
    m, packed, below = codes.shape[dim], [], 0  # below: the bits of a code that earlier planes hold
    for part in _parts(bits):
        per = 8 // part
        piece = codes if len(_parts(bits)) == 1 else (codes >> below) & (2**part - 1)
        width = -(-m // per)
        piece = F.pad(piece, (*[0, 0] * (-dim - 1), 0, width * per - m)).unflatten(dim, (per, width))
        # byte j = code j | code (j + w) << b | code (j + 2w) << 2b | ...
        byte = piece.select(dim - 1, 0).clone(memory_format=torch.contiguous_format)
        for i in range(1, per):
            byte |= piece.select(dim - 1, i) << (i * part)
        packed.append(byte)
        below += part
    return packed[0] if len(packed) == 1 else torch.cat(packed, dim)


def unpack(packed: Tensor, bits: int, m: int, dim: int = -1) -> Tensor:
    """Return the m codes [..., m] uint8 that ``pack`` put into bytes along ``dim``; of 8-bit codes a view."""
    if bits == 8:
        return packed
    codes, start, below = None, 0, 0
    for part in _parts(bits):
        per = 8 // part
        width = -(-m // per)
        byte = packed.narrow(dim, start, width)
        shape = list(packed.shape)
        shape[dim : packed.dim() + dim + 1] = [per, width]
        out = packed.new_empty(shape)
        for i in range(per):
            # shifted in one contiguous run, then placed: masking in short strided runs takes several times as long
            out.select(dim - 1, i).copy_((byte >> (i * part)) & (2**part - 1))
        piece = out.flatten(packed.dim() + dim, packed.dim() + dim + 1).narrow(dim, 0, m)
        codes = piece if codes is None else codes | (piece << below)
        start, below = start + width, below + part
    assert codes is not None
    return codes


class Packed(ABC):
    """Keys or values [..., L, C] held as codes.

    frozen: scales [..., H, 1, 1] of heads that were settled once, for all tokens, and are overhead, not payload.
    step: how many tokens are coded together.
    rotation: the basis [C, C'] in which values are coded, which attention enters with its query; None: their own.
    """

    frozen: Tensor | None = None
    step: int = 1
    rotation: Tensor | None = None

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """The shape [..., L, C] of the values that the codes stand for."""

    @property
    @abstractmethod
    def format(self) -> tuple[object, ...]:
        """All that must be equal for two packed tensors to be stored in one buffer."""

    @abstractmethod
    def payload(self) -> Iterator[Tensor]:
        """Yield the tensors that hold the codes and their scales."""

    @abstractmethod
    def codes_only(self) -> Iterator[Tensor]:
        """Yield those of ``payload`` that hold codes."""

    @abstractmethod
    def holding(self, tensors: Sequence[Tensor], frozen: Tensor | None) -> Self:
        """Return the same format with these tensors in the places of ``payload``, and these ``frozen`` scales."""

    @abstractmethod
    def tokens(self, start: int | None = None, stop: int | None = None) -> Self:
        """Return tokens ``start`` to ``stop`` as views; where tokens are coded together both must be borders."""

    @abstractmethod
    def flat(self) -> Self:
        """Return [..., L, C] as [H, L, C], where H joins all leading axes, of which there is at least one."""

    @abstractmethod
    def dequantise(self, dtype: torch.dtype, scratch: Tensor | None = None) -> Tensor:
        """Return the values [..., L, C] in ``dtype``, computed in fp32 and rounded once.

        ``scratch`` is fp32 memory of at least as many elements, which the result may use: callers that go block by
        block would otherwise spend most of the time on fresh memory.
        """

    def rotated(self, dtype: torch.dtype, scratch: Tensor | None = None) -> Tensor:
        """Return the values [..., L, C'] as ``dequantise`` does, in the basis of ``rotation``."""
        return self.dequantise(dtype, scratch)

    def more(self, x: Tensor, pack: Callable[[Tensor], Packed], rows: Sequence[int] | None = None) -> Packed:
        """Return new tokens x packed to stand beside these, of all rows or of ``rows``."""
        return pack(x)

    @property
    def device(self) -> torch.device:
        return next(self.payload()).device

    def __getitem__(self, index: slice | Tensor | int) -> Self:
        """Return the packed tokens of the entries ``index`` of the first leading axis; a slice gives views."""
        frozen = None if self.frozen is None else self.frozen[index]
        return self.holding([t[index] for t in self.payload()], frozen)

    def map(self, fn: Callable[[Tensor], Tensor]) -> Self:
        """Return the packed tokens with ``fn`` applied to every tensor; it must leave the axes of a group alone."""
        return self.holding([fn(t) for t in self.payload()], self.frozen)

    def of_head(self, h: int) -> Self:
        """Return the tokens of head h, which these are alone, with the scales of that head."""
        return self if self.frozen is None else self.holding(list(self.payload()), self.frozen[h : h + 1])

    def blocks(self, elements: int = BLOCK) -> Iterator[tuple[slice, slice, Self]]:
        """Yield (slice of H, slice of tokens, their packed part), each part of up to ``elements`` values.

        [..., L, C] is read as [H, L, C]. A part is never less than one ``step`` of tokens. Dense values that are
        dequantised and used part by part stay in the processor's cache, which is several times faster than all at once.
        """
        flat = self.flat()
        heads, tokens, channels = flat.shape
        span = max(min(tokens, elements // max(channels, 1)) // self.step * self.step, self.step)
        count = max(elements // max(span * channels, 1), 1)
        for h in range(0, heads, count):
            rows = slice(h, min(h + count, heads))
            for t in range(0, tokens, span):
                columns = slice(t, min(t + span, tokens))
                yield rows, columns, flat[rows].tokens(columns.start, columns.stop)


@dataclass(frozen=True)
class MinMax(Packed):
    """Quantised keys or values [..., L, C] as they are stored: value = scale * code + minimum, per group.

    ``axis="token"``: a group is ``group`` consecutive channels of one token (the last one shorter where ``group`` does
    not divide C); codes [..., L, bytes], scale and low [..., L, groups]. ``axis="channel"``: a group is ``group``
    consecutive tokens of one channel; codes [..., L / G, bytes, C], packed along tokens with channels innermost so that
    they unpack into token order; scale and low [..., L / G, C].
    ``low`` is the minimum, or under ``zero_point`` the code whose value is 0: then value = scale * (code - low).
    """

    codes: Tensor  # uint8
    scale: Tensor  # fp16
    low: Tensor  # fp16
    bits: int
    group: int
    axis: Literal["token", "channel"]
    size: int  # codes in one packed run: the channels of a token, or the tokens of a group
    zero_point: bool = False

    @property
    def shape(self) -> torch.Size:
        lead_sizes, last_size = self.codes.shape[:-1], self.codes.shape[-1]
        if self.axis == "token":
            return torch.Size((*lead_sizes, self.size))
        return torch.Size((*lead_sizes[:-2], lead_sizes[-2] * self.size, last_size))

    @property
    def step(self) -> int:  # type: ignore[override]
        return self.group if self.axis == "channel" else 1

    @property
    def format(self) -> tuple[object, ...]:
        return (self.bits, self.group, self.axis, self.size, self.zero_point, self.shape[-1])

    def payload(self) -> Iterator[Tensor]:
        yield from (self.codes, self.scale, self.low)

    def codes_only(self) -> Iterator[Tensor]:
        yield self.codes

    def holding(self, tensors: Sequence[Tensor], frozen: Tensor | None) -> Self:
        codes, scale, low = tensors
        return replace(self, codes=codes, scale=scale, low=low)

    def minimum(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the value of code 0, in the shape of ``low``, rounded to ``dtype`` once."""
        # scale * (code - zero) at code 0
        low = -self.scale.float() * self.low.float() if self.zero_point else self.low
        return low.to(dtype)

    def tokens(self, start: int | None = None, stop: int | None = None) -> Self:
        first, last, _ = slice(start, stop).indices(self.shape[-2])
        last = max(first, last)
        dim = -2
        if self.axis == "channel":
            if first % self.group or last % self.group:
                raise ValueError(f"tokens {first}..{last} are not whole groups of {self.group}")
            first, last, dim = first // self.group, last // self.group, -3
        codes = self.codes.narrow(dim, first, last - first)
        scale, low = (t.narrow(-2, first, last - first) for t in (self.scale, self.low))
        return replace(self, codes=codes, scale=scale, low=low)

    def flat(self) -> Self:
        end = -3 if self.axis == "token" else -4
        return self.holding([self.codes.flatten(0, end), self.scale.flatten(0, -3), self.low.flatten(0, -3)], None)

    def dequantise(self, dtype: torch.dtype, scratch: Tensor | None = None) -> Tensor:
        scale, low = self.scale.float(), self.minimum()

        def to_fp32(codes: Tensor) -> Tensor:
            return codes.float() if scratch is None else scratch[: codes.numel()].view(codes.shape).copy_(codes)

        if self.axis == "channel":
            x = to_fp32(unpack(self.codes, self.bits, self.size, dim=-2))
            x.mul_(scale[..., None, :]).add_(low[..., None, :])  # value = scale * code + minimum
            return x.flatten(-3, -2).to(dtype)
        x = to_fp32(unpack(self.codes, self.bits, self.size))
        full = self.size // self.group  # the last group may be shorter, and is scaled by itself
        for part, s, m in (
            (x[..., : full * self.group].unflatten(-1, (-1, self.group)), scale[..., :full], low[..., :full]),
            (x[..., full * self.group :].unsqueeze(-2), scale[..., full:], low[..., full:]),
        ):
            if part.numel():
                part.mul_(s[..., None]).add_(m[..., None])
        return x.to(dtype)


def quantise_tokens(x: Tensor, bits: int, group: int, constant_scale: float = 0.0) -> MinMax:
    """Quantise x [..., L, C] in groups of ``group`` channels of a token by min and max; the last group may be shorter.

    scale = (max - min) / (2^bits - 1) and code = round((x - min) / scale), both against the fp16 numbers that are
    stored. Then |x - value| <= max(scale / 2, 2^-11 |min|) + 2^(bits - 25), plus the rounding of fp32 sums. The second
    term is the rounding of the stored minimum (0 for fp16 input), the last that of numbers below fp16's normal range.
    A group of one value has codes 0 and scale ``constant_scale``: 0 (KIVI, arXiv 2402.02750), or 1 (FlexGen, arXiv
    2303.06865). Raises KvbenchError if values, minimum or scale are not finite in fp16.
    """
    m = x.shape[-1]
    groups = -(-m // group)
    if m < groups * group:  # repeating the last element changes no minimum or maximum
        x = torch.cat([x, x[..., -1:].expand(*x.shape[:-1], groups * group - m)], dim=-1)
    codes, scale, low = _min_max(x.float().unflatten(-1, (groups, group)), bits, -1, constant_scale)
    return MinMax(pack(codes.flatten(-2)[..., :m], bits), scale, low, bits, group, "token", m)


def quantise_channels(x: Tensor, bits: int, group: int) -> MinMax:
    """Quantise x [..., L, C] in groups of ``group`` consecutive tokens of a channel (keys of KIVI, arXiv 2402.02750).

    Arithmetic, error bound and refusals are those of ``quantise_tokens``; L must be a multiple of ``group``, C is free.
    """
    if x.shape[-2] % group:
        raise ValueError(f"{x.shape[-2]} tokens are not whole groups of {group}")
    codes, scale, low = _min_max(x.float().unflatten(-2, (x.shape[-2] // group, group)), bits, -2, 0.0)
    return MinMax(pack(codes, bits, dim=-2), scale, low, bits, group, "channel", group)


def quantise_zero_point(x: Tensor, bits: int) -> MinMax:
    """Quantise x [..., L, C], each token one group with an integer zero point (the quantiser of Q-Hitter's code).

    scale = max(1e-5, (max - min) / (2^bits - 1)); zero = round(-min / scale) and code = round(x / scale) + zero, both
    clamped to 0 ... 2^bits - 1. The clamp means that tokens whose range excludes 0 are stored badly: a constant c != 0
    comes back as nearly 0. Scale and zero are fp16. Raises KvbenchError as ``quantise_tokens`` does.
    """
    top = 2**bits - 1
    x32 = x.float()
    low, high = x32.amin(dim=-1, keepdim=True), x32.amax(dim=-1, keepdim=True)
    scale = ((high - low) / top).clamp(min=1e-5).half()
    zero = (-low / scale.float()).round().clamp(0, top)
    _check_finite(x, bits, scale, zero)
    codes = ((x32 / scale.float()).round() + zero).clamp(0, top).to(torch.uint8)
    return MinMax(pack(codes, bits), scale, zero.half(), bits, x.shape[-1], "token", x.shape[-1], zero_point=True)


def _min_max(x: Tensor, bits: int, dim: int, constant_scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes in the shape of fp32 x, and fp16 scale and minimum of its groups along ``dim``, which is dropped."""
    low, high = x.amin(dim=dim, keepdim=True), x.amax(dim=dim, keepdim=True)
    low16 = low.half()
    # from the stored minimum up, so that the largest value is reached although the minimum was rounded
    span = torch.where(high > low, high - low16.float(), 0.0).clamp(min=0.0)
    scale16 = (span / (2**bits - 1)).half()
    _check_finite(x, bits, scale16, low16)
    constant = scale16 == 0
    step = scale16.float().masked_fill(constant, torch.inf)
    # code = round((x - minimum) / scale), against the fp16 numbers that are stored
    codes = x.sub(low16).div_(step).round_().clamp_(0, 2**bits - 1).to(torch.uint8)
    return codes, scale16.masked_fill(constant, constant_scale).squeeze(dim), low16.squeeze(dim)


def _check_finite(x: Tensor, bits: int, scale: Tensor, low: Tensor) -> None:
    # one test for both: every value that the processor reads back from a GPU holds up a decode step
    if bool((scale.float() + low.float()).isfinite().all()):
        return
    if not bool(x.isfinite().all()):
        raise KvbenchError(f"cannot quantise to {bits} bits: a key or value is infinite or not a number")
    raise KvbenchError(
        f"cannot quantise to {bits} bits: a group's minimum or scale exceeds fp16 (65504), in which it is stored; "
        f"the values reach from {x.min():.4g} to {x.max():.4g}"
    )


def _parts(bits: int) -> tuple[int, ...]:
    if bits not in _PLANES:
        raise ValueError(f"codes of {bits} bits: must be one of {', '.join(map(str, BITS))}")
    return _PLANES[bits]
