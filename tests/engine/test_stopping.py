"""Stop texts: an answer ends where the whole text stands in its decoded text, at any boundary of tokens."""

import random

import pytest
from support.families import build, generated, prompt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import kvbench
from kvbench.engine.stopping import Ending, StopTexts, cut_text, find_special_token

SAMPLES = [
    " The bank closes at 5:10.\n\nQuestion: At what time, é or ⅔?",
    "x = f();\n\n\n}\nreturn 'naïve — 日本語';\t# Answer: 🙂.<|end|>",
]
TEXTS = [
    "Question:",
    "\n\n",
    "\n",
    ";",
    "\n\nQuestion: ",
    "5:10",
    "日本",
    "🙂",
    "—",
    "<|end|>",
    " ",
    "é or",
    "'",
    "e or",
]


def make_byte_level():
    """A tokenizer of bytes with merged pairs, as of GPT-2: a character may take several tokens, ``();`` is one."""
    pairs = [("Ċ", "Ċ"), ("(", ")"), ("()", ";"), ("Q", "u"), ("Ġ", "a"), (".", "Ċ"), (";", "ĊĊ"), ("ï", "v")]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merged = ["".join(pair) for pair in pairs]
    pairs = [pair for pair in pairs if set(pair) <= {*letters, *merged}]
    vocabulary = {token: i for i, token in enumerate([*letters, *("".join(pair) for pair in pairs)])}
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def make_byte_fallback():
    """A tokenizer of pieces with a mark for spaces and tokens for bytes, as of Llama 2."""
    pieces = [
        "<unk>",
        "<|end|>",
        "▁",
        *(f"<0x{i:02X}>" for i in range(256)),
        *sorted(set("".join(SAMPLES)) - set("日🙂\n ")),
    ]
    pieces += ["▁T", "▁a", "▁Q", "Qu", "▁—"]
    pairs = [("▁", "T"), ("▁", "a"), ("▁", "Q"), ("Q", "u"), ("▁", "—")]
    model = models.BPE({p: i for i, p in enumerate(pieces)}, pairs, unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<|end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", unk_token="<unk>")


TOKENIZERS = {
    "tiny": lambda: kvbench.load_model("tiny")[1],
    "bytes": make_byte_level,
    "pieces": make_byte_fallback,
}


def list_answers(tokenizer):
    """Token ids of texts, and of shuffled ones, in which characters are torn apart."""
    shuffler = random.Random(0)
    for sample in SAMPLES:
        ids = tokenizer.encode(sample, add_special_tokens=False)
        yield ids
        for _ in range(10):
            yield shuffler.choices(ids, k=60)
        yield [i for token in ids for i in [token] * shuffler.randint(1, 2)]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_text_ends_an_answer_at_the_token_that_completes_it(name):
    tokenizer = TOKENIZERS[name]()
    ended = 0
    for ids in list_answers(tokenizer):
        for text in TEXTS:
            texts = StopTexts((text,), tokenizer)
            # the plain rule: decode the whole answer after every token
            decoded = [tokenizer.decode(ids[: n + 1], skip_special_tokens=False) for n in range(len(ids))]
            want = next((n for n, answer in enumerate(decoded) if text in answer), None)
            got = next((n for n in range(len(ids)) if texts.stand_in(ids[: n + 1])), None)
            assert got == want, (text, ids)
            if got is None:
                assert texts.cut(ids) == (ids, "")
                continue
            ended += 1
            kept, rest = texts.cut(ids[: got + 1])
            before = tokenizer.decode(kept, skip_special_tokens=False) + rest
            assert before == decoded[got].partition(text)[0] and kept == ids[: len(kept)] and len(kept) <= got
    assert ended > 40


def test_the_first_of_several_texts_counts():
    tokenizer = make_byte_level()
    ids = tokenizer.encode("one; two. three", add_special_tokens=False)
    texts = StopTexts((".", "e;", "o"), tokenizer)
    assert texts.cut(ids) == ([], "")
    assert StopTexts((".", "e;"), tokenizer).cut(ids) == (ids[:2], "")
    assert cut_text("one; two. three", (".", "e;")) == "on" and cut_text("one", ("two",)) == "one"


def test_a_text_that_begins_inside_a_token_leaves_the_characters_before_it():
    tokenizer = make_byte_level()
    ids = tokenizer.encode("f();\n", add_special_tokens=False)
    assert tokenizer.convert_ids_to_tokens(ids) == ["f", "();", "Ċ"]
    texts = StopTexts((";",), tokenizer)
    assert [texts.stand_in(ids[:n]) for n in (1, 2)] == [False, True]
    assert texts.cut(ids[:2]) == (ids[:1], "()")


@pytest.mark.parametrize("gap", range(17))
def test_tokens_without_a_text_may_stand_inside_a_stop_text(gap):
    tokenizer = make_byte_level()
    # an id beyond the vocabulary decodes to nothing; models have such ids
    ids = tokenizer.encode("a;", add_special_tokens=False)
    ids[1:1] = [len(tokenizer) + 5] * gap
    assert StopTexts(("a;",), tokenizer).stand_in(ids)


def test_only_the_text_of_a_special_token_has_a_special_token():
    tokenizer = make_byte_level()
    assert find_special_token(tokenizer, "<|end|>") == tokenizer.eos_token_id
    assert [find_special_token(tokenizer, text) for text in (";", "ab", "<|end", "<|end|>\n")] == [None] * 4


def test_each_row_of_a_batch_ends_at_its_own_text():
    model = build("llama")
    caches = [kvbench.prefill(model, prompt(30, seed), ["full"])[0] for seed in range(3)]
    free = kvbench.generate(model, caches, 12)

    class Words:
        def decode(self, ids, skip_special_tokens=False):
            return "".join(f"<{i}>" for i in ids)

    # two tokens of row 1 and the halves of their neighbours
    text = f"{free[1][3]}><{free[1][4]}><"
    endings = [Ending(12), Ending(12, texts=StopTexts((text,), Words())), Ending(3, texts=StopTexts(("!",), Words()))]
    answers = generated(model, caches, endings)
    assert answers == [free[0], free[1][:6], free[2][:3]]
    assert endings[1].cut(answers[1]) == (free[1][:3], "<")
