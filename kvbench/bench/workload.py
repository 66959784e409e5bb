"""What is timed: so many rows that read a prompt of random tokens and generate so many more."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.errors import UsageError

WRITTEN = re.compile(r"(\d+)\+(\d+)(?:x(\d+|max))?")
FORM = "prompt+new or prompt+newxbatch, whole numbers, at least 2 new tokens, as in 512+32x8; xmax: the largest batch"


@dataclass(frozen=True)
class Workload:
    """``batch`` rows of ``prompt`` tokens that generate ``new`` more each; batch None: as many as fit."""

    prompt: int
    new: int
    batch: int | None = 1

    @property
    def name(self) -> str:
        """As it is written on the command line."""
        return f"{self.prompt}+{self.new}x{'max' if self.batch is None else self.batch}"

    def sized(self, batch: int) -> Workload:
        """The same text for ``batch`` rows."""
        return Workload(self.prompt, self.new, batch)


def parse(text: str) -> Workload:
    """A workload as written (FORM); raises UsageError naming what is not possible."""
    found = WRITTEN.fullmatch(text.strip())
    if not found or int(found[1]) < 1 or int(found[2]) < 2 or found[3] == "0":
        raise UsageError(f"workloads={text} is not possible: {FORM}")
    batch = found[3] or "1"
    return Workload(int(found[1]), int(found[2]), None if batch == "max" else int(batch))


def prompts(workload: Workload, vocabulary: int, seed: int) -> Tensor:
    """Random token ids [batch, prompt], another prompt for each row, the same for every method."""
    assert workload.batch is not None
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocabulary, (workload.batch, workload.prompt), generator=g)
