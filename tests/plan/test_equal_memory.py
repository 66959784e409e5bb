"""Equal memory: the kv_size found holds as many bytes as the reference, and is what runs, reports and ids have."""

import json

import pytest
from support.runs import SMALL, prepare, run_json

from kvbench.audit import accounting
from kvbench.base.conf import entries
from kvbench.base.errors import UsageError
from kvbench.cli.main import main
from kvbench.kv.model_shape import Shape, from_entry
from kvbench.methods.core.resolve import chain_of
from kvbench.plan import config, equal_memory, words

MISTRAL = Shape(32, 32, 8, 128)
TABLE7 = "kv_size=128,512,1024,2048"


def parsed(line):
    (overrides,) = words.read(line.split())
    return config.parse(overrides)


def sizes(line, shape=MISTRAL, tokens=None):
    """kv_size of every matched chain, in order."""
    return [m.kv_size for m in equal_memory.match_budgets(parsed(line), shape, tokens)[1]]


@pytest.mark.parametrize("base", ["h2o", "snapkv"])
@pytest.mark.parametrize("per", ["kv_head", "query_head"])
@pytest.mark.parametrize(("kind", "last"), [("bytes", 1646), ("nominal", 1645)])
def test_the_sizes_of_thinks_table_7(base, per, kind, last):
    actual = sizes(f"method={base},{base}+think {TABLE7} per={per} match={kind}")
    assert actual == [109, 416, 826, last]


@pytest.mark.e2e("prices hundreds of sizes")
@pytest.mark.parametrize("shape", [Shape(8, 32, 8, 128), Shape(5, 8, 4, 32)])
@pytest.mark.parametrize("other", ["streamingllm", "h2o", "pyramidkv", "cake", "adakv", "snapkv+kivi", "h2o+vatp"])
@pytest.mark.parametrize("kind", equal_memory.KINDS)
def test_no_other_size_comes_nearer(kind, other, shape):
    # sizes of 16 blocks are tried: hundreds for blocks of 32 tokens, and thousands for KIVI's usual ones
    blocks = "" if (kind, shape.layers) == ("bytes", 8) else "kivi.residual=32 "
    knobs = blocks if "kivi" in other else ""
    cfg = parsed(f"method={other},snapkv+think {knobs}snapkv.kv_size=600 match={kind}")
    (settled, (matched,)) = equal_memory.match_budgets(cfg, shape)
    count = equal_memory.payload_counter(kind, shape, equal_memory.LONG)
    template = next(c for c in cfg.chains if c.chain.name == other.replace("vatp+h2o", "h2o+vatp"))
    target = count(settled.chains[-1].chain)
    near = range(matched.kv_size - 20, matched.kv_size + 21)
    sizes = sorted({*range(140, 2400, 60), *near})
    off = {size: abs(count(equal_memory.with_size(template, size).chain) - target) for size in sizes}
    if template.chain.coder is None:
        assert matched.kv_size == min(off, key=lambda size: (off[size], size))
    else:
        assert off[matched.kv_size] <= max(equal_memory.CLOSE * target, min(off.values()))
    assert [c.chain.selector.kv_size for c in settled.chains] == [matched.kv_size, 600]
    assert getattr(matched, kind) == (count(settled.chains[0].chain), target)


def test_of_sizes_that_are_about_equally_near_a_quantiser_gets_the_largest():
    """KIVI packs 32 tokens at once, and its bytes fall there: sizes before and behind hold the reference's bytes."""
    cfg = parsed("method=snapkv+kivi,snapkv kivi.residual=32 snapkv.kv_size=600 match=bytes")
    (template,) = [c for c in cfg.chains if c.chain.coder is not None]
    count = equal_memory.payload_counter("compressed", Shape(5, 8, 4, 32), equal_memory.LONG)
    (reference,) = [c for c in cfg.chains if c is not template]
    size = equal_memory.find_nearest_kv_size(template, reference, count, "compressed", count(reference.chain))
    target = count(reference.chain)
    sizes = range(size - 300, size + 300)
    near = [s for s in sizes if abs(count(equal_memory.with_size(template, s).chain) - target) <= 0.005 * target]
    assert len(near) > 1 and size == max(near)


