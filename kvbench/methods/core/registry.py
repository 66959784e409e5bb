"""The registry of methods, with their knobs and aliases.

A method is a stage with an id in a file of kvbench/methods. Its YAML file in conf/method has its knobs as users see
them, with a comment each. A method without such a file has the knobs of its class.

Users may join several ids to one method with + (``snapkv+think``). Each id is a part of it. An alias such as ``q4_0_h``
stands for a method with certain knobs. A key names a knob with or without its stage (``method.snapkv.window``,
``snapkv.window`` or ``window``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, cast

import kvbench.methods
from kvbench.base.conf import conf_dir, read_method_entry, read_yaml
from kvbench.base.errors import UsageError, unknown
from kvbench.base.extras import require
from kvbench.methods.core.loading import find_syntax_error, load_stage, read_class_entry
from kvbench.methods.core.source import Described, describe

# the command line reads the registry for --help, which must not wait for torch
if TYPE_CHECKING:
    from kvbench.methods.core.stage import Stage

BUDGET_KNOBS = ("kv_size", "kv_ratio")
"""The two knobs that state a budget of tokens: as a number, or as a fraction of the prompt."""
ALWAYS_NAMED = ("kv_size", "kv_ratio", "ratio", "value_ratio")
"""Knobs that a label names even where they have their plain default."""
PER = "per"
"""The one setting of a whole chain: the heads under which it stores."""


class Alias(NamedTuple):
    """The meaning of an alias: a method by its id, and the values of its knobs that the alias implies."""

    method: str
    knobs: Mapping[str, object]


ALIASES: Mapping[str, Alias] = {
    "h2o+quant": Alias("qhitter", {"lam": 1}),
    "q4_0_h": Alias("q4_0", {"rotate": "hadamard"}),
    "q8_0_h": Alias("q8_0", {"rotate": "hadamard"}),
}
"""Aliases of methods. An alias may join several parts with +, in any order: together they mean one method."""
# the line of a class that names its method: an indented ``id = "snapkv"``, with or without an annotation
ID = re.compile(r"""^(?: {2,4}|\t)id *(?:: *[\w.\[\]]+ *)?= *["']([\w-]+)["']""", re.MULTILINE)


@dataclass(frozen=True)
class Method:
    """A method as a user wrote it, such as ``h2o+quant``, with what the registry knows of it.

    written: the method as it was written.
    entries: the plain entry of each of its stages, by id (``defaults``). Readers must not change them.
    aliases: {stage: the alias that the user wrote for it}.
    implied: the values of knobs that those aliases imply, by key (``qhitter.lam``).
    """

    written: str
    entries: Mapping[str, Mapping[str, Any]]
    aliases: Mapping[str, str]
    implied: Mapping[str, object]

    @property
    def name(self) -> str:
        """The method with the aliases in it resolved, such as ``qhitter``."""
        return "+".join(self.entries)


class KvpressWords(TypedDict):
    """The words of kvpress that users may type here by habit (kvpress.yaml).

    methods: {press: kvbench's id of the same method}.
    missing: the presses for which kvbench has no method.
    knobs: {field of a press: kvbench's name of the same knob}.
    """

    methods: dict[str, str]
    missing: list[str]
    knobs: dict[str, str]


@cache
def available() -> tuple[str, ...]:
    """Return the ids of all methods, ``full`` included."""
    with_yaml = {path.stem for path in (conf_dir() / "method").glob("*.yaml")}
    return tuple(sorted(with_yaml | _find_modules().keys()))


@cache
def defaults(method: str) -> dict[str, Any]:
    """Return the entry of one method: ``_target_`` (its class) and its knobs with their plain defaults.

    ``full`` has the entry {}. Entries are cached, so callers must not change them. Raises UsageError for an unknown
    method, and for a file that is not one of a method.
    """
    if of_kvpress(method):
        require("kvpress", "method=kvpress:NAME")
        # kvpress is an optional package, and this module imports torch
        from kvbench.methods.core.kvpress import stage_class

        method = stage_class(method).id
        return read_class_entry(path_of(method), method)
    if method not in available():
        raise explain_unknown_method(method)
    path = _find_only_file(method)
    if path.suffix == ".yaml":
        return read_method_entry(path)
    return read_class_entry(path, method)


def described(method: str) -> Described:
    """Return the description and the knobs of a method without a YAML file, read from its source.

    The source is not run. Raises UsageError as ``source.describe`` does.
    """
    return describe(_find_only_file(method), method)


def _find_only_file(method: str) -> Path:
    """Return the file that has the method's knobs (``path_of``). Raises UsageError if two files have the same id."""
    files = _find_modules().get(method, [])
    if len(files) > 1:
        raise UsageError(f"{files[1]}: its id {method!r} is also that of {files[0]}: choose another id")
    return path_of(method)


def of_kvpress(method: str) -> bool:
    """Return True if a method is a press of the package kvpress, such as ``kvpress:snapkv``."""
    return method.startswith("kvpress:")


@cache
def read_kvpress_words() -> KvpressWords:
    """Return kvbench's words for kvpress's presses and fields."""
    return cast(KvpressWords, read_yaml(Path(__file__).with_name("kvpress.yaml")))


def _list_user_methods() -> list[Path]:
    """Return the files in folders of KVBENCH_METHODS. Files named ``_*.py`` only help others and are left out."""
    _, user_files = _list_files()
    return [path for path in user_files if path.name[0] != "_"]


def broken_files() -> dict[Path, str]:
    """Return {file: sentence} for each file of the user's methods that cannot be parsed as Python."""
    sentences = {}
    for path in _list_user_methods():
        error = find_syntax_error(path)
        if error is not None:
            sentences[path] = f"{error}, so that no method of this file is known."
    return sentences


def explain_unknown_method(method: str) -> UsageError:
    """Return the error for a name that is no method.

    If the name is that of a press of kvpress, the error gives kvbench's name for the same method, or says that kvbench
    lacks it.
    """
    # SnapKVPress, snap-kv and snap_kv all mean snapkv
    press = re.sub(r"[-_]|press$", "", method.lower())
    if press in available():
        name_here: str | None = press
    else:
        name_here = read_kvpress_words()["methods"].get(press)
    if name_here is not None:
        return UsageError(
            f"unknown method {method}: it is method={name_here} here (docs/differences.md lists the differences)"
        )
    if press in read_kvpress_words()["missing"]:
        return UsageError(
            f"kvbench has no {method}, a press of kvpress. All methods: `kvbench list methods`. Where kvpress is "
            "installed, method=kvpress:NAME runs its own (kvbench list kvpress)."
        )
    # the user may mean a method of their own, whose file says why it is not known
    hints = ["Join methods with +, as in method=snapkv+think."]
    user_files = _list_user_methods()
    broken = broken_files()
    hints += broken.values()
    nameless = [str(path) for path in user_files if path not in broken and not _read_ids(path)]
    if nameless:
        hints.append(f'No class with a line id = "..." is in {", ".join(nameless)}.')
    return unknown("method", method, available(), " ".join(hints), listed_by="kvbench list methods")


def path_of(method: str) -> Path:
    """Return the file that has a method's knobs: its YAML file, or its module if it has no YAML file.

    For an unknown method, return the path that its YAML file would have.
    """
    if of_kvpress(method):
        return Path(__file__).with_name("kvpress.py")
    path = conf_dir() / "method" / f"{method}.yaml"
    if path.exists():
        return path
    files = _find_modules().get(method)
    if files:
        return files[0]
    return path


def forget_files() -> None:
    """Clear the caches of methods' files. Call this after a file was added, changed or removed."""
    for cached_function in (available, defaults, _find_modules):
        cached_function.cache_clear()


def _list_files() -> tuple[list[Path], list[Path]]:
    """Return (the files of kvbench/methods, the files of the folders that KVBENCH_METHODS names).

    Raises UsageError for a folder that does not exist.
    """
    folders = [Path(folder) for folder in kvbench.methods.__path__]
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(f"KVBENCH_METHODS={folder}: there is no such folder; name one that holds files of methods")
    # the package's path begins with its own folder, see kvbench/methods/__init__.py
    own_folder, *user_folders = folders
    own_files = _list_python_files(own_folder)
    user_files: list[Path] = []
    for folder in user_folders:
        user_files += _list_python_files(folder)
    return own_files, user_files


def _list_python_files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.glob("*.py")) if path.is_file()]


