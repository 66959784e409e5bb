"""Kill a run again and again, fill its disk, resume: nothing is lost, nothing doubled, the same metrics at the end.

python scripts/torture.py --kills 100 [--kinds plain,turns] [--examples 24] [--seed 0] [--json]

Each life is a real run in a child that is forked after the imports, so that a kill costs a second. It dies by
``kill -9`` at a random moment. In every second life a line is written in two halves with a pause between, so that many
kills land within a write. Rounds take turns: one process, two shards, or two equal runs in one folder, killed together;
and each of KINDS, the kinds of runs. A round ends when it is finished or after its share of the kills: then its files
are held against those of an undisturbed run. After every kill each file must begin with what was on disk after the kill
before it.
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvbench import methods
from kvbench.base.files import read_json, read_lines
from kvbench.cli.main import main as kvbench_main
from kvbench.plan import config, run_plan
from kvbench.store.store import ResultStore

ROUND_KILLS = 12
"""The most kills of one round, so that every kind of run gets some."""
KINDS = {
    "plain": ["dataset=tiny/needle,tiny/listing", "length=256", "method=snapkv,snapkv+think"],
    "turns": ["dataset=file", "metric=f1", "turns=isolated,gold", "method=snapkv", "window=4", "kv_size=16"],
    "fidelity": ["dataset=tiny/needle", "length=256", "kl=true", "method=snapkv,kivi"],
    "budget": [
        "dataset=tiny/listing",
        "length=256",
        "method=keydiff",
        "kv_size=64",
        "decode_budget=48",
        "decode_every=1",
    ],
    "prefix": ["dataset=tiny/needle", "length=256", "shared_prefix=32", "method=h2o,snapkv"],
    "ruler": ["dataset=ruler/niah_single_1", "lengths=768", "method=snapkv,streamingllm"],
    "formats": ["dataset=tiny/needle", "length=256", "method=fp8,q4_0,turboquant,flexgen"],
    "drawing": ["dataset=tiny/needle", "length=256", "method=drawing,snapkv"],
}
"""The arguments of each kind of run: one round takes one of them."""
WAYS = ("alone", "shards", "shared folder")
"""How a round is measured: by one process, by two shards, or by two equal runs in one folder."""
OWN_METHOD = """
from dataclasses import dataclass
import torch
from kvbench.methods.core.base import Selector

@dataclass(frozen=True, kw_only=True)
class Drawing(Selector):
    id = "drawing"

    def scores(self, cache, obs, capacity):
        return torch.rand(cache.heads, obs.n)
