"""Pages freed: four shares by hand, by a slow reference under every method, stored, summarised and shown."""

import json
from dataclasses import replace

import pytest
import torch
from support.calibrations import ready
from support.families import build, prompt
from support.runs import run_json
from support.stored import sample

import kvbench
from kvbench.audit.pages import pages_freed
from kvbench.audit.prompt_audit import audit
from kvbench.bench import layers
from kvbench.cli.main import main
from kvbench.kv.model_shape import Shape
from kvbench.kv.pages import PagesFreed
from kvbench.kv.segment import LayerCache, Segment
from kvbench.methods.core.resolve import chain_of
from kvbench.models.interface import cache_shape
from kvbench.report import pages
from kvbench.report.summary import summarise
from kvbench.store.results import Sample
from kvbench.store.store import ResultStore


def segment(positions, heads=2):
    """A segment of tokens at ``positions``: a list for all heads alike, or a list for each head (ragged or not)."""
    if isinstance(positions[0], int):
        at = torch.tensor([positions], dtype=torch.int32)
        return Segment(torch.zeros(heads, len(positions), 4), torch.zeros(heads, len(positions), 4), at)
    counts = [len(head) for head in positions]
    if len(set(counts)) == 1:
        at = torch.tensor(positions, dtype=torch.int32)
        return Segment(torch.zeros(heads, counts[0], 4), torch.zeros(heads, counts[0], 4), at)
    at = torch.tensor([[p for head in positions for p in head]], dtype=torch.int32)
    k = torch.zeros(1, sum(counts), 4)
    return Segment(k, k.clone(), at, torch.tensor(counts, dtype=torch.int32))


def layer(*segments, n=40, heads=2):
    made = tuple(s if isinstance(s, Segment) else segment(s, heads) for s in segments)
    return LayerCache(made, seen=n, heads=heads, query_heads=2 * heads)


def shares(freed):
    return freed.apart, freed.united, freed.apart_compacted, freed.united_compacted


def slow(cache_layers, n):
    """The shares, page by page and head by head."""
    page_count = len(range(0, n, 16))
    freed = {"apart": 0, "united": 0, "apart_compacted": 0, "united_compacted": 0}
    heads = 0
    for one in cache_layers:
        kept = [set(positions.tolist()) for positions in one.kept_positions()]
        heads += len(kept)
        for page in range(page_count):
            tokens = set(range(16 * page, 16 * page + 16))
            empty = [not (tokens & positions) for positions in kept]
            freed["apart"] += sum(empty)
            freed["united"] += all(empty)
        # tokens fill one page after the other, so a page is needed for every 16th token from the first on
        needed = [len(range(0, len(positions), 16)) for positions in kept]
        freed["apart_compacted"] += sum(page_count - pages_needed for pages_needed in needed)
        freed["united_compacted"] += page_count - max(needed)
    by_head, by_layer = heads * page_count, len(cache_layers) * page_count
    return (
        freed["apart"] / by_head,
        freed["united"] / by_layer,
        freed["apart_compacted"] / by_head,
        freed["united_compacted"] / by_layer,
    )


@pytest.mark.parametrize(
    ("cache_layers", "expected"),
    [
        # 40 tokens are 3 pages, the last of 8 tokens
        ([layer(list(range(40)))], (0, 0, 0, 0)),
        # one token in each page: nothing is free in place, and 2 of 3 pages if the tokens are moved
        ([layer([15, 16, 39])], (0, 0, 2 / 3, 2 / 3)),
        # all heads keep pages 0 and 2
        ([layer([0, 1, 32])], (1 / 3, 1 / 3, 2 / 3, 2 / 3)),
        # one head keeps page 0, the other page 2: apart 4 of 6, united 1 of 3
        ([layer([[0, 1], [38, 39]])], (4 / 6, 1 / 3, 4 / 6, 2 / 3)),
        # ragged: 17 tokens in pages 0 and 2 beside 1 token in page 1
        ([layer([[*range(16), 39], [20]])], (3 / 6, 0, 3 / 6, 1 / 3)),
        # two segments hold one head's tokens together: 17 tokens in 2 pages
        ([layer(list(range(16)), [16])], (1 / 3, 1 / 3, 1 / 3, 1 / 3)),
        # a ragged segment before one that all heads share
        ([layer([[0, 1], [17]], [39])], (2 / 6, 0, 4 / 6, 2 / 3)),
        # a head without tokens, as one that copies another head's output
        ([layer([[], [0, 1]])], (5 / 6, 2 / 3, 5 / 6, 2 / 3)),
        # one layer that keeps everything and one that keeps a token
        ([layer(list(range(40))), layer([[0], [39]])], (4 / 12, 1 / 6, 4 / 12, 2 / 6)),
    ],
)
def test_shares_by_hand(cache_layers, expected):
    assert shares(pages_freed(cache_layers, 40)) == pytest.approx(expected)
    assert slow(cache_layers, 40) == pytest.approx(expected)


def test_a_layer_may_stand_for_several():
    first, second = layer([[0], [39]]), layer([15, 16, 39])
    assert pages_freed([first, second], 40, [3, 1]) == pages_freed([first, first, first, second], 40)


DROP = (
    "snapkv",
    "adakv",
    "refreekv",
    "kvzip",
    "chunkkv",
    "pyramidkv+think",
    "adakv+kivi",
    "uncomp-group",
    "uncomp-stage",
    "uncomp-stage+h2o+think+kivi",
)
KEEP = ("full", "think", "kivi", "fp8", "palu", "chai", "twilight")


