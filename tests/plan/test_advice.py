"""What is said of prompts, answers and columns that show nothing, before and below a table."""

import json

import pytest

from kvbench.base.example import Example, ScoredText, Turn
from kvbench.cli.main import main
from kvbench.plan.advice import about_prompts, at_floor, chance
from kvbench.tasks.base import Task
from kvbench.tasks.prompt import PromptPolicy

TEMPLATE = "model.chat_template='{% for m in messages %}{{ m.content }}{% endfor %}'"
SMALL = ["dataset=tiny/needle", "length=256", "examples=2", "method=snapkv,tova", "kv_ratio=0.5"]


class Chatty:
    chat_template = "any"


class Plain:
    chat_template = None


def task(new=64, classes=(), metric="f1", scored=None, chat=True):
    example = Example("a", "p", ("x",), new, classes=classes, scored=scored)
    return Task("some/task", (example,), metric, "here", chat=chat)


def test_a_chat_model_without_its_template_is_told_of_once():
    note = ["The tokenizer has a chat template; prompt=chat applies it."]
    assert about_prompts(PromptPolicy(), [task(), task()], Chatty()) == note
    assert about_prompts(PromptPolicy(), [task()], Plain()) == []
    # what a paper's scripts did is meant, a likelihood has no prompt, and the template is there
    assert about_prompts(PromptPolicy(name="think"), [task()], Chatty()) == []
    assert about_prompts(PromptPolicy(), [task(scored=ScoredText((1, 2), prefix=1, divisor=1))], Chatty()) == []
    assert about_prompts(PromptPolicy(name="chat", template="skip"), [task()], Chatty()) == []


def test_a_system_message_that_nothing_reads_and_answers_too_short_to_answer():
    plain, chat = PromptPolicy(system="Be brief."), PromptPolicy(name="chat", template="skip", system="Be brief.")
    assert any("system= is ignored" in n for n in about_prompts(plain, [task()], Plain()))
    assert any("system= is ignored" in n for n in about_prompts(chat, [task(chat=False)], Chatty()))
    assert about_prompts(chat, [task()], Chatty()) == []
    (note,) = about_prompts(chat, [task(8), task(32)], Chatty())
    assert note.startswith("some/task: answers of at most 8 tokens") and "max_new_tokens=32" in note
    assert about_prompts(chat, [task(16), task(8, chat=False)], Chatty()) == []


IGNORED = {
    "dataset=tiny_stream temperature=1 top_p=0.5 max_length=9": "temperature= and top_p= and max_length= are ignored: "
    "texts are read here, and nothing is answered.",
    "dataset=tiny_stream temperature=1 samples_per_prompt=2": "temperature= and samples_per_prompt= are ignored: texts",
    "dataset=tiny/needle calibration=folder": "calibration= is not read: no method of this run is calibrated.",
    "dataset=tiny/needle sample_seed=3": "sample_seed= is ignored: answers are greedy unless temperature= is above 0.",
    "dataset=file path={rows} turns=gold": "turns= is ignored: no context of dataset=file has several questions.",
    "dataset=file path={rows} turns=own questions=2": "turns= and questions= are ignored: no context of dataset=file",
    "dataset=tiny/needle temperature=1 top_p=0.5 sample_seed=3 max_length=300": "",
    "dataset=tiny_stream,tiny/needle temperature=1": "",
    "dataset=file path={talk} turns=gold questions=1": "",
}


@pytest.mark.parametrize("line", IGNORED)
def test_a_key_that_changes_nothing_is_told_before_the_run(line, tmp_path, capsys):
    rows, talk = tmp_path / "rows.jsonl", tmp_path / "talk.jsonl"
    rows.write_text('{"prompt": "a b c", "answers": ["b"]}\n')
    talk.write_text('{"context": "a b c", "questions": [{"question": "b?", "answers": ["b"]}]}\n')
    arguments = line.format(rows=rows, talk=talk).split()
    assert main(["run", *arguments, f"results={tmp_path}", "limit=1", "--plan", "--json"]) == 0
    (plan,) = json.loads(capsys.readouterr().out)
    ignored = [note for note in plan["notes"] if "ignored" in note or "not read" in note]
    assert [note for note in ignored if not note.startswith(IGNORED[line] or "no")] == []
    assert len(ignored) == bool(IGNORED[line])


