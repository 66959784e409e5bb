"""plot: a figure, of a model's activations or of measured results, computed and drawn, or drawn again from its CSV."""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from kvbench.base.conf import top_level
from kvbench.base.errors import UsageError
from kvbench.plan import words
from kvbench.plan.keys import Key, divide, whole, whole_number
from kvbench.plan.words import RunRequest, split_list


def _numbers(name: str, kind: str, allowed: Collection[int] | None = None) -> Key:
    """Return a key of whole numbers separated by commas, each one of ``allowed`` if that is given."""

    def read(text: str) -> tuple[int, ...]:
        numbers = [whole_number(part, least=0) for part in split_list(text)]
        if allowed is not None and not set(numbers) <= set(allowed):
            raise ValueError(text)
        return tuple(dict.fromkeys(numbers))

    return Key(name, read=read, allowed=f"{kind}, separated by commas")


OWN = {
    key.name: key
    for key in (
        whole("samples", 1),
        whole("tokens", 2),
        whole("top", 1),
        _numbers("layers", "layer numbers"),
        _numbers("heads", "head numbers"),
        _numbers("bits", "1, 2, 3, 4 or 8", (1, 2, 3, 4, 8)),
        Key("text"),
    )
}
"""The keys that are not a run's."""
TAKES = ("limit", "results", "max_length", "threads", "device")
NOT_OF_FIGURES = ("match", "reference")
OF_METHODS = ("method", "preset", "per", "kv_size", "kv_ratio")
"""The keys that name one's own methods, for the figures that take them."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    parser.add_argument("overrides", nargs="*", metavar="ID | key=value", help="figures, model, and what it reads")
    parser.add_argument("--from-csv", metavar="FILE", help="draw again from a figure's CSV, without a model")
    parser.add_argument("--stored", action="store_true", help="measure nothing, draw what is in the store")


def main(args: argparse.Namespace) -> int:
    """Draw the figures asked for."""
    names, options = divide(args.overrides)
    if args.from_csv is not None:
        records = [_redraw(Path(args.from_csv), names, options)]
    elif names == ["list"] and not options:
        records = []
        _print_list(args.json)
    elif not names:
        raise UsageError("plot needs a figure, as in: python -m kvbench plot uncomp/fig1 (all: plot list)")
    else:
        records = _draw_figures(names, options, args.json, args.stored)
    if args.json and records:
        print(json.dumps(records, indent=1, ensure_ascii=False))
    elif records:
        print("\n\n".join(_describe(m) for m in records))
    return 0


def _draw_figures(names: list[str], options: dict[str, str], quiet: bool, stored: bool) -> list[dict[str, Any]]:
    if options.get("output") == "":
        raise UsageError("output= is empty: give a folder")
    figure_keys = {key: OWN[key].value(options) for key in options if key in OWN}
    if figure_keys.get("text") == "":
        raise UsageError("text= is empty: give a text file")
    from kvbench.papers.figures import registry

    figures = registry.of(names)
    own = "method" in options and all(f.own for f in figures)
    for key in options:
        if key in OF_METHODS and not own:
            own_takers = ", ".join(f.id for f in registry.FIGURES.values() if f.own)
            raise UsageError(
                f"{key}= is not possible here: figures say themselves what is run. {own_takers} take methods of your "
                "own, as in method=snapkv,h2o kv_ratio=0.5,0.25"
            )
        if key in {*NOT_OF_FIGURES, *top_level()} - {*TAKES, *OF_METHODS}:
            raise UsageError(f"{key}= is not possible: a figure says itself what is read and run, it takes no {key}=")
    if "text" in figure_keys and "dataset" in options:
        raise UsageError("text= and dataset= are two ways to say what is read: give one of them")
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
    plain = [f"{key}={value}" for key, value in options.items() if key not in figure_keys and key != "output"]
    models = split_list(options.get("model", ""))
    if len(models) > 1:
        raise UsageError(f"plot draws one model at a time, not {len(models)}: give model= one name")
    records = []
    if of_activations:
        request = words.read([*plain, "method=full"]).runs[0]
        records = _draw_activations(of_activations, request, options, figure_keys, quiet)
    return records + _draw_results(of_results, plain, options, quiet, stored)


def _takes(figure: Any, key: str) -> bool:
    """Return True if the figure takes ``key``, one of the keys that runs do not have."""
    return key in figure.knobs or (key in ("text", "samples") and figure.sweeps is None)


def _draw_results(
    figures: Sequence[Any], arguments: Sequence[str], options: Mapping[str, str], quiet: bool, stored: bool
) -> list[dict[str, Any]]:
    """Draw figures of measured cells. Missing cells are measured first, unless ``stored``."""
    from kvbench.papers.figures import measured
    from kvbench.papers.figures.place import Place
    from kvbench.papers.spec import stand_ins

    results = options.get("results", str(top_level()["results"]))
    ready = [(figure, measured.prepare(figure, arguments)) for figure in figures]
    records = []
    for figure, source in ready:
        if not stored:
            source.measure(quiet)
        data = figure.compute(source)
        if data.empty:
            raise UsageError(f"{figure.id}: nothing of it is in {results}; leave out --stored to measure it")
        model = options.get("model", stand_ins.MODEL) if figure.sweeps else ""
        facts = source.facts()
        paths, finding = figure.write(data, facts, Place.of(options, results, model).folder(figure, facts))
        records.append(_record(figure.captioned(facts), paths, finding))
    return records


def _draw_activations(
    figures: Sequence[Any], request: RunRequest, options: dict[str, str], figure_keys: dict[str, Any], quiet: bool
) -> list[dict[str, Any]]:
    """Draw figures of a model's activations while it reads."""
    from kvbench.base.progress import progress
    from kvbench.papers.figures import source
    from kvbench.papers.figures.place import Place
    from kvbench.papers.figures.reading import Reading
    from kvbench.plan import config

    cfg = config.parse(request)
    origin = source.locate(
        cfg, "dataset" in options, figure_keys.get("text"), figure_keys.get("samples"), figure_keys.get("tokens")
    )
    place = Place.of(options, cfg.results, cfg.model.name)
    records = []
    for figure in figures:
        prompts = origin.prompts(figure)
        knobs = {k: figure_keys.get(k, default) for k, default in figure.knobs.items()}
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
        facts = {**origin.facts(prompts, knobs.get("tokens")), **texts}
        paths, finding = figure.write(data, facts, place.folder(figure, facts))
        records.append(_record(figure, paths, finding))
    return records


