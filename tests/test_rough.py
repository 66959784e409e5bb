"""Rough times: the sum counted by hand, a device measured, and the plan of a run that has no timings yet."""

import json
from dataclasses import replace

import pytest
import torch
from families import FAMILIES, build
from runs import SMALL

from kvbench.cache.model_shape import Shape
from kvbench.cli.main import main
from kvbench.run import speed_model

SHAPE = Shape(layers=2, query_heads=4, kv_heads=2, head_dim=8)
SIZE = (1000, 200)
NONE = speed_model.Speed(0, 0, 0, 0, 0, 0)
# 6 prompts of 100 tokens on average are read, 10 rows answered 4 at a time: 3 batches of 7 steps
WORK = speed_model.Work([50, 150], [0, 0], prefills=6, answers=10, new=7, rows=4, cell=320.0, formats=3, sums=False)
DENSE = 2 * 2 * 2 * 100 * 8 * 4  # keys and values, layers, kv heads, tokens, channels, bytes
SQUARES = 2 * 4 * 8 * (50**2 + 150**2) / 2  # layers, query heads, channels, pairs of tokens on average


@pytest.mark.parametrize(
    ("speed", "expected"),
    [
        # prompts only for the layers; a step of 4 rows for the logits, too
        ({"product": 1.0}, 6 * 100 * 1000 + 21 * 4 * 1200),
        ({"weight_byte": 1.0}, 21 * 4 * 1200),
        ({"attention": 1.0}, 6 * SQUARES),
        ({"sums": 1.0}, 0),
        ({"copy": 1.0}, 10 * speed_model.COMPRESS_PASSES * DENSE + 21 * 4 * 320),
        (
            {"call": 1.0},
            2
            * (
                6 * speed_model.LAYER_CALLS
                + 10 * speed_model.COMPRESS_CALLS
                + 21 * (speed_model.LAYER_CALLS + 3 * speed_model.STEP_CALLS)
            ),
        ),
    ],
)
def test_each_speed_counts_for_its_own_operations(speed, expected):
    assert speed_model.seconds(WORK, replace(NONE, **speed), SIZE, SHAPE, itemsize=4) == pytest.approx(expected)


def test_column_sums_texts_in_chunks_and_an_empty_group():
    sums = speed_model.seconds(replace(WORK, sums=True), replace(NONE, sums=1.0), SIZE, SHAPE, 4)
    assert sums == pytest.approx(6 * SQUARES)
    fed = speed_model.seconds(replace(WORK, rest=[20, 40], new=0), replace(NONE, product=1.0), SIZE, SHAPE, 4)
    assert fed == pytest.approx(6 * 100 * 1000 + 10 * 30 * 1200)
    assert speed_model.seconds(replace(WORK, answers=0), NONE, SIZE, SHAPE, 4) == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_those_of_the_projections(family):
    model = build(family)
    size = speed_model.weights(model.config)
    linear = [m.weight for m in model.modules() if isinstance(m, torch.nn.Linear)]
    head = model.get_output_embeddings().weight
    assert size[1] == head.numel()
    assert size[0] == sum(w.numel() for w in linear if w is not head) > 0


def test_every_speed_of_a_device_is_measured():
    found = speed_model.measure(SHAPE, 64, torch.float32, torch.device("cpu"))
    assert all(0 < value < 1e-2 for value in vars(found).values())
    # a row alone takes longer than its share of a product of many
    assert found.weight_byte * 4 > found.product


def test_a_plan_is_rough_until_something_is_measured(tmp_path, capsys):
    arguments = ["run", *SMALL, "method=h2o", f"results={tmp_path}", "limit=1"]

    def planned():
        assert main([*arguments, "--plan", "--json"]) == 0
        return json.loads(capsys.readouterr().out)[0]["groups"]

    threads = torch.get_num_threads()
    assert [(g["rough"], g["seconds"] > 0) for g in planned()] == [(True, True), (True, True)]
    assert torch.get_num_threads() == threads
    assert main([*arguments, "--plan"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "together: 4 answers in 2 prefills (2 saved by sharing), roughly" in text
    assert "nothing of it is measured yet, so from counts of operations and bytes" in text
    assert main(["run", SMALL[0].replace(",tiny/code", ""), *SMALL[1:], *arguments[4:]]) == 0
    capsys.readouterr()
    arguments[-1] = "limit=2"
    assert [g["rough"] for g in planned()] == [False, True]
