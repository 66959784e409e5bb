"""Decode attention by kernels, which dequantise and sum tokens as they read them: Triton's on a GPU, C on a CPU.

``attend`` and ``attend_packed`` return None where no kernel can compute the attention. Plain PyTorch then computes it
(kvbench.storage.attend, packed_rows), and its numbers are the reference. ``KVBENCH_KERNELS=off`` turns kernels off.
``on_cpu`` has the C functions; all else here is about Triton.
For tests, ``TRITON_INTERPRET=1`` lets Triton's slow interpreter serve tensors on a CPU. The variable must be set before
anything imports Triton.
Shapes: B rows, Hq query heads, H stored heads, T new tokens, L tokens, D head dimension, C kept channels.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvbench.base.errors import UsageError
from kvbench.storage.row_segments import Ragged, RowSegment

if TYPE_CHECKING:
    from kvbench.storage.packed_half import PackedHalf

SWITCH = "KVBENCH_KERNELS"
"""The environment variable that allows kernels (``on``, the default) or forbids them (``off``)."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""The types of queries that kernels take."""
MOST_QUERIES = 64  # decode steps have at most this many queries for a stored head; prompts and chunks have more


def enabled() -> bool:
    """Return True if the environment allows kernels. Raises UsageError if KVBENCH_KERNELS is neither on nor off."""
    setting = os.environ.get(SWITCH, "on")
    if setting not in ("on", "off"):
        raise UsageError(f"{SWITCH}={setting}: must be on (kernels where there are any) or off (plain PyTorch)")
    return setting == "on"


def serves(device: torch.device) -> bool:
    """Return True if Triton's kernels can attend tensors on ``device``. The first call for a GPU compiles one."""
    if device.type == "cpu":
        return interpreted() and enabled()
    # _works compiles a kernel, so it comes last: the environment may forbid kernels
    return device.type == "cuda" and enabled() and _works(device)


def interpreted() -> bool:
    """Return True if kernels run in Triton's interpreter, on any device."""
    return os.environ.get("TRITON_INTERPRET") == "1" and installed()


@functools.cache
def installed() -> bool:
    """Return True if Triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def attend(
    query: Tensor,
    segments: Sequence[RowSegment | Ragged],
    tail: tuple[Tensor, Tensor],
    scale: float,
) -> Tensor | None:
    """Return attention [B, Hq, T, D] of query [B, Hq, T, D] over exact segments and a dense tail.

    Returns None if no kernel serves these tensors.

    tail: keys and values [B, Hk, t, D] of the newest tokens. The last T are the query's own, and it sees no later ones.
    scale: the factor of q.k.
    """
    # a run is a segment or the tail; the run that stores the fewest heads has the most queries for each of its heads
    fewest_heads = tail[0].shape[1]
    for s in segments:
        fewest_heads = min(fewest_heads, s.heads)
    if not _takes_query(query, fewest_heads) or any(s.shared is not None for s in segments):
        return None
    # these modules import Triton, which may be missing, so they are imported only where kernels serve
    from kvbench.storage.kernels import exact, softmax

    query = query.contiguous()
    tail_run = RowSegment(tail[0], tail[1])
    runs: list[RowSegment | Ragged] = [s for s in segments if s.longest]
    runs.append(tail_run)
    cuts = [softmax.cut_tokens(query, run.heads, run.longest) for run in runs]
    # all runs write the results of their splits into one table, so that one call merges them
    parts = softmax.Parts.room(sum(cut.count for cut in cuts), query)
    first = 0
    with torch.cuda.device_of(query):
        for run, cut in zip(runs, cuts, strict=True):
            exact.attend(query, run, scale, cut=cut, parts=parts.upto(first, cut.count), causal=run is tail_run)
            first += cut.count
        out, _ = parts.merged(query)
    return out


def attend_packed(query: Tensor, scale: float, keys: PackedHalf, values: PackedHalf) -> Tensor | None:
    """Return attention [U, Hq, T, D] of the newest T tokens, query [U, Hq, T, D], over packed and exact tokens.

    ``keys`` and ``values`` hold all tokens, the newest included. Returns None if no kernel serves these tensors.
    """
    heads = keys.ring.shape[1]
    if query.device.type == "cpu" and not interpreted():
        from kvbench.storage.kernels import on_cpu

        return on_cpu.attend(query, scale, keys, values)
    if not _takes_query(query, heads):
        return None
    from kvbench.storage.kernels import packed, softmax

    if not packed.can_read(keys.codes) or not packed.can_read(values.codes):
        return None
    query = query.contiguous()
    cut = softmax.cut_tokens(query, heads, max(keys.total))
    parts = softmax.Parts.room(cut.count, query)
    # a table on the device tells the kernel each row's borders between packed and exact tokens
    counts = _counts_on_device((keys.total, keys.packed, values.packed), query.device)
    with torch.cuda.device_of(query):
        packed.attend(query, scale, keys, values=values, counts=counts, cut=cut, parts=parts)
        out, _ = parts.merged(query)
    return out


def _counts_on_device(counts: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Return ``counts``, which are three lists with one number a row, as a tensor [3, U] int32 on ``device``."""
    if any(len(set(numbers)) > 1 for numbers in counts):
        return torch.tensor(counts, dtype=torch.int32, device=device)
    # equal numbers are filled in on the device, because a copy to the device would wait for its earlier work
    table = torch.empty(len(counts), len(counts[0]), dtype=torch.int32, device=device)
    for row, numbers in zip(table, counts, strict=True):
        row.fill_(numbers[0])
    return table


def _takes_query(query: Tensor, heads: int) -> bool:
    """Return True if the kernels can attend query [B, Hq, T, D] over segments with ``heads`` or more stored heads."""
    few_queries = query.shape[1] // heads * query.shape[2] <= MOST_QUERIES
    # ``serves`` comes last because it may compile a kernel
    return few_queries and query.dtype in DTYPES and query.numel() > 0 and serves(query.device)


@functools.cache
def _works(device: torch.device) -> bool:
    """Return True if a small kernel compiles for ``device`` and runs there. If not, warn once with the reason."""
    if not installed():
        return False
    from triton.errors import TritonError

    from kvbench.storage.kernels import exact, softmax

    try:
        # the trial attends one query over one token whose key and value are the query itself
        query = torch.zeros(1, 1, 1, 16, device=device)
        run, cut = RowSegment(query, query), softmax.cut_tokens(query, heads=1, longest=1)
        parts = softmax.Parts.room(cut.count, query)
        with torch.cuda.device_of(query):
            exact.attend(query, run, scale=1.0, cut=cut, parts=parts)
            parts.merged(query)
        torch.cuda.synchronize(device)
    except torch.OutOfMemoryError:
        # running out of memory is a RuntimeError as well, but says nothing about kernels
        raise
    except (TritonError, RuntimeError, OSError) as error:
        warnings.warn(
            f"attention on {device} is by plain PyTorch, which is slower: Triton's kernels do not run there "
            f"({' '.join(str(error).split())[:300]}); {SWITCH}=off does without them silently",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True
