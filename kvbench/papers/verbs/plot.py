"""plot: a figure, of a model's activations or of measured results, computed and drawn, or drawn again from its CSV."""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from textwrap import TextWrapper
from typing import TYPE_CHECKING, Any

from kvbench.base.conf import top_level
from kvbench.base.errors import UsageError
from kvbench.papers.verbs import listings
from kvbench.plan import words
from kvbench.plan.keys import Key, divide, whole, whole_number
from kvbench.plan.words import RunRequest, split_list

if TYPE_CHECKING:
    from kvbench.papers.figures.figure import Figure


def _make_numbers_key(name: str, kind: str, allowed: Collection[int] | None = None) -> Key:
    def read_numbers(text: str) -> tuple[int, ...]:
        numbers = [whole_number(part, least=0) for part in split_list(text)]
        # Key turns a ValueError into a message that says what is allowed
        if allowed is not None and not set(numbers) <= set(allowed):
            raise ValueError(text)
        # a number that is given twice is drawn once
        return tuple(dict.fromkeys(numbers))

    return Key(name, read=read_numbers, allowed=f"{kind}, separated by commas")


_OWN_KEYS = (
    whole("samples", least=1),
    whole("tokens", least=2),
    whole("top", least=1),
    _make_numbers_key("layers", "layer numbers"),
    _make_numbers_key("heads", "head numbers"),
    _make_numbers_key("bits", "1, 2, 3, 4 or 8", allowed=(1, 2, 3, 4, 8)),
    Key("text"),
)
OWN = {key.name: key for key in _OWN_KEYS}
"""The keys of ``plot`` that ``run`` does not have."""
TAKES = ("limit", "results", "max_length", "threads", "device")
"""The settings of ``run`` that figures take."""
NOT_OF_FIGURES = ("match", "reference")
"""Keys of ``run`` outside its settings that no figure takes."""
OF_METHODS = ("method", "preset", "per", "kv_size", "kv_ratio")
"""The keys that name the user's own methods and their budgets. Only some figures take them."""

