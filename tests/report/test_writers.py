"""Tables as text: what stands above which column."""

import pytest

from kvbench.report import pages, writers
from kvbench.report.table import Table


@pytest.mark.parametrize("first_head", ["", "method"])
def test_the_name_of_a_group_ends_with_its_last_column_whether_or_not_the_first_column_has_a_head(first_head):
    heads = (first_head, "apart", "united", "apart", "united")
    table = Table(heads, (("h2o", "70", "60", "50", "40"),), groups=("", "left", "left", "right", "right"))
    names, columns, *_ = writers.text(table).splitlines()
    assert names.index("left") > columns.index("apart")  # centred above its two columns
    assert names.index("left") + len("left") <= columns.index("united") + len("united")
    assert columns.rindex("apart") < names.index("right") < columns.rindex("united")


def test_the_pages_in_place_stand_above_their_own_two_columns():
    freed = pages.PagesFreed(apart=0.7, united=0.6, apart_compacted=0.5, united_compacted=0.4)
    lines = writers.text(pages.build_table([("h2o", freed)])).splitlines()
    (heads,) = [line for line in lines if line.startswith("method")]
    for line in lines[: lines.index(heads)]:
        assert not line[: heads.index("apart")].strip()
