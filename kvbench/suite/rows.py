"""The rows of a suite: each method at each budget that it can reach, counted in bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import floor

from kvbench.base.errors import UsageError
from kvbench.kv.model_shape import Shape
from kvbench.methods.core.base import Selector
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.resolve import ChainConfig, resolve
from kvbench.plan.equal_memory import PayloadCounter, payload_counter, with_options
from kvbench.suite.definition import METHOD, Suite, SuitePart

SLACK = 1.02
"""The factor by which a row may exceed its budget. A window, or the scales of a format, can make it larger."""
DECIMALS = 4
"""The number of decimal places of a ``kv_ratio``."""


@dataclass(frozen=True, kw_only=True)
class SuiteRow:
    """One method at one budget.

    name: the method as it is written, with its options other than the budget.
    budget: the denominator d of the budget, 1/d of the full cache's bytes.
    role: the purpose of the row; ``definition`` lists the roles.
    config: the combination that is measured.
    decoding: the same combination with its budget while decoding, too; None if the method has no such budget.
    """

    name: str
    budget: int
    role: str
    config: ChainConfig
    decoding: ChainConfig | None

    def config_in(self, part: SuitePart) -> ChainConfig | None:
        """Return the combination that is measured in a part; None if the part cannot measure the row."""
        if part.decoding:
            return self.decoding
        return self.config


def make_rows(suite: Suite, methods: Sequence[str], options: Mapping[str, object], shape: Shape) -> list[SuiteRow]:
    """Return all rows of a suite: its controls and the user's ``methods``, each at all budgets within its reach.

    ``options`` are options of the user's methods. Raises UsageError for a method that reaches no budget, and for one
    whose prompt decides how many tokens stay.
    """
    suite_rows = []
    for control in suite.controls:
        entry: dict[str, object] = {"method": control.method}
        entry |= control.options
        (template,) = resolve([entry])
        suite_rows += make_rows_at_budgets(suite, control.name, control.role, template, shape)
    # a control that the user names, too, is measured once, and every run of a suite has the full cache already
    control_names = {row.name for row in suite_rows}
    for template in resolve(methods, options):
        name = write_name(template.label)
        if template.chain.stages and name not in control_names:
            method_rows = make_rows_at_budgets(suite, name, METHOD, template, shape)
            if not method_rows:
                # a suite names its budgets by denominators in rising order, so the first one allows most bytes
                largest = suite.budgets[0]
                raise UsageError(
                    f"{name} holds more than 1/{largest} of the full cache's bytes, {suite.name}'s largest budget"
                )
            suite_rows += method_rows
    return suite_rows


def write_name(label: str) -> str:
    """Return a method's name as the user wrote it, with the options that are set, and without the budget.

    label: the method's label. Its chain's name would not do: the aliases q4_0_h and q4_0 name one chain.
    """
    return " ".join(word for word in label.split() if not word.startswith(("kv_ratio=", "kv_size=")))


def make_rows_at_budgets(suite: Suite, name: str, role: str, template: ChainConfig, shape: Shape) -> list[SuiteRow]:
    """Return a method's rows: one for each budget of the suite that the method can reach.

    A method without a budget of tokens has one row, at the smallest budget that is as large as its cache. A method
    that reaches no budget has none.

    role: the purpose of the rows; ``definition`` lists the roles.
    template: the combination whose budget is replaced.
    shape: the shape of the model's cache, on which bytes are counted.
    """
    count_bytes = payload_counter(suite.counts, shape, suite.tokens)
    # the combination without stages is the full cache
    full_bytes = count_bytes(Chain())
    if not isinstance(template.chain.selector, Selector):
        # a storage format keeps all tokens, so it has one size, whatever the budget
        payload = count_bytes(template.chain)
        fitting = [budget for budget in suite.budgets if payload <= SLACK * full_bytes / budget]
        if not fitting:
            return []
        # budgets are denominators, so the largest one allows the fewest bytes
        return [SuiteRow(name=name, budget=max(fitting), role=role, config=template, decoding=template)]
    suite_rows = []
    for budget in suite.budgets:
        share = _find_largest_share(template, full_bytes / budget, suite.tokens, count_bytes)
        if share is None:
            continue
        config = with_options(template, {"kv_ratio": share})
        decoding: ChainConfig | None = None
        # a selector may have no budget while decoding
        with suppress(UsageError):
            decoding = with_options(config, {"kv_ratio": share, "decode_ratio": share})
        suite_rows.append(SuiteRow(name=name, budget=budget, role=role, config=config, decoding=decoding))
    return suite_rows


def _find_largest_share(template: ChainConfig, target: float, tokens: int, count_bytes: PayloadCounter) -> float | None:
    """Return the largest ``kv_ratio`` whose payload after a prompt of ``tokens`` tokens fits ``target`` bytes.

    Return None if the method cannot hold so little, or if it holds so little without removing any token.
    """

    def payload_at(share: float) -> float | None:
        """Return the bytes of a cache with this kv_ratio; None for a kv_ratio that the method refuses."""
        try:
            return count_bytes(with_options(template, {"kv_ratio": share}).chain)
        except UsageError:
            return None

    payload = payload_at(1.0)
    if payload is None or payload <= target:
        return None
    # the payload grows with the tokens kept, and a method refuses only numbers that are too small. So halve the range
    # between ``low`` tokens, which fit or are refused, and ``high`` tokens, which are too many
    low, high = 0, tokens
    while high - low > 1:
        middle = (low + high) // 2
        payload = payload_at(middle / tokens)
        if payload is None or payload <= target:
            low = middle
        else:
            high = middle
    # round down, since a share that is rounded up could exceed the budget
    share = floor(low / tokens * 10**DECIMALS) / 10**DECIMALS
    if not share:
        return None
    payload = payload_at(share)
    # a method with a window keeps at least its window, which can be more than the budget
    if payload is None or payload > SLACK * target:
        return None
    return share
