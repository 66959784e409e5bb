"""The command line -> plain Hydra overrides. The one place that knows the shorthand; golden tests pin it.

method=full,snapkv+think kv_size=64,128   ->  method=[full,snapkv,think] chains=[full,snapkv+think]
                                              method.snapkv.kv_size=[64,128] method.snapkv.kv_ratio=null
model=../my/checkpoint                    ->  model=hf model.path='../my/checkpoint'
dataset=tiny/needle,file path=x.jsonl     ->  dataset=[tiny,file] tasks=[tiny/needle,file] dataset.file.path='x.jsonl'
preset=think method=snapkv                ->  preset.name=think prompt=think per=query_head method.snapkv.window=32 ...
method=h2o,h2o+think reference=h2o+think  ->  method=[h2o,think] chains=[h2o,h2o+think] reference=h2o+think match=bytes
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.conf import LISTED, entries, top_level
from kvbench.errors import UsageError, unknown
from kvbench.methods import registry
from kvbench.run import presets

GROUPS = {"model": "tiny", "method": "snapkv", "dataset": "tiny", "prompt": "plain", "logger": "wandb"}
"""The config groups that a command line chooses from, each with an example."""
MODEL_FACTS = ("name", "path", "verified", "prompt_limits", "prompt_templates", "shape", "architecture", "fetch")
PLAIN = re.compile(r"[\w./+%@:-]+")


@dataclass(frozen=True)
class Command:
    """What a command line asks for: one list of plain Hydra overrides per model.

    Under -m ``sweep`` holds the overrides that cut the run into shards and set up the launcher.
    """

    runs: tuple[tuple[str, ...], ...]
    sweep: tuple[str, ...] = ()


def rewrite(arguments: Sequence[str], multirun: bool = False) -> Command:
    """Plain Hydra overrides of ``key=value`` arguments; raises UsageError naming key, value and what is allowed."""
    pairs = [_split(a) for a in arguments]
    _refuse_twice(pairs)
    given = dict(pairs)
    methods = split_list(given.get("method", "snapkv+think"))
    chains = [registry.split(m) for m in methods]
    registry.check_sets(methods)
    datasets = split_list(given.get("dataset", "tiny"))
    names = _datasets(datasets)
    wanted = split_list(given.get("model", "tiny"))
    models = [_model(m) for m in wanted]
    overrides: list[str] = []
    for group, kind in (("prompt", "prompt policy"), ("logger", "logger")):
        if group in given:
            if given[group] not in entries(group):
                raise unknown(kind, given[group], entries(group))
            overrides.append(f"{group}={given[group]}")
    if "method" in given:
        stages = list(dict.fromkeys(part for chain in chains for part in chain))
        overrides += [f"method=[{','.join(stages)}]", f"chains=[{','.join(methods)}]"]
    if "dataset" in given:
        overrides += [f"dataset=[{','.join(names)}]", f"tasks=[{','.join(datasets)}]"]
    sweep: list[str] = []
    launcher: list[str] = []
    for key, value in pairs:
        if key in GROUPS or key in ("preset", "match"):
            continue
        if key.startswith(("hydra.", "hydra/", "+hydra.", "++hydra.")):
            launcher.append(_launcher(key, value))
        elif key in ("shard", "shards") and multirun:
            sweep = _sweep(given)
        else:
            registry.check_settled(methods, key, value)
            overrides += _override(key, value, chains, names)
    if multirun and not sweep:
        raise UsageError("-m sweeps shards: give shard=0,1,2,3 or shards=4 (other comma lists are grids without -m)")
    if multirun and len(models) > 1:
        raise UsageError(f"-m with {len(models)} models: run one model at a time, or leave out -m")
    if launcher and not multirun:
        raise UsageError(f"{launcher[0]} sets up a launcher and needs -m, as in: -m shard=0,1 {launcher[0]}")
    explicit = any(k == "model" or k.startswith("model.") for k in given)
    runs = [
        (
            *(model if explicit else ()),
            *overrides,
            *_preset(given.get("preset"), name, chains, overrides),
            *_match(given, name),
        )
        for name, model in zip(wanted, models, strict=True)
    ]
    return Command(tuple(tuple(_settle(r)) for r in runs), (*sweep, *launcher))


def split_list(value: str) -> list[str]:
    """Split at commas outside brackets and quotes: ``a,b+c`` -> [a, b+c]; ``[0,1],[2]`` -> two lists."""
    parts, depth, quote, start = [], 0, "", 0
    for i, ch in enumerate(value):
        if quote:
            quote = "" if ch == quote else quote
        elif ch in "'\"":
            quote = ch
        elif ch in "[{(":
            depth += 1
        elif ch in "]})":
            depth -= 1
        elif ch == "," and depth == 0:
            parts.append(value[start:i].strip())
            start = i + 1
    return [*parts, value[start:].strip()]


def _split(argument: str) -> tuple[str, str]:
    key, sign, value = argument.partition("=")
    if not sign or not key:
        raise UsageError(f"{argument!r} is not key=value, as in method=snapkv+think or kv_size=64,128")
    if value == "" and key in GROUPS:
        raise UsageError(f"{key}= is empty: name one, as in {key}={GROUPS[key]}")
    return key.strip(), value.strip()


def _refuse_twice(pairs: Sequence[tuple[str, str]]) -> None:
    keys = [k for k, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise UsageError(f"{key}= is given {keys.count(key)} times: give it once, with a comma list for a grid")


def _datasets(wanted: Sequence[str]) -> list[str]:
    names = list(dict.fromkeys(w.partition("/")[0] for w in wanted))
    for name in names:
        if name not in entries("dataset"):
            raise unknown("dataset", name, entries("dataset"), "A file of your own: dataset=file path=prompts.jsonl")
    return names


def _model(wanted: str) -> tuple[str, ...]:
    """A name in conf/model stays; anything else is a checkpoint folder or hub id."""
    if wanted in entries("model") and wanted != "hf":
        return (f"model={wanted}",)
    if wanted == "hf":
        return ("model=hf",)
    return ("model=hf", f"model.path={quote(wanted)}")


def _preset(name: str | None, model: str, chains: Sequence[Sequence[str]], overrides: Sequence[str]) -> Iterator[str]:
    """The plain overrides of a preset for this model, but for what the user's own say."""
    if name is None:
        return
    yield f"preset.name={name}"
    typed = {o.partition("=")[0] for o in overrides if not o.startswith("?")}
    for key, value in registry.yielding(presets.values(name, model), {m for c in chains for m in c}, typed).items():
        if key != "match":
            yield f"{key}={_written_value(value)}"


