"""UNComp's figures against loops over equation 1 on activations that transformers itself computes."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.families import WHOLE, build, hooks
from support.readings import activations, reading

from kvbench.base.errors import UsageError
from kvbench.papers.figures import uncomp
from kvbench.papers.figures.reading import Reading
from kvbench.papers.figures.registry import FIGURES


def slow_eigenvalues(rows):
    """Of Sigma of rows [n, d], largest first: equations 1 and 2 by a loop over tokens."""
    rows = np.asarray(rows, dtype=np.float64)
    mean = rows.mean(axis=0)
    sigma = np.zeros((rows.shape[1], rows.shape[1]))
    for row in rows:
        unit = (row - mean) / np.linalg.norm(row - mean)
        sigma += np.outer(unit, unit) / len(rows)
    return np.linalg.eigvalsh(sigma)[::-1]


def slow_erank(eigenvalues, top=None):
    return math.exp(-sum(s * math.log(s) for s in eigenvalues[:top] if s > 0))


@pytest.fixture(scope="module")
def known():
    """The reading of two texts with two prompts each, and the activations of every prompt."""
    source = reading(lengths=(40, 33), sources=("a", "b"))
    return source, [activations(source.model, p.ids)[0] for p in source.prompts]


def of(made, known, source):
    return [qkv for p, qkv in zip(made.prompts, known, strict=True) if p.source == source]


def test_rank_by_layer(known):
    built, actual = known
    data = uncomp.measure_ranks_by_layer(reading(lengths=(40, 33), sources=("a", "b"), top=5))
    assert len(data) == 2 * 3 * 3
    for row in data.itertuples():
        per_prompt, truncated = [], []
        for qkv in of(built, actual, row.source):
            spectra = [slow_eigenvalues(h) for h in qkv[row.layer]["qkv".index(row.what)]]
            per_prompt.append(np.mean([slow_erank(s) for s in spectra]))
            truncated.append(np.mean([slow_erank(s, 5) for s in spectra]))
        assert row.erank == pytest.approx(np.mean(per_prompt), rel=1e-3)
        assert row.erank_k == pytest.approx(np.mean(truncated), rel=1e-3)
        assert row.sd == pytest.approx(np.std(per_prompt), abs=1e-2)
        assert row.prompts == 2


@pytest.mark.parametrize("count", [22, 23, 26, 39, 43, 80])
def test_every_layer_has_a_rank(count, monkeypatch):
    """The depth i / 22 of layer 15 rounds to layer 14, for one."""
    monkeypatch.setattr(Reading, "shape", SimpleNamespace(layers=count))
    asked = []

    def measure_one(reading, wanted, layers):
        asked.extend(layers)
        return [uncomp.HeadSpectra("a", 0, "q", torch.full((1, 4), 0.25))]

    monkeypatch.setattr(uncomp, "_measure_heads", measure_one)
    uncomp.measure_ranks_by_layer(reading())
    assert asked == list(range(count))


def test_spectra_and_head_map(known):
    built, actual = known
    data = uncomp.measure_spectra(built)
    assert set(data["layer"]) == {2}
    for (source, head), rows in data.groupby(["source", "head"]):
        expected = np.mean([slow_eigenvalues(qkv[2][0][head]) for qkv in of(built, actual, source)], axis=0)
        np.testing.assert_allclose(rows["eigenvalue"], expected, atol=1e-5)
    for row in uncomp.measure_ranks_by_head(reading(lengths=(40, 33), sources=("a", "b"), top=4)).itertuples():
        slow = [slow_erank(slow_eigenvalues(qkv[row.layer][0][row.head]), 4) for qkv in of(built, actual, row.source)]
        assert row.erank_k == pytest.approx(np.mean(slow), rel=1e-3)


def test_hidden_entropy_is_that_of_the_residual_stream():
    source = reading(lengths=(40, 90))  # fewer and more tokens than the 64 hidden channels
    data = uncomp.measure_hidden_entropy(source)
    for number, p in enumerate(source.prompts):
        hidden = activations(source.model, p.ids)[2]
        rows = data[data["prompt"] == number]
        assert list(rows["layer"]) == [0, 1, 2, 3]
        slow = [math.log(slow_erank(slow_eigenvalues(h))) for h in hidden]
        np.testing.assert_allclose(rows["entropy"], slow, rtol=1e-4)


@pytest.mark.parametrize("n", [6, 40])
def test_matrix_entropy_of_known_spectra(n):
    d = 8
    flat = torch.cat([torch.eye(d), -torch.eye(d)])
    assert uncomp.compute_matrix_entropy(flat) == pytest.approx(math.log(d))
    line = torch.linspace(-1, 2, n)[:, None] * torch.tensor([3.0, 4.0, 0, 0, 0, 0, 0, 1.0])
    assert uncomp.compute_matrix_entropy(line) == pytest.approx(0, abs=1e-4)


def test_a_text_with_fewer_tokens_than_channels_is_refused():
    with pytest.raises(UsageError, match="a 10 has 10 tokens: an effective rank of 16 channels"):
        uncomp.measure_ranks_by_layer(reading(lengths=(10,)))
    with pytest.raises(UsageError, match="layers=3 is not possible: the model has layers 0 to 2"):
        uncomp.measure_spectra(reading(layers=(3,)))


def test_hooks_are_gone_afterwards():
    source = reading()
    before = hooks(source.model)
    uncomp.measure_hidden_entropy(source)
    assert hooks(source.model) == before


def test_findings_say_what_the_data_say():
    import pandas as pd

    flat = {"erank_k": 0.0, "sd": 0.0, "prompts": 1, "source": "a"}
    curves = {"q": [5, 4, 2.5, 6], "k": [4, 3, 1.5, 5], "v": [2, 2, 2, 2.5]}
    data = pd.DataFrame({**flat, "what": w, "layer": i, "erank": x} for w, c in curves.items() for i, x in enumerate(c))
    text = FIGURES["uncomp/fig1"].finding(data)
    assert "over layers: queries 3.5, keys 3.5, values 0.5." in text
    assert "queries and keys 1.00" in text
    assert "Layers of 4 in which queries lie above keys: 4." in text
    assert "drops of more than 1: 0 to 1, 2 to 3." in text
    hidden = pd.DataFrame(
        {"prompt": p, "layer": i, "entropy": x} for p in (0, 1) for i, x in enumerate((1, 2 + p, 2.5))
    )
    text = FIGURES["uncomp/fig6"].finding(hidden)
    assert "Steps of 2 in which it rises: 1. Samples of 2 in which every step rises: 1." in text


@pytest.mark.parametrize("family", WHOLE)
def test_all_families(family):
    source = reading(family)
    heads = build(family).config.num_attention_heads
    assert len(uncomp.measure_ranks_by_layer(source)) == 9
    assert len(uncomp.measure_ranks_by_head(source)) == 3 * heads
    assert np.isfinite(uncomp.measure_hidden_entropy(source)["entropy"]).all()
