"""Decode attention on a CPU by the C functions of kvbench-kernels, where that package is installed.

``attend_exact`` reads exact tokens; ``reads_exact`` says whether it serves. All else reads packed tokens.
``attend``, ``logits`` and ``weigh`` return None where no function serves, and plain PyTorch then computes the same
(kvbench.storage.attend, packed_rows). Sums are in another order, so that results differ in the last bits of fp32.

Shapes: U rows of H stored heads, N = U H heads of all rows, R queries of a head, L tokens, C channels.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kvbench.base.numbers import ceil_div
from kvbench.kv.packed import Levels, Packed
from kvbench.storage import kernels
from kvbench.storage.channels import pick_channels, spread_channels
from kvbench.storage.kernels import exact_heads

if TYPE_CHECKING:
    from kvbench.storage.packed_half import PackedHalf

INTERFACE = 5
"""The version of the C functions' arguments that this module passes."""
WIDTH, TOKENS = 16, 32
"""The C functions pad channels to a multiple of WIDTH, and read up to TOKENS tokens at a time."""
MOST_SCALES = 512
"""The most scales of a step for which the C functions have room."""
BYTES_A_THREAD = 2**18
"""The least bytes of codes for which a thread is started. To start one costs as much as reading some ten thousand."""

EXACT_BYTES_A_THREAD = 2**20
"""The least bytes of exact keys and values for which a thread is started. They are read faster than codes."""


