"""The process behind ``math_equal``: it reads requests as JSON lines, and writes a JSON line for each.

It runs as a script, since importing kvbench would only take time. The first line that it writes says whether
math-verify could be imported.
"""

from __future__ import annotations

import json
import signal
import sys
from contextlib import suppress
from functools import lru_cache
from typing import Any

MOST_BYTES = 4 * 2**30
"""The most memory that the process may address. Reading an answer that needs more fails, and the machine goes on."""


def main() -> None:
    """Answer requests until the input ends."""
    # Ctrl-C goes to all processes of a terminal; this process ends when its parent closes the input
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(ImportError, ValueError, OSError):  # not every system limits memory
        import resource

        _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, hard_limit))
    # imported now, so that its absence is told before the first request
    try:
        import math_verify  # noqa: F401
    except Exception as error:
        write_reply({"error": f"{type(error).__name__}: {error}"})
        return
    write_reply({"error": None})
    for line in sys.stdin:
        request = json.loads(line)
        write_reply({"equal": are_equal(request["prediction"], request["reference"])})


def write_reply(content: dict[str, object]) -> None:
    """Write one reply as a line of JSON, so that the parent can read it at once."""
    print(json.dumps(content), flush=True)


def are_equal(prediction: str, reference: str) -> bool | None:
    """Return True if two texts state equal results; None if the reference cannot be read."""
    from math_verify import parse, verify

    try:
        gold = read_reference(reference)
    except Exception:  # math-verify and SymPy raise errors of many types
        return None
    try:
        return bool(verify(gold, parse(prediction)))
    except Exception:  # a result that cannot be computed with is a wrong one
        return False


@lru_cache(maxsize=4096)
def read_reference(reference: str) -> list[Any]:
    """Return a reference as math-verify reads it. Raises ValueError if it cannot be read.

    A reference is read once for all answers.
    """
    from math_verify import parse

    gold: list[Any] = parse(reference)
    if not gold:
        # raise, since lru_cache keeps returned values but no errors: after a timeout the next try may succeed
        raise ValueError(reference)
    return gold


if __name__ == "__main__":
    main()
