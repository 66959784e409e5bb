"""A method's look: unlike all others, the same everywhere, and seen on white and on a dark page."""

import pytest

from kvbench.methods.core.registry import available
from kvbench.report import looks
from kvbench.report.looks import METHODS, look_of, looks_of, luminance, name_methods

DARK = luminance("#1E2129")  # the ground of the site's dark pages


def test_every_method_has_a_row_and_no_two_have_one_look():
    assert set(available()) <= set(METHODS)
    assert len({(row.color, row.marker) for row in METHODS.values()}) == len(METHODS)
    assert len({row.name.lower() for row in METHODS.values()}) == len(METHODS)


@pytest.mark.parametrize("color", sorted({row.color for row in METHODS.values()} | {look_of("strided").color}))
def test_colours_are_seen_on_both_grounds(color):
    assert 1.05 / (luminance(color) + 0.05) >= 3
    assert (luminance(color) + 0.05) / (DARK + 0.05) >= 2.9 or color == look_of("strided").color


def test_a_method_is_drawn_alike_whatever_its_label_says():
    row = METHODS["snapkv"]
    for label in ("snapkv", "SnapKV", "snapkv kv_ratio=0.25", "snapkv, budget"):
        look = look_of(label)
        assert (look.color, look.marker) == (row.color, row.marker) and look.name.startswith("SnapKV")
    assert look_of("full") == look_of("full cache") and look_of("full").name == "full cache"


def test_a_combination_has_the_first_methods_colour_and_the_last_ones_marker():
    look = look_of("snapkv+think kv_ratio=0.25 ratio=0.4")
    assert (look.color, look.marker) == (METHODS["snapkv"].color, METHODS["think"].marker)
    assert look.hollow and look.line == "--" and look.name == "SnapKV + ThinK kv_ratio=0.25 ratio=0.4"
    assert name_methods("KIVI 4/4 + ThinK 0.4") == "KIVI 4/4 + ThinK 0.4"


def test_methods_that_the_table_lacks_keep_their_look():
    # written down, so that a change of the rule is seen: pictures of two versions are to agree
    assert look_of("strided") == looks.Look("#2E30B8", "<", "strided")
    assert name_methods("kvpress:snapkv") == "kvpress SnapKV" and name_methods("kvpress:lagkv") == "kvpress:lagkv"
    assert look_of("strided").color != look_of("kvpress:lagkv").color


def test_two_rows_of_one_method_in_a_picture_differ_in_their_line():
    found = looks_of(["think ratio=0.4", "think ratio=0.6", "h2o", "think ratio=0.4"])
    assert list(found) == ["think ratio=0.4", "think ratio=0.6", "h2o"]
    one, other = found["think ratio=0.4"], found["think ratio=0.6"]
    assert one.color == other.color and one.line != other.line and one.hollow != other.hollow
    assert found["h2o"] == look_of("h2o")
