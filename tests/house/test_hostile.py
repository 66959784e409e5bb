"""Methods that misbehave, each in its own way: refused with the reason or harmless, and no other number changes."""

import builtins
import contextlib
import importlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.hostile import MODES, RESULTS, Hostile, kept, sets_what_is_global
from support.runs import prepare

from kvbench.base.errors import KvbenchError
from kvbench.methods.core import foreign, registry, shared_functions, walls, watch
from kvbench.methods.core.base import Mask
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.evicting import EvictingSelector
from kvbench.methods.core.registry import choose_by_size
from kvbench.methods.core.resolve import ChainConfig
from kvbench.methods.snapkv import SnapKV
from kvbench.models import load
from kvbench.run import experiment
from kvbench.run.runner import run_groups
from kvbench.store.cell import Cell
from kvbench.store.store import ResultStore

pytestmark = pytest.mark.e2e("runs hostile methods end to end")


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    """Measures full, a hostile chain and snapkv side by side on one prompt: (their lines, why some have none).

    The model has its first three layers: methods misbehave from the second on, and one more follows.
    """
    prepared = prepare("dataset=tiny/needle", "length=128", "limit=1", "method=snapkv", "kv_size=64")
    (group,) = prepared.groups
    whole, short = (load.load_weights(prepared.cfg.model, prepared.source, torch.device("cpu")) for _ in range(2))
    short.config.num_hidden_layers = 3
    short.model.layers = short.model.layers[:3]
    host_of_short, host_of_whole = experiment.make_host(prepared, short), experiment.make_host(prepared, whole)
    count = iter(range(1000))

    def measure(chain=None, host=host_of_short):
        store = ResultStore(tmp_path_factory.mktemp(f"run{next(count)}"))
        full, snapkv = group.cells
        cells = (full, snapkv)
        if chain is not None:
            identity = {**full.identity, "chain": chain.identity()}
            cells = (full, Cell(identity, chain, chain.name, full.task, full.column), snapkv)
        run_groups(host, [replace(group, cells=cells)], store, {"device": "cpu", "torch": "2"})
        lines, reasons = {}, {}
        for cell in cells:
            samples = store.lines(cell.id)
            status = store.status(cell.id)
            if status.reason:
                reasons[cell.label] = status.reason
            for line in samples.values():
                lines[cell.label] = {k: v for k, v in line.items() if k != "timing"}
        return lines, reasons

    torch.set_num_threads(1)
    measure.alone, nothing = measure()
    measure.alone_on_the_whole_model, none = measure(host=host_of_whole)
    assert len(measure.alone) == 2 and not nothing and not none
    assert measure.alone != measure.alone_on_the_whole_model
    return measure


def check(bench, chain, why):
    """The other methods' lines are those of a run without the chain, which is refused for ``why`` if that is given."""
    before = torch.get_default_dtype(), torch.get_num_threads(), torch.get_float32_matmul_precision()
    kept.clear()
    lines, reasons = bench(chain)
    assert {name: line for name, line in lines.items() if name != chain.name} == bench.alone
    assert set(reasons) <= {chain.name}
    if why is None:
        assert chain.name in (lines.keys() | reasons.keys())
    else:
        assert chain.name not in lines
        assert re.search(why, reasons[chain.name])
    assert (torch.get_default_dtype(), torch.get_num_threads(), torch.get_float32_matmul_precision()) == before
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("mode", [*MODES, *RESULTS])
def test_a_stage_that_misbehaves_is_refused_or_harms_only_itself(mode, bench):
    (_, why) = {**MODES, **RESULTS}[mode]
    check(bench, Chain((Hostile(mode=mode, kv_size=64),)), why)


def test_a_built_in_method_that_is_edited_into_writing_in_place_is_refused_too(bench, monkeypatch):
    original = SnapKV.scores

    def scores(self, cache, obs, capacity):
        cache.segments[0].k.mul_(2)
        return original(self, cache, obs, capacity)

    monkeypatch.setattr(SnapKV, "scores", scores)
    lines, reasons = bench()
    assert lines == {"full": bench.alone["full"]}
    (reason,) = reasons.values()
    assert reason.startswith("snapkv changes what it is handed in place: keys of layer 0; clone first")


