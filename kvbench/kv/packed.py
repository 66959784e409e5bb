"""Codes of a few bits packed into bytes, and the min-max quantisers of KIVI, FlexGen and Q-Hitter.

Shapes: L tokens, C channels of a token (D, or T after pruning), G elements that share one scale, m codes of 1 to 8
bits. ``...`` are leading axes (heads, or rows and heads).

``pack`` lays out m codes in one of two ways. Bits that hold no code are zero, and byte counts include them.

``runs`` is the layout of the quantisers below. Codes of 1, 2, 4 or 8 bits take w = ceil(m bits / 8) bytes. Byte j
holds codes j, j + w, j + 2w, ... from its lowest bits up. The codes unpack into 8 / bits contiguous runs and are never
interleaved. Codes of other widths are cut into planes of 4, 2 and 1 bits. The plane of the lowest bits comes first.
Codes of 3 bits take ceil(m / 4) + ceil(m / 8) bytes: 3 bits a code wherever 8 divides m.

``stream`` is the layout of vLLM and SGLang (``kvbench.kv.codecs``). All codes are one number with the first code in its
lowest bits. The number is stored as ceil(m bits / 8) little-endian bytes. Codes of 4 bits are pairs of nibbles, and
eight codes of 3 bits are 24 bits.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from kvbench.base.errors import KvbenchError
from kvbench.base.numbers import ceil_div

Layout = Literal["runs", "stream"]

BITS = (1, 2, 3, 4, 8)
"""The widths of codes with which methods use the quantisers below. GPU kernels read these widths."""
SCALE_BYTES = 4
"""The bytes of a group's scale and minimum (or zero point), which are stored in fp16 each."""
BLOCK = {"cpu": 2**21, "cuda": 2**26}
"""The number of elements that are dequantised together, by the type of device.

On a CPU, their 8 MiB of fp32 fit the last-level cache. A GPU launches a call for longer than it computes small blocks.
"""


def packed_bytes(m: int, bits: int, layout: Layout = "runs") -> int:
    """Return how many bytes ``pack`` needs for m codes of ``bits`` bits, the padding of incomplete bytes included.

    10 codes of 3 bits take 3 + 2 bytes as ``runs``, and 4 as ``stream``. Raises ValueError unless ``bits`` is 1 to 8.
    """
    # a plane of ``width`` bits takes ceil(m * width / 8) bytes
    return sum(ceil_div(m * width, 8) for width in _list_plane_widths(bits, layout))


def run_bytes(m: int, bits: int, group: int) -> int:
    """Return the bytes of m consecutive quantised elements: their packed codes, and each group's scale and minimum."""
    return packed_bytes(m, bits) + SCALE_BYTES * ceil_div(m, group)


def pack(codes: Tensor, bits: int, dim: int = -1, layout: Layout = "runs") -> Tensor:
    """Pack codes [..., m] below 2^bits along ``dim`` (-1, -2, ...) into uint8 [..., packed_bytes(m, bits, layout)].

    Codes are whole numbers of any dtype. The result owns its storage. A code of 2^bits or more would spill into its
    neighbour: callers keep codes in range. Raises ValueError unless ``bits`` is 1 to 8.
    """
    widths = _list_plane_widths(bits, layout)
    codes = codes.to(torch.uint8)
    if len(widths) == 1:
        return _pack_plane(codes, bits, dim, layout)
    planes = []
    first_bit = 0  # the next plane begins at this bit of each code
    for width in widths:
        plane = (codes >> first_bit) & (2**width - 1)
        planes.append(_pack_plane(plane, width, dim, layout))
        first_bit += width
    return torch.cat(planes, dim)


