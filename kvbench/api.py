"""The Python interface: read a prompt once, compress it by several methods, generate from all of them.

model, tokenizer = kvbench.load_model("tiny")
ids = tokenizer("the magic number of paris is 471.", return_tensors="pt").input_ids
full, small = kvbench.prefill(model, ids, ["full", "snapkv+think"], kv_ratio=0.5)
answers = kvbench.generate(model, [full, small], max_new_tokens=8)
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.base.conf import check, entries, is_whole
from kvbench.base.errors import KvbenchError, UsageError, headline
from kvbench.engine import decode
from kvbench.engine.calibration.session import Session
from kvbench.engine.hf_cache import TransformersCache
from kvbench.engine.limits import check_precision, read_token_count, warn_beyond_context
from kvbench.engine.memory import is_out_of_memory
from kvbench.engine.prefill import prefill_chains, prepare_ids
from kvbench.engine.stopping import Ending
from kvbench.engine.weights_digest import check_calibrated, digest_weights
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.prompt_cache import PromptCache
from kvbench.methods.core.resolve import chains_of
from kvbench.models import traits
from kvbench.models.interface import TURN
from kvbench.models.load import EMBEDDED
from kvbench.plan import presets

Entry = str | Mapping[str, Any] | Chain
"""A method as callers name it (see ``prefill``)."""
P = ParamSpec("P")
R = TypeVar("R")


def _in_turn(function: Callable[P, R]) -> Callable[P, R]:
    """Return ``function`` with the guards of the Python interface.

    Calls from several threads run one after another, since each sets the one attention that is registered with
    transformers. Under torch.autocast they raise UsageError. Running out of memory becomes a KvbenchError.
    """

    @functools.wraps(function)
    def in_turn(*args: P.args, **kwargs: P.kwargs) -> R:
        check_precision()
        try:
            with TURN:
                return function(*args, **kwargs)
        except Exception as error:
            if is_out_of_memory(error):
                raise KvbenchError(f"{function.__name__} ran out of memory: {headline(error)}") from error
            raise

    return in_turn


@_in_turn
def prefill(
    model: PreTrainedModel,
    input_ids: Tensor | Sequence[int],
    methods: Sequence[Entry],
    preset: str | None = None,
    tokenizer: Any = None,
    **knobs: Any,
) -> list[PromptCache]:
    """Read one prompt once and compress its cache by each method. Return one cache per entry, in order.

    input_ids: one unpadded prompt, [n] or [1, n].
    methods: the entries. Each is a string such as ``"snapkv+think"``, a dict such as
    ``{"method": "snapkv", "kv_size": 512}``, or a Chain.
    preset: a preset of conf/preset, such as ``"think"``. Its options, ``per`` included, replace the defaults. Its
    prompt format is not applied. If the preset has other values for one model, the model is recognised by its hub id.
    tokenizer: needed by methods that add words of their own (``kvzip instruction=plain``).
    knobs: options for all entries that have them: ``kv_ratio=0.5`` (share of tokens kept), ``ratio=0.4`` (share of
    channels removed), ``per="query_head"``, ``**{"snapkv.window": 16}``. An option that no entry has is an error.

    ``prefill`` sets an attention function of kvbench in the model, and restores the model's own at the end.
    """
    if isinstance(methods, str) or not isinstance(methods, Sequence):
        raise UsageError(f"methods={methods!r} is not possible: a list of entries, as ['full', 'snapkv+think']")
    model_traits = traits.of_model(model)
    if model_traits.note:
        # stacklevel 3 names the caller's line: level 2 is that of the wrapper ``in_turn``
        warnings.warn(model_traits.note, stacklevel=3)
    if tokenizer is not None:
        traits.check_tokenizer(tokenizer)
    chains = _resolve_chains(model, methods, preset, knobs)
    ids = prepare_ids(model, input_ids)
    warn_beyond_context(model, len(ids), stacklevel=3)
    return prefill_chains(model, ids, chains, tokenizer=tokenizer, model_traits=model_traits)


def _resolve_chains(
    model: PreTrainedModel, methods: Sequence[Entry], preset: str | None, knobs: Mapping[str, object]
) -> list[Chain]:
    """Return the chain of each entry. An entry that is a chain is returned as it is.

    preset, knobs: as in ``prefill``. ``knobs`` are for all entries that are no chains yet.

    Raises UsageError for an unknown method or preset, and for a knob that no entry has.
    """
    check("preset", preset, preset is None or isinstance(preset, str), "the name of an entry of conf/preset")
    preset_values: dict[str, object] = {}
    if preset is not None:
        preset_values = dict(presets.values(preset, _find_model_entry(model)))
    # all entries are resolved together: a knob is an error only if no entry owns it
    entries_to_resolve = [entry for entry in methods if not isinstance(entry, Chain)]
    if knobs and methods and not entries_to_resolve:
        names = ", ".join(f"{name}=" for name in knobs)
        raise UsageError(f"{names} is not possible: a Chain has its options already. Make the Chain with them")
    try:
        resolved_chains = iter(chains_of(entries_to_resolve, knobs, preset_values))
    except UsageError as error:
        raise presets.explain(error, preset) from None
    chains = []
    for entry in methods:
        # the resolved chains are in the order of their entries
        chains.append(entry if isinstance(entry, Chain) else next(resolved_chains))
    return chains


def _find_model_entry(model: PreTrainedModel) -> str:
    """Return the name of the entry of conf/model with the model's hub id, or '' if there is none."""
    # transformers stores the argument of from_pretrained here
    path = str(getattr(model.config, "_name_or_path", ""))
    for name, entry in entries("model").items():
        if entry["path"] == path:
            return name
    return ""


