"""The workloads to time: rows that read a prompt of random tokens and generate more."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.base.errors import UsageError

WRITTEN = re.compile(r"(?P<prompt>\d+)\+(?P<new>\d+)(?:x(?P<batch>\d+|max))?")
"""A workload on the command line: 512+32, 512+32x8 or 512+32xmax."""
FORM = "prompt+new or prompt+newxbatch, whole numbers, at least 2 new tokens, as in 512+32x8; xmax: the largest batch"


@dataclass(frozen=True)
class Workload:
    """A batch of rows that read ``prompt`` tokens and generate ``new`` more each.

    batch: the number of rows; None for as many as fit.
    """

    prompt: int
    new: int
    batch: int | None = 1

    @property
    def name(self) -> str:
        """The workload as it is written on the command line."""
        rows = "max" if self.batch is None else str(self.batch)
        return f"{self.prompt}+{self.new}x{rows}"

    def sized(self, batch: int) -> Workload:
        """Return the same workload for ``batch`` rows."""
        return Workload(self.prompt, self.new, batch)


def parse_workload(text: str) -> Workload:
    """Return the workload that a text states, for example 4096+64x8. Raises UsageError if it has not the form FORM."""
    error = UsageError(f"workloads={text} is not possible: {FORM}")
    match = WRITTEN.fullmatch(text.strip())
    if match is None:
        raise error
    prompt, new, batch = int(match["prompt"]), int(match["new"]), match["batch"] or "1"
    # an answer needs at least two tokens: the prompt gives the first, and only later ones come from a decode step
    if prompt < 1 or new < 2 or batch.strip("0") == "":
        raise error
    if batch == "max":
        return Workload(prompt, new, batch=None)
    return Workload(prompt, new, batch=int(batch))


def draw_prompts(workload: Workload, vocabulary: int, seed: int) -> Tensor:
    """Return random token ids [batch, prompt] below ``vocabulary``. Each row has a prompt of its own.

    The same ``seed`` gives the same prompts, so that every method reads the same.
    """
    assert workload.batch is not None, "the largest batch must be found first"
    # draw on the processor, so that a seed gives the same prompts on every device
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocabulary, (workload.batch, workload.prompt), generator=generator)
