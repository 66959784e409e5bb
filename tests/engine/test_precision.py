"""Why a run has its dtype, and what rounding alone changes: told where it matters, measured in half precision."""

import json
import re
from copy import deepcopy

import pytest
import torch
from support.families import build, prompt
from support.runs import run_json

import kvbench
from kvbench.base.errors import UsageError
from kvbench.cli.main import main
from kvbench.engine import precision

CPU = torch.device("cpu")
ONE = ["dataset=tiny/needle,tiny/hop", "length=256", "limit=1", "method=snapkv"]


@pytest.mark.parametrize(
    ("speed", "configured", "dtype", "reason", "noted"),
    [
        (0.5, "auto", "float32", "float32: auto on a CPU; products in bfloat16 take 2 times as long as", False),
        (1.1, "auto", "float32", "float32: auto on a CPU; products in bfloat16 take 0.91 times as long", False),
        (
            2.5,
            "auto",
            "float32",
            "take 0.4 times as long as in float32 here. dtype=bfloat16 reads prompts faster",
            True,
        ),
        (2.5, "float32", "float32", "float32: as asked", False),
        (0.5, "bfloat16", "bfloat16", "bfloat16: as asked; products in bfloat16 take 2 times as long", True),
        (2.5, "bfloat16", "bfloat16", "bfloat16: as asked", False),
        (2.5, "float16", "float16", "slow on a CPU", True),
    ],
)
def test_the_dtype_is_explained_and_noted_where_another_is_faster(speed, configured, dtype, reason, noted, monkeypatch):
    monkeypatch.setattr(precision, "measure_bf16_speed", lambda: speed)
    assert reason in precision.explain_dtype(configured, dtype, CPU)
    assert precision.has_better_dtype(configured, dtype, CPU) == noted


def test_products_are_tried_once(monkeypatch):
    precision.measure_bf16_speed.cache_clear()
    monkeypatch.setattr(precision, "TRIED_S", 0.0)
    first = precision.measure_bf16_speed()
    assert 0.001 < first < 1000
    monkeypatch.setattr(precision.torch, "randn", None)
    assert precision.measure_bf16_speed() == first
    precision.measure_bf16_speed.cache_clear()


def test_a_gpu_is_left_as_it_is():
    assert precision.explain_dtype("auto", "bfloat16", torch.device("cuda")) == "bfloat16: auto on a GPU"
    assert not precision.has_better_dtype("auto", "bfloat16", torch.device("cuda"))


def test_rounding_is_that_of_the_same_weights_and_they_come_back_bit_for_bit():
    model, ids = build("llama", torch.bfloat16), [prompt(40), prompt(50, 1)]
    before = {name: p.clone() for name, p in model.named_parameters()}
    actual = precision.compare_rounding(model, ids)
    assert all(torch.equal(p, before[name]) and p.dtype == torch.bfloat16 for name, p in model.named_parameters())
    with torch.no_grad():
        ours = [model(i[None]).logits[0, -1].float() for i in ids]
        wide = deepcopy(model)
        for p in wide.parameters():
            p.data = p.data.float()
        exact = [wide(i[None]).logits[0, -1] for i in ids]
    pairs = list(zip(ours, exact, strict=True))
    assert actual["largest"] == pytest.approx(max(float((a - b).abs().max()) for a, b in pairs), rel=1e-3)
    assert actual["largest"] > 0 and actual["prompts"] == 2
    assert actual["same"] == sum(bool(a.argmax() == b.argmax()) for a, b in pairs)
    assert precision.compare_rounding(build("llama"), ids) is None


def test_a_run_in_bf16_prints_what_rounding_changed_then_and_later_and_one_in_fp32_nothing(tmp_path, capsys):
    arguments = [*ONE, f"results={tmp_path}"]
    _, half = run_json(capsys, *arguments, "dtype=bfloat16")
    (note,) = (n for n in half["notes"] if n.startswith("Rounding to bfloat16 alone"))
    most = float(re.search(r"differ by at most ([\d.]+), ", note)[1])  # CPUs with instructions for bf16 round more
    assert 0 < most < 0.5 and "same after 2 of 2" in note
    assert main(["show", *arguments, "dtype=bfloat16", "--json"]) == 0
    assert note in json.loads(capsys.readouterr().out)["notes"]
    assert not any("Rounding" in n for n in run_json(capsys, *arguments)[1]["notes"])


def test_a_prompt_that_cannot_be_read_costs_no_more_than_in_fp32(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(precision, "prefill_chains", lambda *given: 1 / 0)
    status, report = run_json(capsys, *ONE, f"results={tmp_path}", "dtype=bfloat16")
    assert status == 0 and not any("Rounding" in n for n in report["notes"])


def test_the_plan_says_why_the_dtype_is_what_it_is(capsys):
    assert main(["run", *ONE, "--plan"]) == 0
    assert "dtype float32: auto on a CPU; products in bfloat16 take" in capsys.readouterr().out


@pytest.mark.parametrize("dtype", [torch.bfloat16, "bfloat16"])
def test_a_model_is_loaded_in_a_dtype_of_torch_or_by_its_name(dtype):
    assert kvbench.load_model("tiny", dtype=dtype)[0].dtype == torch.bfloat16


def test_a_dtype_that_no_run_has_is_told():
    with pytest.raises(UsageError, match="float64"):
        kvbench.load_model("tiny", dtype=torch.float64)
