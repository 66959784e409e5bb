"""Walls around methods that are not kvbench's own, so that a mistake in one does not change the numbers of others.

A run stores the answers of kvbench's own methods before any other method runs (``plan.cells.rounds``). Until then, the
run only imports the files of other methods and asks these methods for budgets and bytes. The walls protect all that
runs later in the same process. When such code returns, its traces are undone: PyTorch's settings, the state of random
numbers, the streams, and replaced functions. A method that replaced a function is also refused. Random numbers are
seeded before a method's code runs, so that they do not depend on the code before it.
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
from kvbench.methods.core.shared_functions import Functions, build_refusal
from kvbench.methods.core.watch import watch

ENDS = ("_exit", "abort", "execv", "execve", "execvp", "execvpe")
"""Functions of ``os`` that would end the process at once, so that no handler could store or report anything."""


def seed_of(prompt: int, layer: int = 0) -> int:
    """Return the seed of a method's draws in one layer of a prompt. ``prompt`` is its ``Observation.prompt``."""
    return zlib.crc32(f"{prompt}/{layer}".encode())


@contextmanager
def contained(
    name: str, foreign: bool = True, seed: int | None = None, watched: bool = True, importing: bool = False
) -> Iterator[None]:
    """Run the code in the ``with`` block as code of the method ``name``, behind walls.

    The code cannot end the program. What it changes in the process is restored on exit: settings of PyTorch, the
    working directory, signal handlers, streams, random states and functions that others compute with.

    foreign: False for code of kvbench's own, which runs without walls.
    seed: the seed of its random numbers. Without a seed several prompts share the call, and code that draws is refused:
        the numbers of one prompt would depend on the others.
    watched: whether to print a line that names the method if it has not returned after ``watch.SILENT_S`` seconds.
        False where other code than the method's may take long.
    importing: True while the method's file is imported. Then the code of functions is compared as well, which takes
        longer, but happens once and before any answer is made.

    Raises Refused for code that replaces functions that others compute with, or draws without a seed. Raises
    KvbenchError for code that would end the program.
    """
    if not foreign:
        yield
        return
    walls = (
        watch(name if watched else None),
        _restore_settings(),
        _restore_signals(),
        _guard_streams(),
        _prevent_end(),
        _restore_functions(name, importing),
    )
    with ExitStack() as stack:
        for wall in walls:
            stack.enter_context(wall)
        with _seed_draws(name, seed):
            try:
                yield
            except Exception as error:
                _check_text(name, error)
                raise
            except BaseException as error:
                # SystemExit and KeyboardInterrupt: those raised by the user's signals end the run, and those raised by
                # the method's code are its errors
                if not _raised_by_signal(error):
                    message = f"{name} would end the program: {type(error).__name__} {error}".rstrip()
                    raise KvbenchError(message) from error
                # an inner wall may have added the note already
                if not notes(error):
                    error.add_note(f"{name} was being asked, {_describe_interrupted_place(error)}")
                raise


def _check_text(name: str, error: Exception) -> None:
    """Raise KvbenchError if the text of ``error`` cannot be made. ``name`` is the method whose code raised it."""
    try:
        str(error)
    # the text is made by the method's code, which may even try to end the program
    except (Exception, SystemExit):
        raise KvbenchError(f"{name} raises {type(error).__name__}, whose __str__ fails") from None


@contextmanager
def _restore_settings() -> Iterator[None]:
    """On exit of the context, restore PyTorch's global settings and the working directory."""
    dtype = torch.get_default_dtype()
    threads = torch.get_num_threads()
    grad = torch.is_grad_enabled()
    precision = torch.get_float32_matmul_precision()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    # the default device is a global of torch, which torch.set_default_device sets
    device = _device.CURRENT_DEVICE
    autocast = torch.is_autocast_enabled("cpu")
    folder = os.getcwd()
    try:
        yield
    finally:
        # results and data may be given by relative paths
        os.chdir(folder)
        _device.CURRENT_DEVICE = device
        torch.set_autocast_enabled("cpu", autocast)
        torch.set_default_dtype(dtype)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        torch.set_grad_enabled(grad)
        torch.set_float32_matmul_precision(precision)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)


# ---- the streams and the end of the process


