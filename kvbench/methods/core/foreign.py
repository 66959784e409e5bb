"""Foreign methods: methods that are not kvbench's own. Their code is part of the identity of a result.

Users' methods lie beside kvbench's (README) or anywhere else. Users do not raise ``revision`` at every edit, so a hash
of the source tells whether stored results are still those of the method.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import secrets
import sys
from functools import cache
from importlib.util import resolve_name
from pathlib import Path
from typing import Any

from kvbench.methods.core.knobs import Knobs

PACKAGE = "kvbench.methods"
"""The package of all methods. The user's folders belong to it as well."""
OWN = (
    "adakv",
    "asvd",
    "base",
    "cake",
    "chai",
    "chunkkv",
    "expectedattention",
    "firsttokens",
    "flexgen",
    "fp8",
    "h2o",
    "int4",
    "int8",
    "keydiff",
    "keynorm",
    "kivi",
    "kvzip",
    "magnitude",
    "mxfp4",
    "nvfp4",
    "palu",
    "pyramidkv",
    "q4_0",
    "q8_0",
    "qhitter",
    "random",
    "refreekv",
    "scissorhands",
    "snapkv",
    "streamingllm",
    "think",
    "thinkv",
    "tova",
    "turboquant",
    "twilight",
    "uncomp",
    "uncomp_stage",
    "vatp",
)
"""The files in kvbench.methods that are kvbench's own. Users may put their files beside them."""


def hash_source(stage: Knobs) -> str | None:
    """Return a hash of a stage's source, or None for kvbench's own stages.

    The source covers the files of its classes, and the files beside them that they import. Code without a source, such
    as code typed into an interpreter, gets a random hash. Its results are then valid in this process only.
    """
    # the annotation is Any, because mypy confuses the hash of a dataclass's instances with the class's
    cls: Any = type(stage)
    return _hash_source(cls)


@cache
def _hash_source(cls: type[Knobs]) -> str | None:
    """Return the hash of the source of a class and its base classes, or None if all are kvbench's own."""
    foreign_classes = [c for c in cls.__mro__ if issubclass(c, Knobs) and not is_own(c.__module__)]
    if not foreign_classes:
        return None
    sha256 = hashlib.sha256()
    sources: dict[str, bytes] = {}
    for foreign_class in foreign_classes:
        try:
            # follow the class's file and everything that it imports from its own folder
            folder = Path(inspect.getfile(foreign_class)).parent
            _collect_imports(foreign_class.__module__, folder, sources)
        except (TypeError, OSError):
            try:
                # a notebook has no file, but keeps the source of its cells
                sha256.update(inspect.getsource(foreign_class).encode())
            except (TypeError, OSError):
                # random bytes, because code without a source must equal no other code
                sha256.update(secrets.token_bytes())
    # sorted, because the hash must not depend on the order of imports
    for name in sorted(sources):
        sha256.update(name.encode() + b"\0" + sources[name])
    return sha256.hexdigest()[:16]


def is_own(module: str) -> bool:
    """Return True if the module of this full name is one of kvbench's own methods, or belongs to ``methods.core``."""
    package, _, name = module.rpartition(".")
    if package == f"{PACKAGE}.core":
        return True
    return package == PACKAGE and name in OWN


def _collect_imports(name: str, folder: Path, sources: dict[str, bytes]) -> None:
    """Add the source of a module that lies in ``folder``, and of all modules there that it imports, to ``sources``.

    The imports of the imported modules are followed as well. kvbench's own modules are left out.

    sources: {name of a module: its source}. A module that it has already is not read again.
    """
    module = sys.modules.get(name)
    # modules that are built in have no file, and a name that is no module has none either
    file = getattr(module, "__file__", None)
    if name in sources or is_own(name) or file is None or Path(file).parent != folder:
        return
    sources[name] = Path(file).read_bytes()
    for module_name in _list_imports(sources[name], getattr(module, "__package__", "")):
        _collect_imports(module_name, folder, sources)


def _list_imports(source: bytes, package: str) -> list[str]:
    """Return the names of the modules that a module's source may import. ``package`` is the module's package."""
    names: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            # a relative import has a level: the number of its leading dots
            if node.level:
                base = resolve_name("." * node.level + base, package)
            # ``from a import b`` may mean the name b of module a, or the module a.b
            names.append(base)
            names += [f"{base}.{alias.name}" for alias in node.names]
    return names
