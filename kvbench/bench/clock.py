"""Measure time on a device: by CUDA events on a GPU, since they do not delay it, else by the processor's clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvbench.models.interface import synchronise

Mark = Any
"""A moment: seconds of the processor's clock, or an event in a CUDA stream."""


@dataclass
class Clock:
    """Times the work of one forward pass on a device, and the attention within it.

    attention: (start, end) of each attention call since ``attention_seconds`` was last called.
    """

    device: torch.device
    attention: list[tuple[Mark, Mark]] = field(default_factory=list)

    def mark(self) -> Mark:
        """Return the current moment in the device's work."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self) -> None:
        """Wait until the device has finished all queued work, so that spans can be read."""
        synchronise(self.device)

    def seconds(self, start: Mark, end: Mark) -> float:
        """Return the seconds between two moments. Call ``wait`` first."""
        if isinstance(start, float):
            return float(end - start)
        # CUDA events count milliseconds
        return float(start.elapsed_time(end)) / 1000

    def attention_seconds(self) -> float:
        """Return the seconds in attention since this method was last called. Call ``wait`` first."""
        total = sum(self.seconds(start, end) for start, end in self.attention)
        self.attention = []
        return total


@contextmanager
def timed_attention(name: str, clock: Clock) -> Iterator[None]:
    """While the context is open, ``clock`` times every call of the attention function registered as ``name``."""
    plain: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS[name]

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = clock.mark()
        output = plain(*args, **kwargs)
        clock.attention.append((start, clock.mark()))
        return output

    # transformers looks a function up in the instance's own mapping first, then in the mapping of the class
    ALL_ATTENTION_FUNCTIONS[name] = timed
    try:
        yield
    finally:
        # delete the instance's entry, so that the class's function is found again
        del ALL_ATTENTION_FUNCTIONS[name]
        # the plain function stood in the instance's mapping as well: put it back
        if ALL_ATTENTION_FUNCTIONS[name] is not plain:
            ALL_ATTENTION_FUNCTIONS[name] = plain
