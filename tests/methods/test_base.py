"""Budgets, ties, groups and legal sets: what all selectors and chains share."""

import itertools
import math
import re
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from support.grids import grid

from kvbench.base.errors import UsageError
from kvbench.methods.core import registry
from kvbench.methods.core.base import Selector
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.contract import Capacity, top_indices
from kvbench.methods.core.knobs import at_least, knob
from kvbench.methods.core.resolve import chain_of, chains_of
from kvbench.methods.core.statistics import group_mean


@dataclass(frozen=True, kw_only=True)
class Protecting(Selector):
    id: ClassVar[str] = "protecting"

    sinks: int = 4
    window: int = 8

    def sink_size(self):
        return self.sinks

    def window_size(self):
        return self.window


@pytest.mark.parametrize(
    ("budget", "n", "capacity"),
    [
        ({"kv_size": 20}, 100, Capacity(20, 4, 8)),
        ({"kv_size": 20}, 12, Capacity(12, 4, 8)),
        ({"kv_ratio": 0.5}, 100, Capacity(50, 4, 8)),
        ({"kv_ratio": 0.29}, 100, Capacity(29, 4, 8)),
        ({"kv_ratio": 0.5}, 101, Capacity(50, 4, 8)),
        ({}, 100, Capacity(25, 4, 8)),
        ({"kv_ratio": 1}, 100, Capacity(100, 4, 8)),
        ({"kv_ratio": 0.13}, 100, Capacity(13, 4, 8)),
        ({"kv_ratio": 0.12}, 100, Capacity(12, 4, 6, shrunk=True)),
        ({"kv_ratio": 0.06}, 100, Capacity(6, 3, 3, shrunk=True)),
        ({"kv_ratio": 0.001}, 100, Capacity(2, 1, 1, shrunk=True)),
        ({"kv_ratio": 0.25}, 1, Capacity(1, 4, 8)),
    ],
)
def test_capacity_by_hand(budget, n, capacity):
    assert Protecting(**budget).capacity(n) == capacity


@pytest.mark.parametrize("size", [12, 4, 0, -1])
def test_a_size_that_leaves_nothing_to_choose_is_refused(size):
    with pytest.raises(UsageError, match=r"method\.protecting\.kv_size=.*above 12 \(sinks 4 \+ window 8\)"):
        Protecting(kv_size=size)


@pytest.mark.parametrize(
    ("knob", "value", "kind"),
    [
        *(("kv_size", v, "a whole number, or null") for v in (2.5, "20", True)),
        *(("kv_ratio", v, "a number, or null") for v in ("0.5", True, float("nan"), float("inf"))),
        ("kv_size", 10**20, "at most 2147483647"),
        ("kv_round", 1, "true or false, or null"),
        *(("frozen_layers", v, "a list of layer numbers") for v in (0, [-1], [True], ["a"])),
    ],
)
def test_values_of_another_kind_are_refused_however_a_stage_is_made(knob, value, kind):
    message = re.escape(f"method.protecting.{knob}={value!r} is not possible: {kind} (see")
    with pytest.raises(UsageError, match=message):
        Protecting(**{knob: value})


@dataclass(frozen=True, kw_only=True)
class Ruled(Selector):
    id: ClassVar[str] = "ruled"

    reach: int = knob(4, at_least(2, "tokens"))
    limit: int | None = knob(None, at_least(1, null=True))


@dataclass(frozen=True, kw_only=True)
class RuledElsewhere(Ruled):
    reach: int = 3


@pytest.mark.parametrize("stage", [Ruled, RuledElsewhere])
def test_a_rule_holds_for_subclasses_with_another_default_too(stage):
    assert (stage(reach=2).reach, stage().limit) == (2, None)
    with pytest.raises(UsageError, match=r"ruled\.reach=1 is not possible: a whole number of tokens, 2 or more \("):
        stage(reach=1)
    with pytest.raises(UsageError, match=r"limit=0 is not possible: a whole number, 1 or more, or null \("):
        stage(limit=0)


def test_frozen_layers_expect_everything():
    stage = Protecting(kv_size=20, frozen_layers=[0, 2])
    assert [stage.expected(50, i, 3, 2).total for i in range(3)] == [100, 40, 100]


@pytest.mark.parametrize("layers", [[-1], ["0"], [0.5]])
def test_frozen_layers_are_layer_numbers(layers):
    with pytest.raises(UsageError, match="frozen_layers"):
        Protecting(frozen_layers=layers)


