"""plot: a figure, of a model's activations or of measured results, computed and drawn, or drawn again from its CSV."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from kvbench.conf import top_level
from kvbench.errors import UsageError
from kvbench.run import words
from kvbench.run.words import RunRequest, split_list

EXAMPLES = """examples:
  python -m kvbench plot list
  python -m kvbench plot uncomp/fig1
  python -m kvbench plot think limit=1
  python -m kvbench plot uncomp/fig2 dataset=tiny/needle,tiny/code limit=4 layers=0,5
  python -m kvbench plot qhitter/fig3 model=FOLDER_OR_HUB_ID dataset=wikitext2 bits=3
  python -m kvbench plot uncomp/fig6 text=FILE samples=6 tokens=1024
  python -m kvbench plot vatp/fig3 limit=2
  python -m kvbench plot results/budget --stored
  python -m kvbench plot needle/heatmap model=smollm2-135m-q4_1 lengths=512,1024 depths=0,50,100 repeats=1
  python -m kvbench plot --from-csv results/figures/uncomp/fig1.csv

Every figure is written as results/figures/<id>.png, .svg and .csv, the tiny model's below results/tiny/figures (another
folder than results with results=), and what the data say about the paper's finding is printed. The CSV alone makes the
same pictures again.

What figures of activations read: the tiny suite for the tiny model and WikiText-2 for others, prompts of dataset=, or
windows of text=FILE.
limit= prompts of each task, samples= windows, tokens= the first tokens of each. layers=, heads=, bits= and top= go to
the figures that have a use for them (0 is the first layer and head).

Figures of results (needle/heatmap, results/pareto, vatp/fig3, ...) are drawn from measured cells: what is missing below
results= is measured first, with limit= prompts of each task, as `run` does it, of the paper's datasets or of dataset=
with any of its options (lengths=, depths=); where each dataset has its own budget (qhitter/fig7), dataset= leaves out
the others. --stored measures nothing."""

WHOLE = {"samples": 1, "tokens": 2, "top": 1}
LISTS = {"layers": "layer numbers", "heads": "head numbers", "bits": "1, 2, 3, 4 or 8"}
TAKES = ("limit", "results", "max_length", "threads", "device")
OTHERS = ("method", "preset", "match", "reference", "per")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    parser.add_argument("overrides", nargs="*", metavar="ID | key=value", help="figures, model, and what it reads")
    parser.add_argument("--from-csv", metavar="FILE", help="draw again from a figure's CSV, without a model")
    parser.add_argument("--stored", action="store_true", help="measure nothing, draw what is in the store")
    parser.add_argument("--json", action="store_true", help="print paths and findings as JSON on stdout")


def main(args: argparse.Namespace) -> int:
    """Draw the figures asked for."""
    names = [o for o in args.overrides if "=" not in o]
    pairs = [o for o in args.overrides if "=" in o]
    if args.from_csv is not None:
        records = [_redraw(Path(args.from_csv), names, pairs)]
    elif names == ["list"] and not pairs:
        records = []
        _print_list(args.json)
    elif not names:
        raise UsageError("plot needs a figure, as in: python -m kvbench plot uncomp/fig1 (all: plot list)")
    else:
        records = _plot(names, pairs, args.json, args.stored)
    if args.json and records:
        print(json.dumps(records, indent=1, ensure_ascii=False))
    elif records:
        print("\n\n".join(_written(m) for m in records))
    return 0


def _plot(names: list[str], pairs: list[str], quiet: bool, stored: bool) -> list[dict[str, Any]]:
    keys = [p.partition("=")[0] for p in pairs]
    figure_keys = {k: _own(k, v) for k, _, v in (p.partition("=") for p in pairs) if k in (*WHOLE, *LISTS, "text")}
    for key in keys:
        if keys.count(key) > 1:
            raise UsageError(f"{key}= is given {keys.count(key)} times: give it once")
        if key in OTHERS or (key in top_level() and key not in TAKES):
            raise UsageError(f"{key}= is not possible: a figure says itself what is read and run, it takes no {key}=")
    if "text" in figure_keys and "dataset" in keys:
        raise UsageError("text= and dataset= are two ways to say what is read: give one of them")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from kvbench.papers.figures import registry

    figures = registry.of(names)
    of_results = [f for f in figures if f.sweeps is not None]
    of_activations = [f for f in figures if f.sweeps is None]
    for key in figure_keys:
        takers = [f.id for f in registry.FIGURES.values() if _takes(f, key)]
        if not any(_takes(f, key) for f in figures):
            raise UsageError(
                f"{key}= is not possible with {', '.join(f.id for f in figures)}: {', '.join(takers)} take it"
            )
    single_width = [f.id for f in figures if len(f.knobs.get("bits") or ()) == 1]
    if single_width and len(figure_keys.get("bits", ())) > 1:
        bits = ",".join(map(str, figure_keys["bits"]))
        raise UsageError(f"bits={bits} is not possible: {single_width[0]} shows one width, as bits=4")
    if stored and not of_results:
        raise UsageError(f"--stored is not possible with {names[0]}: its data are not in the store, they are computed")
    plain = [p for p in pairs if p.partition("=")[0] not in figure_keys]
    models = split_list(dict(p.partition("=")[::2] for p in plain).get("model", ""))
    if len(models) > 1:
        raise UsageError(f"plot draws one model at a time, not {len(models)}: give model= one name")
    records = []
    if of_activations:
        records = _of_activations(of_activations, words.read([*plain, "method=full"]).runs[0], keys, figure_keys, quiet)
    return records + _of_results(of_results, plain, quiet, stored)


def _takes(figure: Any, key: str) -> bool:
    """Return True if the figure uses a key that is not a run's."""
    return key in figure.knobs or (key in ("text", "samples") and figure.sweeps is None)