class _PackedArgument(ctypes.Structure):
    """The C functions' ``struct packed``: packed keys or values. Its source in kvbench-kernels explains the fields."""

    _fields_ = (
        ("codes", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("low", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("heads", ctypes.c_int64),
        ("steps", ctypes.c_int64),
        ("channels", ctypes.c_int64),
        ("bits", ctypes.c_int64),
        ("run", ctypes.c_int64),
        ("group", ctypes.c_int64),
        ("axis", ctypes.c_int64),
        ("stream", ctypes.c_int64),
        ("normed", ctypes.c_int64),
        ("step_bytes", ctypes.c_int64),
        ("scales", ctypes.c_int64),
        ("head_bytes", ctypes.c_int64),
        ("scale_head", ctypes.c_int64),
        ("low_head", ctypes.c_int64),
        ("half", ctypes.c_int64),
    )


class _RingArgument(ctypes.Structure):
    """The C functions' ``struct ring``: exact tokens, and each head's numbers of packed and of all tokens."""

    _fields_ = (
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("key_slots", ctypes.c_int64),
        ("value_slots", ctypes.c_int64),
        ("packed_keys", ctypes.c_void_p),
        ("packed_values", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
    )


class _HeadTensors(NamedTuple):
    """The queries and outputs of N heads, as ``kvbench_kernels_attend`` reads and writes them.

    query: [N, R, D], the queries for exact keys.
    packed_query: [N, R, .], the queries for packed keys, with padded channels.
    out: [N, R, D], the output over exact values.
    packed_out: [N, R, .], the output over packed values, or ``out`` itself if that takes the sum of both outputs.
    """

    query: Tensor
    packed_query: Tensor
    out: Tensor
    packed_out: Tensor


def attend(query: Tensor, scale: float, keys: PackedHalf, values: PackedHalf) -> Tensor | None:
    """Return attention [U, Hq, 1, D] of one new token, query [U, Hq, 1, D], over packed and exact tokens.

    ``keys`` and ``values`` hold all tokens, the newest included. Returns None if kvbench-kernels is not installed, or
    has no function for these formats or shapes.
    """
    rows, query_heads, new_tokens, channels = query.shape
    heads = keys.ring.shape[1]
    # several new tokens would see each other causally
    if new_tokens > 1:
        return None
    # exact tokens are read and written in steps of WIDTH channels, and are not padded
    if channels % WIDTH:
        return None
    old_keys, old_values = keys.old(), values.old()
    flat_query = query.reshape(rows * heads, query_heads // heads, channels)
    key_levels, value_levels = _levels_for(flat_query, old_keys), _levels_for(flat_query, old_values)
    library = _library()
    if library is None or key_levels is None or value_levels is None:
        return None
    flat_query = (flat_query * scale).contiguous()
    # packed keys may keep some of the channels, and may be rotated: the query for them is picked and rotated alike
    packed_query = flat_query
    if keys.channels is not None:
        # each head is a row of its own
        packed_query = pick_channels(packed_query[:, None], keys.channels.flatten(0, 1)[:, None])[:, 0]
    if old_keys.rotation is not None:
        packed_query = packed_query @ old_keys.rotation
    packed_query = _pad_channels(packed_query)
    out = torch.empty_like(flat_query)
    # if packed values keep some channels or are rotated, their sum is taken apart and turned into whole heads below;
    # else one tensor takes the sums of exact and of packed values
    apart = values.channels is not None or old_values.rotation is not None
    packed_out = out
    if apart:
        packed_out = out.new_empty(*out.shape[:2], _padded_width(value_levels.channels))
    _attend_heads(
        library.kvbench_kernels_attend,
        key_levels,
        value_levels,
        halves=(keys, values),
        tensors=_HeadTensors(flat_query, packed_query=packed_query, out=out, packed_out=packed_out),
    )
    if apart:
        from_packed = packed_out[..., : value_levels.channels]
        if old_values.rotation is not None:
            from_packed = from_packed @ old_values.rotation.T
        if values.channels is not None:
            # again each head is a row of its own
            channels_by_head = values.channels.flatten(0, 1)[:, None]
            from_packed = spread_channels(from_packed[:, :, None], channels_by_head, channels)[:, :, 0]
        out += from_packed
    return out.view(query.shape)


def _padded_width(channels: int) -> int:
    """Return ``channels`` rounded up to a multiple of WIDTH."""
    # -channels % WIDTH is what is missing to the next multiple
    return channels + -channels % WIDTH


def _pad_channels(x: Tensor) -> Tensor:
    """Return x [..., C] with zeros behind its channels, up to a multiple of WIDTH."""
    return F.pad(x, (0, _padded_width(x.shape[-1]) - x.shape[-1])).contiguous()


def _attend_heads(
    function: Callable[..., None],
    key_levels: Levels,
    value_levels: Levels,
    *,
    halves: tuple[PackedHalf, PackedHalf],
    tensors: _HeadTensors,
) -> None:
    """Call the C ``function`` for all heads, in threads if there is much to read.

    key_levels, value_levels: the packed keys and values.
    halves: (keys, values), which also hold the exact tokens.
    tensors: the queries, and the outputs that the function writes.
    """
    keys, values = halves
    query, packed_query, out, packed_out = tensors
    packed_keys, keys_alive = _argument_of(key_levels)
    packed_values, values_alive = _argument_of(value_levels)
    heads = keys.ring.shape[1]
    # every head of a row has as many tokens as its row
    counts = torch.tensor([keys.packed, values.packed, keys.total]).repeat_interleave(heads, dim=1)
    ring_keys, ring_values = keys.ring.contiguous().flatten(0, 1), values.ring.contiguous().flatten(0, 1)
    thread_heads = _heads_of_a_thread(packed_keys)
    # each thread has memory of its own for the logits of one head
    scratch = query.new_empty(ceil_div(len(query), thread_heads), query.shape[1], max(keys.total))
    calls = []
    for thread, first in enumerate(range(0, len(query), thread_heads)):
        ring = _RingArgument(
            keys=ring_keys[first].data_ptr(),
            values=ring_values[first].data_ptr(),
            key_slots=keys.slots,
            value_slots=values.slots,
            packed_keys=counts[0, first:].data_ptr(),
            packed_values=counts[1, first:].data_ptr(),
            tokens=counts[2, first:].data_ptr(),
        )
        call = (
            _argument_of_heads(packed_keys, first, thread_heads),
            _argument_of_heads(packed_values, first, thread_heads),
            ctypes.byref(ring),
            query[first].data_ptr(),
            packed_query[first].data_ptr(),
            query.shape[1],
            query.shape[2],
            scratch[thread].data_ptr(),
            out[first].data_ptr(),
            packed_out[first].data_ptr(),
        )
        calls.append(call)
    _call_in_threads(function, calls)
    # until here the calls read the memory of these tensors
    del keys_alive, values_alive


def reads_exact(query: Tensor) -> bool:
    """Return True if ``attend_exact`` can attend query [B, Hq, T, D]: one new token in each row, in fp32 on a CPU."""
    if query.device.type != "cpu" or query.dtype != torch.float32 or query.shape[2] > 1 or query.shape[3] % WIDTH:
        return False
    return kernels.enabled() and installed()


def attend_exact(query: Tensor, scale: float, table: exact_heads.HeadTable, out: Tensor) -> None:
    """Write to ``out`` the attention of query [B, Hq, 1, D] over the tokens of all heads in ``table``.

    ``out`` is contiguous and has the shape of ``query``. Query heads without a head in the table are left as they are.
    ``reads_exact`` must be True for the query.
    """
    library = _library()
    # ``reads_exact`` is True only if the package is installed
    assert library is not None
    flat_query = (query * scale).contiguous()
    channels = query.shape[3]
    threads = max(1, min(torch.get_num_threads(), table.stored_bytes // EXACT_BYTES_A_THREAD))
    parts = exact_heads.split_evenly(table.stored_tokens, threads)
    # each thread has memory of its own: for the logits of one head, and for its query in the channels of thin keys
    scratch = query.new_empty(len(parts), table.most_queries, table.longest + table.tail_tokens)
    thin_query = query.new_empty(len(parts), table.most_queries, exact_heads.MOST_CHANNELS)
    calls = []
    for thread, (first, count) in enumerate(parts):
        call = (
            table.heads[first].data_ptr(),
            count,
            table.runs.data_ptr(),
            flat_query.data_ptr(),
            channels,
            scratch[thread].data_ptr(),
            thin_query[thread].data_ptr(),
            out.data_ptr(),
        )
        calls.append(call)
    _call_in_threads(library.kvbench_kernels_exact, calls)


def logits(query: Tensor, keys: Packed) -> Tensor | None:
    """Return q.k [N, R, L] of query [N, R, C] fp32 and packed keys [..., L, C]; None if no function serves.

    If the keys are rotated, ``query`` must be rotated in the same way.
    """
    levels, library = _levels_for(query, keys), _library()
    if library is None or levels is None:
        return None
    argument, alive = _argument_of(levels)
    query = _pad_channels(query)
    out = query.new_empty(*query.shape[:2], keys.shape[-2])
    _call_in_threads(library.kvbench_kernels_logits, _arguments_by_thread(argument, query, out))
    # until here the calls read the memory of these tensors
    del alive
    return out


def weigh(probs: Tensor, values: Packed) -> Tensor | None:
    """Return the sums over tokens of packed values [..., L, C], weighted by probs [N, R, L], as [N, R, C] fp32.

    None means that no function serves. If the values are rotated, so is the result.
    """
    levels, library = _levels_for(probs, values), _library()
    if library is None or levels is None:
        return None
    argument, alive = _argument_of(levels)
    probs = probs.contiguous()
    out = probs.new_empty(*probs.shape[:2], _padded_width(levels.channels))
    _call_in_threads(library.kvbench_kernels_weigh, _arguments_by_thread(argument, probs, out))
    # until here the calls read the memory of these tensors
    del alive
    return out[..., : levels.channels]


def _levels_for(x: Tensor, packed: Packed) -> Levels | None:
    """Return the codes and scales of ``packed`` if the C functions can multiply it with x [N, R, .], else None."""
    # half precision is left to PyTorch, because it is rounded by rules that the C functions do not follow
    if x.device.type != "cpu" or x.dtype != torch.float32:
        return None
    # products of many queries are faster by PyTorch, which unpacks once for all of them
    if x.shape[1] > kernels.MOST_QUERIES or not kernels.enabled():
        return None
    library = _library()
    if library is None:
        return None
    levels = packed.levels()
    if levels is None or levels.scale.device.type != "cpu":
        return None
    # the C functions have room for one block of numbers: by channel a step of ``run`` tokens, else TOKENS tokens
    tokens_of_a_block = levels.run if levels.by_channel else TOKENS
    if tokens_of_a_block * _padded_width(levels.channels) > library.kvbench_kernels_most_codes():
        return None
    if levels.scale.shape[-1] > MOST_SCALES:
        return None
    return levels


def _argument_of(levels: Levels) -> tuple[_PackedArgument, tuple[Tensor, ...]]:
    """Return (argument, tensors): packed tokens as the C functions take them, and the tensors to which they point.

    The caller must keep the tensors alive until the call returns.
    """
    # rows and heads become one axis; behind it codes are [steps, bytes, C] by channel, or [steps, bytes] by token
    codes = _join_heads(levels.codes, -4 if levels.by_channel else -3)
    scale = _join_heads(levels.scale, -3)
    alive = [codes, scale]
    low, table = None, None
    if levels.low is not None:
        low = _join_heads(levels.low, -3)
        alive.append(low)
    if levels.table is not None:
        table = levels.table.contiguous()
        alive.append(table)
    argument = _PackedArgument(
        codes=codes.data_ptr(),
        scale=scale.data_ptr(),
        low=None if low is None else low.data_ptr(),
        table=None if table is None else table.data_ptr(),
        heads=codes.shape[0],
        steps=codes.shape[1],
        channels=levels.channels,
        bits=levels.bits,
        run=levels.run,
        group=levels.group,
        axis=int(levels.by_channel),
        stream=int(levels.layout == "stream"),
        normed=int(levels.normed),
        step_bytes=codes[0, 0].numel() if codes.numel() else 0,
        scales=scale.shape[-1],
        head_bytes=codes.stride(0),
        scale_head=scale.stride(0),
        low_head=0 if low is None else low.stride(0),
        half=int(scale.dtype == torch.float16),
    )
    return argument, tuple(alive)


def _join_heads(t: Tensor, last: int) -> Tensor:
    """Return t with its axes up to ``last`` joined into one axis of heads, each of which is contiguous.

    Heads may lie apart, since a buffer has room for more tokens: such a t is not copied.
    """
    heads = t.flatten(0, last)
    if heads.numel() and not heads[0].is_contiguous():
        return heads.contiguous()
    return heads


def _heads_of_a_thread(argument: _PackedArgument) -> int:
    """Return how many heads one thread reads: all, unless there are enough codes for several threads."""
    size = argument.heads * argument.steps * argument.step_bytes
    threads = max(1, min(torch.get_num_threads(), argument.heads, size // BYTES_A_THREAD))
    return ceil_div(argument.heads, threads)


def _argument_of_heads(argument: _PackedArgument, first: int, count: int) -> object:
    """Return a C reference to an argument with only the heads from ``first`` on, at most ``count`` of them."""
    head_argument = _PackedArgument.from_buffer_copy(argument)
    head_argument.heads = min(count, argument.heads - first)
    # without packed tokens there is no memory to point to; the offsets are in bytes
    if argument.steps:
        head_argument.codes = argument.codes + first * argument.head_bytes
        size = 2 if argument.half else 4
        head_argument.scale = argument.scale + first * argument.scale_head * size
        if argument.low is not None:
            head_argument.low = argument.low + first * argument.low_head * size
    return ctypes.byref(head_argument)


def _arguments_by_thread(argument: _PackedArgument, x: Tensor, out: Tensor) -> list[tuple[object, ...]]:
    """Return each thread's arguments for a call that reads some heads of x [N, R, .] and writes those of ``out``."""
    thread_heads = _heads_of_a_thread(argument)
    calls: list[tuple[object, ...]] = []
    for first in range(0, argument.heads, thread_heads):
        calls.append(
            (_argument_of_heads(argument, first, thread_heads), x[first].data_ptr(), x.shape[1], out[first].data_ptr())
        )
    return calls


def _call_in_threads(function: Callable[..., None], calls: Sequence[tuple[object, ...]]) -> None:
    """Call a C function with each of ``calls``, the arguments of one call each. There is at least one.

    Several calls run in threads.
    """
    # this thread makes the first call, and others the rest, since ctypes gives up the interpreter's lock meanwhile
    rest = [_thread_pool().submit(function, *call) for call in calls[1:]]
    function(*calls[0])
    for running in rest:
        running.result()


@functools.cache
def _thread_pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=os.cpu_count(), thread_name_prefix="kvbench-kernels")


def installed() -> bool:
    """Return True if the C functions can be called here."""
    return _library() is not None


@functools.cache
def _library() -> ctypes.CDLL | None:
    """Return the compiled C functions, or None if kvbench-kernels is not installed.

    Returns None with a warning if the package does not load or has another version of the interface.
    """
    if importlib.util.find_spec("kvbench_kernels") is None:
        return None
    try:
        import kvbench_kernels

        library: ctypes.CDLL = kvbench_kernels.library()
        library.kvbench_kernels_interface.restype = ctypes.c_int64
        library.kvbench_kernels_most_codes.restype = ctypes.c_int64
        version = library.kvbench_kernels_interface()
    # a build that is too old lacks one of these functions, which is an AttributeError
    except (OSError, AttributeError, ImportError) as error:
        warnings.warn(f"kvbench-kernels is installed but does not load: {error}", RuntimeWarning, stacklevel=2)
        return None
    if version != INTERFACE:
        warnings.warn(
            f"kvbench-kernels has version {version} of its interface, and this kvbench calls version {INTERFACE}: "
            "install it again (pip install ./kernels)",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    # without argument types ctypes would pass addresses as 32-bit integers; the lists follow the functions in packed.c
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.kvbench_kernels_logits.argtypes = [pointer, pointer, number, pointer]
    library.kvbench_kernels_weigh.argtypes = [pointer, pointer, number, pointer]
    library.kvbench_kernels_attend.argtypes = [*[pointer] * 5, number, number, pointer, pointer, pointer]
    library.kvbench_kernels_exact.argtypes = [pointer, number, pointer, pointer, number, *[pointer] * 3]
    for function in (
        library.kvbench_kernels_logits,
        library.kvbench_kernels_weigh,
        library.kvbench_kernels_attend,
        library.kvbench_kernels_exact,
    ):
        function.restype = None
    return library
