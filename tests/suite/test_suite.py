"""The verbs suite and verify end to end on the tiny model: a card, its check, and what the check must notice."""

import gzip
import io
import json
import re
import shutil
from contextlib import redirect_stdout

import pytest
import suite_pages

from kvbench.base.errors import MissingData
from kvbench.cli.main import main
from kvbench.kv.model_shape import from_config
from kvbench.methods.core.resolve import resolve
from kvbench.models import load
from kvbench.plan import config, inputs
from kvbench.suite import definition, rows, verify_controls
from kvbench.suite.definition import METHOD
from kvbench.suite.verify import verify_folder

pytestmark = pytest.mark.e2e("measures a suite")


@pytest.fixture(scope="module", autouse=True)
def tasks_loaded_once():
    """Every plan of the suite's quick edition has the same texts: they are made and cut once for this file."""
    loaded = {}
    load_tasks = inputs.load_tasks

    def load_once(*arguments, tokenizer, **options):
        key = repr((arguments, options["query_aware"], options["data"]))
        if key not in loaded:
            loaded[key] = load_tasks(*arguments, tokenizer=tokenizer, **options)
        return loaded[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inputs, "load_tasks", load_once)
        yield


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A folder of the quick edition with SnapKV, which two shards have measured together."""
    results = tmp_path_factory.mktemp("suite")
    words = ["suite", "tiny", "edition=quick", "method=snapkv", f"results={results}"]
    for shard in (0, 1):
        with redirect_stdout(io.StringIO()) as out:
            assert main([*words, f"shard={shard}", "shards=2"]) == 0
        assert "This shard is measured." in out.getvalue()
    with pytest.MonkeyPatch.context() as patch:  # nothing is left to measure
        patch.setattr(load, "load_weights", lambda *arguments, **options: pytest.fail("weights were loaded"))
        assert main([*words, "--json"]) == 0
    return results / "own" / "suite" / "tiny-quick"


@pytest.fixture
def copied(measured, tmp_path):
    return shutil.copytree(measured, tmp_path / "copy")


def samples_of(folder):
    with gzip.open(folder / "samples.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def write_samples(folder, entries):
    with gzip.open(folder / "samples.jsonl.gz", "wt", encoding="utf-8") as out:
        out.writelines(json.dumps(entry) + "\n" for entry in entries)


def first_answer(entries):
    return next(entry["sample"] for entry in entries if "sample" in entry and entry["sample"]["score"] == 1.0)


def test_the_card_has_a_line_a_method_and_all_controls(measured, capsys):
    results = measured.parents[2]
    assert main(["suite", "tiny", "edition=quick", "method=snapkv", f"results={results}", "--stored"]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0] == "tiny: the tiny model, synthetic prompts of 256 tokens (quick edition, a first look)"
    assert lines[1].startswith("tiny @1/2: snapkv ") and "worst " in lines[1]
    assert re.search(r"% of the bytes; pages freed \d+ %, compacted 50 %", " ".join(lines[1:3]))
    for name in ("random", "streamingllm", "fp8", "q4_0", "firsttokens", "snapkv"):
        assert any(line.startswith(f"{name} ") for line in lines)
    assert {path.name for path in measured.iterdir()} == {"card.md", "card.png", "results.jsonl", "samples.jsonl.gz"}
    stored = [json.loads(line) for line in (measured / "results.jsonl").read_text().splitlines()]
    assert stored[0]["role"] == "full" and {row["division"] for row in stored} == {"closed"}
    assert all(row["bytes"] <= 102 * 1.02 / row["budget"] for row in stored[1:])


def test_a_folder_as_it_was_written_is_verified(measured, capsys):
    """The shards have measured every answer, and their means are those of the answers."""
    assert main(["verify", str(measured)]) == 0
    assert ": verified. " in capsys.readouterr().out


def test_without_texts_all_but_the_answers_is_checked(measured, monkeypatch):
    def missing(*args, **kwargs):
        raise MissingData("no texts")

    monkeypatch.setattr("kvbench.suite.plan.prepare", missing)
    with pytest.raises(MissingData):
        verify_folder(measured)
    checked = verify_folder(measured, without_texts=True)
    assert not checked.problems and checked.numbers and not checked.answers and checked.unscored


def test_answers_of_a_folder_need_not_be_measured_again(measured, tmp_path, capsys):
    words = ["suite", "tiny", "edition=quick", "method=snapkv,h2o", f"results={tmp_path}"]
    assert main([*words, f"from={measured}", "--plan"]) == 0
    # two rows of H2O are left of both parts
    assert re.findall(r"(\d+) of (\d+) answers", capsys.readouterr().out) == [("110", "130"), ("88", "104")]
    assert main([*words, f"from={tmp_path}", "--plan"]) == 2
    assert "it has no samples.jsonl.gz" in capsys.readouterr().err


def test_a_changed_answer_is_noticed(copied):
    entries = samples_of(copied)
    first_answer(entries)["prediction"] = "nothing of the kind"
    write_samples(copied, entries)
    assert any("the answer to" in problem for problem in verify_folder(copied).problems)


def test_a_changed_score_is_noticed(copied):
    entries = samples_of(copied)
    first_answer(entries)["score"] = 0.0
    write_samples(copied, entries)
    assert any("scores 1.0, and 0.0 is stored" in problem for problem in verify_folder(copied).problems)


def test_a_missing_sample_is_noticed(copied):
    entries = samples_of(copied)
    entries.remove(next(entry for entry in entries if "sample" in entry))
    write_samples(copied, entries)
    assert any(problem.endswith(" is missing") for problem in verify_folder(copied).problems)


def test_a_changed_number_is_noticed(copied, capsys):
    path = copied / "results.jsonl"
    stored = [json.loads(line) for line in path.read_text().splitlines()]
    snapkv = next(row for row in stored if row["name"] == "snapkv")
    snapkv["parts"]["retrieval"]["retained"] += 1
    path.write_text("".join(json.dumps(row) + "\n" for row in stored))
    assert main(["verify", str(copied)]) == 1
    out = capsys.readouterr().out
    assert "NOT verified, 1 problems" in out and f"snapkv at 1/{snapkv['budget']}: parts is" in out


def test_a_changed_card_is_noticed(copied):
    path = copied / "card.md"
    text = path.read_text()
    cell = re.search(r"^\| snapkv \| 1/\d+ \| \d+ \| (\S+)", text, re.MULTILINE)
    path.write_text(text[: cell.start(1)] + "100" + text[cell.end(1) :])
    (problem,) = verify_folder(copied).problems
    line = text[: cell.start(1)].count("\n") + 1
    assert (
        problem.startswith(f"card.md, line {line}: it says '| snapkv") and repr(text.splitlines()[line - 1]) in problem
    )
    path.unlink()
    assert verify_folder(copied).problems == ["card.md is missing"]


def test_a_missing_control_is_noticed(copied):
    path = copied / "results.jsonl"
    kept = [line for line in path.read_text().splitlines() if json.loads(line)["name"] != "firsttokens"]
    path.write_text("\n".join(kept) + "\n")
    assert "the control firsttokens at 1/2 is missing" in verify_folder(copied).problems


def point_at(row, other):
    """Let a row have the results of another one."""
    row["results"] = {part: other["results"][part] for part in row["results"]}


def rename(rows, name, other):
    for row in rows:
        row["name"] = {name: other, other: name}.get(row["name"], row["name"])


def of(rows, name, budget):
    return next(row for row in rows if row["name"] == name and row["budget"] == budget)


FORGERIES = {
    "snapkv at 1/8 on tiny/needle: the result": lambda rows: point_at(of(rows, "snapkv", 8), of(rows, "snapkv", 2)),
    "firsttokens at 1/2 on tiny/needle: the result": lambda rows: point_at(
        of(rows, "firsttokens", 2), of(rows, "random", 2)
    ),
    "snapkv at 1/2 on tiny/needle: the result": lambda rows: rename(rows, "snapkv", "streamingllm"),
    "firsttokens at 1/2: its role is comparison, and the suite says": lambda rows: of(rows, "firsttokens", 2).update(
        role="comparison"
    ),
    "snapkv at 1/2: commit is": lambda rows: of(rows, "snapkv", 2).update(commit=["deadbeef0000"]),
    "snapkv at 1/2: dtype is float16": lambda rows: of(rows, "snapkv", 2).update(dtype="float16"),
    "snapkv at 1/2: there are two such rows": lambda rows: rows.append(of(rows, "snapkv", 2) | {"mean": 99.0}),
    "absent at 1/2 on tiny/needle: the result": lambda rows: of(rows, "snapkv", 2).update(name="absent"),
}


@pytest.mark.parametrize("problem", FORGERIES)
def test_a_row_with_other_results_than_it_says_is_noticed(copied, problem):
    path = copied / "results.jsonl"
    full, *rows = [json.loads(line) for line in path.read_text().splitlines()]
    FORGERIES[problem](rows)
    path.write_text("".join(json.dumps(row) + "\n" for row in [full, *rows]))
    assert any(said.startswith(problem) for said in verify_folder(copied).problems)


def rewritten(change, measured, tmp_path):
    """Return the folder that the suite writes from the samples of ``measured`` after ``change``.

    change: called with {(name, budget, part): {example: sample}}.
    """
    entries, by_row = samples_of(measured), {}
    for line in (measured / "results.jsonl").read_text().splitlines():
        row = json.loads(line)
        for part, columns in row["results"].items():
            of_part = [e["sample"] for e in entries if "sample" in e and e["of"] in columns.values()]
            by_row[row["name"], row.get("budget"), part] = {sample["id"]: sample for sample in of_part}
    change(by_row)
    forged, out = shutil.copytree(measured, tmp_path / "forged"), tmp_path / "out"
    write_samples(forged, entries)
    words = ["suite", "tiny", "edition=quick", "method=snapkv", f"results={tmp_path}", f"from={forged}"]
    assert main([*words, "--stored", f"output={out}"]) == 0
    return out


def give_references(samples):
    for sample in samples["snapkv", 8, "retrieval"].values():
        sample.update(prediction=sample["answers"][0], score=1.0)


def give_the_full_caches_answers(samples):
    for name, sample in samples["snapkv", 8, "retrieval"].items():
        of_full = samples["full", None, "retrieval"][name]
        sample.update(prediction=of_full["prediction"], score=of_full["score"])


def hold_fewer_bytes(samples):
    for sample in samples["snapkv", 8, "retrieval"].values():
        sample.update(payload16=sample["payload16"] // 4, overhead16=0)


def diverge_less(samples):
    for sample in samples["snapkv", 8, "distance"].values():
        for text in sample["fidelity"].values():
            text["kl"] = [0.001 * nats for nats in text["kl"]]


def empty_a_control(samples):
    for sample in samples["streamingllm", 2, "retrieval"].values():
        sample.update(prediction="", score=0.0)


def count_otherwise(samples):
    for sample in samples["snapkv", 8, "retrieval"].values():
        sample.update(n=1_000_000, kept=5.0, new_tokens=9999)


FORGED = {
    hold_fewer_bytes: ["payload16 is ", "overhead16 is "],
    diverge_less: ["its divergence on the reference, "],
    empty_a_control: ["streamingllm at 1/2, retrieval: 10 of 10 answers are not those in "],
    count_otherwise: ["n is 1000000, and its method and prompt give ", "kept is 5.0, ", "its answer has 9999 tokens, "],
    # nobody can tell who gave an answer without the method, and docs/suite.md says so
    give_references: [],
    give_the_full_caches_answers: [],
}


@pytest.mark.parametrize("change", FORGED, ids=lambda change: change.__name__)
def test_forged_samples_from_which_all_numbers_follow_are_noticed(change, measured, tmp_path, monkeypatch):
    monkeypatch.setattr(verify_controls, "find_committed", lambda suite: measured)
    problems = verify_folder(rewritten(change, measured, tmp_path)).problems
    assert bool(problems) == bool(FORGED[change])
    for said in FORGED[change]:
        assert any(said in problem for problem in problems), (said, problems)


def test_one_other_answer_of_a_control_is_told(measured, tmp_path, monkeypatch, capsys):
    def change(samples):
        sample = next(iter(samples["random", 2, "retrieval"].values()))
        sample["prediction"] += " "

    out = rewritten(change, measured, tmp_path)
    assert main(["verify", str(out)]) == 0
    assert "the controls were not compared" in capsys.readouterr().out
    monkeypatch.setattr(verify_controls, "find_committed", lambda suite: measured)
    assert main(["verify", str(out)]) == 0
    assert "of the controls' answers, 1 of 162 differ from the committed ones" in capsys.readouterr().out


def change_row(**changes):
    """Return a change of the text of results.jsonl: SnapKV's first row gets other values; None takes one out."""

    def change(folder):
        path = folder / "results.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        row = next(row for row in rows if row["name"] == "snapkv")
        row.update(changes)
        path.write_text("".join(json.dumps({k: v for k, v in row.items() if v != []}) + "\n" for row in rows))

    return change