Record = dict[str, Any]
"""A drawn figure, as ``--json`` prints it: its id, its files, its caption, the paper's finding (``claim``), the points
that the paper leaves open (``unsaid``), and kvbench's ``finding``."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    parser.add_argument(
        "overrides", nargs="*", metavar="ID | key=value", help="figures, model=, dataset=, and other keys"
    )
    parser.add_argument("--from-csv", metavar="FILE", help="draw again from a figure's CSV, without a model")
    parser.add_argument("--stored", action="store_true", help="measure nothing, draw stored results")


def main(args: argparse.Namespace) -> int:
    """Draw the figures that ``overrides`` name, list them, or draw one again from its CSV. Return exit status 0."""
    # words without = are ids of figures, papers, or all
    names, options = divide(args.overrides)
    if args.from_csv is not None:
        records = [_redraw(Path(args.from_csv), names, options)]
    elif names == ["list"] and not options:
        _print_list(args.json)
        return 0
    elif not names:
        raise UsageError("plot needs a figure, as in: kvbench plot uncomp/fig1 (`kvbench plot list` names all)")
    else:
        # with --json nothing but the records is printed, so no progress is shown
        records = _draw_figures(names, options, quiet=args.json, stored=args.stored)
    if args.json and records:
        print(json.dumps(records, indent=1, ensure_ascii=False))
    elif records:
        print("\n\n".join(map(_describe_figure, records)))
    return 0


def _draw_figures(names: list[str], options: dict[str, str], quiet: bool, stored: bool) -> list[Record]:
    """Draw the figures that the user named, and return a record of each. Figures of activations come first."""
    if options.get("output") == "":
        raise UsageError("output= is empty: give a folder")
    figure_keys = {key: OWN[key].value(options) for key in options if key in OWN}
    if figure_keys.get("text") == "":
        raise UsageError("text= is empty: give a text file")
    from kvbench.papers.figures import registry

    figures = registry.select_figures(names)
    of_results = [figure for figure in figures if figure.sweeps is not None]
    of_activations = [figure for figure in figures if figure.sweeps is None]
    # wrong requests are refused before a model is loaded
    _check_run_keys(figures, options)
    if "text" in figure_keys and "dataset" in options:
        raise UsageError("text= and dataset= are two ways to say what is read: give one of them")
    _check_figure_keys(figures, figure_keys)
    if stored and not of_results:
        raise UsageError(
            f"--stored is not possible with {names[0]}: its data are never stored, but computed by the model"
        )
    models = split_list(options.get("model", ""))
    if len(models) > 1:
        raise UsageError(f"plot draws one model at a time, not {len(models)}: give model= one name")
    # the other keys are those of a run
    run_options = {key: text for key, text in options.items() if key not in figure_keys and key != "output"}
    records = []
    if of_activations:
        # a run needs a method; the model reads a prompt in the same way under any of them
        request = words.request(run_options | {"method": "full"})
        records = _draw_activations(of_activations, request, options, figure_keys, quiet=quiet)
    return records + _draw_results(of_results, run_options, options, quiet=quiet, stored=stored)


def _check_run_keys(figures: Sequence[Figure], options: Mapping[str, str]) -> None:
    from kvbench.papers.figures import registry

    # the keys that name methods are allowed if all figures take methods, and ``method=`` is among the options
    takes_methods = "method" in options and all(figure.own for figure in figures)
    for key in options:
        if key in OF_METHODS:
            if not takes_methods:
                takers = ", ".join(figure.id for figure in registry.FIGURES.values() if figure.own)
                raise UsageError(
                    f"{key}= is not possible here: a figure sets it itself. Only {takers} take methods of your "
                    "own, as in method=snapkv,h2o kv_ratio=0.5,0.25"
                )
        elif (key in NOT_OF_FIGURES or key in top_level()) and key not in TAKES:
            raise UsageError(f"{key}= is not possible: each figure sets this itself")


def _check_figure_keys(figures: Sequence[Figure], figure_keys: Mapping[str, Any]) -> None:
    from kvbench.papers.figures import registry

    for key in figure_keys:
        # one figure that takes the key is enough: the others are drawn without it
        if not any(_takes_key(figure, key) for figure in figures):
            ids = ", ".join(figure.id for figure in figures)
            takers = ", ".join(figure.id for figure in registry.FIGURES.values() if _takes_key(figure, key))
            raise UsageError(f"{key}= is not possible with {ids}: {takers} take it")
    # a figure that draws only one width has one by default
    bits = figure_keys.get("bits", ())
    for figure in figures:
        if len(figure.knobs.get("bits") or ()) == 1 and len(bits) > 1:
            text = ",".join(map(str, bits))
            raise UsageError(f"bits={text} is not possible: {figure.id} shows one bit width, as in bits=4")


def _takes_key(figure: Figure, key: str) -> bool:
    # every figure of activations reads texts, whose number and source can be chosen
    return key in figure.knobs or (key in ("text", "samples") and figure.sweeps is None)


def _draw_results(
    figures: Sequence[Figure], run_options: Mapping[str, str], options: Mapping[str, str], quiet: bool, stored: bool
) -> list[Record]:
    from kvbench.papers.figures import measured
    from kvbench.papers.figures.place import choose_folder
    from kvbench.papers.spec import stand_ins

    results = options.get("results", str(top_level()["results"]))
    # all figures are planned before the first is measured
    sources = [measured.prepare(figure, run_options) for figure in figures]
    records = []
    for figure, source in zip(figures, sources, strict=True):
        if not stored:
            source.measure(quiet=quiet)
        data = figure.compute(source)
        if data.empty:
            raise UsageError(f"{figure.id}: no data of this figure in {results}. Leave out --stored to measure them")
        # a figure without sweeps is computed by formulas, for no model
        model = options.get("model", stand_ins.MODEL) if figure.sweeps else ""
        facts = source.facts()
        paths, finding = figure.write(data, facts, choose_folder(figure, facts, options, results, model))
        records.append(_record_figure(figure.captioned(facts), paths, finding))
    return records


def _draw_activations(
    figures: Sequence[Figure],
    request: RunRequest,
    options: Mapping[str, str],
    figure_keys: Mapping[str, Any],
    quiet: bool,
) -> list[Record]:
    """Draw figures of a model's activations while it reads prompts, and return a record of each."""
    from kvbench.base.progress import progress
    from kvbench.papers.figures import reading
    from kvbench.papers.figures.place import choose_folder
    from kvbench.plan import config

    cfg = config.parse(request)
    typed = {key: figure_keys.get(key) for key in ("text", "samples", "tokens")}
    origin = reading.locate(cfg, named="dataset" in options, **typed)
    records = []
    for figure in figures:
        prompts = origin.prompts(figure)
        knobs = {key: figure_keys.get(key, default) for key, default in figure.knobs.items()}
        with progress({figure.id: len(prompts)}, quiet=quiet, unit="prompts") as tick:
            source = reading.Reading(
                model=origin.model,
                prompts=prompts,
                knobs=knobs,
                decode=lambda token: origin.tokenizer.decode([token]),
                tick=partial(tick, figure.id, 1),
            )
            data = figure.compute(source)
        # the head of the CSV states where the data come from, and then the figure's knobs: several numbers as users
        # type them. A knob without a value is left out, since it is at the default that the caption states
        facts: dict[str, Any] = dict(origin.facts(prompts, knobs.get("tokens")))
        for key, value in knobs.items():
            if value is not None:
                facts[key] = ",".join(map(str, value)) if isinstance(value, tuple) else value
        folder = choose_folder(figure, facts, options, cfg.results, cfg.model.name)
        paths, finding = figure.write(data, facts, folder)
        records.append(_record_figure(figure, paths, finding))
    return records