def test_top_indices_breaks_ties_to_the_lower_index_and_sorts():
    scores = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 2.0], [0.0] * 6])
    assert top_indices(scores, 3).tolist() == [[1, 2, 3], [0, 1, 2]]


@pytest.mark.parametrize("k", [0, 1, 5, 39, 40])
@pytest.mark.parametrize("values", ["distinct", "ties", "infinite", "nan"])
def test_top_indices_are_the_first_of_a_stable_sort(values, k):
    scores = torch.randn(3, 40, generator=torch.Generator().manual_seed(k))
    if values == "ties":
        scores = scores.round()
    elif values == "infinite":
        scores[:, ::3], scores[1, 1::3] = torch.inf, -torch.inf
    elif values == "nan":
        scores[0, 7] = torch.nan
    order = [sorted(range(40), key=lambda i: (not math.isnan(row[i]), -row[i], i))[:k] for row in scores.tolist()]
    assert top_indices(scores, k).tolist() == [sorted(row) for row in order]


def test_group_mean_averages_neighbouring_query_heads():
    scores = torch.tensor([[1.0, 2.0], [3.0, 6.0], [10.0, 0.0], [20.0, 0.0]])
    assert group_mean(scores, 2).tolist() == [[2, 4], [15, 0]]
    assert group_mean(scores, 4) is scores


METHODS = [m for m in registry.available() if m != "full"]


def stage_of(method):
    return registry.make_stage(method, registry.defaults(method))


def decorated(pair):
    """Tell whether the modifier among two methods understands the other's scores."""
    (modifier,) = (m for m in pair if stage_of(m).role == "modifier")
    return set(pair) & set(stage_of(modifier).decorates)


@grid("pair", list(itertools.combinations(METHODS, 2)), ids="+".join)
def test_a_pair_is_refused_exactly_if_it_cannot_form_a_method(pair):
    written, roles = "+".join(pair), [stage_of(m).role for m in pair]
    if roles[0] == roles[1] != "modifier":
        with pytest.raises(UsageError, match=f"{pair[0]} and {pair[1]}.*at most one"):
            chain_of(written)
    elif "share" in roles:
        with pytest.raises(UsageError, match="written alone"):
            chain_of(written)
    elif "hidden" in roles and any(stage_of(m).rebalances for m in pair):
        with pytest.raises(UsageError, match="one budget over layers"):
            chain_of(written)
    elif "modifier" in roles and "selector" not in roles:
        with pytest.raises(UsageError, match="needs one beside it"):
            chain_of(written)
    elif "modifier" in roles and "selector" in roles and not decorated(pair):
        with pytest.raises(UsageError, match="changes the scores of"):
            chain_of(written)
    elif any(getattr(stage_of(m), "packs", False) for m in pair) and {"prune", "quantise"} & set(roles):
        with pytest.raises(UsageError, match="itself quantises every token"):
            chain_of(written)
    elif "lowrank" in roles and {"prune", "quantise"} & set(roles):
        with pytest.raises(UsageError, match=r"stores (none|latents)"):
            chain_of(written)
    elif any(getattr(stage_of(m), "evicts", False) for m in pair) and (
        {"lowrank", "mask"} & set(roles)
        or any(stage_of(m).role == "quantise" and not stage_of(m).by_token for m in pair)
    ):
        with pytest.raises(UsageError, match="evicts tokens while decoding"):
            chain_of(written)
    else:
        chain, turned = chain_of(written), chain_of("+".join(reversed(pair)))
        assert chain == turned and chain.identity() == turned.identity()


@pytest.mark.parametrize("method", METHODS)
def test_the_same_stage_twice_is_refused(method):
    with pytest.raises(UsageError, match="twice"):
        chain_of(f"{method}+{method}")
    stage = stage_of(method)
    with pytest.raises(UsageError, match="twice"):
        Chain((stage, stage))


def test_order_is_canonical_whatever_was_written():
    assert [s.id for s in chain_of("think+snapkv").stages] == ["snapkv", "think"]
    assert chain_of("think+snapkv").name == "snapkv+think"


@pytest.mark.parametrize(
    ("method", "nominal"),
    [
        ("full", 100),
        ("think", 100),
        ("snapkv+think", 40),
        ("pyramidkv", 40),
        ("snapkv+twilight", 40),
        ("twilight", None),
        ("refreekv", None),
        ("refreekv+think", None),
    ],
)
def test_only_methods_that_are_given_a_budget_have_a_nominal_one(method, nominal):
    (chain,) = chains_of([method], {"kv_size": 40} if nominal == 40 else {})
    assert chain.nominal(100) == nominal
