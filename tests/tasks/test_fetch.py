"""Fetching through a hub of our own making: what is placed and locked, and checksums that hold. No network is used."""

import gzip
import hashlib
import json

import pytest
from support.hubs import COMMIT, SUITE, FakeHub, archive, parquet, source, take

from kvbench.base.errors import KvbenchError, UsageError
from kvbench.engine.calibration import text
from kvbench.tasks import fetch
from kvbench.tasks.source import Files


def test_members_of_an_archive_are_placed_and_locked(tmp_path):
    store = FakeHub({"data.zip": archive(tmp_path, a='"one"\n', b='"two"\n', c='"three"\n')})
    root, message = tmp_path / "root", []
    assert take(source(SUITE), root, store, message.append) == ["demo/a.jsonl", "demo/b.jsonl"]
    assert (root / "demo" / "b.jsonl").read_text() == '"two"\n'
    assert sorted(p.name for p in root.iterdir()) == ["demo", fetch.LOCK]
    assert store.asked == [("commit", "owner/demo", "dataset", "main"), ("file", "owner/demo", "data.zip", COMMIT)]
    assert message == ["fetching data.zip of owner/demo"]
    record = fetch.read_lock(root)["demo/a.jsonl"]
    assert record == {
        "dataset": "demo",
        "repo": "owner/demo",
        "revision": "main",
        "commit": COMMIT,
        "from": "data.zip",
        "member": "data/a.jsonl",
        "sha256": hashlib.sha256(b'"one"\n').hexdigest(),
        "bytes": 6,
    }


def test_a_second_fetch_takes_only_what_is_missing_at_the_locked_commit(tmp_path):
    root = tmp_path / "root"
    files = {"data.zip": archive(tmp_path, a='"one"\n', b='"two"\n')}
    take(source(SUITE), root, FakeHub(files))
    again = FakeHub(files, {"main": "another commit"})
    assert take(source(SUITE), root, again) == []
    assert again.asked == []
    (root / "demo" / "a.jsonl").unlink()
    assert take(source(SUITE), root, again) == ["demo/a.jsonl"]
    assert again.asked == [("file", "owner/demo", "data.zip", COMMIT)]


def test_a_source_that_has_changed_is_refused_and_nothing_is_placed(tmp_path):
    root = tmp_path / "root"
    take(source(SUITE), root, FakeHub({"data.zip": archive(tmp_path, a='"one"\n', b='"two"\n')}))
    (root / "demo" / "a.jsonl").unlink()
    before = (root / fetch.LOCK).read_text()
    with pytest.raises(KvbenchError, match="the source has changed"):
        take(source(SUITE), root, FakeHub({"data.zip": archive(tmp_path, a='"ONE"\n', b='"two"\n')}))
    assert not (root / "demo" / "a.jsonl").exists()
    assert (root / fetch.LOCK).read_text() == before


@pytest.mark.parametrize("content", ['"ONE"\n', "longer than before\n"])
def test_a_changed_file_is_an_error_that_names_it(tmp_path, content):
    root = tmp_path / "root"
    store = FakeHub({"data.zip": archive(tmp_path, a='"one"\n', b='"two"\n')})
    take(source(SUITE), root, store)
    (root / "demo" / "a.jsonl").write_text(content)
    with pytest.raises(UsageError, match=r"demo/a\.jsonl has changed since it was fetched"):
        take(source(SUITE), root, store)


def test_files_of_the_users_own_are_left_alone(tmp_path):
    root = tmp_path / "root"
    (root / "demo").mkdir(parents=True)
    (root / "demo" / "a.jsonl").write_text("mine\n")
    (root / "b-of-mine.jsonl").write_text("mine\n")
    entry = source({**SUITE, "also": "{}-of-mine.jsonl"})
    assert take(entry, root, FakeHub({})) == []
    assert (root / "demo" / "a.jsonl").read_text() == "mine\n"
    assert fetch.read_lock(root) == {}


def test_an_interrupted_fetch_keeps_what_came(tmp_path):
    root = tmp_path / "root"
    entry = source({"from": "x.json", "to": "x.json"}, {"from": "y.json", "to": "y.json"})
    with pytest.raises(KvbenchError, match=r"y\.json could not be fetched"):
        take(entry, root, FakeHub({"x.json": b"{}"}))
    assert list(fetch.read_lock(root)) == ["x.json"]
    assert take(entry, root, FakeHub({"y.json": b"[]"})) == ["y.json"]
    assert sorted(p.name for p in root.iterdir()) == [fetch.LOCK, "x.json", "y.json"]


def test_wikitext2_comes_with_the_split_that_calibration_reads(tmp_path):
    rows = [{"text": " = A heading = \n"}, {"text": ""}, {"text": " Words of the train split .\n"}]
    files = {f"wikitext-2-raw-v1/{split}-00000-of-00001.parquet": rows for split in ("test", "train")}
    store = FakeHub({name: parquet(tmp_path, content) for name, content in files.items()})
    root = tmp_path / "root"
    assert take(fetch.find_source("wikitext2"), root, store) == ["wikitext2/test.txt", "wikitext2/train.txt"]
    actual = text.find(False, None, str(root))
    assert (actual.name, actual.content) == ("wikitext2/train.txt", "".join(r["text"] for r in rows))