def test_an_interrupt_of_the_users_is_not_the_methods(bench, request):
    # a shell lets what it starts in the background ignore interrupts
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))

    @dataclass(frozen=True, kw_only=True)
    class Interrupted(Hostile):
        def compress(self, cache, obs):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt) as interrupt:
        bench(Chain((Interrupted(kv_size=64),)))
    # notes are what a user reads who asks where it was
    (note,) = interrupt.value.__notes__
    assert note.startswith(f"hostile was being asked, at {__file__}:")


def test_signals_of_the_user_stay_what_they_were(request):
    handler = signal.getsignal(signal.SIGTERM)
    request.addfinalizer(lambda: signal.signal(signal.SIGTERM, handler))

    def raising():
        raise SystemExit(15)

    def terminate(number, frame):
        raising()

    signal.signal(signal.SIGTERM, terminate)
    with walls.contained("deaf"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGTERM) is terminate
    with pytest.raises(SystemExit) as stop, walls.contained("slow"):
        signal.raise_signal(signal.SIGTERM)
    assert stop.value.code == 15  # a handler may call what raises
    (note,) = stop.value.__notes__
    line = int(note.removeprefix(f"slow was being asked, at {__file__}:"))
    assert "raise_signal" in Path(__file__).read_text().splitlines()[line - 1]


def test_a_method_that_does_not_come_back_is_named_once(monkeypatch, capsys):
    monkeypatch.setattr(watch, "SILENT_S", 0.2)
    with walls.contained("slow"), contextlib.suppress(ZeroDivisionError):
        for _ in range(30):
            time.sleep(0.1)
            if watch._WATCH.said:
                break
        time.sleep(0.3)  # the watch has time to say it again, and must not
        assert 1 / 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("kvbench: slow has not come back for ")
    with walls.contained("the model is slow", watched=False):
        time.sleep(0.5)
    monkeypatch.setattr(watch, "SILENT_S", 1.0)
    with walls.contained("many steps"):
        for _ in range(6):
            watch.note_progress()
            time.sleep(0.2)
    assert capsys.readouterr().err == ""


def test_what_torch_and_others_do_to_themselves_is_no_replacement(monkeypatch):
    functions = shared_functions.Functions()
    monkeypatch.setattr(torch, "something_new", len, raising=False)  # hides nothing
    monkeypatch.setattr(torch.Tensor, "__doc__", "another text")
    assert functions.restore() == ""
    wrapper = torch._disable_dynamo(torch.topk)  # as importing torch's compiler does to torch.manual_seed
    before = torch.topk
    monkeypatch.setattr(torch, "topk", wrapper)
    assert functions.restore() == "" and torch.topk is wrapper
    torch.topk = torch.sort
    assert functions.restore() == "torch.topk" and torch.topk is before
    monkeypatch.setattr(builtins, "ic", print, raising=False)  # as some debuggers do
    assert functions.restore() == ""


def test_an_honest_method_may_compile(bench):
    @dataclass(frozen=True, kw_only=True)
    class Compiled(Hostile):
        def compress(self, cache, obs):
            torch.compile(lambda x: x * 2, backend="eager")(torch.ones(2))
            torch._dynamo.reset()
            return super().compress(cache, obs)

    check(bench, Chain((Compiled(kv_size=64),)), None)
    lines, _ = bench(Chain((Compiled(kv_size=64),)))
    assert "hostile" in lines


@pytest.mark.parametrize("seed", [0, 1])
def test_draws_are_those_of_the_seed_and_leave_no_trace(seed):
    def draws():
        return torch.rand(3).tolist(), random.random(), np.random.rand()

    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    expected = draws()
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    with walls.contained("mine", seed=walls.seed_of(7, seed)):
        first = draws()
    assert draws() == expected
    with walls.contained("mine", seed=walls.seed_of(7, seed)):
        assert draws() == first
    with walls.contained("mine", seed=walls.seed_of(7, seed + 1)):
        assert draws() != first


