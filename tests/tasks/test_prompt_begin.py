"""Prompts that bring their beginning-of-sequence token or their chat template: each is read once."""

import json

import pytest
from support.stub_server import MODEL, completion, serving
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import kvbench
from kvbench.base.example import Example, Turn
from kvbench.cli.main import main
from kvbench.engines.rows import remove_bos
from kvbench.plan.advice import about_prompts
from kvbench.tasks.base import Task
from kvbench.tasks.encoding import encode_prompt
from kvbench.tasks.prompt import PromptPolicy, drop_typed_bos, tokenize_text

WORDS = ["<unk>", "<bos>", "<eos>", "user", ":", "bot", "hello", "world", "what", "?"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] }} : {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}bot :{% endif %}"
)
PLAIN, CHAT = PromptPolicy(), PromptPolicy(name="chat", template="on")
# what a prompt has in front, in every way that users export it
BEGINS = ["", "<bos> ", "<bos>", " <bos> ", "<bos><bos> "]


def make_tokenizer(adds=True, template=TEMPLATE):
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<unk>", "<bos>", "<eos>"])
    if adds:
        tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", unk_token="<unk>")
    made.chat_template = template
    return made


def make_task(prompt, turns=(), question=""):
    example = Example("a", prompt, ("x",), 2, turns=turns, question=question)
    return Task("file/rows", (example,), "f1", "here", turns="isolated" if turns else "", query_aware=not question)


def read(tokenizer, policy, task, context=None):
    encoded = encode_prompt(tokenizer, task.examples[0], task, policy, context)
    return " ".join(tokenizer.convert_ids_to_tokens(encoded.ids + encoded.question))


@pytest.mark.parametrize("begin", BEGINS)
@pytest.mark.parametrize("context", [None, 6])
@pytest.mark.parametrize("truncation", ["tokens", "text"])
def test_a_prompt_has_one_token_at_its_beginning(begin, context, truncation):
    task = make_task(f"{begin}hello world what ?")
    policy = PromptPolicy(truncation=truncation)
    ids = read(make_tokenizer(), policy, task, context)
    # a context of 6 tokens leaves 4 beside an answer of 2
    assert ids.startswith("<bos> ") and ids.count("<bos>") == 1 and (context or ids == "<bos> hello world what ?")
    # a tokenizer that adds none reads what is typed
    assert read(make_tokenizer(adds=False), policy, task).count("<bos>") == ("<bos>" in begin)
    assert read(make_tokenizer(), CHAT, task) == "<bos> user : hello world what ? bot :"


@pytest.mark.parametrize("begin", BEGINS)
def test_a_context_with_questions_and_a_withheld_question_begin_once(begin):
    turns = (Turn("what ?", ("x",)), Turn("hello ?", ("x",)))
    tokenizer = make_tokenizer()
    assert read(tokenizer, PLAIN, make_task(f"{begin}hello world ", turns)) == "<bos> hello world"
    assert read(tokenizer, CHAT, make_task(f"{begin}hello world ", turns)) == "<bos> user : hello world"
    withheld = make_task(f"{begin}hello world what ?", question="what ?")
    encoded = encode_prompt(tokenizer, withheld.examples[0], withheld, PLAIN, None)
    assert (encoded.ids, encoded.question) == ((1, 6, 7), (8, 9))


def test_a_template_that_begins_every_message_with_the_token_keeps_a_typed_one():
    template = "{% for m in messages %}<bos>{{ m['role'] }} : {{ m['content'] }}{% endfor %}<bos>bot :"
    text = CHAT.render_message(make_tokenizer(template=template), "<bos>user : hello")
    assert text == "<bos>user : <bos>user : hello<bos>bot :"


def test_a_tokenizer_without_the_token_reads_texts_as_they_are():
    _, tokenizer = kvbench.load_model("tiny")
    text = "the magic number"
    assert tokenize_text(tokenizer, text, special=True) == list(tokenizer.encode(text))
    assert drop_typed_bos(type("None", (), {"bos_token": None})(), "<bos> a") == "<bos> a"


def test_only_prompts_that_were_read_otherwise_get_another_id():
    typed, plain = make_task("<bos> hello"), make_task("hello")
    for policy in (PLAIN, CHAT):
        assert policy.identity(typed, make_tokenizer())["bos"] == "once"
        assert "bos" not in policy.identity(plain, make_tokenizer())
    assert "bos" not in PLAIN.identity(typed, make_tokenizer(adds=False))
    assert PromptPolicy(bos=False).identity(typed, make_tokenizer())["bos"] is False


TEMPLATES = {
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n",
    "llama2": "{{ bos_token }}[INST] {{ messages[0].content }} [/INST]",
    "vicuna": "Be polite. USER: {{ messages[0].content }} ASSISTANT:",
    "words": TEMPLATE,
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_prompt_that_holds_its_template_is_named_once_before_the_run(name):
    tokenizer = make_tokenizer(template=TEMPLATES[name])
    bare = Example("b", "hello world", ("x",), 32)
    held = Example("a", CHAT.render_message(tokenizer, "hello"), ("x",), 32)
    task = Task("file/rows", (held, bare), "f1", "here")
    (note,) = about_prompts(CHAT, [task], tokenizer)
    assert note.startswith("file/rows: 1 prompts hold the chat template's text already") and "prompt=plain" in note
    # who follows the note is not told the opposite
    assert about_prompts(PLAIN, [task], tokenizer) == []
    alone = Task("file/rows", (bare,), "f1", "here")
    assert about_prompts(CHAT, [alone], tokenizer) == []
    assert about_prompts(PLAIN, [alone], tokenizer) == ["The tokenizer has a chat template; prompt=chat applies it."]


@pytest.mark.parametrize(
    "template", ["{{ messages[0].content }}", "{{ raise_exception('no') }}", "{{ bos_token }}{{ messages[0].content }}"]
)
def test_a_template_without_a_text_of_its_own_is_found_in_no_prompt(template):
    assert CHAT.count_templated(make_tokenizer(template=template), ["hello", "<bos> hello"]) == 0


@pytest.mark.e2e("whole answers")
def test_a_run_and_an_engine_name_prompts_that_hold_the_template(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "<u> hello <a>", "answers": ["x"]}) + "\n", encoding="utf-8")
    words = [
        "run",
        "model=tiny",
        "dataset=file",
        f"path={path}",
        "metric=f1",
        "max_new_tokens=20",
        f"results={tmp_path}",
    ]
    words += ["prompt=chat", "model.chat_template='<u> {{ messages[0].content }} <a>'"]
    assert main([*words, "method=full"]) == 0
    assert "1 prompts hold the chat template's text already" in " ".join(capsys.readouterr().err.split())
    with serving(lambda question: (200, completion("42"))) as stub:
        assert main([*words, "engine=openai", f"url={stub.url}", f"served={MODEL}", "label=a"]) == 0
    assert "1 prompts hold the chat template's text already" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("begin", BEGINS)
def test_an_engine_that_adds_the_token_gets_a_text_without_it(begin):
    tokenizer = make_tokenizer()
    task = make_task(f"{begin}hello world")
    ids = encode_prompt(tokenizer, task.examples[0], task, PLAIN, None).ids
    assert tokenizer.decode(remove_bos(tokenizer, ids)) == "hello world"
