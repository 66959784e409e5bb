"""Parse the command line into requests. This alone knows the shorthand, which golden tests pin.

method=full,snapkv+think kv_size=64,128   ->  methods full, snapkv+think; method.snapkv.kv_size [64, 128]
model=../my/checkpoint                    ->  model hf, model.path '../my/checkpoint'
dataset=tiny/needle,file path=x.jsonl     ->  tasks tiny/needle, file; dataset.file.path 'x.jsonl'
preset=think method=snapkv                ->  prompt think, preset's values below what is typed
method=h2o,h2o+think reference=h2o+think  ->  methods h2o, h2o+think; reference h2o+think, match bytes
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvbench.base.conf import LISTED, entries, read_config, top_level
from kvbench.base.errors import UsageError, unknown
from kvbench.methods.core import registry
from kvbench.methods.core.knob_owners import explain_unknown_knob, gather_entries, has_knob, list_knobs
from kvbench.methods.core.registry import Method
from kvbench.plan import keys, presets

GROUPS = {"model": "tiny", "method": "snapkv", "dataset": "tiny", "prompt": "plain", "logger": "wandb"}
"""The config groups that a command line chooses from, each with an example."""
MODEL_FACTS = ("name", "path", "verified", "prompt_limits", "prompt_templates", "shape", "architecture", "fetch")
"""The keys of an entry of conf/model that cannot be typed without ``model.`` in front."""
KL_KEYS = ("kl", "kl_tokens", "kl_mode")
"""The keys of the comparison with the full cache's distributions. In earlier versions ``fidelity`` stood for all."""
MAX_SHARDS = 4096
"""The most shards of a run. Each shard is a job of its own."""
MOST_DIGITS = 400
"""Whole numbers with this many characters or more are read as texts, since Python's floats end before."""
WHOLE = re.compile(r"[+-]?\d+(_\d+)*")
REAL = re.compile(r"[+-]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][+-]?\d+)?")
QUOTED = re.compile(r"""'[^']*'|"[^"]*\"""")
LAUNCHER_KEYS = ("hydra.", "hydra/", "+hydra.", "++hydra.")
"""The beginnings of the keys that choose and set up a Hydra launcher."""
ESCAPED = {"n": "\n", "t": "\t", "\\": "\\"}
"""The characters of a stop text by what is typed behind a backslash."""
# the words that stand for a value other than themselves
NAMED = {"null": None, "true": True, "false": False, "inf": float("inf"), "-inf": float("-inf"), "nan": float("nan")}


@dataclass(frozen=True)
class RunRequest:
    """One run as the user asked for it, before conf/ supplies the rest.

    words: the arguments of this run alone.
    groups: the entries of conf/ chosen for model, prompt and logger.
    methods, tasks: as typed; empty if none were typed.
    knobs: values of the methods' knobs by key (``kv_size``, ``method.snapkv.window``).
    values: all other values by full key (``limit``, ``model.dtype``).
    preset: the name of the preset; None without one.
    preset_values: the values of the preset for this run's model by full key; {} without a preset.
    sweep: under -m, the Hydra overrides that cut the run into shards and set up the launcher.
    """

    words: tuple[str, ...]
    groups: Mapping[str, str] = field(default_factory=dict)
    methods: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    knobs: Mapping[str, object] = field(default_factory=dict)
    values: Mapping[str, object] = field(default_factory=dict)
    preset: str | None = None
    preset_values: Mapping[str, object] = field(default_factory=dict)
    sweep: tuple[str, ...] = ()


def read(arguments: Sequence[str], multirun: bool = False) -> tuple[RunRequest, ...]:
    """Return the runs that ``key=value`` arguments ask for, one per model.

    multirun: whether the run is divided into shards by Hydra (-m).

    Raises UsageError for an argument that is not allowed.
    """
    return request_runs(keys.parse_pairs(arguments), multirun)