OWN_METHOD = """
from dataclasses import dataclass
from kvbench.methods.core.base import Mask, Selector
from {name}_helper import factor

@dataclass(frozen=True, kw_only=True)
class Mine(Selector):
    id = "mine"
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """Imports a method of one's own anew from its source and that of a module beside it: its chain's identity."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def identity(source="", helper="factor = 1\n"):
        name = "mine_own"
        (tmp_path / f"{name}.py").write_text(OWN_METHOD.replace("{name}", name) + source)
        (tmp_path / f"{name}_helper.py").write_text(helper)
        for module in (name, f"{name}_helper"):
            sys.modules.pop(module, None)
        shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
        importlib.invalidate_caches()
        stage = importlib.import_module(name).Mine(kv_size=64)
        (entry,) = Chain((stage,)).identity()["stages"]
        return {k: v for k, v in entry.items() if k != "code"}, entry["code"]

    return identity


def test_the_code_of_a_method_of_ones_own_says_which_results_are_its_own(mine):
    plain, code = mine()
    assert plain == {"id": "mine", "revision": 1, "knobs": {"frozen_layers": (), "kv_size": 64}}
    codes = [code, mine("# a comment\n")[1], mine(helper="factor = 2\n")[1]]
    assert mine() == (plain, code)
    assert len(set(codes)) == 3 and all(re.fullmatch("[0-9a-f]{16}", c) for c in codes)


def test_kvbenchs_own_methods_are_those_of_its_files_and_go_by_their_revision():
    folder = Path(foreign.__file__).parents[1]
    tracked = subprocess.run(["git", "ls-files", ":(glob)*.py"], cwd=folder, capture_output=True, text=True)
    if tracked.returncode or not tracked.stdout:
        pytest.skip("no clone, no list of its files")
    assert {Path(p).stem for p in tracked.stdout.split()} - {"__init__"} == set(foreign.OWN)
    for method in registry.available():
        target = registry.defaults(method).get("_target_", "")
        if target.rpartition(".")[0].removeprefix("kvbench.methods.") in foreign.OWN:
            stage = registry.make_stage(method, choose_by_size(registry.defaults(method)))
            assert foreign.hash_source(stage) is None


def exit_now(*parts):
    sys.exit(0)


DECODING = {
    "exits": (exit_now, "would end the program: SystemExit 0"),
    "raises": (lambda *parts: 1 / 0, "ZeroDivisionError"),
    "zeroes": (lambda *parts: [t.zero_() for t in parts], None),
    "by data": (lambda *parts: [t.data.fill_(1) for t in parts], None),
    "sets what is global": (lambda *parts: sets_what_is_global(None, None, None), None),
    "what it kept": (lambda *parts: [t.zero_() for s in kept for t in (s.k, s.v)], None),
    "its knobs": (None, "changes its own options while it runs"),
    "remembers": (lambda *parts: None, "hostile decodes the same tokens in another way when it does so twice"),
    "draws": (lambda *parts: torch.rand(1), "hostile draws random numbers where several prompts are computed together"),
    "replaces a function": (lambda *parts: setattr(torch, "topk", torch.sort), "hostile replaces torch.topk"),
}


