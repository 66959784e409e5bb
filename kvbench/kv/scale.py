"""The factor of q.k, and what else a model does to its logits: a cap on them, and sinks that take attention.

A sink is a learned logit of a query head that stands for no token (gpt-oss). With l_j = scale q.k_j and the sink s:
p_j = exp(l_j) / (exp(s) + sum_i exp(l_i)), so that the weights of all tokens add up to less than 1.
"""

from __future__ import annotations

import torch
from torch import Tensor


class LogitScale(float):
    """The factor of q.k with the model's cap on logits (Gemma 2, arXiv 2408.00118, section 2) and its sinks.

    It is a float, so that statistics and storage formats pass it on like any other factor. Only ``capped`` reads the
    cap, after logits are computed, and only ``softmax`` and ``exponentials`` the sinks.

    cap: above 0; None if the model has none. sinks: [Hq, 1, 1], or [U, Hq, 1, 1] of several entries; None likewise.
    """

    cap: float | None
    sinks: Tensor | None

    @classmethod
    def of(cls, factor: float, cap: float | None = None, sinks: Tensor | None = None) -> float:
        """Return a factor that carries ``cap`` and ``sinks``, or the plain ``factor`` if there is neither."""
        if cap is None and sinks is None:
            return factor
        # float's own constructor takes no second argument
        scale = cls(factor)
        scale.cap, scale.sinks = cap, sinks
        return scale


def cap_of(scale: float) -> float | None:
    """Return the cap on logits that ``scale`` carries, or None."""
    if isinstance(scale, LogitScale):
        return scale.cap
    return None


def sinks_of(scale: float) -> Tensor | None:
    """Return the sinks that ``scale`` carries, or None."""
    if isinstance(scale, LogitScale):
        return scale.sinks
    return None


def is_plain(scale: float) -> bool:
    """Return True for a plain factor, without a cap or sinks. Fused attention functions support nothing else."""
    return not isinstance(scale, LogitScale)


def capped(logits: Tensor, scale: float) -> Tensor:
    """Return scaled logits under the cap of ``scale``: cap tanh(x / cap). Logits must not be masked yet."""
    cap = cap_of(scale)
    if cap is None:
        return logits
    # masks come later: the cap would turn a masked logit of -inf into -cap, and its token would be seen again
    return (logits / cap).tanh().mul_(cap)


def softmax(logits: Tensor, scale: float) -> Tensor:
    """Return the weights [..., Hq, T, S] of logits [..., Hq, T, S] in fp32, with the sinks of ``scale`` beside them."""
    sinks = sinks_of(scale)
    if sinks is None:
        return logits.float().softmax(dim=-1)
    beside = sinks.to(logits.device).float().expand(*logits.shape[:-1], 1)
    return torch.cat([logits.float(), beside], dim=-1).softmax(dim=-1)[..., :-1]


def exponentials(logits: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return (exp(l_j - top), their sum with the sink's), in place of fp32 logits [..., w, m]; the sum is [..., w, 1].

    The quotient of the two is the softmax. ``top`` is the largest logit of a row, or its sink.
    """
    top = logits.amax(dim=-1, keepdim=True)
    if sinks is None:
        weights = logits.sub_(top).exp_()
        return weights, weights.sum(dim=-1, keepdim=True)
    sinks = sinks.to(logits.device).float()
    top = torch.maximum(top, sinks)
    weights = logits.sub_(top).exp_()
    return weights, weights.sum(dim=-1, keepdim=True) + (sinks - top).exp()