def test_addresses_and_compressed_files(tmp_path):
    root = tmp_path / "root"
    address = "https://example.org/x.jsonl.gz"
    entry = fetch.parse_source("demo", {"files": [{"url": address, "to": "x.jsonl"}]})
    store = FakeHub({address: gzip.compress(b'{"a": 1}\n', mtime=0)})
    assert take(entry, root, store) == ["x.jsonl"]
    assert (root / "x.jsonl").read_bytes() == b'{"a": 1}\n'
    assert store.asked == [("url", address)]
    assert fetch.read_lock(root)["x.jsonl"]["url"] == address


def test_parquet_becomes_lines_or_text(tmp_path):
    rows = [{"text": "one = 1\n", "tags": ["ä", "b"], "picture": b"12345"}, {"text": "", "tags": [], "picture": None}]
    store = FakeHub({"x.parquet": parquet(tmp_path, rows)})
    root = tmp_path / "root"
    entry = source(
        {"from": "x.parquet", "to": "x.jsonl"},
        {"from": "x.parquet", "to": "x.txt"},
        {"from": "x.parquet", "to": "copy.parquet"},
    )
    take(entry, root, store)
    assert [a[0] for a in store.asked] == ["commit", "file"]
    assert [json.loads(x) for x in (root / "x.jsonl").read_text(encoding="utf-8").splitlines()] == [
        {"text": "one = 1\n", "tags": ["ä", "b"], "picture": "<5 bytes>"},
        {"text": "", "tags": [], "picture": None},
    ]
    assert (root / "x.txt").read_text() == "one = 1\n"
    assert (root / "copy.parquet").read_bytes() == store.files["x.parquet"]
    with pytest.raises(KvbenchError, match="no column 'page', but text, tags, picture"):
        take(source({"from": "x.parquet", "to": "y.txt", "column": "page"}), root, store)


@pytest.mark.parametrize(
    ("item", "content", "reason"),
    [
        ({"from": "x.zip", "member": "b.txt", "to": "b.txt"}, b"no zip", "File is not a zip file"),
        ({"from": "x.gz", "to": "x"}, b"no gzip", "Not a gzipped file"),
        ({"from": "x.parquet", "to": "x.jsonl"}, b"no parquet", "could not be made from x.parquet"),
        ({"from": "x", "to": "x", "sha256": "0" * 64}, b"x", "its conf/dataset entry says 0000"),
    ],
)
def test_files_that_are_not_what_they_should_be(tmp_path, item, content, reason):
    with pytest.raises(KvbenchError, match=reason):
        take(source(item), tmp_path / "root", FakeHub({item["from"]: content}))
    assert list((tmp_path / "root").iterdir()) == []


def damaged(tmp_path, kind):
    """A zip whose member cannot be read for one reason."""
    data = bytearray(archive(tmp_path, a="one " * 500))
    local, central = data.index(b"PK\x03\x04"), data.index(b"PK\x01\x02")
    if kind == "encrypted":
        data[local + 6] |= 1
        data[central + 8] |= 1
    elif kind == "method":
        data[local + 8] = data[central + 10] = 99
    else:
        data[local + 40 + len("data/a.jsonl")] ^= 0xFF
    return bytes(data)


BAD_STREAM = gzip.compress(b"one " * 500, compresslevel=9, mtime=0)[:10] + b"\xff" * 30


@pytest.mark.parametrize(
    ("item", "content", "reason"),
    [
        (SUITE, "encrypted", "encrypted"),
        (SUITE, "method", "not supported"),
        (SUITE, "checksum", "could not be made from data.zip"),
        ({"from": "x.gz", "to": "x.txt"}, BAD_STREAM, "could not be made from x.gz"),
        ({"from": "x.gz", "to": "x.txt"}, gzip.compress(b"one", mtime=0)[:-4], "could not be made from x.gz"),
        ({"from": "x.parquet", "to": "x.txt"}, [{"text": "a"}, {"text": None}], "must hold text, it holds None"),
        ({"from": "x.parquet", "to": "x.txt"}, [{"text": 3}], "must hold text, it holds 3"),
        ({"from": "x", "to": "x.json"}, b"<html>sorry</html>", "could not be made from x"),
        ({"from": "x", "to": "x.json"}, b"[" * 100_000, "could not be made from x"),
        ({"from": "x", "to": "x.jsonl"}, b'{"a": 1}\n\n<html>\n', "line 3 is not JSON"),
        ({"from": "x", "to": "x.jsonl"}, b'{"a": "\xff"}\n', "line 1 is not JSON"),
    ],
)
def test_damaged_files_are_one_line_and_never_locked(tmp_path, item, content, reason):
    if isinstance(content, str):
        content = damaged(tmp_path, content)
    elif isinstance(content, list):
        content = parquet(tmp_path, content)
    root = tmp_path / "root"
    with pytest.raises(KvbenchError, match=reason) as error:
        take(source(item), root, FakeHub({item["from"]: content}))
    assert "\n" not in str(error.value)
    assert list(root.iterdir()) == []


