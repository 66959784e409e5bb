"""RULER's prompts against the published generators' own, by hash, and the form that they promise."""

import hashlib
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from support.data import data_path
from support.grids import grid
from transformers import AutoTokenizer

from kvbench.base.errors import UsageError
from kvbench.cli.main import main
from kvbench.models import embedded
from kvbench.report import ruler as tables
from kvbench.tasks.base import load_tasks
from kvbench.tasks.encoding import encode_turns
from kvbench.tasks.prompt import PromptPolicy
from kvbench.tasks.ruler import words

ENTRY = yaml.safe_load((Path(__file__).parents[2] / "conf/dataset/ruler.yaml").read_text())["ruler"]
COMMON = "twine calendar angel loan curse raccoon accord koala contact scenario"
# first sample: size, tokens with the answer's, first references, hash of prompt and prefix
PUBLISHED = [
    ("niah_single_1", 4096, 205, 4081, "7022674", "56f728a08e21"),
    ("niah_single_2", 4096, 3899, 4096, "2338687", "3a924b3be47c"),
    ("niah_single_3", 4096, 3899, 4096, "448aaa9e-66b2-4c5b-90c1-87fcce177b4e", "96a855664dcd"),
    ("niah_multikey_1", 4096, 3869, 4096, "4374754", "048e7e2f690a"),
    ("niah_multikey_2", 4096, 390, 4086, "9290765", "3bedd16213f6"),
    ("niah_multikey_3", 4096, 391, 4096, "9624ba9d-1cea-4ac0-9466-f946ffab82a0", "66ae70e05d4e"),
    ("niah_multivalue", 4096, 3868, 4096, "7273233 3710343 9897858 1009594", "6e4e1ddc4dad"),
    ("niah_multiquery", 4096, 3860, 4096, "2642635 4965789 8434500 1247595", "253aa392e506"),
    ("vt", 4096, 184, 4093, "DMNOI TLVXL XLEWL TVHUM GLSGI", "7df7de84103a"),
    (
        *("cwe", 4096, 490, 4096),
        "twine calendar angel loan curse raccoon accord koala contact scenario",
        "27e7fb45fe05",
    ),
    ("fwe", 4096, 3950, 3990, "ufnllw iwshay rhbtmq", "0d193ecd6018"),
    ("qa_1@xquad", 4096, 30, 3638, "308", "b9667b12d776"),
    ("niah_single_1", 1024, 44, 1022, "5661907", "b180567c9785"),
    ("niah_single_2", 1024, 838, 1024, "2322047", "a5becfd248d4"),
    ("niah_multikey_1", 1024, 808, 1024, "9897858", "578abda5bd03"),
    ("niah_multikey_2", 1024, 83, 1016, "2661307", "5dbd5af814f5"),
    ("niah_multikey_3", 1024, 83, 1016, "4a11be44-", "68185e39bb0d"),
    ("vt", 1024, 22, 1015, "DKYRX", "a79f49a9d8f4"),
    ("cwe", 1024, 304, 1024, "invincible", "c26b5e924628"),
    ("fwe", 1024, 942, 1009, "", "77dc9cf20373"),
]


class Whitespace:
    """A tokenizer whose tokens are words."""

    def encode(self, text, add_special_tokens=True):
        return text.split()


class Characters:
    """A tokenizer whose tokens are so many characters."""

    def __init__(self, characters):
        self.characters = characters

    def encode(self, text, add_special_tokens=True):
        return range(int(len(text) / self.characters))


def load(*selection, tokenizer=None, root=None, **knobs):
    return load_tasks("ruler", {**ENTRY, **knobs}, selection, tokenizer or Whitespace(), root)


