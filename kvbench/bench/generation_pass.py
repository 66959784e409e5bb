"""Run one pass of a method over a workload: read prompts one by one, compress, and answer them as one decode batch.

A pass uses the same prefill and the same decode batch as a run. Random weights never end an answer, so every row
generates all of its tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.audit.accounting import bytes_held
from kvbench.bench.clock import Clock, timed_attention
from kvbench.bench.sampling import Sampled, can_be_lengthened, lengthen, place_stretches, summarise_stretches
from kvbench.engine.cuda_graph import Graph
from kvbench.engine.patches import adapted
from kvbench.engine.prefill import prefill_chains
from kvbench.engine.step import BatchLayers, build, give_up_caches, step
from kvbench.kv.segment import storage_bytes
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.prompt_cache import PromptCache
from kvbench.models.interface import NAME, attached

NextLogits = Callable[[Tensor, Tensor], Tensor]
"""A decode step: tokens [B, 1] at positions [B, 1] to logits [B, 1, V]."""


@dataclass(frozen=True)
class Pass:
    """The cost of one pass: seconds, and bytes over all rows.

    ttft: the time until every row has its first token and the decode batch is built: prefill, compress and build.
    decode: the time of all steps after the first token.
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
        """True if most steps were interpolated and did not run."""
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
    # the prompt gives the first of the new tokens
    steps = new - 1
    attention_timing: AbstractContextManager[None] = nullcontext()
    # a recorded step calls no attention function that could be timed
    if not graph:
        attention_timing = timed_attention(NAME, clock)
    with torch.no_grad(), attention_timing:
        prompts = _read_prompts(model, chain, ids, clock)
        caches = prompts.caches
        # ask the caches before the batch is built: building it empties them
        cache_bytes = _count_bytes(caches)
        prefill_s = sum(cache.prefill_s for cache in caches)
        compress_s = sum(cache.compress_s for cache in caches)
        # the prompts of a workload are equally long
        seen = caches[0].seen
        stretches = _choose_stretches(caches, steps, sample)
        with adapted(model, chain), attached(model):
            build_start = time.perf_counter()
            batch = build(model, give_up_caches(caches), steps)
            next_logits: NextLogits = partial(step, model, batch)
            if graph:
                next_logits = Graph(model, batch).step
            clock.wait()
            build_s = time.perf_counter() - build_start
            payload_before = _count_payload(batch)
            decoded = _decode(model, batch, next_logits, prompts.tokens, seen=seen, stretches=stretches, clock=clock)
            payload_after = _count_payload(batch)
    ttft = prompts.seconds + build_s
    # the time in which bytes were counted, before the batch was built and after it, is left out
    total_s = ttft + decoded.seconds
    decode_s = sum(decoded.steps)
    estimate = None
    if stretches.are_samples:
        estimate = summarise_stretches(steps, stretches.starts, decoded.steps)
        decode_s = estimate.seconds
        total_s = ttft + decode_s
    attention_s = None
    if not graph:
        # assume that attention takes the same part of all steps as of the steps that ran
        attention_s = prompts.attention + decoded.attention * decode_s / sum(decoded.steps)
    return Pass(
        ttft=ttft,
        prefill=prefill_s,
        compress=compress_s,
        build=build_s,
        decode=decode_s,
        tpot=decode_s / steps,
        attention=attention_s,
        total=total_s,
        steps=decoded.steps,
        cache_bytes=cache_bytes,
        # the payload grows about evenly with the steps
        read_bytes=(payload_before + payload_after) / 2,
        sampled=estimate,
        tokens=decoded.tokens.cpu(),
    )


@dataclass(frozen=True)
class _Prompts:
    """Prompts that were read and compressed.

    caches: the compressed cache of each prompt.
    tokens: the first token of each answer [B, 1].
    seconds: the time that all prompts took.
    attention: the part of ``seconds`` in attention; 0 if attention is not timed.
    """

    caches: list[PromptCache]
    tokens: Tensor
    seconds: float
    attention: float


def _read_prompts(model: PreTrainedModel, chain: Chain, ids: Tensor, clock: Clock) -> _Prompts:
    """Read and compress the prompts ``ids`` [B, n] one after the other."""
    clock.wait()
    start = time.perf_counter()
    caches = []
    for prompt in ids:
        # one cache for each chain
        caches += prefill_chains(model, prompt, [chain])
    tokens = torch.stack([cache.logits for cache in caches]).argmax(dim=-1)[:, None]
    clock.wait()
    seconds = time.perf_counter() - start
    return _Prompts(caches, tokens, seconds, clock.attention_seconds())


@dataclass(frozen=True)
class _Stretches:
    """The stretches of decode steps that run.

    starts: the number of the first step of each stretch.
    width: the number of steps in each stretch.
    are_samples: whether steps between the stretches are left out; otherwise one stretch has all steps.
    """

    starts: Sequence[int]
    width: int
    are_samples: bool


def _choose_stretches(caches: Sequence[PromptCache], steps: int, sample: int | None) -> _Stretches:
    """Return stretches of ``sample`` steps, or one stretch of all steps.

    All steps run if ``sample`` is None, if the method does not allow samples, or if samples would save no step.
    """
    if sample is not None and can_be_lengthened(caches):
        starts = place_stretches(steps, sample)
        if starts is not None:
            return _Stretches(starts, sample, are_samples=True)
    return _Stretches([0], steps, are_samples=False)


@dataclass(frozen=True)
class _Decoded:
    """The steps of a decode batch that ran.

    tokens: the first token and that of each step [B, 1 + steps].
    steps: the time of each step, by its own marks.
    seconds: the time around all steps, with the time between them.
    attention: the part of ``seconds`` in attention; 0 if attention is not timed.
    """

    tokens: Tensor
    steps: tuple[float, ...]
    seconds: float
    attention: float


def _decode(
    model: PreTrainedModel,
    batch: BatchLayers,
    next_logits: NextLogits,
    first: Tensor,
    *,
    seen: int,
    stretches: _Stretches,
    clock: Clock,
) -> _Decoded:
    """Run and time the decode steps of ``stretches``.

    Steps between stretches do not run: the caches are lengthened by as many random tokens instead.

    batch: the rows to decode, which have read ``seen`` tokens each.
    next_logits: runs one step of ``batch``.
    first: the tokens [B, 1] that the first step reads.
    """
    start = time.perf_counter()
    tokens, marks = [first], []
    for stretch_start in stretches.starts:
        lengthen(model, batch, stretch_start - batch.used)
        for _ in range(stretches.width):
            step_start = clock.mark()
            # rows that evict are not brought to a later length, so only the batch knows how many tokens have come
            positions = torch.full_like(first, seen + batch.used)
            # the next token stays on the device, without a copy to the processor
            next_token = next_logits(tokens[-1], positions)[:, -1].argmax(dim=-1)[:, None]
            marks.append((step_start, clock.mark()))
            tokens.append(next_token)
    clock.wait()
    seconds = time.perf_counter() - start
    steps = tuple(clock.seconds(step_start, step_end) for step_start, step_end in marks)
    return _Decoded(torch.cat(tokens, dim=1), steps, seconds, clock.attention_seconds())


def _count_bytes(caches: Sequence[PromptCache]) -> int:
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


def _count_payload(batch: BatchLayers) -> int:
    """Return the bytes of keys, values and states that a step reads now."""
    total = sum(state.nbytes() for state in batch.with_states)
    for layer in batch.with_keys:
        total += sum(layer.payload())
    return total
