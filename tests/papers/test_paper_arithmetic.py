"""What papers say about memory, computed again: every figure is pinned."""

import json

import pytest

from kvbench.cli.main import main
from kvbench.papers.timed import paper_arithmetic


def values(paper, what=""):
    return [
        (f.published, round(f.formula, 4), None if f.stored is None else round(f.stored, 4))
        for f in paper_arithmetic.select_figures(paper)
        if what in f.what
    ]


def test_thinks_equal_memory_table():
    pruned = values("think/7", "+think")
    assert pruned == [
        (54.4, 54.4, 54.4375), (208.0, 208.0, 208.1875), (412.8, 412.8, 413.1875), (822.4, 822.4, 823.1875),
    ]  # fmt: skip
    assert [v for v, *_ in values("think/7", "for")] == [54.5, 208.0, 413.0, 822.5]
    assert all(a == b == c for a, b, c in values("think/7", "for"))
    in_table = paper_arithmetic.select_figures("think/7")
    marks = [(f.offset_of(f.formula), f.offset_of(f.stored)) for f in in_table if "+think" in f.what]
    assert marks == [(0, 0), (0, 0.2), (0, 0.4), (0, 0.8)]


def test_thinks_text():
    assert values("think/text", "one token") == [(None, 0.5, 0.5)]
    assert values("think/text", "x 13") == [(13, 13.0, 13.0)]
    saved = values("think/text", "saved")
    assert [f for _, f, _ in saved] == [15.0, 18.75, 19.375, 19.6875]
    assert [s for *_, s in saved] == [14.9414, 18.6768, 19.2993, 19.6106]
    in_prose = paper_arithmetic.select_figures("think/text")
    assert [f.offset_of(f.formula) for f in in_prose if "saved" in f.what] == [-5, -1, -1, 0]


def test_kivis_layout():
    assert values("kivi") == [
        (None, 69632, 69632), (None, 74624, 74624), (None, 98304, 98304), (None, 102528, 102528), (None, 52496, 52496),
    ]  # fmt: skip


def test_flexgen_and_qhitter():
    assert values("flexgen") == [(None, 36, 36), (None, 3.5556, 3.5556)]
    assert values("qhitter") == [(4, 3.7647, 3.7647), (4, 3.5556, 3.5556)]


def test_uncomps_percentages_and_refreekvs_sizes():
    assert [v for v, *_ in values("uncomp")] == [9.38, 4.74, 1.56]
    assert (
        [f.offset_of(f.formula) for f in paper_arithmetic.select_figures("uncomp")]
        == [f.offset_of(f.stored) for f in paper_arithmetic.select_figures("uncomp")]
        == [0] * 3
    )
    assert values("refreekv") == [(1, 1.0, 0.25), (50, 48.8281, 6.1035)]


def test_the_tables_are_printed_with_marks_and_sources(capsys):
    assert main(["bench", "memory", "paper=think/7"]) == 0
    shown = capsys.readouterr().out
    assert "arXiv 2407.21018, table 7" in shown
    line = next(x for x in shown.splitlines() if "kv_size=2048" in x)
    assert line.split()[3:] == ["MiB", "822.4", "822.40", "✓", "823.19", "+0.8", "1"]
    assert main(["bench", "memory", "paper=all"]) == 0
    shown = capsys.readouterr().out
    assert all(len(x) <= 100 for x in shown.splitlines())
    assert len([x for x in shown.splitlines() if "✓" in x or "−" in x or "+0." in x]) > len(paper_arithmetic.FIGURES)
    assert main(["bench", "memory", "paper=all", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == len(paper_arithmetic.select_figures("all"))


@pytest.mark.parametrize("name", [*paper_arithmetic.FIGURES, "think"])
def test_every_figure_is_unambiguous(name):
    actual = paper_arithmetic.select_figures(name)
    assert len({f.what for f in actual}) == len(actual) > 0
