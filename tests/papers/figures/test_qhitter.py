"""Q-Hitter's figures 2 and 3 against loops over activations that transformers itself computes."""

import numpy as np
import pytest
import torch
from support.families import WHOLE
from support.readings import activations, reading

from kvbench.base.errors import UsageError
from kvbench.papers.figures import qhitter
from kvbench.papers.figures.registry import FIGURES


def slow_quantised(row, bits):
    """One token of one head, channel by channel: equation 1 with codes from 0 and scale and zero in half precision."""
    top, low, high = 2**bits - 1, min(row), max(row)
    scale = float(np.float16(max(1e-5, (high - low) / top)))
    zero = min(max(round(-low / scale), 0), top)
    return [scale * (min(max(round(x / scale) + zero, 0), top) - zero) for x in row]


def slow_critical(mass):
    order = sorted(range(len(mass)), key=lambda j: (-mass[j], j))
    return set(order[: max(1, int(0.2 * len(mass)))])


def slow_mass(q, k, scale):
    n = len(q)
    mass = np.zeros(n)
    for i in range(n):
        logits = np.array([float(q[i] @ k[j]) * scale for j in range(i + 1)])
        weights = np.exp(logits - logits.max())
        mass[: i + 1] += weights / weights.sum()
    return mass


def test_shift_by_this_layers_keys():
    source = reading(lengths=(35,), bits=(3, 2))
    data = qhitter.measure_shifts(source)
    qkv, attention, _ = activations(source.model, source.prompts[0].ids)
    rows = data[data["kind"] == "own"].set_index(["bits", "layer", "head"])["overlap"]
    assert len(rows) == 2 * 3 * 4
    for (bits, layer, head), actual in rows.items():
        q, k = qkv[layer][0][head].double(), qkv[layer][1][head // 2]
        coarse = torch.tensor([slow_quantised(r, bits) for r in k.tolist()]).double()
        exact = slow_critical(attention[layer][head].sum(0).tolist())
        shifted = slow_critical(slow_mass(q, coarse, 16**-0.5))
        assert actual == pytest.approx(len(exact & shifted) / len(exact))


def test_shift_by_the_whole_cache_is_that_of_a_model_whose_attention_reads_coarse_caches(monkeypatch):
    source = reading(lengths=(35,), bits=(3,))
    data = qhitter.measure_shifts(source)
    exact = activations(source.model, source.prompts[0].ids)[1]
    from transformers.models.llama import modeling_llama

    plain = modeling_llama.eager_attention_forward

    def coarse(module, query, key, value, *args, **kwargs):
        k, v = (
            torch.tensor([[slow_quantised(r, 3) for r in head] for head in x[0].tolist()])[None] for x in (key, value)
        )
        return plain(module, query, k, v, *args, **kwargs)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", coarse)
    shifted = activations(source.model, source.prompts[0].ids)[1]
    rows = data[data["kind"] == "all"].set_index(["layer", "head"])["overlap"]
    for (layer, head), actual in rows.items():
        a, b = (slow_critical(x[layer][head].sum(0).tolist()) for x in (exact, shifted))
        assert actual == pytest.approx(len(a & b) / len(a))
    own_value = data[data["kind"] == "own"].set_index(["layer", "head"])["overlap"]
    assert not np.allclose(own_value[2], rows[2])  # errors of the layers below reached the last one


def test_overlap_by_hand():
    exact = torch.tensor([[9.0, 8, 1, 1, 1, 1, 1, 1, 1, 1]])
    assert qhitter.measure_overlap(exact, exact).tolist() == [1]
    assert qhitter.measure_overlap(exact, exact.flip(1)).tolist() == [0]
    assert qhitter.measure_overlap(exact, torch.tensor([[9.0, 1, 8, 1, 1, 1, 1, 1, 1, 1]])).tolist() == [0.5]
    assert qhitter.measure_overlap(exact, torch.ones(1, 10)).tolist() == [1]  # ties go to the lower token


def test_errors_of_tokens():
    source = reading(lengths=(30,), layers=(1,), bits=(2,))
    data = qhitter.measure_errors(source)
    qkv, attention, _ = activations(source.model, source.prompts[0].ids)
    np.testing.assert_allclose(data["attention"], attention[1].mean(0).sum(0), rtol=1e-4)
    assert data["attention"].mean() == pytest.approx(1)
    for name, x in (("k_error", qkv[1][1]), ("v_error", qkv[1][2])):
        lost = [
            sum(np.sum((np.array(row) - slow_quantised(row, 2)) ** 2) for row in x[:, j].tolist()) ** 0.5
            for j in range(30)
        ]
        np.testing.assert_allclose(data[name], lost, rtol=1e-4)


def test_errors_by_hand():
    # spec: a zero vector is exact; 4 bits of [1, 1.5, 2]: the clamped zero point gives [1, 1, 1]
    assert qhitter.measure_token_errors(torch.zeros(2, 3, 4), 4).tolist() == [0, 0, 0]
    actual = qhitter.measure_token_errors(torch.tensor([[[1.0, 1.5, 2.0]]]), 4)
    assert float(actual) == pytest.approx((0.5**2 + 1) ** 0.5, rel=1e-3)


def test_tokens_are_marked_by_prompt_and_layer():
    import pandas as pd

    attention, error = [9.0, 3, *[0.1] * 8], [0.1, 7, 5, *[1.0] * 7]
    data = pd.DataFrame({"prompt": 0, "layer": 0, "token": range(10), "attention": attention, "k_error": error})
    marked = qhitter._mark_tokens(pd.concat([data, data.assign(layer=1)]), "k_error")
    assert marked["outlier"].tolist() == [True, *[False] * 9] * 2
    assert marked["both"].tolist() == [False, True, *[False] * 8] * 2
    shown = marked.assign(v_error=marked["k_error"])
    text = FIGURES["qhitter/fig3"].finding(shown)
    assert "5 times the mean attention: 10.0 %. Their quantile by the error of keys (median): 10 %." in text
    assert "by both (chance: 4 %): layer 0 10.0 %, layer 1 10.0 %" in text
    halves = qhitter.stack_halves(shown)
    assert list(halves["half"].unique()) == ["keys", "values"]
    assert halves["mark"].value_counts()["attention above 5 times the mean"] == 4


def test_prompts_without_a_critical_token_are_refused():
    with pytest.raises(UsageError, match="a 4 has 4 tokens"):
        qhitter.measure_shifts(reading(lengths=(4,)))


@pytest.mark.parametrize("family", WHOLE)
def test_all_families(family):
    data = qhitter.measure_shifts(reading(family, bits=(8,)))
    assert len(data) == 2 * 3 * 4 and data["overlap"].between(0, 1).all()
    assert (qhitter.measure_errors(reading(family, lengths=(20,)))["k_error"] >= 0).all()
