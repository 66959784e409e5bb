"""Functions of torch, transformers and kvbench with which all methods compute. A method that replaces one is refused.

Otherwise one method could change the numbers of all others that run after it in the same process.
"""

from __future__ import annotations

import builtins
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
"""The folder of torch's own files."""
TABLES: dict[str, dict[Any, Any]] = {
    "an attention function of transformers": ALL_ATTENTION_FUNCTIONS._global_mapping,
    "what every module does by a hook before it": torch.nn.modules.module._global_forward_pre_hooks,
    "what every module does by a hook after it": torch.nn.modules.module._global_forward_hooks,
}
"""Tables of functions that every model calls. The key is the text that names the table in a refusal."""


@dataclass(frozen=True)
class TorchMode:
    """A kind of mode of torch. While a mode is entered, it may change what any function of torch does.

    count: the function that returns how many modes of this kind are entered.
    leave: the function that leaves the mode entered last.
    """

    count: Callable[[], int]
    leave: Callable[[], object]


def _leave_dispatch_mode() -> object:
    """Leave the dispatch mode that was entered last."""
    # a key in place of None would name one of torch's own modes
    return torch._C._pop_torch_dispatch_stack(None)


MODES = {
    "a TorchFunctionMode": TorchMode(torch._C._len_torch_function_stack, torch._C._pop_torch_function_stack),
    "a TorchDispatchMode": TorchMode(torch._C._len_torch_dispatch_stack, _leave_dispatch_mode),
}
"""The kinds of modes. The key is the text that names the kind in a refusal."""
SETTINGS = ("Storage",)
"""Names in torch's namespace that its own functions set, and a method may so change: ``set_default_dtype`` sets it."""
CLASSES = (torch.Tensor, torch.Generator, torch.nn.Parameter)
"""Classes of torch that are watched beside those of ``torch.nn.modules``."""
Owner = ModuleType | type
"""A module or class whose functions are watched."""
FunctionCode = tuple[FunctionType, CodeType]
"""A function with the code that it had when it was noted."""


class Functions:
    """The functions that methods and models compute with, as they were when this object was made.

    ``restore`` later puts back those that were replaced in between.
    """

    def __init__(self, with_code: bool = False) -> None:
        """Note the functions as they are now. ``with_code`` also notes the code object of each, which takes longer."""
        self._before: dict[str, dict[str, object]] = {}
        for name, owner in _find_owners().items():
            # a class's namespace is a read-only view, and its own method copies it far faster than dict() does
            self._before[name] = vars(owner).copy()
        self._tables = {name: dict(table) for name, table in TABLES.items()}
        self._mode_counts = {name: mode.count() for name, mode in MODES.items()}
        self._with_code = with_code
        self._codes: list[FunctionCode] = []
        if with_code:
            for owner in _find_owners().values():
                self._codes += _list_functions(owner)

    def restore(self) -> str:
        """Put back the functions that were replaced since this object was made.

        Return the name of one of them, or '' if none was replaced. Modes of torch entered since count as replacements.
        """
        # built-in functions are put back first, by methods of a dict alone: all that follows calls built-in functions
        built_in = builtins.__dict__.copy()
        builtins.__dict__.update(self._before["builtins"])
        replaced = self._leave_modes()
        for name, table in TABLES.items():
            if dict(table) != self._tables[name]:
                table.clear()
                table.update(self._tables[name])
                replaced = name
        # a function may be the same object and yet compute something else
        for function, code in self._codes:
            if function.__code__ is not code:
                function.__code__ = code
                replaced = replaced or f"the code of {function.__module__}.{function.__qualname__}"
        replaced_function = self._restore_namespaces(built_in)
        return replaced or replaced_function

    def _restore_namespaces(self, built_in: Mapping[str, object]) -> str:
        """Give the names of all watched modules and classes the functions that they had.

        Return the name of one function that was replaced, or '' if none was.

        built_in: the namespace of the built-in functions before ``restore`` put them back.
        """
        replaced = ""
        for name, owner in _find_owners().items():
            before = self._before.get(name)
            # the module itself shows no change any more
            now: Mapping[str, object] = built_in if owner is builtins else vars(owner)
            # a new module or class that ``note`` has not seen has no earlier functions to compare
            if before is None or _is_unchanged(now, before):
                continue
            for key in _find_replaced(owner, now, before):
                if key in before:
                    setattr(owner, key, before[key])
                else:
                    delattr(owner, key)
                replaced = replaced or f"{name}.{key}"
        return replaced

    @contextmanager
    def watching_imports(self) -> Iterator[None]:
        """While the context is open, note each imported module's functions before anyone can replace them."""
        recorder = _Recorder(self)
        sys.meta_path.insert(0, recorder)
        try:
            yield
        finally:
            sys.meta_path.remove(recorder)

    def note(self, name: str, module: ModuleType) -> None:
        """Note the functions of a module that has just been imported."""
        for owner_name, owner in _list_owners(name, module).items():
            self._before[owner_name] = dict(vars(owner))
            if self._with_code:
                self._codes += _list_functions(owner)

    def _leave_modes(self) -> str:
        """Leave the modes of torch that were entered since this object was made.

        Return the words for one of them, for the refusal, or '' if there was none.
        """
        words = ""
        for name, mode in MODES.items():
            while mode.count() > self._mode_counts[name]:
                mode.leave()
                words = f"all functions of torch by {name} that it does not leave"
        return words


