"""The resident-memory benchmark: what it measures, and its verdict."""

import pytest

from kvbench.bench import resident


def test_full_caches_are_accounted_to_the_byte():
    found = resident.hold("full", 2, 64)
    assert found["accounted"] == 2 * resident.SHAPE.full_bytes(64, 2) + 2 * resident.SHAPE.layers * 4 * 64


@pytest.mark.parametrize("name", resident.METHODS)
def test_every_method_is_built(name):
    assert (
        0
        < resident.hold(name, 1, 320, resident.SMALL)["accounted"]
        <= resident.hold("full", 1, 320, resident.SMALL)["accounted"]
    )


@pytest.mark.parametrize(
    ("grown", "status"), [((100, 25), 0), ((100, 26.2), 0), ((100, 26.3), 1), ((100, 23.7), 1), ((106, 26.5), 1)]
)
def test_a_ratio_off_by_more_than_a_twentieth_fails(grown, status, capsys):
    full, half = ({"grown": float(g), "accounted": float(a)} for g, a in zip(grown, (100, 25), strict=True))
    assert resident.report({"full": full, "snapkv": half}) == status
    assert ("MISSED" in capsys.readouterr().out) == bool(status)


def test_ratios_of_the_small_shape_are_shown_and_not_judged(capsys):
    off = {"full": {"grown": 100.0, "accounted": 100.0}, "snapkv": {"grown": 40.0, "accounted": 25.0}}
    assert resident.report(off, judged=False) == 0
    shown = capsys.readouterr().out
    assert "+60.0" in shown and "MISSED" not in shown


def test_both_shapes_are_measured_and_the_reason_is_printed(monkeypatch, capsys):
    asked = []

    def measured(name, caches, tokens, small=False):
        asked.append((name, small))
        return {"grown": 8.0 if small and name != "full" else 4.0, "accounted": 4.0}

    monkeypatch.setattr(resident, "_in_process", measured)
    monkeypatch.setattr("sys.argv", ["resident", "--only", "qhitter 4"])
    assert resident.main() == 0
    assert asked == [(m, small) for small in (False, True) for m in ("full", "qhitter 4 bits 12.5 %")]
    assert "rounded up to pages" in capsys.readouterr().out


@pytest.mark.slow
def test_a_process_holds_what_is_accounted():
    found = {m: resident._in_process(m, 24, 2048) for m in ("full", "kivi 2 bits")}
    assert resident.report(found) == 0
