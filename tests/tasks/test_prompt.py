"""Prompt policies: truncation, templates, the question withheld, and the presets as Hydra composes them."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from kvbench.base.conf import entries
from kvbench.base.errors import UsageError
from kvbench.base.example import Example
from kvbench.plan import config
from kvbench.plan import words as words_of
from kvbench.tasks.base import Task, load_tasks
from kvbench.tasks.prompt import PromptPolicy, check_policy, encode


class Words:
    """A tokenizer of whitespace words: id = index of first appearance; 0 is BOS. Decoding is lossless here."""

    chat_template = None

    def __init__(self):
        self.words = ["<s>"]

    def encode(self, text, add_special_tokens=True):
        ids = []
        for word in text.split():
            if word not in self.words:
                self.words.append(word)
            ids.append(self.words.index(word))
        return [0, *ids] if add_special_tokens else ids

    def decode(self, ids, skip_special_tokens=False):
        return "".join(f" {self.words[i]}" for i in ids if i or not skip_special_tokens)


class Chat(Words):
    chat_template = "x"

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        assert (tokenize, add_generation_prompt) == (False, True)
        return " ".join([f"<{m['role']}> {m['content']}" for m in messages] + ["<assistant>"])


def task(chat=True, question=""):
    text = " ".join(f"w{i}" for i in range(10)) + (f" {question}" if question else "")
    example = Example("a", text, ("x",), 4, question=question)
    return Task("t/t", (example,), "f1", "test", chat=chat), example


def words(tokenizer, ids):
    return [tokenizer.words[i] for i in ids]


def test_short_prompts_stay_and_long_ones_lose_exactly_their_middle():
    t, e = task()
    tok = Words()
    complete = encode(tok, e, t, PromptPolicy(), None)
    assert (len(complete), complete.cut) == (11, 0)
    for limit in (10, 7, 2, 1):
        cut = encode(tok, e, t, PromptPolicy(max_length=limit), None)
        assert len(cut) == limit
        assert cut.cut == 11 - limit
        front = (limit + 1) // 2
        assert cut.ids == (*complete.ids[:front], *(complete.ids[11 - (limit - front) :] if limit > front else ()))


def longbench_ids(tokenizer, prompt, limit):
    """LongBench's own steps, for comparison."""
    ids = tokenizer.encode(prompt)
    if len(ids) > limit:
        half = int(limit / 2)
        prompt = tokenizer.decode(ids[:half], skip_special_tokens=True) + tokenizer.decode(
            ids[-half:], skip_special_tokens=True
        )
    return tokenizer.encode(prompt)


@pytest.mark.parametrize("limit", [4, 6, 7, 9, 30])
def test_text_truncation_is_longbenchs(limit):
    from transformers import AutoTokenizer

    from kvbench.models import embedded

    real = AutoTokenizer.from_pretrained(embedded.path())
    t, e = task()
    for tok in (Words(), real):
        got = encode(tok, e, t, PromptPolicy(max_length=limit, truncation="text"), None)
        assert list(got.ids) == longbench_ids(tok, e.prompt, limit)


def test_room_is_the_lower_of_policy_and_context():
    t, e = task()
    assert len(encode(Words(), e, t, PromptPolicy(max_length=8), 5)) == 5
    assert len(encode(Words(), e, t, PromptPolicy(max_length=3), 5)) == 3
    with pytest.raises(UsageError, match="no room"):
        encode(Words(), e, t, PromptPolicy(), 0)


@pytest.mark.parametrize("truncation", ["tokens", "text"])
def test_without_special_tokens_a_prompt_has_its_own_tokens_alone(truncation):
    t, e = task()
    plain, bare = (
        PromptPolicy(truncation=truncation, bos=bos, max_length=limit) for bos, limit in ((True, 11), (False, 10))
    )
    tok = Words()
    assert encode(tok, e, t, plain, None).ids == (0, *encode(tok, e, t, bare, None).ids)
    cut = encode(tok, e, t, PromptPolicy(truncation=truncation, bos=False, max_length=6), None)
    assert words(tok, cut.ids) == ["w0", "w1", "w2", "w7", "w8", "w9"]
    assert bare.identity(t, tok) == {**plain.identity(t, tok), "bos": False, "max_length": 10}
    with pytest.raises(UsageError, match=r"prompt\.bos='no' is not possible: true or false"):
        PromptPolicy(bos="no")


