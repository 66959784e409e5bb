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
from kvbench.base.errors import KvbenchError, say


def compared_methods(benchmark: str) -> dict[str, dict[str, Any]]:
    """Return the entries of methods that a benchmark compares, by their names in its table."""
    methods: dict[str, dict[str, Any]] = read_yaml(Path(__file__).with_name("methods.yaml"))[benchmark]
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
        if shutil.which(path) is None:
            raise argparse.ArgumentTypeError(f"{path!r} cannot be started: make .venv-peers/.ready installs one")
        return path

    text = "a Python in which kvpress is installed (make .venv-peers/.ready)"
    parser.add_argument("--peers", type=interpreter, metavar="PYTHON", help=text)


def finish(main: Callable[[], int]) -> NoReturn:
    """Exit with the status of a benchmark's ``main``; what kvbench refuses is one message."""
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
        for name in names[i % len(names) :] + names[: i % len(names)]:
            times[name].append(variants[name]())
    return times


def median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Return the median over repeats of ``above`` over ``below``.

    The times of one repeat lie close together, so that slow drifts of the machine cancel.
    """
    return median(a / b for a, b in zip(above, below, strict=True))


def verdict(what: str, ratio: float, ok: bool, terms: str) -> bool:
    """Print a ratio with its ``terms`` and the verdict, and return ``ok``."""
    print(f"  {what}: {ratio:.2f}x ({terms}: {'ok' if ok else 'MISSED'})", flush=True)
    return ok


def in_process(
    module: str, *arguments: object, python: str = sys.executable, env: Mapping[str, str | None] | None = None
) -> Any:
    """Run the benchmark ``module`` in a process of its own, and return the JSON on the last line that it prints.

    ``env`` are changes to the environment; None takes a variable out. Raises KvbenchError if it fails, and passes on
    its standard error.
    """
    changed = {name: value for name, value in {**os.environ, **(env or {})}.items() if value is not None}
    command = [python, "-m", f"kvbench.bench.{module}", *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=changed)
    if result.returncode:
        print(result.stderr, end="", file=sys.stderr)
        raise KvbenchError(f"a process of this benchmark ended with status {result.returncode}: {' '.join(command)}")
    return json.loads(result.stdout.splitlines()[-1])


def kvpress_seconds(python: str, *arguments: object) -> dict[str, float]:
    """Return the seconds of each of kvpress's rows, measured by ``python``.

    Its threads wait as OpenMP has them wait, ours as kvbench's command line does.
    """
    by_row: dict[str, float] = in_process("kvpress_rows", *arguments, python=python, env={"GOMP_SPINCOUNT": None})
    return by_row