def test_a_place_that_is_taken_is_named(tmp_path):
    (tmp_path / "x.json").mkdir()
    (tmp_path / "y").write_text("a file")
    store = FakeHub({"x": b"[]"})
    with pytest.raises(UsageError, match=r"x\.json cannot be written: it is a folder"):
        take(source({"from": "x", "to": "x.json"}), tmp_path, store)
    with pytest.raises(UsageError, match=r"y.z\.json cannot be written: (Not a directory|File exists)"):
        take(source({"from": "x", "to": "y/z.json"}), tmp_path, store)
    assert fetch.read_lock(tmp_path) == {} and (tmp_path / "y").read_text() == "a file"


def test_a_member_that_is_missing_is_named(tmp_path):
    with pytest.raises(KvbenchError, match=r"data/b\.jsonl"):
        take(source(SUITE), tmp_path / "root", FakeHub({"data.zip": archive(tmp_path, a='"one"\n')}))


@pytest.mark.parametrize(
    "item",
    [
        {"from": "x"},
        {"to": "x"},
        {"from": "x", "url": "y", "to": "z"},
        {"from": "x", "to": "../x"},
        {"from": "x", "to": "/etc/x"},
        {"from": "x", "to": "x", "sha": "1"},
    ],
)
def test_entries_that_cannot_be_meant(item):
    with pytest.raises(UsageError, match=r"conf/dataset/demo\.yaml, hub"):
        source(item)


def test_a_field_that_is_null_is_as_one_that_is_not_there():
    one = {"from": "x.json", "to": "x.json"}
    assert source({**one, "each": None, "sha256": None, "column": None}).files == source(one).files
    assert source({**SUITE, "also": None, "sha256": None}).files == source(SUITE).files


@pytest.mark.parametrize("content", ['"ONE"\n', '"longer"\n'])
def test_runs_refuse_a_file_that_has_changed_since_it_was_fetched(tmp_path, content, monkeypatch):
    take(source(SUITE), tmp_path, FakeHub({"data.zip": archive(tmp_path, a='"one"\n', b='"two"\n')}))
    (tmp_path / "mine.jsonl").write_text("mine")
    files, looked = Files("demo", tmp_path), []
    monkeypatch.setattr(fetch, "sha256", lambda path, real=fetch.sha256: looked.append(path) or real(path))
    for _ in range(3):
        assert (
            files.path("demo/a.jsonl") == files.find_first("nowhere", "demo/a.jsonl") == tmp_path / "demo" / "a.jsonl"
        )
        assert files.path("mine.jsonl") == tmp_path / "mine.jsonl" and files.path("demo").is_dir()
    assert looked == [tmp_path / "demo" / "a.jsonl"]
    (tmp_path / "demo" / "a.jsonl").write_text(content)
    for read in (files.path, files.find_first):
        with pytest.raises(UsageError, match=r"demo/a\.jsonl has changed since it was fetched"):
            read("demo/a.jsonl")
    assert files.path("demo/b.jsonl").is_file() and files.find_first("nowhere") is None
    (tmp_path / fetch.LOCK).unlink()
    assert files.path("demo/a.jsonl").is_file()


@pytest.mark.parametrize("text", ["{", "[]", '{"files": {"a": {}}}', '{"files": 3}'])
def test_a_damaged_lock_is_an_error(tmp_path, text):
    (tmp_path / fetch.LOCK).write_text(text)
    with pytest.raises(UsageError, match="cannot be read"):
        fetch.read_lock(tmp_path)


def test_every_entry_of_conf_says_what_status_shows():
    sources = fetch.read_sources()
    assert {"longbench", "longbench_e", "longbench_zh"} <= set(sources)
    for name, entry in sources.items():
        if entry is not None:
            assert entry.licence != "unknown" and entry.revision, name
            assert len({w.destination for w in entry.files}) == len(entry.files), name
    places = [w.destination for w in sources["longbench_e"].files]
    assert len(places) == 15 and "longbench/qasper_e.jsonl" in places


def test_fetched_files_are_those_that_the_loader_reads(tmp_path):
    from kvbench.tasks import longbench

    for dataset, split in (
        *(("longbench", "en"), ("longbench_zh", "zh"), ("longbench_e", "e")),
        *(("longbench_mini", "en"), ("longbench_mini_zh", "zh")),
    ):
        files = {w.destination: w.alternative for w in fetch.find_source(dataset).files}
        folder = "longbench_mini" if "mini" in dataset else "longbench"
        expected = dict(longbench.file_places(n, split, folder) for n in longbench.task_names(split))
        official = {f"longbench/{n}": None for n in (longbench.PROMPTS, longbench.LENGTHS)}
        assert files == {**expected, **official}
