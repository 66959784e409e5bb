"""The factor of q.k, with a model's other changes to its logits: a cap on them, and sinks that take attention.

A sink is a learned logit of a query head that stands for no token (gpt-oss). With l_j = scale q.k_j and the sink s:
p_j = exp(l_j) / (exp(s) + sum_i exp(l_i)), so that the weights of all tokens add up to less than 1.
"""

from __future__ import annotations

import torch
from torch import Tensor


class LogitScale(float):
    """The factor of q.k with the model's cap on logits (Gemma 2, arXiv 2408.00118, section 2) and its sinks.

    It is a float, so that statistics and storage formats pass it on like any other factor. Only ``capped`` reads the
    cap, after logits are computed. Callers of ``softmax`` and ``exponentiate`` give them the sinks (``sinks_of``).

    cap: the cap, above 0; None if the model has no cap.
    sinks: [Hq, 1, 1], or [U, Hq, 1, 1] for several entries of a batch; None if the model has no sinks.
    """

    cap: float | None
    sinks: Tensor | None

    @classmethod
    def of(cls, factor: float, cap: float | None = None, sinks: Tensor | None = None) -> LogitScale | float:
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
    """Return logits x, already multiplied by ``scale``, under its cap: cap tanh(x / cap), or x itself without a cap.

    The logits must not be masked yet.
    """
    cap = cap_of(scale)
    if cap is None:
        return logits
    # masks come later: the cap would turn a masked logit of -inf into -cap, and its token would be seen again
    return (logits / cap).tanh().mul_(cap)


def softmax(logits: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the softmax in fp32 of logits [..., Hq, T, S]. Masked logits are -inf.

    Each of ``sinks`` [..., Hq, 1, 1] takes its share of a row's weights, and gets no column of its own.
    """
    if sinks is None:
        return logits.float().softmax(dim=-1)
    sink_column = sinks.to(logits.device).float().expand(*logits.shape[:-1], 1)
    return torch.cat([logits.float(), sink_column], dim=-1).softmax(dim=-1)[..., :-1]


def exponentiate(logits: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Overwrite fp32 logits l [..., w, m] by exp(l - top), where top is the largest of a row's logits and its sink.

    Return (the overwritten logits, their sum [..., w, 1]). The sum includes the sink's exp(s - top). The quotient of
    the two is the softmax. Masked logits are -inf. Without sinks, every row needs a logit that is not masked.
    """
    top = logits.amax(dim=-1, keepdim=True)
    if sinks is None:
        weights = logits.sub_(top).exp_()
        return weights, weights.sum(dim=-1, keepdim=True)
    sinks = sinks.to(logits.device).float()
    top = torch.maximum(top, sinks)
    weights = logits.sub_(top).exp_()
    return weights, weights.sum(dim=-1, keepdim=True) + (sinks - top).exp()
