"""A hub of our own making, for tests of fetching."""

import zipfile
from pathlib import Path

import pyarrow
import pyarrow.parquet

from kvbench.base.errors import KvbenchError
from kvbench.tasks import fetch

COMMIT = "c0ffee" * 6 + "cafe"


class FakeHub:
    """Files by name or address, one commit per revision, and a record of what was asked for."""

    def __init__(self, files, commits=None):
        self.files, self.commits, self.asked = files, commits or {"main": COMMIT}, []

    def find_commit(self, repo, kind, revision):
        self.asked.append(("commit", repo, kind, revision))
        return self.commits[revision]

    def download_file(self, repo, kind, name, commit, folder):
        self.asked.append(("file", repo, name, commit))
        return self._give(name, folder / Path(name).name)

    def download_url(self, url, folder):
        self.asked.append(("url", url))
        return self._give(url, folder / "download")

    def _give(self, name, path):
        if name not in self.files:
            raise KvbenchError(f"{name} could not be fetched")
        path.write_bytes(self.files[name])
        return path


def archive(tmp_path, **members):
    path = tmp_path / "made.zip"
    with zipfile.ZipFile(path, "w") as out:
        for name, text in members.items():
            out.writestr(f"data/{name}.jsonl", text)
    return path.read_bytes()


def parquet(tmp_path, rows):
    path = tmp_path / "made.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path.read_bytes()


def source(*files, **more):
    return fetch.parse_source("demo", {"repo": "owner/demo", "licence": "MIT", "files": list(files), **more})


SUITE = {"from": "data.zip", "member": "data/{}.jsonl", "to": "demo/{}.jsonl", "each": ["a", "b"]}


def take(entry, root, store, say=lambda text: None):
    return fetch.fetch(entry, root, store, say)
