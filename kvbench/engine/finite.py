"""NaN and inf are no results: what is told of logits, keys and values that are not finite."""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.errors import Refused
from kvbench.methods.chain import Chain


def check_finite(chain: Chain, what: str, *read: Tensor) -> None:
    """Raise Refused unless all numbers are finite of what was ``read`` of a prompt as ``chain`` computes it."""
    if not all(bool(t.isfinite().all()) for t in read):
        raise _refused(chain, f"{what} of this prompt", read[0].dtype, own=not chain.prefill_key)


def no_answer(chain: Chain, dtype: torch.dtype) -> Refused:
    """What to tell of an answer, or a scored text, of which some logits were not finite."""
    return _refused(chain, "logits while decoding", dtype, own=not chain.stages)


def _refused(chain: Chain, what: str, dtype: torch.dtype, own: bool) -> Refused:
    """``own``: nothing of the chain had a part in it."""
    cause = "method=full tells whether it is the model or the method"
    if own:
        cause = "NaN or inf stands in its weights or comes of its rope settings"
    if dtype == torch.float16:
        cause += ", or float16 is too small: give dtype=bfloat16 or dtype=float32"
    whose = "the model's" if own else f"{chain.name}: the"
    return Refused(f"{whose} {what} are not finite (dtype={str(dtype).removeprefix('torch.')}): {cause}")