@dataclass(frozen=True, kw_only=True)
class HostileEvictor(EvictingSelector):
    """Does what ``mode`` says at every step."""

    id = "hostile"

    mode: str = ""

    def scores(self, cache, obs, capacity):
        kept.extend(cache.segments)
        return cache.segments[0].k.norm(dim=-1)

    def keep_scores(self, slots):
        if self.mode == "remembers":
            kept.append(slots)
            return slots.positions.float() * (-1) ** (len(kept) // 97)
        return slots.positions.float()

    def fold(self, slots, probs):
        if self.mode == "its knobs":
            object.__setattr__(self, "kv_size", 65)
        else:
            DECODING[self.mode][0](slots.positions, slots.valid, probs)
        return {}


@dataclass(frozen=True, kw_only=True)
class HostileMask(Mask):
    """Does what ``mode`` says at every step."""

    id = "hostile"

    mode: str = ""

    def compress(self, cache, obs):
        kept.extend(cache.segments)
        return cache

    def estimate(self, keys):
        if self.mode == "its knobs":
            object.__setattr__(self, "mode", "other")
        elif self.mode in DECODING:
            DECODING[self.mode][0](keys)
        return keys

    def mask(self, weights):
        if self.mode == "remembers":
            kept.append(weights)
            return weights >= (weights.mean() if len(kept) % 13 < 6 else 0)
        return weights >= 0


@pytest.mark.parametrize("mode", DECODING)
@pytest.mark.parametrize("kind", [HostileEvictor, HostileMask])
def test_a_stage_that_misbehaves_while_decoding_harms_only_itself(kind, mode, bench):
    budget = {"kv_size": 64} if kind is HostileEvictor else {}
    check(bench, Chain((kind(mode=mode, **budget),)), DECODING[mode][1])


@dataclass(frozen=True, kw_only=True)
class Reader(Hostile):
    """Lets the prompt be read with other keys, and does not say so."""

    def read(self, k, v):
        k.zero_()
        return k, v


@dataclass(frozen=True, kw_only=True)
class Namesake(SnapKV):
    """Computes the prompt in its own way under the name of another's."""

    prefill_key = ""
    id = "hostile"

    def read(self, k, v):
        return k * 2, v


def by_config(model):
    model.config.rope_parameters["rope_theta"] = 7.0


@dataclass(frozen=True, kw_only=True)
class Changing(Hostile):
    """Changes the model, which is not restored."""

    adapts = True
    prefill_key = "changing"

    @contextmanager
    def adapt(self, model):
        CHANGES[self.mode](model)
        yield


CHANGES = {
    "weights": lambda model: model.lm_head.weight.data.mul_(2),
    "a weight put in its place": lambda model: setattr(model.lm_head, "weight", torch.nn.Parameter(torch.zeros(3, 3))),
    "configuration": by_config,
    "a hook": lambda model: model.lm_head.register_forward_hook(lambda module, args, output: output * 0),
}


@dataclass(frozen=True, kw_only=True)
class Later(Hostile):
    """Replaces a function when it is asked for its needs on a prompt, which is outside all walls."""

    def needs(self, n):
        if n > 1:
            torch.topk = torch.sort
        return super().needs(n)


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        *((Changing(mode=m, kv_size=64), "hostile changes the model") for m in CHANGES),
        (Later(kv_size=64), "hostile replaces torch.topk"),
    ],
    ids=[*CHANGES, "a function, later"],
)
def test_others_are_measured_anew_where_a_method_changed_the_model_or_a_function(
    method, reason, bench, tmp_path, capsys
):
    arguments = "dataset=tiny/needle", "length=128", "limit=1", "method=snapkv", "kv_size=64", f"results={tmp_path}"
    chains = prepare(*arguments).cfg.chains
    hostile = ChainConfig(Chain((method,)), "hostile")
    prepared = prepare(*arguments, chains=(hostile, *chains))
    experiment.measure(prepared, quiet=True)
    cells = {c.label: c for c in prepared.groups[0].cells}
    lines = {name: line for name, c in cells.items() for line in prepared.store.lines(c.id).values()}
    lines = {name: {k: v for k, v in line.items() if k != "timing"} for name, line in lines.items()}
    assert lines == bench.alone_on_the_whole_model
    status = prepared.store.status(cells["hostile"].id)
    assert status.status == "refused" and status.reason.startswith(reason)
    assert {prepared.store.status(cells[name].id).status for name in lines} == {"done"}
    # a function is put back, a model is read again
    read_again = "it is read again for the others" in capsys.readouterr().err
    assert read_again == (reason == "hostile changes the model")