@pytest.mark.parametrize("length", [4096, 1024])
def test_first_samples_are_those_of_the_published_generator(length):
    published = {name: row for name, of, *row in PUBLISHED if of == length}
    tasks = {task.id: task for task in load(*published, lengths=length, examples=1, root=data_path())}

    @grid("name,size,tokens,answers,digest", [(name, *row) for name, row in published.items()])
    def check(name, size, tokens, answers, digest):
        task = tasks[f"ruler/{name}/{length}"]
        (example,), (text,) = task.examples, prompts(task)
        assert example.meta["size"] == size
        assert example.meta["tokens"] + example.max_new_tokens == tokens
        assert " ".join(example.answers).startswith(answers)
        assert hashlib.sha256(text.encode()).hexdigest()[:12] == digest
        assert example.prompt.endswith(example.question)

    check()


def prompts(task):
    return [e.prompt + e.answer_prefix for e in task.examples]


def test_revision_2024_rebuilds_a_published_file():
    (task,) = load("niah_multikey_3", tokenizer=Characters(2), lengths=4096, revision=2024, examples=500)
    joined = "\n".join(prompts(task))
    assert hashlib.sha256(joined.encode()).hexdigest() == (
        "af0d05976521e6967e87a2e9efd8f4f201729e5ea0c753f7f80662d98d4900a7"
    )
    assert task.examples[0].answers == ("1ee34dc4-3b04-4a8b-805b-fdc94e7ed827",)
    assert task.examples[-1].answers == ("eb19a608-d493-40dc-a048-f790f7acc2d8",)
    assert all(text.count("One of the special magic uuids for") == 51 for text in prompts(task))
    assert "as revision 2024 leaves them: niah_multikey_3/4096 500 of 500" in task.note


def test_revision_2024_has_the_published_needles_in_noise():
    (task,) = load("niah_single_1", tokenizer=Characters(3.7), lengths=4096, revision=2024, examples=3)
    assert [e.answers for e in task.examples] == [("8090293",), ("4612365",), ("7374122",)]
    keys = ["wandering-age", "determined-consignment", "capable-percent"]
    for text, key, place in zip(prompts(task), keys, (87, 86, 24), strict=True):
        lines = text.split("\n")[1:-1]
        assert len(lines) == 151 and f"for {key} is:" in lines[place]


def test_key_words_are_sorted_pairs():
    pairs = words.KeyWords()
    assert (len(pairs), len(words.list_all_words())) == (6_175_260, 8_169)
    edges = [i for end in (0, *pairs.ends) for i in range(end - 2, end + 2) if 0 <= i < len(pairs)]
    assert len(edges) > 3600
    listed = [pairs[i] for i in edges]
    assert listed == sorted(set(listed))


def test_essays_are_cut_as_their_first_words_alone_are_divided():
    import punkt

    text = "".join(path.read_text() for path in sorted(data_path("paul_graham").glob("*.txt")))
    essays = words.Essays(text)
    assert len(essays) == 111_877
    for size in (1, 7, 500, 838, 2909, 6312, 8377):
        assert essays.sentences(size) == punkt.sent_tokenize(" ".join(text.split()[:size]))


def test_prompts_have_the_form_that_their_task_promises():
    names = ["niah_single_1", "niah_single_2", "niah_multikey_2", "niah_multikey_3", "niah_multiquery", "vt", "cwe"]
    tasks = load(*names, lengths=2048, examples=4, root=data_path())
    again, other = (load(*names, lengths=2048, examples=2, seed=seed, root=data_path()) for seed in (42, 43))
    assert [prompts(task)[:2] for task in tasks] == [prompts(task) for task in again]
    assert not any(prompts(one) == prompts(two) for one, two in zip(again, other, strict=True))
    assert {(task.metric, task.query_aware) for task in tasks} == {("string_match_all", False)}

    @grid("name,example", [(name, e) for name, task in zip(names, tasks, strict=True) for e in task.examples])
    def check(name, example):
        meta, context = example.meta, example.prompt.removesuffix(example.question)
        assert len((example.prompt + example.answer_prefix).split()) == meta["tokens"]
        assert meta["tokens"] + example.max_new_tokens <= meta["length"] == 2048
        if name.startswith("niah"):
            needles = re.findall(r"One of the special magic (?:number|uuid)s for .+? is: \S+\.", context)
            expected = {"niah_multikey_2": meta["size"] + 1, "niah_multikey_3": meta["size"] + 1, "niah_multiquery": 4}
            assert len(needles) == expected.get(name, 1)
            assert all(context.count(answer) == 1 for answer in example.answers)
        if "single" in name:
            assert context.startswith("A special magic number is hidden")
            assert " are " not in example.question + example.answer_prefix
        if name == "niah_multiquery":
            assert context.startswith("Some special magic numbers are hidden")
            assert len(example.answers) == 4 and example.question.count(", and ") == 1
        if name == "vt":
            assert len(example.answers) == 5
            assert example.prompt.count("Find all variables that are assigned") == 2  # one in the solved example

    check()