def test_the_nominal_formula_is_the_papers():
    for size in (128, 512, 1024, 2048):
        chain = chain_of({"method": "snapkv+think", "kv_size": size, "per": "query_head"})
        assert accounting.nominal_payload(chain, MISTRAL, 8192, 2) / 2**20 == pytest.approx(
            0.5 * size - 0.1 * (size - 32)
        )
        plain = chain_of({"method": "snapkv", "kv_size": size})
        assert (
            accounting.nominal_payload(plain, MISTRAL, 8192, 2)
            == accounting.bytes_declared(plain, MISTRAL, 8192, 2).payload
        )
    packed = chain_of("think+kivi", {"ratio": 0.5, "recent": 32})
    exact = accounting.bytes_declared(packed, MISTRAL, 1000, 2).payload
    assert accounting.nominal_payload(packed, MISTRAL, 1000, 2) == exact  # half of 128 channels is a whole number


def test_grids_of_the_reference_give_each_other_method_one_size_each():
    cfg = parsed("method=h2o,snapkv+think kv_size=128,256 ratio=0.4,0.6 match=bytes")
    settled, matched = equal_memory.match_budgets(cfg, MISTRAL)
    assert [(m.method.split()[0], "ratio=0.6" in m.reference) for m in matched] == [("h2o", r) for r in (0, 1, 0, 1)]
    assert len(settled.chains) == 8 and len({repr(c.chain.identity()) for c in settled.chains}) == 8


def test_knobs_that_depend_on_the_budget_follow_the_size_found():
    line = "preset=refreekv model=llama2-7b-chat method=cake,snapkv+think kv_size=1300 match=bytes per=kv_head"
    (settled, (matched,)) = equal_memory.match_budgets(parsed(line), Shape(32, 32, 32, 128))
    assert matched.kv_size < 1100 and settled.chains[0].chain.stages[0].tau1 == 1.9
    small = line.replace("1300", "150")
    assert equal_memory.match_budgets(parsed(small), Shape(32, 32, 32, 128))[0].chains[0].chain.stages[0].tau1 == 0.9


def test_presets_say_which_bytes_where_a_match_is_asked_for():
    assert parsed("preset=think method=h2o,h2o+think kv_size=128").match is None
    assert parsed("preset=think method=h2o,h2o+think kv_size=128 match=true").match == "nominal"
    assert parsed("preset=think method=h2o,h2o+think kv_size=128 reference=h2o+think").match == "nominal"
    assert parsed("preset=think method=h2o,h2o+think kv_size=128 match=bytes").match == "bytes"
    assert parsed("method=h2o,h2o+think kv_size=128 reference=think+h2o").match == "bytes"
    assert parsed("preset=vatp method=h2o,h2o+vatp kv_size=128 match=true").match == "bytes"


def test_a_reference_may_stand_anywhere_and_be_written_in_any_order():
    first = "method=snapkv+think,snapkv,h2o kv_size=128 reference=think+snapkv"
    assert sizes(first) == sizes("method=snapkv,h2o,snapkv+think kv_size=128 match=bytes") == [109, 109]


def test_budgets_of_other_kinds_give_way():
    cfg = parsed("preset=vatp method=h2o,snapkv+think snapkv.kv_size=256 match=bytes")
    (settled, (matched,)) = equal_memory.match_budgets(cfg, MISTRAL)
    h2o = settled.chains[0].chain.selector
    assert sum(h2o.parts(4096)) == matched.kv_size == 211 and h2o.heavy_ratio is None