def test_a_combination_that_is_larger_than_one_of_its_methods_is_told(tmp_path, capsys):
    """The plan tells it by formula, and the report of the run has the bytes that bear it out."""
    words = ["method=think+int4,int4,snapkv+think,think,h2o+vatp", "dataset=tiny/needle", "length=256", "limit=1"]
    line = ["run", *words, f"results={tmp_path}"]
    assert main([*line, "--plan"]) == 0
    planned = " ".join(capsys.readouterr().out.split())
    assert main([*line, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    sizes = {row["method"].split()[0]: row["held16"] for row in report["rows"]}
    percent = round(100 * (sizes["think+int4"] / sizes["int4"] - 1))
    (note,) = [note for note in report["notes"] if "larger than that of" in note]
    assert percent > 10 and note in planned
    assert note == (
        f"think+int4 ratio=0.4: its cache of 256 tokens is {percent} % larger than that of int4 alone (by formula, at "
        "16 bits)."
    )


def test_prompts_of_which_next_to_nothing_is_left_are_told_before_the_run(tmp_path, capsys):
    arguments = ["run", "dataset=tiny/needle", "length=256", "limit=1", f"results={tmp_path}", "--plan", "--json"]
    assert main([*arguments, "max_length=7"]) == 0
    (plan,) = json.loads(capsys.readouterr().out)
    (note,) = (note for note in plan["notes"] if "is cut" in note)
    assert note.startswith(
        "tiny/needle: the first prompt is cut to 7 of 256 tokens (the model's context or max_length=)"
    )
    assert main([*arguments, "max_length=200"]) == 0
    (plan,) = json.loads(capsys.readouterr().out)
    assert not any("is cut" in note for note in plan["notes"])


@pytest.mark.parametrize(
    ("given", "score", "floor"),
    [
        ({}, [0.0] * 4, True),
        ({}, [0.02] * 4, True),
        ({}, [0.04] * 4, False),
        ({}, [], False),
        ({}, [0.0] * 15 + [1.0], True),  # the interval reaches 0
        ({"metric": "letter", "classes": tuple("ABCD")}, [0.0, 0.0, 0.0, 1.0], True),
        ({"metric": "letter", "classes": tuple("ABCD")}, [0.0, 0.0, 1.0], False),
        ({"metric": "perplexity"}, [0.5] * 4, False),
    ],
)
def test_the_floor_is_nothing_or_guessing(given, score, floor):
    assert at_floor(task(**given), score) is floor


def run(capsys, tmp_path, *more):
    assert main(["run", *SMALL, f"results={tmp_path}", "--json", *more]) == 0
    return json.loads(capsys.readouterr().out)


def test_guessing_is_averaged_over_all_examples():
    sizes = (2, 4, 4)
    examples = [Example(f"{n}", "p", ("a",), 8, classes=tuple("abcd"[:size])) for n, size in enumerate(sizes)]
    assert chance(Task("t/t", tuple(examples), "classification", "test")) == pytest.approx((1 / 2 + 1 / 4 + 1 / 4) / 3)
    # an empty answer is right for one of the two questions of one context out of two
    turns = [(Turn("q", ("",)), Turn("q", ("x",))), (Turn("q", ("x",)), Turn("q", ("x",)))]
    contexts = [Example(f"{n}", "p", (), 8, turns=questions) for n, questions in enumerate(turns)]
    assert chance(Task("t/t", tuple(contexts), "squad_f1", "test", turns="isolated")) == 1 / 4


def test_a_table_says_where_the_full_cache_is_at_the_floor_and_who_evicts(tmp_path, capsys):
    report = run(capsys, tmp_path, "max_new_tokens=1")
    assert [c["floor"] for c in report["columns"]] == [True]
    assert sum("tiny/needle: the full cache itself scores next to nothing" in n for n in report["notes"]) == 1
    assert [r["evicts"] for r in report["rows"]] == [False, False, True]
    assert [c["evicts"] for r in report["rows"] for c in r["cells"]] == [False, False, True]
    assert main(["run", *SMALL, f"results={tmp_path}", "max_new_tokens=1"]) == 0
    out = capsys.readouterr().out
    assert out.count("evicts\n") == 1 and "evicts: keeps to its budget while it answers" in out
    able = run(capsys, tmp_path)
    assert [c["floor"] for c in able["columns"]] == [False]
    assert not any("next to nothing" in n for n in able["notes"])


def test_a_run_warns_of_short_answers_before_it_reads_anything(tmp_path, capsys):
    assert main(["run", *SMALL, f"results={tmp_path}", TEMPLATE, "prompt=chat"]) == 0
    ended = capsys.readouterr()
    first = ended.err.splitlines()[0]
    assert first.startswith("kvbench: tiny/needle: answers of at most 8 tokens can end before")
    assert "answers of at most 8 tokens" in ended.out
    plan = ["run", *SMALL, f"results={tmp_path}/b", TEMPLATE, "prompt=chat", "--plan"]
    assert main(plan) == 0 and "answers of at most 8 tokens" in capsys.readouterr().out
    assert main(["run", *SMALL, f"results={tmp_path}", TEMPLATE]) == 0
    assert "kvbench: The tokenizer has a chat template; prompt=chat applies it." in capsys.readouterr().err
    assert main(["run", *SMALL, f"results={tmp_path}", "prompt=chat"]) == 2
    assert "no chat template: use prompt=plain" in capsys.readouterr().err
