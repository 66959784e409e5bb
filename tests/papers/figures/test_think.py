"""ThinK's figures 4 and 5 against numpy on activations that transformers itself computes."""

import numpy as np
import pytest
import torch
from support.families import WHOLE
from support.readings import activations, reading

from kvbench.papers.figures import think
from kvbench.papers.figures.registry import FIGURES


def test_magnitudes_are_means_over_runs_of_tokens():
    source = reading(lengths=(130,), layers=(0, 2), heads=(1,))
    data = think.measure_magnitudes(source)
    qkv, _, _ = activations(source.model, source.prompts[0].ids)
    assert set(data["layer"]) == {0, 2} and set(data["head"]) == {1}
    assert sorted(data["token"].unique()) == list(range(0, 130, 3))  # 130 tokens in at most 48 runs
    for row in data.sample(300, random_state=0).itertuples():
        rows = qkv[row.layer]["qkv".index(row.what)][1][row.token : row.token + 3, row.channel]
        assert row.magnitude == pytest.approx(float(rows.abs().mean()), rel=1e-4)


def slow_energy(matrix):
    values = np.linalg.svd(np.asarray(matrix, dtype=np.float64), compute_uv=False)
    return values**2 / (values**2).sum()


def test_energies_of_attention_and_keys():
    source = reading(lengths=(40, 50), layers=(1,))
    data = think.measure_energies(source)
    activated = [activations(source.model, p.ids)[:2] for p in source.prompts]
    for (what, head), rows in data.groupby(["what", "head"]):
        matrices = [attention[1][head] if what == "attention" else qkv[1][1][head] for qkv, attention in activated]
        slow = np.mean([slow_energy(m)[: len(rows)] for m in matrices], axis=0)
        assert len(rows) == (40 if what == "attention" else 16)
        np.testing.assert_allclose(rows["energy"], slow, atol=1e-6)
        np.testing.assert_allclose(rows["cumulative"], slow.cumsum(), atol=1e-5)
    assert sorted(data[data["what"] == "keys"]["head"].unique()) == [0, 1]


def test_a_head_that_is_not_the_first_of_its_group_shows_its_keys_and_its_layer():
    source = reading(lengths=(40,), layers=(1,), heads=(3,))
    data = think.measure_energies(source)
    assert {(w, h) for w, h in zip(data["what"], data["head"], strict=True)} == {("attention", 3), ("keys", 1)}
    assert set(data["layer"].astype(str)) <= {"1", "layer 1"}
    assert len(FIGURES["think/fig5"].draw(data, {}).axes) == 4  # one line a panel needs no legend


def test_energies_of_known_matrices():
    assert think.compute_energy_shares(torch.outer(torch.arange(5.0), torch.ones(3))).tolist() == pytest.approx(
        [1, 0, 0], abs=1e-6
    )
    assert think.compute_energy_shares(3 * torch.eye(4)).tolist() == pytest.approx([0.25] * 4)


def test_first_tokens_alone():
    complete, cut = reading(lengths=(90,), tokens=40), reading(lengths=(90,))
    short = reading(lengths=(90,))
    object.__setattr__(short, "prompts", [type(p)(p.source, p.name, p.ids[:40]) for p in cut.prompts])
    a, b = think.measure_energies(complete), think.measure_energies(short)
    np.testing.assert_allclose(a["energy"], b["energy"], atol=1e-6)


def test_the_findings():
    import pandas as pd

    one = [
        {"what": "attention", "layer": 0, "head": 0, "index": i + 1, "energy": e}
        for i, e in enumerate((0.9, 0.095, 0.005))
    ]
    data = pd.DataFrame(one).assign(cumulative=lambda d: d["energy"].cumsum())
    text = FIGURES["think/fig5"].finding(data)
    assert text == (
        "Singular values of attention with an energy above 0.01, by head: 2 to 2, median 2. With 90 % of the energy: "
        "1 to 1 of 3."
    )
    flat = {"index": range(1, 101), "energy": 0.01, "cumulative": [i / 100 for i in range(1, 101)]}
    text = FIGURES["think/fig5"].finding(pd.DataFrame({"what": "attention", "layer": 0, "head": 0, **flat}))
    assert "90 to 90 of 100. Energy of the first 50: 50 % to 50 %, more than 90 % in 0 of 1 heads." in text
    rows = [
        {"layer": 0, "head": 0, "what": w, "token": 0, "channel": c, "magnitude": m}
        for w, line in (("k", (4.0, 1, 1, 2)), ("v", (1.0, 1, 1, 1)))
        for c, m in enumerate(line)
    ]
    text = FIGURES["think/fig4"].finding(pd.DataFrame(rows))
    assert (
        "largest channel in times the mean: keys 2.0, values 1.0. Variation (standard deviation over mean): keys 0.61"
        in text
    )


@pytest.mark.parametrize("family", WHOLE)
def test_all_families(family):
    assert np.isfinite(think.measure_magnitudes(reading(family))["magnitude"]).all()
    data = think.measure_energies(reading(family))
    totals = data[data["what"] == "keys"].groupby(["layer", "head"])["energy"].sum()
    np.testing.assert_allclose(totals, 1, atol=1e-5)