def request(settings: Mapping[str, object]) -> RunRequest:
    """Return the run that settings ask for: keys of ``run`` with Python values, or with texts as typed.

    A list is a grid of values, or the value of a knob whose default is a list. Raises UsageError for a key or value
    that is not allowed, and for several models.
    """
    runs = request_runs(settings)
    if len(runs) > 1:
        raise UsageError(f"model={settings['model']} names several models: give one")
    return runs[0]


def request_runs(settings: Mapping[str, object], multirun: bool = False) -> tuple[RunRequest, ...]:
    """Return the runs that settings ask for, one per model. Raises UsageError for a setting that is not allowed.

    multirun: whether the run is divided into shards by Hydra (-m).
    """
    settings = _replace_fidelity(settings)
    texts = {key: text_of(value) for key, value in settings.items()}
    for group, example in GROUPS.items():
        if group in texts and not texts[group]:
            raise UsageError(f"{group}= is empty: name one, as in {group}={example}")
    # a request has only the methods and tasks that were typed
    typed_methods = tuple(split_list(texts["method"])) if "method" in texts else ()
    typed_tasks = tuple(split_list(texts["dataset"])) if "dataset" in texts else ()
    # but knobs are looked for among those that will run: conf/config.yaml supplies the ones that are not typed
    methods = [registry.read_method(method) for method in typed_methods or read_config()["chains"]]
    tasks = typed_tasks or read_config()["tasks"]
    groups = {}
    for group, kind in (("prompt", "prompt policy"), ("logger", "logger")):
        if group in texts:
            if texts[group] not in entries(group):
                raise unknown(kind, texts[group], entries(group))
            groups[group] = texts[group]
    knobs, values = _read_settings(settings, methods, _list_datasets(tasks), multirun)
    sweep = _build_sweep_overrides(texts, multirun)
    preset = texts.get("preset")
    runs = []
    for model in split_list(texts.get("model", "tiny")):
        run_groups, run_values = {"model": model}, {}
        if model not in entries("model"):
            # a name without an entry in conf/model is a checkpoint folder or a hub id
            run_groups["model"] = "hf"
            run_values["model.path"] = model
        preset_values: dict[str, object] = {}
        if preset is not None:
            preset_values = presets.values(preset, run_groups["model"])
        if "prompt" in preset_values:
            run_groups["prompt"] = str(preset_values["prompt"])
        run = RunRequest(
            words=_select_words(texts, model, sharded=bool(sweep)),
            # typed entries win over the preset's
            groups=run_groups | groups,
            methods=typed_methods,
            tasks=typed_tasks,
            knobs=knobs,
            values=run_values | values | _read_match(texts, preset_values),
            preset=preset,
            preset_values=preset_values,
            sweep=tuple(sweep),
        )
        runs.append(run)
    return tuple(runs)


def _replace_fidelity(settings: Mapping[str, object]) -> Mapping[str, object]:
    """Return the settings with ``fidelity``, a key of earlier versions, replaced by today's keys.

    ``fidelity=true`` becomes ``kl=true``, ``fidelity=through_cache`` becomes ``kl_mode=through_cache``, and a number
    becomes ``kl_tokens``. Whoever sets ``kl_tokens`` or ``kl_mode`` wants the comparison, so ``kl=true`` is added.
    """
    new_settings = {key: value for key, value in settings.items() if key != "fidelity"}
    if "fidelity" in settings:
        for key in KL_KEYS:
            if key in new_settings:
                raise UsageError(
                    f"fidelity= is the old name of kl=, kl_tokens= and kl_mode=: leave it out beside {key}="
                )
        value = settings["fidelity"]
        # typed on the command line, not given in Python
        if isinstance(value, str):
            value = value_of(value)
        if isinstance(value, bool):
            new_settings["kl"] = value
        elif value == "through_cache":
            new_settings["kl_mode"] = value
        else:
            new_settings["kl_tokens"] = value
    if "kl" not in new_settings and ("kl_tokens" in new_settings or "kl_mode" in new_settings):
        new_settings["kl"] = True
    return new_settings