def _read_ids(path: Path) -> list[str]:
    """Return the ids of the methods that a file defines. The file is not imported."""
    return ID.findall(path.read_text("utf-8", "replace"))


@cache
def _find_modules() -> dict[str, list[Path]]:
    """Return {method id: files of kvbench/methods or KVBENCH_METHODS that define it}, without importing them."""
    files_by_id: dict[str, list[Path]] = {}
    own_files, user_files = _list_files()
    for path in own_files + user_files:
        for method in _read_ids(path):
            files_by_id.setdefault(method, []).append(path)
    return files_by_id


def knob_names(method: str) -> tuple[str, ...]:
    """Return the names of a method's knobs."""
    return tuple(k for k in defaults(method) if not k.startswith("_"))


def read_method(written: str) -> Method:
    """Return the method that a user wrote, such as ``snapkv+think``, with aliases resolved.

    Raises UsageError if a part is empty, is no method or is written twice, and if ``full`` stands beside others.
    """
    parts = []
    for part in written.split("+"):
        part_id = part.strip()
        if of_kvpress(part_id):
            # a press may be typed in several ways; its id is the name of the class made for it
            _, _, part_id = defaults(part_id)["_target_"].rpartition(".")
        parts.append(part_id)
    parts = _resolve_aliases(parts)
    for part in parts:
        if not part:
            raise UsageError(f"method={written!r} has an empty part: write one id, or several joined by +")
    # raises UsageError for a part that is no method
    entries = {part: defaults(part) for part in parts}
    for part in parts:
        if parts.count(part) > 1:
            raise UsageError(f"method={written!r} names {part} twice")
    if "full" in parts and len(parts) > 1:
        raise UsageError(f"method={written!r}: full keeps everything as it is and is written alone")
    aliases: dict[str, str] = {}
    implied: dict[str, object] = {}
    written_parts = {part.strip() for part in written.split("+")}
    for alias, meaning in ALIASES.items():
        if set(alias.split("+")) <= written_parts:
            aliases[meaning.method] = alias
            implied |= {f"{meaning.method}.{knob}": value for knob, value in meaning.knobs.items()}
    return Method(written, entries, aliases=aliases, implied=implied)


