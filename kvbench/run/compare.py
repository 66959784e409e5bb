"""Compare methods on a model that is already loaded. Notebooks use this in place of `run`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import isnan
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from kvbench.base.conf import check, is_whole
from kvbench.base.errors import UsageError
from kvbench.base.files import disk_error
from kvbench.engine import decode
from kvbench.engine.limits import check_precision
from kvbench.engine.prefill import prefill_chains
from kvbench.engine.stopping import Ending, StopTexts
from kvbench.engine.weights_digest import digest_weights
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.resolve import ChainConfig
from kvbench.models.config import ModelConfig
from kvbench.models.load import ModelSource
from kvbench.models.traits import check_is_model, check_tokenizer
from kvbench.plan import config, words
from kvbench.plan.config import RunConfig
from kvbench.plan.run_plan import RunPlan, plan_run
from kvbench.plan.words import split_list
from kvbench.report.report import Report
from kvbench.run import experiment
from kvbench.store.store import ResultStore
from kvbench.tasks.metrics.own import hand_over
from kvbench.tasks.prompt import tokenize_text
from kvbench.tasks.rows import has_half_pair

MethodEntry = str | Mapping[str, Any]
"""A method as `run` names it, or a dict with the key ``method`` and options of its own."""
Row = str | Mapping[str, Any]
"""A plain prompt, or a mapping with the keys of one of ROWS."""
ROWS = (("prompt", "answers"), ("context", "question", "answers"), ("context", "questions"))
"""The keys of a row: a prompt with references, a context with one question, or with several that have references."""
LOADED = ("dtype", "weights", "attention", "rope_scaling", "device_map", "download", "revision")
"""Settings of a model that are in force once it is loaded."""


def compare(
    model: PreTrainedModel,
    tokenizer: Any,
    data: str | Iterable[Row],
    methods: Sequence[MethodEntry | Chain] = ("snapkv",),
    results: str | Path = "results",
    progress: bool = True,
    **settings: Any,
) -> Report:
    """Measure ``methods`` and the full cache on the same prompts and return the report that `kvbench run` prints.

    ``data`` is a dataset as `run` names it (``"tiny/needle"``, ``"longbench/qasper"``), a list of rows, or a table of
    rows, such as a datasets.Dataset or a DataFrame. A row is a mapping with ``answers`` (a text or a list) and
    ``prompt``. In place of ``prompt`` it may have ``context`` and ``question``. For several questions it has
    ``context`` and ``questions``, a list of mappings with ``question`` and ``answers``. A row may also be a plain text.
    Its reference is then the full cache's own answer.

    An entry of ``methods`` is a name as `run` takes it (``"snapkv+think"``), a dict with options of its own
    (``{"method": "snapkv", "kv_ratio": 0.5}``), or a Chain, which you build from your own classes. ``settings`` are the
    options of `run`: ``kv_ratio=0.25`` (share of tokens kept), ``kv_size=[64, 128]`` (tokens kept), ``limit=20``,
    ``max_new_tokens=64``, ``prompt="chat"``. If ``data`` are rows, ``metric="rouge_l"`` chooses their score.
    A metric may also be a function of (prediction, reference) that returns a number from 0 to 1.

    Answers are stored below ``results``, as `run` stores them. If you repeat the call, only missing answers are
    measured. Raises UsageError if a setting is not possible. The error names its key and value.
    """
    _check_arguments(methods, results, settings)
    # under torch.autocast, layers would compute in another dtype than the one declared for their caches
    check_precision()
    check_is_model(model)
    check_tokenizer(tokenizer)
    folder = Path(results).expanduser()
    if callable(settings.get("metric")):
        settings["metric"] = hand_over(settings["metric"])
    # an empty text names no dataset, and is refused as rows
    if isinstance(data, str) and data:
        dataset = data
    else:
        # rows have no metric of their own; the user's settings replace these defaults
        settings = {"metric": "f1", "max_new_tokens": 64} | settings
        rows = list(_read_rows(data, model, tokenizer, settings))
        dataset = "file"
        settings["path"] = _store_rows(rows, folder / "prompts")
    entries, names = _list_entries(methods)
    # take the same path as the command line, so that equal settings give equal ids of cells. A configuration needs a
    # method, so a list of chains alone is configured with the full cache, which every run measures
    run_settings = {"method": names or "full", "dataset": dataset, "results": folder} | settings
    request = words.request(run_settings)
    cfg = config.parse(request, methods=entries or ["full"])
    # chains of the user's own stages have no name in the configuration
    given_chains = tuple(ChainConfig(method, method.name) for method in methods if isinstance(method, Chain))
    cfg = replace(cfg, chains=cfg.chains + given_chains)
    # a run may set PyTorch's number of threads, which a notebook keeps
    threads = torch.get_num_threads()
    try:
        return experiment.measure(_plan_run(cfg, model, tokenizer), quiet=not progress)
    finally:
        torch.set_num_threads(threads)


def _check_arguments(methods: object, results: object, settings: Mapping[str, object]) -> None:
    """Raise UsageError for an argument of ``compare`` that is not possible.

    ``methods`` is a list of names, of dicts with the key ``method``, and of chains.
    """
    if isinstance(methods, str) or not isinstance(methods, Sequence):
        raise UsageError(f"methods={methods!r} is not possible: a list, as ['snapkv', 'h2o']")
    for method in methods:
        is_dict = isinstance(method, Mapping) and isinstance(method.get("method"), str)
        if not (is_dict or isinstance(method, (str, Chain))):
            raise UsageError(
                f"the entry {method!r} of methods is not possible: a name, as 'snapkv+think', a dict, as "
                "{'method': 'snapkv', 'kv_size': 512}, or a Chain"
            )
    for key, value in settings.items():
        # the loaded model's dtype and device are facts; a setting could only contradict them
        if key == "device" or key in LOADED:
            raise UsageError(f"{key}={value!r} is not possible: the model is loaded already")
    is_folder = isinstance(results, (str, Path)) and bool(str(results)) and "\0" not in str(results)
    check("results", results, is_folder, "a folder")


def _list_entries(
    methods: Sequence[MethodEntry | Chain],
) -> tuple[list[MethodEntry], list[str]]:
    """Return (entries, names) of the methods that are no chains. A text may name several methods, with commas.

    An entry has a dict's options, a name does not.
    """
    entries: list[MethodEntry] = []
    names: list[str] = []
    for method in methods:
        if isinstance(method, str):
            entries += split_list(method)
            names += split_list(method)
        elif isinstance(method, Mapping):
            entries.append(method)
            names.append(method["method"])
    return entries, names


def _read_rows(
    data: Iterable[Row], model: PreTrainedModel, tokenizer: Any, settings: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield each row as the dataset ``file`` reads it. A plain text is answered by the model, with the full cache.

    settings: the settings of the run, with ``max_new_tokens``.

    Raises UsageError for data that are no rows, and for a row without a prompt.
    """
    # the answers to plain texts need it here, before the configuration checks it
    max_new_tokens = settings["max_new_tokens"]
    is_count = is_whole(max_new_tokens) and max_new_tokens >= 1
    check("max_new_tokens", max_new_tokens, is_count, "a whole number, 1 or more")
    stop_settings = {key: settings[key] for key in ("stop", "model.stop") if key in settings}
    stop_texts: Any = words.request(stop_settings).values.get("model.stop", ())
    texts = StopTexts(ModelConfig(name="", path="", stop=stop_texts).stop, tokenizer)
    # one id or a list of ids, or None for a model without an end token
    end_ids = getattr(model.generation_config, "eos_token_id", None)
    stop_ids = []
    if end_ids is not None:
        stop_ids = torch.as_tensor(end_ids).flatten().tolist()
    ending = Ending(max_new_tokens, stop=frozenset(stop_ids), texts=texts)
    for number, row in enumerate(_list_rows(data)):
        if isinstance(row, str):
            try:
                reference = _answer_in_full(model, tokenizer, row, ending)
            # tokenizers raise one of these errors for half of a surrogate pair
            except (TypeError, UnicodeEncodeError):
                raise UsageError(f"row {number} of data cannot be encoded: {row[:40]!r}") from None
            yield {"id": str(number), "prompt": row, "answers": [reference]}
        elif isinstance(row, Mapping) and any(row.keys() >= set(keys) for keys in ROWS):
            # a row's own id takes precedence over its number. Tables fill what a row lacks with None or NaN
            yield {"id": str(number)} | {key: value for key, value in row.items() if not _is_missing(value)}
        else:
            content = ", ".join(map(str, row)) if isinstance(row, Mapping) else repr(row)
            raise UsageError(
                f"row {number} of data has {content}: a row is a text, or a mapping with answers and a prompt, with "
                "answers, a context and a question, or with a context and questions"
            )


