"""Walls around methods that are not kvbench's own, so that a mistake in one does not change what others compute.

A run stores the answers of kvbench's own methods before such code is first asked (``run.plan.rounds``). These walls are
for what comes after it in the same process: other methods from outside, and later runs and calls. What such code could
leave behind is undone when it returns: PyTorch's settings, the state of random numbers, the streams, and functions that
it replaced, for which it is refused. Its draws come from a seed, so that they do not depend on what ran before.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import traceback
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils import _device

from kvbench.base.errors import KvbenchError, Refused, notes
from kvbench.methods.core.shared_functions import Functions, replacing
from kvbench.methods.core.watch import watch

ENDS = ("_exit", "abort", "execv", "execve", "execvp", "execvpe")
"""Functions of ``os`` that would end the process without a word."""


def seed_of(prompt: int, layer: int = 0) -> int:
    """Return the seed of a method's draws on one layer of a prompt, which ``Observation.prompt`` tells from others."""
    return zlib.crc32(f"{prompt}/{layer}".encode())


@contextmanager
def contained(
    name: str, foreign: bool = True, seed: int | None = None, watched: bool = True, importing: bool = False
) -> Iterator[None]:
    """Run code of the method ``name``, which is not kvbench's own unless ``foreign`` is False.

    It cannot end the program, and what it leaves changed in the process is restored. Random numbers are drawn from
    ``seed``. Without a seed several prompts share the call, and code that draws is refused, as its numbers would depend
    on what runs beside what. ``watched`` says that nothing but the method's own code takes long in it: then a line
    names the method after SILENT_S seconds. ``importing`` has the code of functions compared, too: what a file does
    when it is imported comes before all answers.

    Raises Refused for code that replaces functions that others compute with, and KvbenchError for code that would end
    the program.
    """
    if not foreign:
        yield
        return
    walls = (
        watch(name if watched else None),
        _settings(),
        _signals(),
        _streams(),
        _no_end(),
        _functions(name, importing),
    )
    with ExitStack() as stack:
        for wall in walls:
            stack.enter_context(wall)
        with _drawing(name, seed):
            try:
                yield
            except BaseException as error:
                # SystemExit and the like of the method's code are its errors; those of the user's signals are not
                if isinstance(error, Exception):
                    _check_text(name, error)
                    raise
                if _raised_by_signal(error):
                    if not notes(error):  # an inner wall has said it already
                        error.add_note(f"{name} was being asked, {_place(error)}")
                    raise
                raise KvbenchError(f"{name} would end the program: {type(error).__name__} {error}".rstrip()) from error


def _check_text(name: str, error: Exception) -> None:
    """Raise KvbenchError in place of an exception of a method's own that cannot be printed."""
    try:
        str(error)
    except (Exception, SystemExit):
        raise KvbenchError(f"{name} raises {type(error).__name__}, whose __str__ fails") from None


@contextmanager
def _settings() -> Iterator[None]:
    """Restore PyTorch's global settings and the working directory on exit."""
    dtype, threads, grad = torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()
    precision = torch.get_float32_matmul_precision()
    deterministic = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    device, autocast = _device.CURRENT_DEVICE, torch.is_autocast_enabled("cpu")
    folder = os.getcwd()
    try:
        yield
    finally:
        os.chdir(folder)  # results and data may be given by relative paths
        _device.CURRENT_DEVICE = device
        torch.set_autocast_enabled("cpu", autocast)
        torch.set_default_dtype(dtype)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        torch.set_grad_enabled(grad)
        torch.set_float32_matmul_precision(precision)
        torch.use_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])


# ---- the streams and the end of the process


class _Unclosable:
    """A stream that cannot be closed, since it is not the method's own."""

    def __init__(self, stream: Any, name: str) -> None:
        self._stream, self._name = stream, name

    def close(self) -> None:
        raise RuntimeError(f"{self._name} is not the method's to close")

    detach = close  # which would take the buffer away

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._stream, name)
        return _Unclosable(value, f"{self._name}.{name}") if name in ("buffer", "raw") else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._stream)


