"""NaN and inf are refused with the reason and cost what they are in: all methods if it is the model, else one."""

import copy
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from support.families import SMALL_BLOCKS, build, prompt
from support.runs import run_json

import kvbench
from kvbench.base.errors import Refused
from kvbench.engine.batch import DecodeBatch
from kvbench.engine.stopping import Ending
from kvbench.methods.core import registry
from kvbench.methods.core.base import Selector
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.stage import Stage
from kvbench.methods.snapkv import SnapKV
from kvbench.methods.think import Think
from kvbench.models import load

STAGES = {m: registry.make_stage(m, registry.defaults(m)) for m in registry.available() if m != "full"}
METHODS = ["full", "vatp+h2o", *(m for m, s in STAGES.items() if s.recipe() is None and s.role != "modifier")]


def damaged(where, value, dtype=torch.float32):
    model = copy.deepcopy(build("llama", dtype))
    with torch.no_grad():
        dict(model.named_parameters())[where].view(-1)[0] = value
    return model


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("where", ["model.layers.0.self_attn.k_proj.weight", "model.layers.2.mlp.down_proj.weight"])
def test_a_model_that_computes_no_numbers_is_named_whatever_the_method(method, where):
    whose = f"{method}: the" if method in ("uncomp-stage", "chai") else "the model's"
    with pytest.raises(Refused, match=rf"^{whose} .* of this prompt are not finite \(dtype=float32\): "):
        kvbench.prefill(damaged(where, torch.nan), prompt(60), [{"method": method, **SMALL_BLOCKS.get(method, {})}])


def test_half_precision_that_overflows_is_told_what_to_take():
    model = damaged("lm_head.weight", 6e4, torch.float16)
    with torch.no_grad():
        model.lm_head.weight *= 6e4
    with pytest.raises(Refused, match=r"logits of this prompt .*dtype=float16.* give dtype=bfloat16 or dtype=float32"):
        kvbench.prefill(model, prompt(60), ["full"])


@dataclass(frozen=True, kw_only=True)
class Odd(Selector):
    id: ClassVar[str] = "odd"
    value: str = "0"

    def scores(self, cache, obs, capacity):
        scores = torch.arange(obs.n).float().expand(cache.heads, -1).clone()
        scores[:, 3] = float(self.value)
        return scores


def test_scores_may_be_infinite_but_not_nan():
    model, ids = build("llama"), prompt(40)
    high, low = kvbench.prefill(model, ids, [Chain((Odd(kv_size=8, value=v),)) for v in ("inf", "-inf")])
    assert 3 in high.layers[0].segments[0].positions and 3 not in low.layers[0].segments[0].positions
    with pytest.raises(Refused, match="scores of odd hold NaN in layer 0"):
        kvbench.prefill(model, ids, [Chain((Odd(kv_size=8, value="nan"),))])


@dataclass(frozen=True, kw_only=True)
class Spoiled(Stage):
    """Stores one NaN among the values of the last layer."""

    id: ClassVar[str] = "spoiled"
    role = "prune"

    def compress(self, cache, obs):
        (stored,) = cache.segments
        v = stored.v.clone()
        v[0, 5, 0] = torch.nan if obs.layer == obs.n_layers - 1 else 0
        return replace(cache, segments=(replace(stored, v=v),))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_an_answer_of_no_numbers_ends_and_disturbs_no_other(temperature):
    model = build("llama")
    full, spoiled, other = kvbench.prefill(model, prompt(60), ["full", Chain((Spoiled(),)), "full"])
    ending = Ending(6, temperature=temperature)
    batch = DecodeBatch(model)
    batch.enter([(i, c, ending) for i, c in enumerate((full, spoiled, other))])
    collected = {}
    while len(batch):
        collected.update(batch.advance())
    assert [collected[i].finite for i in range(3)] == [True, False, True]
    assert len(collected[1].tokens) == 1
    assert collected[0].tokens == collected[2].tokens and len(collected[0].tokens) == 6
    with pytest.raises(Refused, match=r"spoiled: the logits while decoding are not finite \(dtype=float32\)"):
        kvbench.generate(model, [full, spoiled], 6)
    with pytest.raises(Refused, match="spoiled"):
        kvbench.generate(model, [kvbench.extend(model, spoiled, prompt(4))], 1)


def refusals(report):
    return {row["method"].split()[0]: row["cells"][0].get("reason", "") for row in report["rows"]}


@pytest.fixture
def text(tmp_path):
    (tmp_path / "data" / "wikitext2").mkdir(parents=True)
    (tmp_path / "data" / "wikitext2" / "test.txt").write_text("the cold river shines slowly. " * 200)
    return ["dataset=wikitext2", "length=96", "prefix=64", "limit=2", f"data.root={tmp_path / 'data'}"]


@pytest.mark.e2e("whole runs")
def test_a_run_refuses_every_method_of_a_model_without_numbers(tmp_path, capsys, monkeypatch):
    original = load.load_weights

    def load_weights(*a):
        model = original(*a)
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight[0, 0] = torch.nan
        return model

    monkeypatch.setattr(load, "load_weights", load_weights)
    status, report = run_json(capsys, "dataset=tiny/needle", "limit=2", "method=snapkv,kivi", f"results={tmp_path}")
    assert status == 1
    assert {name: r.partition(" of this prompt")[0] for name, r in refusals(report).items()} == {
        "full": "the model's logits",
        "snapkv": "the model's keys or values",
        "kivi": "the model's keys or values",
    }


@pytest.mark.e2e("whole runs")
@pytest.mark.parametrize("stage", ["scores", "values"])
@pytest.mark.parametrize("scored", [False, True])
def test_a_run_refuses_the_method_alone_that_stores_or_scores_no_numbers(
    tmp_path, capsys, monkeypatch, text, stage, scored
):
    dataset = [*text, "kv_size=48"] if scored else ["dataset=tiny/needle", "length=256", "limit=2", "kv_size=48"]
    scores, compress = SnapKV.scores, Think.compress

    def nan_scores(self, *a):
        return scores(self, *a).fill_(torch.nan)

    def nan_values(self, cache, obs):
        kept_tokens = compress(self, cache, obs)
        return replace(
            kept_tokens, segments=tuple(replace(s, v=s.v.clone().fill_(torch.nan)) for s in kept_tokens.segments)
        )

    if stage == "scores":
        monkeypatch.setattr(SnapKV, "scores", nan_scores)
    else:
        monkeypatch.setattr(Think, "compress", nan_values)
    status, report = run_json(capsys, *dataset, "method=snapkv,h2o,think", f"results={tmp_path}")
    assert status == 1
    actual = refusals(report)
    compared = "think: layer 0 holds values that are not those of the prompt"
    name, message = ("snapkv", "scores of snapkv hold NaN") if stage == "scores" else ("think", compared)
    assert actual.pop(name).startswith(message)
    assert not any(actual.values())
    monkeypatch.undo()
    again, report = run_json(capsys, *dataset, "method=snapkv,h2o,think", f"results={tmp_path}")
    assert again == 0 and not any(refusals(report).values())