@pytest.mark.e2e("many methods")
@pytest.mark.parametrize("per", ["kv_head", "query_head"])
@pytest.mark.parametrize("n", [100, 33])
def test_methods_free_what_the_slow_reference_counts(per, n):
    """Methods that keep every token free no page. Latents and shared keys are of all tokens, too."""
    model = build("llama")
    knobs = {"kv_size": n // 3, "window": 4, "recent": 3, "T": 0.6}
    for names, frees in ((DROP, True), (KEEP, False)):
        chains = []
        for name in names:
            stages = [] if name == "full" else chain_of(name).stages
            own = {f"{s.id}.{k}": v for s in stages for k, v in knobs.items() if k in s.knobs()}
            chains.append(ready(model, {"method": name, **own}, per))
        for name, cache in zip(names, kvbench.prefill(model, prompt(n), chains), strict=True):
            freed = shares(audit(cache, cache_shape(model)).pages_freed)
            assert freed == pytest.approx(slow(cache.layers, n)), name
            assert (freed[2] > 0) == frees, name


def test_local_layers_do_not_count():
    """Gemma 2 holds windows of its own in local layers: methods compress the others alone."""
    model = build("gemma2")
    (cache,) = kvbench.prefill(model, prompt(100), [{"method": "streamingllm", "kv_size": 20}])
    assert cache.local
    # sinks in page 0, 16 recent tokens in pages 5 and 6: 4 of 7 pages are free
    assert shares(audit(cache, cache_shape(model)).pages_freed) == pytest.approx((4 / 7, 4 / 7, 5 / 7, 5 / 7))


def test_means_are_over_prompts_and_unknown_where_one_is():
    one, two = PagesFreed(0.1, 0.0, 0.5, 0.25), PagesFreed(0.3, 0.2, 0.7, 0.45)
    assert shares(PagesFreed.mean([one, two])) == pytest.approx((0.2, 0.1, 0.6, 0.35))
    assert shares(PagesFreed.mean([one, two], [3, 1])) == pytest.approx((0.15, 0.05, 0.55, 0.3))
    assert PagesFreed.mean([one, None]) is None and PagesFreed.mean([]) is None


def test_samples_of_older_versions_stay_readable_and_have_no_pages():
    old = Sample.read(sample(3))
    assert old.pages_freed is None and "pages_freed" not in old.record()
    new = replace(old, pages_freed=PagesFreed(0.1, 0.0, 0.5, 0.25))
    assert Sample.read(json.loads(json.dumps(new.record()))) == new
    assert "pages_freed" not in summarise([old, new], "f1", 2).record()
    assert summarise([new, new], "f1", 2).record()["pages_freed"] == new.record()["pages_freed"]


@pytest.mark.e2e("runs whole command lines")
def test_a_run_stores_and_shows_them(tmp_path, capsys):
    words = ["dataset=tiny/needle,tiny/listing", "length=256", "limit=2", "method=streamingllm,kivi", "kv_size=64"]
    words.append(f"results={tmp_path}")
    status, report = run_json(capsys, *words)
    assert status == 0
    full, streaming, kivi = report["rows"]
    nothing = dict.fromkeys(("apart", "united", "apart_compacted", "united_compacted"), 0.0)
    for row in (full, kivi):
        assert row["pages_freed"] == nothing and all(cell["pages_freed"] == nothing for cell in row["cells"])
    # 4 sinks in the first page and 60 recent tokens in the last 4: 11 of 16 pages, and 12 if the sinks are moved
    assert streaming["pages_freed"] == {
        "apart": 11 / 16,
        "united": 11 / 16,
        "apart_compacted": 12 / 16,
        "united_compacted": 12 / 16,
    }
    stored = ResultStore(tmp_path).lines(streaming["cells"][0]["cell"]).values()
    assert [s["pages_freed"] for s in stored] == [streaming["pages_freed"]] * 2
    assert main(["run", *words]) == 0
    assert "pages" not in capsys.readouterr().out.replace("--json", "")
    assert main(["run", *words, "--notes"]) == 0
    out = capsys.readouterr().out
    assert out.partition("pages freed,")[2].split("streamingllm")[1].split()[:4] == ["68.8", "68.8", "75.0", "75.0"]
    assert "Methods that keep every token free no page" in out and max(map(len, out.splitlines())) <= 100


def test_a_report_of_older_results_has_no_table_of_pages():
    assert pages.build_table([("snapkv kv_size=9", PagesFreed(0.104, 0.0, 1.0, 0.5))]).rows == (
        ("snapkv\nkv_size=9", "10.4", "0.0", "100.0", "50.0"),
    )


def test_bench_memory_counts_pages_of_layers_that_it_builds(capsys):
    shape = Shape(layers=4, query_heads=4, kv_heads=2, head_dim=32)
    chain = chain_of({"method": "streamingllm", "kv_size": 64, "frozen_layers": [1]})
    measured = layers.measure_bytes(chain, shape, 256, torch.float16)
    assert measured.made == 2 and shares(measured.pages_freed) == pytest.approx(
        (0.75 * 11 / 16,) * 2 + (0.75 * 0.75,) * 2
    )
    line = ["bench", "memory", "method=streamingllm,kivi", "kv_size=64", "n=256"]
    assert main(line) == 0
    out = capsys.readouterr().out
    table, _, notes = out.partition("pages freed,")[2].partition("Payload: ")
    assert table.split("streamingllm")[1].split()[:4] == ["68.8", "68.8", "75.0", "75.0"]
    assert "kivi" not in table and "these layers hold random numbers" in " ".join(notes.split())
    assert main([*line, "--json"]) == 0
    streaming, kivi = json.loads(capsys.readouterr().out)["rows"]
    assert streaming["pages_freed"]["apart"] == 11 / 16 and set(kivi["pages_freed"].values()) == {0.0}
    assert main([*line, "--formula"]) == 0
    assert "pages" not in capsys.readouterr().out
