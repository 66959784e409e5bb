"""Tools of all benchmarks: options, variants timed in turns, ratios with a verdict, and child processes.

Times of one run are compared with each other, never with those of another run: machines differ and drift.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

from kvbench.base.conf import read_yaml
from kvbench.base.errors import KvbenchError
from kvbench.base.visible import say

HERE = Path(__file__).parent


def compared_methods(benchmark: str) -> dict[str, dict[str, Any]]:
    """Return the entries of methods that a benchmark compares, by their names in its table."""
    methods: dict[str, dict[str, Any]] = read_yaml(HERE / "methods.yaml")[benchmark]
    return methods


def options(doc: str | None, **defaults: int) -> argparse.ArgumentParser:
    """Return a parser whose help is ``doc``. It takes ``--repeats`` and ``--threads`` if ``defaults`` names them."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    shared = {"repeats": "measurements of each variant, in turns", "threads": "CPU threads"}
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=shared[name])
    return parser


def add_peers(parser: argparse.ArgumentParser) -> None:
    """Let a benchmark take ``--peers``, a Python that can be started."""

    def interpreter(path: str) -> str:
        # refuse at once, since kvpress runs only after minutes of other measurements
        if shutil.which(path) is None:
            raise argparse.ArgumentTypeError(f"{path!r} cannot be started: make .venv-peers/.ready installs one")
        return path

    text = "a Python in which kvpress is installed (make .venv-peers/.ready)"
    parser.add_argument("--peers", type=interpreter, metavar="PYTHON", help=text)


def finish(main: Callable[[], int]) -> NoReturn:
    """Exit with the status of a benchmark's ``main``. An error of kvbench becomes one message."""
    try:
        status = main()
    except KvbenchError as error:
        say(str(error))
        status = error.status
    raise SystemExit(status)


def seconds(run: Callable[[], object]) -> float:
    """Return the seconds that ``run`` takes."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def in_turns(variants: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Return the seconds of each variant in every repeat, by name. Each repeat starts with another variant."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    names = list(variants)
    for i in range(repeats):
        # rotate, so that no variant always runs first
        first = i % len(names)
        for name in names[first:] + names[:first]:
            times[name].append(variants[name]())
    return times


def median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Return the median over repeats of ``above`` over ``below``.

    The times of one repeat lie close together, so slow drifts of the machine cancel.
    """
    return median(a / b for a, b in zip(above, below, strict=True))


def verdict(name: str, ratio: float, ok: bool, terms: str) -> bool:
    """Print a ratio with its ``terms`` and the verdict, and return ``ok``."""
    word = "ok" if ok else "MISSED"
    print(f"  {name}: {ratio:.2f}x ({terms}: {word})", flush=True)
    return ok


def in_process(
    module: str, *arguments: object, python: str = sys.executable, env: Mapping[str, str | None] | None = None
) -> Any:
    """Run the benchmark ``module`` in a process of its own, and return the JSON on the last line that it prints.

    ``env`` holds changes to the environment; None removes a variable. Raises KvbenchError if the process fails, and
    passes on its standard error.
    """
    # a child starts from nothing, so memory and caches of other measurements do not affect its numbers
    environment = dict(os.environ)
    for name, value in (env or {}).items():
        if value is None:
            environment.pop(name, None)
        else:
            environment[name] = value
    command = [python, str(HERE / f"{module}.py")]
    command += map(str, arguments)
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if result.returncode:
        print(result.stderr, end="", file=sys.stderr)
        raise KvbenchError(f"a process of this benchmark ended with status {result.returncode}: {' '.join(command)}")
    # libraries may print above the last line
    return json.loads(result.stdout.splitlines()[-1])


def kvpress_seconds(python: str, *arguments: object) -> dict[str, float]:
    """Return the seconds of each of kvpress's rows, measured by the interpreter ``python``.

    Its threads wait as OpenMP lets them wait by default. Ours wait as kvbench's command line sets it.
    """
    by_row: dict[str, float] = in_process("kvpress_rows", *arguments, python=python, env={"GOMP_SPINCOUNT": None})
    return by_row