class Unprintable(Exception):
    def __str__(self):
        raise SystemExit(3)


@dataclass(frozen=True, kw_only=True)
class Unplannable(Hostile):
    """Fails when it is asked for what ``mode`` says, before any prompt is read."""

    def capacity(self, n):
        return 1 / 0 if self.mode == "capacity" else super().capacity(n)

    def expected(self, n, layer, n_layers, heads):
        return 1 / 0 if self.mode == "expected" else super().expected(n, layer, n_layers, heads)

    def needs(self, n):
        if n > 1 and self.mode == "needs":
            raise Unprintable
        return super().needs(n)

    @property
    def prefill_key(self):
        return 1 / 0 if self.mode == "prefill_key" else ""


@pytest.mark.parametrize("mode", ["capacity", "expected", "needs", "prefill_key"])
def test_a_method_that_cannot_be_planned_costs_its_own_row(mode, tmp_path, capsys):
    arguments = "dataset=tiny/needle", "length=128", "limit=1", "method=snapkv", "kv_size=64", f"results={tmp_path}"
    chains = prepare(*arguments).cfg.chains
    hostile = ChainConfig(Chain((Unplannable(mode=mode, kv_size=64),)), "hostile kv_size=64")
    prepared = prepare(*arguments, chains=(hostile, *chains))
    why = (
        "hostile raises Unprintable, whose __str__ fails" if mode == "needs" else "ZeroDivisionError: division by zero"
    )
    assert f"hostile kv_size=64 is left out: {'' if mode == 'needs' else __file__}" in capsys.readouterr().err
    report = experiment.measure(prepared, quiet=True)
    assert [(row.method, row.cells[0].status) for row in report.rows] == [
        ("full", "measured"),
        ("snapkv kv_size=64", "measured"),
        ("hostile kv_size=64", "failed"),
    ]
    assert report.rows[-1].cells[0].reason.endswith(why)
    assert "failed" in report.to_markdown() and len(report.to_pandas()) == 3
    assert json.dumps(report.record())
    with pytest.raises(KvbenchError, match=r"^hostile kv_size=64: "):
        prepare(*arguments, chains=(hostile,), baseline=False)


def test_an_error_that_cannot_be_printed_and_streams_behind_streams():
    with pytest.raises(KvbenchError, match=r"^mine raises Unprintable, whose __str__ fails$"), walls.contained("mine"):
        raise Unprintable
    for close in ("stdout.buffer.close()", "stderr.buffer.close()", "stdout.detach()", "__stdout__.close()"):
        with pytest.raises(RuntimeError, match="is not the method's to close"), walls.contained("mine"):
            eval(f"sys.{close}")
    print("still open", flush=True)


def test_a_prompt_that_is_read_in_another_way_is_read_for_that_method_alone(bench):
    for chain in (Chain((Reader(kv_size=64),)), Chain((Namesake(kv_size=64),))):
        check(bench, chain, None)


def test_a_method_that_draws_answers_alike_in_one_go_and_in_two(tmp_path):
    def answers(name, *limits):
        for limit in limits:
            arguments = (
                "dataset=tiny/needle",
                "length=128",
                f"limit={limit}",
                "method=full",
                f"results={tmp_path / name}",
            )
            drawing = ChainConfig(Chain((Hostile(mode="draws from torch", kv_size=64),)), "hostile")
            prepared = prepare(*arguments, chains=(*prepare(*arguments).cfg.chains, drawing))
            experiment.measure(prepared, quiet=True)
        (cell,) = (c for c in prepared.groups[0].cells if c.chain.stages)
        lines = prepared.store.lines(cell.id)
        return {i: {k: v for k, v in line.items() if k not in ("timing", "provenance")} for i, line in lines.items()}

    at_once = answers("at once", 3)
    assert len(at_once) == 3 and answers("in two", 1, 3) == at_once


def test_a_method_that_changes_the_folder_loses_no_results(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with walls.contained("moves"):
        os.chdir("/")
    assert Path.cwd() == tmp_path