def _match(given: Mapping[str, str], model: str) -> Iterator[str]:
    """The kind of equal memory asked for: as typed, or the preset's, else bytes, for match=true or reference= alone."""
    asked = given.get("match", "true" if "reference" in given else "null")
    if asked in ("null", "false"):
        return
    ratio = next((k for k in given if k.rpartition(".")[2] == "kv_ratio"), None)
    if ratio is not None:
        raise UsageError(
            f"{ratio}={given[ratio]} is not possible with match={asked}: a fraction of each prompt is no fixed number "
            "of bytes. Give the reference a kv_size, as in kv_size=128; that of the others is found"
        )
    if asked == "true":
        preset = given.get("preset")
        asked = (presets.values(preset, model) if preset else {}).get("match", "bytes")
    yield f"match={quote(asked)}"


def _written_value(value: Any) -> str:
    """A YAML value as Hydra reads it."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{_written_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_written_value, value)) + "]"
    return quote(value) if isinstance(value, str) else json.dumps(value)


def _sweep(given: Mapping[str, str]) -> list[str]:
    """The overrides that sweep all shards: ``shard=0,1,2,3`` says how many there are, ``shards=4`` which."""
    count = given.get("shards")
    if count is not None and not (count.isdigit() and int(count) >= 1):
        raise UsageError(f"shards={count} is not possible: a whole number, 1 or more")
    value = given.get("shard", ",".join(map(str, range(int(count or 0)))))
    parts = split_list(value)
    whole = all(p.isdigit() for p in parts) and sorted(map(int, parts)) == list(range(len(parts)))
    if not whole or (count is not None and int(count) != len(parts)):
        of = f" of shards={count}" if count else ""
        raise UsageError(f"shard={value}{of} is not possible: all shards from 0 on, as in -m shard=0,1,2,3")
    return [f"shard={','.join(parts)}", f"shards={len(parts)}"]


def _launcher(key: str, value: str) -> str:
    """A launcher's option: its schema lists only some, so that the others would need Hydra's ``+``."""
    bare = key.lstrip("+")
    return f"++{bare}={value}" if bare.startswith("hydra.launcher.") else f"{key}={value}"


def _override(key: str, value: str, chains: Sequence[Sequence[str]], datasets: Sequence[str]) -> list[str]:
    """The plain overrides of one key: full keys as they are, bare knobs to every owner."""
    bare = key.lstrip("+")
    if "${" in value:
        raise UsageError(f"{key}={value} is not possible: write the value itself, interpolations are not read here")
    if any(value.count(a) != value.count(b) for a, b in ("[]", "{}", "()")):
        raise UsageError(f"{key}={value} is not possible: its brackets do not match")
    if bare == "shard" and len(split_list(value)) > 1:
        raise UsageError(f"shard={value} is a sweep: add -m, as in: run -m shard={value}")
    if bare in top_level():
        if bare not in ("per",) and len(split_list(value)) > 1:
            raise UsageError(f"{key}={value} is not possible: {bare} takes one value")
        return [f"{bare}={_value(value, top_level()[bare])}"]
    if bare == "data.root":
        return [f"data.root={_value(value, None)}"]
    group, _, rest = bare.partition(".")
    if rest and group in GROUPS:
        return _full_key(group, rest, value, chains, datasets)
    if rest and group in registry.available():
        return _full_key("method", bare, value, chains, datasets)
    if rest:
        raise unknown("key", key, [*top_level(), "data.root", *(f"{g}.…" for g in GROUPS)])
    return _bare(bare, value, chains, datasets)


def _full_key(group: str, rest: str, value: str, chains: Sequence[Sequence[str]], datasets: Sequence[str]) -> list[str]:
    if group in LISTED:
        known = entries(group)[LISTED[group]]
        name = rest.partition(".")[0]
        if name not in known:
            raise unknown(f"knob of the {group}", rest, known)
        return [f"{group}.{rest}={_value(value, known[name])}"]
    owner, _, knob = rest.partition(".")
    if group == "method":
        used = list(dict.fromkeys(m for c in chains for m in c))
        known = registry.defaults(owner)
    else:
        used, known = list(datasets), entries("dataset").get(owner, {})
    if owner not in used:
        raise UsageError(f"{group}.{rest}={value}: this run has no {group} {owner!r}; it has {', '.join(used)}")
    if knob not in known or knob.startswith("_"):
        raise unknown(f"knob of {group} {owner}", knob, (k for k in known if not k.startswith("_")))
    return _set(group, owner, knob, value, known)


def _bare(knob: str, value: str, chains: Sequence[Sequence[str]], datasets: Sequence[str]) -> list[str]:
    in_data = [d for d in datasets if knob in entries("dataset")[d] and not knob.startswith("_")]
    in_model = [knob] if knob in entries("model")["hf"] and knob not in MODEL_FACTS else []
    in_prompt = [knob] if knob in entries("prompt")["plain"] and knob != "name" else []
    in_methods = any(knob in registry.knob_names(m) for c in chains for m in c)
    if sum((bool(in_data), bool(in_model), bool(in_prompt), in_methods)) > 1:
        keys = [f"dataset.{d}.{knob}" for d in in_data] + [f"model.{k}" for k in in_model]
        keys += [f"prompt.{k}" for k in in_prompt]
        keys += [f"method.{m}.{knob}" for c in chains for m in c if knob in registry.knob_names(m)]
        raise UsageError(f"{knob}={value} could mean {' or '.join(dict.fromkeys(keys))}: write the full key")
    if in_model:
        return [f"model.{knob}={_value(value, entries('model')['hf'][knob])}"]
    if in_prompt:
        return [f"prompt.{knob}={_value(value, entries('prompt')['plain'][knob])}"]
    if in_data:
        return [o for d in in_data for o in _set("dataset", d, knob, value, entries("dataset")[d])]
    if not in_methods:
        if knob == "paper":
            name = value.partition("/")[0]
            raise UsageError(
                f"paper={value} is not a key here: `python -m kvbench table {name}/2` measures a table of the paper, "
                f"preset={name} sets what its tables were made with"
            )
        raise unknown("knob", knob, _known_knobs(chains, datasets), f"No method of {_written(chains)} owns it.")
    owners = registry.route(chains, knob)
    return [o for m in owners for o in _set("method", m, knob, value, registry.defaults(m))]


def _known_knobs(chains: Sequence[Sequence[str]], datasets: Sequence[str]) -> list[str]:
    knobs = {k for c in chains for m in c for k in registry.knob_names(m)} | set(top_level())
    knobs |= {k for k in entries("prompt")["plain"] if k != "name"}
    knobs |= {k for d in datasets for k in entries("dataset")[d] if not k.startswith("_")}
    return sorted({"preset"} | knobs | {k for k in entries("model")["hf"] if k not in MODEL_FACTS})


def _written(chains: Sequence[Sequence[str]]) -> str:
    return ", ".join("+".join(c) for c in chains)


def _set(group: str, owner: str, knob: str, value: str, known: dict[str, Any]) -> list[str]:
    overrides = [f"{group}.{owner}.{knob}={_value(value, known[knob])}"]
    # one of the two budgets replaces the other's default; giving both stays visible and is refused later
    if group == "method" and knob == "kv_size" and known.get("kv_ratio") is not None:
        overrides.append(f"?{group}.{owner}.kv_ratio=null")
    return overrides


def _value(value: str, default: Any) -> str:
    """A Hydra value: comma lists become lists (a list-typed knob's own value, any other knob's grid)."""
    parts = split_list(value)
    if isinstance(default, list):
        return value if value.startswith("[") and len(parts) == 1 else f"[{','.join(quote(p) for p in parts)}]"
    return f"[{','.join(quote(p) for p in parts)}]" if len(parts) > 1 else quote(value)


def quote(value: str) -> str:
    """A value that Hydra reads as typed: plain words and numbers as they are, everything else quoted."""
    if not value or PLAIN.fullmatch(value) or value[0] in "[{'\"":
        return value or "''"
    escaped = re.sub(r"(\\*)'", r"\1\1\\'", value)
    return "'" + re.sub(r"(\\+)$", r"\1\1", escaped) + "'"


def _settle(overrides: Sequence[str]) -> list[str]:
    """Resolve the tentative ``?key=value`` overrides: they yield to an explicit one of the same key."""
    explicit = {o.partition("=")[0] for o in overrides if not o.startswith("?")}
    settled = []
    for o in overrides:
        if not o.startswith("?"):
            settled.append(o)
        elif o[1:].partition("=")[0] not in explicit and o[1:] not in settled:
            settled.append(o[1:])
    return settled
