"""The resident-memory benchmark: what it measures, and its verdict."""

import pytest

from kvbench.bench import resident


def test_full_caches_are_accounted_to_the_byte():
    found = resident.hold("full", 2, 64)
    assert found["accounted"] == 2 * resident.SHAPE.full_bytes(64, 2) + 2 * resident.SHAPE.layers * 4 * 64


@pytest.mark.parametrize("name", resident.METHODS)
def test_every_method_is_built(name):
    assert 0 < resident.hold(name, 1, 320)["accounted"] <= resident.hold("full", 1, 320)["accounted"]


@pytest.mark.parametrize(
    ("grown", "status"), [((100, 25), 0), ((100, 26.2), 0), ((100, 26.3), 1), ((100, 23.7), 1), ((106, 26.5), 1)]
)
def test_a_ratio_off_by_more_than_a_twentieth_fails(grown, status, capsys):
    full, half = ({"grown": float(g), "accounted": float(a)} for g, a in zip(grown, (100, 25), strict=True))
    assert resident.report({"full": full, "snapkv": half}) == status
    assert ("MISSED" in capsys.readouterr().out) == bool(status)


@pytest.mark.slow
def test_a_process_holds_what_is_accounted():
    found = {m: resident._in_process(m, 24, 2048) for m in ("full", "kivi 2 bits")}
    assert resident.report(found) == 0
