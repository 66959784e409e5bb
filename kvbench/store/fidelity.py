"""Fidelity: the distance of a cell's next-token distributions from the full cache's, over prompts, with intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, sqrt
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvbench.tasks.metrics import stats

TOKENS = 256
"""The most tokens of a text that is forced on an answer's cache, unless ``kl_tokens=`` says another number."""
IDENTITY: Mapping[str, object] = {"tokens": TOKENS, "revision": 1}
"""The default settings of a comparison, which are part of a cell's identity."""


def fidelity_identity(tokens: int | None) -> dict[str, object]:
    """Return the settings that decide which texts are compared, for a cell's identity.

    tokens: the most tokens of a text; None: the default.
    """
    facts = dict(IDENTITY)
    if tokens is not None:
        facts["tokens"] = tokens
    return facts


KINDS = ("reference", "greedy")
"""The texts compared on: the reference that the data give, and the full cache's own greedy answer."""
ABOVE_FLOOR = 3.0
"""Divergences below this multiple of the floor, which is the divergence that rounding alone makes, say nothing."""
CODED = "Formats that code new tokens (decode=coded) change by more, since a code can flip."
"""The exception to a floor, measured by scripts/rounding.py."""
FOR_PERCENTILE = {"kl_p90": (90, 100), "kl_p99": (99, 1_000), "kl_p999": (99.9, 10_000)}
"""The percentiles shown, each with the fewest tokens that it needs."""


class TextSums(NamedTuple):
    """Sums over the scored positions of one text.

    tokens: the number of positions.
    kl: the sum of the divergences in nats.
    same: the number of positions at which both distributions have the same first choice.
    log_ratio: the sum of ``ln p(y) - ln q(y)``, as in TextFidelity.
    """

    tokens: float
    kl: float
    same: float
    log_ratio: float


# the columns of an array with a row of TextSums for each text
_TOKENS, _KL, _SAME, _LOG_RATIO = range(4)


@dataclass(frozen=True)
class TextFidelity:
    """The comparison of one row with the full cache on one text, at each scored position. Sums are over positions.

    p is the full cache's distribution of the next token, q is the row's.

    kl: divergences in nats, rounded to four digits.
    same: "1" where both have the same first choice, else "0".
    log_ratio: the sum of ``ln p(y) - ln q(y)``, y being the text's own next token.
    shift: the sum of ``(q(y) - p(y))^2``.
    loss: the sum of ``-ln q(y)``.
    floor: the mean divergence after changing one element of each first key by one unit in its last place.
    document: the document of which the text is one of several windows; '' for a text of its own.
    """

    kl: tuple[float, ...]
    same: str
    log_ratio: float
    shift: float
    loss: float
    floor: float
    document: str = ""

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> TextFidelity:
        """Return the fidelity in the JSON of a stored sample."""
        values = dict(record)
        values["kl"] = tuple(record["kl"])
        return cls(**values)

    def record(self) -> dict[str, Any]:
        """Return the fidelity as a stored sample's JSON has it."""
        # most texts are not windows of a document: they do not store an empty one
        return {name: value for name, value in vars(self).items() if name != "document" or value}

    @property
    def sums(self) -> TextSums:
        """The sums over positions from which means and intervals over several texts are made."""
        return TextSums(
            tokens=float(len(self.kl)),
            kl=float(np.sum(self.kl)),
            same=float(self.same.count("1")),
            log_ratio=self.log_ratio,
        )


@dataclass(frozen=True)
class FidelitySummary:
    """The fidelity of a cell on one kind of text, pooled over its tokens; intervals are over prompts or documents.

    n, n_tokens: the number of texts, one a prompt, and of their scored tokens.
    kl_mean, kl_median, kl_max: the divergence from the full cache in nats, over tokens.
    kl_p90, kl_p99, kl_p999: its percentiles 90, 99 and 99.9; None on too few tokens (see FOR_PERCENTILE).
    ci, top1_ci, ppl_ratio_ci: the 95 % intervals of ``kl_mean``, ``top1`` and ``ppl_ratio``.
    top1: equal first choices in per cent.
    shift_rms: the root mean square of the true token's change in probability, in percentage points.
    ppl_ratio: the perplexity over the full cache's.
    perplexity: the method's own perplexity.
    floor: the divergence that rounding alone makes.
    at_floor: True if the mean divergence is at most ABOVE_FLOOR times the floor, and so may be rounding.
    """

    n: int
    n_tokens: int
    kl_mean: float
    ci: stats.Interval | None
    kl_median: float
    kl_p90: float | None
    kl_p99: float | None
    kl_p999: float | None
    kl_max: float
    top1: float
    top1_ci: stats.Interval | None
    shift_rms: float
    perplexity: float
    ppl_ratio: float
    ppl_ratio_ci: stats.Interval | None
    floor: float
    at_floor: bool


def join_texts(texts: Sequence[TextFidelity]) -> TextFidelity:
    """Return the comparisons on several texts, at least one, as that on one text with all their positions."""
    kl = tuple(value for text in texts for value in text.kl)
    # every position weighs the same, whichever text it is in
    floor = sum(len(text.kl) * text.floor for text in texts) / len(kl)
    return TextFidelity(
        kl=kl,
        same="".join(text.same for text in texts),
        log_ratio=sum(text.log_ratio for text in texts),
        shift=sum(text.shift for text in texts),
        loss=sum(text.loss for text in texts),
        floor=floor,
    )


def diverges(text: TextFidelity) -> bool:
    """Return True if a row's mean divergence from the full cache on a text exceeds the divergence of rounding."""
    return float(np.mean(text.kl)) > ABOVE_FLOOR * text.floor