"""
PAGE = 4096
HALF_LINE_S = 0.08
Sampled = dict[tuple[str, str], dict[str, Any]]


@dataclass
class Tally:
    """The outcomes, for the closing summary.

    kills: lives that were killed.
    measuring: kills after which a file had changed.
    rounds: runs that were begun.
    torn: files that a kill left with a half-written line.
    damaged: damaged lines found in finished rounds.
    lines: whole lines that were compared with those on disk after an earlier kill.
    lost: whole lines that had gone.
    doubled: samples that occurred twice.
    different: the differences from the undisturbed run, in words.
    disk: the outcome of the full disk, in words.
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
    """Torture the run and print the summary. Return 1 if anything was lost, doubled or different."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="kills that must land (default 100)")
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"of {', '.join(KINDS)} (default all)")
    parser.add_argument("--examples", type=int, default=24, help="of each task (default 24)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default 0)")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON on stdout")
    args = parser.parse_args()
    kinds = args.kinds.split(",")
    if unknown := [k for k in kinds if k not in KINDS]:
        parser.error(f"--kinds: {', '.join(unknown)} is not one of {', '.join(KINDS)}")
    start, chance, tally = time.monotonic(), random.Random(args.seed), Tally()
    with tempfile.TemporaryDirectory(prefix="kvbench-torture-") as folder:
        root = Path(folder)
        (root / "methods").mkdir()
        (root / "methods" / "drawing.py").write_text(OWN_METHOD)
        # this repeats the effect of KVBENCH_METHODS, which was read at the import
        methods.__path__.append(str(root / "methods"))
        runs: list[Run] = []
        for kind in kinds:
            run = undisturbed_run(root, kind, args.examples)
            if run is None:
                return 1
            runs.append(run)
        while tally.kills < args.kills:
            run = runs[tally.rounds % len(runs)]
            way = WAYS[tally.rounds // len(runs) % len(WAYS)]
            results = root / f"round{tally.rounds}"
            kills = min(args.kills, tally.kills + ROUND_KILLS)
            torture(run, way, results, kills, chance, tally)
            compare(results, run.results, tally)
            say(
                f"round {tally.rounds} ({run.kind}, {way}): {tally.kills} kills so far, {tally.lines} lines held, "
                f"{tally.lost} lost"
            )
            shutil.rmtree(results)
        tally.disk = fill_disk(root, runs[0], tally)
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


@dataclass(frozen=True)
class Run:
    """A kind of run with its arguments, and the results and seconds of an undisturbed run."""

    kind: str
    arguments: tuple[str, ...]
    results: Path
    seconds: float


def undisturbed_run(root: Path, kind: str, examples: int) -> Run | None:
    """Measure a kind of run without disturbance. Return None, with its log on stderr, if it fails."""
    arguments = [*KINDS[kind], f"limit={examples}", "batch_rows=6"]
    if kind == "turns":
        arguments.append(f"path={write_contexts(root, examples)}")
    results = root / f"undisturbed-{kind}"
    # read configuration and tokenizer once, before any child is forked
    run_plan.prepare(config.read([*arguments, f"results={results}"]))
    start = time.monotonic()
    if finish(arguments, results):
        print(results.with_suffix(".log").read_text(), file=sys.stderr)
        return None
    return Run(kind, tuple(arguments), results, time.monotonic() - start)


def write_contexts(root: Path, count: int) -> Path:
    """Write contexts with three questions each. Return the path of the file."""
    path = root / "contexts.jsonl"
    colours = ("red", "green", "blue", "white", "black")
    with path.open("w", encoding="utf-8") as out:
        for i in range(count):
            known = [(name, colours[(i + k) % len(colours)]) for k, name in enumerate(("paris", "rome", "oslo"))]
            context = " ".join(f"the colour of {name} is {colour}." for name, colour in known)
            questions = [{"question": f" the colour of {name} is", "answers": [colour]} for name, colour in known]
            out.write(json.dumps({"context": context * 4, "questions": questions}) + "\n")
    return path


def torture(run: Run, way: str, results: Path, kills: int, chance: random.Random, tally: Tally) -> None:
    """Kill lives of one run until it is finished or has been killed often enough. Then let it finish."""
    tally.rounds += 1
    processes: dict[str, list[list[str]]] = {
        "alone": [[]],
        "shards": [["shards=2", "shard=0"], ["shards=2", "shard=1"]],
        "shared folder": [[], []],
    }
    before: dict[Path, bytes] = {}
    while tally.kills < kills:
        is_torn = bool(tally.kills % 2)
        lives = [
            fork([*run.arguments, f"results={results}", *more], results.with_suffix(".log"), tear if is_torn else None)
            for more in processes[way]
        ]
        await_moment(results, before, run.seconds, chance)
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
    if finish(run.arguments, results):
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
    """Compare a finished round with the undisturbed run: the same samples once each, and the same metrics."""
    ours, theirs = samples_of(results, tally), samples_of(undisturbed, Tally())
    name = results.name
    for key in theirs.keys() | ours.keys():
        if ours.get(key) != theirs.get(key):
            tally.different.append(f"{name}: sample {' '.join(key)}")
    if metrics_of(results) != metrics_of(undisturbed):
        tally.different.append(f"{name}: metrics")
    store = ResultStore(results)
    expected = ResultStore(undisturbed)
    # a life that was killed after its last line leaves its mark on a cell; under limit= such a cell is done as asked
    statuses = {c: store.status(c).status.replace("interrupted", "done") for c in store.cells()}
    unlike = [c for c in expected.cells() if statuses.get(c) != expected.status(c).status]
    if unlike or store.cells() != expected.cells():
        tally.different.append(f"{name}: status of {', '.join(unlike) or 'cells'}")


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
            # the seconds of each question's answer
            if "turns" in sample:
                samples[key]["turns"] = [{k: v for k, v in turn.items() if k != "decode_s"} for turn in sample["turns"]]
    return samples


def metrics_of(results: Path) -> dict[str, dict[str, Any]]:
    """Return {cell: metrics} of all cells, without times."""
    paths = sorted(results.glob("cells/*/metrics.json"))
    return {p.parent.name: {k: v for k, v in (read_json(p) or {}).items() if k != "timing"} for p in paths}


def fill_disk(root: Path, run: Run, tally: Tally) -> str:
    """Run into a full disk in the middle, make room and resume. Return the outcome in words."""
    undisturbed = run.results
    files = [p for p in undisturbed.rglob("*") if p.is_file()]
    half = sum(p.stat().st_size for p in files if p.suffix == ".jsonl") // 2
    try:
        with small_disk(root / "disk", 4 * sum(PAGE + p.stat().st_size for p in files)) as disk:
            first = disk / "results"
            # the space that the run needs beside its samples, and half of the samples
            room = sum(-(-p.stat().st_size // PAGE) * PAGE for p in files if p.suffix != ".jsonl") + half
            ballast = disk / "ballast"
            free = shutil.disk_usage(disk).free
            ballast.write_bytes(bytes(free - room))
            return _resume_after(run, first, "disk is full", ballast.unlink, None, tally)
    except (OSError, subprocess.CalledProcessError) as error:
        limit = max(p.stat().st_size for p in files if p.suffix == ".jsonl") // 2

        def limited() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

        outcome = _resume_after(run, root / "limited", "could not be written", lambda: None, limited, tally)
        return f"{outcome} (by a limit on file sizes: a small file system cannot be mounted here, {error})"


def _resume_after(
    run: Run,
    results: Path,
    message: str,
    relieve: Callable[[], None],
    limit: Callable[[], None] | None,
    tally: Tally,
) -> str:
    # not on the disk itself, since the message that it is full needs room
    undisturbed = run.results
    log = undisturbed.parent / "disk.log"
    status = os.waitstatus_to_exitcode(os.waitpid(fork([*run.arguments, f"results={results}"], log, limit), 0)[1])
    log_lines = log.read_text().strip().splitlines()
    contents = check_files(results, {}, Tally())
    lines = sum(data.count(b"\n") for data in contents.values())
    if status != 1 or not log_lines or message not in log_lines[-1] or "Traceback" in " ".join(log_lines):
        return f"WRONG: exit {status}, {' / '.join(log_lines[-3:])!r}"
    relieve()
    if finish(run.arguments, results):
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
    """Mount a file system of ``size`` bytes at ``folder``, and yield the folder. Mounting needs root.

    Raises CalledProcessError or OSError if it cannot be mounted.
    """
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)]
    subprocess.run(mount, check=True, capture_output=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, capture_output=True)


def finish(arguments: Sequence[str], results: Path) -> int:
    """Run to the end in a child process. Return its exit status."""
    pid = fork([*arguments, f"results={results}"], results.with_suffix(".log"), None)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def fork(arguments: list[str], log: Path, prepare: Callable[[], None] | None) -> int:
    """Start the main job in a child process with all imports done. Return its process id."""
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
