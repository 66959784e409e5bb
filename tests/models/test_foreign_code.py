"""No code of a checkpoint runs, whatever standard input or a terminal answers to transformers' question."""

import ast
import io
import json
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, dynamic_module_utils

import kvbench
from kvbench.base.errors import UsageError
from kvbench.cli.main import main
from kvbench.models import embedded

pytestmark = pytest.mark.e2e("runs whole commands")

ROOT = Path(__file__).parents[2]
AUTO_MAP = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M", "AutoModel": "evil.M"}
OF_TOKENIZER = {"AutoTokenizer": ["evil.T", "evil.T"]}
YES = "y\n" * 20
REFUSED = "brings its own code (auto_map"
COMMANDS = {
    "run": "run model={} method=snapkv dataset=tiny/needle limit=1",
    "plan": "run model={} method=snapkv dataset=tiny/needle limit=1 --plan",
    "random weights": "run model={} model.weights=random method=snapkv dataset=tiny/needle limit=1",
    "memory": "bench memory model={} n=64",
    "time": "bench time model={} method=full",
    "engine": "run engine=openai url=http://127.0.0.1:9/v1 model={} dataset=tiny/needle limit=1",
    "calibrate": "calibrate method=palu model={}",
    "suite": "suite retain-v1-mini model={} method=snapkv",
    "table": "table think/1 model={} limit=1",
}


def make(folder, changed, tokenizer=()):
    """A small model in a folder, with ``changed`` keys of its config.json, beside code that leaves a mark."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    shutil.copy(embedded.path() / "tokenizer.json", folder)
    of_tokenizer = json.loads((embedded.path() / "tokenizer_config.json").read_text()) | dict(tokenizer)
    (folder / "tokenizer_config.json").write_text(json.dumps(of_tokenizer))
    (folder / "custom_generate").mkdir()
    for name in ("evil.py", "custom_generate/generate.py"):
        (folder / name).write_text(
            f"open({str(folder.parent / 'ran')!r}, 'w').close()\n"
            "from transformers import PreTrainedConfig as C, LlamaForCausalLM as M, PreTrainedTokenizerFast as T\n"
            "def generate(*args, **kwargs): pass\n"
        )
    return folder


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    """Make a checkpoint with its own code. Standard input says yes; after the test nothing has run or was copied."""
    modules = tmp_path / "modules"
    modules.mkdir()
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(modules))
    monkeypatch.setenv("HF_MODULES_CACHE", str(modules))
    monkeypatch.setattr(sys, "stdin", io.StringIO(YES))
    monkeypatch.chdir(tmp_path)
    yield lambda changed, tokenizer=(): make(tmp_path / "evil", changed, tokenizer)
    assert not (tmp_path / "ran").exists()
    assert not any(path.is_file() and path.suffix == ".py" and path.stat().st_size for path in modules.rglob("*"))


UNKNOWN = {"model_type": "evil", "auto_map": AUTO_MAP | OF_TOKENIZER}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_refuses_a_checkpoint_that_needs_its_own_code(command, hostile, capsys):
    folder = hostile(UNKNOWN, {"auto_map": OF_TOKENIZER})
    assert main(COMMANDS[command].format(folder).split()) == 2
    out, err = capsys.readouterr()
    assert REFUSED in err and f"model={folder}" in err and "Traceback" not in err, err
    assert "trust_remote_code" not in out + err and "[y/N]" not in out + err


def test_load_model_refuses_it(hostile):
    with pytest.raises(UsageError, match="runs no code of a checkpoint"):
        kvbench.load_model(hostile(UNKNOWN))


def test_what_transformers_has_itself_is_read_without_the_checkpoints_code(hostile):
    """Many checkpoints of known families name their own code, too."""
    folder = hostile({"auto_map": AUTO_MAP | OF_TOKENIZER}, {"auto_map": OF_TOKENIZER})
    model, tokenizer = kvbench.load_model(folder)
    assert type(model) is LlamaForCausalLM and not hasattr(model.config, "auto_map")
    (cache,) = kvbench.prefill(model, tokenizer("one two three", return_tensors="pt").input_ids[0], ["full"])
    assert len(kvbench.generate(model, [cache], 2)[0]) == 2


def test_a_tokenizer_that_needs_its_own_code_is_refused(hostile):
    named = {"auto_map": OF_TOKENIZER, "tokenizer_class": "EvilTokenizer"}
    with pytest.raises(UsageError, match="brings its own code"):
        kvbench.load_model(hostile({}, named))


def with_a_foreign_part(folder):
    """Keys of a config.json whose model is of transformers, and whose part for pictures is the checkpoint's own."""
    part = {"model_type": "chameleon_vqgan", "auto_map": AUTO_MAP, "_name_or_path": str(folder)}
    return {"model_type": "gemma3", "is_encoder_decoder": True, "vision_config": part}


