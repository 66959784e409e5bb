"""Calibration as users meet it: in a run, by its own verb, in Python."""

import json
import shutil

import pytest
import torch
from support.families import LOCALS, WHOLE, build, prompt
from support.runs import prepare, run_json

import kvbench
from kvbench.base.errors import UsageError
from kvbench.cli.main import main

pytestmark = pytest.mark.e2e("runs whole command lines")

RUN = ["method=uncomp-group", "kv_size=48", "dataset=tiny/needle", "length=256", "examples=2"]
SMALL = [*RUN, "samples=2", "tokens=128"]


class Letters:
    bos_token_id = None

    def encode(self, content, add_special_tokens):
        return [3 + ord(c) % 120 for c in content]


@pytest.fixture
def letters(tmp_path):
    path = tmp_path / "letters.txt"
    path.write_text("a text of some letters, long enough for windows. " * 9)
    return path


def test_a_run_calibrates_at_first_use_says_so_and_uses_it_again(tmp_path, capsys):
    results = f"results={tmp_path}"
    assert main(["run", *SMALL, results, "--plan"]) == 0
    planned = " ".join(capsys.readouterr().out.split())
    assert "computed first: calibration of uncomp (2 samples of 128 tokens, the tiny model's corpus)" in planned
    assert not (tmp_path / "calibration").exists()
    assert main(["run", *SMALL, results]) == 0
    out, err = capsys.readouterr()
    assert "uncomp-group" in out and "calibrating uncomp-group: 2 samples of 128 tokens" in err
    (file,) = (tmp_path / "calibration").glob("uncomp-*.json")
    written = file.stat().st_mtime_ns
    assert main(["run", *SMALL, results, "--plan"]) == 0
    assert "computed first" not in capsys.readouterr().out
    assert main(["run", *SMALL, "limit=1", "grouping=reversed", results]) == 0
    assert "calibrating" not in capsys.readouterr().err
    assert file.stat().st_mtime_ns == written


def test_the_verb_makes_what_the_run_uses(tmp_path, capsys):
    folder = [f"results={tmp_path}", f"calibration={tmp_path / 'elsewhere'}"]
    line = ["method=uncomp-group", "samples=2", "tokens=128", *folder]
    assert main(["calibrate", *line, "--json"]) == 0
    (record,) = json.loads(capsys.readouterr().out)
    assert record["file"].startswith(str(tmp_path / "elsewhere")) and record["shapes"]["spectra"] == [6, 8, 32]
    assert main(["calibrate", *line]) == 0
    assert record["sha256"][:16] in capsys.readouterr().out
    status, _ = run_json(capsys, *SMALL, *folder)
    assert status == 0 and len(list((tmp_path / "elsewhere").glob("*.json"))) == 1
    cells = [json.loads(p.read_text()) for p in tmp_path.glob("cells/*/cell.json")]
    (chosen,) = [c for c in cells if c["label"].startswith("uncomp-group")]
    assert chosen["provenance"][0]["calibration"] == {"uncomp-group": record["sha256"]}
    assert chosen["identity"]["chain"]["calibration"]["uncomp-group"]["text_sha256"] == record["text_sha256"]
    assert [c for c in cells if c is not chosen and "calibration" in c["provenance"][0]] == []


def test_identity_follows_the_recipe_and_is_known_before_anything_is_computed(tmp_path, letters):
    def ids(*more):
        cells = prepare(*RUN, f"results={tmp_path}", *more).groups[0].cells
        return {c.label.split()[0]: c.id for c in cells}

    base = ids("samples=2", "tokens=128")
    assert base == ids("samples=2", "tokens=128", f"calibration={tmp_path / 'x'}")
    for change in (["samples=3", "tokens=128"], ["samples=2", "tokens=64"]):
        assert ids(*change)["uncomp-group"] != base["uncomp-group"]
    other = ids("samples=2", "tokens=128", f"calibration_text={letters}")
    assert other["uncomp-group"] != base["uncomp-group"] and other["full"] == base["full"]
    assert not (tmp_path / "calibration").exists()


