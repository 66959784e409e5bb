"""bench memory: what methods hold, by the byte, and papers' own arithmetic about it."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvbench.base.errors import UsageError
from kvbench.plan import words
from kvbench.plan.keys import Key, pairs, whole_number
from kvbench.plan.words import split_list

if TYPE_CHECKING:
    from kvbench.plan.config import RunConfig

SIZES = Key(
    "n",
    "512,4096",
    lambda text: [whole_number(n, least=1) for n in split_list(text)],
    "prompt sizes in tokens, whole numbers, as in n=512,4096",
)
KEYS = ("per", "match", "reference", "threads")


def main(args: argparse.Namespace) -> int:
    """Print the tables. Return exit status 1 if bytes held differ from a formula."""
    options = pairs(args.overrides)
    if "paper" in options:
        return _print_paper(options, args.json)
    sizes = SIZES.value(options)
    from kvbench.bench import memory_table, request
    from kvbench.plan import config

    run_words = [request.alias(o) for o in args.overrides if o.partition("=")[0] != "n"]
    if "method" not in options:
        run_words.append(f"method={','.join(memory_table.default_methods())}")
    request.refuse_keys("memory", options, KEYS, ("model", "method", "n", "paper", "preset", "dtype", *KEYS))
    results = [_measure(config.parse(run), sizes, not args.formula, args.json) for run in words.read(run_words).runs]
    if args.json:
        print(json.dumps(results[0] if len(results) == 1 else results, indent=1, ensure_ascii=False))
    return 0 if all(row["agrees"] in (True, None) for r in results for row in r["rows"]) else 1


def _measure(cfg: RunConfig, sizes: list[int], build: bool, quiet: bool) -> dict[str, Any]:
    """Return the rows of one model at all prompt sizes. Print each table once it is ready, unless ``quiet``."""
    import torch

    from kvbench.base.progress import progress
    from kvbench.bench import memory_table, request
    from kvbench.plan import equal_memory

    shape = request.shape_of(cfg)
    tiny = cfg.model.path == "embedded:tiny"
    name = cfg.model.dtype
    if name == "auto":
        name = "float32" if tiny else "float16"
    dtype = getattr(torch, name)
    if cfg.threads is not None:
        torch.set_num_threads(cfg.threads)
    if not quiet:
        print(f"{cfg.model_name}: {shape}; {name}\n")
    rows, matches = [], []
    for n in sizes:
        matched_cfg, matched = equal_memory.settle(cfg, shape, n)
        accounts = []
        with progress({f"{n} tokens": len(matched_cfg.chains)}, quiet, "methods") as tick:
            for chain in matched_cfg.chains:
                accounts.append(memory_table.account(chain, shape, n, dtype, build))
                tick(f"{n} tokens", 1)
        rows += [r.as_json() for r in accounts]
        matches += [{"n": n, **asdict(m)} for m in matched]
        if not quiet:
            print(memory_table.render(accounts, [str(m) for m in matched]))
    return {"model": cfg.model_name, "shape": asdict(shape), "dtype": name, "rows": rows, "matched": matches}


def _print_paper(options: dict[str, str], as_json: bool) -> int:
    from kvbench.papers.timed import paper_arithmetic

    if set(options) != {"paper"}:
        other = next(k for k in options if k != "paper")
        raise UsageError(f"{other}={options[other]} is not possible with paper=: a paper's figures have no knobs")
    figures = paper_arithmetic.of(options["paper"])
    plain = [f.as_json() for f in figures]
    print(json.dumps(plain, indent=1, ensure_ascii=False) if as_json else paper_arithmetic.render(figures))
    return 0
