"""Packed samples: what comes back from a file, and what is no such file."""

import gzip
import re

import pytest
from support.stored import Cell, cell_id, measure

from kvbench.base.errors import Damaged, UsageError
from kvbench.store import archive
from kvbench.store.store import ResultStore


def test_packed_samples_come_back_once(tmp_path):
    store, path, cell = ResultStore(tmp_path / "a"), tmp_path / "x.jsonl.gz", Cell()
    measure(store, cell, [0, 1])
    archive.pack(store, [cell.id, cell.id], path)
    other = ResultStore(tmp_path / "b")
    assert archive.unpack(path, other) == {cell.id: 2} and other.lines(cell.id) == store.lines(cell.id)
    assert archive.unpack(path, other) == {cell.id: 0}


def test_a_cell_without_a_record_is_not_packed_and_a_file_that_was_there_stays(tmp_path):
    store, path = ResultStore(tmp_path / "a"), tmp_path / "x.jsonl.gz"
    measure(store, Cell(), [0, 1])
    archive.pack(store, [Cell().id], path)
    before = path.read_bytes()
    with pytest.raises(UsageError, match=r"has no cell\.json"):
        archive.pack(store, [Cell().id, cell_id("never started")], path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("line", ["{bad", "[1]", '{"cell": null}', '{"sample": {}}'])
def test_a_file_of_anything_else_is_named(line, tmp_path):
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(gzip.compress(line.encode()))
    with pytest.raises(UsageError, match="is not a file of samples"):
        archive.unpack(path, ResultStore(tmp_path / "a"))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"score": 0.37', '"score": NaN', "the sample of e1 is damaged: NaN is no finite number"),
        ('"score": 0.37', '"score": -1e999', "the sample of e1 is damaged: -1e999 is no finite number"),
        ('"kept": ', '"keeps": ', "the sample of e0 is damaged: 'kept'"),
        ('"id": "e0"', '"id": 7', "is not a file of samples: 7 is no id"),
        ('"label": "', '"label": 7, "x": "', "is not a file of samples: label of it is damaged"),
    ],
)
def test_a_damaged_sample_is_named_and_none_is_stored(old, new, message, tmp_path):
    store, path, cell = ResultStore(tmp_path / "a"), tmp_path / "x.jsonl.gz", Cell()
    measure(store, cell, [0, 1])
    archive.pack(store, [cell.id], path)
    text = gzip.decompress(path.read_bytes()).decode()
    assert old in text
    other = ResultStore(tmp_path / "b")
    path.write_bytes(gzip.compress(text.replace(old, new, 1).encode()))
    with pytest.raises(Damaged, match=re.escape(message)):
        archive.unpack(path, other)
    # a file that ends early, or whose bytes are others
    for content in (gzip.compress(text.encode())[:-9], b"\x1f\x8b" + bytes(40)):
        path.write_bytes(content)
        with pytest.raises(Damaged, match="is not a file of samples"):
            archive.unpack(path, other)
    assert other.lines(cell.id) == {}
