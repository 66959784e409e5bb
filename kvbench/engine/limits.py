"""Limits on the texts that a model reads: checks of lengths and settings, with reasons in their errors."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from kvbench.base.conf import check, is_whole
from kvbench.base.errors import UsageError
from kvbench.kv.model_shape import indexer_reach
from kvbench.methods.core.chain import Chain
from kvbench.models import traits
from kvbench.models.interface import sliding_window

MOST_TOKENS = 2**31 - 1
"""The longest text. Positions are numbers of 32 bits."""


def read_token_count(key: str, value: Any) -> int:
    """Return ``value``, a number of tokens that the user gave as option ``key``, as an int.

    Scalars of torch or NumPy are taken as well. Raises UsageError for anything else, and for numbers below 1.
    """
    count = value
    # only scalars of torch or NumPy have ``tolist``, which makes plain numbers of them
    if hasattr(value, "tolist"):
        count = value.tolist()
    check(key, value, is_whole(count) and 1 <= count <= MOST_TOKENS, f"a whole number, 1 to {MOST_TOKENS}")
    return int(count)


def check_precision() -> None:
    """Raise UsageError if torch.autocast is on: layers would compute in other dtypes than caches declare."""
    devices = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    if devices:
        raise UsageError(
            f"torch.autocast({devices[0]!r}) is not possible here: tokens and bytes are held to the model's own dtype. "
            "Leave it, or load the model with dtype='bfloat16'"
        )


def find_longest_text(model: PreTrainedModel) -> int | None:
    """Return the most tokens of a text that the model can read in kvbench; None if it has no such limit.

    The limit is the size of a table of learned positions (OPT), or the number of tokens that an indexer chooses.
    """
    reach = indexer_reach(model.config)
    if reach is not None:
        return reach
    # rotary positions have no table, so a text may be longer than the model was made for
    if traits.learned_positions(model):
        return getattr(model.config, "max_position_embeddings", None)
    return None


def check_capacity(model: PreTrainedModel, tokens: int) -> None:
    """Raise UsageError if a text of ``tokens`` tokens is longer than ``find_longest_text``."""
    limit = find_longest_text(model)
    if limit is None or tokens <= limit:
        return
    if indexer_reach(model.config) is not None:
        raise UsageError(
            f"prompt + new tokens = {tokens}, and the model's indexer chooses {limit} tokens for each query: kvbench "
            f"runs the model where they are all tokens. Shorten the prompt or lower max_new_tokens to stay within "
            f"{limit}"
        )
    raise UsageError(
        f"prompt + new tokens = {tokens} exceed the model's {limit} learned positions: "
        "shorten the prompt or lower max_new_tokens"
    )


def warn_beyond_context(model: PreTrainedModel, tokens: int, stacklevel: int) -> None:
    """Warn if a text of ``tokens`` tokens is longer than the model was made for.

    ``stacklevel`` is that of ``warnings.warn``, counted from the caller: 1 names the caller's own line.
    """
    # some families have no such number
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and tokens > limit:
        text = f"prompt and new tokens are {tokens}, more than the {limit} that the model was made for"
        warnings.warn(text, stacklevel=stacklevel + 1)  # the 1 stands for this function


def check_window(model: PreTrainedModel, tokens: int, chains: Sequence[Chain]) -> None:
    """Raise UsageError if a text of ``tokens`` tokens outgrows the model's sliding window and a chain compresses it."""
    window = sliding_window(model.config)
    if window is None or tokens <= window:
        return
    # beyond the window the model forgets tokens by itself, and no budget accounts for that
    compressing = [chain.name for chain in chains if chain.stages]
    if compressing:
        raise UsageError(
            f"the model attends only to a sliding window of {window} tokens and prompt + new tokens are {tokens}: "
            f"beyond the window only method=full runs, not {', '.join(compressing)}"
        )


def check_turn(model: PreTrainedModel, read: int, tokens: int) -> None:
    """Raise UsageError if the rotation of keys changes while a text grows from ``read`` to ``tokens`` tokens."""
    if is_beyond_turn(model, tokens) and not is_beyond_turn(model, read):
        turn = traits.turning_point(model.config)
        raise UsageError(
            f"the model rotates texts of more than {turn} tokens by other frequencies (LongRoPE), and prompt + new "
            f"tokens are {read} + {tokens - read}: the rotation would change in the middle of the answer. Shorten the "
            f"prompt or lower max_new_tokens to stay within {turn}, or give a prompt longer than that"
        )


def is_beyond_turn(model: PreTrainedModel, tokens: int) -> bool:
    """Return True if the model has other rotary frequencies for long texts, and ``tokens`` tokens are a long text."""
    turn = traits.turning_point(model.config)
    return turn is not None and tokens > turn