def change_sample(old, new):
    """Return a change of the text of samples.jsonl.gz: the first place that fits ``old`` becomes ``new``."""

    def change(folder):
        path = folder / "samples.jsonl.gz"
        text = gzip.decompress(path.read_bytes()).decode()
        changed = re.sub(old, new, text, count=1)
        assert changed != text
        path.write_bytes(gzip.compress(changed.encode()))

    return change


def cut_samples(folder):
    path = folder / "samples.jsonl.gz"
    path.write_bytes(path.read_bytes()[:-100])


NAN = float("nan")
DAMAGES = {
    "is not a row of a suite: NaN is no finite number": [
        change_row(mean=NAN),
        change_row(rank=NAN),
        change_row(parts={"retrieval": {"retained": NAN}}),
    ],
    "is not a row of a suite: its keys differ from a row's in best": [change_row(best=True)],
    "is not a row of a suite: its keys differ from a row's in commit": [change_row(commit=[])],
    "is not a row of a suite: budget is '2'": [change_row(budget="2")],
    "its label is snapkv (SOTA), and the suite says snapkv kv_ratio=": [change_row(label="snapkv (SOTA)")],
    "retrieval has no tiny/other in tiny": [
        change_row(results={"retrieval": {"tiny/other": "0" * 16}, "distance": {}}),
    ],
    "is damaged: NaN is no finite number": [change_sample(r'"kl": \[[^,]*', '"kl": [NaN')],
    "is damaged: 1e999 is no finite number": [change_sample(r'"floor": [^,]*', '"floor": 1e999')],
    "is damaged: Timing.__init__() missing 2 required": [
        change_sample(r'"timing": {[^}]*', '"timing": {"decode_s": 1.0')
    ],
    "is damaged: n is '256', and no number": [change_sample(r'"n": 256', '"n": "256"')],
    "it has the unknown keys best": [change_sample(r'"shrunk": false', '"shrunk": false, "best": true')],
    "its free pages ": [change_sample(r'"united": 0\.[^}]*', '"united": 2.0, "united_compacted": 0.5')],
    "is not a file of samples: Compressed file ended": [cut_samples],
}