def unpack(packed: Tensor, bits: int, m: int, dim: int = -1, layout: Layout = "runs") -> Tensor:
    """Return the m codes [..., m] uint8 that ``pack`` put into bytes along ``dim``. 8-bit codes are returned as a view.

    Raises ValueError unless ``bits`` is 1 to 8.
    """
    if bits == 8:
        return packed
    codes: Tensor | None = None
    # the next plane begins at ``first_byte``, and holds each code's bits from ``first_bit`` on
    first_byte, first_bit = 0, 0
    for width in _list_plane_widths(bits, layout):
        plane_bytes = ceil_div(m * width, 8)
        plane = _unpack_plane(packed.narrow(dim, first_byte, plane_bytes), width, m, dim, layout)
        if codes is None:
            codes = plane
        else:
            codes = codes | (plane << first_bit)
        first_byte += plane_bytes
        first_bit += width
    assert codes is not None
    return codes


def _list_plane_widths(bits: int, layout: Layout) -> tuple[int, ...]:
    """Return the width in bits of each plane of the layout, the plane of the lowest bits first.

    Raises ValueError unless ``bits`` is 1 to 8.
    """
    if not 1 <= bits <= 8:
        raise ValueError(f"codes of {bits} bits: must be 1 to 8")
    if layout == "stream":
        return (bits,)
    # a byte of a run holds whole codes only: other widths are split into powers of two (3 = 1 + 2, 7 = 1 + 2 + 4)
    return tuple(power for power in (8, 4, 2, 1) if bits & power)


def _pack_plane(codes: Tensor, bits: int, dim: int, layout: Layout) -> Tensor:
    """Pack one plane of uint8 codes [..., m] into bytes [..., ceil(m bits / 8)] along ``dim``."""
    m = codes.shape[dim]
    unit_codes, unit_bytes = _find_unit(bits)
    units = ceil_div(m, unit_codes)
    shape = list(codes.shape)
    shape[dim] = units * unit_bytes
    packed = codes.new_zeros(shape)
    # byte_at[j] is a view of byte j of every unit, code_at[i] of code i: all units are packed at once
    byte_at = _split_into_places(packed, unit_bytes, dim, layout)
    code_at = _split_into_places(_pad_end(codes, units * unit_codes, dim), unit_codes, dim, layout)
    for i, code in enumerate(code_at):
        # code i of a unit begins at bit i * bits of the unit's bytes; uint8 drops the bits that a left shift pushes out
        byte, shift = divmod(i * bits, 8)
        byte_at[byte].bitwise_or_(code << shift)
        if shift + bits > 8:
            byte_at[byte + 1].bitwise_or_(code >> (8 - shift))
    needed = ceil_div(m * bits, 8)
    if needed == packed.shape[dim]:
        return packed
    # a stream's last unit may end in bytes of padding alone; the clone frees them, a view would not
    return packed.narrow(dim, 0, needed).clone(memory_format=torch.contiguous_format)


def _unpack_plane(packed: Tensor, bits: int, m: int, dim: int, layout: Layout) -> Tensor:
    """Return the m codes [..., m] uint8 that ``_pack_plane`` put into bytes along ``dim``."""
    unit_codes, unit_bytes = _find_unit(bits)
    units = ceil_div(m, unit_codes)
    byte_at = _split_into_places(_pad_end(packed, units * unit_bytes, dim), unit_bytes, dim, layout)
    shape = list(packed.shape)
    shape[dim] = units * unit_codes
    codes = packed.new_empty(shape)
    # the places are views of ``codes``: writing to them fills it
    for i, place in enumerate(_split_into_places(codes, unit_codes, dim, layout)):
        # code i of a unit begins at bit i * bits of the unit's bytes, and may end in the next byte
        byte, shift = divmod(i * bits, 8)
        code = byte_at[byte] >> shift
        if shift + bits > 8:
            code |= byte_at[byte + 1] << (8 - shift)
        # mask in one contiguous run, then copy: masking in short strided runs takes several times as long
        place.copy_(code & (2**bits - 1))
    return codes.narrow(dim, 0, m)


