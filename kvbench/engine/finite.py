"""Refuse logits, keys and values that are not finite: results must not contain NaN or inf."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvbench.base.errors import Refused

if TYPE_CHECKING:
    from kvbench.methods.core.chain import Chain


def check_finite(chain: Chain, name: str, *tensors: Tensor) -> None:
    """Raise Refused unless all ``tensors`` of a prompt are finite.

    chain: the chain under which the prompt was computed.
    name: the tensors in words, for the message.
    """
    # a chain with a prefill key changes the prompt's computation, and may itself be at fault
    if not all(bool(t.isfinite().all()) for t in tensors):
        raise _build_refusal(chain, f"{name} of this prompt", tensors[0].dtype, by_model=not chain.prefill_key)


def build_answer_refusal(chain: Chain, dtype: torch.dtype) -> Refused:
    """Return the error for an answer, or for a scored text, whose logits were not finite."""
    return _build_refusal(chain, "logits while decoding", dtype, by_model=chain.is_full)


def _build_refusal(chain: Chain, name: str, dtype: torch.dtype, by_model: bool) -> Refused:
    """Return the error for numbers that are not finite, with the likely cause.

    name: the numbers in words.
    by_model: True if the model alone computed them, without any stage of the chain.
    """
    if by_model:
        owner = "the model's"
        cause = "NaN or inf stands in its weights or comes of its rope settings"
    else:
        owner = f"{chain.name}: the"
        cause = "method=full tells whether it is the model or the method"
    # float16 ends at 65504; activations of models trained in bfloat16 exceed it
    if dtype == torch.float16:
        cause += ", or float16 is too small: give dtype=bfloat16 or dtype=float32"
    return Refused(f"{owner} {name} are not finite (dtype={str(dtype).removeprefix('torch.')}): {cause}")
