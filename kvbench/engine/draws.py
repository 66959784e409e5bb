"""Seeds of random numbers, so that a method draws alike for a prompt whatever was measured before it."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def seeded() -> Iterator[None]:
    """Seed the generators of torch, Python and NumPy for the context, and restore their states on exit."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=devices):
            _seed(0)
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def seed_generators(prompt: int, layer: int) -> None:
    """Seed the generators of torch, Python and NumPy by a prompt (``Observation.prompt``) and a layer of it."""
    _seed(zlib.crc32(f"{prompt}/{layer}".encode()))


def _seed(seed: int) -> None:
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        # torch.manual_seed would format the whole stack, as a note for a GPU's first use, which takes a millisecond
        torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
