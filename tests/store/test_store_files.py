"""Damage of any bytes: intact lines survive, the others are reported, no wrong value is accepted."""

import json
import random

import pytest
from support.stored import FACTS, Cell, measure, sample

from kvbench.base.files import format_line, parse_line, read_lines
from kvbench.cli.main import main
from kvbench.report.summary import summarise
from kvbench.store.store import ResultStore

SIZE = 12


def cut(data, chance):
    return data[: chance.randrange(len(data))]


def flip(data, chance):
    data = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 3, 40))):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return bytes(data)


def double(data, chance):
    a, b = sorted(chance.sample(range(len(data) + 1), 2))
    return data[:b] + data[a:]


def drop(data, chance):
    a = chance.randrange(len(data))
    return data[:a] + data[a + chance.choice((1, 2, 50, 5000)) :]


def fill(data, chance):
    a = chance.randrange(len(data))
    some = chance.choice((b"\0" * 700, b"\n\n", b"}", b'", "crc": 0}\n', chance.randbytes(30)))
    return data[:a] + some + data[a + chance.choice((0, len(some))) :]


def double_lines(data, chance):
    lines = data.splitlines(keepends=True)
    return b"".join(lines + chance.choices(lines, k=3))


def pristine():
    return b"".join(format_line(sample(i)).encode() for i in range(SIZE))


def finished(store, cell):
    """Measure what is missing, as a resumed run does, and return the bytes of metrics.json."""
    missing = [i for i in range(SIZE) if f"e{i}" not in store.lines(cell.id)]
    if missing:
        measure(store, cell, missing)
    samples = list(store.samples(cell.id).values())
    store.write_metrics(cell.id, summarise(samples, "f1", SIZE).record())
    return (store.folder(cell.id) / "metrics.json").read_bytes(), missing


@pytest.mark.parametrize("damage", [cut, flip, double, drop, fill, double_lines])
def test_no_damage_is_taken_for_a_sample_and_none_spreads(damage, tmp_path):
    complete = pristine()
    originals = {parse_line(line)["id"]: line for line in complete.splitlines()}
    path = tmp_path / "samples-0.jsonl"
    for seed in range(300):
        chance = random.Random(f"{damage.__name__}{seed}")
        data = damage(damage(complete, chance) or complete, chance) if seed % 2 else damage(complete, chance)
        path.write_bytes(data)
        actual = read_lines(path)
        for line, got in actual.intact:
            assert originals[got["id"]] == line
            assert got == sample(int(got["id"][1:]))
        remaining = data.split(b"\n")
        whole_left = [line for line in remaining if line in originals.values()]
        assert [line for line, _ in actual.intact] == whole_left
        reported = {*actual.damaged, *((actual.torn,) if actual.torn else ())}
        assert reported == {i for i, line in enumerate(remaining, 1) if line and line not in originals.values()}
        assert actual.torn in (None, len(remaining))


@pytest.mark.parametrize("damage", [cut, flip, double, drop, fill, double_lines])
def test_metrics_are_the_same_bytes_after_repair_and_after_cleaning(damage, tmp_path, capsys):
    clean = ResultStore(tmp_path / "clean")
    measure(clean, Cell(size=SIZE), range(SIZE))
    expected, _ = finished(clean, Cell(size=SIZE))
    for seed in range(12):
        chance = random.Random(f"{damage.__name__}{seed}")
        store, cell = ResultStore(tmp_path / f"s{seed}"), Cell(size=SIZE)
        measure(store, cell, range(SIZE))
        path = store.folder(cell.id) / "samples-0.jsonl"
        path.write_bytes(damage(path.read_bytes(), chance))
        unread = len(read_lines(path).damaged) + bool(read_lines(path).torn)
        metrics, missing = finished(store, cell)
        assert metrics == expected
        assert bool(store.warnings) == bool(unread)
        assert store.status(cell.id).status == "complete"
        before = store.lines(cell.id)
        assert main(["clean", f"results={store.root}", "--yes"]) == 0
        after = ResultStore(store.root)
        assert finished(after, cell) == (expected, [])
        assert after.lines(cell.id) == before
        assert not after.warnings
        aside = path.with_name("damaged-0.jsonl")
        assert (aside.read_bytes().count(b"\n") if aside.exists() else 0) == unread
        assert len(missing) <= SIZE
    capsys.readouterr()


def test_metrics_do_not_depend_on_order_or_on_the_files(tmp_path):
    """Nor on which of two lines about one example was written first."""
    lines = [format_line(sample(i)) for i in range(SIZE)]
    again = format_line(sample(3, timing={"prefill_s": 9.0, "compress_s": 9.0, "decode_s": 9.0}))
    collected = set()
    for seed in range(20):
        chance = random.Random(seed)
        store, cell = ResultStore(tmp_path / str(seed)), Cell(size=SIZE)
        folder = store.folder(cell.id)
        folder.mkdir(parents=True)
        for line in chance.sample([*lines, again], SIZE + 1):
            with (folder / f"samples-{chance.randrange(12)}.jsonl").open("a") as out:
                out.write(line)
        assert list(store.lines(cell.id)) == sorted(f"e{i}" for i in range(SIZE))
        collected.add(finished(store, cell)[0])
    assert len(collected) == 1


