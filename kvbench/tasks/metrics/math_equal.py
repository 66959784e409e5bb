"""Equality of final answers in mathematics, decided by math-verify (github.com/huggingface/Math-Verify).

An answer is any text that a model wrote, and math-verify computes with it: a tower of powers may take minutes or all
memory. So a process of its own reads answers (``math_worker``). It is started at the first answer and serves all later
ones. If it does not reply, it is stopped and replaced. math-verify's own time limits use signals, which only a main
thread receives. The process compares in its main thread, so the limits work whichever thread of kvbench asks.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from threading import Lock, Timer
from typing import TypedDict

from kvbench.base.errors import KvbenchError
from kvbench.tasks.metrics.text import cut_next_question
from kvbench.tasks.metrics.theorem import find_announced_answer

START_S, REPLY_S = 120, 60
"""The most seconds that the process may take to import math-verify, and to reply. math-verify itself takes 5 seconds to
read a text and 5 to compare two, so only a process that cannot react reaches the second limit."""
_BOX = re.compile(r"\\f?boxed\s*\{")


def math_equal(prediction: str, reference: str) -> float | None:
    """Return 1 if the answer's final result equals the reference, else 0; None if the reference cannot be read.

    The result is the content of the last ``\\boxed{}``. In an answer without one, math-verify looks for the result, in
    what follows the last "answer is" if there is such a place.
    A result that cannot be read, takes too long or takes too much memory scores 0. Raises KvbenchError if math-verify
    cannot be used.
    """
    prediction = cut_next_question(prediction)
    result = find_last_boxed(prediction)
    if result is not None:
        text = as_formula(result)
    else:
        text = find_announced_answer(prediction) or prediction
    # an empty answer is wrong, and the process need not be asked
    if not text.strip():
        return 0.0
    equal = _WORKER.ask(text, as_formula(reference))
    if equal is None:
        return None
    return float(equal)


def find_last_boxed(text: str) -> str | None:
    """Return the content of the last ``\\boxed{}`` that is closed and not empty; None if there is none."""
    # the last box may be open, if the answer was cut off
    for box in reversed(list(_BOX.finditer(text))):
        content = _read_until_closed(text, box.end())
        if content is not None and content.strip():
            return content.strip()
    return None


def as_formula(result: str) -> str:
    r"""Return a result as one formula between dollar signs, which math-verify reads as a whole.

    It reads ``$50\%$`` as a number, but not ``\boxed{50\%}``.
    """
    # a formula of one line has no line breaks, and no dollar signs but escaped ones
    inner = re.sub(r"(?<!\\)\$", "", " ".join(result.split()))
    return f"${inner}$"


def _read_until_closed(text: str, start: int) -> str | None:
    """Return the text from ``start`` to the partner of the brace just before ``start``; None if it stays open."""
    depth = 1  # the number of open braces
    i = start
    while i < len(text):
        if text[i] == "\\":
            i += 2  # an escaped brace is a printed one
            continue
        if text[i] == "{":
            depth += 1
        elif text[i] == "}":
            depth -= 1
            if not depth:
                return text[start:i]
        i += 1
    return None


class WorkerReply(TypedDict, total=False):
    """A line that the process writes.

    error: in its first line, why math-verify cannot be imported; None if it can.
    equal: in all later lines, True if two texts are equal; None if the reference cannot be read.
    """

    error: str | None
    equal: bool | None


class MathWorker:
    """The process that reads and compares answers. Threads take turns, and a forked process starts its own."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._process: subprocess.Popen[str] | None = None
        # the id of the process of kvbench that has started ``_process``
        self._owner = 0

    def ask(self, prediction: str, reference: str) -> bool | None:
        """Return True if the prediction equals the reference; None if the reference cannot be read.

        Returns False if they differ, and if the process ends or has to be stopped. Raises KvbenchError if it cannot be
        started.
        """
        with self._lock:
            process = self._ensure_running()
            request = json.dumps({"prediction": prediction, "reference": reference})
            # ``_start`` has asked for pipes
            assert process.stdin is not None
            with suppress(OSError):  # a process that has ended gives no reply either
                process.stdin.write(request + "\n")
                process.stdin.flush()
            reply = self._read_reply(process, REPLY_S)
            if reply is None:
                self.stop()
                return False
            return reply["equal"]

    def stop(self) -> None:
        """Stop the process. The next answer starts another one."""
        process, self._process = self._process, None
        # a process that was started before kvbench forked belongs to the parent, and only the parent may stop it
        if process is None or self._owner != os.getpid():
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):  # text that was not written yet has no reader any more
                    pipe.close()

    def _ensure_running(self) -> subprocess.Popen[str]:
        process = self._process
        if process is not None and self._owner == os.getpid() and process.poll() is None:
            return process
        self.stop()
        return self._start()

    def _start(self) -> subprocess.Popen[str]:
        """Start the process, and wait until it has imported math-verify. Raises KvbenchError if that fails."""
        self._owner = os.getpid()
        # -P: modules beside the script, such as code.py, must not hide those of Python
        command = [sys.executable, "-P", str(Path(__file__).with_name("math_worker.py"))]
        self._process = process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
        )
        # the first line says whether math-verify could be imported
        ready = self._read_reply(process, START_S) or {"error": "its process ended before math-verify was imported"}
        if ready["error"]:
            self.stop()
            raise KvbenchError(f"metric math_equal cannot use math-verify: {ready['error']}")
        return process

    def _read_reply(self, process: subprocess.Popen[str], limit_s: float) -> WorkerReply | None:
        """Return the next reply; None if the process ends, or is stopped after ``limit_s`` seconds."""
        # ``_start`` has asked for pipes
        assert process.stdout is not None
        # readline itself has no time limit, but returns when the process ends
        timer = Timer(limit_s, process.kill)
        timer.daemon = True
        timer.start()
        try:
            line = process.stdout.readline()
        except BaseException:
            # an interrupt here would leave this reply to the next answer
            self.stop()
            raise
        finally:
            timer.cancel()
        # a process that was killed may have written a part of a line, or nothing
        if not line.endswith("\n"):
            return None
        reply: WorkerReply = json.loads(line)
        return reply


_WORKER = MathWorker()
atexit.register(_WORKER.stop)
