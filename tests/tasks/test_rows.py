import json

import pytest

from kvbench.base.errors import UsageError
from kvbench.tasks.rows import FileRow, read_rows


def write(folder, name, content):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def values(path):
    return [(row.place, dict(row.values)) for row in read_rows(path)]


def test_three_formats(tmp_path):
    lines = write(tmp_path, "a.jsonl", '\ufeff{"x": "1\u2028"}\r\n\n{"x": 2}\n')
    assert values(lines) == [("line 1", {"x": "1\u2028"}), ("line 3", {"x": 2})]
    entries = write(tmp_path, "a.json", '[{"x": 1}, {"y": [2]}]')
    assert values(entries) == [("entry 1", {"x": 1}), ("entry 2", {"y": [2]})]
    table = write(tmp_path, "a.csv", '\ufeffx,y\r\n"1, ""é""\nz",\r\n2,3\r\n')
    assert values(table) == [("row 1", {"x": '1, "é"\nz', "y": ""}), ("row 2", {"x": "2", "y": "3"})]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", "", "a.jsonl is empty"),
        ("a.json", "[]", "a.json is empty"),
        ("a.csv", "x,y\n", "a.csv is empty"),
        ("a.jsonl", '{"x": 1}\n{"x": \n', r"a\.jsonl, line 2: not JSON: .* at character"),
        ("a.jsonl", "[1]", r"line 1: must be a JSON object, got \[1\]"),
        ("a.jsonl", b'{}\n{"x": "caf\xe9"}', r"a\.jsonl, line 2: not UTF-8 text \(byte 10 of the line\)"),
        ("a.json", "{", r"a\.json: not JSON"),
        ("a.json", '{"x": 1}', r'a\.json: must hold a JSON list, got \{"x": 1\}'),
        ("a.json", "[{}, 3]", r"a\.json, entry 2: must be a JSON object, got 3"),
        ("a.json", b"[\xff]", r"a\.json: not UTF-8 text \(byte 1\)"),
        ("a.csv", "x,y\n1,2\n3\n", r"a\.csv, row 2: 1 cells, but the header names 2"),
        ("a.csv", 'x,y\n1,"2"3\n', r"a\.csv, line 2: not CSV"),
        ("a.csv", b"x\n\xff\n", r"a\.csv: not UTF-8 text \(byte 2\)"),
        ("a.txt", "x", r"must be a \.jsonl, \.json or \.csv file"),
    ],
)
def test_what_is_no_file_of_records(tmp_path, name, content, message):
    path = write(tmp_path, name, content)
    with pytest.raises(UsageError, match=message):
        list(read_rows(path))


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
def test_missing_files_and_folders(tmp_path, name):
    with pytest.raises(UsageError, match="there is no file"):
        list(read_rows(tmp_path / name))
    (tmp_path / name).mkdir()
    with pytest.raises(UsageError, match="is a folder"):
        list(read_rows(tmp_path / name))


def test_checked_access(tmp_path):
    row = FileRow(
        tmp_path / "f", "line 7", json.loads('{"t": "a", "l": ["b", "c"], "n": 3, "o": [{"k": "v"}], "z": null}')
    )
    assert (row.text("t"), row.texts("t"), row.texts("l")) == ("a", ("a",), ("b", "c"))
    assert (row.count("n", 1), row.count("z", 5), row.count("none", 6)) == (3, 5, 6)
    assert (row.name("n", "d"), row.name("t", "d"), row.name("z", "d")) == ("3", "a", "d")
    assert "t" in row and "z" not in row and "none" not in row
    (inner,) = row.records("o")
    assert inner.text("k") == "v"
    with pytest.raises(UsageError, match=r"f, line 7, o\[0\]: there is no key 'x'; its keys: 'k'"):
        inner.text("x")
    for wrong in (lambda: row.text("l"), lambda: row.texts("n"), lambda: row.records("l"), lambda: row.count("t", 1)):
        with pytest.raises(UsageError, match=r"f, line 7: '[tln]' must be"):
            wrong()
