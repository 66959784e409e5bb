"""The tiny model's tokenizer: one token per word of the tasks, one per byte of everything else.

Byte-level pieces (as in GPT-2) without merges: a pre-token that is in the vocabulary becomes one token, any other is
spelled in bytes. Hence any text is encoded without an unknown token and decoded to exactly the same text.
"""

from __future__ import annotations

import random
import re
from functools import cache

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from kvbench.engine.calibration.tiny_corpus import BOS
from kvbench.tasks import tiny

PAD = 0
SPECIAL = ("<pad>", "<s>", "</s>")
N_BYTES = 256
FIRST_WORD = len(SPECIAL) + N_BYTES
"""Ids below are special tokens and single bytes; from here on, digits, signs and words with their leading space."""


@cache
def vocabulary() -> dict[str, int]:
    """Return the ids of pieces in their byte-level spelling (a space is ``Ġ``)."""
    letters = _byte_letters()
    pieces = [*(f" {digit}" for digit in range(10)), " =", " =>", *(f" {word}" for word in words())]
    # only the word that starts every prompt has no space before it
    pieces.append(tiny.HEADER.removesuffix(":"))
    spelled = ["".join(letters[byte] for byte in piece.encode()) for piece in pieces]
    return {piece: index for index, piece in enumerate([*SPECIAL, *letters, *spelled])}


def words() -> list[str]:
    """Return every word of the tasks, sorted: the word pieces of the tokenizer."""
    rng = random.Random(0)
    puzzles = [spec.puzzle(rng, 2) for spec in tiny.TASKS.values()]
    texts = [text for p in puzzles for text in (*p.facts, *(f"{q.question} {q.answer}" for q in p.queries))]
    texts += [re.sub(r"\{\w\}", "", template) for template in tiny.FILLER + tiny.SHORT_FILLER]
    known = {word for group in tiny.WORDS.values() for word in group}
    return sorted(known | {word for text in texts for word in re.findall(r"[a-z]+", text)})


def build() -> PreTrainedTokenizerFast:
    """Build the tokenizer as transformers loads it. ``<s>`` is added in front, and there is no chat template.

    Training encodes by the file in the package, so save a changed one there before training.
    """
    # ignore_merges takes a whole pre-token from the vocabulary; without merges the rest stays single bytes
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary(), merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(tiny.PIECE), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", BOS)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        model_max_length=tiny.MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )


def _byte_letters() -> list[str]:
    """Return the printable letter for each byte: itself where printable, else the next free one from U+0100."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    free = iter(range(N_BYTES, 2 * N_BYTES))
    return [chr(byte) if byte in printable else chr(next(free)) for byte in range(N_BYTES)]