def test_template_is_rendered_around_the_cut_prompt_and_counts_towards_the_context():
    t, e = task()
    tok = Chat()
    got = encode(tok, e, t, PromptPolicy(template="on", system="be brief", max_length=4), None)
    frame = ["<system>", "be", "brief", "<user>", "w0", "w8", "w9", "<assistant>"]
    assert words(tok, got.ids) == frame
    assert len(encode(Chat(), e, t, PromptPolicy(template="on"), 8)) <= 8


def test_ids_under_a_template_are_those_of_the_templates_own_text():
    from transformers import AutoTokenizer

    from kvbench.models import embedded

    real = AutoTokenizer.from_pretrained(embedded.path())
    real.chat_template = "{{ bos_token }}[INST] {{ messages[0].content.strip() }} [/INST]"
    text = "  notes: the river is cold. question: what is the magic number of paris?\n"
    e = Example("a", text, ("x",), 4, question=" question: what is the magic number of paris?\n")
    t = Task("t/t", (e,), "f1", "test")
    want = real.apply_chat_template([{"role": "user", "content": text}], tokenize=True)["input_ids"]
    got = encode(real, e, t, PromptPolicy(template="on"), None)
    assert list(got.ids) == list(want)
    parted = encode(real, e, replace(t, query_aware=False), PromptPolicy(template="on"), None)
    assert (*parted.ids, *parted.question) == got.ids
    assert real.decode(parted.question).lstrip().startswith("question:")


def test_skip_uses_the_template_only_where_the_task_is_a_chat():
    policy = PromptPolicy(template="skip")
    assert policy.templated(task(chat=True)[0])
    assert not policy.templated(task(chat=False)[0])
    t, e = task(chat=False)
    tok = Chat()
    assert words(tok, encode(tok, e, t, policy, None).ids)[:2] == ["<s>", "w0"]
    assert policy.identity(t, tok) == PromptPolicy(template="off").identity(t, tok)


def test_another_template_is_another_identity():
    t, _ = task()
    policy = PromptPolicy(template="on")
    one, other = Chat(), Chat()
    other.apply_chat_template = lambda messages, **kw: "<u> " + messages[-1]["content"]
    assert policy.identity(t, one) != policy.identity(t, other)


def test_a_template_that_the_tokenizer_lacks_is_refused():
    t, e = task()
    for use in (lambda: encode(Words(), e, t, PromptPolicy(template="on"), None),
                lambda: check_policy(Words(), t, PromptPolicy(template="on"))):  # fmt: skip
        with pytest.raises(UsageError, match="no chat template"):
            use()


@pytest.mark.parametrize("limit", [None, 12, 9])
def test_withheld_question_has_the_tokens_it_has_when_known(limit):
    t, e = task(question="what is it ?")
    withheld = replace(t, query_aware=False)
    for tok, policy in ((Words(), {}), (Chat(), {"template": "on"})):
        known = encode(tok, e, t, PromptPolicy(**policy, max_length=limit), None)
        parted = encode(tok, e, withheld, PromptPolicy(**policy, max_length=limit), None)
        assert (*parted.ids, *parted.question) == known.ids
        assert parted.cut == known.cut
        foot = ["<assistant>"] if policy else []
        assert words(tok, parted.question) == ["what", "is", "it", "?", *foot]
    with pytest.raises(UsageError, match="no room"):
        encode(Words(), e, withheld, PromptPolicy(max_length=5), None)
    t, e = task()
    t = replace(t, query_aware=False)
    for use in (lambda: encode(Words(), e, t, PromptPolicy(), None),
                lambda: check_policy(Words(), t, PromptPolicy())):  # fmt: skip
        with pytest.raises(UsageError, match=r"does not say where the question of example .* begins"):
            use()


@pytest.mark.parametrize("aware", [True, False])
def test_the_beginning_of_an_answer_ends_what_is_read_behind_the_template(aware):
    t, e = task(question="what is it ?")
    t, e = replace(t, query_aware=aware), replace(e, answer_prefix=" it is")
    asked = ["what", "is", "it", "?"]
    for tok, policy, end in (
        (Words(), {}, [*asked, "it", "is"]),
        (Chat(), {"template": "on"}, [*asked, "<assistant>", "it", "is"]),
    ):
        for limit in (None, 17, 12):
            got = encode(tok, e, t, PromptPolicy(**policy, max_length=limit), None)
            read = words(tok, (*got.ids, *got.question))
            assert read[-len(end) :] == end
            assert words(tok, got.question) == ([] if aware else end)
            assert (got.cut > 0) == (limit == 12)
        assert len(encode(tok, e, t, PromptPolicy(**policy), 12)) <= 12
    assert t.content_hash() != replace(t, examples=(e,)).content_hash()


