"""Estimate the time of a run without any measured answer from its operations and bytes, at this device's speed.

The model counts the projections and the attention of every prompt, and the blockwise column sums where a method reads
them. Compression counts as a few passes over the dense layer. Decoding counts as steps of full batches that read all
weights and all caches, with every answer as long as it may be. Calls cost a constant number per step or layer, times
the time of the smallest call. Errors of a factor of two either way are usual, more on a busy machine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM

from kvbench.cache.exact_attention import column_sums
from kvbench.cache.model_shape import Shape
from kvbench.models.interface import synchronise

WIDEST = 2048
"""The widest matrix to be measured; wider ones take no less time per element."""
TOKENS, ATTENDED, COPIED = 512, 1024, 2**24
TRIES, ENOUGH_S = 20, 0.1
"""The most tries for each quantity, and the seconds in all after which no more are begun; at least two are."""
LAYER_CALLS, COMPRESS_CALLS, STEP_CALLS = 60, 60, 60
"""The calls of a layer of the model, of one method's compression of it, and of one storage format in a decode step."""
COMPRESS_PASSES = 6
"""The number of passes of a compression over the dense keys and values of a layer."""


@dataclass(frozen=True)
class Speed:
    """The seconds that one device takes for each unit of work.

    ``product`` is per multiply-add in products of many rows, ``weight_byte`` per byte of weights in a product of one
    row, ``attention`` and ``sums`` per query head, channel and pair of tokens in attention and in column sums, ``copy``
    per byte copied, ``call`` per call.
    """

    product: float
    weight_byte: float
    attention: float
    sums: float
    copy: float
    call: float


@dataclass(frozen=True)
class Work:
    """The work left of a group.

    ``prompts`` and ``rest`` are tokens of each example, read at once and fed in chunks. ``prefills`` prompts are read.
    ``answers`` rows are compressed and decoded for ``new`` tokens, ``rows`` of them at once. ``cell`` is the bytes of
    one cache while it is decoded, ``formats`` the number of storage formats in a batch. ``sums`` is True if column sums
    are read.
    """

    prompts: Sequence[int]
    rest: Sequence[int]
    prefills: int
    answers: int
    new: int
    rows: int
    cell: float
    formats: int
    sums: bool


def weights(config: Any) -> tuple[int, int]:
    """Return the numbers of weights that every token is multiplied with: (in all layers, for its logits)."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    logits = model.get_output_embeddings().weight
    layers = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear) and m.weight is not logits)
    return layers, logits.numel()


def measure(shape: Shape, width: int, dtype: torch.dtype, device: torch.device) -> Speed:
    """Measure the speed of ``device`` for a model of this shape and hidden ``width``, by the best of a few tries."""
    random = partial(torch.randn, dtype=dtype, device=device)
    width, heads, dim = min(width, WIDEST), min(shape.query_heads, 2), shape.head_dim
    matrix, rows, row = random(width, width), random(TOKENS, width), random(1, width)
    q, pairs = random(1, heads, ATTENDED, dim), heads * dim * ATTENDED**2
    block, scalar = torch.empty(COPIED, dtype=torch.uint8, device=device), torch.zeros(1, device=device)

    def best(work: Callable[[], Any]) -> float:
        durations: list[float] = []
        while len(durations) < 2 or (len(durations) < TRIES and sum(durations) < ENOUGH_S):
            synchronise(device)
            start = time.perf_counter()
            work()
            synchronise(device)
            durations.append(time.perf_counter() - start)
        return min(durations)

    with torch.inference_mode():
        return Speed(
            product=best(lambda: rows @ matrix) / (TOKENS * width**2),
            weight_byte=best(lambda: row @ matrix) / (width**2 * dtype.itemsize),
            attention=best(lambda: scaled_dot_product_attention(q, q, q, is_causal=True)) / pairs,
            sums=best(lambda: column_sums(q[0], q[0], 1.0)) / pairs,
            copy=best(block.clone) / COPIED,
            call=best(lambda: [scalar.add(1) for _ in range(100)]) / 100,
        )


def seconds(work: Work, speed: Speed, size: tuple[int, int], shape: Shape, itemsize: int) -> float:
    """Return the seconds that the work takes with ``size`` weights (in the layers, for logits)."""
    if not work.answers:
        return 0.0
    layers, total = size[0], sum(size)
    calls = shape.layers * speed.call
    # a prompt: its projections, and attention (with column sums) over the square of its tokens
    pair = shape.layers * shape.query_heads * shape.head_dim * (speed.attention + speed.sums * work.sums)
    prompt = fmean(n * layers * speed.product + n * n * pair for n in work.prompts) + LAYER_CALLS * calls
    full_bytes = fmean(shape.full_bytes(n, itemsize) for n in work.prompts)
    compress = COMPRESS_CALLS * calls + COMPRESS_PASSES * full_bytes * speed.copy
    scoring = fmean(work.rest) * total * speed.product
    # a step: all weights, read once or multiplied with every row, and every cache
    rows = min(work.rows, work.answers)
    step = max(total * itemsize * speed.weight_byte, rows * total * speed.product) + rows * work.cell * speed.copy
    step += (LAYER_CALLS + min(work.formats, rows) * STEP_CALLS) * calls
    batches = math.ceil(work.answers / rows)
    return work.prefills * prompt + work.answers * (compress + scoring) + batches * work.new * step
