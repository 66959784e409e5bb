"""The factor of q.k, with the cap that some models put on the logits that it gives."""

from __future__ import annotations

from torch import Tensor


class CappedScale(float):
    """The factor of q.k under a cap on logits (Gemma 2, arXiv 2408.00118, section 2).

    It is a float, so that it takes the road of every other factor, through statistics and storage formats, to where
    logits are made. ``capped`` of them is the one place that reads the cap.
    """

    cap: float

    @classmethod
    def of(cls, factor: float, cap: float | None) -> float:
        """Return ``factor`` under a cap above 0, or as it is if that is None."""
        if cap is None:
            return factor
        scale = cls(factor)
        scale.cap = cap
        return scale


def cap_of(scale: float) -> float | None:
    """Return the cap on the logits that ``scale`` gives, or None."""
    return scale.cap if isinstance(scale, CappedScale) else None


def capped(logits: Tensor, scale: float) -> Tensor:
    """Return scaled logits under the cap of ``scale``: before any of them is hidden, as the cap would show it again."""
    cap = cap_of(scale)
    # cap tanh(x / cap)
    return logits if cap is None else (logits / cap).tanh().mul_(cap)
