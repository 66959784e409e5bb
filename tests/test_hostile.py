"""Methods that misbehave, each in its own way: refused with the reason or harmless, and no other number changes."""

import importlib
import re
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from runs import prepare

from kvbench import experiment
from kvbench.cache import ops
from kvbench.config import ChainConfig
from kvbench.methods import foreign, registry
from kvbench.methods.base import Mask, Selector
from kvbench.methods.chain import Chain
from kvbench.methods.evicting import EvictingSelector
from kvbench.methods.snapkv import SnapKV
from kvbench.model import load
from kvbench.plan import Cell
from kvbench.runner import run_group
from kvbench.store import ResultStore
from kvbench.types import Needs

kept = []  # what methods stash where nobody looks
MODES = {}  # mode -> (what it does with (stage, cache, obs), why it is refused; None: it harms only itself)
RESULTS = {}  # the same of (stage, its compressed cache, the dense cache, obs), which returns another cache


def by_storage(t):
    t.untyped_storage().copy_(t.mul(2).untyped_storage())


def by_numpy(t):
    t.numpy()[:] = 1


IN_PLACE = {
    "centred": ("keys", lambda t: t.sub_(t.mean(1, keepdim=True))),
    "zeroed": ("keys", lambda t: t.zero_()),
    "scaled": ("values", lambda t: t.mul_(1.001)),
    "by data": ("keys", lambda t: t.data.mul_(2)),
    "by numpy": ("values", by_numpy),
    "by storage": ("keys", by_storage),
    "by a view": ("values", lambda t: t.view(-1)[::2].neg_()),
    "in another order": ("values", lambda t: t.data.copy_(t.flip(1))),
    "nan": ("keys", lambda t: t.fill_(torch.nan)),
    "resized": ("keys", lambda t: t.resize_(1)),
    "swapped": ("keys", lambda t: t.set_(torch.ones(3))),
    "moved": ("positions", lambda t: t.add_(1)),
    "last queries": ("last_q", lambda t: t.zero_()),
    "first queries": ("first_q", lambda t: t.zero_()),
    "column sums": ("colsums", lambda t: t.zero_()),
    "hidden states": ("hidden", lambda t: t.zero_()),
    "frequencies": ("inv_freq", lambda t: t.data.mul_(2)),
}


def in_place(name, how):
    def act(stage, cache, obs):
        (s,) = cache.segments
        own = {"keys": s.k, "values": s.v, "positions": s.positions}
        how(own[name] if name in own else getattr(obs, name))

    return act


for mode, (what, how) in IN_PLACE.items():
    MODES[mode] = in_place(what, how), f"hostile changes what it is handed in place: {what} of layer 3; clone first"
MODES["resized"] = MODES["swapped"] = in_place(*IN_PLACE["resized"]), "IndexError"


def mode(why=None, of=MODES):
    def add(act):
        of[act.__name__.replace("_", " ")] = act, why
        return act

    return add


def result(why=None):
    return mode(why, RESULTS)


@mode()
def changes_it_later(stage, cache, obs):
    kept.append(cache.segments[0])
    for s in kept[:-1]:
        s.k.zero_(), s.v.zero_()


@mode()
def spoils_what_is_computed_once(stage, cache, obs):
    obs.found[("dense", cache.heads)] = obs.found["key norms"] = None
    obs.colsums_q[8] = None


@mode("ZeroDivisionError: division by zero")
def raises(stage, cache, obs):
    raise ZeroDivisionError("division by zero")


@mode("hostile would end the program: SystemExit 0")
def exits(stage, cache, obs):
    sys.exit(0)


@mode("hostile would end the program: GeneratorExit")
def ends(stage, cache, obs):
    raise GeneratorExit


@mode()
def sets_what_is_global(stage, cache, obs):
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(3)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("medium")
    torch.manual_seed(0)


@mode("hostile changes its own knobs while it runs")
def forgets_its_knobs(stage, cache, obs):
    object.__setattr__(stage, "kv_size", 32)


@mode()
def hoards(stage, cache, obs):
    kept.append((cache, obs))


@result("'NoneType' object has no attribute")
def nothing(stage, found, cache, obs):
    return None


@result("has no attribute")
def another_type(stage, found, cache, obs):
    return found.segments[0].k


