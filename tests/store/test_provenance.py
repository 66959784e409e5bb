"""Where numbers come from: a clean commit, one with local changes, or none, and what readers are told of it."""

import subprocess

import pytest

from kvbench.store import provenance
from kvbench.store.provenance import describe_local_changes, read_commit
from kvbench.store.results import CellRecord


def git(folder, *words):
    subprocess.run(["git", "-C", str(folder), "-c", "user.name=n", "-c", "user.email=e", *words], check=True)


@pytest.fixture
def clone(tmp_path):
    (tmp_path / "kvbench").mkdir()
    (tmp_path / "kvbench" / "provenance.py").write_text("")
    (tmp_path / "README.md").write_text("")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    return tmp_path


def test_only_what_measures_makes_a_clone_unclean(clone):
    assert len(read_commit(clone)) == 12
    (clone / "README.md").write_text("new words")
    (clone / "results.json").write_text("")
    assert not read_commit(clone).endswith("+")
    (clone / "kvbench" / "new.py").write_text("")  # not tracked, and imported all the same
    assert read_commit(clone).endswith("+")


def test_without_a_clone_there_is_no_commit(tmp_path):
    assert read_commit(tmp_path) is None


def test_the_commit_is_that_of_the_folder_of_the_package():
    assert (provenance.ROOT / "kvbench" / "store" / "provenance.py").is_file()


def test_a_table_says_which_cells_no_commit_can_make_again():
    clean, changed, none = (CellRecord(provenance=({"commit": c},)) for c in ("abc", "def+", None))
    assert describe_local_changes([clean, none, CellRecord()]) == ""
    printed = describe_local_changes([clean, changed, changed, none])
    assert printed.startswith("2 of 4 results were measured with local changes to the code (behind commit def)")
