"""The table of what rounding alone changes: its numbers are those of the committed measurements."""

import pytest
import rounding
from verification import Verification

NUMBERS = """method,new_tokens,text,kl,kl_again
q4_0,coded,a,0.1,0.11
q4_0,coded,b,0.3,0.27
q4_0,exact,a,0.2,0.2
q4_0,exact,b,0.4,0.4
"""


def test_a_change_is_that_of_one_text_and_of_the_mean():
    coded, exact = (line.split() for line in rounding.table(NUMBERS).splitlines() if line.startswith("q4_0"))
    # texts change by 0.01 and 0.03, their mean from 0.2 to 0.19
    assert coded == ["q4_0", "coded", "0.2", "2.0e-02", "3.0e-02", "1.0e-02", "10"]
    assert exact[1:3] == ["exact", "0.3"] and {float(x) for x in exact[3:]} == {0}


@pytest.mark.parametrize("changed", [False, True])
def test_a_table_is_held_to_its_measurements(changed, tmp_path, monkeypatch):
    for name, text in (
        ("NUMBERS", NUMBERS),
        ("TABLE", rounding.table(NUMBERS).replace("2.0e-02", "2.1e-02" if changed else "2.0e-02")),
    ):
        monkeypatch.setattr(rounding, name, tmp_path / name)
        (tmp_path / name).write_text(text)
    found = Verification()
    rounding.verify(found)
    assert found.close(()) == changed