@result("layer 3 keeps 256 tokens per head of 256, but the method declares exactly 64")
def all_of_it(stage, found, cache, obs):
    return cache


@result("is a view that keeps")
def views(stage, found, cache, obs):
    (s,) = cache.segments
    few = replace(s, k=s.k[:, :64], v=s.v[:, :64], positions=s.positions[:, :64])
    return replace(cache, segments=(few,))


@result("payload bytes")
def half_precision(stage, found, cache, obs):
    (s,) = found.segments
    return replace(found, segments=(replace(s, k=s.k.half(), v=s.v.half()),))


@result("overhead bytes")
def hides_a_copy_in_its_state(stage, found, cache, obs):
    (s,) = found.segments
    return replace(found, segments=(replace(s, state={"copy": s.k.clone()}),))


@result("shares its storage")
def values_are_keys(stage, found, cache, obs):
    (s,) = found.segments
    return replace(found, segments=(replace(s, v=s.k),))


def placed(found, change):
    (s,) = found.segments
    return replace(found, segments=(replace(s, positions=change(s.positions.clone())),))


ORDER = "does not hold distinct prompt positions 0..255 in order"


@result(ORDER)
def twice_the_same(stage, found, cache, obs):
    return placed(found, lambda p: p[:, :1].expand_as(p).contiguous())


@result(ORDER)
def unsorted(stage, found, cache, obs):
    return placed(found, lambda p: p.flip(1))


@result(ORDER)
def beyond_the_prompt(stage, found, cache, obs):
    return placed(found, lambda p: p + 200)


@result(ORDER)
def before_the_prompt(stage, found, cache, obs):
    return placed(found, lambda p: p - 200)


OTHERS = "that are not those of the prompt at the positions it names"


@result()
def says_that_it_merges(stage, found, cache, obs):
    (s,) = found.segments
    object.__setattr__(stage, "changes", "halves keys")
    return replace(found, segments=(replace(s, k=s.k / 2),))


@result(OTHERS)
def the_first_under_the_positions_of_the_last(stage, found, cache, obs):
    first = ops.select(cache, torch.arange(64)[None]).segments[0]
    return replace(found, segments=(replace(first, positions=found.segments[0].positions),))


@result(f"holds values {OTHERS}")
def values_of_other_heads(stage, found, cache, obs):
    (s,) = found.segments
    return replace(found, segments=(replace(s, v=s.v.flip(0)),))


@result(f"holds keys {OTHERS}")
def keys_that_nobody_computed(stage, found, cache, obs):
    (s,) = found.segments
    return replace(found, segments=(replace(s, k=s.k + 1),))


@result()
def on_another_device(stage, found, cache, obs):
    (s,) = found.segments
    return replace(found, segments=(replace(s, k=s.k.to("meta")),))


@result("different lengths")
def fewer_values(stage, found, cache, obs):
    (s,) = found.segments
    return replace(found, segments=(replace(s, v=s.v[:, :-1].clone()),))


@result("payload bytes")
def more_heads(stage, found, cache, obs):
    (s,) = found.segments
    k, v, p = (torch.cat([t, t]) for t in (s.k, s.v, s.positions))
    return replace(found, segments=(replace(s, k=k, v=v, positions=p),))


@result("holds no token at all|keeps 0 tokens")
def no_tokens(stage, found, cache, obs):
    return ops.select(cache, torch.zeros(1, 0, dtype=torch.int64))


@result()
def no_segments(stage, found, cache, obs):
    return replace(found, segments=())


@result("says that it has read 999 tokens")
def read_more_than_there_was(stage, found, cache, obs):
    return replace(found, seen=999)


