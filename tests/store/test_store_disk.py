"""Disks that are full, read-only, broken or gone: one message, and nothing that was written before is lost."""

import errno
import multiprocessing
import os
import resource
import shutil
import subprocess

import pytest
from support.stored import FACTS, Cell, measure, sample

from kvbench.base.errors import KvbenchError, UsageError
from kvbench.base.files import read_json, read_lines
from kvbench.cli.main import main
from kvbench.store.store import SYNC_S, ResultStore


def fill(writer):
    for i in range(200):
        writer.append(sample(i))


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 KiB, which only root can mount."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("a small file system cannot be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_tears_one_line_and_loses_none(small_disk):
    store, cell = ResultStore(small_disk / "results"), Cell(size=200)
    writer = store.open(cell, FACTS, 0, mix=False)
    store.write_metrics(cell.id, {"n": 1})
    with pytest.raises(KvbenchError, match=r"the disk is full.*Everything before is safe; free some space"):
        fill(writer)
    written = len(store.lines(cell.id))
    assert writer.out.path.read_bytes().count(b"\n") == written
    assert 20 < written < 200
    store.mark(cell, "failed", "the disk is full")
    writer.close()
    with pytest.raises(KvbenchError, match=r"the disk is full"):
        store.write_metrics(cell.id, {"n": written, "long": "x" * 9000})
    assert read_json(store.folder(cell.id) / "metrics.json") == {"n": 1}
    assert not list(store.folder(cell.id).glob("*.tmp"))
    assert len(ResultStore(store.root).lines(cell.id)) == written
    assert read_lines(store.folder(cell.id) / "samples-0.jsonl").torn == written + 1
    subprocess.run(["mount", "-o", "remount,size=1m", str(small_disk)], check=True)
    measure(store, cell, range(written, 200))
    assert list(store.lines(cell.id).values()) == sorted(
        ({**sample(i), "provenance": 0} for i in range(200)), key=lambda s: s["id"]
    )
    assert store.status(cell.id).status == "complete"
    assert len(store.warnings) == 1
    assert f"line {written + 1}" in store.warnings[0]


def test_a_device_that_is_always_full(tmp_path):
    store, cell = ResultStore(tmp_path), Cell()
    measure(store, cell, [0], shard=1)
    (store.folder(cell.id) / "samples-0.jsonl").symlink_to("/dev/full")
    writer = store.open(cell, FACTS, 0, mix=False)
    with pytest.raises(KvbenchError, match=r"the disk is full"):
        writer.append(sample(1))
    writer.close()
    (store.folder(cell.id) / "samples-0.jsonl").unlink()
    assert list(store.lines(cell.id)) == ["e0"]


def test_a_write_that_fails_in_the_middle_costs_its_own_line_only(tmp_path, monkeypatch):
    store, cell = ResultStore(tmp_path), Cell()
    writer = store.open(cell, FACTS, 0, mix=False)
    writer.append(sample(0))
    write = os.write

    def half(fd, data):
        if len(data) > 600:
            return write(fd, data[: len(data) // 2])
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(KvbenchError, match=r"could not be written .Input/output error.. Everything before is safe"):
        writer.append(sample(1, prediction="x" * 600))
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:7]))
    writer.append(sample(2))
    monkeypatch.undo()
    writer.append(sample(3))
    writer.close()
    assert list(store.lines(cell.id)) == ["e0", "e2", "e3"]
    assert len(store.warnings) == 1


def _limited(root, said):
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
    store = ResultStore(root)
    writer = store.open(Cell(), FACTS, 0, mix=False)
    try:
        for i in range(50):
            writer.append(sample(i))
    except KvbenchError as error:
        said.put((i, str(error)))


def test_a_limit_on_file_sizes(tmp_path):
    context = multiprocessing.get_context("fork")
    text = context.Queue()
    process = context.Process(target=_limited, args=(tmp_path, text))
    process.start()
    written, message = text.get(timeout=60)
    process.join()
    assert "File too large" in message
    assert len(ResultStore(tmp_path).lines(Cell().id)) == written > 2


def test_a_device_that_does_not_sync_is_said_and_the_lock_is_let_go(tmp_path, monkeypatch):
    store, cell = ResultStore(tmp_path), Cell()
    writer = store.open(cell, FACTS, 0, mix=False)
    writer.append(sample(0))

    def broken(fd):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(KvbenchError, match=r"the device did not take the last lines .Input/output error."):
        writer.close()
    with pytest.raises(KvbenchError, match="could not be written"):
        store.write_metrics(cell.id, {"n": 1})
    # the descriptor is closed: it may be another file's by now
    store.sync()
    monkeypatch.undo()
    assert store.status(cell.id).measuring == ()
    measure(store, cell, [1])
    assert len(store.lines(cell.id)) == 2


def test_lines_are_synced_when_old_at_once_when_asked_and_on_closing(tmp_path, monkeypatch):
    store, synced = ResultStore(tmp_path), []
    first, second = (store.open(Cell(name), FACTS, 0, mix=False) for name in ("aaa", "bbb"))
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(fd) or fsync(fd))
    first.append(sample(0))
    first.out.unsynced -= SYNC_S - 2  # as if its first line were written so long ago
    first.append(sample(1))
    assert synced == []
    first.out.unsynced -= 2
    second.append(sample(0))
    assert synced == [first.out.fd]
    store.sync()
    assert synced == [first.out.fd, second.out.fd]
    first.append(sample(2))
    first.close()
    second.close()
    assert synced == [first.out.fd, second.out.fd, first.out.fd]


def test_a_folder_that_vanishes_is_said_and_one_that_moves_goes_on(tmp_path):
    store, cell = ResultStore(tmp_path / "a"), Cell()
    writer = store.open(cell, FACTS, 0, mix=False)
    writer.append(sample(0))
    (tmp_path / "a").rename(tmp_path / "b")
    writer.append(sample(1))
    assert len(ResultStore(tmp_path / "b").lines(cell.id)) == 2
    shutil.rmtree(tmp_path / "b")
    with pytest.raises(KvbenchError, match="was removed while it was written: the answers in it are gone"):
        writer.append(sample(2))
    store.mark(cell, "failed", "gone")
    writer.close()
    measure(store, cell, [0])
    assert len(store.lines(cell.id)) == 1


def test_a_read_only_folder_is_a_usage_error_before_anything_is_measured(tmp_path, capsys):
    folder = tmp_path / "ro"
    folder.mkdir()
    if os.geteuid():
        folder.chmod(0o500)
    else:
        mount = ["mount", "-t", "tmpfs", "-o", "ro,size=64k", "none", str(folder)]
        if subprocess.run(mount, capture_output=True).returncode:
            pytest.skip("root can write everywhere, and nothing can be mounted here")
    try:
        with pytest.raises(UsageError, match=r"cannot be written .(Read-only file system|Permission denied)"):
            ResultStore(folder).check()
        assert main(["run", "limit=1", f"results={folder}"]) == 2
        assert capsys.readouterr().err.count("\n") == 1
        with pytest.raises(KvbenchError, match="could not be written"):
            ResultStore(folder).open(Cell(), FACTS, 0, mix=False)
    finally:
        if not os.geteuid():
            subprocess.run(["umount", "-l", str(folder)], check=True)
