"""Kill a run again and again, fill its disk, resume: nothing is lost, nothing doubled, the same metrics at the end.

python scripts/torture.py --kills 100 [--examples 24] [--seed 0] [--json]

Each life is the real main job in a child that is forked after the imports, so that a kill costs a second. It dies by
``kill -9`` at a random moment. In every second life a line is written in two halves with a pause between, so that many
kills land within a write; every second round is measured by two shards that are killed together. A round ends when it
is finished: then its files are held against those of an undisturbed run. After every kill each file must begin with
what was on disk after the kill before it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvbench.cli.main import main as kvbench_main
from kvbench.files import read_json, read_lines
from kvbench.run import config, experiment
from kvbench.run.store import ResultStore

RUN = ["dataset=tiny/needle,tiny/listing", "length=256", "method=snapkv,snapkv+think", "batch_rows=6"]
PAGE = 4096
HALF_LINE_S = 0.08
Sampled = dict[tuple[str, str], dict[str, Any]]


@dataclass
class Tally:
    """What happened, for the closing summary.

    kills: lives that were killed.
    measuring: kills after which a file had changed.
    rounds: runs that were begun.
    torn: files that a kill left with a half-written line.
    damaged: damaged lines found in finished rounds.
    lines: whole lines that were compared with those on disk after an earlier kill.
    lost: whole lines that had gone.
    doubled: samples that occurred twice.
    different: what differed from the undisturbed run, in words.
    disk: what came of the full disk, in words.
    """

    kills: int = 0
    measuring: int = 0
    rounds: int = 0
    torn: int = 0
    damaged: int = 0
    lines: int = 0
    lost: int = 0
    doubled: int = 0
    different: list[str] = field(default_factory=list)
    disk: str = "not tried"

    @property
    def right(self) -> bool:
        return not (self.lost or self.doubled or self.different) and not self.disk.startswith("WRONG")


def main() -> int:
    """Torture the run and print the summary; return 1 if anything was lost, doubled or different."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="kills that must land (default 100)")
    parser.add_argument("--examples", type=int, default=24, help="of each of two tasks (default 24)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default 0)")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON on stdout")
    args = parser.parse_args()
    RUN.append(f"examples={args.examples}")
    start, chance, tally = time.monotonic(), random.Random(args.seed), Tally()
    with tempfile.TemporaryDirectory(prefix="kvbench-torture-") as folder:
        root = Path(folder)
        undisturbed = root / "undisturbed"
        # reads configuration and tokenizer once, before any child is forked
        experiment.prepare(config.read([*RUN, f"results={undisturbed}"]))
        run_start = time.monotonic()
        if finish(undisturbed):
            print((root / "undisturbed.log").read_text(), file=sys.stderr)
            return 1
        run_s = time.monotonic() - run_start
        while tally.kills < args.kills:
            results = root / f"round{tally.rounds}"
            torture(results, args.kills, run_s, chance, tally)
            compare(results, undisturbed, tally)
            say(f"round {tally.rounds}: {tally.kills} kills so far, {tally.lines} lines held, {tally.lost} lost")
            shutil.rmtree(results)
        tally.disk = fill_disk(root, undisturbed, tally)
    seconds = time.monotonic() - start
    if args.json:
        print(json.dumps({**asdict(tally), "right": tally.right, "seconds": round(seconds, 1)}))
    else:
        print(summary(tally, seconds))
    return 0 if tally.right else 1


def summary(tally: Tally, seconds: float) -> str:
    """Return the closing summary as text."""
    same = "identical to the undisturbed run" if not tally.different else f"DIFFERENT: {'; '.join(tally.different[:5])}"
    return (
        f"{tally.kills} kills in {tally.rounds} rounds, {tally.measuring} of them of lives that had written, "
        f"{tally.torn} within a write; {tally.damaged} torn lines were left behind and measured again\n"
        f"lines that were on disk after a kill: {tally.lines} checked, {tally.lost} lost, {tally.doubled} doubled\n"
        f"samples and metrics of every round: {same}\n"
        f"full disk: {tally.disk}\n"
        f"{'right' if tally.right else 'WRONG'} ({seconds:.0f} s)"
    )