def summarise_texts(texts: Sequence[TextFidelity]) -> FidelitySummary | None:
    """Return the summary over the texts of one cell, one text a prompt; None without texts."""
    if not texts:
        return None
    # [tokens of all texts]: every token weighs the same, whichever text it is in
    kl = np.concatenate([text.kl for text in texts])
    # [texts, 4]: a row of TextSums for each text
    sums = np.array([text.sums for text in texts])
    tokens, kl_sum, same, log_ratio = sums.sum(0).tolist()
    # every mean is a sum over all texts / the number of all tokens; its interval is over the documents' sums
    clusters = _sum_by_document(sums, texts)
    same_interval = stats.pooled_interval(clusters[:, [_SAME, _TOKENS]], bounds=(0.0, 1.0))
    log_ratio_interval = stats.pooled_interval(clusters[:, [_LOG_RATIO, _TOKENS]], bounds=None)
    mean_shift = sum(text.shift for text in texts) / tokens
    mean_loss = sum(text.loss for text in texts) / tokens
    # a text counts by its tokens, as in the other means
    floor = float(np.average([text.floor for text in texts], weights=sums[:, _TOKENS]))
    return FidelitySummary(
        n=len(texts),
        n_tokens=len(kl),
        kl_mean=kl_sum / tokens,
        ci=stats.ratio_interval(clusters[:, [_KL, _TOKENS]]),
        kl_median=float(np.median(kl)),
        **{name: _compute_percentile(kl, name) for name in FOR_PERCENTILE},
        kl_max=float(kl.max()),
        top1=100 * same / tokens,
        top1_ci=stats.in_percent(same_interval),
        # square root of the mean of (q(y) - p(y))^2, in percentage points
        shift_rms=100 * sqrt(mean_shift),
        # perplexity is exp(-mean ln q(y)); over the full cache's it is exp(mean (ln p(y) - ln q(y)))
        perplexity=exp(mean_loss),
        ppl_ratio=exp(log_ratio / tokens),
        ppl_ratio_ci=_exponentiate(log_ratio_interval),
        floor=floor,
        at_floor=kl_sum / tokens <= ABOVE_FLOOR * floor,
    )


def _compute_percentile(kl: NDArray[np.float64], name: str) -> float | None:
    """Return the percentile ``name`` of FOR_PERCENTILE of divergences [tokens]; None on too few tokens."""
    percent, fewest_tokens = FOR_PERCENTILE[name]
    if len(kl) < fewest_tokens:
        return None
    return float(np.percentile(kl, percent))


def _exponentiate(interval: stats.Interval | None) -> stats.Interval | None:
    if interval is None:
        return None
    low, high = interval
    return exp(low), exp(high)


@dataclass(frozen=True)
class MeanDivergence:
    """The mean divergence from the full cache over the tokens of some texts.

    kl: the mean in nats.
    ci: its interval over prompts or documents; None if there are too few.
    n: the number of texts.
    """

    kl: float
    ci: stats.Interval | None
    n: int


def mean_divergence(texts: Sequence[TextFidelity], start: int = 0, end: int | None = None) -> MeanDivergence | None:
    """Return the mean divergence at the positions from ``start`` up to ``end``; None if no text reaches them.

    Every token weighs the same. A shorter text adds the positions that it has.

    end: the first position that does not count; None for the end of each text.
    """
    reaching = [text for text in texts if len(text.kl) > start]
    if not reaching:
        return None
    sums_by_text = []
    for text in reaching:
        counted = text.kl[start:end]
        sums_by_text.append((len(counted), sum(counted)))
    # [texts, 2]: the number of tokens and the summed divergences of each text, in the columns _TOKENS and _KL
    sums = np.array(sums_by_text, dtype=np.float64)
    tokens, kl_sum = sums.sum(0).tolist()
    clusters = _sum_by_document(sums, reaching)
    interval = stats.ratio_interval(clusters[:, [_KL, _TOKENS]])
    return MeanDivergence(kl_sum / tokens, interval, len(reaching))


def _sum_by_document(sums: NDArray[np.float64], texts: Sequence[TextFidelity]) -> NDArray[np.float64]:
    """Return ``sums`` [texts, ...] added up by document, [documents, ...].

    Windows of one document are alike, so an interval must count them as one draw.
    """
    # the rows of the result by document, in the order of their first texts
    rows: dict[object, int] = {}
    row_of_text = []
    for i, text in enumerate(texts):
        # a text without a document is a cluster of its own, named by its index
        cluster = text.document or i
        row_of_text.append(rows.setdefault(cluster, len(rows)))
    # np.add.at adds every text, even if several texts share a row; clusters[row_of_text] += sums would add only one
    clusters = np.zeros((len(rows),) + sums.shape[1:])
    np.add.at(clusters, row_of_text, sums)
    return clusters


def log_ratio_of_means(
    ours: Sequence[TextFidelity], theirs: Sequence[TextFidelity]
) -> tuple[float, stats.Interval | None]:
    """Return ``ln(mean KL of ours / mean KL of theirs)`` over the same texts, with its interval over paired prompts.

    ours, theirs: the comparisons of two methods with the full cache on the same texts, in the same order.
    """
    sums_by_text = []
    for our_text, their_text in zip(ours, theirs, strict=True):
        sums_by_text.append((our_text.sums.kl, their_text.sums.kl))
    # [texts, 2]: the summed divergences of ours and of theirs on the same text
    sums: NDArray[np.float64] = np.array(sums_by_text)
    # both have the same tokens, so the ratio of the sums is the ratio of the means
    our_mean, their_mean = sums.mean(0)
    log_ratio = float(np.log(our_mean) - np.log(their_mean))
    interval = stats.ratio_interval(_sum_by_document(sums, ours))
    if interval is None:
        return log_ratio, None
    low, high = interval
    return log_ratio, (float(np.log(low)), float(np.log(high)))
