"""How answers end: limits, stop tokens, minimum lengths, forbidden first tokens, row by row."""

import torch
from support.families import build, generated, prompt
from torch._subclasses import FakeTensorMode

import kvbench
from kvbench.engine.batch import stack_layers
from kvbench.engine.stopping import Ending, StopTexts


def letter(token):
    """A character of its own for each token."""
    return chr(0x4E00 + token)


class Letters:
    """A tokenizer of one character for each token."""

    def decode(self, ids, skip_special_tokens=False):
        return "".join(map(letter, ids))


def test_what_layers_on_several_devices_say_comes_together_on_one():
    with FakeTensorMode():
        actual = [torch.ones(5, device=f"cuda:{i}") for i in range(3)]
        together = stack_layers(actual, torch.device("cuda:2"))
        assert together.shape == (3, 5) and together.device == torch.device("cuda:2")


def test_each_row_ends_by_its_own_rule():
    model = build("llama")
    caches = [kvbench.prefill(model, prompt(30, seed), ["full"])[0] for seed in range(4)]
    free = kvbench.generate(model, caches, 12)
    stop = frozenset({free[1][4]})
    endings = [Ending(12), Ending(12, stop), Ending(3), Ending(1)]
    answers = generated(model, caches, endings)
    assert answers[0] == free[0]
    assert answers[1] == free[1][: free[1].index(free[1][4]) + 1]
    assert answers[2:] == [free[2][:3], free[3][:1]]


def test_minimum_length_and_forbidden_first_token_change_the_choice_as_masked_logits_do():
    model = build("llama")
    ids = prompt(30, 1)
    (cache,) = kvbench.prefill(model, ids, ["full"])
    (free,) = kvbench.generate(model, [cache], 6)
    (second,) = generated(model, [cache], [Ending(6, forbid_first=StopTexts((letter(free[0]),), Letters()))])
    masked = cache.logits.clone()
    masked[free[0]] = -torch.inf
    assert second[0] == int(masked.argmax()) != free[0]
    (stored,) = generated(model, [cache], [Ending(6, frozenset({free[0], free[2]}), min_new_tokens=3)])
    assert len(stored) >= 4 or stored[-1] not in (free[0], free[2])
    assert not {free[0], free[2]} & set(stored[:3])
    texts = StopTexts((letter(free[0]), letter(free[2])), Letters())
    assert generated(model, [cache], [Ending(6, texts=texts, min_new_tokens=3)]) == [stored]
    drawn = Ending(6, texts=texts, min_new_tokens=3, temperature=1.0, seed=3)
    assert not {free[0], free[2]} & set(generated(model, [cache], [drawn])[0][:3])


def test_a_short_row_never_walks_past_its_own_positions():
    model = build("opt")
    short, *others = [kvbench.prefill(model, prompt(n, n), ["full"])[0] for n in (508, 100, 101, 102, 103, 104)]
    endings = [Ending(4), *[Ending(60)] * 5]
    answers = generated(model, [short, *others], endings)
    alone = [generated(model, [c], [e])[0] for c, e in zip([short, *others], endings, strict=True)]
    assert answers == alone
