"""Run one pass of a method over a workload: read prompts one by one, compress, and answer them as one decode batch.

A pass uses the same prefill and the same decode batch as runs do. Random weights never end an answer, so every row
generates all of its tokens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.audit.accounting import bytes_held
from kvbench.bench.clock import Clock, timed_attention
from kvbench.bench.sampling import Sampled, moves, sampled, skip, windows
from kvbench.engine.cuda_graph import Graph
from kvbench.engine.decode_layer import RowLayer
from kvbench.engine.patches import adapted
from kvbench.engine.prefill import prefill_chains
from kvbench.engine.step import build, given_up, step
from kvbench.methods.core.chain import Chain
from kvbench.models.interface import NAME, attached


@dataclass(frozen=True)
class Pass:
    """The cost of one pass: seconds, and bytes over all rows.

    ttft: until every row has its first token and the decode batch is built: prefill, compress and build.
    tpot: the mean time of one step over the whole generation.
    attention: the time in attention; None if it cannot be timed apart.
    total: measured around everything, or estimated if ``sampled`` is set.
    steps: each decode step that ran, by its own marks.
    cache_bytes: payload and overhead held after the prompts.
    read_bytes: the payload that a step reads, on average.
    tokens: [B, tokens that were run], on the CPU.
    sampled: the stretches of steps that ran, if not all did.
    """

    ttft: float
    prefill: float
    compress: float
    build: float
    decode: float
    tpot: float
    attention: float | None
    total: float
    steps: tuple[float, ...]
    cache_bytes: int
    read_bytes: float
    tokens: Tensor
    sampled: Sampled | None = None

    @property
    def integrated(self) -> bool:
        """Return True if most steps were not run but interpolated."""
        return self.sampled is not None


def run(
    model: PreTrainedModel,
    chain: Chain,
    ids: Tensor,
    new: int,
    sample: int | None = None,
    graph: bool = False,
) -> Pass:
    """Read ``ids`` [B, n], generate ``new`` tokens a row under ``chain``, and return the cost of that.

    With ``sample``, only so many steps run at each of several cache lengths, if the method allows it; the others are
    interpolated. With ``graph``, one recorded step decodes; recording it counts as build, and its attention is not
    timed. Running out of memory raises PyTorch's error. Raises KvbenchError if the step cannot be recorded.
    """
    clock = Clock(model.device)
    clock.wait()
    began = time.perf_counter()
    with torch.no_grad(), nullcontext() if graph else timed_attention(NAME, clock):
        caches = [prefill_chains(model, row, [chain])[0] for row in ids]
        first = torch.stack([c.logits for c in caches]).argmax(dim=-1)[:, None]
        clock.wait()
        prompts_s = time.perf_counter() - began
        prefill_attention_s = clock.attention_seconds()
        cache_bytes = sum(bytes_held(layer).total for c in caches for layer in (*c.layers, *c.local))
        prefill, compress = sum(c.prefill_s for c in caches), sum(c.compress_s for c in caches)
        stretches = windows(new - 1, sample) if sample is not None and moves(caches) else None
        with adapted(model, chain), attached(model):
            start = time.perf_counter()
            seen = caches[0].seen
            batch = build(model, given_up(caches), new - 1)
            next_logits = Graph(model, batch).step if graph else partial(step, model, batch)
            clock.wait()
            ready = time.perf_counter()
            reads = [_payload(batch)]
            # the time of counting bytes, subtracted from the total
            counting_s = start - began - prompts_s + time.perf_counter() - ready
            token, tokens, spans = first, [first], []
            for offset in stretches or [0]:
                skip(model, batch, offset - batch[0].used)
                for _ in range(new - 1 if stretches is None else sample or 0):
                    mark = clock.mark()
                    positions = torch.full_like(token, seen + batch[0].used)
                    # the next token stays on the device, without a copy to the processor
                    token = next_logits(token, positions)[:, -1].argmax(dim=-1)[:, None]
                    spans.append((mark, clock.mark()))
                    tokens.append(token)
            clock.wait()
            ended = time.perf_counter()
            reads.append(_payload(batch))
    steps = tuple(clock.seconds(*s) for s in spans)
    attention, ttft = clock.attention_seconds(), prompts_s + ready - start
    estimate = None if stretches is None else sampled(new - 1, stretches, steps)
    decode = estimate.seconds if estimate is not None else sum(steps)
    return Pass(
        ttft=ttft,
        prefill=prefill,
        compress=compress,
        build=ready - start,
        decode=decode,
        tpot=decode / (new - 1),
        attention=None if graph else prefill_attention_s + attention * decode / sum(steps),
        total=ttft + decode if estimate is not None else ended - began - counting_s,
        steps=steps,
        cache_bytes=cache_bytes,
        read_bytes=sum(reads) / len(reads),
        sampled=estimate,
        tokens=torch.cat(tokens, dim=1).cpu(),
    )


def _payload(batch: Sequence[RowLayer]) -> int:
    """Return the payload bytes that a step reads now."""
    return sum(sum(layer.payload()) for layer in batch)
