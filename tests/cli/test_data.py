"""data: fetch and status as a user calls them, over a hub of our own making. No network is used."""

import json

import pytest
import yaml
from support.hubs import COMMIT, SUITE, FakeHub, archive

from kvbench.base.errors import KvbenchError
from kvbench.cli.main import main
from kvbench.tasks import fetch, hub


@pytest.fixture
def world(tmp_path, monkeypatch):
    """One dataset of our own in conf, a hub that has it, and no data folder in the environment."""
    (tmp_path / "conf" / "dataset").mkdir(parents=True)
    entry = {"hub": {"repo": "owner/demo", "licence": "CC0-1.0", "files": [SUITE], "instead": "ready.jsonl"}}
    (tmp_path / "conf" / "dataset" / "demo.yaml").write_text(yaml.safe_dump({"demo": entry}))
    (tmp_path / "conf" / "dataset" / "own.yaml").write_text("own:\n  _target_: x\n")
    store = FakeHub({"data.zip": archive(tmp_path, a='"one"\n', b='"two"\n')})
    monkeypatch.setattr(fetch, "conf_dir", lambda: tmp_path / "conf")
    monkeypatch.setattr(hub, "HuggingFace", lambda: store)
    monkeypatch.delenv("KVBENCH_DATA", raising=False)
    return tmp_path


def test_the_verb_from_nothing_to_a_changed_file(world, capsys):
    root = world / "new" / "folder"
    assert main(["data", "status"]) == 0
    out = capsys.readouterr().out
    assert "data folder: none" in out and "own               nothing to download" in out
    assert "from owner/demo at main; not verified; licence: CC0-1.0" in out
    assert main(["data", "fetch", "demo", f"data.root={root}"]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"demo: 2 of 2 files fetched, in {root}. Licence: CC0-1.0\n"
    assert captured.err == "kvbench: fetching data.zip of owner/demo\n"
    assert main(["data", "fetch", "demo", f"data.root={root}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["fetched"] == []
    assert main(["data", "status", "demo", f"data.root={root}", "--json"]) == 0
    (record,) = json.loads(capsys.readouterr().out)["datasets"]
    assert record["state"] == "fetched" and record["commits"] == [COMMIT] and record["verified"] is False
    (root / "demo" / "b.jsonl").write_text('"TWO"\n')
    assert main(["data", "status", f"data.root={root}"]) == 1
    captured = capsys.readouterr()
    assert "demo              1 changed, 1 fetched, of 2 files" in captured.out
    assert "demo/b.jsonl has changed since it was fetched" in captured.err
    assert main(["data", "fetch", "demo", f"data.root={root}"]) == 2


def test_a_file_that_is_read_in_the_place_of_missing_ones_is_named(world, capsys):
    (world / "ready.jsonl").touch()
    assert main(["data", "status", "demo", f"data.root={world}"]) == 0
    assert "ready:\n  demo              missing; ready.jsonl is read in their place" in capsys.readouterr().out


def test_datasets_whose_files_are_there_come_first(world, capsys):
    assert main(["data", "status", f"data.root={world}"]) == 0
    out = capsys.readouterr().out
    assert out.index("ready:\n") < out.index("own ") < out.index("missing:\n") < out.index("demo ")


def test_show_prints_what_the_model_reads(tmp_path, capsys):
    row = {"context": "one two\x1b[2J three four.", "question": " How many?", "answers": ["four"], "max_new_tokens": 3}
    (tmp_path / "p.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(row))
    arguments = ["data", "show", "file", f"path={tmp_path / 'p.jsonl'}"]
    assert main([*arguments, "query_aware=false"]) == 0
    out = capsys.readouterr().out
    assert "<s>one two" in out and "\x1b" not in out
    assert out.count("file/p, example line-") == 1  # limit=1
    assert "--- read after the compression:\nHow many?\n" in out
    assert out.endswith("--- at most 3 new tokens; references: 'four'\n\n")
    assert main([*arguments, "limit=2", "max_length=8", "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)["examples"]
    assert first["prompt"] == first["context"] and (first["question"], first["meta"]) == (" How many?", {})
    assert first["tokens"] == 8 and first["cut"] > 0 and (first["after"], second["id"]) == ("", "line-2")
    arguments = ["data", "show", "kv_retrieval", "records=5", "contexts=1", "questions=2"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert out.count("--- a question on the compressed context:\nKey:") == 2 and "--- at most 100 new" not in out
    assert main([*arguments, "--json"]) == 0
    (record,) = json.loads(capsys.readouterr().out)["examples"]
    assert [len(turn["answers"]) for turn in record["turns"]] == [1, 1]
    for bad, reason in (
        ([], "needs a dataset"),
        (["tiny/nedle"], "Did you mean needle"),
        (["tiny", "x=1"], "unknown option"),
    ):
        assert main(["data", "show", *bad]) == 2
        assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("fetch", "needs a dataset: demo"),
        ("fetch demoo data.root={tmp}/x", "Did you mean demo"),
        ("fetch own data.root={tmp}/x", "has no list of files to fetch"),
        ("fetch demo", "needs a data folder"),
        ("fetch demo data.root=", "is empty"),
        ("fetch demo root={tmp}", "data fetch takes data.root=FOLDER"),
        ("fetch demo data.root={tmp}/conf/dataset/demo.yaml", "cannot be created"),
        ("status data.root={tmp}/nowhere", "is not a folder"),
        ("status demoo", "Did you mean demo"),
    ],
)
def test_requests_that_cannot_be_carried_out(world, arguments, reason, capsys):
    assert main(["data", *arguments.format(tmp=world).split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("kvbench: ") and reason in captured.err


def test_a_download_that_fails_is_one_line_and_status_1(monkeypatch, tmp_path, capsys):
    import huggingface_hub

    class GatedRepoError(Exception):
        pass

    def refuse(self, *arguments, **more):
        raise GatedRepoError("403\nnot for you")

    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", refuse)
    assert main(["data", "fetch", "gsm8k", f"data.root={tmp_path}"]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "403 not for you" in err and "accept its terms" in err
    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", lambda *a, **k: 1 / 0)
    assert main(["data", "fetch", "gsm8k", f"data.root={tmp_path}"]) == 1
    assert "check the network, or put the file there yourself" in capsys.readouterr().err


def test_real_downloads_go_through_huggingface_hub(monkeypatch, tmp_path):
    import huggingface_hub

    requests = {}

    def download(repo, name, **more):
        requests.update(repo=repo, name=name, **more)
        path = more["local_dir"] / name
        path.write_bytes(b"x")
        return str(path)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    path = hub.HuggingFace().download_file("owner/demo", "dataset", "x.json", COMMIT, tmp_path)
    assert path.read_bytes() == b"x"
    assert requests == {
        "repo": "owner/demo",
        "name": "x.json",
        "repo_type": "dataset",
        "revision": COMMIT,
        "local_dir": tmp_path,
    }


def test_an_address_is_read_into_the_folder(tmp_path):
    (tmp_path / "there.txt").write_text("salt")
    path = hub.HuggingFace().download_url((tmp_path / "there.txt").as_uri(), tmp_path)
    assert path.read_text() == "salt"
    with pytest.raises(KvbenchError, match="could not be fetched"):
        hub.HuggingFace().download_url((tmp_path / "nowhere.txt").as_uri(), tmp_path)


def test_help_has_examples(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["data", "--help"])
    assert stop.value.code == 0
    assert "kvbench data fetch gsm8k" in capsys.readouterr().out