def torture(results: Path, kills: int, run_s: float, chance: random.Random, tally: Tally) -> None:
    """Kill lives of one run until it is finished or has been killed often enough; then let it finish."""
    shards = 1 + tally.rounds % 2
    tally.rounds += 1
    before: dict[Path, bytes] = {}
    while tally.kills < kills:
        is_torn = bool(tally.kills % 2)
        lives = [
            fork([*RUN, f"results={results}", *shard], results.with_suffix(".log"), tear if is_torn else None)
            for shard in ([[f"shards={shards}", f"shard={i}"] for i in range(shards)] if shards > 1 else [[]])
        ]
        await_moment(results, before, run_s, chance)
        for pid in lives:
            os.kill(pid, signal.SIGKILL)
        ended = [os.waitpid(pid, 0)[1] for pid in lives]
        killed = sum(os.WIFSIGNALED(status) for status in ended)
        tally.kills += killed
        now = check_files(results, before, tally)
        tally.measuring += killed if now != before else 0
        before = now
        if not killed:
            break
    if finish(results):
        tally.different.append(f"the resumed run failed: {results.with_suffix('.log').read_text()[-300:]}")
    check_files(results, before, tally)


def await_moment(results: Path, before: dict[Path, bytes], run_s: float, chance: random.Random) -> None:
    """Sleep up to the kill: any moment of a life, or, as often, one soon after it has written something."""
    if chance.random() < 0.5:
        time.sleep(chance.uniform(0.0, 0.6 * run_s))
        return
    end = time.monotonic() + run_s
    while time.monotonic() < end and read_files(results) == before:
        time.sleep(0.01)
    time.sleep(chance.uniform(0.0, 0.2 * run_s))


def read_files(results: Path) -> dict[Path, bytes]:
    """Return {path: content} of every file of samples."""
    return {path: path.read_bytes() for path in sorted(results.glob("cells/*/samples-*.jsonl"))}


def check_files(results: Path, before: dict[Path, bytes], tally: Tally) -> dict[Path, bytes]:
    """Return {path: content} of every file of samples, after checking that each has only grown since ``before``."""
    now = read_files(results)
    for path, data in before.items():
        whole = data[: data.rfind(b"\n") + 1]
        tally.lines += whole.count(b"\n")
        if not now.get(path, b"").startswith(whole):
            tally.lost += whole.count(b"\n")
    tally.torn += sum(bool(data) and not data.endswith(b"\n") and before.get(p) != data for p, data in now.items())
    return now


def compare(results: Path, undisturbed: Path, tally: Tally) -> None:
    """Hold a finished round against the undisturbed run: the same samples once each, and the same metrics."""
    ours, theirs = samples_of(results, tally), samples_of(undisturbed, Tally())
    name = results.name
    for key in theirs.keys() | ours.keys():
        if ours.get(key) != theirs.get(key):
            tally.different.append(f"{name}: sample {' '.join(key)}")
    if metrics_of(results) != metrics_of(undisturbed):
        tally.different.append(f"{name}: metrics")
    store = ResultStore(results)
    unfinished = [c for c in store.cells() if store.status(c).status != "complete"]
    if unfinished or store.cells() != ResultStore(undisturbed).cells():
        tally.different.append(f"{name}: status of {', '.join(unfinished) or 'cells'}")


def samples_of(results: Path, tally: Tally) -> Sampled:
    """Return {(cell, example id): sample} of all intact lines, without times and provenance."""
    samples: Sampled = {}
    for path in sorted(results.glob("cells/*/samples-*.jsonl")):
        lines = read_lines(path)
        tally.damaged += len(lines.damaged)
        for _, sample in lines.intact:
            key = (path.parent.name, str(sample["id"]))
            tally.doubled += key in samples
            samples[key] = {k: v for k, v in sample.items() if k not in ("timing", "provenance")}
    return samples