STREAMS = ("stdout", "stderr", "__stdout__", "__stderr__")


@contextmanager
def _streams() -> Iterator[None]:
    """Hand out streams that cannot be closed, and restore the real ones on exit.

    What is printed goes to the error stream, as a run's output may be read by a program (``--json``).
    """
    real = {stream: getattr(sys, stream) for stream in STREAMS}
    for stream, opened in real.items():
        instead = real[stream.replace("stdout", "stderr")]
        if isinstance(opened, _Unclosable) or instead is None:
            continue
        setattr(sys, stream, _Unclosable(instead, f"sys.{stream}"))
    try:
        yield
    finally:
        for stream, opened in real.items():
            setattr(sys, stream, opened)


@contextmanager
def _no_end() -> Iterator[None]:
    """Have functions that end the process at once raise SystemExit instead. A process forked inside may end."""
    process = os.getpid()

    def ending(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def end(*args: Any) -> Any:
            if os.getpid() != process:
                return real(*args)
            raise SystemExit(f"by os.{name}")

        return end

    modules = [os, sys.modules[os.name]]  # os has its functions from posix, or on Windows from nt
    real = {name: getattr(os, name) for name in ENDS if hasattr(os, name)}
    for module in modules:
        for name, function in real.items():
            if hasattr(module, name):
                setattr(module, name, ending(name, function))
    try:
        yield
    finally:
        for module in modules:
            for name, function in real.items():
                if hasattr(module, name):
                    setattr(module, name, function)


# ---- random numbers


@contextmanager
def _drawing(name: str, seed: int | None) -> Iterator[None]:
    """Seed the random numbers of torch, Python and NumPy, and restore their states on exit.

    Raises Refused where numbers were drawn although there is no seed.
    """
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=devices):
            _seed(seed or 0)
            before = _drawn()
            yield
            if seed is None and _drawn() != before:
                raise Refused(
                    f"{name} draws random numbers where several prompts are computed together, so that they would "
                    "depend on each other: draw from a torch.Generator that is seeded with obs.prompt"
                )
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def _drawn() -> tuple[object, ...]:
    """Return the states of all generators on the CPU, which change with every draw."""
    _, words, *place = np.random.get_state(legacy=True)
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), np.asarray(words).tobytes(), tuple(place)


# ---- functions that others compute with


@contextmanager
def _functions(name: str, with_code: bool) -> Iterator[None]:
    """Raise Refused if functions that others compute with are replaced on exit. They are put back in any case."""
    functions = Functions(with_code)
    try:
        with functions.watching_imports():
            yield
    except Exception as error:
        if replaced := functions.restored():
            raise replacing(name, replaced) from error
        raise
    except BaseException:
        functions.restored()
        raise
    if replaced := functions.restored():
        raise replacing(name, replaced)


# ---- signals of the user


@contextmanager
def _signals() -> Iterator[None]:
    """Restore on exit what the user's signals do."""
    if threading.current_thread() is not threading.main_thread():  # others cannot set it
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)


def _raised_by_signal(error: BaseException) -> bool:
    """Tell whether a signal's handler raised the error, and so the user did."""
    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    if isinstance(error, KeyboardInterrupt) and signal.default_int_handler in handlers:
        return True
    # a handler may call what raises
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(getattr(handler, "__code__", None) in codes for handler in handlers)


def _place(error: BaseException) -> str:
    """Return the file and line that a signal interrupted."""
    handlers = {getattr(signal.getsignal(s), "__code__", None) for s in (signal.SIGINT, signal.SIGTERM)}
    interrupted = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        if frame.f_code in handlers:
            break
        interrupted = f"at {frame.f_code.co_filename}:{line}"
    return interrupted or "at its beginning"