def _list_rows(data: Any) -> Iterable[Any]:
    """Return the rows of ``data``. Raises UsageError for data that have no rows, or no order of them."""
    # a DataFrame yields the names of its columns, and none of these packages is imported for this
    if hasattr(data, "columns") and hasattr(data, "to_dict"):
        if hasattr(data, "to_dicts"):
            return data.to_dicts()  # polars
        return data.to_dict("records")  # pandas
    if hasattr(data, "to_pylist"):
        return data.to_pylist()  # pyarrow
    if isinstance(data, (set, frozenset)):
        raise UsageError(f"data is a {type(data).__name__}, which has no order: give a list of rows")
    if isinstance(data, (str, bytes, Mapping)) or not isinstance(data, Iterable):
        raise UsageError(
            f"data is {type(data).__name__}: give the name of a dataset, a list of rows (one row: [row]) or a DataFrame"
        )
    return data


def _is_missing(value: object) -> bool:
    return value is None or (isinstance(value, float) and isnan(value))


def _answer_in_full(model: PreTrainedModel, tokenizer: Any, text: str, ending: Ending) -> str:
    # [tokens] of the plain text, without a template
    ids = torch.tensor(tokenize_text(tokenizer, text, special=True))
    # a chain without stages is the full cache
    caches = prefill_chains(model, ids, [Chain()])
    (answer,) = decode.generate_rows(model, caches, [ending])
    kept, rest = ending.cut(answer.tokens)
    return str(tokenizer.decode(kept, skip_special_tokens=True)) + rest