def _resolve_aliases(parts: Sequence[str]) -> list[str]:
    """Return the parts of a method with the ids that aliases mean. Each id stands where its alias began."""
    resolved = list(parts)
    for alias, meaning in ALIASES.items():
        alias_parts = alias.split("+")
        if set(alias_parts) <= set(resolved):
            with_repeats = [meaning.method if part in alias_parts else part for part in resolved]
            # all parts of the alias have become the same id, of which only the first stays
            resolved = list(dict.fromkeys(with_repeats))
    return resolved


def choose_by_size(entry: Mapping[str, object]) -> dict[str, object]:
    """Return the entry with one value for each knob whose value depends on the budget.

    Such a knob is written as ``{kv_size: value, ...}``. It takes the value at the kv_size nearest to the entry's own on
    a log scale. Where the budget is a fraction, it takes the value at the largest kv_size (our choice).
    """
    size = entry.get("kv_size")
    # a size that is no number above 0 gets its error later, from the stage
    if not isinstance(size, int) or size <= 0:
        size = None
    return {knob: _choose_value(value, size) for knob, value in entry.items()}


def _choose_value(value: object, size: int | None) -> object:
    """Return a knob's value for a budget of ``size`` tokens; None: the budget is a fraction.

    A value that does not depend on the budget is returned as it is.
    """
    if not isinstance(value, Mapping) or not value:
        return value
    if not all(isinstance(key, int) and key > 0 for key in value):
        return value
    if size is None:
        return value[max(value)]
    # |log(key / size)| is the distance on a log scale; sorted: of two equally near sizes the smaller is taken
    nearest_size = min(sorted(value), key=lambda key: abs(math.log(key / size)))
    return value[nearest_size]


def make_stage(method: str, entry: Mapping[str, object]) -> Stage:
    """Build the stage of one entry (``_target_`` and knobs).

    Raises UsageError for a knob that the method does not have, a value out of range, and a class that is no stage.
    """
    knobs = {name: value for name, value in entry.items() if not name.startswith("_")}
    for knob in knobs:
        if knob not in knob_names(method):
            raise unknown(f"option of {method}", knob, knob_names(method), listed_by=f"kvbench run --help {method}")
    # an entry that gives only knobs belongs to the method's own class
    target = entry.get("_target_") or defaults(method)["_target_"]
    return load_stage(path_of(method), method, cast(str, target), knobs=knobs)