def test_an_example_in_the_files_of_two_shards_counts_once(tmp_path):
    store, cell = ResultStore(tmp_path), Cell(size=4)
    measure(store, cell, [0, 1], shard=0)
    measure(store, cell, [1, 2], shard=1)
    assert list(store.lines(cell.id)) == ["e0", "e1", "e2"]
    assert (store.status(cell.id).n, store.status(cell.id).status) == (3, "done")


def test_a_line_cut_at_its_newline_is_whole_and_the_next_starts_its_own(tmp_path):
    store, cell = ResultStore(tmp_path), Cell(size=4)
    measure(store, cell, [0, 1])
    path = store.folder(cell.id) / "samples-0.jsonl"
    path.write_bytes(path.read_bytes()[:-1])
    assert len(store.lines(cell.id)) == 2
    measure(store, cell, [2])
    assert len(store.lines(cell.id)) == 3
    assert not store.warnings


def test_a_line_spelt_in_another_way_is_not_ours():
    line = format_line({"id": "a", "score": 1.0}).encode().rstrip()
    assert parse_line(line) == {"id": "a", "score": 1.0}
    for other in (line + b"}", line.replace(b'"crc": ', b'"crc": +'), line[:-1] + b" }", b" " + line):
        assert parse_line(other) is None


def test_json_that_says_the_same_is_left_alone(tmp_path):
    store, cell = ResultStore(tmp_path), Cell()
    measure(store, cell, [0])
    path = store.folder(cell.id) / "cell.json"
    before = path.stat().st_ino
    measure(store, cell, [1])
    assert path.stat().st_ino == before
    writer = store.open(cell, {**FACTS, "threads": 3}, 0, mix=False)
    writer.append(sample(2))
    writer.close()
    assert path.stat().st_ino != before
    assert json.loads(path.read_text())["provenance"] == [FACTS, {**FACTS, "threads": 3}]


def test_answers_in_another_cells_folder_are_not_taken_for_its_own(tmp_path, capsys):
    """Two methods' files that were swapped by hand would give each the other's score."""
    store, cells = ResultStore(tmp_path), (Cell("snapkv"), Cell("h2o"))
    for cell, score in zip(cells, (0.25, 0.75), strict=True):
        writer = store.open(cell, FACTS, 0, mix=False)
        for number in range(2):
            writer.append(sample(number, score=score))
        writer.close()
    mine, other = (store.folder(cell.id) / "samples-0.jsonl" for cell in cells)
    taken = mine.read_bytes()
    other.rename(mine)
    other.write_bytes(taken)
    for cell in cells:
        assert store.lines(cell.id) == {}
        assert store.status(cell.id).n == 0
    assert "2 lines of another result do not count (lines 1, 2)" in store.warnings[0]

    # where both are in one folder its own answers count, and a cleaning leaves them alone
    mine.write_bytes(other.read_bytes() + mine.read_bytes())
    other.unlink()
    own = store.samples(cells[0].id)
    assert [s.score for s in own.values()] == [0.25, 0.25]
    assert main(["clean", f"results={tmp_path}", "--yes"]) == 0
    assert ResultStore(tmp_path).samples(cells[0].id) == own
    assert read_lines(mine).uncounted == ()
    assert mine.with_name("damaged-0.jsonl").read_bytes().count(b"\n") == 2
    capsys.readouterr()


def test_cleaning_keeps_the_lines_of_another_cell_where_a_cell_has_no_others(tmp_path, capsys):
    store, cells = ResultStore(tmp_path), (Cell("snapkv"), Cell("h2o"))
    for cell in cells:
        measure(store, cell, [0])
    mine, other = (store.folder(cell.id) / "samples-0.jsonl" for cell in cells)
    other.replace(mine)
    for _ in range(2):
        assert main(["clean", f"results={tmp_path}", "--yes"]) == 0
        (kept,) = tmp_path.glob(f"damaged/{cells[0].id}-*/samples-0.jsonl")
        assert kept.read_bytes().count(b"\n") == 1
    assert "none of its lines count; moved to" in capsys.readouterr().out


@pytest.mark.parametrize("content", ["{}", "[1]", '{"reason": null}'])
def test_a_refusal_that_says_no_reason_is_told_to_be_unreadable(tmp_path, content):
    store, cell = ResultStore(tmp_path), Cell()
    store.refuse(cell, "it keeps what it may not", "e0")
    (path,) = store.folder(cell.id).glob("refused-*.json")
    assert store.refusal(cell.id) == "it keeps what it may not"
    path.write_text(content)
    assert ResultStore(tmp_path).refusal(cell.id).startswith(f"{path.name} cannot be read; ")


def test_answers_of_an_older_version_name_no_cell_and_count(tmp_path):
    store, cell = ResultStore(tmp_path), Cell()
    measure(store, cell, [0])
    with (store.folder(cell.id) / "samples-0.jsonl").open("a") as out:
        out.write(format_line(sample(1)))
    assert list(store.lines(cell.id)) == ["e0", "e1"]
    assert store.warnings == []