BAD = {
    "method=h2o,h2o+think kv_ratio=0.2 match=bytes": "kv_ratio=0.2 is not possible with match=bytes",
    "method=h2o,h2o+think h2o.kv_ratio=0.2 reference=h2o": "h2o.kv_ratio=0.2 is not possible with match=true",
    "method=h2o,h2o+think kv_size=128 match=size": "match='size' is not possible: bytes, compressed, nominal",
    "method=h2o,h2o+think kv_size=128 match=bytes,nominal": "match=",
    "method=h2o,h2o+think kv_size=128 reference=snapkv": "Available: h2o, h2o+think",
    "method=h2o,h2o+think match=bytes": "grow with the prompt, as its budget is a fraction",
    "method=snapkv,kivi snapkv.kv_size=128 match=bytes": "grow with the prompt, as it has no kv_size",
    "method=kivi,snapkv kv_size=128 match=bytes": "kivi has no kv_size to set",
    "method=refreekv,snapkv kv_size=128 match=bytes": "refreekv has no kv_size to set",
    "method=full,snapkv kv_size=128 match=bytes": "this run has none",
    "method=full match=bytes": "this run has only full",
    "method=cake,snapkv kv_size=64 window=8 cake.window=200 match=bytes": "cake",
    "method=h2o,snapkv+kivi snapkv.kv_size=40 h2o.window=200 kv_size=300 match=bytes": "cannot hold as many bytes",
}


@pytest.mark.e2e("reads whole command lines")
@pytest.mark.parametrize("line", BAD)
def test_impossible_requests_are_refused_before_anything_runs(line, capsys):
    assert main(["run", *line.split(), "limit=1", "--plan"]) == 2
    message = capsys.readouterr().err
    assert BAD[line] in message and message.count("\n") == 1


@pytest.mark.e2e("runs whole command lines")
def test_a_run_has_the_size_found_in_its_ids_its_table_and_its_bytes(tmp_path, capsys):
    line = ["method=snapkv,snapkv+think", "kv_size=100", f"results={tmp_path}", *SMALL, "limit=1"]
    status, report = run_json(capsys, *line, "match=bytes")
    assert status == 0
    (matched,) = report["matched"]
    held_bytes = {r["method"]: r["cells"][0]["payload16"] for r in report["rows"]}
    assert (
        held_bytes[matched["method"]] == matched["bytes"][0] and held_bytes[matched["reference"]] == matched["bytes"][1]
    )
    assert any(f"kv_size={matched['kv_size']}" in note and "match=bytes" in note for note in report["notes"])
    by_hand = prepare(*line[:1], f"kv_size={matched['kv_size']}", f"results={tmp_path}", *SMALL, "limit=1")
    ids = {c["cell"] for r in report["rows"] for c in r["cells"] if r["method"] == matched["method"]}
    assert ids == {c.id for g in by_hand.groups for c in g.cells if c.label == matched["method"]}
    assert main(["run", *line, "match=nominal", "--plan"]) == 0
    shown = capsys.readouterr().out
    assert "match=nominal" in shown and all(len(x) <= 100 for x in shown.splitlines())
    assert main(["run", *line, "match=nominal", "--plan", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["matched"][0]["by"] == "nominal"


def test_a_model_is_matched_by_its_own_shape():
    assert sizes("method=h2o,h2o+think kv_size=128 match=bytes", Shape(6, 8, 4, 32)) == [110]
    with pytest.raises(UsageError, match="query_heads=7"):
        Shape(1, 7, 2, 8)


def test_states_and_windows_do_not_make_methods_seem_alike():
    # 56 to 72 % of Nemotron-3-Super's cache are states: beside them 448 and 64 tokens would differ by 4 %
    shape = from_entry(entries("model")["nemotron-3-super-120b-a12b"]["shape"])
    count = equal_memory.payload_counter("compressed", shape, equal_memory.LONG)
    small, large = (chain_of({"method": "streamingllm", "kv_size": size}) for size in (64, 448))
    assert count(large) == pytest.approx(7 * count(small))
    assert sizes("method=h2o,h2o+think kv_size=128 match=bytes", shape) == [109]


def test_all_layers_count_or_those_that_methods_compress():
    """Half of this cache lies in windows, which a format codes and a choice of tokens does not touch."""
    shape = Shape(4, 8, 4, 32, local_layers=4, window=256)
    line = "method=snapkv,snapkv+q4_0 kv_size=256 q4_0.group=32"
    # layers that methods compress: 4.5 bits a number in place of 16
    assert sizes(f"{line} match=compressed reference=snapkv+q4_0", shape) == [72]
    # the reference's windows alone free more than all that snapkv could give up
    with pytest.raises(UsageError, match="match=bytes: snapkv cannot hold as many bytes"):
        sizes(f"{line} match=bytes reference=snapkv+q4_0", shape)
