"""Functions of torch, transformers and kvbench with which all methods compute, and what a method replaced of them."""

from __future__ import annotations

import builtins
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvbench.base.errors import Refused
from kvbench.methods.core.foreign import is_own

COMPUTING = ("torch", "torch.nn.functional", "torch.linalg", "torch.fft", "torch.special", "math", "builtins", "numpy")
"""Modules whose functions methods and models compute with, beside kvbench's and the models' own."""
STORING = ("json", "json.encoder", "json.decoder", "hashlib", "zlib", "re", "statistics", "string", "collections")
"""Modules whose functions name, score and store answers."""
OF_MODELS = tuple(f"transformers.{n}" for n in ("activations", "cache_utils", "masking_utils", "modeling_utils"))
"""Modules whose functions and classes every model computes with, beside those of its own family."""
TORCH_FOLDER = os.path.dirname(torch.__file__)
TABLES: dict[str, dict[Any, Any]] = {
    "an attention function of transformers": ALL_ATTENTION_FUNCTIONS._global_mapping,
    "what every module does by a hook before it": torch.nn.modules.module._global_forward_pre_hooks,
    "what every module does by a hook after it": torch.nn.modules.module._global_forward_hooks,
}
"""Tables of functions that every model calls, by the words that a refusal says."""
MODES = {
    "a TorchFunctionMode": (torch._C._len_torch_function_stack, torch._C._pop_torch_function_stack),
    "a TorchDispatchMode": (torch._C._len_torch_dispatch_stack, lambda: torch._C._pop_torch_dispatch_stack(None)),
}
"""Modes under which all functions of torch may mean something else: how many are entered, and how the last is left."""
SETTINGS = ("Storage",)
"""Names of torch that its own functions set: ``set_default_dtype`` this one."""
CLASSES = (torch.Tensor, torch.Generator, torch.nn.Parameter)
"""Classes of torch that are watched beside those of ``torch.nn.modules``."""


class Functions:
    """The functions that methods and models compute with, as they were when this was made."""

    def __init__(self, with_code: bool = False) -> None:
        """Note them; ``with_code`` also what their code is, which takes longer."""
        self._before = {name: dict(vars(owner)) for name, owner in _owners().items()}
        self._tables = {name: dict(table) for name, table in TABLES.items()}
        self._modes = tuple(length() for length, _ in MODES.values())
        self._with_code = with_code
        self._codes: list[tuple[FunctionType, CodeType]] = []
        if with_code:
            for owner in _owners().values():
                self._codes += _codes(owner)

    def restored(self) -> str:
        """Put back what was replaced since. Return the name of one of the functions concerned, or ''."""
        # built-in functions come first, and without a call of one: all that follows needs them
        built_in = builtins.__dict__.copy()
        builtins.__dict__.update(self._before["builtins"])
        replaced = self._left_mode()
        for name, table in TABLES.items():
            if dict(table) != self._tables[name]:
                table.clear()
                table.update(self._tables[name])
                replaced = name
        for function, code in self._codes:
            if function.__code__ is not code:
                function.__code__ = code
                replaced = replaced or f"the code of {function.__module__}.{function.__qualname__}"
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

    @contextmanager
    def watching_imports(self) -> Iterator[None]:
        """Note the functions of modules as they are when they have just been imported, before they can be replaced."""
        recorder = _Recorder(self)
        sys.meta_path.insert(0, recorder)
        try:
            yield
        finally:
            sys.meta_path.remove(recorder)

    def note(self, name: str, module: ModuleType) -> None:
        """Note the functions of a module that has just been imported."""
        for owner_name, owner in _owners_in(name, module).items():
            self._before[owner_name] = dict(vars(owner))
            if self._with_code:
                self._codes += _codes(owner)

    def _left_mode(self) -> str:
        """Leave the modes of torch that were entered since, under which functions mean others. Return one's name."""
        left = ""
        for before, (name, (length, pop)) in zip(self._modes, MODES.items(), strict=True):
            while length() > before:
                pop()
                left = f"all functions of torch by {name} that it does not leave"
        return left


class _Recorder:
    """A finder of modules that notes the functions of those that are watched."""

    def __init__(self, functions: Functions) -> None:
        self._functions = functions

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return what another finder finds, with a loader that notes the module's functions at its end."""
        if not _is_watched(name):
            return None
        others = (finder for finder in sys.meta_path if not isinstance(finder, _Recorder))
        found = (finder.find_spec(name, path, target) for finder in others if hasattr(finder, "find_spec"))
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_note(module: ModuleType) -> None:
                execute(module)
                self._functions.note(name, module)

            setattr(spec.loader, "exec_module", execute_and_note)  # noqa: B010 (a loader has its own method)
        return spec


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
            if isinstance(module, ModuleType):
                owners.update(_owners_in(name, module))
        _OWNERS = loaded, owners
    return _OWNERS[1]


def _is_watched(name: str) -> bool:
    """Tell whether others compute with the functions of the module ``name``."""
    return name in COMPUTING or name in STORING or _has_watched_classes(name)


def _has_watched_classes(name: str) -> bool:
    if name.startswith("kvbench."):
        return not name.startswith("kvbench.methods.") or is_own(name)
    if name in OF_MODELS or name.startswith("torch.nn.modules."):
        return True
    return name.startswith("transformers.models.") and ".modeling_" in name


def _owners_in(name: str, module: ModuleType) -> dict[str, Any]:
    """Return a module and its classes, by name, as far as they are watched."""
    owners: dict[str, Any] = {name: module} if _is_watched(name) else {}
    if _has_watched_classes(name):
        classes = [v for v in vars(module).values() if isinstance(v, type) and v.__module__ == name]
        owners.update({f"{name}.{c.__qualname__}": c for c in classes})
    return owners


def _codes(owner: Any) -> list[tuple[FunctionType, CodeType]]:
    """Return the functions of a module or class, each with its code."""
    functions = [f.__func__ if isinstance(f, (staticmethod, classmethod)) else f for f in vars(owner).values()]
    return [(f, f.__code__) for f in functions if isinstance(f, FunctionType)]


def _same(namespace: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    try:
        return bool(dict(namespace) == before)  # equal objects are compared by identity first
    except Exception:  # values whose comparison fails, as that of tensors does, are not the same ones
        return False


def _replaced(owner: Any, now: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    """Return the names that mean another function than before.

    What is no function may change, and a new name may come, unless it hides a function of a base class or a built-in.
    So may a setting that torch keeps under the name of a class.
    """
    names = []
    of_torch = (owner.__module__ if isinstance(owner, type) else owner.__name__).startswith("torch")
    for key in {*now, *before}:
        value, former = now.get(key), before.get(key)
        if value is former or isinstance(value, ModuleType) or not (_is_function(value) or _is_function(former)):
            continue
        changed = not (of_torch and _is_torchs_own(value, key)) if key in before else _hides(owner, key)
        if changed and not (owner is torch and key in SETTINGS):
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
