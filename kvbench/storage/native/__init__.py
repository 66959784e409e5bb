"""Attention over packed tokens by compiled code, where there is a C++ compiler and tensors are on a CPU.

Every function returns None where it cannot serve; plain PyTorch does then (kvbench.storage.packed_rows), whose numbers
are the reference: both agree to rounding. Queries are fp32.
Shapes: U rows, H stored heads, Hq query heads, T new tokens, L tokens, D head dimension, C kept channels.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvbench.cache.packed import Packed
from kvbench.storage.native import build


def available() -> bool:
    """Whether packed caches on a CPU are read by the compiled code; builds it at the first call.

    Raises UsageError if KVBENCH_NATIVE is neither on nor off.
    """
    return build.enabled() and build.library() is not None


def logits(query: Tensor, keys: Packed) -> Tensor | None:
    """Dot products of query [U, H, R, C], in any scale, with packed keys [U, H, L, C] -> [U, H, R, L] fp32."""
    code, form = _code(query), _coded(keys)
    if code is None or form is None:
        return None
    u, h, r, _ = query.shape
    q, out = _single(query), torch.empty(u, h, r, keys.shape[2])
    _check(code.packed_logits(form, _at(q), *_numbers(u, h, r, keys.shape[2]), _at(out), torch.get_num_threads()))
    return out


def weigh(probs: Tensor, values: Packed) -> Tensor | None:
    """Weighted values: probs [U, H, R, L] with packed values [U, H, L, C] -> [U, H, R, C] fp32."""
    code, form = _code(probs), _coded(values)
    if code is None or form is None:
        return None
    u, h, r, length = probs.shape
    p, out = _single(probs), torch.empty(u, h, r, values.shape[3])
    _check(code.packed_weigh(form, _at(p), *_numbers(u, h, r, length), _at(out), torch.get_num_threads()))
    return out


def attend(
    query: Tensor,
    scale: float,
    packed: tuple[Packed, Packed],
    exact: tuple[Tensor, Tensor],
    channels: tuple[Tensor | None, Tensor | None],
    counts: Sequence[Sequence[int]],
) -> Tensor | None:
    """Attention [U, Hq, T, D] of the newest T tokens, query [U, Hq, T, D], over packed tokens and a ring of exact ones.

    packed: keys and values [U, H, L, C], of which each row reads its own number; exact: theirs [U, H, S, D], token t
    in slot t mod S; channels: int64 [U, H, C], of thin ones; counts: of each row its tokens in all, those packed as
    keys, and those packed as values.
    """
    code, k, v = _code(query), _coded(packed[0]), _coded(packed[1])
    if code is None or k is None or v is None:
        return None
    u, hq, t, d = query.shape
    h = exact[0].shape[1]
    q, out = _single(query), torch.empty(u, hq, t, d)
    rings = [_single(x) for x in exact]
    thin = [None if c is None else c.contiguous() for c in channels]
    k_ring, v_ring = (_Ring(x.data_ptr(), x.shape[2]) for x in rings)
    numbers = (ctypes.c_int64 * (3 * u))(*(n for row in counts for n in row))
    status = code.packed_attend(
        *(k, v, ctypes.byref(k_ring), ctypes.byref(v_ring), _at(q)),
        *_numbers(u, h, hq // h * t, t, d),
        *(ctypes.c_float(scale), numbers, *(None if c is None else _at(c) for c in thin), _at(out)),
        torch.get_num_threads(),
    )
    _check(status)
    return out


class _Coded(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "scale", "low")),
        *((name, ctypes.c_int64) for name in ("codes_row", "codes_head", "scale_row", "scale_head")),
        *((name, ctypes.c_int64) for name in ("bits", "group", "size", "channels", "by_channel", "zero_point")),
    )


class _Ring(ctypes.Structure):
    _fields_ = (("x", ctypes.c_void_p), ("slots", ctypes.c_int64))


def _code(query: Tensor) -> ctypes.CDLL | None:
    # in half precision plain PyTorch rounds weights as the full cache does, and the code would not
    here = query.device.type == "cpu" and query.dtype == torch.float32
    return build.library() if here and build.enabled() else None


def _coded(x: Packed) -> Any:
    """``x`` [U, H, L, C] as the code reads it, without a copy; None where its memory is laid out in another way."""
    if not all(_whole(t) for t in x.payload()) or x.scale.stride() != x.low.stride() or x.bits not in (1, 2, 3, 4, 8):
        return None
    pointers = (t.data_ptr() for t in x.payload())
    strides = (*x.codes.stride()[:2], *x.scale.stride()[:2])
    form = (x.bits, x.group, x.size, x.shape[3], x.axis == "channel", x.zero_point)
    return ctypes.byref(_Coded(*pointers, *strides, *form))


def _whole(t: Tensor) -> bool:
    """Whether one row's head lies in one piece."""
    expected = 1
    for size, stride in zip(reversed(t.shape[2:]), reversed(t.stride()[2:]), strict=True):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _single(x: Tensor) -> Tensor:
    return x.float().contiguous()


def _at(x: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.data_ptr())


def _numbers(*numbers: int) -> tuple[ctypes.c_int64, ...]:
    return tuple(ctypes.c_int64(n) for n in numbers)


def _check(status: int) -> None:
    if status:
        raise MemoryError("no memory for attention over packed tokens")