@pytest.mark.parametrize("place", ["config", "part"])
def test_a_class_that_transformers_lacks_is_not_taken_from_the_checkpoint(place, hostile, tmp_path):
    """Neither for the model nor for a part of it, whose configuration names its own class."""
    changed = {"model_type": "vit", "auto_map": AUTO_MAP}
    if place == "part":
        changed = with_a_foreign_part(tmp_path / "evil")
    with pytest.raises(UsageError, match="no causal language model of it"):
        kvbench.load_model(hostile(changed))


@pytest.mark.parametrize("terminal", [False, True])
def test_yes_on_standard_input_and_on_a_terminal_runs_nothing(terminal, hostile, tmp_path):
    """As a folder, and as an id of the hub that is in the local cache."""
    folder = hostile(UNKNOWN)
    commit = "c0ffee" * 6 + "cafe"
    cached = tmp_path / "hub" / "models--owner--evil"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text(commit)
    shutil.copytree(folder, cached / "snapshots" / commit)
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub"), "PYTHONPATH": str(ROOT)}
    for name in (str(folder), "owner/evil"):
        words = COMMANDS["run"].format(name).split()
        done = answer_yes([sys.executable, "-m", "kvbench", *words], environment, terminal)
        assert done.returncode == 2 and REFUSED in done.stderr and "[y/N]" not in done.stdout + done.stderr


def answer_yes(command, environment, terminal):
    if not terminal:
        return subprocess.run(command, input=YES, env=environment, text=True, capture_output=True)
    ours, theirs = pty.openpty()
    os.write(ours, YES.encode())
    try:
        return subprocess.run(command, stdin=theirs, env=environment, text=True, capture_output=True)
    finally:
        os.close(ours)
        os.close(theirs)


@pytest.mark.parametrize("place", ["config", "part", "tokenizer"])
def test_lm_eval_refuses_it_too(place, hostile, tmp_path):
    pytest.importorskip("lm_eval", reason="lm-eval is not installed here: make test-peers")
    from kvbench.lm_eval import KvbenchLM

    tokenizer = {"auto_map": OF_TOKENIZER, "tokenizer_class": "EvilTokenizer"}
    changed = {"config": UNKNOWN, "part": with_a_foreign_part(tmp_path / "evil"), "tokenizer": {}}[place]
    folder = str(hostile(changed, tokenizer))
    with pytest.raises(UsageError, match=r"runs no code of a checkpoint|no causal language model of it"):
        KvbenchLM(folder)
    with pytest.raises(UsageError, match="trust_remote_code is not possible"):
        KvbenchLM(folder, trust_remote_code=True)


def test_checkpoints_are_read_in_one_place():
    """Each of these could run a checkpoint's code; kvbench/models/checkpoint.py is the one that cannot."""
    calls = []
    for path in (*ROOT.glob("kvbench/**/*.py"), *ROOT.glob("scripts/**/*.py")):
        text = path.read_text("utf-8")
        nodes = ast.walk(ast.parse(text)) if "from_pretrained" in text else ()
        for node in nodes:
            if isinstance(node, ast.Attribute) and node.attr == "from_pretrained":
                calls.append(path.relative_to(ROOT).as_posix())
    assert calls == ["kvbench/models/checkpoint.py"]