def _find_unit(bits: int) -> tuple[int, int]:
    """Return (codes, bytes) of the smallest unit that fills whole bytes: (2, 1) for 4 bits, (8, 3) for 3 bits."""
    common = math.gcd(bits, 8)
    return 8 // common, bits // common


def _split_into_places(t: Tensor, per_unit: int, dim: int, layout: Layout) -> tuple[Tensor, ...]:
    """Return one view [..., units] along ``dim`` for each place in a unit: all first elements, all second ones, ...

    t [..., units * per_unit] holds codes or bytes. In a stream the elements of one unit are neighbours. In runs the
    first elements of all units come first, then all second elements.
    """
    units = t.shape[dim] // per_unit
    if layout == "runs":
        return t.unflatten(dim, (per_unit, units)).unbind(dim - 1)
    return t.unflatten(dim, (units, per_unit)).unbind(dim)


def _pad_end(t: Tensor, size: int, dim: int) -> Tensor:
    """Return t with zeros at the end of its axis ``dim``, which then has ``size`` elements. ``dim`` is negative."""
    missing = size - t.shape[dim]
    if missing == 0:
        return t
    # F.pad takes (before, after) pairs, beginning with the last axis
    padding = [0, 0] * -dim
    padding[-1] = missing
    return F.pad(t, padding)


@dataclass(frozen=True, kw_only=True)
class Levels:
    """Packed numbers in the form that most formats have: value = scale * table[code] + low.

    Steps are single tokens, or groups of tokens that are coded together. A run is the codes that are packed together.

    codes: [..., steps, bytes] uint8, or [..., steps, bytes, C] if a run holds the tokens of a channel.
    scale: [..., steps, scales] fp32 or fp16.
    bits: the width of a code.
    run: the number of codes in a run.
    group: the number of channels that share one scale, unless ``by_channel``.
    channels: C.
    layout: the order of a run's codes in bytes (see ``pack``).
    by_channel: True if a run holds the tokens of a channel, and each channel has a scale. False if a run holds channels
    of a token, and each ``group`` of channels has a scale.
    low: [..., steps, scales] in the type of ``scale``; None stands for 0.
    table: [2^bits] fp32, the number of each code; None if a code is its own number.
    normed: True if a token's numbers are divided by their Euclidean norm before they are scaled.
    """

    codes: Tensor
    scale: Tensor
    bits: int
    run: int
    group: int
    channels: int
    layout: Layout = "runs"
    by_channel: bool = False
    low: Tensor | None = None
    table: Tensor | None = None
    normed: bool = False


@functools.cache
def signed_levels(bits: int, offset: bool, device: torch.device) -> Tensor:
    """Return the number [2^bits] fp32 of each code of a signed integer.

    offset: True if code 2^(bits-1) stands for 0, False if codes are two's complement.
    """
    codes = torch.arange(2**bits, device=device)
    half = 2 ** (bits - 1)
    if offset:
        return (codes - half).float()
    return torch.where(codes < half, codes, codes - 2 * half).float()


def defined_together(cls: type, *methods: str) -> bool:
    """Return True if ``cls`` takes all these ``methods`` from one class, itself or one that it derives from.

    A subclass that unpacks in another way, but inherits ``levels``, would be read as its parent.
    """
    definers = set()
    for method in methods:
        # Python calls the method of the first class in ``__mro__`` that defines it
        definers.add(next(base for base in cls.__mro__ if method in vars(base)))
    return len(definers) == 1


