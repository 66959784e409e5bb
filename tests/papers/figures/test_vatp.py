"""VATP's figure 1 against attention and values that transformers itself computes."""

import numpy as np
import pytest
from support.families import WHOLE
from support.readings import activations, reading

from kvbench.base.errors import UsageError
from kvbench.papers.figures import vatp
from kvbench.papers.figures.registry import FIGURES


def test_patterns_and_shares():
    source = reading(lengths=(60,), sources=("a", "b"), layers=(0, 2), heads=(1, 3))
    data = vatp.measure_value_norms(source)
    for number, p in enumerate(source.prompts):
        qkv, attention, _ = activations(source.model, p.ids)
        for layer in range(3):
            norms = qkv[layer][2].abs().sum(-1).repeat_interleave(2, dim=0)  # two query heads share a value
            share = attention[layer].sum(1) / 60
            here = data[(data["prompt"] == number) & (data["layer"] == layer)]
            for h in range(4):
                top = int(share[h].argmax())
                rows = here[here["head"] == h].set_index("quantity")
                assert rows.loc["share", "value"] == pytest.approx(float(share[h, top]), rel=1e-4)
                assert rows.loc["ratio", "value"] == pytest.approx(float(norms[h, top] / norms[h].median()), rel=1e-4)
                assert rows.loc["share", "token"] == top
    qkv, attention, _ = activations(source.model, source.prompts[0].ids)
    maps = data[data["quantity"] == "attention"]
    assert set(zip(maps["layer"], maps["head"], strict=True)) == {(0, 1), (0, 3), (2, 1), (2, 3)}
    for row in maps.sample(200, random_state=0).itertuples():
        expected = float(attention[row.layer][row.head, int(row.query), int(row.token)])
        assert row.value == pytest.approx(expected, rel=1e-3, abs=1e-7)
    for row in data[data["quantity"] == "norm"].itertuples():
        expected = float(qkv[row.layer][2][row.head // 2, int(row.token)].abs().sum())
        assert row.value == pytest.approx(expected, rel=1e-4)
        assert row.text == repr(str(int(source.prompts[0].ids[int(row.token)])))


def test_by_default_the_head_that_attends_one_token_most():
    source = reading(lengths=(60,))
    data = vatp.measure_value_norms(source)
    _, attention, _ = activations(source.model, source.prompts[0].ids)
    shown = data[data["quantity"] == "norm"].groupby("layer")["head"].unique()
    for layer in range(3):
        assert list(shown[layer]) == [int(attention[layer].sum(1).amax(1).argmax())]


def test_the_finding_counts_sinks():
    import pandas as pd

    rows = [(0, 0, 0.6, 0.01), (0, 1, 0.1, 1.5), (1, 0, 0.4, 0.8), (1, 1, 0.31, 0.2)]
    data = pd.DataFrame(
        {"quantity": q, "prompt": 0, "layer": layer, "head": h, "token": 0 if h == 0 else 3, "value": v}
        for layer, h, share, ratio in rows
        for q, v in (("share", share), ("ratio", ratio))
    )
    text = FIGURES["vatp/fig1"].finding(data)
    assert text.startswith("Heads of 4 that pay 30 % or more of all attention to one token: 3.")
    assert "in times the median of its head: 0.20 (median; 0.01 to 0.80)" in text
    assert "below half: 2. Cases in which it is the first token: 67 %" in text
    assert "in the other heads (median): 1.50." in text


def test_heads_that_are_not_there():
    with pytest.raises(UsageError, match="heads=4 is not possible: the model has heads 0 to 3"):
        vatp.measure_value_norms(reading(heads=(4,)))


@pytest.mark.parametrize("family", WHOLE)
def test_all_families(family):
    data = vatp.measure_value_norms(reading(family))
    assert np.isfinite(data["value"]).all()
    assert (data[data["quantity"] == "share"]["value"] <= 1).all()
