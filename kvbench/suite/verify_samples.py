"""Check stored samples by all that follows from the method, the prompt's length and the shape of the model's cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kvbench.audit.accounting import HALF, bytes_declared, layer_counts, payload_bytes
from kvbench.base.numbers import ceil_div
from kvbench.kv.model_shape import POSITION_BYTES, Shape
from kvbench.kv.pages import PAGE_TOKENS
from kvbench.methods.core.chain import Chain
from kvbench.store.fidelity import KINDS
from kvbench.store.results import Sample
from kvbench.suite.definition import KL
from kvbench.suite.lock import LockedColumn

ROUNDING = 1e-3
"""The relative error of a stored divergence, which has four digits, and the absolute error of a sum of losses, which
are computed in fp32."""
TINY = 1e-9
"""Nats. Divergences and squared probabilities below it are rounding."""
Range = tuple[float, float]
"""The (least, largest) value that a sample's number can have."""


@dataclass(frozen=True)
class ExpectedSample:
    """What a sample of a prompt of one length holds under one method.

    ranges: the range of each field that is a number, by its name. Both ends are equal if the method alone decides.
    compacted: the shares of free pages (heads apart, heads united) after compaction; None if the data decide.
    """

    ranges: Mapping[str, Range]
    compacted: tuple[float, float] | None


def expect(chain: Chain | None, shape: Shape, n: int) -> ExpectedSample:
    """Return what a sample of a prompt of n tokens holds.

    chain: the method; None if it is not on this machine.
    """
    full16 = bytes_declared(Chain(), shape, n, HALF)
    assert full16 is not None, "the full cache holds all tokens"
    ranges: dict[str, Range] = {"n": (n, n), "full16": (full16.payload, full16.payload)}
    declared = bytes_declared(chain, shape, n, HALF) if chain is not None else None
    counts = layer_counts(chain, shape, n) if chain is not None else None
    if chain is None or declared is None or counts is None:
        return ExpectedSample(ranges | {"kept": (0, n), "payload16": (0, full16.payload)}, None)
    ranges |= {"kept": (declared.tokens, declared.tokens)}
    if not declared.even:
        ranges |= {"payload16": (declared.payload, declared.payload), "overhead16": (declared.overhead,) * 2}
        return ExpectedSample(ranges, _compact(chain, shape, n))
    # The data spread the tokens over heads or layers. That changes the payload only if tokens differ in their bytes.
    token, whole = (payload_bytes([chain.layout(size, shape.head_dim, HALF)]) for size in (1, n))
    if whole != n * token:
        return ExpectedSample(ranges | {"payload16": (0, full16.payload)}, None)
    # Each layer has at least one row of positions. The formula counts one for each head.
    least = POSITION_BYTES * declared.tokens * shape.layers
    ranges |= {"payload16": (declared.payload, declared.payload), "overhead16": (least, declared.overhead)}
    return ExpectedSample(ranges, None)


def _compact(chain: Chain, shape: Shape, n: int) -> tuple[float, float]:
    """Return the shares of free pages after compaction, with heads apart and with heads united (``PagesFreed``)."""
    pages = ceil_div(n, PAGE_TOKENS)
    used_apart = used_united = 0
    heads = chain.heads(shape.kv_heads, shape.query_heads)
    for layer, count in (layer_counts(chain, shape, n) or {}).items():
        used_by_head = [ceil_div(size, PAGE_TOKENS) for size in layer.sizes]
        used_apart += count * sum(used_by_head)
        used_united += count * max(used_by_head)
    return 1 - used_apart / (shape.layers * heads * pages), 1 - used_united / (shape.layers * pages)


def list_problems(
    samples: Mapping[str, Sample],
    full: Mapping[str, Sample],
    *,
    locked: LockedColumn,
    measure: str,
    expected: Mapping[int, ExpectedSample],
) -> Iterator[str]:
    """Yield a sentence for each sample that cannot have been measured so.

    samples: a row's samples of one task, by example.
    full: the full cache's samples of this task.
    locked: the hashes and lengths of the task.
    measure: the measure of the part, SCORE or KL.
    expected: what a sample holds, by the tokens of its prompt.
    """
    for name, sample in samples.items():
        if name not in full:
            continue
        try:
            for problem in _check_sample(sample, expected[locked["tokens"][name]], locked["most"], measure):
                yield f"the sample of {name}: {problem}"
            if measure == KL:
                for problem in _check_divergence(sample, full[name], locked["most"]):
                    yield f"the sample of {name}: {problem}"
        # a line may hold values of any kind
        except (TypeError, AttributeError, KeyError) as error:
            yield f"the sample of {name} is damaged: {error}"


