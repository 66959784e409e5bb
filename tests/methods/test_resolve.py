"""From what users type to chains: defaults for all, overrides of one entry, and knobs that nobody owns."""

import pytest

from kvbench.base.errors import UsageError
from kvbench.methods.core import registry
from kvbench.methods.core.resolve import chain_of, chains_of, resolve


def stages_of(method):
    return list(registry.read_method(method).entries)


def knobs(entry, defaults=None):
    (chain,) = chains_of([entry], defaults or {})
    return {k: v for s in chain.stages for k, v in s.knobs().items()}


def budget(entry, **defaults):
    built = knobs(entry, defaults)
    return built["kv_size"], built["kv_ratio"]


@pytest.mark.parametrize("key", ["kv_size", "snapkv.kv_size", "method.snapkv.kv_size"])
@pytest.mark.parametrize(
    "default", [{"kv_ratio": 0.5}, {"kv_size": 64}, {"snapkv.kv_ratio": 0.5}, {"snapkv.kv_size": 64}]
)
def test_an_entrys_budget_replaces_the_default_budget_of_either_kind(key, default):
    assert budget({"method": "snapkv", key: 40}, **default) == (40, None)


@pytest.mark.parametrize("default", [{"kv_ratio": 0.5}, {"kv_size": 64}])
def test_an_entrys_fraction_replaces_the_default_budget_of_either_kind(default):
    assert budget({"method": "snapkv", "kv_ratio": 0.75}, **default) == (None, 0.75)


def test_a_default_budget_replaces_that_of_the_yaml():
    assert budget("snapkv") == (None, 0.25)
    assert budget("snapkv", kv_size=64) == (64, None)
    assert budget("snapkv", kv_ratio=0.5) == (None, 0.5)


def test_a_size_of_none_leaves_the_fraction_alone():
    assert budget("snapkv", kv_size=None) == (None, 0.25)
    assert budget({"method": "snapkv", "kv_size": None, "kv_ratio": 0.5}) == (None, 0.5)


@pytest.mark.parametrize("defaults", [{}, {"kv_size": 64, "kv_ratio": 0.5}])
def test_two_budgets_in_one_place_are_refused(defaults):
    entry = "snapkv" if defaults else {"method": "snapkv", "kv_size": 64, "snapkv.kv_ratio": 0.5}
    with pytest.raises(UsageError, match="two ways"):
        chains_of([entry], defaults)


@pytest.mark.parametrize("key", ["window", "snapkv.window", "method.snapkv.window"])
def test_a_knob_can_be_written_bare_or_by_its_full_key(key):
    assert knobs("snapkv+think", {key: 7})["window"] == 7
    assert knobs({"method": "snapkv+think", key: 7}, {"window": 9})["window"] == 7


@pytest.mark.parametrize("key", ["h2o.window", "method.h2o.window", "snapkw.window"])
def test_a_full_key_of_a_method_that_is_not_there_is_refused(key):
    for entry, defaults in (("snapkv", {key: 8}), ({"method": "snapkv", key: 8}, {})):
        with pytest.raises(UsageError, match=r"this run has no method \w+; it has snapkv"):
            chains_of([entry], defaults)


def test_chains_that_do_not_own_a_knob_ignore_it():
    snapkv, keynorm, full = chains_of(["snapkv", "keynorm", "full"], {"window": 8, "keynorm.kv_size": 5})
    assert snapkv.stages[0].knobs()["window"] == 8 and snapkv.stages[0].knobs()["kv_size"] is None
    assert keynorm.stages[0].knobs()["kv_size"] == 5 and full.stages == ()


def test_a_bare_knob_reaches_every_chain_that_owns_it():
    snapkv, h2o = chains_of(["snapkv", "h2o"], {"window": 8})
    assert snapkv.stages[0].knobs()["window"] == h2o.stages[0].knobs()["window"] == 8


def test_an_alias_is_a_method_with_knobs_settled():
    assert stages_of("h2o+quant") == stages_of("quant + h2o") == ["qhitter"]
    assert stages_of("h2o+quant+think") == ["qhitter", "think"]
    alias, same, other = chains_of(["h2o+quant", {"method": "qhitter", "lam": 1}, "qhitter"], {"bits": 3})
    assert alias.identity() == same.identity() != other.identity()
    assert [c.stages[0].lam for c in (alias, other)] == [1, 0.5] and alias.stages[0].bits == 3
    alias, other = chains_of(["h2o+quant", "qhitter"], {"lam": 0.25, "qhitter.variant": "paper"})
    assert [(c.stages[0].lam, c.stages[0].variant) for c in (alias, other)] == [(1, "paper"), (0.25, "paper")]
    assert stages_of("h2o+think") == ["h2o", "think"] and registry.read_method("h2o").implied == {}


@pytest.mark.parametrize("key", ["lam", "qhitter.lam", "method.qhitter.lam"])
def test_what_an_alias_settles_cannot_be_set(key):
    for entry, defaults in (({"method": "h2o+quant", key: 0.5}, {}), ("h2o+quant", {key: 0.5})):
        with pytest.raises(UsageError, match=rf"{key}=0.5 is not possible: h2o\+quant is qhitter with lam=1"):
            chains_of([entry], defaults)


@pytest.mark.parametrize("method", ["quant", "snapkv+quant"])
def test_a_part_of_an_alias_is_no_method(method):
    with pytest.raises(UsageError, match="unknown method quant"):
        chain_of(method)


def test_knob_types_of_yaml_lists_are_accepted():
    assert knobs({"method": "random", "frozen_layers": [0, 1]})["frozen_layers"] == (0, 1)


@pytest.mark.parametrize("entry", ["h2o+quant+kivi", {"method": "h2o+quant+kivi", "bits": 4}])
def test_stages_that_cannot_stand_together_are_refused_before_their_knobs_are_looked_at(entry):
    with pytest.raises(UsageError, match="kivi has nothing left to store"):
        chains_of([entry], {"bits": 4})
    with pytest.raises(UsageError, match="kivi has nothing left to store"):
        chain_of(entry, {"bits": 4})


def test_what_words_of_kvpress_are_called_here_is_there():
    words = registry.read_kvpress_words()
    assert all(registry.read_method(method).entries for method in words["methods"].values())
    assert not {*words["methods"], *words["missing"]} & set(registry.available())
    assert set(words["knobs"].values()) <= {knob for m in registry.available() for knob in registry.knob_names(m)}


def test_a_knob_of_one_method_wins_over_that_of_all_in_any_order():
    for order in ({"window": 6, "snapkv.window": 5}, {"snapkv.window": 5, "window": 6}):
        snapkv, pyramidkv = chains_of(["snapkv", "pyramidkv"], order)
        assert (snapkv.stages[0].window, pyramidkv.stages[0].window) == (5, 6)


def test_layers_have_one_label_however_their_list_is_written():
    labels = [resolve([{"method": "snapkv", "frozen_layers": some}])[0].label for some in ([0, 0], [0], [1, 0])]
    assert labels == [f"snapkv kv_ratio=0.25 frozen_layers={layers}" for layers in ("0", "0", "0,1")]
