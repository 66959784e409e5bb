"""Calibration files, texts, identities and refusals, with a stage of a few lines."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.families import build, prompt

import kvbench
from kvbench.base.errors import UsageError
from kvbench.engine.calibration import files, text
from kvbench.engine.calibration.session import Session
from kvbench.methods.core.base import Selector
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.recipe import Calibration, Recipe, Request, digest


@dataclass(frozen=True, kw_only=True)
class Frequent(Selector):
    """Prefers the positions whose index is a frequent token of the text: only the machinery matters here."""

    id: ClassVar[str] = "frequent"
    calls: ClassVar[list] = []
    revision_of_recipe: ClassVar[int] = 1

    samples: int = 3
    tokens: int | None = 20

    def recipe(self):
        return Recipe("frequencies", self.revision_of_recipe, self.samples, self.tokens, knobs={"base": 2})

    def calibrate(self, run):
        run.recipe.check(run.model.config.head_dim, "head_dim")
        counts = torch.zeros(run.model.config.vocab_size)
        for window in run.windows():
            self.calls.append(len(window))
            counts += torch.bincount(window, minlength=len(counts))
        return {"counts": counts}

    def scores(self, cache, obs, capacity):
        return self.calibration.tensors["counts"][: obs.n].expand(cache.heads, -1)


class Words:
    """A tokenizer of one token a letter."""

    bos_token_id = 1

    def encode(self, content, add_special_tokens):
        return [3 + ord(c) % 120 for c in content]


@pytest.fixture
def session(tmp_path):
    Frequent.calls.clear()
    source = tmp_path / "mine.txt"
    source.write_text("the quick brown fox jumps over the lazy dog\n" * 9)
    return Session(tmp_path / "kept", {"name": "small"}, Words(), 512, text=str(source))


def chain(**knobs):
    return Chain((Frequent(kv_size=8, **knobs),))


def test_a_bound_chain_runs_and_an_unbound_one_says_what_to_do(session):
    model = build("llama")
    with pytest.raises(UsageError, match=r"kvbench\.calibrate\(model, tokenizer, 'frequent'\)"):
        kvbench.prefill(model, prompt(30), [chain()])
    bound = session.bind(chain(), model, quiet=True)
    (cache,) = kvbench.prefill(model, prompt(30), [bound])
    assert cache.layers[0].tokens == 8
    assert Frequent.calls == [20] * 3


def test_it_is_computed_once_and_read_from_its_file_afterwards(session, capsys):
    model = build("llama")
    assert [r.recipe.kind for r in session.missing(chain())] == ["frequencies"]
    first = session.bind(chain(), model)
    message = capsys.readouterr().err
    assert "calibrating frequent: 3 samples of 20 tokens, the file mine.txt" in message
    assert session.missing(chain()) == []
    again = session.bind(chain(), model)
    assert len(Frequent.calls) == 3 and capsys.readouterr().err == ""
    assert again == first and hash(again) == hash(first)
    assert again.stages[0].calibration.meta == first.stages[0].calibration.meta
    torch.testing.assert_close(again.stages[0].calibration.tensors, first.stages[0].calibration.tensors)
    session.bind(chain(samples=4), model, quiet=True)
    assert len(Frequent.calls) == 7


def test_the_record_says_everything_that_decided_it(session):
    bound = session.bind(chain(), build("llama"), quiet=True)
    (path,) = session.folder.glob("*.json")
    record = json.loads(path.read_text())
    assert {"kind", "revision", "samples", "tokens", "knobs", "text", "text_sha256", "model", "weights"} <= set(record)
    assert record["shapes"] == {"counts": [128]} and {"torch", "transformers", "kvbench"} == set(record["versions"])
    assert record["sha256"] == digest(load_file(path.with_suffix(".safetensors")))
    assert bound.provenance() == {"calibration": {"frequent": record["sha256"]}}
    assert not list(session.folder.glob("*.tmp"))


def test_identity_has_the_recipe_and_the_text_and_no_path_or_result(session, tmp_path):
    identity = session.chain_identity(chain())
    entry = identity["calibration"]["frequent"]
    assert entry["samples"] == 3 and entry["knobs"] == {"base": 2} and len(entry["text_sha256"]) == 64
    assert str(tmp_path) not in json.dumps(identity)
    bound = session.bind(chain(), build("llama"), quiet=True)
    assert session.chain_identity(bound) == identity
    assert "calibration" not in bound.stages[0].knobs()
    (tmp_path / "mine.txt").write_text("another text " * 9)
    other = Session(session.folder, {"name": "small"}, Words(), 512, text=str(tmp_path / "mine.txt"))
    assert other.chain_identity(chain()) != identity
    assert other.missing(chain())


def test_another_models_calibration_is_refused(session):
    bound = session.bind(chain(), build("llama"), quiet=True)
    with pytest.raises(UsageError, match="other weights"):
        kvbench.prefill(build("qwen2"), prompt(30), [bound])
    with pytest.raises(UsageError, match=r"frequencies-\w+\.json was computed on other weights"):
        session.bind(chain(), build("mistral"), quiet=True)
    other = Session(session.folder, {"name": "other"}, Words(), 512, text=session.text)
    ours, its = (s.path(s.request(chain().stages[0])) for s in (session, other))
    for suffix in (".json", ".safetensors"):
        its.with_suffix(suffix).write_bytes(ours.with_suffix(suffix).read_bytes())
    with pytest.raises(UsageError, match=r"\.json was made with another model: delete"):
        other.bind(chain(), build("llama"), quiet=True)


def damage_json(path):
    path.write_text(path.read_text()[:-9])


def damage_values(path):
    data = path.with_suffix(".safetensors")
    tensors = load_file(data)
    save_file({name: t + 1 for name, t in tensors.items()}, data)


def damage_length(path):
    data = path.with_suffix(".safetensors")
    data.write_bytes(data.read_bytes()[:-4])


def remove(path):
    path.with_suffix(".safetensors").unlink()


def turn_revision(path):
    path.write_text(json.dumps({**json.loads(path.read_text()), "revision": 7}))


DAMAGES: dict[Callable, str] = {
    damage_json: r"\.json is damaged: delete",
    damage_values: r"\.safetensors is damaged \(its checksum",
    damage_length: r"\.safetensors is damaged \(",
    remove: r"\.safetensors is damaged \(",
    turn_revision: r"\.json was made with revision 7, and 1 is needed: delete",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda d: d.__name__)
def test_a_damaged_file_is_refused_by_name_and_never_replaced_silently(session, damage):
    model = build("llama")
    session.bind(chain(), model, quiet=True)
    (path,) = session.folder.glob("*.json")
    damage(path)
    with pytest.raises(UsageError, match=DAMAGES[damage]):
        session.bind(chain(), model, quiet=True)
    assert len(Frequent.calls) == 3


def test_too_few_tokens_are_refused(session):
    with pytest.raises(UsageError, match=r"tokens=15 samples=3 .* 16 dimensions \(head_dim\)"):
        session.bind(chain(tokens=15), build("llama"), quiet=True)
    together = Recipe("x", 1, 2, 15, each=False)
    together.check(30, "hidden size")
    with pytest.raises(UsageError, match="only 30 tokens"):
        together.check(31, "hidden size")
    with pytest.raises(UsageError, match="context of 512"):
        session.bind(chain(tokens=513), build("llama"), quiet=True)
    with pytest.raises(UsageError, match="fewer than one window of 500"):
        session.bind(chain(tokens=500), build("llama"), quiet=True)


def test_windows_are_those_of_a_slow_look_at_the_text():
    content = "abcdefghijklmnopqrstuvwxyz"
    source = text.FileText("x", content)
    windows = list(source.windows(Words(), 40, 6))
    assert all(w[0] == 1 and len(w) == 6 for w in windows)
    ids = Words().encode(content, False)
    starts = [ids.index(int(w[1])) for w in windows]
    assert all(w[1:].tolist() == ids[s : s + 5] for w, s in zip(windows, starts, strict=True))
    assert len(set(starts)) > 10 and max(starts) <= 21
    assert [w.tolist() for w in windows] == [w.tolist() for w in source.windows(Words(), 40, 6)]


def test_the_default_text_is_train_else_the_first_four_fifths_of_valid_never_test(tmp_path, monkeypatch):
    monkeypatch.delenv("KVBENCH_DATA", raising=False)
    folder = tmp_path / "wikitext2"
    folder.mkdir()
    (folder / "test.txt").write_text("secret")
    with pytest.raises(UsageError, match=r"train split at wikitext2/train\.txt"):
        text.find(False, None, str(tmp_path))
    (folder / "valid.txt").write_text("".join(f"line {i}\n" for i in range(10)))
    valid = text.find(False, None, str(tmp_path))
    assert valid.name == "wikitext2/valid.txt, first 80%"
    assert valid.content == "".join(f"line {i}\n" for i in range(8))
    (folder / "train.txt").write_text("train")
    assert (text.find(False, None, str(tmp_path)).name, valid.sha256) != ("wikitext2/valid.txt", "")
    assert text.find(False, None, str(tmp_path)).content == "train"
    assert text.find(True, None, str(tmp_path)).name == "the tiny model's corpus"
    with pytest.raises(UsageError, match="no file"):
        text.find(True, str(tmp_path / "absent"), None)


def test_the_tiny_models_corpus_has_windows_of_its_own():
    source = text.CorpusText()
    windows = list(source.windows(None, 3, 256))
    assert {w.shape for w in windows} == {(256,)} and len({tuple(w.tolist()) for w in windows}) == 3
    assert len(source.sha256) == 64
    with pytest.raises(UsageError, match="2048"):
        next(source.windows(None, 1, 4000))


def test_memory_of_a_calibration_does_not_grow_with_samples(session):
    """Windows come one at a time, so a stage that keeps none of them holds one."""
    stored = session.source.windows(Words(), 1000, 20)
    assert iter(stored) is stored


def test_equality_is_by_content():
    tensors = {"a": torch.ones(2)}
    one, two = (Calibration("k", digest(tensors), "w", dict(tensors)) for _ in range(2))
    assert one == two and hash(one) == hash(two)
    assert one != Calibration("k", digest({"a": torch.zeros(2)}), "w", tensors)
    assert digest({"a": torch.ones(2)}) != digest({"a": torch.ones(2, 1)}) != digest({"b": torch.ones(2, 1)})


def test_keys_differ_by_everything_in_a_request():
    base = Recipe("k", 1, 2, 3, knobs={"top": 1})
    plain = Request(base, "m", "t", "h")
    others = [
        Request(Recipe("k", 2, 2, 3, knobs={"top": 1}), "m", "t", "h"),
        Request(Recipe("k", 1, 2, 3, knobs={"top": 2}), "m", "t", "h"),
        Request(Recipe("k", 1, 3, 3, knobs={"top": 1}), "m", "t", "h"),
        Request(base, "n", "t", "h"),
        Request(base, "m", "t", "i"),
    ]
    assert len({r.key for r in [plain, *others]}) == 6
    assert files.path_of(__import__("pathlib").Path("f"), plain).name.startswith("k-")