def test_a_cell_is_not_continued_with_another_calibration(tmp_path, capsys):
    line = [*SMALL, f"results={tmp_path}"]
    assert main(["run", *line, "limit=1", "--json"]) == 0
    for path in tmp_path.glob("cells/*/cell.json"):
        record = json.loads(path.read_text())
        if "calibration" in record["provenance"][0]:
            record["provenance"][0]["calibration"]["uncomp-group"] = "0" * 64
            path.write_text(json.dumps(record))
    capsys.readouterr()
    assert main(["run", *line, "--json"]) == 2
    assert "calibration" in (text := capsys.readouterr().err) and "mix=true" in text
    assert main(["run", *line, "mix=true", "--json"]) == 0


def test_a_damaged_file_stops_the_run_with_its_name(tmp_path, capsys):
    assert main(["calibrate", "method=uncomp-group", "samples=2", "tokens=128", f"results={tmp_path}"]) == 0
    (data,) = (tmp_path / "calibration").glob("*.safetensors")
    data.write_bytes(data.read_bytes()[:-1])
    capsys.readouterr()
    assert main(["run", *SMALL, f"results={tmp_path}"]) == 2
    assert str(data) in (text := capsys.readouterr().err) and "delete" in text


BAD = {
    "calibrate": "calibrate needs a method",
    "calibrate method=snapkv": "method=snapkv needs no calibration",
    "calibrate method=uncomp-group tokens=31 samples=1": "estimates 32 dimensions (head_dim)",
    "calibrate method=uncomp-group tokens=5000": "context of 4096",
    "calibrate method=uncomp-group text=/nowhere/x.txt": "there is no file /nowhere/x.txt",
    "run method=uncomp-group calibration_text=/nowhere/x.txt": "there is no file /nowhere/x.txt",
}


@pytest.mark.parametrize("line", BAD)
def test_impossible_requests_say_why(line, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(line.split()) == 2
    assert BAD[line] in capsys.readouterr().err


@pytest.mark.parametrize("family", WHOLE + LOCALS)
def test_the_python_interface_calibrates_any_model(family, tmp_path, letters):
    model = build(family)
    knobs = {"kv_size": 16, "samples": 2, "tokens": 40, "folder": tmp_path / "kept", "text": letters}
    ready = kvbench.calibrate(model, Letters(), "uncomp-group", **knobs)
    (cache,) = kvbench.prefill(model, prompt(50), [ready])
    assert sum(len(p) for p in cache.layers[0].kept_positions()) == 16 * cache.layers[0].heads
    again = kvbench.calibrate(model, Letters(), {"method": "uncomp-group", "kv_size": 16}, samples=2, tokens=40,
                              folder=tmp_path / "kept", text=letters)  # fmt: skip
    assert again == ready and len(list((tmp_path / "kept").glob("*.json"))) == 1
    with pytest.raises(UsageError, match=r"kvbench\.calibrate"):
        kvbench.prefill(model, prompt(50), ["uncomp-group"])


def test_the_tiny_model_reads_its_own_corpus_in_python_too(tmp_path):
    model, tokenizer = kvbench.load_model("tiny")
    ready = kvbench.calibrate(model, tokenizer, "uncomp-group", folder=tmp_path, samples=1, tokens=128)
    assert ready.stages[0].calibration.meta["text"] == "the tiny model's corpus"


def test_a_models_weights_tell_models_apart(tmp_path, letters):
    model = build("llama")
    knobs = {"samples": 2, "tokens": 40, "text": letters, "folder": tmp_path / "a"}
    ready = kvbench.calibrate(model, Letters(), "uncomp-group", **knobs)
    with pytest.raises(UsageError, match="other weights"):
        kvbench.prefill(build("mistral"), prompt(50), [ready])
    with pytest.raises(UsageError, match="other weights"):
        kvbench.prefill(build("llama", torch.bfloat16), prompt(50), [ready])
    shutil.rmtree(tmp_path / "a")
    other = kvbench.calibrate(build("mistral"), Letters(), "uncomp-group", **knobs)
    assert other.stages[0].calibration != ready.stages[0].calibration