class Packed(ABC):
    """Keys or values [..., L, C] held as codes.

    frozen: scales [..., H, 1, 1] that heads settled once for all tokens; None if there are none. They count as
    overhead, not payload.
    step: the number of tokens that are coded together.
    rotation: the basis [C, C'] in which values are coded; None if they are not rotated. Attention rotates its query
    into the basis.
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
        """The settings of the storage format. Packed tensors can share one buffer only if these are equal."""

    @abstractmethod
    def payload(self) -> Iterator[Tensor]:
        """Yield the tensors that hold the codes and their scales."""

    @abstractmethod
    def codes_only(self) -> Iterator[Tensor]:
        """Yield the tensors of ``payload`` that hold codes, but not the scales."""

    @abstractmethod
    def holding(self, tensors: Sequence[Tensor], frozen: Tensor | None) -> Self:
        """Return packed tokens of the same format that hold other numbers.

        tensors: the new tensors, in the order in which ``payload`` yields the present ones.
        frozen: the scales that heads settled once, in place of the present ones.
        """

    @abstractmethod
    def tokens(self, start: int | None = None, stop: int | None = None) -> Self:
        """Return tokens ``start`` to ``stop`` as views. Both must be multiples of ``step``."""

    @abstractmethod
    def flat(self) -> Self:
        """Return the tokens with their leading axes, one or more, joined into one: [..., L, C] becomes [H, L, C]."""

    @abstractmethod
    def dequantise(self, dtype: torch.dtype, scratch: Tensor | None = None) -> Tensor:
        """Return the values [..., L, C] in ``dtype``, computed in fp32 and rounded once.

        ``scratch`` is fp32 memory of at least as many elements, and the result may use it. Without it, callers that go
        block by block would spend most of the time on allocating memory.
        """

    def rotated(self, dtype: torch.dtype, scratch: Tensor | None = None) -> Tensor:
        """Return the unpacked values [..., L, C'], in the basis of ``rotation``; ``dequantise`` rotates them back.

        Formats that do not rotate return the same from both.
        """
        return self.dequantise(dtype, scratch)

    def levels(self) -> Levels | None:
        """Return the packed numbers as ``Levels``, in the basis of ``rotation``; None if the format has another form.

        Unpacked, they are the result of ``rotated``.
        """
        return None

    def pack_more(self, x: Tensor, pack: Callable[[Tensor], Packed], rows: Sequence[int] | None = None) -> Packed:
        """Return new tokens x, packed in the same format and under the same frozen scales as these tokens.

        x: the tokens of all rows of a batch, or only those of ``rows``.
        pack: the function that packs tokens in this format. With frozen scales it also takes them, as ``frozen``.
        """
        return pack(x)

    @property
    def device(self) -> torch.device:
        """The device of the codes and scales."""
        return next(self.payload()).device

    def __getitem__(self, index: slice | Tensor | int) -> Self:
        """Return the packed tokens of the entries ``index`` of the first leading axis; a slice gives views."""
        frozen = self.frozen
        if frozen is not None:
            frozen = frozen[index]
        return self.holding([t[index] for t in self.payload()], frozen)

    def map(self, fn: Callable[[Tensor], Tensor]) -> Self:
        """Return the packed tokens with ``fn`` applied to every tensor of ``payload``.

        ``fn`` may rearrange tokens, but must leave the axes of a group of codes as they are.
        """
        return self.holding([fn(t) for t in self.payload()], self.frozen)

    def select_head(self, h: int) -> Self:
        """Return the tokens with the frozen scales of head h alone. All these tokens must belong to head h."""
        if self.frozen is None:
            return self
        return self.holding(list(self.payload()), self.frozen[h : h + 1])

    def blocks(self, elements: int | None = None) -> Iterator[tuple[slice, slice, Self]]:
        """Yield (slice of heads, slice of tokens, packed part), each part of up to ``elements`` values.

        All leading axes of [..., L, C] count as one axis of heads. A part has at least one ``step`` of tokens. On a
        CPU, values that are dequantised and used part by part stay in the processor's cache: that is several times
        faster than all at once.

        elements: None takes the number that suits the device.
        """
        if elements is None:
            elements = BLOCK.get(self.device.type, BLOCK["cpu"])
        flat = self.flat()
        heads, tokens, channels = flat.shape
        # a part takes as many tokens of one head as fit, in whole steps, and then as many heads as still fit;
        # max(..., 1): values may have no channels (``kv.own_values``)
        fitting_tokens = min(tokens, elements // max(channels, 1))
        part_tokens = max(fitting_tokens // self.step * self.step, self.step)
        part_heads = max(elements // max(part_tokens * channels, 1), 1)
        for first_head in range(0, heads, part_heads):
            head_span = slice(first_head, min(first_head + part_heads, heads))
            for first_token in range(0, tokens, part_tokens):
                token_span = slice(first_token, min(first_token + part_tokens, tokens))
                yield head_span, token_span, flat[head_span].tokens(token_span.start, token_span.stop)


@dataclass(frozen=True)
class MinMax(Packed):
    """Quantised keys or values [..., L, C] as they are stored: value = scale * code + minimum, per group.

    ``axis="token"``: a group is ``group`` consecutive channels of one token. The last group is shorter if ``group``
    does not divide C. Codes are [..., L, bytes], scale and low [..., L, groups].

    ``axis="channel"``: a group is ``group`` consecutive tokens of one channel. Codes are [..., L / G, bytes, C], scale
    and low [..., L / G, C]. Codes are packed along tokens with channels innermost, and unpack into token order.

    ``low`` is the minimum. Under ``zero_point`` it is the code whose value is 0: value = scale * (code - low).
    """

    codes: Tensor  # uint8
    scale: Tensor  # fp16
    low: Tensor  # fp16
    bits: int
    group: int
    axis: Literal["token", "channel"]
    size: int  # the number of codes in one packed run: the channels of a token, or the tokens of a group
    zero_point: bool = False

    @property
    def shape(self) -> torch.Size:
        sizes = list(self.codes.shape)
        if self.axis == "token":
            # codes are [..., L, bytes]: bytes become channels
            sizes[-1] = self.size
        else:
            # codes are [..., L / G, bytes, C]: groups and bytes become tokens
            sizes[-3:-1] = [sizes[-3] * self.size]
        return torch.Size(sizes)

    @property
    def step(self) -> int:  # type: ignore[override]
        if self.axis == "channel":
            return self.group
        return 1

    @property
    def format(self) -> tuple[object, ...]:
        return (self.bits, self.group, self.axis, self.size, self.zero_point, self.shape[-1])

    def payload(self) -> Iterator[Tensor]:
        yield from (self.codes, self.scale, self.low)

    def codes_only(self) -> Iterator[Tensor]:
        yield self.codes

    def holding(self, tensors: Sequence[Tensor], frozen: Tensor | None) -> Self:
        # no scale of this format is frozen
        codes, scale, low = tensors
        return replace(self, codes=codes, scale=scale, low=low)

    def minimum(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the value of code 0 in the shape of ``low``, rounded once to ``dtype``."""
        if self.zero_point:
            # under a zero point, code 0 stands for scale * (0 - zero)
            return (-self.scale.float() * self.low.float()).to(dtype)
        return self.low.to(dtype)

    def levels(self) -> Levels | None:
        # a subclass with a ``dequantise`` of its own stores other numbers than these
        if not defined_together(type(self), "levels", "dequantise"):
            return None
        scale, low = self.scale, self.low
        if self.zero_point:
            # the minimum is a product, which fp16 would round
            scale, low = scale.float(), self.minimum()
        return Levels(
            codes=self.codes,
            scale=scale,
            low=low,
            bits=self.bits,
            run=self.size,
            group=self.group,
            channels=self.shape[-1],
            by_channel=self.axis == "channel",
        )

    def tokens(self, start: int | None = None, stop: int | None = None) -> Self:
        first, last, _ = slice(start, stop).indices(self.shape[-2])
        # a slice that ends before it begins is empty
        last = max(first, last)
        code_axis = -2
        if self.axis == "channel":
            if first % self.group or last % self.group:
                raise ValueError(f"tokens {first}..{last} are not whole groups of {self.group}")
            # count in groups, not tokens: codes are [..., L / G, bytes, C], scale and low [..., L / G, C]
            first, last = first // self.group, last // self.group
            code_axis = -3
        return replace(
            self,
            codes=self.codes.narrow(code_axis, first, last - first),
            scale=self.scale.narrow(-2, first, last - first),
            low=self.low.narrow(-2, first, last - first),
        )

    def flat(self) -> Self:
        # the leading axes end before [L, bytes], or before [L / G, bytes, C]
        last_leading = -4 if self.axis == "channel" else -3
        codes = self.codes.flatten(0, last_leading)
        return self.holding([codes, self.scale.flatten(0, -3), self.low.flatten(0, -3)], frozen=None)

    def dequantise(self, dtype: torch.dtype, scratch: Tensor | None = None) -> Tensor:
        scale, low = self.scale.float(), self.minimum()
        if self.axis == "channel":
            x = _to_fp32(unpack(self.codes, self.bits, self.size, dim=-2), scratch)
            # value = scale * code + minimum; the G tokens [L / G, G, C] of a channel share one scale
            x.mul_(scale[..., None, :]).add_(low[..., None, :])
            return x.flatten(-3, -2).to(dtype)
        x = _to_fp32(unpack(self.codes, self.bits, self.size), scratch)
        whole_groups = self.size // self.group
        grouped_channels = whole_groups * self.group
        # a view of x [..., groups, G]: scaling it in place changes x
        grouped = x[..., :grouped_channels].unflatten(-1, (whole_groups, self.group))
        grouped.mul_(scale[..., :whole_groups, None]).add_(low[..., :whole_groups, None])
        if grouped_channels < self.size:
            # the last group is shorter and has a scale of its own
            x[..., grouped_channels:].mul_(scale[..., whole_groups:]).add_(low[..., whole_groups:])
        return x.to(dtype)


def _to_fp32(codes: Tensor, scratch: Tensor | None) -> Tensor:
    """Return codes as fp32 numbers, written into the memory of ``scratch`` if there is one."""
    if scratch is None:
        return codes.float()
    return scratch[: codes.numel()].view(codes.shape).copy_(codes)


def quantise_tokens(x: Tensor, bits: int, group: int, constant_scale: float = 0.0) -> MinMax:
    """Quantise x [..., L, C] by min and max in groups of ``group`` channels of a token. The last group may be shorter.

    scale = (max - min) / (2^bits - 1) and code = round((x - min) / scale). Both use the scale and minimum as stored in
    fp16. Then |x - value| <= max(scale / 2, 2^-11 |min|) + 2^(bits - 25), plus the rounding of fp32 sums. The second
    term is the rounding of the stored minimum (0 for fp16 input). The last term is the rounding of numbers below fp16's
    normal range.

    A group of one value has codes 0 and scale ``constant_scale``: 0 (KIVI, arXiv 2402.02750), or 1 (FlexGen, arXiv
    2303.06865). Raises KvbenchError if values, minimum or scale are not finite in fp16.
    """
    channels = x.shape[-1]
    groups = ceil_div(channels, group)
    padding = groups * group - channels
    if padding:
        # the last element is repeated, because that changes no minimum or maximum
        x = torch.cat([x, x[..., -1:].expand(*x.shape[:-1], padding)], dim=-1)
    grouped = x.float().unflatten(-1, (groups, group))
    codes, scale, low = _quantise_groups(grouped, bits, dim=-1, constant_scale=constant_scale)
    codes = codes.flatten(-2)[..., :channels]
    return MinMax(codes=pack(codes, bits), scale=scale, low=low, bits=bits, group=group, axis="token", size=channels)


def quantise_channels(x: Tensor, bits: int, group: int) -> MinMax:
    """Quantise x [..., L, C] in groups of ``group`` consecutive tokens of a channel (KIVI's keys, arXiv 2402.02750).

    L must be a multiple of ``group``; C is free. Arithmetic, error bound and errors are those of ``quantise_tokens``.
    """
    if x.shape[-2] % group:
        raise ValueError(f"{x.shape[-2]} tokens are not whole groups of {group}")
    # minimum and maximum are over the G tokens of a channel in [..., L / G, G, C]
    grouped = x.float().unflatten(-2, (x.shape[-2] // group, group))
    codes, scale, low = _quantise_groups(grouped, bits, dim=-2, constant_scale=0.0)
    return MinMax(
        codes=pack(codes, bits, dim=-2), scale=scale, low=low, bits=bits, group=group, axis="channel", size=group
    )


def quantise_zero_point(x: Tensor, bits: int) -> MinMax:
    """Quantise x [..., L, C] with an integer zero point. Each token is one group (the quantiser of Q-Hitter's code).

    scale = max(1e-5, (max - min) / (2^bits - 1)), zero = round(-min / scale) and code = round(x / scale) + zero. Zero
    and codes are clamped to 0 ... 2^bits - 1. Tokens whose range excludes 0 are therefore stored badly: a constant c !=
    0 comes back as nearly 0. Scale and zero are fp16. Raises KvbenchError as ``quantise_tokens`` does.
    """
    top = 2**bits - 1
    x32 = x.float()
    low, high = x32.amin(dim=-1, keepdim=True), x32.amax(dim=-1, keepdim=True)
    scale = ((high - low) / top).clamp(min=1e-5).half()
    zero = (-low / scale.float()).round().clamp(0, top)
    _check_finite(x, bits, scale, zero)
    codes = ((x32 / scale.float()).round() + zero).clamp(0, top).to(torch.uint8)
    return MinMax(
        codes=pack(codes, bits),
        scale=scale,
        low=zero.half(),
        bits=bits,
        group=x.shape[-1],
        axis="token",
        size=x.shape[-1],
        zero_point=True,
    )


def _quantise_groups(x: Tensor, bits: int, dim: int, constant_scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return (codes, scale, minimum) of the groups of fp32 x along ``dim``, computed as ``quantise_tokens`` states.

    Codes have the shape of x. Scale and minimum are fp16 and lack ``dim``.
    """
    top = 2**bits - 1
    low, high = x.amin(dim=dim, keepdim=True), x.amax(dim=dim, keepdim=True)
    low16 = low.half()
    # the span begins at the stored minimum, so that codes reach the largest value although the minimum was rounded;
    # a minimum that was rounded up above all values leaves a span of 0
    span = torch.where(high > low, high - low16.float(), 0.0).clamp(min=0.0)
    scale16 = (span / top).half()
    _check_finite(x, bits, scale16, low16)
    is_constant = scale16 == 0
    # a constant group divides by infinity: every code is (x - minimum) / inf = 0
    divisor = scale16.float().masked_fill(is_constant, torch.inf)
    # code = round((x - minimum) / scale), against the fp16 numbers that are stored
    codes = x.sub(low16).div_(divisor).round_().clamp_(0, top).to(torch.uint8)
    return codes, scale16.masked_fill(is_constant, constant_scale).squeeze(dim), low16.squeeze(dim)


def _check_finite(x: Tensor, bits: int, scale: Tensor, low: Tensor) -> None:
    """Raise KvbenchError with the reason if a scale or a minimum of the groups of x is not finite."""
    # test both at once: each number that the processor reads back from a GPU holds up a decode step
    if bool((scale.float() + low.float()).isfinite().all()):
        return
    if not bool(x.isfinite().all()):
        raise KvbenchError(f"cannot quantise to {bits} bits: a key or value is infinite or not a number")
    raise KvbenchError(
        f"cannot quantise to {bits} bits: a group's minimum or scale exceeds fp16 (65504), in which it is stored; "
        f"the values reach from {x.min():.4g} to {x.max():.4g}"
    )
