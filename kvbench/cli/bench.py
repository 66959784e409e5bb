"""bench: what methods cost, measured here: memory by the byte, and papers' own arithmetic about it."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvbench.cli.rewrite import rewrite, split_list, top_level
from kvbench.errors import UsageError, unknown

if TYPE_CHECKING:
    from kvbench.config import RunConfig
    from kvbench.shape import Shape

EXAMPLES = """examples:
  python -m kvbench bench memory
  python -m kvbench bench memory model=llama2-7b method=full,snapkv+think,kivi n=512,4096 kv_size=128
  python -m kvbench bench memory model=llama3-70b-instruct method=snapkv+think n=131072 --formula
  python -m kvbench bench memory method=h2o,h2o+think kv_size=128,512 match=bytes n=1024
  python -m kvbench bench memory paper=think/7
  python -m kvbench bench memory paper=all --json

memory prints, for each method (default: all, and a few chains) and each prompt size n= (default 512,4096), the bytes
of real caches beside the formula. Layers have the shape of the model in conf/model (default tiny), which need not be
there, are filled with random numbers and compressed by the same code as in runs.

keys: model=, method=, n=, any knob of a method (kv_size=, ratio=, bits=, ...), per=, preset=, match=, reference=,
dtype=fp16|bf16|fp32 (default fp16; tiny fp32). paper=think/7|think|kivi|flexgen|qhitter|uncomp|refreekv|all prints
what papers say about memory, computed again.

Peaks and resident memory of whole processes are measured by benchmarks of their own (make bench-memory,
make bench-resident)."""
SIZES = "512,4096"
KEYS = ("per", "match", "reference", "threads")
DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}


def arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("what", choices=("memory",), help="what to measure")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="which methods, shapes and prompt sizes")
    parser.add_argument("--formula", action="store_true", help="build nothing, print the formulas alone")
    parser.add_argument("--json", action="store_true", help="print the result as JSON on stdout")


def main(args: argparse.Namespace) -> int:
    """Print the tables; the status is 1 if bytes held differ from a formula."""
    given = dict(o.partition("=")[::2] for o in args.overrides)
    if "paper" in given:
        return _paper(given, args.json)
    sizes = [_size(n) for n in split_list(given.get("n", SIZES))]
    from kvbench import config
    from kvbench.bench import account

    rest = [_alias(o) for o in args.overrides if o.partition("=")[0] != "n"]
    if "method" not in given:
        rest.append(f"method={','.join(account.default_methods())}")
    _refuse_keys(given)
    results = [
        _measure(config.parse(config.compose_config(overrides)), sizes, not args.formula, args.json)
        for overrides in rewrite(rest).runs
    ]
    if args.json:
        print(json.dumps(results[0] if len(results) == 1 else results, indent=1, ensure_ascii=False))
    return 0 if all(row["agrees"] in (True, None) for r in results for row in r["rows"]) else 1


def _measure(cfg: RunConfig, sizes: list[int], build: bool, quiet: bool) -> dict[str, Any]:
    """The rows of one model at all prompt sizes, printed as they are ready unless ``quiet``."""
    import torch

    from kvbench import match
    from kvbench.bench import account

    shape = shape_of(cfg)
    tiny = cfg.model.path == "embedded:tiny"
    name = cfg.model.dtype if cfg.model.dtype != "auto" else "float32" if tiny else "float16"
    dtype = getattr(torch, name)
    if cfg.threads is not None:
        torch.set_num_threads(cfg.threads)
    label = cfg.model.name if cfg.model.name != "hf" else cfg.model.path
    if not quiet:
        print(f"{label}: {shape}; {name}\n")
    rows, found = [], []
    for n in sizes:
        settled, matched = match.settle(cfg, shape, dtype.itemsize, n)
        mine = [account.account(c, shape, n, dtype, build) for c in settled.chains]
        rows += [r.as_json() for r in mine]
        found += [{"n": n, **asdict(m)} for m in matched]
        if not quiet:
            print(account.render(mine, [str(m) for m in matched]))
    return {"model": label, "shape": asdict(shape), "dtype": name, "rows": rows, "matched": found}


def shape_of(cfg: RunConfig) -> Shape:
    """The shape in conf/model, else the checkpoint's."""
    from kvbench.shape import from_config, from_entry

    if cfg.model.shape is not None:
        return from_entry(cfg.model.shape)
    from kvbench.model import load

    return from_config(load.locate(cfg.model).config)


def _paper(given: dict[str, str], as_json: bool) -> int:
    from kvbench.bench import figures

    if set(given) != {"paper"}:
        other = next(k for k in given if k != "paper")
        raise UsageError(f"{other}={given[other]} is not possible with paper=: a paper's figures have no knobs")
    found = figures.of(given["paper"])
    print(json.dumps([f.as_json() for f in found], indent=1, ensure_ascii=False) if as_json else figures.render(found))
    return 0


def _size(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise UsageError(f"n={text} is not possible: prompt sizes in tokens, whole numbers, as in n={SIZES}")
    return int(text)


def _alias(override: str) -> str:
    key, sign, value = override.partition("=")
    return f"{key}={DTYPES.get(value, value)}" if sign and key in ("dtype", "model.dtype") else override


def _refuse_keys(given: dict[str, str]) -> None:
    """Refuse what belongs to runs: nothing is read, answered or stored here."""
    groups = ("dataset", "prompt")
    for key in given:
        if key in groups or (key in top_level() and key not in KEYS) or key.partition(".")[0] in groups:
            raise unknown("key of bench memory", key, ("model", "method", "n", "paper", "preset", "dtype", *KEYS))
