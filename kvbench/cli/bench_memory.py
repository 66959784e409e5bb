"""bench memory: the bytes that methods hold."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, TypedDict

from kvbench.base.errors import UsageError
from kvbench.cli.verbs import load_plugin
from kvbench.plan import words
from kvbench.plan.keys import Key, parse_pairs, whole_number
from kvbench.plan.words import split_list

if TYPE_CHECKING:
    from kvbench.kv.model_shape import Shape
    from kvbench.plan.config import RunConfig


def _read_sizes(text: str) -> list[int]:
    """Return the prompt sizes of a text that separates them by commas."""
    return [whole_number(part, least=1) for part in split_list(text)]


SIZES = Key("n", "512,4096", read=_read_sizes, allowed="prompt sizes in tokens, whole numbers, as in n=512,4096")
KEYS = ("per", "match", "reference", "threads")
"""The keys of runs that ``bench memory`` takes, too, besides models, methods and their knobs."""


def main(args: argparse.Namespace) -> int:
    """Print the bytes that methods hold, a table for each prompt size. Return exit status 1 if a formula differs."""
    options = parse_pairs(args.overrides)
    if "paper" in options:
        # the papers' own arithmetic needs none of this verb's keys
        return load_plugin("bench", "paper")(options, args.json)
    sizes = SIZES.value(options)
    from kvbench.bench import memory_table, request
    from kvbench.plan import config

    # n= is this verb's own key: a run has no prompt sizes, and its words are those that remain
    run_words = [request.with_full_dtype(word) for word in args.overrides if not word.startswith("n=")]
    if "method" not in options:
        run_words.append(f"method={','.join(memory_table.list_default_methods())}")
    # the keys that an error may propose in place of a mistyped one
    known_keys = ["model", "method", "n", "paper", "preset", "dtype"]
    known_keys += KEYS
    request.refuse_keys("memory", options, KEYS, known_keys)
    results = []
    for run in words.read(run_words):
        cfg = config.parse(run)
        results.append(_measure_model(cfg, sizes, build=not args.formula, quiet=args.json, named="method" in options))
    if args.json:
        # one model's result stands alone, without a list around it
        content = results[0] if len(results) == 1 else results
        print(json.dumps(content, indent=1, ensure_ascii=False))
    for result in results:
        # None: with --formula nothing was built to compare
        if any(row["agrees"] not in (True, None) for row in result["rows"]):
            return 1
    return 0


class MemoryResult(TypedDict):
    """The rows of one model, as ``--json`` prints them.

    shape: the model's numbers of layers, heads and channels.
    rows: the bytes of one method at one prompt size each, by the names of the table's columns.
    matched: the budgets that were chosen so that methods hold equal bytes, with the prompt size ``n``.
    """

    model: str
    shape: dict[str, object]
    dtype: str
    rows: list[dict[str, object]]
    matched: list[dict[str, object]]


def _measure_model(cfg: RunConfig, sizes: Sequence[int], build: bool, quiet: bool, named: bool) -> MemoryResult:
    """Return the rows of one model at all prompt sizes. Print each table once it is ready, unless ``quiet``.

    build: whether caches are built and their bytes compared with the formulas.
    named: whether the user has named the methods. Methods that have no meaning on the model's cache are then refused,
        and left out otherwise.
    """
    import torch

    from kvbench.base.progress import progress
    from kvbench.bench import architecture, memory_table
    from kvbench.plan import equal_memory
    from kvbench.store.labels import explain_budgets

    shape = architecture.shape_of(cfg.model)
    dtype_name = _choose_dtype(cfg)
    dtype = getattr(torch, dtype_name)
    left_out = _list_meaningless(cfg, shape, refuse=named)
    cfg = replace(cfg, chains=tuple(entry for entry in cfg.chains if entry.chain.name not in left_out))
    if cfg.threads is not None:
        torch.set_num_threads(cfg.threads)
    if not quiet:
        print(f"{cfg.model_name}: {shape}; {dtype_name}\n")
    rows: list[dict[str, object]] = []
    matches: list[dict[str, object]] = []
    for n in sizes:
        # budgets of equal bytes differ with the size of the prompt
        matched_cfg, matched = equal_memory.match_budgets(cfg, shape, n)
        accounts = []
        with progress({f"{n} tokens": len(matched_cfg.chains)}, quiet, "methods") as tick:
            for chain in matched_cfg.chains:
                accounts.append(memory_table.make_account(chain, shape, n, dtype=dtype, build=build))
                tick(f"{n} tokens", 1)
        rows += [account.as_json() for account in accounts]
        matches += [{"n": n} | asdict(match) for match in matched]
        if not quiet:
            notes = [str(match) for match in matched]
            notes += explain_budgets(account.method for account in accounts)
            if shape.note is not None:
                notes.append(shape.note)
            if left_out:
                notes.append(f"Left out, because they cannot work on this model's cache: {', '.join(left_out)}.")
            print(memory_table.render(accounts, notes))
    return {"model": cfg.model_name, "shape": asdict(shape), "dtype": dtype_name, "rows": rows, "matched": matches}


def _choose_dtype(cfg: RunConfig) -> str:
    """Return the name of PyTorch's number type in which bytes are counted."""
    if cfg.model.dtype != "auto":
        return cfg.model.dtype
    # the papers' models are served in half precision, whatever this machine would run them in
    return "float32" if cfg.model.path == "embedded:tiny" else "float16"


def _list_meaningless(cfg: RunConfig, shape: Shape, refuse: bool) -> list[str]:
    """Return the names of a run's methods that have no meaning on a cache of this shape.

    refuse: True to raise UsageError for the first such method instead.
    """
    names: list[str] = []
    for entry in cfg.chains:
        try:
            entry.chain.check_shape(shape)
        except UsageError:
            if refuse:
                raise
            names.append(entry.chain.name)
    return names
