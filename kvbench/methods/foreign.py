"""Methods that are not kvbench's own: their code is part of the identity of a result, and they run behind walls.

Users' own methods lie beside kvbench's (README) or anywhere else. Their ``revision`` is not raised at every edit, and
the property tests have not run on them. So their source identifies their results, and they work on copies.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import re
import secrets
import signal
import sys
from collections.abc import Iterator
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
        """adakv asvd base cake chai chain chunkkv contract decode_budget entropy evicting expectedattention
        flexgen foreign formats fp8 h2o int4 int8 keydiff keynorm kivi knobs kvpress kvpress_package kvzip
        legal_sets loading lowrank magnitude mxfp4 nvfp4 palu prefill_changing prompt_cache pruner pyramidkv
        q4_0 q8_0 qhitter quantiser random recipe refreekv registry replaying resolve scissorhands snapkv
        source stage statistics streamingllm think thinkv tova turboquant twilight uncomp uncomp_stage vatp""",
    )
)
"""The modules of kvbench.methods that are kvbench's own."""


def code_of(stage: Knobs) -> str | None:
    """Return a hash of a stage's source; None for kvbench's own.

    The source is that of its classes' files, and of the files beside them that they import. Code without a source,
    typed into an interpreter, gets a random hash: its results are this process's alone.
    """
    cls: Any = type(stage)  # mypy takes the hash of a dataclass's instances for that of the class
    return _code_of(cls)


@cache
def _code_of(cls: type[Knobs]) -> str | None:
    classes = [c for c in cls.__mro__ if issubclass(c, Knobs) and not _is_own(c.__module__)]
    if not classes:
        return None
    sha256 = hashlib.sha256()
    modules: dict[str, bytes] = {}
    for c in classes:
        try:
            # the class's file, with all that it imports from the folder beside it
            _follow(c.__module__, Path(inspect.getfile(c)).parent, modules)
        except (TypeError, OSError):
            try:
                sha256.update(inspect.getsource(c).encode())
            except (TypeError, OSError):
                sha256.update(secrets.token_bytes())
    for name in sorted(modules):
        sha256.update(name.encode() + b"\0" + modules[name])
    return sha256.hexdigest()[:16]


def _is_own(module: str) -> bool:
    package, _, name = module.rpartition(".")
    return package == PACKAGE and name in OWN


def _follow(name: str, folder: Path, modules: dict[str, bytes]) -> None:
    """Add to ``modules`` the source of a module, and of all that it imports from ``folder``."""
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
    """Run code of the method ``name`` that is not kvbench's own.

    It cannot end the program, and PyTorch's global settings are restored after it."""
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
        # SystemExit and the like of the method's code are its errors; those of the user's signals are not
        if isinstance(error, Exception) or _raised_by_signal(error):
            raise
        raise KvbenchError(f"{name} would end the program: {type(error).__name__} {error}".rstrip()) from error
    finally:
        torch.set_default_dtype(dtype)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        torch.set_grad_enabled(grad)
        torch.set_float32_matmul_precision(precision)
        torch.use_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])


def _raised_by_signal(error: BaseException) -> bool:
    """Tell whether a signal's handler raised the error, and so the user did."""
    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    if isinstance(error, KeyboardInterrupt) and signal.default_int_handler in handlers:
        return True
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback is not None and traceback.tb_frame.f_code in [getattr(h, "__code__", None) for h in handlers]
