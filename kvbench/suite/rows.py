"""The rows of a suite: each method at each budget that it can reach, counted in bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import floor

from kvbench.base.errors import UsageError
from kvbench.kv.model_shape import Shape
from kvbench.methods.core.base import Selector
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.resolve import ChainConfig, chain_config, overlay, resolve
from kvbench.plan.equal_memory import payload_counter
from kvbench.suite.definition import METHOD, Suite

SLACK = 1.02
"""How much more than a budget a row may hold that cannot hold less: a window, or the scales of a format."""
DECIMALS = 4
"""Decimal places of a ``kv_ratio``."""


@dataclass(frozen=True, kw_only=True)
class SuiteRow:
    """One method at one budget, 1/``budget`` of the full cache's bytes.

    name: the method as it is written, with its options other than the budget.
    role: what the row is for, as ``definition`` names it.
    config: the combination that is measured. decoding: the same with its budget while decoding; None if it has none.
    """

    name: str
    budget: int
    role: str
    config: ChainConfig
    decoding: ChainConfig | None


def rows(suite: Suite, methods: Sequence[str], options: Mapping[str, object], shape: Shape) -> list[SuiteRow]:
    """Return all rows of a suite: its controls and the user's ``methods``, each at all budgets within its reach.

    ``options`` are options of the user's methods. Raises UsageError for a method that reaches no budget, and for one
    whose prompt decides how many tokens stay.
    """
    found = []
    for control in suite.controls:
        (template,) = resolve([{"method": control.method, **control.options}])
        found += at_budgets(suite, control.name, control.role, template, shape)
    # a control that the user names, too, is measured once
    taken = {row.name for row in found}
    for template in resolve(methods, options):
        if template.chain.stages and template.label not in taken:
            name = _name(template)
            reached = at_budgets(suite, name, METHOD, template, shape)
            if not reached:
                least = suite.budgets[0]
                raise UsageError(
                    f"{name} holds more than 1/{least} of the full cache's bytes, {suite.name}'s largest budget"
                )
            found += reached
    return found


def _name(template: ChainConfig) -> str:
    """Return a method's name with the options that its user set, and without its budget."""
    words = [template.chain.name]
    for word in template.label.split()[1:]:
        if not word.startswith(("kv_ratio=", "kv_size=")):
            words.append(word)
    return " ".join(words)


def at_budgets(suite: Suite, name: str, role: str, template: ChainConfig, shape: Shape) -> list[SuiteRow]:
    """Return a method's rows. A method without a budget of tokens has one row, at the smallest budget that holds it."""
    count = payload_counter("bytes", shape, suite.tokens)
    # the combination without stages is the full cache
    full = count(Chain())
    if not isinstance(template.chain.selector, Selector):
        held = count(template.chain)
        fitting = [budget for budget in suite.budgets if held <= SLACK * full / budget]
        if not fitting:
            return []
        return [SuiteRow(name=name, budget=max(fitting), role=role, config=template, decoding=template)]
    found = []
    for budget in suite.budgets:
        share = _largest_share(template, full / budget, suite.tokens, shape)
        if share is None:
            continue
        config = with_options(template, {"kv_ratio": share})
        found.append(
            SuiteRow(name=name, budget=budget, role=role, config=config, decoding=_while_decoding(config, share))
        )
    return found


def _largest_share(template: ChainConfig, target: float, tokens: int, shape: Shape) -> float | None:
    """Return the largest ``kv_ratio`` whose payload after a prompt of ``tokens`` fits ``target`` bytes.

    None if the method cannot hold so little, or if it holds so little without removing any token.
    """
    count = payload_counter("bytes", shape, tokens)

    def held(size: int) -> float | None:
        """Return the bytes of a cache of ``size`` of the prompt's tokens; None for a size that the method refuses."""
        try:
            return count(with_options(template, {"kv_ratio": size / tokens}).chain)
        except UsageError:
            return None

    # the payload grows with the size, and only small sizes are refused: halve the range between a size that fits or is
    # too small, and one that is too large
    low, high = 0, tokens
    everything = held(tokens)
    if everything is None or everything <= target:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        payload = held(middle)
        if payload is None or payload <= target:
            low = middle
        else:
            high = middle
    # round down, or the budget would be passed
    share = floor(low / tokens * 10**DECIMALS) / 10**DECIMALS
    if not share:
        return None
    try:
        payload = count(with_options(template, {"kv_ratio": share}).chain)
    except UsageError:
        return None
    # a method with a window keeps at least that
    if payload > SLACK * target:
        return None
    return share


def with_options(template: ChainConfig, options: Mapping[str, object]) -> ChainConfig:
    """Return the combination with options laid over those of its selector."""
    owner = next(stage.id for stage in template.chain.stages if isinstance(stage, Selector))
    entries = dict(template.entries)
    entries[owner] = overlay(template.entries[owner], options)
    return chain_config(entries, template.chain.per, written=template.written)


def _while_decoding(config: ChainConfig, share: float) -> ChainConfig | None:
    """Return the combination with ``share`` as its budget while decoding, too; None if its selector has none."""
    try:
        return with_options(config, {"kv_ratio": share, "decode_ratio": share})
    except UsageError:
        return None
