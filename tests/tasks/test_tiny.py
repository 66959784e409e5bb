"""The tiny task suite: deterministic, exactly as long as asked, apart from training, answerable from its facts."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from support.grids import grid
from tiny_model import tokenizer

from kvbench.engine.calibration import tiny_corpus
from kvbench.tasks import tiny

LENGTHS = (64, 65, 66, 67, 68, 127, 256, 333, 512, 1024, 2048, 4096)


@pytest.fixture(scope="module")
def reader():
    return tokenizer.build()


def test_each_task_mirrors_another_category_with_its_metric():
    assert {name: (task.category, task.metric) for name, task in tiny.TASKS.items()} == {
        "needle": ("single-document QA", "f1"),
        "hop": ("multi-document QA", "f1"),
        "listing": ("summarisation", "rouge_l"),
        "labels": ("few-shot", "accuracy"),
        "multikey": ("synthetic retrieval", "exact_match"),
        "code": ("code", "edit_sim"),
    }


@pytest.mark.parametrize("task", tiny.TASKS)
def test_an_example_is_a_function_of_task_length_and_index(task):
    first = tiny.make_example(task, 256, 7)
    assert first == tiny.make_example(task, 256, 7)
    assert first.id == f"{task}-256-00007"
    others = [tiny.make_example(task, 256, 8), tiny.make_example(task, 257, 7)]
    assert first.prompt not in [other.prompt for other in others]


@grid("task", tiny.TASKS)
@grid("length", LENGTHS)
def test_prompts_have_exactly_the_length_asked_for(task, length, reader):
    for index in range(12 if length < 1024 else 3):  # the long ones repeat the same parts
        example = tiny.make_example(task, length, index)
        assert len(reader(example.prompt)["input_ids"]) == length
        assert 1 + tiny.count_tokens(example.prompt) == length


@pytest.mark.parametrize("task", tiny.TASKS)
def test_answers_have_two_tokens_and_follow_from_the_prompt(task, reader):
    for index in range(30):
        example = tiny.make_example(task, 512, index)
        (answer,) = example.answers
        ids = reader(f" {answer}", add_special_tokens=False)["input_ids"]
        assert 2 <= len(ids) < example.max_new_tokens
        assert answer == answer.strip() == reader.decode(ids).strip()
        assert all(i >= tokenizer.FIRST_WORD or chr(i - 3) in "0123456789.:," for i in ids)
        assert not example.classes or answer in example.classes


def test_the_answer_repeats_the_fact_of_its_key():
    for index in range(30):
        for task, joint in (("needle", " "), ("multikey", " "), ("code", " "), ("labels", " ")):
            example = tiny.make_example(task, 512, index)
            key = " ".join(example.prompt.split()[-2:])
            assert example.prompt.count(f"{key}{joint}{example.answers[0]}") == 1
        example = tiny.make_example("hop", 512, index)
        lab = example.answers[0].split()[0]
        assert f"{example.prompt.split()[-4]} works at the {lab} lab. " in example.prompt
        assert f" {example.answers[0].split('. ')[1]}. " in example.prompt
        example = tiny.make_example("listing", 512, index)
        for point in f"first: {example.answers[0]}".split(", "):
            assert f"key point {point}. " in example.prompt


def test_needle_depths_are_spread_and_recorded():
    examples = [tiny.make_example("needle", 1024, index) for index in range(50)]
    depths = sorted(float(example.meta["depth"]) for example in examples)
    assert depths[0] < 0.05 and depths[-1] > 0.9
    assert max(b - a for a, b in pairwise(depths)) < 0.06
    for example in examples:
        before = example.prompt[: example.prompt.index(" the magic number of")]
        assert (1 + tiny.count_tokens(before)) / 1024 == pytest.approx(example.meta["depth"], abs=1e-3)


def test_words_belong_to_one_list_so_that_a_key_is_found_once():
    everything = [word for group in tiny.WORDS.values() for word in group]
    assert len(everything) == len(set(everything))
    assert not any(a != b and a in b for a in tiny.LABELS for b in tiny.LABELS)


def test_training_never_meets_an_evaluation_prompt(reader):
    prompts = {
        reader.decode(reader(tiny.make_example(task, length, index).prompt)["input_ids"])
        for task in tiny.TASKS
        for length in (64, 128)
        for index in range(200)
    }
    facts = {prompt[len("<s>notes:") :].split(" question:")[0] for prompt in prompts}
    rng = random.Random("train/0")
    mix = dict.fromkeys(tiny_corpus.TASKS, 1.0)
    for length in (64, 128):
        for _ in range(400):
            spans = tiny_corpus.draw_sequence(rng, length, tiny_corpus.draw_tasks(rng, mix))
            text = reader.decode([token for span in spans for token in span.ids])
            assert not any(text.startswith(prompt) for prompt in prompts)
            assert text.removeprefix("<s>notes:").split(" question:")[0] not in facts


def test_needle_for_real_text_keeps_the_phrasing_of_the_suite():
    sentence, question, answer = tiny.draw_needle(3)
    assert (sentence, question, answer) == tiny.draw_needle(3)
    city = question.split()[-2]
    assert sentence == f"the magic number of {city} is {answer}."
    assert question == f"question: what is the magic number of {city}? answer: {city} is"
    assert len({tiny.draw_needle(index) for index in range(50)}) > 45


@pytest.mark.parametrize(("task", "length", "named"), [("nedle", 256, "needle"), ("needle", 8, "64..4096")])
def test_wrong_requests_are_explained(task, length, named):
    with pytest.raises(ValueError, match=named):
        tiny.make_example(task, length, 0)