def _make_list(value: Any) -> Any:
    """Return an array, in which some tables hold a list of answers, as a list. Raises TypeError for other values."""
    if not hasattr(value, "tolist"):
        raise TypeError(f"{type(value).__name__} {value!r} is no text")
    return value.tolist()


def _store_rows(rows: Sequence[Mapping[str, Any]], folder: Path) -> Path:
    """Write the rows as JSON lines to rows.jsonl in a folder named by their digest. `run dataset=file` reads it."""
    try:
        # json raises TypeError for values that JSON cannot express, such as dates
        lines = [json.dumps(row, ensure_ascii=False, default=_make_list) for row in rows]
    except TypeError as error:
        raise UsageError(f"a row of data is not possible: {error}") from None
    for number, line in enumerate(lines):
        # JSON may hold half of a surrogate pair, but no UTF-8 file can
        if has_half_pair(line):
            raise UsageError(f"row {number} of data holds half a surrogate pair, which is not text: {line[:60]!a}")
    text = "".join(line + "\n" for line in lines)
    # equal rows have one path, so that a second call finds the answers of the first
    path = folder / hashlib.sha256(text.encode()).hexdigest()[:16] / "rows.jsonl"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise disk_error(error, path) from None
    return path


def _plan_run(cfg: RunConfig, model: PreTrainedModel, tokenizer: Any) -> RunPlan:
    # transformers keeps here the name or folder that a model was loaded from
    name = str(getattr(model.config, "_name_or_path", "")) or type(model).__name__
    # the last part of a folder's path names the model
    if Path(name).is_dir():
        name = Path(name).name
    dtype = str(model.dtype).removeprefix("torch.")
    cfg = replace(cfg, model=replace(cfg.model, name=name, path=name, dtype=dtype), device=str(model.device))
    fingerprint = digest_weights(model)[:16]
    source = ModelSource(location=name, revision=None, config=model.config, fingerprint=fingerprint)
    return plan_run(cfg, source, tokenizer, ResultStore(Path(cfg.results).expanduser()), model)