class _Unclosable:
    """A stream that cannot be closed or detached, since it is not the method's own. All else goes to the real one."""

    def __init__(self, stream: Any, name: str) -> None:
        """Wrap a real stream. ``name`` is its name in errors."""
        self._stream, self._name = stream, name

    def close(self) -> None:
        """Raise RuntimeError in place of closing the stream."""
        raise RuntimeError(f"{self._name} is not the method's to close")

    # detaching would take the buffer away from all other users of the stream
    detach = close

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the real stream."""
        value = getattr(self._stream, name)
        # the streams below this one could be closed as well
        if name in ("buffer", "raw"):
            return _Unclosable(value, f"{self._name}.{name}")
        return value

    def __iter__(self) -> Iterator[str]:
        """Iterate over the lines of the real stream."""
        return iter(self._stream)


STREAMS = ("stdout", "stderr", "__stdout__", "__stderr__")
"""Names in ``sys`` of the streams to which a program prints."""


@contextmanager
def _guard_streams() -> Iterator[None]:
    """While the context is open, replace the standard streams by ones that foreign code cannot close.

    All that the code prints goes to the error stream, because a program may read the run's own output (``--json``).
    """
    real_streams = {name: getattr(sys, name) for name in STREAMS}
    for name, stream in real_streams.items():
        error_stream = real_streams[name.replace("stdout", "stderr")]
        # inside another wall the streams are safe already; a program without a console has None
        if isinstance(stream, _Unclosable) or error_stream is None:
            continue
        # the name of the stream stays, although its text goes to the error stream
        setattr(sys, name, _Unclosable(error_stream, f"sys.{name}"))
    try:
        yield
    finally:
        for name, stream in real_streams.items():
            setattr(sys, name, stream)


@contextmanager
def _prevent_end() -> Iterator[None]:
    """While the context is open, let the functions in ENDS raise SystemExit instead of ending the process at once.

    A process that is forked inside the context may still end by them.
    """
    process = os.getpid()

    def make_raiser(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that raises SystemExit in this process, and calls ``real`` in a forked one."""

        def end(*args: Any) -> Any:
            """End a forked process as ``real`` does. In this process, raise SystemExit."""
            if os.getpid() != process:
                return real(*args)
            raise SystemExit(f"by os.{name}")

        return end

    # os has its functions from posix, or on Windows from nt, where code may call them as well
    modules = [os, sys.modules[os.name]]
    functions = {name: getattr(os, name) for name in ENDS if hasattr(os, name)}
    for module in modules:
        for name, function in functions.items():
            if hasattr(module, name):
                setattr(module, name, make_raiser(name, function))
    try:
        yield
    finally:
        for module in modules:
            for name, function in functions.items():
                if hasattr(module, name):
                    setattr(module, name, function)


# ---- random numbers


@contextmanager
def _seed_draws(name: str, seed: int | None) -> Iterator[None]:
    """Seed the random numbers of torch, Python and NumPy for the context, and restore their states on exit.

    Raises Refused if the code in the context drew numbers although ``seed`` is None.
    """
    devices: list[int] = []
    if torch.cuda.is_initialized():
        devices = list(range(torch.cuda.device_count()))
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        # fork_rng restores the states of torch's generators itself
        with torch.random.fork_rng(devices=devices):
            # without a seed any number will do, because draws are then refused
            _seed_generators(seed or 0)
            before = _read_states()
            yield
            if seed is None and _read_states() != before:
                raise Refused(
                    f"{name} draws random numbers where several prompts are computed together, so that they would "
                    "depend on each other: draw from a torch.Generator that is seeded with obs.prompt"
                )
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def _seed_generators(seed: int) -> None:
    """Seed the random numbers of torch, Python and NumPy."""
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        # torch.manual_seed would format the whole stack, as a note for a GPU's first use, which takes a millisecond
        torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def _read_states() -> tuple[object, ...]:
    """Return the states of all generators on the CPU, which change with every draw."""
    _, words, place, has_gaussian, gaussian = np.random.get_state(legacy=True)
    numpy_state = (np.asarray(words).tobytes(), place, has_gaussian, gaussian)
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), numpy_state


# ---- functions that others compute with


@contextmanager
def _restore_functions(name: str, with_code: bool) -> Iterator[None]:
    """On exit of the context, put back functions that others compute with, and raise Refused if one was replaced.

    ``with_code`` also compares the code of functions. If the user ends the run, functions are put back silently.
    """
    functions = Functions(with_code)
    try:
        with functions.watching_imports():
            yield
    except Exception as error:
        # a replaced function may have raised the error: then the refusal names its cause
        replaced = functions.restore()
        if replaced:
            raise build_refusal(name, replaced) from error
        raise
    except BaseException:
        # the user ends the run
        functions.restore()
        raise
    replaced = functions.restore()
    if replaced:
        raise build_refusal(name, replaced)


# ---- signals of the user


@contextmanager
def _restore_signals() -> Iterator[None]:
    """On exit of the context, restore the handlers of the signals by which a user ends a run: SIGINT and SIGTERM."""
    # Python lets only the main thread set handlers
    if threading.current_thread() is not threading.main_thread():
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
    """Return True if the handler of a signal raised the error, that is, if the user ended the run."""
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    # Python's own handler is written in C and leaves no frame in the traceback
    if isinstance(error, KeyboardInterrupt) and signal.default_int_handler in handlers:
        return True
    # a handler may call the function that raises, so that its frame can stand anywhere in the traceback
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(getattr(handler, "__code__", None) in codes for handler in handlers)


def _describe_interrupted_place(error: BaseException) -> str:
    """Return where a signal interrupted the code, for a message, by the traceback of its handler's error.

    It is "at FILE:LINE", or "at its beginning" if all frames are the handler's.
    """
    handlers = {getattr(signal.getsignal(number), "__code__", None) for number in (signal.SIGINT, signal.SIGTERM)}
    place = "at its beginning"
    for frame, line in traceback.walk_tb(error.__traceback__):
        # all frames from here on are those of the handler
        if frame.f_code in handlers:
            break
        place = f"at {frame.f_code.co_filename}:{line}"
    return place
