"""Random selection: reproducible, different wherever it should be, and without favourites."""

import pytest
import torch
from support import method_reference as ref
from support.families import build, prompt

import kvbench
from kvbench.base.errors import Refused, UsageError
from kvbench.methods.core.resolve import chain_of
from kvbench.methods.random import Random

N = 40


def kept(stage, per="kv_head", device="cpu", **obs):
    q, k = ref.grid(4, N, 8).to(device), ref.grid(2, N, 8).to(device)
    return ref.kept(stage.compress(*ref.make_layer(q, k, per=per, **obs)))


def test_the_draw_is_the_same_in_every_run_and_leaves_the_global_generator_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = kept(Random(kv_size=10))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert kept(Random(kv_size=10)) == first


def test_the_draw_is_pinned_because_stored_results_depend_on_it():
    """A change here is a new method: bump the stage's revision."""
    assert Random.revision == 1
    assert kept(Random(kv_size=5)) == [[12, 20, 27, 32, 35], [20, 25, 28, 29, 31]]


def test_prompts_layers_seeds_and_heads_draw_differently():
    base = kept(Random(kv_size=10))
    others = [
        kept(Random(kv_size=10), prompt=8),
        kept(Random(kv_size=10), layer=1),
        kept(Random(kv_size=10, seed=1)),
        base[::-1],
    ]
    assert all(other != base for other in others)
    assert base[0] != base[1]


def test_a_larger_budget_keeps_what_a_smaller_one_kept():
    small, large = kept(Random(kv_size=8)), kept(Random(kv_size=20))
    assert all(set(s) < set(x) for s, x in zip(small, large, strict=True))


def test_every_position_is_kept_equally_often():
    """2,000 draws at 25 %: the share of each position lies within 4.5 standard errors of 0.25, ends included."""
    counts = torch.zeros(N)
    for at in range(1000):
        for head in kept(Random(kv_ratio=0.25), prompt=at):
            counts[head] += 1
    assert ((counts / 2000 - 0.25).abs() < 4.5 * (0.25 * 0.75 / 2000) ** 0.5).all()


def test_budgets_of_one_token_are_possible():
    assert all(len(head) == 1 for head in kept(Random(kv_size=1)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_devices_draw_alike():
    assert kept(Random(kv_size=10), device="cuda") == kept(Random(kv_size=10))


@pytest.mark.parametrize("value", [-1, 0.5, "x"])
def test_impossible_seeds_are_refused(value):
    with pytest.raises(UsageError, match=r"method\.random\.seed"):
        chain_of({"method": "random", "seed": value})


def test_options_at_their_defaults_are_no_part_of_an_identity():
    """Results that are stored under the ids of before stay valid."""
    plain = chain_of("random").identity()
    assert plain["stages"][0]["knobs"] == {"frozen_layers": (), "kv_ratio": 0.25, "seed": 0}
    assert chain_of({"method": "random", "keep_window": 0, "keep_prompt": False}).identity() == plain
    asked = {"decode_budget": 50, "keep_prompt": True}
    # a prompt that stays whole keeps its window anyway
    assert chain_of({"method": "random", "keep_window": 5, **asked}) == chain_of({"method": "random", **asked})
    assert chain_of({"method": "random", **asked}).identity()["stages"][0]["knobs"]["keep_prompt"] is True
    assert type(chain_of({"method": "random", "decode_budget": 50}).evictor.selector) is Random


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"keep_window": -1}, r"keep_window=-1 .* 0 or more"),
        ({"keep_window": 20, "kv_size": 20}, r"kv_size=20 .* above 20 \(sinks 0 \+ window 20\)"),
        ({"keep_window": 20, "decode_budget": 20}, r"decode_budget=20 .* above 20"),
        ({"keep_prompt": True}, "together with decode_budget"),
        ({"keep_prompt": True, "decode_ratio": 0.5}, "together with decode_budget"),
        ({"keep_prompt": True, "decode_budget": 64, "kv_size": 32}, "not given together with kv_size or kv_ratio"),
        ({"keep_prompt": True, "decode_budget": 64, "kv_ratio": 0.5}, "not given together with kv_size or kv_ratio"),
    ],
)
def test_impossible_options_are_refused(wrong, match):
    with pytest.raises(UsageError, match=match):
        chain_of({"method": "random", **wrong})