@_in_turn
def generate(
    model: PreTrainedModel,
    caches: Sequence[PromptCache],
    max_new_tokens: int,
    eos_token_id: int | Sequence[int] | Tensor | None = None,
) -> list[list[int]]:
    """Return greedy continuations, one list of token ids per cache, in order.

    max_new_tokens: the largest number of tokens in a continuation.
    eos_token_id: the id, or ids, of end-of-sequence tokens. With None, all ``max_new_tokens`` are generated.

    A continuation starts with the token that the prompt's prefill predicts. If an end-of-sequence token is generated,
    the continuation ends with this token, as with ``model.generate``. All caches are answered in one batch, except
    those of methods that change the model, such as Palu. The caches are not changed and can be used again.
    """
    new_tokens = read_token_count("max_new_tokens", max_new_tokens)
    if not isinstance(caches, Sequence) or not all(isinstance(entry, PromptCache) for entry in caches):
        raise UsageError(f"caches={caches!r} is not possible: a list of what prefill returned, as [full, small]")
    stop = _read_end_tokens(eos_token_id)
    # chains of one key run the same model: those that change its weights or projections cannot share a batch
    rows_by_key: dict[str, list[int]] = {}
    for i, prompt_cache in enumerate(caches):
        rows_by_key.setdefault(prompt_cache.chain.prefill_key, []).append(i)
    outputs: list[list[int]] = [[] for _ in caches]
    for rows in rows_by_key.values():
        batch = [caches[i] for i in rows]
        for prompt_cache in batch:
            decode.check_continuation(model, prompt_cache, new_tokens)
            # a rolled chain gives new tokens the positions of slots: any text stays within the model's context
            if not prompt_cache.chain.rolled:
                warn_beyond_context(model, prompt_cache.seen + new_tokens, stacklevel=3)
        endings = [Ending(new_tokens, stop)] * len(batch)
        answers = decode.generate_rows(model, batch, endings)
        for i, answer in zip(rows, answers, strict=True):
            outputs[i] = answer.tokens
    return outputs


def _read_end_tokens(eos_token_id: Any) -> frozenset[int]:
    """Return the ids that end an answer. Raises UsageError for a value that is neither an id nor a list of ids."""
    if eos_token_id is None:
        return frozenset()
    # model.generate takes an id, a list of ids and a tensor of ids
    try:
        ids = torch.as_tensor(eos_token_id).flatten().tolist()
    except (TypeError, ValueError, RuntimeError):
        # None is no id, so the check below refuses the value
        ids = [None]
    if not all(map(is_whole, ids)):
        raise UsageError(f"eos_token_id={eos_token_id!r} is not possible: a token's id, or a list of ids")
    return frozenset(ids)