class _Recorder:
    """A finder of modules (in ``sys.meta_path``) that notes the functions of watched modules once they are imported."""

    def __init__(self, functions: Functions) -> None:
        """Take the object that is to note the functions of imported modules."""
        self._functions = functions

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a watched module from another finder, or None for a module that is not watched.

        The loader in the spec notes the module's functions once it has run the module.
        """
        if not _is_watched(name):
            return None
        spec = _find_spec_elsewhere(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_note(module: ModuleType) -> None:
                """Run the module, and then note its functions."""
                execute(module)
                self._functions.note(name, module)

            setattr(spec.loader, "exec_module", execute_and_note)  # noqa: B010 (a loader has its own method)
        return spec


def _find_spec_elsewhere(name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
    """Return the spec of a module from the first other finder that has one."""
    for finder in sys.meta_path:
        # finders of the old protocol have no ``find_spec``; Python passes over them, too
        if isinstance(finder, _Recorder) or not hasattr(finder, "find_spec"):
            continue
        spec = finder.find_spec(name, path, target)
        if spec is not None:
            return spec
    return None


def build_refusal(name: str, replaced: str) -> Refused:
    """Return the refusal of the method ``name``, which replaced the function with the name ``replaced``."""
    return Refused(f"{name} replaces {replaced}, with which other methods compute: call a function of your own instead")


_OWNERS: dict[str, Owner] = {}
"""The modules and classes whose functions are watched, by name, as ``_find_owners`` last collected them."""
_MODULES_THEN = 0
"""The number of loaded modules at that time."""


def _find_owners() -> dict[str, Owner]:
    """Return the modules and classes whose functions are watched, by name."""
    global _OWNERS, _MODULES_THEN
    # this is asked at every call, so the owners are collected anew only if the number of loaded modules has changed
    if len(sys.modules) != _MODULES_THEN:
        _MODULES_THEN = len(sys.modules)
        owners: dict[str, Owner] = {f"{c.__module__}.{c.__qualname__}": c for c in CLASSES}
        for name, module in sys.modules.copy().items():
            if isinstance(module, ModuleType):
                owners.update(_list_owners(name, module))
        _OWNERS = owners
    return _OWNERS


def _is_watched(name: str) -> bool:
    """Return True if the functions of the module ``name`` compute answers, or name, score and store them."""
    return name in COMPUTING or name in STORING or _has_watched_classes(name)


def _has_watched_classes(name: str) -> bool:
    """Return True if the classes that the module ``name`` defines are watched as well as the module itself."""
    if name.startswith("kvbench."):
        # methods of others may change themselves: their source is part of the identity of their results
        return not name.startswith("kvbench.methods.") or is_own(name)
    if name in OF_MODELS or name.startswith("torch.nn.modules."):
        return True
    # the file of a model family, such as transformers.models.llama.modeling_llama
    return name.startswith("transformers.models.") and ".modeling_" in name


def _list_owners(name: str, module: ModuleType) -> dict[str, Owner]:
    """Return {name: owner} of the module ``name`` and of its own classes. Those that are not watched are left out."""
    owners: dict[str, Owner] = {}
    if _is_watched(name):
        owners[name] = module
    if _has_watched_classes(name):
        for value in vars(module).values():
            # a class that the module only imports belongs to the module that defines it
            if isinstance(value, type) and value.__module__ == name:
                owners[f"{name}.{value.__qualname__}"] = value
    return owners


def _list_functions(owner: Owner) -> list[FunctionCode]:
    """Return the functions that are written in Python in a module or class, each with its code object."""
    codes: list[FunctionCode] = []
    for value in vars(owner).values():
        function = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
        # functions written in C have no code to replace
        if isinstance(function, FunctionType):
            codes.append((function, function.__code__))
    return codes


def _is_unchanged(namespace: Mapping[str, object], before: Mapping[str, object]) -> bool:
    """Return True if all names of a namespace mean the same objects as before."""
    try:
        # two dictionaries, and a class's view of one, compare their values by identity first, and only then by ==
        return bool(namespace == before)
    except Exception:
        # values whose comparison fails, as that of tensors does, are not the same objects
        return False


def _find_replaced(owner: Owner, now: Mapping[str, object], before: Mapping[str, object]) -> list[str]:
    """Return the names of a module or class that mean another function than before, in alphabetical order.

    Names that mean no functions are not looked at, nor are the names in SETTINGS. A new name counts only if it hides a
    function of a base class or a built-in function.

    now, before: the namespace of ``owner`` as it is, and as it was noted.
    """
    names = []
    module_name = owner.__module__ if isinstance(owner, type) else owner.__name__
    in_torch = module_name.startswith("torch")
    for key in set(now) | set(before):
        value, former = now.get(key), before.get(key)
        # modules are watched as owners of their own
        if value is former or isinstance(value, ModuleType):
            continue
        if not _is_function(value) and not _is_function(former):
            continue
        if owner is torch and key in SETTINGS:
            continue
        if key not in before:
            # a new name does no harm unless it hides a function, because nothing has called it before
            is_replaced = _hides_function(owner, key)
        else:
            is_replaced = not (in_torch and _is_torchs_own(value, key))
        if is_replaced:
            names.append(key)
    return sorted(names)


def _is_function(value: object) -> bool:
    """Return True if a value of a namespace can be called, or computes when it is read (a property)."""
    return callable(value) or isinstance(value, (property, staticmethod, classmethod))


def _is_torchs_own(value: Any, key: str) -> bool:
    """Return True if torch itself has put ``value`` in place of its function ``key``.

    torch's compiler does so when it is imported or first used. Such a replacement comes from torch's own files, and
    wraps the function or has its name. Another function of torch that a method puts there is no such replacement.
    """
    file = getattr(getattr(value, "__code__", None), "co_filename", "")
    return file.startswith(TORCH_FOLDER) and (hasattr(value, "__wrapped__") or key in value.__name__)


def _hides_function(owner: Owner, key: str) -> bool:
    """Return True if a new name of a module or class hides a function that was found under this name before."""
    if owner is builtins:
        # a name that Python does not find among the built-in functions is found nowhere
        return False
    if isinstance(owner, type):
        return any(key in vars(base) for base in owner.__mro__[1:])
    # a global name of a module hides the built-in function of this name
    return hasattr(builtins, key)