def _redraw(path: Path, names: list[str], options: dict[str, str]) -> dict[str, Any]:
    wrong = [*names, *(f"{key}={value}" for key, value in options.items() if key not in ("results", "output"))]
    if wrong:
        raise UsageError(
            f"--from-csv draws what the file says, and takes only results=FOLDER or output=FOLDER, not {wrong[0]}"
        )
    from kvbench.papers.figures import place, registry
    from kvbench.papers.figures.figure import facts_of, read_csv

    name, text = read_csv(path)
    (figure,) = registry.of([name])
    stem = place.redrawn(figure, path, text, options.get("results", ""), options.get("output", ""))
    paths, finding = figure.redraw(text, stem)
    return _record(figure.captioned(facts_of(text)), paths, finding)


def listing() -> list[dict[str, Any]]:
    """Return every figure as plain data: its id, what it shows, the paper's finding, and its knobs."""
    from kvbench.papers.figures import declared

    texts = ("shows", "claim", "unsaid")
    return [
        {"id": name, "about": e["title"], **{key: e[key] for key in texts}, "takes": list(e.get("knobs", {}))}
        for name, e in declared().items()
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


def _describe(record: dict[str, Any]) -> str:
    parts = ((record["id"], " ".join(record["files"])), ("here", record["finding"]), ("paper", record["claim"]))
    return "\n".join(
        fill(
            text,
            100,
            initial_indent=f"{name}: ",
            subsequent_indent="  ",
            break_long_words=False,
            break_on_hyphens=False,  # a path stays whole
        )
        for name, text in (*parts, ("open", record["unsaid"]))
        if text
    )
