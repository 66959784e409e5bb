"""Methods that are not kvbench's own: how they are told, their code as a part of what identifies a result, and the
walls around them.

A method of one's own lies beside kvbench's (README) or anywhere else. Nobody raises its ``revision`` at every edit, and
nobody ran the property tests on it: so its source says which results are its own, and it works on copies.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import re
import secrets
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import resolve_name
from pathlib import Path
from typing import Any

import torch

from kvbench.errors import KvbenchError
from kvbench.methods.knobs import Knobs

PACKAGE = "kvbench.methods"
OWN = frozenset(
    re.findall(
        r"\w+",
        """adakv asvd base cake chai chain contract entropy evicting expectedattention flexgen foreign h2o
        keynorm kivi knobs legal_sets loading lowrank magnitude palu prefill_changing prompt_cache pruner
        pyramidkv qhitter quantiser random recipe refreekv registry scissorhands snapkv statistics
        streamingllm think thinkv tova twilight uncomp uncomp_stage vatp""",
    )
)
"""The modules of kvbench.methods that are kvbench's own."""


def is_foreign(stages: Iterable[Knobs]) -> bool:
    """Whether any of the stages is not kvbench's own."""
    return any(code_of(s) is not None for s in stages)


def code_of(stage: Knobs) -> str | None:
    """A hash of a stage's source: the files of its classes with what they import that lies beside them; None: kvbench's
    own.

    Code without a source, typed into an interpreter, is this process's alone: nothing is taken for its result.
    """
    cls: Any = type(stage)  # mypy takes the hash of a dataclass's instances for that of the class
    return _code_of(cls)


@cache
def _code_of(cls: type[Knobs]) -> str | None:
    classes = [c for c in cls.__mro__ if issubclass(c, Knobs) and not _is_own(c.__module__)]
    if not classes:
        return None
    found = hashlib.sha256()
    modules: dict[str, bytes] = {}
    for c in classes:
        try:
            _follow(c.__module__, Path(inspect.getfile(c)).parent, modules)
        except (TypeError, OSError):
            try:
                found.update(inspect.getsource(c).encode())
            except (TypeError, OSError):
                found.update(secrets.token_bytes())
    for name in sorted(modules):
        found.update(name.encode() + b"\0" + modules[name])
    return found.hexdigest()[:16]


def _is_own(module: str) -> bool:
    package, _, name = module.rpartition(".")
    return package == PACKAGE and name in OWN


def _follow(name: str, folder: Path, modules: dict[str, bytes]) -> None:
    """Add the source of a module, and of what it imports that lies in ``folder`` beside it, to ``modules``."""
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    if name in modules or _is_own(name) or file is None or Path(file).parent != folder:
        return
    modules[name] = Path(file).read_bytes()
    for node in ast.walk(ast.parse(modules[name])):
        if isinstance(node, ast.ImportFrom):
            package = getattr(module, "__package__", "") if node.level else ""
            base = resolve_name("." * node.level + (node.module or ""), package)
            imported = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        else:
            imported = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for used in imported:
            _follow(used, folder, modules)


@contextmanager
def contained(name: str, foreign: bool = True) -> Iterator[None]:
    """Around code of the method ``name`` that is not kvbench's own: it cannot end the program, and what it sets for all
    of PyTorch is set back."""
    if not foreign:
        yield
        return
    dtype, threads, grad = torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()
    precision = torch.get_float32_matmul_precision()
    deterministic = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        with torch.random.fork_rng(devices=()):
            yield
    except BaseException as error:
        if isinstance(error, Exception) or _of_a_signal(error):
            raise
        raise KvbenchError(f"{name} would end the program: {type(error).__name__} {error}".rstrip()) from error
    finally:
        torch.set_default_dtype(dtype)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        torch.set_grad_enabled(grad)
        torch.set_float32_matmul_precision(precision)
        torch.use_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])


def _of_a_signal(error: BaseException) -> bool:
    """Whether a signal's handler raised it, and so the user did."""
    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    if isinstance(error, KeyboardInterrupt) and signal.default_int_handler in handlers:
        return True
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return last is not None and last.tb_frame.f_code in [getattr(h, "__code__", None) for h in handlers]