def test_a_dataset_says_whether_its_questions_are_withheld_unless_the_run_does():
    # the question of tiny's tasks is in view, that of RULER's is withheld
    knobs_of = {"tiny": {"length": 128, "examples": 1}, "ruler": {"lengths": 512, "examples": 1}}
    for name, task_name, own in (("tiny", "needle", True), ("ruler", "niah_multikey_3", False)):
        for asked in (None, True, False):
            known = own if asked is None else asked
            entry = {**entries("dataset")[name], **knobs_of[name]}
            (t,) = load_tasks(name, entry, [task_name], Words(), query_aware=asked)
            assert t.query_aware is known and PromptPolicy().identity(t, Words())["query_aware"] is known
            assert bool(encode(Words(), t.examples[0], t, PromptPolicy(), None).question) is not known


def test_a_context_of_several_questions_is_compressed_before_any_of_them():
    entry = {**entries("dataset")["kv_retrieval"], "records": 8, "contexts": 1, "questions": 2}
    for asked in (None, True, False):
        (t,) = load_tasks("kv_retrieval", entry, [], Words(), query_aware=asked)
        assert t.turns and t.query_aware is False


@pytest.mark.parametrize(
    ("value", "ways"),
    [
        (None, [None]),
        ("null", [None]),
        (True, [True]),
        ("false", [False]),
        ("true,false", [True, False]),
        ([False, True], [False, True]),
    ],
)
def test_query_aware_is_one_choice_for_each_time_that_a_dataset_is_read(value, ways):
    cfg = config.configure({"dataset": "tiny/needle", "query_aware": value})
    assert [dataset.query_aware for dataset in cfg.datasets] == ways
    labels = [""] if len(ways) == 1 else [f"query_aware={str(way).lower()}" for way in ways]
    assert [dataset.label for dataset in cfg.datasets] == labels


def test_another_query_aware_is_refused():
    for value, message in (
        ("maybe", "^prompt.query_aware='maybe'"),
        ("true,maybe", "^query_aware='maybe'"),
        ("[]", "^query"),
    ):
        with pytest.raises(UsageError, match=message):
            config.configure({"dataset": "tiny/needle", "query_aware": value})


@pytest.mark.parametrize("knob", [{"template": "y"}, {"truncation": "left"}, {"max_length": 0}, {"min_new_tokens": -1}])
def test_impossible_policies_are_refused(knob):
    with pytest.raises(UsageError, match=next(iter(knob))):
        PromptPolicy(**knob)


@pytest.mark.parametrize("preset", entries("prompt"))
def test_every_preset_composes_and_takes_the_models_limit(preset):
    run = config.read([f"prompt={preset}", "model=llama2-7b-chat"])
    limits = {
        "think": 3950,
        "vatp": 3500,
        "longbench": 3500,
        "uncomp": 3950,
        "kivi": 4096,
        "snapkv": 3500,
        "cake": 3500,
    }
    assert run.prompt.name == preset
    assert run.prompt.max_length == limits.get(preset)
    wins = config.read([f"prompt={preset}", "max_length=77"])
    assert wins.prompt.max_length == 77


def test_preset_values_are_the_papers():
    def policy(name, model="llama2-7b-chat"):
        return config.read([f"prompt={name}", f"model={model}"]).prompt

    assert (policy("think").template, policy("think").min_new_tokens) == ("off", 1)
    assert policy("think", "mistral-7b-instruct-v0.2").max_length == 31500
    assert policy("uncomp", "mistral-7b-instruct-v0.2").max_length == 12000
    assert policy("vatp", "vicuna-7b-v1.5-16k").max_length == 7500
    assert policy("vatp").template == "skip"
    assert policy("longbench").template == "skip"
    assert policy("longbench", "mistral-7b-instruct-v0.2").template == "off"
    assert policy("snapkv", "mistral-7b-instruct-v0.2").template == "off"
    assert policy("longbench", "llama3-8b-instruct").template == "off"
    assert policy("think", "llama3-8b-instruct").max_length == 7950