@_in_turn
def calibrate(
    model: PreTrainedModel,
    tokenizer: Any,
    method: Entry,
    folder: str | Path = "results/calibration",
    text: str | Path | None = None,
    data: str | Path | None = None,
    preset: str | None = None,
    **knobs: Any,
) -> Chain:
    """Measure the statistics of this model that the method needs, and return the method with these statistics.

    The returned method can stand in the list ``methods`` of ``prefill``.

    method: an entry as in ``prefill``.
    folder: the folder of calibrations. The first call stores the statistics there, and later calls read them.
    text: a text file from which the statistics are measured. By default this is WikiText-2's train split, and for the
    tiny model its own corpus.
    data: the data folder with WikiText-2. By default, the environment variable KVBENCH_DATA names it.
    preset: as in ``prefill``.
    knobs: options of the method, such as ``samples`` and ``tokens``. They are not possible if ``method`` is a Chain,
    which has its options already.

    Raises UsageError if a stored file is damaged or of another model.
    """
    check("folder", folder, isinstance(folder, (str, Path)), "a path")
    model_traits = traits.of_model(model)
    (chain,) = _resolve_chains(model, [method], preset, knobs)
    chain.check_model(model_traits)
    traits.check_tokenizer(tokenizer)
    path = Path(str(getattr(model.config, "_name_or_path", "")))
    session = Session(
        folder=Path(folder).expanduser(),
        # other weights, or other positions, need a calibration of their own
        identity={"weights": digest_weights(model), "rope": getattr(model.config, "rope_parameters", None)},
        tokenizer=tokenizer,
        context=traits.context_length(model.config),
        own_corpus=path == EMBEDDED / "tiny",
        text=str(text) if text is not None else None,
        data=str(data) if data is not None else None,
    )
    return session.bind(chain, model, quiet=True)


@_in_turn
def extend(model: PreTrainedModel, cache: PromptCache, input_ids: Tensor | Sequence[int]) -> PromptCache:
    """Return a new cache that has also read ``input_ids``, for example a later question.

    The new tokens are stored uncompressed. The exceptions are methods that quantise or drop tokens while decoding: they
    treat the new tokens as tokens of an answer.
    """
    if not isinstance(cache, PromptCache):
        raise UsageError(f"cache={cache!r} is not possible: one of those that prefill returned")
    # the cache itself stays as it is: several questions may branch from it
    extended = decode.extend_cache(model, cache, input_ids)
    # a rolled chain's positions stay within the model's context
    if not cache.chain.rolled:
        warn_beyond_context(model, extended.seen, stacklevel=3)
    return extended


@_in_turn
def cache(model: PreTrainedModel, method: Entry, preset: str | None = None, **knobs: Any) -> TransformersCache:
    """Return an empty cache of ``method`` for transformers' own ``model.generate(ids, cache=cache)``.

    transformers before 5.24 calls this argument ``past_key_values``. The prompt is read, compressed and audited as by
    ``prefill``, and greedy answers equal those of ``generate``. To continue the conversation, call ``generate`` again
    with the whole text so far, followed by the new turn. The cache may also be made inside the call.

    While a cache is open, it takes the place of the model's forward pass in passes with this cache. ``with
    kvbench.cache(...) as cache`` closes the cache at the end of the block. A cache that nothing refers to any more is
    closed, too. Closing the last cache brings the model's own forward pass back.

    The arguments are those of ``prefill``. The cache raises UsageError for batches, beams, assisted decoding, another
    model, and another prompt.
    """
    model_traits = traits.of_model(model)
    if model_traits.note:
        # stacklevel 3 names the caller's line: level 2 is that of the wrapper ``in_turn``
        warnings.warn(model_traits.note, stacklevel=3)
    (chain,) = _resolve_chains(model, [method], preset, knobs)
    chain.check_model(model_traits)
    # prefill makes the same check when it reads; here the reading waits for model.generate
    check_calibrated(chain, model)
    return TransformersCache(model, chain)
