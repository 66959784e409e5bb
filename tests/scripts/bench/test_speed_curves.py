"""The rows of the speed curves, their ratios in words, and the picture that the CSV alone draws."""

import pytest
import speed_curves
from real_table import prepare


@pytest.mark.parametrize("count", [1, 3, 18, 48])
def test_a_table_has_as_many_rows_as_asked(count, tmp_path):
    (tmp_path / "state_union").mkdir()
    (tmp_path / "state_union" / "a.txt").write_text("The state of the union is strong. " * 400)
    _, run = prepare(speed_curves.rows_of(count), "tiny", str(tmp_path), tmp_path, length=512, new=2)
    labels = [cell.label for cell in run.groups[0].cells]
    assert len(set(labels)) == len(labels) == count and labels[0] == "full"


def test_ratios_are_those_of_whole_tables():
    line = {"rows": "18", "tokens": "2048", "new": "32", "kvbench_s": "9.0", "kvpress_s_a_row": "5.0", "bound_s": "6.0"}
    said = speed_curves.describe(line)
    assert "kvpress / kvbench 10.00x (90.0 s / 9.0 s)" in said and "kvbench / bound 1.50x" in said


def test_a_point_belongs_to_every_curve_that_passes_through_it():
    line = {name: str(size) for name, size in speed_curves.BASE.items()}
    for curve in speed_curves.CURVES:
        assert any(speed_curves.find([line], point) is line for point in speed_curves.points(curve))
    assert speed_curves.find([line], speed_curves.BASE | {"rows": 24}) is None


def test_the_picture_has_a_panel_a_curve_with_the_ratio_at_each_point():
    lines = []
    for curve in speed_curves.CURVES:
        for point in speed_curves.points(curve):
            line = {name: str(size) for name, size in point.items()}
            lines.append(line | {"kvbench_s": "9.0", "kvpress_s_a_row": "5.0", "bound_s": "6.0"})
    panels = speed_curves.draw(lines).axes
    assert [axes.get_xlabel() for axes in panels] == list(speed_curves.TITLES.values())
    shown = [text.get_text() for text in panels[1].texts]
    assert shown == ["10.0x"] * len(speed_curves.CURVES["tokens"])


def test_the_page_has_the_ratios_of_the_committed_points():
    page = (speed_curves.FIGURES.parent / "time-and-memory.md").read_text(encoding="utf-8")
    lines = speed_curves.read_lines()
    for rows in (24, 48):
        line = speed_curves.find(lines, speed_curves.BASE | {"rows": rows})
        ratio = rows * float(line["kvpress_s_a_row"]) / float(line["kvbench_s"])
        assert f"{ratio:.2f} times" in page
    over_bound = [float(line["kvbench_s"]) / float(line["bound_s"]) for line in lines]
    assert f"{min(over_bound):.2f} to {max(over_bound):.2f} times the lower bound" in " ".join(page.split())
