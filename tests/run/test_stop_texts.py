"""Stop texts in runs: every answer is the free answer up to the first place where the whole text stands."""

import json

import pytest
import torch
from support.runs import prepare
from support.stub_server import MODEL, completion, serving

import kvbench
from kvbench.cli.main import main
from kvbench.plan import config
from kvbench.store.store import ResultStore

pytestmark = pytest.mark.e2e("whole answers")

FACTS = "the magic number of paris is 471. the river is calm. the magic number of rome is 902. it was a calm night."
ROWS = [
    {"id": city, "prompt": f"{FACTS} question: what is the magic number of {city}? answer:", "answers": ["471."]}
    for city in ("paris", "rome", "cairo")
]
TURNS = [
    {
        "id": "a",
        "context": FACTS,
        "questions": [
            {"question": f" question: the number of {city}? answer:", "answers": ["471."]} for city in ("paris", "rome")
        ],
    }
]
METHODS = ["method=snapkv,h2o,kivi", "kv_ratio=0.5"]


def answer(folder, rows, *words):
    """Run the command and return the stored samples, by label and example."""
    folder.mkdir()
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    words = [*METHODS, "max_new_tokens=24", *words, f"results={folder / 'results'}"]
    assert main(["run", "model=tiny", "dataset=file", f"path={path}", "metric=contains", *words]) == 0
    store = ResultStore(folder / "results")
    samples = {}
    for cell in store.cells():
        for name, sample in store.samples(cell).items():
            samples[store.cell(cell).label.split()[0], name] = sample
    return samples


def list_stops(texts):
    """Texts from the middle of answers: of several tokens, of one character, and one that comes nowhere."""
    longest = max(texts, key=len)
    middle = len(longest) // 2
    return [longest[middle : middle + 7], longest[middle], "nowhere to be found"]


@pytest.mark.parametrize("words", [[], ["batch_rows=2"], ["temperature=1.5", "samples_per_prompt=2"]])
def test_answers_are_cut_where_the_whole_text_stands(words, tmp_path):
    free = answer(tmp_path / "free", ROWS, *words)

    def list_predictions(sample):
        return [draw.prediction for draw in sample.draws or ()] or [sample.prediction]

    texts = [text for sample in free.values() for text in list_predictions(sample)]
    for number, stop in enumerate(list_stops(texts)):
        stopped = answer(tmp_path / str(number), ROWS, *words, f"stop=[{json.dumps(stop)}]")
        assert stopped.keys() == free.keys()
        for key, sample in stopped.items():
            want = [text.partition(stop)[0] for text in list_predictions(free[key])]
            assert list_predictions(sample) == want, (key, stop)
            if not any(stop in text for text in list_predictions(free[key])):
                assert sample.new_tokens == free[key].new_tokens
            elif not sample.draws:
                assert len(want[0]) < len(free[key].prediction) and sample.new_tokens <= free[key].new_tokens


def test_texts_that_a_shell_types_and_texts_from_python_are_one():
    for typed, given in ((r"\n\n", "\n\n"), (r'"\t"', "\t"), (r'["a\nb"]', "a\nb"), (r"\\n", r"\n"), ('["("]', "(")):
        assert config.read(["dataset=tiny/needle", f"stop={typed}"]).model.stop == (given,)
        assert config.configure({"dataset": "tiny/needle", "stop": [given]}).model.stop == (given,)


def test_minimum_length_keeps_stop_texts_out_of_the_first_tokens(tmp_path):
    free = answer(tmp_path / "free", ROWS)
    _, tokenizer = kvbench.load_model("tiny")
    first = free["full", "paris"].prediction[:2]
    stopped = answer(tmp_path / "least", ROWS, f"stop=[{json.dumps(first)}]", "min_new_tokens=3")
    for sample in stopped.values():
        assert first not in sample.prediction
        assert sample.new_tokens >= 3 and len(tokenizer.encode(sample.prediction, add_special_tokens=False)) >= 2