@pytest.mark.parametrize(
    ("problem", "change"), [(problem, change) for problem, changes in DAMAGES.items() for change in changes]
)
def test_damage_is_a_finding(problem, change, copied, capsys):
    change(copied)
    assert main(["verify", str(copied)]) == 1
    out, err = capsys.readouterr()
    assert "NOT verified" in out and problem in out and not err


def test_an_answer_with_another_text_and_the_same_score_is_noticed(copied):
    entries = samples_of(copied)
    wrong = next(entry["sample"] for entry in entries if "sample" in entry and entry["sample"].get("score") == 0.0)
    wrong["prediction"] += " or so"
    write_samples(copied, entries)
    assert any("its answers are not those of its hash" in problem for problem in verify_folder(copied).problems)


def test_another_prompt_is_noticed(copied, monkeypatch, tmp_path):
    """A lock with another hash stands for a prompt that was changed: results on it are of no use."""
    lock = json.loads(definition.lock_path("tiny").read_text())
    prompts = lock["editions"]["quick"]["retrieval"]["tiny/needle"]["prompts"]
    prompts[next(iter(prompts))] = "0" * 16
    changed = tmp_path / "lock.json"
    changed.write_text(json.dumps(lock))
    monkeypatch.setattr("kvbench.suite.lock.lock_path", lambda name: changed)
    (problem,) = verify_folder(copied).problems
    assert problem.startswith("retrieval: 1 of 10 prompts of tiny/needle are others")
    assert main(["suite", "tiny", "edition=quick", "method=snapkv", f"results={tmp_path}"]) == 2