@pytest.mark.parametrize("preset", ["longbench", "vatp", "snapkv"])
def test_llama_2_gets_the_scripts_own_frame_and_not_its_tokenizers(preset):
    """The released scripts write [INST]{prompt}[/INST]; the tokenizer's template adds spaces and strips the prompt."""
    from transformers import AutoTokenizer

    from kvbench.models import embedded

    real = AutoTokenizer.from_pretrained(embedded.path())
    real.chat_template = "{{ bos_token }}[INST] {{ messages[0].content.strip() }} [/INST]"
    e = Example("a", "  notes: the river is cold.\n", ("x",), 4)
    run = config.read([f"prompt={preset}", "model=llama2-7b-chat"])
    t = Task("t/t", (e,), "f1", "test")
    got = encode(real, e, t, run.prompt, None)
    assert list(got.ids) == real.encode(f"[INST]{e.prompt}[/INST]")
    assert run.prompt.identity(t, real) != PromptPolicy(template="skip").identity(t, real)
    chat = config.read(["prompt=chat", "model=llama2-7b-chat"])
    assert chat.prompt.frame is None


@pytest.mark.parametrize("model", [m for m in entries("model") if m != "hf"])
def test_every_model_entry_is_whole(model):
    run = config.read([f"model={model}"])
    assert run.model.name == model
    assert set(entries("model")[model]) - {"fetch"} == set(entries("model")["hf"])
    placed = f"fetched:{model}" if "fetch" in entries("model")[model] else "embedded:tiny"
    assert run.model.path.count("/") == 1 or run.model.path == placed


def test_special_tokens_among_a_models_stop_texts_join_its_end_tokens(monkeypatch):
    from kvbench.run import experiment

    tok = Words()
    tok.eos_token_id = 99
    monkeypatch.setattr(tok, "decode", lambda ids, skip_special_tokens: "" if ids == [2] else "word")
    monkeypatch.setattr(experiment.load, "end_tokens", lambda cfg, source: {7, 8})
    cfg = SimpleNamespace(model=SimpleNamespace(stop=("a", "b", "a b")))
    prepared = SimpleNamespace(tokenizer=tok, source=None, cfg=cfg, model=None)
    assert experiment.collect_stop_tokens(prepared) == {99, 7, 8, 2}


def test_vicunas_template_is_the_one_it_was_trained_with():
    run = config.read(["model=vicuna-7b-v1.5-16k"])
    from transformers import AutoTokenizer

    from kvbench.models import embedded

    tokenizer = AutoTokenizer.from_pretrained(embedded.path())
    tokenizer.chat_template = run.model.chat_template
    text = PromptPolicy(template="on").render_message(tokenizer, "Hello")
    assert text.endswith("to the user's questions. USER: Hello ASSISTANT:")


def test_a_preset_whose_limit_nobody_states_is_refused():
    with pytest.raises(UsageError, match=r"of prompt\.limits"):
        config.read(["prompt=think", "limits=banana"])


def test_kvpresss_protocol_compresses_the_template_up_to_the_question():
    """C10: the context ends where the question begins, the template's end is read with the question."""

    class Characters(Chat):
        chat_template = "{{ enable_thinking }}"

        def encode(self, text, add_special_tokens=True):
            return [ord(c) for c in text]

        def apply_chat_template(self, messages, tokenize, add_generation_prompt, **switches):
            assert switches == {"enable_thinking": False}
            return f"<u>{messages[-1]['content']}</u><a>"

    run = config.parse(words_of.read(["preset=kvpress", "method=snapkv", "dataset=tiny"])[0])
    example = Example("a", "C\nQ? ", ("x",), 4, question="Q? ")
    (dataset,) = run.datasets
    assert dataset.query_aware is False
    t = Task("t/t", (example,), "f1", "test", chat=False, query_aware=dataset.query_aware)
    encoded = encode(Characters(), example, t, run.prompt, None)
    assert ("".join(map(chr, encoded.ids)), "".join(map(chr, encoded.question))) == ("<u>C\n", "Q? </u><a>")
    with pytest.raises(UsageError, match=r"prompt\.thinking=1 is not possible: true, false or null"):
        PromptPolicy(thinking=1)