def _read_settings(
    settings: Mapping[str, object], methods: Sequence[Method], datasets: Sequence[str], multirun: bool
) -> tuple[dict[str, object], dict[str, object]]:
    """Return (values of the methods' knobs, all other values), by key.

    methods, datasets: those of the run, whose knobs may be typed without their owner.
    multirun: whether Hydra sweeps the shards (-m), so that their keys are left to it.
    """
    knobs: dict[str, object] = {}
    values: dict[str, object] = {}
    for key, value in settings.items():
        is_swept = multirun and key in ("shard", "shards")
        # other functions read these keys
        if key in GROUPS or key in ("preset", "match") or is_swept or key.startswith(LAUNCHER_KEYS):
            continue
        for full_key, read_value in _parse_argument(key, value, methods, datasets).items():
            # a bare key that conf/config.yaml does not have is a knob of every method that owns it
            is_bare_knob = "." not in full_key and full_key not in top_level()
            if full_key.startswith("method.") or is_bare_knob:
                knobs[full_key] = read_value
            elif full_key == "model.stop" and isinstance(value, str):
                values[full_key] = _unescape(read_value)
            else:
                values[full_key] = read_value
    return knobs, values


def _unescape(value: object) -> object:
    r"""Return typed texts with newlines and tabs in place of ``\n`` and ``\t``, as a shell gives them; others stay.

    ``\\n`` stands for a backslash and an n.
    """
    if isinstance(value, list):
        return [_unescape(text) for text in value]
    if not isinstance(value, str):
        return value
    return re.sub(r"\\([nt\\])", lambda match: ESCAPED[match[1]], value)


def _select_words(texts: Mapping[str, str], model: str, sharded: bool) -> tuple[str, ...]:
    """Return the arguments of one run: those typed, with the run's own model, without a launcher's keys.

    sharded: whether a sweep sets the keys of shards. They are left out then, too.
    """
    words = []
    if "model" in texts:
        words.append(f"model={model}")
    for key, text in texts.items():
        is_swept = sharded and key in ("shard", "shards")
        if key != "model" and not is_swept and not key.startswith(LAUNCHER_KEYS):
            words.append(f"{key}={text}")
    return tuple(words)


def _build_sweep_overrides(texts: Mapping[str, str], multirun: bool) -> list[str]:
    """Return the Hydra overrides under -m: the shards' overrides, then the launcher's.

    Raises UsageError where -m has nothing to sweep or several models, and for a launcher's keys without -m.
    """
    launcher = [_write_launcher_override(key, text) for key, text in texts.items() if key.startswith(LAUNCHER_KEYS)]
    if not multirun:
        if launcher:
            raise UsageError(f"{launcher[0]} sets up a launcher and needs -m, as in: -m shard=0,1 {launcher[0]}")
        return []
    if not {"shard", "shards"} & texts.keys():
        raise UsageError("-m sweeps shards: give shard=0,1,2,3 or shards=4 (other comma lists are grids without -m)")
    shards = _build_shard_overrides(texts)
    models = split_list(texts.get("model", "tiny"))
    if len(models) > 1:
        raise UsageError(f"-m with {len(models)} models: run one model at a time, or leave out -m")
    return shards + launcher


