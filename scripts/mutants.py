"""Small mistakes in the code, each of which some fast test must notice.

python scripts/mutants.py                 try every mutation of tests/mutants.yaml
python scripts/mutants.py summary stats   only those whose file contains one of the words

A mutation replaces a text that stands once in a file (a sign, an index, a mean by a sum). It is made in a copy of the
repository; the tests named beside it must fail there within two minutes. The exit status is 1 if one passes them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "tests" / "mutants.yaml"
COPIED = ("kvbench", "conf", "tests", "scripts", "docs", "results", "pyproject.toml", "README.md", "CONTRIBUTING.md")
LIMIT_S = 120
NOTICED = 1
"""pytest's exit status if a test failed."""
NOTHING_RAN = 5
"""pytest's exit status if it found no test to run."""


@dataclass(frozen=True)
class Mutation:
    """A text of a file, its replacement, and the tests that must notice."""

    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def apply(self, root: Path) -> None:
        """Make the mutation below ``root``. Raises ValueError if the text does not stand once in the file."""
        path = root / self.file
        text = path.read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file} has {self.old!r} {text.count(self.old)} times, not once")
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")


def mutations(words: Sequence[str]) -> list[Mutation]:
    """Return the mutations of the list whose file contains one of ``words``. Return all without words."""
    entries = yaml.safe_load(LIST.read_text(encoding="utf-8"))
    all_of_them = []
    for entry in entries:
        tests = entry["tests"].split()
        all_of_them.append(Mutation(entry["file"], entry["old"], entry["new"], tuple(tests)))
    if not words:
        return all_of_them
    return [mutation for mutation in all_of_them if any(word in mutation.file for word in words)]


def tests_fail(mutation: Mutation) -> str:
    """Make a mutation in a copy and run its tests. Return the outcome: noticed, survived, too slow or broken."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__", "cells"))
            else:
                shutil.copy(source, copy / name)
        mutation.apply(copy)
        environment = dict(os.environ)
        environment["PYTHONPATH"] = str(copy)
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *mutation.tests]
        # a file may have no test but whole runs
        for tests in (["-m", "not e2e"], []):
            try:
                done = subprocess.run(command + tests, cwd=copy, env=environment, capture_output=True, timeout=LIMIT_S)
            except subprocess.TimeoutExpired:
                return f"too slow: not noticed within {LIMIT_S} s"
            if done.returncode != NOTHING_RAN:
                break
    if done.returncode == 0:
        return "survived"
    if done.returncode == NOTICED:
        return "noticed"
    return f"broken: pytest ends with status {done.returncode}"


def main() -> int:
    """Try the mutations and print one line each. Return 1 if a mutation was not noticed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="parts of file names")
    chosen = mutations(parser.parse_args().words)
    unnoticed = 0
    for mutation in chosen:
        start = time.monotonic()
        try:
            outcome = tests_fail(mutation)
        except ValueError as error:
            outcome = f"broken: {error}"
        unnoticed += outcome != "noticed"
        change = f"{mutation.old.strip()} -> {mutation.new.strip()}"
        print(f"{outcome:9} {time.monotonic() - start:4.0f} s  {mutation.file}: {change}", flush=True)
    print(f"{len(chosen) - unnoticed} of {len(chosen)} mutations are noticed")
    return int(unnoticed > 0)


if __name__ == "__main__":
    sys.exit(main())
