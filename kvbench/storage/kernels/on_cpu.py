"""Products with packed tokens on a CPU by the C functions of kvbench-kernels, where that package is installed.

``logits`` and ``weigh`` return None where no function serves, and plain PyTorch then computes the same
(kvbench.storage.attend). Sums are in another order, so that results differ in the last bits of fp32.

Shapes: N heads of all rows, R queries of a head, L tokens, C channels.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F
from torch import Tensor

from kvbench.kv.packed import MinMax, Packed
from kvbench.storage import kernels

INTERFACE = 1
"""The version of the C functions' arguments that this module passes."""
WIDTH, TOKENS = 16, 32
"""The C functions pad channels to a multiple of WIDTH, and read up to TOKENS tokens at a time."""
BYTES_A_THREAD = 2**18
"""A thread of its own reads at least so many bytes of codes: to start it costs as much as reading some ten thousand."""


class _PackedArgument(ctypes.Structure):
    """The C functions' ``struct packed``."""

    _fields_ = (
        ("codes", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("low", ctypes.c_void_p),
        ("heads", ctypes.c_int64),
        ("steps", ctypes.c_int64),
        ("channels", ctypes.c_int64),
        ("bits", ctypes.c_int64),
        ("group", ctypes.c_int64),
        ("axis", ctypes.c_int64),
        ("step_bytes", ctypes.c_int64),
        ("scales", ctypes.c_int64),
        ("head_bytes", ctypes.c_int64),
    )


def logits(query: Tensor, keys: Packed) -> Tensor | None:
    """Return q.k [N, R, L] of query [N, R, C] fp32 and packed keys [..., L, C], or None if no function serves."""
    library = _library_for(query, keys)
    if library is None:
        return None
    argument, alive = _argument(keys)
    query = F.pad(query, (0, -query.shape[2] % WIDTH)).contiguous()
    out = query.new_empty(*query.shape[:2], keys.shape[-2])
    _call(library.kvbench_kernels_logits, argument, query, out)
    del alive
    return out


def weigh(probs: Tensor, values: Packed) -> Tensor | None:
    """Return packed values [..., L, C] weighted by probs [N, R, L] as [N, R, C] fp32, or None if no function serves."""
    library = _library_for(probs, values)
    if library is None:
        return None
    argument, alive = _argument(values)
    probs = probs.contiguous()
    channels = values.shape[-1]
    out = probs.new_empty(*probs.shape[:2], channels + -channels % WIDTH)
    _call(library.kvbench_kernels_weigh, argument, probs, out)
    del alive
    return out[..., :channels]


def _library_for(x: Tensor, packed: Packed) -> ctypes.CDLL | None:
    """Return the library if its functions multiply x [N, R, .] and ``packed``, else None."""
    # other formats, and other dtypes than fp32, whose rounding has rules of its own, are PyTorch's
    if not isinstance(packed, MinMax) or x.device.type != "cpu" or x.dtype != torch.float32:
        return None
    # a few new tokens: products of many queries are faster by PyTorch, which unpacks once for all of them
    if x.shape[1] > kernels.MOST_QUERIES or not kernels.enabled():
        return None
    library = _library()
    if library is None:
        return None
    channels = packed.shape[-1]
    numbers_of_a_block = max(packed.step, TOKENS) * (channels + -channels % WIDTH)
    if numbers_of_a_block > library.kvbench_kernels_most_codes():
        return None
    return library


def _argument(packed: MinMax) -> tuple[_PackedArgument, tuple[Tensor, ...]]:
    """Return the C argument of packed tokens, and the tensors whose memory it names: they must outlive the call."""
    flat = packed.flat()
    codes, scale, low = flat.codes, flat.scale.float().contiguous(), flat.minimum().contiguous()
    # heads may lie apart, since a buffer has room for more tokens, but the steps of a head follow each other
    if codes.numel() and not codes[0].is_contiguous():
        codes = codes.contiguous()
    argument = _PackedArgument(
        codes=codes.data_ptr(),
        scale=scale.data_ptr(),
        low=low.data_ptr(),
        heads=codes.shape[0],
        steps=codes.shape[1],
        channels=flat.shape[-1],
        bits=flat.bits,
        group=flat.group,
        axis=int(flat.axis == "channel"),
        step_bytes=codes[0, 0].numel() if codes.numel() else 0,
        scales=scale.shape[-1],
        head_bytes=codes.stride(0),
    )
    return argument, (codes, scale, low)


def _call(function: Callable[..., None], argument: _PackedArgument, x: Tensor, out: Tensor) -> None:
    """Call a C function, which reads x [N, R, .] and writes out [N, R, .]. Many heads are divided over threads."""
    heads = argument.heads
    size = heads * argument.steps * argument.step_bytes
    threads = max(1, min(torch.get_num_threads(), heads, size // BYTES_A_THREAD))
    each = -(-heads // threads)
    calls = []
    for first in range(0, heads, each):
        part = _PackedArgument.from_buffer_copy(argument)
        part.heads = min(each, heads - first)
        part.codes = argument.codes + first * argument.head_bytes
        # the C type is a float of 4 bytes
        part.scale = argument.scale + first * argument.steps * argument.scales * 4
        part.low = argument.low + first * argument.steps * argument.scales * 4
        calls.append((ctypes.byref(part), x[first].data_ptr(), x.shape[1], out[first].data_ptr()))
    if len(calls) == 1:
        function(*calls[0])
        return
    # ctypes gives up the interpreter's lock while a function runs
    for running in [_threads().submit(function, *call) for call in calls]:
        running.result()


@functools.cache
def _threads() -> ThreadPoolExecutor:
    """Return the threads that share the heads of large calls."""
    return ThreadPoolExecutor(max_workers=os.cpu_count(), thread_name_prefix="kvbench-kernels")


def installed() -> bool:
    """Return True if the functions can be called here."""
    return _library() is not None


@functools.cache
def _library() -> ctypes.CDLL | None:
    """Return the compiled functions; None if kvbench-kernels is not installed or is of another version."""
    if importlib.util.find_spec("kvbench_kernels") is None:
        return None
    try:
        import kvbench_kernels

        library: ctypes.CDLL = kvbench_kernels.library()
        library.kvbench_kernels_interface.restype = ctypes.c_int64
        library.kvbench_kernels_most_codes.restype = ctypes.c_int64
        version = library.kvbench_kernels_interface()
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
    for function in (library.kvbench_kernels_logits, library.kvbench_kernels_weigh):
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
        function.restype = None
    return library