def test_the_window_takes_part_of_the_budget_and_the_draw_the_rest():
    plain, windowed = kept(Random(kv_size=10)), kept(Random(kv_size=10, keep_window=4))
    window = set(range(N - 4, N))
    for before, head in zip(plain, windowed, strict=True):
        assert len(head) == 10 and window < set(head)
        # the same draw: of the tokens before the window, the best 6 are there, among more or fewer of the best
        assert set(head) - window <= set(before) - window or set(before) - window <= set(head) - window
    # a fraction that is too small leaves the window half of it
    for head in kept(Random(kv_ratio=0.2, keep_window=30)):
        assert len(head) == 8 and set(range(N - 4, N)) < set(head)


def test_every_position_before_the_window_is_kept_equally_often():
    """2,000 draws of 10 tokens, 4 of them the window: each of 36 positions has the share 6 / 36."""
    counts = torch.zeros(N)
    for at in range(1000):
        for head in kept(Random(kv_size=10, keep_window=4), prompt=at):
            counts[head] += 1
    assert (counts[-4:] == 2000).all()
    share = 6 / 36
    assert ((counts[:-4] / 2000 - share).abs() < 4.5 * (share * (1 - share) / 2000) ** 0.5).all()


def answered(options, new, n=45):
    """The tokens kept in each layer and head after a prompt of n tokens and ``new`` more."""
    model = build("llama")
    (cache,) = kvbench.prefill(model, prompt(n), [{"method": "random", "decode_every": 6, **options}])
    longer = cache if not new else kvbench.extend(model, cache, prompt(new, 3))
    return [head for layer in longer.layers for head in ref.kept(layer)]


@pytest.mark.parametrize("new", [0, 6, 7, 13, 30])
@pytest.mark.parametrize(
    ("options", "protected", "budget"),
    [
        ({"kv_size": 18, "keep_window": 5, "decode_budget": 15}, range(40, 45), lambda seen: 15),
        # at first the share is too small for the window
        ({"kv_ratio": 0.2, "keep_window": 5, "decode_ratio": 0.2}, range(41, 45), lambda seen: -(-seen // 5)),
        ({"keep_prompt": True, "decode_budget": 50}, range(45), lambda seen: 50),
    ],
)
def test_tokens_of_the_prompt_stay_while_decoding_and_the_others_are_drawn(options, protected, budget, new):
    sets = answered(options, new)
    at_prompt = answered(options, 0)
    for head, before in zip(sets, at_prompt, strict=True):
        assert set(protected) <= set(head)
        chosen_at = new - 1 - (new - 1) % 6 if new else 0  # new tokens read at the last choice
        size = len(before) + new
        if chosen_at:
            size = min(len(before) + chosen_at, budget(45 + chosen_at)) + new - chosen_at
            # what came after the last choice is there
            assert set(range(45 + chosen_at, 45 + new)) <= set(head)
        assert len(head) == size
    if options.get("keep_prompt"):
        assert at_prompt == [list(range(45))] * len(at_prompt)
    if new == 30:
        # heads and layers draw differently, and the newest tokens have no place of their own
        assert len({tuple(head) for head in sets}) > 1
        assert any(45 + 23 not in head for head in sets)


def test_a_whole_prompt_without_room_for_an_answer_is_refused():
    model = build("llama")
    options = {"method": "random", "keep_prompt": True, "decode_budget": 45}
    with pytest.raises(Refused, match=r"the whole prompt of 45 tokens, and decode_budget=45 leaves no token"):
        kvbench.prefill(model, prompt(45), [options])
    (cache,) = kvbench.prefill(model, prompt(44), [options])
    assert cache.layers[0].tokens == 44