@dataclass(frozen=True, kw_only=True)
class Hostile(Selector):
    """Keeps the last tokens, and does from layer 3 on what ``mode`` says."""

    id = "hostile"

    mode: str = ""

    def needs(self, n):
        return Needs(last_q=8, first_q=8, colsums=True, hidden=True)

    def compress(self, cache, obs):
        act, _ = MODES.get(self.mode, (None, None))
        if act and obs.layer >= 3:
            act(self, cache, obs)
        budget = self.budget(len(cache.segments[0].positions[0]), obs.layer, obs.n_layers)
        found = ops.select(cache, torch.arange(obs.n)[None, -budget:])
        change, _ = RESULTS.get(self.mode, (None, None))
        return change(self, found, cache, obs) if change and obs.layer >= 3 else found


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    """Measures full, a hostile chain and snapkv side by side on one prompt: (their lines, why some have none)."""
    prepared = prepare("dataset=tiny/needle", "length=256", "limit=1", "method=snapkv", "kv_size=64")
    (group,) = prepared.groups
    host = experiment.make_host(prepared, load.load_weights(prepared.cfg.model, prepared.source, torch.device("cpu")))
    count = iter(range(1000))

    def measure(chain=None):
        store = ResultStore(tmp_path_factory.mktemp(f"run{next(count)}"))
        full, snapkv = group.cells
        cells = (full, snapkv)
        if chain is not None:
            identity = {**full.identity, "chain": chain.identity()}
            cells = (full, Cell(identity, chain, chain.name, full.task, full.column), snapkv)
        run_group(host, replace(group, cells=cells), store, {"device": "cpu", "torch": "2"})
        lines, reasons = {}, {}
        for cell in cells:
            samples = store.samples(cell.id)
            status = store.status(cell.id)
            if status.reason:
                reasons[cell.label] = status.reason
            for line in samples.values():
                lines[cell.label] = {k: v for k, v in line.items() if k != "timing"}
        return lines, reasons

    torch.set_num_threads(1)
    measure.alone, nothing = measure()
    assert len(measure.alone) == 2 and not nothing
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

    with pytest.raises(KeyboardInterrupt):
        bench(Chain((Interrupted(kv_size=64),)))


OWN_METHOD = """
from dataclasses import dataclass
from kvbench.methods.base import Mask, Selector
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
    folder = Path(foreign.__file__).parent
    tracked = subprocess.run(["git", "ls-files", "*.py"], cwd=folder, capture_output=True, text=True)
    if tracked.returncode or not tracked.stdout:
        pytest.skip("no clone, no list of its files")
    assert {Path(p).stem for p in tracked.stdout.split()} - {"__init__"} == foreign.OWN
    for method in registry.available():
        target = registry.defaults(method).get("_target_", "")
        if target.rpartition(".")[0].removeprefix("kvbench.methods.") in foreign.OWN:
            stage = registry.make_stage(method, registry.by_size(registry.defaults(method)))
            assert foreign.code_of(stage) is None


def exit_now(*parts):
    sys.exit(0)


DECODING = {
    "exits": (exit_now, "would end the program: SystemExit 0"),
    "raises": (lambda *parts: 1 / 0, "ZeroDivisionError"),
    "zeroes": (lambda *parts: [t.zero_() for t in parts], None),
    "by data": (lambda *parts: [t.data.fill_(1) for t in parts], None),
    "sets what is global": (lambda *parts: sets_what_is_global(None, None, None), None),
    "what it kept": (lambda *parts: [t.zero_() for s in kept for t in (s.k, s.v)], None),
    "its knobs": (None, "changes its own knobs while it runs"),
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
}


@pytest.mark.parametrize("mode", CHANGES)
def test_a_model_that_a_method_changed_is_read_again_for_the_others(mode, bench, tmp_path, capsys):
    asked = "dataset=tiny/needle", "length=256", "limit=1", "method=snapkv", "kv_size=64", f"results={tmp_path}"
    chains = prepare(*asked).cfg.chains
    hostile = ChainConfig(Chain((Changing(mode=mode, kv_size=64),)), "hostile")
    prepared = prepare(*asked, chains=(hostile, *chains))
    experiment.measure(prepared, quiet=True)
    cells = {c.label: c for c in prepared.groups[0].cells}
    lines = {name: line for name, c in cells.items() for line in prepared.store.samples(c.id).values()}
    assert {name: {k: v for k, v in line.items() if k != "timing"} for name, line in lines.items()} == bench.alone
    status = prepared.store.status(cells["hostile"].id)
    assert status.status == "refused" and status.reason.startswith("hostile changes the model")
    assert {prepared.store.status(cells[name].id).status for name in lines} == {"partial"}
    assert "it is read again for the others" in capsys.readouterr().err


def test_a_prompt_that_is_read_in_another_way_is_read_for_that_method_alone(bench):
    for chain in (Chain((Reader(kv_size=64),)), Chain((Namesake(kv_size=64),))):
        check(bench, chain, None)
