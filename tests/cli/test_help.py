"""The first texts that a newcomer reads: the groups of verbs, a mistyped verb, and the keys of run."""

import re

import pytest

from kvbench.cli.main import main
from kvbench.cli.verbs import VERBS


def printed(arguments, capsys, status=0):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == status
    return capsys.readouterr()


def test_every_verb_has_a_line_below_the_heading_of_its_group(capsys):
    text = printed(["--help"], capsys).out
    assert re.findall(r"^([a-z ]+):$", text, re.MULTILINE) == ["measure", "papers", "data and models", "other"]
    assert re.findall(r"^  (\w+) ", text, re.MULTILINE) == list(VERBS)
    assert "Run `kvbench COMMAND --help` for options and examples." in text
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize(
    ("word", "question"),
    [
        ("eval", "Did you mean run or score?"),
        ("Evaluate", "Did you mean run or score?"),
        ("shwo", "Did you mean show?"),
        ("download", "Did you mean data or model?"),
        ("method=snapkv", "Did you mean kvbench run method=snapkv?"),
        ("zzz", "unknown command zzz. All commands: `kvbench --help`."),
    ],
)
def test_an_unknown_verb_is_asked_about(word, question, capsys):
    said = printed([word], capsys, status=2).err
    assert question in said and said.count("\n") == 1


def test_no_verb_prints_the_verbs(capsys):
    assert "data and models:" in printed([], capsys, status=2).err


def test_words_for_verbs_are_no_verbs_themselves():
    for entry in VERBS.values():
        assert not set(entry["also"]) & VERBS.keys()


def test_run_explains_its_keys_before_ten_examples_with_a_comment_each(capsys):
    text = printed(["run", "--help"], capsys).out
    keys, _, examples = text.partition("\nexamples:\n")
    assert all(f"{key}=" in keys for key in ("method", "kv_ratio", "kv_size", "ratio", "dataset", "model", "limit"))
    lines = examples.strip().splitlines()
    assert len(lines) <= 10 and all(re.search(r" {2,}# \w", line) for line in lines)
    assert max(map(len, text.splitlines())) <= 100


def test_the_keys_begin_with_those_that_most_runs_use(capsys):
    text = printed(["run", "--help", "keys"], capsys).out
    keys = re.findall(r"^(\w+): ", text, re.MULTILINE)
    assert keys[:6] == ["method", "kv_ratio", "kv_size", "ratio", "dataset", "model"]
    assert keys.index("limit") < keys.index("per")
    assert "share of the prompt's tokens that is kept" in text and "share of the key channels that is removed" in text


@pytest.mark.parametrize("topic", ["keys", "snapkv", "h2o", "needle", "qhitter", "uncomp-group"])
def test_the_help_on_a_topic_fits_a_terminal(topic, capsys):
    assert max(map(len, printed(["run", "--help", topic], capsys).out.splitlines())) <= 100
