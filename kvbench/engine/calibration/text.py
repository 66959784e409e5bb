"""The text that a calibration reads: WikiText-2's train split, the tiny model's own corpus, or a file of the user's."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvbench.base.errors import UsageError
from kvbench.engine.calibration import tiny_corpus
from kvbench.tasks.base import read_text
from kvbench.tasks.source import Files, data_root

TRAIN, VALID = "wikitext2/train.txt", "wikitext2/valid.txt"
SHARE = 0.8  # of the valid split, where there is no train split
SEED = "calibration"
CORPUS_TOKENS = 1024  # of a window of the tiny corpus where the recipe says nothing
CORPUS_LONGEST = 2048  # tokens of its longest sequences


@dataclass(frozen=True)
class FileText:
    """A text of characters. Windows of it start at random places, may overlap, and have BOS in front.

    ``name`` and ``sha256`` identify what is computed from it. ``limit`` is the longest window that is read where the
    recipe says nothing; None for as long as the model's context.
    """

    name: str
    content: str
    limit: int | None = None

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.content.encode()).hexdigest()

    def windows(self, tokenizer: Any, samples: int, tokens: int) -> Iterator[Tensor]:
        """Yield ``samples`` windows [tokens] of ids, always the same. Raises UsageError if the text is too short."""
        ids = torch.tensor(tokenizer.encode(self.content, add_special_tokens=False), dtype=torch.int64)
        bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        size = tokens - len(bos)
        if len(ids) < size:
            raise UsageError(
                f"the calibration text {self.name} has {len(ids)} tokens, fewer than one window of {tokens}: lower "
                "tokens=, or give a longer text"
            )
        rng = random.Random(f"{SEED}/{samples}/{tokens}")
        for _ in range(samples):
            start = rng.randrange(len(ids) - size + 1)
            yield torch.cat([torch.tensor(bos, dtype=torch.int64), ids[start : start + size]])


@dataclass(frozen=True)
class CorpusText:
    """Sequences of the tiny model's training tasks, by seeds that neither its training nor its evaluation uses."""

    name: str = "the tiny model's corpus"
    limit: int | None = CORPUS_TOKENS

    @cached_property
    def sha256(self) -> str:
        (first,) = self.windows(None, 1, CORPUS_TOKENS)
        return hashlib.sha256(first.numpy().tobytes()).hexdigest()

    def windows(self, tokenizer: Any, samples: int, tokens: int) -> Iterator[Tensor]:
        """Yield ``samples`` windows [tokens] of ids, always the same. Raises UsageError if ``tokens`` is too large.

        The largest is 2048, as in training.
        """
        if tokens > CORPUS_LONGEST:
            raise UsageError(f"tokens={tokens} is not possible: {self.name} has sequences of up to {CORPUS_LONGEST}")
        mix = dict.fromkeys(tiny_corpus.TASKS, 1.0)
        for i in range(samples):
            rng = random.Random(f"{SEED}/{tokens}/{i}")
            spans = tiny_corpus.questions(rng, tokens - 1, tiny_corpus.draw_tasks(rng, mix))
            yield torch.tensor([token for span in spans for token in span.ids])


CalibrationText = FileText | CorpusText


def find(own_corpus: bool, given: str | None, data: str | None) -> CalibrationText:
    """Return the text to calibrate on: the file ``given`` if any, the tiny model's corpus for it, else WikiText-2.

    Of WikiText-2 it is the train split below the data folder, or the first 80 % of the valid split where only that is
    there; it is never the test split. Raises UsageError, with the ways to get a text, if there is none.
    """
    if given:
        path = Path(given).expanduser()
        content = read_text(path, f"calibration_text={given}")
        if not content.strip():
            raise UsageError(f"calibration_text={given} is empty")
        return FileText(f"the file {path.name}", content)
    if own_corpus:
        return CorpusText()
    files = Files("wikitext2", data_root(data))
    path_found = files.first(TRAIN, VALID)
    if path_found is None:
        raise UsageError(
            "calibration reads a text: fetch WikiText-2 (python -m kvbench data fetch wikitext2), put its train split "
            f"at {TRAIN} below a data folder (data.root=FOLDER or the environment variable KVBENCH_DATA), or give "
            "calibration_text=FILE"
        )
    content = read_text(path_found, "calibration")
    if path_found.name == Path(TRAIN).name:
        return FileText(TRAIN, content)
    return FileText(f"{VALID}, first {SHARE:.0%}", content[: content.rfind("\n", 0, int(SHARE * len(content))) + 1])
