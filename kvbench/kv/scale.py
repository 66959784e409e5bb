"""The factor of q.k. Some models also cap the logits: their factor carries the cap."""

from __future__ import annotations

from torch import Tensor


class CappedScale(float):
    """The factor of q.k under a cap on logits (Gemma 2, arXiv 2408.00118, section 2).

    It is a float, so that statistics and storage formats pass it on like any other factor. Only ``capped`` reads the
    cap, after logits are computed.
    """

    cap: float

    @classmethod
    def of(cls, factor: float, cap: float | None) -> float:
        """Return a factor that carries ``cap`` (above 0), or the plain ``factor`` if ``cap`` is None."""
        if cap is None:
            return factor
        # float's own constructor takes no second argument
        scale = cls(factor)
        scale.cap = cap
        return scale


def cap_of(scale: float) -> float | None:
    """Return the cap on logits that ``scale`` carries, or None."""
    if isinstance(scale, CappedScale):
        return scale.cap
    return None


def capped(logits: Tensor, scale: float) -> Tensor:
    """Return scaled logits under the cap of ``scale``: cap tanh(x / cap). Logits must not be masked yet."""
    cap = cap_of(scale)
    if cap is None:
        return logits
    # masks come later: the cap would turn a masked logit of -inf into -cap, and its token would be seen again
    return (logits / cap).tanh().mul_(cap)