def metrics_of(results: Path) -> dict[str, dict[str, Any]]:
    """Return {cell: metrics} of all cells, without times."""
    paths = sorted(results.glob("cells/*/metrics.json"))
    return {p.parent.name: {k: v for k, v in (read_json(p) or {}).items() if k != "timing"} for p in paths}


def fill_disk(root: Path, undisturbed: Path, tally: Tally) -> str:
    """Run into a full disk in the middle, make room and resume; return what happened in words."""
    files = [p for p in undisturbed.rglob("*") if p.is_file()]
    half = sum(p.stat().st_size for p in files if p.suffix == ".jsonl") // 2
    try:
        with small_disk(root / "disk", 4 * sum(PAGE + p.stat().st_size for p in files)) as disk:
            first = disk / "results"
            # what the run needs beside its samples, and half of those
            room = sum(-(-p.stat().st_size // PAGE) * PAGE for p in files if p.suffix != ".jsonl") + half
            ballast = disk / "ballast"
            free = shutil.disk_usage(disk).free
            ballast.write_bytes(bytes(free - room))
            return _resume_after(first, undisturbed, "disk is full", ballast.unlink, None, tally)
    except (OSError, subprocess.CalledProcessError) as error:
        limit = max(p.stat().st_size for p in files if p.suffix == ".jsonl") // 2

        def limited() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

        outcome = _resume_after(root / "limited", undisturbed, "could not be written", lambda: None, limited, tally)
        return f"{outcome} (by a limit on file sizes: a small file system cannot be mounted here, {error})"


def _resume_after(
    results: Path,
    undisturbed: Path,
    message: str,
    relieve: Callable[[], None],
    limit: Callable[[], None] | None,
    tally: Tally,
) -> str:
    # not on the disk itself: the message that it is full needs room
    log = undisturbed.parent / "disk.log"
    status = os.waitstatus_to_exitcode(os.waitpid(fork([*RUN, f"results={results}"], log, limit), 0)[1])
    log_lines = log.read_text().strip().splitlines()
    contents = check_files(results, {}, Tally())
    lines = sum(data.count(b"\n") for data in contents.values())
    if status != 1 or not log_lines or message not in log_lines[-1] or "Traceback" in " ".join(log_lines):
        return f"WRONG: exit {status}, {' / '.join(log_lines[-3:])!r}"
    relieve()
    if finish(results):
        return f"WRONG: the resumed run failed: {results.with_suffix('.log').read_text()[-300:]}"
    checked = Tally()
    check_files(results, contents, checked)
    compare(results, undisturbed, checked)
    tally.lines += checked.lines
    tally.lost += checked.lost
    tally.doubled += checked.doubled
    if not checked.right:
        return f"WRONG: {checked.lost} lost, {checked.doubled} doubled, {'; '.join(checked.different[:3])}"
    total = len(samples_of(undisturbed, Tally()))
    return f"one message after {lines} of {total} lines; resumed, none lost, metrics identical"


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Path]:
    """Mount a file system of ``size`` bytes at ``folder``, which needs root, and yield the folder.

    Raises CalledProcessError or OSError if it cannot be mounted.
    """
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)]
    subprocess.run(mount, check=True, capture_output=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, capture_output=True)


def finish(results: Path) -> int:
    """Run to the end in a child process; return its exit status."""
    pid = fork([*RUN, f"results={results}"], results.with_suffix(".log"), None)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def fork(arguments: list[str], log: Path, prepare: Callable[[], None] | None) -> int:
    """Start the main job in a child process, which has all imports already; return its process id."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 70
    try:
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.dup2(out, 1)
        os.dup2(out, 2)
        if prepare is not None:
            prepare()
        status = kvbench_main(["run", *arguments])
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def tear() -> None:
    """From now on, write in two halves with a pause between them."""
    write = os.write

    def in_halves(fd: int, data: bytes) -> int:
        first = write(fd, data[: len(data) // 2])
        time.sleep(HALF_LINE_S)
        return first + write(fd, data[first:])

    os.write = in_halves  # type: ignore[assignment]


def say(text: str) -> None:
    print(f"torture: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
