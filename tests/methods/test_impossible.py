"""Requests that cannot be carried out, through the real command line: refused before any model loads, by knob and range
(spec 5, all methods)."""

import itertools

import pytest
from support.data import data_path

from kvbench.cli.main import main
from kvbench.methods.core import registry
from kvbench.methods.core.base import Selector
from kvbench.models import load

pytestmark = pytest.mark.e2e("whole command lines are read for every knob")

STAGES = {m: registry.make_stage(m, registry.defaults(m)) for m in registry.available() if m != "full"}
BUDGETED = [m for m, s in STAGES.items() if isinstance(s, Selector)]
MODIFIERS = [m for m, s in STAGES.items() if s.role == "modifier"]
PRUNERS = [m for m, s in STAGES.items() if s.role == "prune"]


def smallest(method):
    """Return the largest size that leaves nothing to choose beside sinks and window."""
    return STAGES[method].sink_size() + STAGES[method].window_size()


LINES = {
    **{
        f"method={m} kv_size={smallest(m)}": f"method.{m}.kv_size={smallest(m)} is not possible: a whole number of "
        f"tokens above {smallest(m)} (sinks {STAGES[m].sink_size()} + window {STAGES[m].window_size()})"
        for m in BUDGETED
    },
    **{
        f"method={m} kv_ratio={r}": f"method.{m}.kv_ratio={r} is not possible: a fraction of the prompt kept, above 0 "
        "and at most 1"
        for m in BUDGETED
        for r in (1.5, 0, -0.25)
    },
    **{
        f"method={m} ratio={r}": f"method.{m}.ratio={r} is not possible: a fraction"
        for m in PRUNERS
        for r in (1.5, -0.1)
    },
    **{
        f"method=refreekv T={t}": f"method.refreekv.T={t} is not possible: a tolerated loss, 0 or more and below 1"
        for t in (-0.01, 1.5)
    },
    **{f"method={m}": f"{m} changes a selector's scores and needs one beside it" for m in MODIFIERS},
    **{f"method={m}+think": f"{m} changes a selector's scores and needs one beside it" for m in MODIFIERS},
    **{f"method={a}+{b}": f"combines {a} and {b}" for a, b in itertools.pairwise(BUDGETED)},
    "method=h2o variant=uncomp kv_size=127": "method.h2o.kv_size=127 is not possible: at least 128",
    **{
        f"method={m} {k}={v}": f"is not possible: {kind}"
        for m, k, v, kind in (
            ("snapkv", "window", "true", "a whole number"),
            ("snapkv", "kv_ratio", "true", "a number"),
            ("random", "seed", "true", "a whole number"),
            ("cake", "tau1", "inf", "a number"),
            ("cake", "gamma", "inf", "a number"),
            ("h2o", "score_bits", "8.0", "a whole number"),
            ("scissorhands", "half_ratio", "abc", "a number"),
            ("cake", "decode_evict", "1", "true or false"),
            ("refreekv", "T", "[]", "a value, or a list of at least one"),
            ("snapkv", "per", "[]", "a value, or a list of at least one"),
        )
    },
    "method=h2o variant=orig heavy_ratio=abc recent_ratio=0.1": "heavy_ratio='abc' is not possible: a number",
    "method=h2o variant=orig heavy_ratio=0.2 recent_ratio=0.2 kv_ratio=0.9": "not given together with kv_size",
    "method=h2o variant=orig heavy_ratio=0.2 recent_ratio=0.2 kv_size=100": "not given together with kv_size",
    "method=scissorhands half_ratio=0.2 kv_ratio=0.9": "not given together with kv_size",
    "method=twilight exempt_layers=[77]": "exempt_layers=(77,) is not possible: the model has layers 0 to",
    "method=h2o score_bits=4": "method.h2o.score_bits=4 is not possible: null, 8, 3 or 2",
    "method=h2o positions=rolled": "method.h2o.positions='rolled' is not possible: rolled positions are those of a",
    "method=cake decode_evict=false positions=rolled": "method.cake.positions='rolled' is not possible",
    "method=vatp+h2o kv_size=40 sinks=8": "method.vatp.sinks=8 is not possible: fewer than the 8 tokens that h2o keeps",
    "method=qhitter lam=2": "method.qhitter.lam=2 is not possible: a weight, 0 to 1",
    "method=qhitter bits=5": "method.qhitter.bits=5 is not possible: 8, 4, 3 or 2",
    "method=qhitter positions=rolled": "method.qhitter.positions='rolled' is not possible: true: rolled positions turn",
    "method=h2o+quant lam=0.5": "lam=0.5 is not possible: h2o+quant is qhitter with lam=1",
    "method=h2o+quant+think": "h2o+quant) itself quantises every token",
    "method=twilight p=1.5": "method.twilight.p=1.5 is not possible: a mass above 0 and at most 1",
    "method=scissorhands half_ratio=0.75": "half_ratio=0.75 is not possible: a fraction of the prompt, above 0 and at",
    "method=streamingllm kv_size=8 sinks=8": "method.streamingllm.kv_size=8 is not possible: a whole number of tokens "
    "above 8 (sinks 8 + window 0)",
}


@pytest.mark.parametrize("line", LINES)
def test_impossible_requests_name_the_knob_and_its_range_before_a_model_loads(
    line, capsys, monkeypatch, tmp_path, no_weights
):
    monkeypatch.chdir(tmp_path)
    status = main(["run", *line.split()])
    message = capsys.readouterr().err
    assert status == 2 and message.count("\n") == 1
    assert LINES[line] in message


@pytest.mark.parametrize("frozen_layers", ["[]", "[0]", "[1]"])
def test_chunks_that_a_budget_cannot_take_are_refused_before_a_model_loads(frozen_layers, capsys, no_weights, tmp_path):
    text = data_path("wikitext2/test.txt").read_text(encoding="utf-8")
    (tmp_path / "wikitext2").mkdir()
    (tmp_path / "wikitext2" / "test.txt").write_text(text[:20_000], encoding="utf-8")
    line = f"dataset=wikitext2 data.root={tmp_path} length=300 prefix=128 chunk=100 method=h2o variant=orig kv_size=64"
    assert main(["run", *line.split(), f"frozen_layers={frozen_layers}"]) == 2
    assert "chunk=100 tokens at once do not fit into the budget of 64" in capsys.readouterr().err


def test_the_spy_sees_a_possible_request(monkeypatch, tmp_path):
    """Otherwise the test above would pass on a loader of another name."""
    monkeypatch.chdir(tmp_path)
    requests = []

    def loader(*_, **__):
        requests.append(True)
        raise RuntimeError

    monkeypatch.setattr(load, "load_weights", loader)
    assert main(["run", "method=snapkv", "limit=1"]) == 1 and requests