def _check_sample(sample: Sample, expected: ExpectedSample, most: int, measure: str) -> Iterator[str]:
    """Yield a problem for each number of a sample that is outside its range, and for fields that no sample has.

    most: the most tokens of an answer, or the number of tokens of a scored text.
    """
    if sample.more:
        yield f"it has the unknown keys {', '.join(sorted(sample.more))}"
    for field, (low, high) in expected.ranges.items():
        value = getattr(sample, field)
        if not low - TINY <= value <= high + TINY:
            limits = f"{low:g}" if low == high else f"{low:g} to {high:g}"
            yield f"{field} is {value}, and its method and prompt give {limits}"
    answers = sample.turns or (sample,)
    lengths = [answer.new_tokens for answer in answers]
    if max(lengths) > most or min(lengths) < 0 or (measure == KL and sample.new_tokens != most):
        yield f"its answer has {max(lengths)} tokens, and the suite's {'' if measure == KL else 'at most '}{most}"
    if sample.new_tokens != sum(lengths):
        yield f"new_tokens is {sample.new_tokens}, and its answers have {sum(lengths)}"
    if not all(isinstance(answer.prediction, str) for answer in answers):
        yield "an answer is no text"
    if measure != KL and not (sample.score is not None and 0 <= sample.score <= 1):
        yield f"its score is {sample.score}"
    pages = sample.pages_freed
    if pages is not None:
        compacted = (pages.apart_compacted, pages.united_compacted)
        # a page that is free for all heads is free for each; moving tokens together only frees pages
        if not 0 <= pages.united <= pages.apart <= pages.apart_compacted <= 1 or not pages.united <= compacted[1] <= 1:
            yield f"its free pages {pages} cannot be"
        elif expected.compacted is not None and any(
            abs(a - b) > TINY for a, b in zip(compacted, expected.compacted, strict=True)
        ):
            yield f"its pages after compaction are {compacted}, and its method and prompt give {expected.compacted}"


def _check_divergence(sample: Sample, full: Sample, most: int) -> Iterator[str]:
    """Yield a problem for each text on which a sample's divergence contradicts its other numbers, or the full cache's.

    Over the scored positions, with the full cache's probability p of the text's next token and the row's q:

        sum KL >= 2 sum (q - p)^2         Pinsker's inequality, as |q - p| is at most the total variation
        sum ln p - ln q = loss - loss of the full cache
    """
    # the first of KINDS is the text that the data give, on which rows are scored
    kind = KINDS[0]
    texts = sample.fidelity or {}
    if kind not in texts or full.fidelity is None or kind not in full.fidelity:
        yield f"it has no divergence on the {kind}"
        return
    for name, text in texts.items():
        if len(text.kl) != len(text.same) or not 0 < len(text.kl) < most:
            yield f"its divergence on the {name} has {len(text.kl)} and {len(text.same)} tokens of {most - 1}"
        total = sum(text.kl)
        if min(text.kl, default=0) < 0 or text.floor < 0 or total * (1 + ROUNDING) + TINY < 2 * text.shift:
            yield f"its divergence on the {name}, {total:.4g} nats, is below 2 shift = {2 * text.shift:.4g}"
    # each process has a greedy answer of its own, but all read the same reference
    text, reference = texts[kind], full.fidelity[kind]
    if len(text.kl) != most - 1:
        yield f"its divergence on the {kind} has {len(text.kl)} tokens of {most - 1}"
    gap = text.loss - reference.loss
    if abs(text.log_ratio - gap) > ROUNDING * (1 + 0.01 * (abs(text.loss) + abs(reference.loss))):
        yield f"its log_ratio on the {kind} is {text.log_ratio:.6g}, and its loss gives {gap:.6g}"