def _of_results(figures: Sequence[Any], pairs: Sequence[str], quiet: bool, stored: bool) -> list[dict[str, Any]]:
    """Draw figures of measured cells. Missing cells are measured first, unless ``stored``."""
    from kvbench.papers.figures import measured
    from kvbench.papers.figures.figure import folder
    from kvbench.papers.spec import stand_ins

    options = dict(p.partition("=")[::2] for p in pairs)
    results = options.get("results", str(top_level()["results"]))
    ready = [(figure, measured.prepare(figure, pairs)) for figure in figures]
    records = []
    for figure, source in ready:
        if not stored:
            source.measure(quiet)
        data = figure.compute(source)
        if data.empty:
            raise UsageError(f"{figure.id}: nothing of it is in {results}; leave out --stored to measure it")
        model = options.get("model", stand_ins.MODEL) if figure.sweeps else ""
        paths, finding = figure.write(data, source.facts(), folder(results, model))
        records.append(_record(figure, paths, finding))
    return records


def _of_activations(
    figures: Sequence[Any], request: RunRequest, keys: Sequence[str], own: dict[str, Any], quiet: bool
) -> list[dict[str, Any]]:
    """Draw figures of a model's activations while it reads."""
    from kvbench.papers.figures import source
    from kvbench.papers.figures.figure import folder
    from kvbench.papers.figures.reading import Reading
    from kvbench.progress import progress
    from kvbench.run import config

    cfg = config.parse(request)
    origin = source.locate(cfg, "dataset" in keys, own.get("text"), own.get("samples"), own.get("tokens"))
    records = []
    for figure in figures:
        prompts = origin.prompts(figure)
        knobs = {k: own.get(k, default) for k, default in figure.knobs.items()}
        with progress({figure.id: len(prompts)}, quiet, "prompts") as tick:
            reading = Reading(
                origin.model,
                prompts,
                knobs,
                lambda token: origin.tokenizer.decode([token]),
                lambda tick=tick, name=figure.id: tick(name, 1),  # type: ignore[misc]
            )
            data = figure.compute(reading)
        texts = {k: ",".join(map(str, v)) if isinstance(v, tuple) else v for k, v in knobs.items() if v is not None}
        paths, finding = figure.write(
            data, {**origin.facts(prompts, knobs.get("tokens")), **texts}, folder(cfg.results, cfg.model.name)
        )
        records.append(_record(figure, paths, finding))
    return records


def _redraw(path: Path, names: list[str], pairs: list[str]) -> dict[str, Any]:
    wrong = [*names, *(p for p in pairs if not p.startswith("results="))]
    if wrong:
        raise UsageError(f"--from-csv draws what the file says, and takes only results=FOLDER, not {wrong[0]}")
    from kvbench.papers.figures import registry
    from kvbench.papers.figures.figure import read_csv

    name, text = read_csv(path)
    (figure,) = registry.of([name])
    folder = pairs[-1].partition("=")[2] if pairs else None
    stem = Path(folder) / "figures" / figure.id if folder else path.with_suffix("")
    paths, finding = figure.redraw(text, stem)
    return _record(figure, paths, finding)


def _own(key: str, value: str) -> Any:
    """Parse the value of a key that is not a run's."""
    if key == "text":
        if not value:
            raise UsageError("text= is empty: give a text file")
        return value
    if key in WHOLE:
        if not value.isdigit() or int(value) < WHOLE[key]:
            raise UsageError(f"{key}={value} is not possible: a whole number, {WHOLE[key]} or more")
        return int(value)
    parts = split_list(value)
    from kvbench.cache.packed import BITS

    if not all(p.isdigit() and (key != "bits" or int(p) in BITS) for p in parts):
        raise UsageError(f"{key}={value} is not possible: {LISTS[key]}, separated by commas")
    return tuple(dict.fromkeys(map(int, parts)))


def listing() -> list[dict[str, Any]]:
    """Return every figure: its id, content, the paper's finding, and its knobs."""
    from kvbench.papers.figures.registry import FIGURES

    return [
        {"id": f.id, "about": f.title, "shows": f.shows, "claim": f.claim, "unsaid": f.unsaid, "takes": list(f.knobs)}
        for f in FIGURES.values()
    ]


def _print_list(as_json: bool) -> None:
    if as_json:
        print(json.dumps(listing(), indent=1, ensure_ascii=False))
        return
    for item in listing():
        print(f"{item['id']:<14} {item['about']}")
        print(f"{'':14} takes {', '.join(f'{k}=' for k in item['takes']) or 'what run takes: model=, limit=, ...'}")


def _record(figure: Any, paths: list[Path], finding: str) -> dict[str, Any]:
    return {"id": figure.id, "files": list(map(str, paths)), "shows": figure.shows, "claim": figure.claim} | {
        "unsaid": figure.unsaid,
        "finding": finding,
    }


def _written(made: dict[str, Any]) -> str:
    parts = ((made["id"], " ".join(made["files"])), ("here", made["finding"]), ("paper", made["claim"]))
    return "\n".join(
        fill(text, 100, initial_indent=f"{name}: ", subsequent_indent="  ", break_long_words=False)
        for name, text in (*parts, ("open", made["unsaid"]))
    )
