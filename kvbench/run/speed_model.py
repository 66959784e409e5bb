"""A rough time for a run of which nothing is measured: its operations and bytes, at the speed that this device shows.

Counted are the projections and the attention of every prompt, the blockwise column sums where a method reads them, the
compression of every cache as a few passes over the dense layer, and decoding as steps of full batches that read all
weights and all caches, with every answer as long as it may be. What a step or a layer costs in calls is a constant
times the time of the smallest call. A factor of two either way is usual, more on a machine that is busy.
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
"""Matrices are measured up to this width: wider ones take no less per element."""
TOKENS, ATTENDED, COPIED = 512, 1024, 2**24
TRIES, ENOUGH_S = 20, 0.1
"""Of each quantity, so many tries at most, and no more once they took that long together; never fewer than two."""
LAYER_CALLS, COMPRESS_CALLS, STEP_CALLS = 60, 60, 60
"""Calls of a layer of the model, of one method's compression of it, and of one storage format in a decode step."""
COMPRESS_PASSES = 6
"""Times that a compression goes over the dense keys and values of a layer."""


@dataclass(frozen=True)
class Speed:
    """Seconds on one device: per multiplication with its addition in products of many rows, per byte of weights in a
    product of one row, per query head, channel and pair of tokens in attention and in column sums, per byte copied, per
    call."""

    product: float
    weight_byte: float
    attention: float
    sums: float
    copy: float
    call: float


@dataclass(frozen=True)
class Work:
    """What is left of a group. ``prompts`` and ``rest`` are tokens of each example, read at once and fed in chunks;
    ``prefills`` prompts are read, ``answers`` rows compressed and decoded for ``new`` tokens, ``rows`` of them at once.

    ``cell`` is bytes of one cache while it is decoded, ``formats`` storage formats in a batch, ``sums`` whether column
    sums are read.
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
    """The elements that every token is multiplied with, in all layers and for its logits."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    logits = model.get_output_embeddings().weight
    layers = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear) and m.weight is not logits)
    return layers, logits.numel()


def measure(shape: Shape, width: int, dtype: torch.dtype, device: torch.device) -> Speed:
    """The speed of ``device`` for a model of this shape and hidden ``width``, by the best of a few short tries."""
    made = partial(torch.randn, dtype=dtype, device=device)
    width, heads, dim = min(width, WIDEST), min(shape.query_heads, 2), shape.head_dim
    matrix, many, one = made(width, width), made(TOKENS, width), made(1, width)
    q, pairs = made(1, heads, ATTENDED, dim), heads * dim * ATTENDED**2
    block, tiny = torch.empty(COPIED, dtype=torch.uint8, device=device), torch.zeros(1, device=device)

    def best(work: Callable[[], Any]) -> float:
        taken: list[float] = []
        while len(taken) < 2 or (len(taken) < TRIES and sum(taken) < ENOUGH_S):
            synchronise(device)
            start = time.perf_counter()
            work()
            synchronise(device)
            taken.append(time.perf_counter() - start)
        return min(taken)

    with torch.inference_mode():
        return Speed(
            product=best(lambda: many @ matrix) / (TOKENS * width**2),
            weight_byte=best(lambda: one @ matrix) / (width**2 * dtype.itemsize),
            attention=best(lambda: scaled_dot_product_attention(q, q, q, is_causal=True)) / pairs,
            sums=best(lambda: column_sums(q[0], q[0], 1.0)) / pairs,
            copy=best(block.clone) / COPIED,
            call=best(lambda: [tiny.add(1) for _ in range(100)]) / 100,
        )


def seconds(work: Work, speed: Speed, size: tuple[int, int], shape: Shape, itemsize: int) -> float:
    """The time that the work takes with ``size`` weights in the layers and for logits."""
    if not work.answers:
        return 0.0
    layers, every = size[0], sum(size)
    calls = shape.layers * speed.call
    # a prompt: its projections, and attention (with column sums) over the square of its tokens
    pair = shape.layers * shape.query_heads * shape.head_dim * (speed.attention + speed.sums * work.sums)
    prompt = fmean(n * layers * speed.product + n * n * pair for n in work.prompts) + LAYER_CALLS * calls
    dense = fmean(shape.full_bytes(n, itemsize) for n in work.prompts)
    compress = COMPRESS_CALLS * calls + COMPRESS_PASSES * dense * speed.copy
    fed = fmean(work.rest) * every * speed.product
    # a step: all weights, read once or multiplied with every row, and every cache
    rows = min(work.rows, work.answers)
    step = max(every * itemsize * speed.weight_byte, rows * every * speed.product) + rows * work.cell * speed.copy
    step += (LAYER_CALLS + min(work.formats, rows) * STEP_CALLS) * calls
    batches = math.ceil(work.answers / rows)
    return work.prefills * prompt + work.answers * (compress + fed) + batches * work.new * step