@pytest.mark.e2e("counts some two hundred prompts with a real tokenizer")
def test_no_prompt_and_answer_exceed_the_length_in_the_models_own_tokens(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(embedded.path())
    tasks = load(tokenizer=tokenizer, lengths=2048, examples=20, root=tmp_path)
    assert [task.id.split("/")[1] for task in tasks] == [
        "niah_single_1",
        "niah_multikey_2",
        "niah_multikey_3",
        "cwe",
        "fwe",
    ]
    assert "vt at 2048 (ruler/vt: its solved example has at most 500 tokens" in tasks[0].note
    for task in tasks:
        lengths = []
        for example, text in zip(task.examples, prompts(task), strict=True):
            tokens = len(tokenizer.encode(text, add_special_tokens=False))
            assert tokens == example.meta["tokens"]
            lengths.append(tokens + example.max_new_tokens)
        assert 0.9 * 2048 < max(lengths) <= 2048, task.id


def test_substitutes_are_named_and_what_lacks_data_says_so(tmp_path):
    (task,) = load("qa_1@xquad", lengths=4096, examples=2, root=data_path())
    assert "of other data and is part of no mean called RULER" in task.note
    assert (task.metric, [e.meta["gold"] for e in task.examples]) == ("string_match_part", [[28], [28]])
    tasks = load(lengths=[800], examples=1, root=data_path())
    assert [t.id.split("/")[1] for t in tasks][-3:] == ["vt", "cwe", "fwe"] and len(tasks) == 11
    assert "not all of RULER's 13 tasks: without qa_1 (ruler/squad.json is not below the data folder" in tasks[0].note
    assert [t.id.split("/")[1] for t in load(lengths=800, examples=1, root=tmp_path)] == [
        *("niah_single_1", "niah_multikey_2", "niah_multikey_3", "vt", "cwe", "fwe")
    ]
    (tmp_path / "own.txt").write_text("The river was cold. We walked home. " * 200)
    own = str(tmp_path)
    for name, haystack, other in (("single_2", own, True), ("single_1", own, False), ("single_2", None, False)):
        (task,) = load(f"niah_{name}", lengths=800, examples=1, haystack=haystack, root=data_path())
        assert ("its essays are not RULER's" in task.note) == other
    for name, reason in (("qa_1", "qa_1@xquad stands in its place"), ("niah_single_2", "no .txt files of essays in")):
        with pytest.raises(UsageError, match=f"{name} .*{reason}"):
            load(name, root=tmp_path)


def test_squad_and_hotpot_files_are_read_as_rulers_scripts_do(tmp_path):
    (tmp_path / "ruler").mkdir()
    paragraph = {"context": "Zinc is a metal.", "qas": [{"question": "What?", "answers": [{"text": "a metal"}] * 2}]}
    never = {"context": "Aa.", "qas": [{"question": "Why?", "answers": [], "is_impossible": True}]}
    others = [{"context": f"Document about {i}. " * 5, "qas": []} for i in range(30)]
    squad = {"data": [{"paragraphs": [paragraph, never]}, {"paragraphs": others}]}
    (tmp_path / "ruler/squad.json").write_text(json.dumps(squad))
    context = [[f"Title {i}", ["One. ", f"Two {i}."]] for i in range(10)]
    row = {"question": "Who?", "answer": "yes", "context": context}
    more = [[f"Other {i}", ["Three. " * 10]] for i in range(20)]
    (tmp_path / "ruler/hotpotqa.json").write_text(json.dumps([row, {"question": "?", "answer": "", "context": more}]))
    one, two = load("qa_1", "qa_2", lengths=300, examples=1, root=tmp_path)
    assert one.examples[0].answers == ("a metal", "a metal") and len(one.examples) == 1
    assert one.examples[0].prompt.endswith("Question: What?") and "\nAa." in one.examples[0].prompt
    assert all(f"\nTitle {i}\nOne. Two {i}." in two.examples[0].prompt for i in range(10))
    assert len(two.examples[0].meta["gold"]) == 10


@grid(
    "name,knobs,reason",
    [
        (
            "niah_single_2",
            {"lengths": 400},
            "lengths=400 is too short: a prompt of the smallest size",
        ),
        ("vt", {"lengths": 500}, "ruler/vt: lengths=500 is too short"),
        ("fwe", {"lengths": 200}, "too short for four words"),
        ("fwe", {"lengths": 300, "tokenizer": Characters(1)}, "smallest size that RULER tries has"),
        ("qa_1@xquad", {"lengths": 1024}, "smallest size that RULER tries"),
        ("niah_single_2", {"lengths": 400_000}, "text ends before it fills lengths=400000"),
        ("cwe", {"lengths": 200_000}, "different words, and wonderwords has 8169"),
        ("vt", {"lengths": []}, "at least one"),
        ("vt", {"lengths": "4k"}, "a whole number"),
        ("vt", {"revision": "lm_eval"}, "draws all tasks from one generator"),
        ("vt", {"revision": 2024}, "vt .its form of revision 2024 could not be verified"),
        ("vt", {"revision": 2026}, "unknown value 2026 of dataset.ruler.revision"),
        ("niah", {}, "unknown task niah of dataset ruler"),
        ("vt/2048", {"lengths": 1024, "examples": 1}, "unknown task vt/2048 of dataset ruler"),
    ],
)
def test_what_cannot_be_generated_is_refused_with_the_reason(name, knobs, reason):
    with pytest.raises(UsageError, match=reason):
        load(name, root=data_path(), **knobs)


def test_a_prompt_that_would_lack_room_for_its_chain_is_refused_not_drawn_for_ever():
    # every prompt of the search fits and none of the samples does
    draws = iter(range(100, 100_000))

    class Growing(Whitespace):
        def encode(self, text, add_special_tokens=True):
            return range(len(text.split()) + (max(0, next(draws) - 120) if "Memorize and track" in text else 0))

    with pytest.raises(UsageError, match="vt: lengths=1024 is too short"):
        load("vt", lengths=1024, examples=100, tokenizer=Growing())


def test_other_words_are_refused(monkeypatch):
    words.read_word_lists.cache_clear()
    monkeypatch.setattr(words, "DIGEST", "0")
    with pytest.raises(UsageError, match=r"pip install wonderwords==2\.2\.0"):
        words.read_word_lists()


def test_a_chat_template_is_counted():
    def render(content):
        return f"<user> {content} <assistant>"

    knobs = {**ENTRY, "lengths": 512, "examples": 3, "max_new_tokens": 100}
    (task,) = load_tasks("ruler", knobs, ["niah_single_1"], Whitespace(), render=render)
    for e in task.examples:
        assert e.max_new_tokens == 100
        assert len((render(e.prompt) + e.answer_prefix).split()) == e.meta["tokens"] <= 512 - 100
        assert e.prompt.startswith("A special")


@grid(
    "tasks,lengths,heading",
    [
        (["vt", "cwe", "qa_1@xquad"], (1024, 2048), "mean of vt, cwe, by length"),
        ([f"t{i}" for i in range(11)], (4096,), "ruler-11: mean of all tasks but qa_1 and qa_2, by length"),
        (["qa_1", "qa_2", *(f"t{i}" for i in range(11))], (4096,), "ruler-13: mean of all tasks, by length"),
        (["vt", "cwe"], (1024,), None),
        (["vt", "qa_1@xquad"], (1024, 2048), None),
    ],
)
def test_a_mean_is_called_rulers_only_with_all_tasks(tasks, lengths, heading):
    names = [f"ruler/{task}/{length}" for task in tasks for length in lengths]
    columns = [SimpleNamespace(task=name, category="RULER") for name in names]
    cells = [SimpleNamespace(summary=SimpleNamespace(score=50.0 + 10 * (i % 2))) for i in range(len(names))]
    lacking = [*cells[1:], SimpleNamespace(summary=None)][::-1]
    rows = [SimpleNamespace(method="full", cells=cells), SimpleNamespace(method="refused", cells=lacking)]
    report = SimpleNamespace(columns=columns, rows=rows)
    assert [table.headings[0] for table in tables.build_tables(report)] == ([heading] if heading else [])
    if tasks[0] == "vt" and heading:
        (table,) = tables.build_tables(report)
        assert table.rows == (("full", "50.0", "60.0", "55.0", "56.7", "53.3"),)


@pytest.mark.e2e("a run on the tiny model")
def test_a_run_withholds_the_question(capsys, tmp_path):
    arguments = ["dataset=ruler/niah_single_1", "lengths=768", "examples=2", "kv_ratio=0.5", f"results={tmp_path}"]
    assert main(["run", *arguments, "method=snapkv", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert "question withheld" in json.dumps(report)
    cells = [cell for row in report["rows"] for cell in row["cells"]]
    assert [c["status"] for c in cells] == ["measured"] * 2 and not any(c["query_aware"] for c in cells)
    assert all(c["task"] == "ruler/niah_single_1/768" and c["n"] == 2 for c in cells)
    assert main(["run", arguments[0], "lengths=6000", "examples=1", "--plan"]) == 2
    assert "could cut what is asked for: lower lengths=" in capsys.readouterr().err


def test_many_questions_are_all_keys_of_one_haystack():
    (whole,) = load("niah_multikey_2", lengths=1024, examples=2)
    (many,) = load("niah_multikey_2@many", lengths=1024, examples=2, questions=200)
    assert "niah_multikey_2@many asks for every key and is part of no mean called RULER" in many.note
    for one, context in zip(whole.examples, many.examples, strict=True):
        assert context.prompt + one.question == one.prompt and not context.answers
        asked = [context.asked(i) for i in range(len(context.turns))]
        assert len(asked) == 84 == len({e.question for e in asked})
        # RULER's own question is one of them, with the beginning of its answer
        (own,) = [e for e in asked if e.question == one.question]
        assert (own.prompt, own.answers, own.answer_prefix) == (one.prompt, one.answers, one.answer_prefix)
        for e in asked:
            key = re.search(r"number for (\S+) mentioned", e.question)[1]
            assert key in e.answer_prefix
            assert e.answers == tuple(re.findall(f"for {key} is: (\\d+)[.]", context.prompt))
    (some,) = load("niah_multikey_3@many", lengths=1024, examples=1, turns="gold")
    assert len(some.examples[0].turns) == 25 and some.turns == "gold"


def test_each_question_of_a_context_is_read_with_the_beginning_of_its_own_answer():
    tokenizer = Whitespace()
    (task,) = load("niah_multikey_3@many", lengths=1024, examples=1)
    example = task.examples[0]
    encoded = encode_turns(tokenizer, example, task, PromptPolicy(), None)
    for turn, ids in zip(example.turns, encoded.questions, strict=True):
        assert list(ids) == (turn.question + turn.prefix).split()
