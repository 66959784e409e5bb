"""Methods that compress nothing: their rows say so, in the place of a difference to the full cache."""

import json
from dataclasses import replace

import pytest
from runs import prepare, run_json

from kvbench.cli.main import main
from kvbench.run import experiment
from kvbench.run.run_plan import keeps_everything
from kvbench.run.summary import is_unchanged

pytestmark = pytest.mark.e2e("runs whole tables")

RUN = ["dataset=tiny/needle", "length=256", "limit=2"]
REACHED_BY_NOTHING = [
    ["method=keydiff", "kv_size=4000", "decode_budget=4000"],
    ["method=keydiff", "kv_size=4000", "decode_budget=250"],  # it would choose again after 128 tokens
    ["method=h2o", "kv_size=4000"],
    ["method=snapkv,random", "kv_size=4000"],
    ["method=streamingllm", "kv_ratio=1"],
    ["method=pyramidkv", "kv_size=4000", "per=query_head"],
]
REACHED = [
    ["method=snapkv", "kv_size=64"],
    ["method=tova", "kv_size=256"],  # the prompt fits, not the answer behind it
    ["method=keydiff", "kv_size=4000", "decode_budget=250", "decode_every=1"],
    ["method=fp8,kivi"],  # all tokens, fewer bytes
    ["method=snapkv+think", "kv_size=4000", "ratio=0.4"],
    # one layer that is spared says nothing of the others
    ["method=keydiff", "kv_size=1024", "decode_budget=258", "decode_every=1", "frozen_layers=0"],
    ["method=refreekv"],
    ["method=twilight"],  # holds all tokens and attends some
    ["method=think", "ratio=0.1", "per=query_head"],  # more bytes than the full cache, and fewer than at its heads
]


@pytest.mark.parametrize("arguments", REACHED_BY_NOTHING)
def test_a_method_that_compresses_nothing_has_no_difference_to_show(arguments, tmp_path, capsys):
    assert main(["run", *RUN, *arguments, f"results={tmp_path}"]) == 0
    out, err = capsys.readouterr()
    assert "Δ +0.0" not in out and "nothing was" in out
    assert out.count("nothing was compressed: tokens, bytes and answers are those of the full cache") == 1
    # and before any prompt is read
    assert err.startswith("kvbench: ") and "nothing will be compressed of tiny/needle (at most 256 tokens)" in err
    _, report = run_json(capsys, *RUN, *arguments, f"results={tmp_path}")
    full, *rows = (row["cells"][0] for row in report["rows"])
    assert "nothing_compressed" not in full
    assert all(row["nothing_compressed"] and row["score"] == full["score"] for row in rows)
    assert main(["run", *RUN, *arguments, f"results={tmp_path}", "--format", "csv"]) == 0
    assert "True" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", REACHED)
def test_a_method_that_compresses_a_little_keeps_its_difference(arguments, tmp_path, capsys):
    assert main(["run", *RUN, *arguments, f"results={tmp_path}", "--json"]) == 0
    out, err = capsys.readouterr()
    assert "nothing will be compressed" not in err
    rows = json.loads(out)["rows"]
    assert not any("nothing_compressed" in cell for row in rows for cell in row["cells"])
    assert all("delta" in cell for row in rows[1:] for cell in row["cells"])


def test_one_other_answer_in_a_hundred_is_too_few(tmp_path):
    """From 99 % of prompts on a method compresses nothing."""
    arguments = "length=256", "limit=4", "method=h2o", "kv_size=4000"
    prepared = prepare("dataset=tiny/needle", *arguments, f"results={tmp_path}")
    experiment.measure(prepared, quiet=True)
    (group,) = prepared.groups
    full, h2o = group.cells
    stored = prepared.store.samples(h2o.id)
    (first, *_) = stored

    class Store:
        def samples(self, cell_id):
            return {f"{i}/{k}": s for i in range(25) for k, s in prepared.store.samples(cell_id).items()}

    def unchanged(count, **changes):
        samples = Store().samples(h2o.id)
        for name in list(samples)[:count]:
            samples[name] = replace(samples[name], **changes)
        return is_unchanged(group, h2o, samples, Store())

    assert unchanged(0) and unchanged(1, prediction="another") and not unchanged(2, prediction="another")
    assert not unchanged(2, kept=stored[first].n - 1.0)
    assert not unchanged(2, payload16=stored[first].payload16 - 1)
    assert not unchanged(2, decode_peak=stored[first].decode_peak - 1)
    assert not is_unchanged(group, full, Store().samples(full.id), Store())


def test_what_never_reaches_its_budget_is_known_beforehand():
    def of(*arguments):
        (group,) = prepare("dataset=tiny/needle", "length=256", "limit=1", *arguments).groups
        return group.cells[-1].chain

    assert keeps_everything(of("method=snapkv", "kv_size=256"), 256, 8)
    assert not keeps_everything(of("method=snapkv", "kv_size=255"), 256, 8)
    assert keeps_everything(of("method=tova", "kv_size=264"), 256, 8)
    assert not keeps_everything(of("method=tova", "kv_size=263"), 256, 8)
    while_decoding = "method=keydiff", "kv_size=300", "decode_every=8"
    assert keeps_everything(of(*while_decoding, "decode_budget=265"), 256, 9)
    assert not keeps_everything(of(*while_decoding, "decode_budget=264"), 256, 9)
    assert keeps_everything(of(*while_decoding, "decode_budget=100"), 256, 8)  # an answer ends before it chooses
    assert not keeps_everything(of("method=snapkv+kivi", "kv_size=300"), 256, 8)
    assert not keeps_everything(of("method=full"), 256, 8)
    assert not keeps_everything(of("method=refreekv"), 256, 8)  # the data decide what stays
