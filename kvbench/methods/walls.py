"""Walls around methods that are not kvbench's own, so that they cannot change what others compute or end the run.

Such code runs in the process of all methods, since it reads the same tensors. What it could leave behind is undone when
it returns: PyTorch's settings, the state of random numbers, the streams, and functions of torch, transformers or
kvbench that it replaced, for which it is refused. Its draws come from a seed, so that they do not depend on what ran
before.
"""

from __future__ import annotations

import builtins
import os
import random
import signal
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils import _device
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvbench.errors import KvbenchError, Refused, notes, say
from kvbench.methods.foreign import is_own

SILENT_S = 60.0
"""Seconds without progress after which a line names the method that is being asked."""
ENDS = ("_exit", "abort", "execv", "execve", "execvp", "execvpe")
"""Functions of ``os`` that would end the process without a word."""
COMPUTING = ("torch", "torch.nn.functional", "torch.linalg", "torch.fft", "torch.special", "math", "builtins", "numpy")
"""Modules whose functions methods and models compute with, beside kvbench's and the models' own."""
OF_MODELS = tuple(f"transformers.{n}" for n in ("activations", "cache_utils", "masking_utils", "modeling_utils"))
"""Modules whose functions and classes every model computes with, beside those of its own family."""
TORCH_FOLDER = os.path.dirname(torch.__file__)
ATTENTIONS: dict[str, Any] = ALL_ATTENTION_FUNCTIONS._global_mapping
MODES = {
    "a TorchFunctionMode": (torch._C._len_torch_function_stack, torch._C._pop_torch_function_stack),
    "a TorchDispatchMode": (torch._C._len_torch_dispatch_stack, lambda: torch._C._pop_torch_dispatch_stack(None)),
}
"""Modes under which all functions of torch may mean something else: how many are entered, and how the last is left."""
CLASSES = (torch.Tensor, torch.Generator, torch.nn.Parameter)
"""Classes of torch that are watched beside those of ``torch.nn.modules``."""


def seed_of(prompt: int, layer: int = 0) -> int:
    """Return the seed of a method's draws on one layer of a prompt, which ``Observation.prompt`` tells from others."""
    return zlib.crc32(f"{prompt}/{layer}".encode())


@contextmanager
def contained(name: str, foreign: bool = True, seed: int | None = None, watched: bool = True) -> Iterator[None]:
    """Run code of the method ``name``, which is not kvbench's own unless ``foreign`` is False.

    It cannot end the program, and what it leaves changed in the process is restored. Random numbers are drawn from
    ``seed``. Without a seed several prompts share the call, and code that draws is refused, as its numbers would depend
    on what runs beside what. ``watched`` says that nothing but the method's own code takes long in it: then a line
    names the method after SILENT_S seconds.

    Raises Refused for code that replaces functions that others compute with, and KvbenchError for code that would end
    the program.
    """
    if not foreign:
        yield
        return
    walls = _watched(name if watched else None), _settings(), _streams(), _no_end(), _functions(name)
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
    """Restore PyTorch's global settings on exit."""
    dtype, threads, grad = torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()
    precision = torch.get_float32_matmul_precision()
    deterministic = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    device, autocast = _device.CURRENT_DEVICE, torch.is_autocast_enabled("cpu")
    try:
        yield
    finally:
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
    """Hand out streams that cannot be closed, and restore the real ones on exit."""
    real = {stream: getattr(sys, stream) for stream in STREAMS}
    for stream, opened in real.items():
        if opened is not None and not isinstance(opened, _Unclosable):
            setattr(sys, stream, _Unclosable(opened, f"sys.{stream}"))
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


class Functions:
    """The functions that methods and models compute with, as they were when this was made."""

    def __init__(self) -> None:
        self._before = {name: dict(vars(owner)) for name, owner in _owners().items()}
        self._attentions = dict(ATTENTIONS)
        self._modes = tuple(length() for length, _ in MODES.values())

    def restored(self) -> str:
        """Put back what was replaced since. Return the name of one of the functions concerned, or ''."""
        # built-in functions come first, and without a call of one: all that follows needs them
        built_in = builtins.__dict__.copy()
        builtins.__dict__.update(self._before["builtins"])
        replaced = self._left_mode()
        if dict(ATTENTIONS) != self._attentions:
            ATTENTIONS.clear()
            ATTENTIONS.update(self._attentions)
            replaced = "an attention function of transformers"
        for name, owner in _owners().items():
            before = self._before.get(name)
            now = built_in if owner is builtins else vars(owner)
            if before is None or _same(now, before):
                continue
            for key in _replaced(owner, now, before):
                if key in before:
                    setattr(owner, key, before[key])
                else:
                    delattr(owner, key)
                replaced = replaced or f"{name}.{key}"
        return replaced

    def _left_mode(self) -> str:
        """Leave the modes of torch that were entered since, under which functions mean others. Return one's name."""
        left = ""
        for before, (name, (length, pop)) in zip(self._modes, MODES.items(), strict=True):
            while length() > before:
                pop()
                left = f"all functions of torch by {name} that it does not leave"
        return left


