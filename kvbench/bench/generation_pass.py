"""Run one pass of a method over a workload: read prompts one by one, compress, and answer them as one decode batch.

A pass uses the same prefill and the same decode batch as a run. Random weights never end an answer, so every row
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
from kvbench.engine.patches import adapted
from kvbench.engine.prefill import prefill_chains
from kvbench.engine.step import BatchLayers, build, give_up_caches, step
from kvbench.kv.segment import storage_bytes
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.prompt_cache import PromptCache
from kvbench.models.interface import NAME, attached


@dataclass(frozen=True)
class Pass:
    """The cost of one pass: seconds, and bytes over all rows.

    ttft: the time until every row has its first token and the decode batch is built: prefill, compress and build.
    tpot: the mean time of one step over the whole generation.
    attention: the time in attention; None if it cannot be timed apart.
    total: the time measured around everything, or estimated if ``sampled`` is set.
    steps: the time of each decode step that ran, by its own marks.
    cache_bytes: payload and overhead held after the prompts.
    read_bytes: the payload that a step reads, on average.
    tokens: the generated tokens [B, steps that ran], on the CPU.
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
        """Return True if most steps were interpolated and did not run."""
        return self.sampled is not None


def run(
    model: PreTrainedModel,
    chain: Chain,
    ids: Tensor,
    new: int,
    sample: int | None = None,
    graph: bool = False,
) -> Pass:
    """Read ``ids`` [B, n], generate ``new`` tokens a row under ``chain``, and return the cost.

    sample: how many steps run at each of several cache lengths, if the method allows it. The others are interpolated.
    graph: whether one recorded step decodes. Recording it counts as build, and its attention is not timed.

    Running out of memory raises PyTorch's error. Raises KvbenchError if the step cannot be recorded.
    """
    clock = Clock(model.device)
    clock.wait()
    began = time.perf_counter()
    # a recorded step calls no attention function that could be timed
    attention_timing = nullcontext() if graph else timed_attention(NAME, clock)
    with torch.no_grad(), attention_timing:
        caches = [prefill_chains(model, row, [chain])[0] for row in ids]
        # greedy tokens [B, 1]
        first = torch.stack([cache.logits for cache in caches]).argmax(dim=-1)[:, None]
        clock.wait()
        prompts_s = time.perf_counter() - began
        prompt_attention_s = clock.attention_seconds()
        cache_bytes = _bytes_held(caches)
        prefill_s = sum(cache.prefill_s for cache in caches)
        compress_s = sum(cache.compress_s for cache in caches)
        starts = None
        if sample is not None and moves(caches):
            starts = windows(new - 1, sample)
        with adapted(model, chain), attached(model):
            build_start = time.perf_counter()
            seen = caches[0].seen
            batch = build(model, give_up_caches(caches), new - 1)
            next_logits = Graph(model, batch).step if graph else partial(step, model, batch)
            clock.wait()
            build_end = time.perf_counter()
            payload_before = _payload(batch)
            # bytes were counted twice, after the prompts and just now; leave the time of counting out
            counting_s = build_start - began - prompts_s + time.perf_counter() - build_end
            tokens, spans = [first], []
            # all steps are one stretch, unless only samples of them run
            stretches, stretch_steps = [0], new - 1
            if starts is not None and sample is not None:
                stretches, stretch_steps = starts, sample
            for start in stretches:
                skip(model, batch, start - batch.used)
                for _ in range(stretch_steps):
                    step_start = clock.mark()
                    # rows that evict are not brought to a later length, so only the batch knows how many tokens have
                    # come
                    positions = torch.full_like(first, seen + batch.used)
                    # the next token stays on the device, without a copy to the processor
                    next_token = next_logits(tokens[-1], positions)[:, -1].argmax(dim=-1)[:, None]
                    spans.append((step_start, clock.mark()))
                    tokens.append(next_token)
            clock.wait()
            ended = time.perf_counter()
            payload_after = _payload(batch)
    steps = tuple(clock.seconds(start, end) for start, end in spans)
    decode_attention_s = clock.attention_seconds()
    ttft = prompts_s + build_end - build_start
    if starts is None:
        estimate = None
        decode_s = sum(steps)
        total_s = ended - began - counting_s
    else:
        estimate = sampled(new - 1, starts, steps)
        decode_s = estimate.seconds
        total_s = ttft + decode_s
    attention_s = None
    if not graph:
        # assume that attention has the same share of all steps as of the steps that ran
        attention_s = prompt_attention_s + decode_attention_s * decode_s / sum(steps)
    return Pass(
        ttft=ttft,
        prefill=prefill_s,
        compress=compress_s,
        build=build_end - build_start,
        decode=decode_s,
        tpot=decode_s / (new - 1),
        attention=attention_s,
        total=total_s,
        steps=steps,
        cache_bytes=cache_bytes,
        # the payload grows about evenly with the steps
        read_bytes=(payload_before + payload_after) / 2,
        sampled=estimate,
        tokens=torch.cat(tokens, dim=1).cpu(),
    )


def _bytes_held(caches: Sequence[PromptCache]) -> int:
    """Return the payload and overhead that all layers of ``caches`` hold, with windows and states."""
    total = 0
    for cache in caches:
        total += sum(bytes_held(layer).total for layer in cache.layers + cache.local)
        state_tensors: list[Tensor] = []
        for state in cache.states:
            state_tensors += state.tensors()
        # tensors that share a storage count once
        total += storage_bytes(state_tensors)
    return total


def _payload(batch: BatchLayers) -> int:
    """Return the bytes of keys, values and states that a step reads now."""
    return sum(sum(layer.payload()) for layer in batch.with_keys) + sum(state.nbytes() for state in batch.with_states)
