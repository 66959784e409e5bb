"""Methods that are not kvbench's own: their code is part of the identity of a result.

Users' own methods lie beside kvbench's (README) or anywhere else. Their ``revision`` is not raised at every edit, and
the property tests have not run on them. So their source identifies their results, they run behind ``walls``, and they
work on copies.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import re
import secrets
import sys
from functools import cache
from importlib.util import resolve_name
from pathlib import Path
from typing import Any

from kvbench.methods.core.knobs import Knobs

PACKAGE = "kvbench.methods"
OWN = frozenset(
    re.findall(
        r"\w+",
        """adakv asvd base cake chai chain chunkkv contract decode_budget entropy evicting expectedattention
        flexgen foreign formats fp8 h2o int4 int8 keydiff keynorm kivi knobs kvpress kvpress_package kvzip
        legal_sets loading lowrank magnitude mxfp4 nvfp4 palu prefill_changing prompt_cache pruner pyramidkv
        q4_0 q8_0 qhitter quantiser random recipe refreekv registry replaying resolve scissorhands snapkv
        shared_functions source stage statistics streamingllm think thinkv tova turboquant twilight uncomp
        uncomp_stage vatp walls watch""",
    )
)
"""The modules of kvbench.methods that are kvbench's own."""


def code_of(stage: Knobs) -> str | None:
    """Return a hash of a stage's source; None for kvbench's own.

    The source is that of its classes' files, and of the files beside them that they import. Code without a source,
    typed into an interpreter, gets a random hash: its results are this process's alone.
    """
    # Any, because mypy takes the hash of a dataclass's instances for that of the class
    cls: Any = type(stage)
    return _code_of(cls)


@cache
def _code_of(cls: type[Knobs]) -> str | None:
    """Return the hash of a class's source and of that of its base classes; None if all are kvbench's own."""
    classes = [c for c in cls.__mro__ if issubclass(c, Knobs) and not is_own(c.__module__)]
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
                # a notebook has no file, but remembers the source of its cells
                sha256.update(inspect.getsource(c).encode())
            except (TypeError, OSError):
                # code without a source equals no other code
                sha256.update(secrets.token_bytes())
    # sorted: the hash must not depend on the order of imports
    for name in sorted(modules):
        sha256.update(name.encode() + b"\0" + modules[name])
    return sha256.hexdigest()[:16]


def is_own(module: str) -> bool:
    """Tell whether a module is one of kvbench's own methods."""
    package, _, name = module.rpartition(".")
    return package == PACKAGE and name in OWN


def _follow(name: str, folder: Path, modules: dict[str, bytes]) -> None:
    """Add to ``modules`` the source of a module, and of all that it imports from ``folder``."""
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    if name in modules or is_own(name) or file is None or Path(file).parent != folder:
        return
    modules[name] = Path(file).read_bytes()
    package = getattr(module, "__package__", "")
    for node in ast.walk(ast.parse(modules[name])):
        imported: list[str] = []
        if isinstance(node, ast.Import):
            imported = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            # ``from a import b`` may mean the name b of module a, or the module a.b
            base = node.module or ""
            if node.level:
                base = resolve_name("." * node.level + base, package)
            imported = [base]
            imported += [f"{base}.{alias.name}" for alias in node.names]
        for module_name in imported:
            _follow(module_name, folder, modules)