def test_an_own_answer_stays_in_the_context_up_to_its_stop_text(tmp_path):
    (free,) = [s for (label, _), s in answer(tmp_path / "free", TURNS, "turns=own").items() if label == "snapkv"]
    first = free.turns[0].prediction
    stop = first[len(first) // 2 :][:4]
    samples = answer(tmp_path / "own", TURNS, "turns=own", f"stop=[{json.dumps(stop)}]")
    model, tokenizer = kvbench.load_model("tiny")
    kept = first.partition(stop)[0]

    def encode(text):
        return tokenizer.encode(text, add_special_tokens=False)

    ids = tokenizer.encode(FACTS)
    for turn, question in enumerate(TURNS[0]["questions"]):
        ids += encode(question["question"])
        with torch.no_grad():
            out = model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)[0, len(ids) :]
        want = tokenizer.decode(out, skip_special_tokens=True).partition(stop)[0]
        assert samples["full", "a"].turns[turn].prediction == want
        if turn == 0:
            assert want == kept and stop in tokenizer.decode(out)
        ids += [*encode(want), tokenizer.eos_token_id]


def test_a_server_that_goes_past_the_text_has_its_answer_cut(tmp_path):
    with serving(
        lambda question: (200, completion("42\n\nQuestion: 43") | {"usage": {"completion_tokens": 9}})
    ) as stub:
        words = [f"url={stub.url}", f"served={MODEL}", "label=a", "dataset=tiny/needle", "length=128", "limit=2"]
        assert main(["run", "engine=openai", "model=tiny", *words, r'stop=["\n\nQ"]', f"results={tmp_path}"]) == 0
    assert {tuple(question["stop"]) for question in stub.asked} == {("\n\nQ",)}
    store = ResultStore(tmp_path)
    (cell,) = store.cells()
    lines = store.lines(cell).values()
    assert [(line["prediction"], "new_tokens" in line) for line in lines] == [("42", False)] * 2


def test_plain_texts_of_compare_have_references_that_end_at_the_text_too(tmp_path):
    model, tokenizer = kvbench.load_model("tiny")
    prompts = [row["prompt"] for row in ROWS]
    free = kvbench.compare(model, tokenizer, prompts, [], results=tmp_path / "a", max_new_tokens=24, progress=False)
    stop = " is"
    report = kvbench.compare(
        model, tokenizer, prompts, [], results=tmp_path / "b", max_new_tokens=24, progress=False, stop=stop
    )
    for name, cut in ((tmp_path / "a", False), (tmp_path / "b", True)):
        store = ResultStore(name)
        (cell,) = store.cells()
        for sample in store.samples(cell).values():
            assert sample.answers == (sample.prediction,)
            assert (stop not in sample.prediction) == cut
    assert free.rows and report.rows


def test_only_stop_texts_that_are_no_special_tokens_make_another_id():
    def read_decoding(*words):
        (group,) = prepare("dataset=tiny/needle", *words).groups
        return group.cells[0].identity["decoding"]

    _, tokenizer = kvbench.load_model("tiny")
    assert "model_stop_at" not in read_decoding() | read_decoding(f"stop=[{json.dumps(tokenizer.eos_token)}]")
    assert read_decoding("stop=[ab]")["model_stop_at"] == "text"


def test_the_full_caches_own_text_ends_at_the_models_text(tmp_path):
    free = answer(tmp_path / "free", ROWS, "kl=true")
    stop = free["full", "paris"].prediction[3:8]
    stopped = answer(tmp_path / "stop", ROWS, "kl=true", f"stop=[{json.dumps(stop)}]")
    lengths = [len(samples["snapkv", "paris"].fidelity["greedy"].kl) for samples in (free, stopped)]
    assert 0 < lengths[1] < lengths[0]
    # the prompt alone predicts the first token, so it is not compared
    assert lengths[1] == stopped["full", "paris"].new_tokens - 1
