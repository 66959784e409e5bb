"""The text that a calibration reads: WikiText-2's train split, the tiny model's own corpus, or the user's file."""

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
SHARE = 0.8  # without a train split, calibrations read this share of the valid split
SEED = "calibration"
CORPUS_TOKENS = 1024  # the length of a tiny-corpus window if the recipe does not state one
CORPUS_LONGEST = 2048  # the tiny model was trained on sequences of at most this many tokens


@dataclass(frozen=True)
class FileText:
    """A text file to calibrate on. Its windows start at random places, may overlap, and begin with BOS.

    name: the text's name in messages and, with ``sha256``, in the identity of everything that is computed from it.
    content: the whole text.
    limit: the longest window if the recipe does not state a length; None: the model's context.
    """

    name: str
    content: str
    limit: int | None = None

    @cached_property
    def sha256(self) -> str:
        """The SHA-256 of the whole text."""
        return hashlib.sha256(self.content.encode()).hexdigest()

    def windows(self, tokenizer: Any, samples: int, tokens: int) -> Iterator[Tensor]:
        """Yield ``samples`` windows [tokens] of ids, always the same. Raises UsageError if the text is too short."""
        ids = torch.tensor(tokenizer.encode(self.content, add_special_tokens=False), dtype=torch.int64)
        # some tokenizers, such as Qwen's, have no BOS
        bos: list[int] = []
        if tokenizer.bos_token_id is not None:
            bos.append(tokenizer.bos_token_id)
        size = tokens - len(bos)
        if len(ids) < size:
            raise UsageError(
                f"the calibration text {self.name} has {len(ids)} tokens, fewer than one window of {tokens}: lower "
                "tokens=, or give a longer text"
            )
        # the seed depends on the request alone, so that every run computes the same calibration
        rng = random.Random(f"{SEED}/{samples}/{tokens}")
        for _ in range(samples):
            start = rng.randrange(len(ids) - size + 1)
            yield torch.cat([torch.tensor(bos, dtype=torch.int64), ids[start : start + size]])


@dataclass(frozen=True)
class CorpusText:
    """A text to calibrate the tiny model on: sequences of its training tasks, in the role of ``FileText``.

    Neither the model's training nor its evaluation uses the seeds of these sequences.
    """

    name: str = "the tiny model's corpus"
    limit: int | None = CORPUS_TOKENS

    @cached_property
    def sha256(self) -> str:
        """The SHA-256 of one window. It changes whenever the code that draws sequences changes."""
        # the corpus has ids of its own, so no tokenizer is needed
        (first,) = self.windows(None, samples=1, tokens=CORPUS_TOKENS)
        return hashlib.sha256(first.numpy().tobytes()).hexdigest()

    def windows(self, tokenizer: Any, samples: int, tokens: int) -> Iterator[Tensor]:
        """Yield ``samples`` windows [tokens] of ids, the same in every run.

        Raises UsageError if ``tokens`` is above 2048, the longest sequence of the training.
        """
        if tokens > CORPUS_LONGEST:
            raise UsageError(f"tokens={tokens} is not possible: {self.name} has sequences of up to {CORPUS_LONGEST}")
        mix = dict.fromkeys(tiny_corpus.TASKS, 1.0)
        for i in range(samples):
            rng = random.Random(f"{SEED}/{tokens}/{i}")
            # ``draw_sequence`` draws a sequence of one token more than its ``length``
            spans = tiny_corpus.draw_sequence(rng, tokens - 1, tiny_corpus.draw_tasks(rng, mix))
            ids: list[int] = []
            for span in spans:
                ids.extend(span.ids)
            yield torch.tensor(ids)


CalibrationText = FileText | CorpusText


def find(own_corpus: bool, user_file: str | None, data: str | None) -> CalibrationText:
    """Return the text to calibrate on: the user's file ``user_file``, else the tiny model's corpus, else WikiText-2.

    WikiText-2's train split is read below the data folder ``data``. If only the valid split is there, its first 80 %
    are read. The test split is never read, because results are measured on it. Raises UsageError, with the ways to get
    a text, if there is none.

    own_corpus: True for the tiny model, which is calibrated on its own corpus.
    """
    if user_file:
        path = Path(user_file).expanduser()
        content = read_text(path, f"calibration_text={user_file}")
        if not content.strip():
            raise UsageError(f"calibration_text={user_file} is empty")
        return FileText(f"the file {path.name}", content)
    if own_corpus:
        return CorpusText()
    files = Files("wikitext2", data_root(data))
    split_path = files.find_first(TRAIN, VALID)
    if split_path is None:
        raise UsageError(
            "calibration reads a text: fetch WikiText-2 (kvbench data fetch wikitext2), put its train split "
            f"at {TRAIN} below a data folder (data.root=FOLDER or the environment variable KVBENCH_DATA), or give "
            "calibration_text=FILE"
        )
    content = read_text(split_path, "calibration")
    if split_path.name == Path(TRAIN).name:
        return FileText(TRAIN, content)
    # the share of the valid split is cut at the end of a line
    end = content.rfind("\n", 0, int(SHARE * len(content))) + 1
    return FileText(f"{VALID}, first {SHARE:.0%}", content[:end])