def test_another_method_of_the_same_prompts_is_another_result(copied):
    """A result that is named by a row and was measured on another task is noticed by its protocol."""
    path = copied / "results.jsonl"
    stored = [json.loads(line) for line in path.read_text().splitlines()]
    snapkv = next(row for row in stored if row["name"] == "snapkv")
    (other,) = snapkv["results"]["distance"].values()
    snapkv["results"]["retrieval"] = {"tiny/needle": other}
    path.write_text("".join(json.dumps(row) + "\n" for row in stored))
    assert any("measured on other prompts" in problem for problem in verify_folder(copied).problems)


def test_the_leaderboard_lists_committed_rows_of_full_editions(measured, tmp_path, monkeypatch):
    folder = tmp_path / "results" / "suite" / "tiny" / "me"
    folder.mkdir(parents=True)
    text = (measured / "results.jsonl").read_text()
    (folder / "results.jsonl").write_text(text)
    monkeypatch.setattr(suite_pages, "TRIAL", "")
    assert "snapkv" not in suite_pages.page(folder.parents[1])
    (folder / "results.jsonl").write_text(text.replace('"edition": "quick"', '"edition": "full"'))
    page = suite_pages.page(folder.parents[1])
    assert "![What a compressed cache retains, by part and bytes](results/suite/tiny/me/card.png)" in page
    (snapkv,) = [line for line in page.splitlines() if line.startswith("| snapkv | tiny | 1/2 |")]
    assert "[samples](results/suite/tiny/me/samples.jsonl.gz)" in snapkv and "| closed | kvbench |" in snapkv


