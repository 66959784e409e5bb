"""Budgets that meet short prompts, for every selector: keep all, shrink, or refuse."""

import pytest
from support import method_reference as ref
from support.calibrations import bound
from support.grids import grid

from kvbench.base.errors import UsageError
from kvbench.methods.core import registry
from kvbench.methods.core.base import Selector
from kvbench.methods.core.resolve import chain_of

STAGES = {m: registry.make_stage(m, registry.defaults(m)) for m in registry.available() if m != "full"}
SELECTORS = [m for m, s in STAGES.items() if "kv_size" in registry.knob_names(m) and s.role == "selector"]
UNIFORM = [
    m for m in SELECTORS if type(STAGES[m]).budget is Selector.budget and type(STAGES[m]).expected is Selector.expected
]


def compress(method, n, **knobs):
    dense, obs = ref.make_layer(ref.grid(4, n, 8, seed=1), ref.grid(2, n, 8, seed=2))
    chain = bound(chain_of({"method": method, **knobs}), 2, 4)
    return dense, chain, chain.compress(dense, obs)


@grid("method", SELECTORS)
@grid("n", [1, 5, 39, 40])
def test_a_prompt_within_the_budget_is_kept_whole(method, n):
    _, chain, cache = compress(method, n, kv_size=40)
    assert ref.kept(cache) == [list(range(n))] * 2
    assert chain.expected(n, 0, 2, 2).total == 2 * n


@grid("method", UNIFORM)
@grid(("n", "ratio", "floor"), [(40, 0.1, 4), (12, 0.25, 3), (7, 0.25, 1), (3, 0.01, 0)])
def test_a_small_fraction_shrinks_what_is_protected(method, n, ratio, floor):
    _, chain, cache = compress(method, n, kv_ratio=ratio)
    stage = chain.selector
    sinks, window = stage.sink_size(), stage.window_size()
    tokens = max(2, floor)
    if sinks + window >= tokens:
        sinks, window = min(sinks, tokens // 2), min(window, tokens // 2)
        assert stage.capacity(n).shrunk
    for head in ref.kept(cache):
        assert len(head) == tokens
        assert head[:sinks] == list(range(sinks))
        assert head[tokens - window :] == list(range(n - window, n))


@pytest.mark.parametrize("method", SELECTORS)
def test_a_size_within_what_is_protected_is_refused(method):
    stage = STAGES[method]
    protected = stage.sink_size() + stage.window_size()
    with pytest.raises(UsageError, match=rf"method\.{method}\.kv_size={protected} .*above {protected}"):
        chain_of({"method": method, "kv_size": protected})
    assert chain_of({"method": method, "kv_size": protected + 1}).selector.capacity(1000).tokens == protected + 1


@grid("method", SELECTORS)
@grid("ratio", [0, -0.1, 1.01, "half"])
def test_impossible_fractions_are_refused(method, ratio):
    with pytest.raises(UsageError, match="kv_ratio"):
        chain_of({"method": method, "kv_ratio": ratio})


@pytest.mark.parametrize("method", SELECTORS)
def test_two_budgets_at_once_are_refused(method):
    with pytest.raises(UsageError, match="two ways"):
        chain_of({"method": method, "kv_ratio": 0.5, "kv_size": 64})