@contextmanager
def _functions(name: str) -> Iterator[None]:
    """Raise Refused if functions that others compute with are replaced on exit. They are put back in any case."""
    functions = Functions()
    try:
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


def replacing(name: str, replaced: str) -> Refused:
    """Return the refusal of a method that replaced a function."""
    return Refused(f"{name} replaces {replaced}, with which other methods compute: call a function of your own instead")


_OWNERS: tuple[int, dict[str, Any]] = (0, {})


def _owners() -> dict[str, Any]:
    """Return the modules and classes whose functions are watched, by name."""
    global _OWNERS
    loaded = len(sys.modules)
    if _OWNERS[0] != loaded:
        owners: dict[str, Any] = {f"{c.__module__}.{c.__qualname__}": c for c in CLASSES}
        for name, module in list(sys.modules.items()):
            if not isinstance(module, ModuleType):
                continue
            ours = name.startswith("kvbench.") and (not name.startswith("kvbench.methods.") or is_own(name))
            models = name in OF_MODELS or name.startswith("torch.nn.modules.")
            models = models or (name.startswith("transformers.models.") and ".modeling_" in name)
            if ours or models or name in COMPUTING:
                owners[name] = module
            if ours or models:
                classes = [v for v in vars(module).values() if isinstance(v, type) and v.__module__ == name]
                owners.update({f"{name}.{c.__qualname__}": c for c in classes})
        _OWNERS = loaded, owners
    return _OWNERS[1]


def _same(namespace: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    try:
        return bool(dict(namespace) == before)  # equal objects are compared by identity first
    except Exception:  # values whose comparison fails, as that of tensors does, are not the same ones
        return False


def _replaced(owner: Any, now: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    """Return the names that mean another function than before.

    What is no function may change, and a new name may come, unless it hides a function of a base class or a built-in.
    """
    names = []
    for key in {*now, *before}:
        value, former = now.get(key), before.get(key)
        if value is former or isinstance(value, ModuleType) or not (_is_function(value) or _is_function(former)):
            continue
        changed = not _is_torchs_own(value, key) if key in before else _hides(owner, key)
        if changed:
            names.append(key)
    return sorted(names)


def _is_function(value: object) -> bool:
    return callable(value) or isinstance(value, (property, staticmethod, classmethod))


def _is_torchs_own(value: Any, key: str) -> bool:
    """Tell whether torch has replaced a function of its own, as its compiler does when it is imported or first used.

    Such code lies in torch's files. Another function of torch under this name is no such replacement.
    """
    file = getattr(getattr(value, "__code__", None), "co_filename", "")
    return file.startswith(TORCH_FOLDER) and (hasattr(value, "__wrapped__") or key in value.__name__)


def _hides(owner: Any, key: str) -> bool:
    """Tell whether a new name of a module or class hides another that was found under it before."""
    if owner is builtins:
        return False
    if isinstance(owner, type):
        return any(key in vars(base) for base in owner.__mro__[1:])
    return hasattr(builtins, key)


# ---- a method that does not return


class _Watch:
    """A thread that says which method is being asked where that takes long."""

    def __init__(self) -> None:
        self.asked: list[str | None] = []
        self.since = time.monotonic()
        self.said = False
        self.thread: threading.Thread | None = None

    def alive(self) -> None:
        """Note that something has come back."""
        self.since, self.said = time.monotonic(), False

    def start(self) -> None:
        if self.thread is None or not self.thread.is_alive():
            self.thread = threading.Thread(target=self._look, name="kvbench-watch", daemon=True)
            self.thread.start()

    def _look(self) -> None:
        while True:
            time.sleep(min(1.0, SILENT_S / 4))
            name = self.asked[-1] if self.asked else None
            seconds = time.monotonic() - self.since
            if name is not None and seconds > SILENT_S and not self.said:
                self.said = True
                say(f"{name} has not come back for {seconds:.0f} s; Ctrl-C ends the run and keeps what is finished")


_WATCH = _Watch()


def alive() -> None:
    """Note that the method which is being asked has come as far as another step."""
    _WATCH.alive()


@contextmanager
def _watched(name: str | None) -> Iterator[None]:
    _WATCH.start()
    _WATCH.asked.append(name)
    _WATCH.alive()
    try:
        yield
    finally:
        _WATCH.asked.pop()
        _WATCH.alive()


def _raised_by_signal(error: BaseException) -> bool:
    """Tell whether a signal's handler raised the error, and so the user did."""
    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    if isinstance(error, KeyboardInterrupt) and signal.default_int_handler in handlers:
        return True
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_code in [getattr(h, "__code__", None) for h in handlers]


def _place(error: BaseException) -> str:
    """Return the file and line that a signal interrupted."""
    handlers = {getattr(signal.getsignal(s), "__code__", None) for s in (signal.SIGINT, signal.SIGTERM)}
    places = [(f, line) for f, line in traceback.walk_tb(error.__traceback__) if f.f_code not in handlers]
    frame, line = places[-1]
    return f"at {frame.f_code.co_filename}:{line}"