def _redraw(path: Path, names: Sequence[str], options: Mapping[str, str]) -> Record:
    # the file says which figure of which model it is
    wrong = list(names) + [f"{key}={value}" for key, value in options.items() if key not in ("results", "output")]
    if wrong:
        raise UsageError(
            f"--from-csv draws the figure in the file. It takes only results=FOLDER or output=FOLDER, not {wrong[0]}"
        )
    from kvbench.papers.figures import place, registry
    from kvbench.papers.figures.figure import facts_of, read_csv

    name, text = read_csv(path)
    # an id names exactly one figure
    (figure,) = registry.select_figures([name])
    # the path of the pictures, without the ending
    stem = place.redrawn_path(figure, path, text, results=options.get("results", ""), output=options.get("output", ""))
    paths, finding = figure.redraw(text, stem)
    return _record_figure(figure.captioned(facts_of(text)), paths, finding)


def _print_list(as_json: bool) -> None:
    entries = listings.figures()
    if as_json:
        print(json.dumps(entries, indent=1, ensure_ascii=False))
        return
    for entry in entries:
        print(f"{entry['id']:<14} {entry['about']}")
        takes = ", ".join(f"{key}=" for key in entry["takes"])
        print(f"{'':14} takes {takes or 'the keys of run: model=, limit=, ...'}")


def _record_figure(figure: Figure, paths: Sequence[Path], finding: str) -> Record:
    texts = {"shows": figure.shows, "claim": figure.claim, "unsaid": figure.unsaid, "finding": finding}
    return {"id": figure.id, "files": list(map(str, paths))} | texts


def _describe_figure(record: Record) -> str:
    parts = {record["id"]: " ".join(record["files"]), "here": record["finding"], "paper": record["claim"]}
    lines = []
    for name, text in (parts | {"open": record["unsaid"]}).items():
        if text:
            # a path must stay whole, so that it can be copied
            wrapper = TextWrapper(100, f"{name}: ", "  ", break_long_words=False, break_on_hyphens=False)
            lines.append(wrapper.fill(text))
    return "\n".join(lines)