def text_of(value: Any) -> str:
    """Return a Python value as a user types it: ``null``, ``true``, ``64,128`` for a list. A text stays as it is."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return ",".join(text_of(part) for part in value)
    return str(value)


def split_list(value: str) -> list[str]:
    """Return the parts of a text between commas outside brackets and quotes: ``[0,1],[2]`` has two parts."""
    parts = []
    # the number of open brackets, the quotation mark that is open ('' for none), and the beginning of the current part
    depth, open_quote, start = 0, "", 0
    for i, character in enumerate(value):
        if open_quote:
            # inside quotes only the closing one counts
            if character == open_quote:
                open_quote = ""
        elif character in "'\"":
            open_quote = character
        elif character in "[{(":
            depth += 1
        elif character in "]})":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(value[start:i].strip())
            start = i + 1
    parts.append(value[start:].strip())
    return parts


def value_of(text: str) -> Any:
    """Return the value that a text stands for: None, a bool, a number, a list, a mapping, or else the text itself."""
    if text.lower() in NAMED:
        return NAMED[text.lower()]
    if WHOLE.fullmatch(text) and len(text) < MOST_DIGITS:
        return int(text)
    if REAL.fullmatch(text):
        return float(text)
    # the first and the last character, and the text between them
    enclosing, inner = text[:1] + text[-1:], text[1:-1]
    # quotes keep a text a text: '12' is no number
    if enclosing in ("''", '""') and len(text) > 1:
        quote = text[0]
        return inner.replace("\\" + quote, quote)
    # [] and {} have no items
    items: list[str] = split_list(inner) if inner.strip() else []
    if enclosing == "[]":
        return [value_of(item) for item in items]
    if enclosing == "{}" and all(":" in item for item in items):
        mapping = {}
        for item in items:
            key, _, value = item.partition(":")
            mapping[value_of(key.strip())] = value_of(value.strip())
        return mapping
    return text


def _list_datasets(tasks: Sequence[str]) -> list[str]:
    """Return the datasets of all ``tasks`` (``tiny`` for ``tiny/needle``), each once.

    Raises UsageError for an unknown dataset, and for a task that is cut off, such as ``tiny/``.
    """
    for task in tasks:
        if task.endswith("/") or task.startswith("/"):
            example, _, _ = task.strip("/").partition("/")
            if example not in entries("dataset"):
                example = "tiny"
            raise UsageError(
                f"dataset={task} names no task: write {example} for a whole "
                "dataset, or a task of it, as tiny/needle (kvbench list datasets)"
            )
    names: dict[str, None] = {}
    for task in tasks:
        name, _, _ = task.partition("/")
        if name not in entries("dataset"):
            hint = "A file of your own: dataset=file path=prompts.jsonl."
            raise unknown("dataset", name, entries("dataset"), hint, listed_by="kvbench list datasets")
        names[name] = None
    return list(names)


def _read_match(texts: Mapping[str, str], preset: Mapping[str, object]) -> dict[str, object]:
    """Return {"match": kind of equal memory}, or {} if equal memory is not asked for.

    A typed kind wins. With match=true, or reference= alone, the preset's kind applies, or else bytes.
    Raises UsageError if a fraction of each prompt is to be matched.
    """
    kind = texts.get("match")
    if kind is None and "reference" in texts:
        kind = "true"
    if kind in (None, "null", "false"):
        return {}
    for key, text in texts.items():
        # kv_ratio of all methods, or of one, as in method.snapkv.kv_ratio
        _, _, knob = key.rpartition(".")
        if knob == "kv_ratio":
            raise UsageError(
                f"{key}={text} is not possible with match={kind}: a fraction of each prompt is no fixed number "
                "of bytes. Give the reference a kv_size, as in kv_size=128; that of the others is found"
            )
    if kind == "true":
        return {"match": preset.get("match", "bytes")}
    return {"match": value_of(kind)}


def _build_shard_overrides(texts: Mapping[str, str]) -> list[str]:
    """Return the Hydra overrides that sweep all shards: shard=0,1,2,3 and shards=4. Users type one of them or both.

    Raises UsageError for too many shards, and if some shards are missing.
    """
    # None if only shard= was typed
    count = keys.whole("shards", least=1).value(texts)
    if count is not None and count > MAX_SHARDS:
        raise UsageError(f"shards={count} is not possible: 1 to {MAX_SHARDS}")
    # shards=4 alone stands for shard=0,1,2,3
    text = texts.get("shard", ",".join(map(str, range(count or 0))))
    shards = split_list(text)
    are_complete = all(s.isdigit() for s in shards) and sorted(map(int, shards)) == list(range(len(shards)))
    if not are_complete or count not in (None, len(shards)):
        stated_count = f" of shards={count}" if count else ""
        raise UsageError(f"shard={text}{stated_count} is not possible: all shards from 0 on, as in -m shard=0,1,2,3")
    return [f"shard={','.join(shards)}", f"shards={len(shards)}"]


def _write_launcher_override(key: str, value: str) -> str:
    """Return a launcher's option as a Hydra override. ``++`` is needed: the launcher's schema lacks some options."""
    plain_key = key.lstrip("+")
    if plain_key.startswith("hydra.launcher."):
        return f"++{plain_key}={value}"
    return f"{key}={value}"


def _parse_argument(key: str, value: Any, methods: Sequence[Method], datasets: Sequence[str]) -> dict[str, object]:
    """Return a key with its value, typed text or Python value, as {full key: value}.

    A knob typed without its owner gets the owner's key. A knob of methods keeps its bare key, as ``window``, which
    stands for all methods that have it.

    Raises UsageError for a key or a value that is not possible.
    """
    # Hydra's ``+key`` adds a key and ``++key`` overrides one; both mean ``key`` here
    plain_key = key.lstrip("+")
    text = text_of(value)
    if "${" in text:
        raise UsageError(f"{key}={text} is not possible: write the value itself, interpolations are not read here")
    # quoted text and values given in Python may have any characters
    typed = QUOTED.sub("", value) if isinstance(value, str) else ""
    if any(typed.count(opening) != typed.count(closing) for opening, closing in ("[]", "{}", "()")):
        raise UsageError(f"{key}={text} is not possible: its brackets do not match")
    if plain_key == "shard" and len(split_list(text)) > 1:
        raise UsageError(f"shard={text} is a sweep: add -m, as in: run -m shard={text}")
    if plain_key in top_level():
        # of the keys without a group, only per= may be swept
        if plain_key != "per" and len(split_list(text)) > 1:
            raise UsageError(f"{key}={text} is not possible: {plain_key} takes one value")
        return {plain_key: _read_grid(value, top_level()[plain_key])}
    if plain_key == "data.root":
        return {plain_key: _read_grid(value, None)}
    group, _, option = plain_key.partition(".")
    if not option:
        return _parse_plain_knob(plain_key, value, methods, datasets)
    if group in registry.available() or registry.of_kvpress(group):
        # snapkv.window is short for method.snapkv.window
        group, option = "method", plain_key
    if group not in GROUPS:
        names = list(top_level())
        names.append("data.root")
        names += [f"{known_group}.…" for known_group in GROUPS]
        raise unknown("key", key, names, listed_by="kvbench run --help keys")
    # the entries of these groups have their options directly, as in model.dtype
    if group in LISTED:
        return _parse_option(group, option, value)
    return _parse_owned_option(group, option, value, methods, datasets)


def _parse_option(group: str, option: str, value: Any) -> dict[str, object]:
    """Return {full key: value} for the key ``group.option`` of a group such as ``model``.

    Raises UsageError for an option that the group does not have.
    """
    # LISTED names the entry of each group that lists all options
    known = entries(group)[LISTED[group]]
    # a mapping has options of its own, as in model.prompt_limits.think
    name, _, inner_name = option.partition(".")
    if name not in known or (inner_name and not isinstance(known[name], dict)):
        if option in top_level():
            raise UsageError(f"{group}.{option} is not possible: {option} belongs to no group, write {option}=")
        raise unknown(f"option of the {group}", option, known, listed_by="kvbench run --help keys")
    return {f"{group}.{option}": _read_grid(value, known[name])}


def _parse_owned_option(
    group: str, option: str, value: Any, methods: Sequence[Method], datasets: Sequence[str]
) -> dict[str, object]:
    """Return {full key: value} for the key ``group.option``, where group is ``method`` or ``dataset``.

    option: the owner of the option, and its name: ``snapkv.window``.

    Raises UsageError for an option that this run does not have.
    """
    text = text_of(value)
    owner, _, knob = option.partition(".")
    if not knob:
        raise UsageError(
            f"{group}.{option}={text} names no option: write {group}.{option}.OPTION={text} "
            f"(kvbench run --help {option})"
        )
    if group == "method":
        known_entries = gather_entries(methods)
    else:
        known_entries = {dataset: entries("dataset")[dataset] for dataset in datasets}
    if owner not in known_entries:
        if group == "method":
            # raises for an id that no method has, with the nearest ids
            registry.defaults(owner)
        names = ", ".join(known_entries)
        raise UsageError(f"{group}.{option}={text}: this run has no {group} {owner!r}; it has {names}")
    known = known_entries[owner]
    # names with _ in front are internal to an entry, such as the loader of a dataset
    if not has_knob(known, knob):
        raise unknown(f"option of {group} {owner}", knob, list_knobs([known]), listed_by=f"kvbench run --help {owner}")
    return {f"{group}.{owner}.{knob}": _read_grid(value, known[knob])}


def _parse_plain_knob(knob: str, value: Any, methods: Sequence[Method], datasets: Sequence[str]) -> dict[str, object]:
    """Return {full key: value} for a knob typed without its owner, with one key for each owner of its group.

    A knob of methods has one key, which stays bare.

    Raises UsageError if no owner has the knob, or if owners in several groups have it.
    """
    text = text_of(value)
    known_knobs: dict[str, Mapping[str, object]] = {f"dataset.{d}": entries("dataset")[d] for d in datasets}
    # the entries hf and plain list all knobs of models and of prompts
    known_knobs["model"] = {k: v for k, v in entries("model")["hf"].items() if k not in MODEL_FACTS}
    known_knobs["prompt"] = {k: v for k, v in entries("prompt")["plain"].items() if k != "name"}
    known_knobs |= {f"method.{stage}": entry for stage, entry in gather_entries(methods).items()}
    owners = [owner for owner, knobs in known_knobs.items() if has_knob(knobs, knob)]
    groups = {owner.partition(".")[0] for owner in owners}
    if len(groups) > 1:
        full_keys = [f"{owner}.{knob}" for owner in owners]
        raise UsageError(f"{knob}={text} could mean {' or '.join(full_keys)}: write the full key")
    if not owners:
        # other commands have the key paper=
        if knob == "paper":
            name = text.partition("/")[0]
            raise UsageError(
                f"paper={text} is not a key here: `kvbench table {name}/2` measures a table of the paper, "
                f"preset={name} sets what its tables were made with"
            )
        names = {"preset"} | set(GROUPS) | set(top_level()) | set(list_knobs(known_knobs.values()))
        raise explain_unknown_knob(knob, value, names, methods)
    # the first owner's default stands for all: it only tells whether the knob takes a list
    default = known_knobs[owners[0]][knob]
    if groups == {"method"}:
        # ``resolve`` decides which stages take it
        return {knob: _read_grid(value, default)}
    return {f"{owner}.{knob}": _read_grid(value, default) for owner in owners}


def _read_grid(value: Any, default: Any) -> Any:
    """Return the value of a key whose default is ``default``: one value, or a grid, the list of values to sweep.

    A list of values, typed with commas or given as a list in Python, is one value for a knob whose default is a list.
    """
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, str):
        parts = split_list(value)
        # one list in brackets, as [0,1], and not several, as [0],[1]
        if isinstance(default, list) and value.startswith("[") and len(parts) == 1:
            return value_of(value)
        values = [value_of(part) for part in parts]
    elif isinstance(value, (list, tuple)):
        values = list(value)
    else:
        values = [value]
    if len(values) == 1 and not isinstance(default, list):
        return values[0]
    return values