def at_budgets(method, **options):
    suite = definition.load("tiny")
    shape = from_config(load.locate(config.configure({"model": "tiny"}).model).config)
    (template,) = resolve([{"method": method, **options}])
    found = rows.make_rows_at_budgets(suite, method, METHOD, template, shape)
    return {row.budget: row.config for row in found}


def test_a_budget_is_the_largest_share_of_tokens_that_fits():
    assert {d: c.chain.selector.kv_ratio for d, c in at_budgets("streamingllm").items()} == {2: 0.5, 4: 0.25, 8: 0.125}
    # 13 of 32 key channels of all but the last 32 tokens are gone: 128 * 64 = 32 * 64 + (r - 32) * 51, r = 152 of 256
    thin = at_budgets("snapkv+think", ratio=0.4)
    assert 0.58 <= thin[2].chain.selector.kv_ratio <= 152 / 256


def test_an_alias_of_a_control_is_a_row_of_its_own():
    suite = definition.load("tiny")
    shape = from_config(load.locate(config.configure({"model": "tiny"}).model).config)
    names = [row.name for row in rows.make_rows(suite, ["q4_0_h", "q4_0"], {}, shape)]
    assert names.count("q4_0_h") == 1 and names.count("q4_0") == 1


def test_a_format_has_one_row_at_the_smallest_budget_that_holds_it():
    assert list(at_budgets("fp8")) == [2] and list(at_budgets("think", ratio=0.4)) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name a suite: kvbench suite "),
        (["retain"], "unknown suite retain"),
        (["tiny", "edition=slow"], "edition"),
        (["tiny", "method=think", "ratio=0.4"], "think ratio=0.4 holds more than 1/2 of the full cache's bytes"),
    ],
)
def test_bad_input_is_refused_with_its_reason(words, message, capsys, tmp_path):
    assert main(["suite", *words, *([f"results={tmp_path}"] if words else [])]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_that_is_no_suites_is_refused(tmp_path, capsys):
    assert main(["verify", str(tmp_path)]) == 2
    assert "it has no results.jsonl" in capsys.readouterr().err
