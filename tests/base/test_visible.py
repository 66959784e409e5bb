"""Names, answers and reasons of others are printed as they are, and steer no terminal, TeX, page or spreadsheet."""

import csv
import io
import json

import pytest
from support.predicted import row, write

from kvbench.base.visible import VisibleStream, one_line, say, visible
from kvbench.cli.main import main
from kvbench.report import writers
from kvbench.report.table import Table

HOSTILE = "a\x1b[2J\x9b2J\u202eb\r[/red]"


def test_what_steers_a_terminal_is_written_out(capsys):
    shown = "a\\u001b[2J\\u009b2J\\u202eb\\u000d[/red]"
    assert visible(HOSTILE) == shown and visible(f"\x1b[1m{'best'}\x1b[0m\n\tä—") == "\x1b[1mbest\x1b[0m\n\tä—"
    assert one_line("a\nkvbench: all is well") == "a\\nkvbench: all is well"
    say(HOSTILE)
    assert capsys.readouterr().err == f"kvbench: {shown}\n"
    assert json.loads(visible(json.dumps(HOSTILE, ensure_ascii=False))) == HOSTILE


@pytest.mark.parametrize(("as_json", "printed"), [(True, r"\u2014 \u00e4 \ud83d\ude00"), (False, "? ? ?")])
def test_a_stream_that_is_not_utf8_gets_what_it_can_encode(as_json, printed):
    buffer = io.BytesIO()
    stream = VisibleStream(io.TextIOWrapper(buffer, "ascii"), as_json)
    print("— ä 😀", end="", file=stream)
    stream.flush()
    assert buffer.getvalue().decode() == printed


def test_tables_hold_names_that_would_be_code():
    names = (r"\input{x}&<b>$_^~#%", "[x]", "=1+1", "-x", "a|b", HOSTILE)
    table = Table(("name", HOSTILE), tuple((name, "-1.5") for name in names), headings={0: "[/red], <i>"})
    latex = writers.latex(table)
    assert r"\textbackslash{}input\{x\}\&\textless{}b\textgreater{}\$\_\textasciicircum{}\textasciitilde{}\#\%" in latex
    assert "\n{[}x] & -1.5" in latex
    assert (
        r"a\|b" in writers.markdown(table)
        and "&lt;b>" in writers.markdown(table)
        and "*[/red], &lt;i>*" in writers.markdown(table)
    )
    for text in (writers.text(table, terminal=True), latex, writers.markdown(table)):
        assert "\x1b[2J" not in text and "\x9b" not in text and "\r" not in text
    assert "[/red]" in writers.text(table)  # no markup is read
    assert writers.note("why\n\\input{x}", "latex") == "% why \\input{x}"  # all of it in the comment
    rows = list(csv.DictReader(io.StringIO(writers.csv(("name", "n"), ({"name": n, "n": -1.5} for n in names)))))
    assert [r["name"] for r in rows[:4]] == [names[0], "[x]", "'=1+1", "'-x"] and rows[0]["n"] == "-1.5"


def test_score_prints_hostile_names_of_files(tmp_path, capsys):
    write(tmp_path, "a\x1b[2J\n|b.jsonl", row())
    for style in ("text", "md", "latex", "csv"):
        assert main(["score", str(tmp_path), "metric=f1", "--format", style]) == 0
        captured = capsys.readouterr()
        assert "\x1b[2J" not in captured.out + captured.err
        assert "\\n" in captured.out or style in ("csv", "latex")
