"""Scissorhands: attention from the last w queries, held to the budget while decoding."""

import pytest
import torch
from support import decoding_reference as decoding
from support import method_reference as ref
from support.families import build, prompt

import kvbench
from kvbench.audit.prompt_audit import audit
from kvbench.base.errors import UsageError
from kvbench.kv.observation import Needs
from kvbench.methods.core.resolve import chain_of
from kvbench.methods.h2o import H2O
from kvbench.methods.scissorhands import Scissorhands
from kvbench.models.interface import cache_shape
from kvbench.storage.roles import Slots

VARIANTS = ("code", "paper")


def test_the_papers_budget_by_hand():
    stage = Scissorhands(half_ratio=0.25)
    assert (stage.capacity(1000).tokens, stage.capacity(1000).window) == (500, 10)
    assert stage.capacity(1003).tokens == 500
    assert stage.decode_limit(1003, 0) == 500
    assert Scissorhands(kv_ratio=0.5).capacity(1003).tokens == 501


# spec 5, Scissorhands: n=1000 -> 490 + 10
@pytest.mark.parametrize("variant", VARIANTS)
def test_recent_tokens_stay_and_the_rest_competes(variant):
    n = 1000
    q, k = torch.zeros(1, n, 4), torch.zeros(1, n, 4)
    q[0, -400:, 0], k[0, 300:790, 0] = 8, 8
    dense, obs = ref.make_layer(q, k)
    (kept_positions,) = ref.kept(Scissorhands(half_ratio=0.25, variant=variant).compress(dense, obs))
    assert kept_positions == [*range(300, 790), *range(990, 1000)]


# spec 5, Scissorhands: n <= 400
@pytest.mark.parametrize("n", [30, 400])
@pytest.mark.parametrize("variant", VARIANTS)
def test_prompts_within_the_window_are_ranked_as_by_h2o(n, variant):
    layer = ref.make_layer(torch.randn(4, n, 8), torch.randn(2, n, 8))
    knobs = {"kv_size": 20}
    wanted = ref.kept(H2O(window=10, **knobs).compress(*layer))
    assert ref.kept(Scissorhands(variant=variant, **knobs).compress(*layer)) == wanted


@pytest.mark.parametrize("variant", VARIANTS)
def test_queries_before_the_window_do_not_count(variant):
    q, k = torch.zeros(1, 20, 4), torch.zeros(1, 20, 4)
    q[0, :12, 0], q[0, 12:, 1] = 20, 20
    k[0, 2, 0], k[0, 9, 1] = 20, 20
    knobs = {"kv_size": 4, "recent": 3, "variant": variant}
    assert ref.kept(Scissorhands(window=8, **knobs).compress(*ref.make_layer(q, k))) == [[9, 17, 18, 19]]
    assert ref.kept(Scissorhands(window=20, **knobs).compress(*ref.make_layer(q, k))) == [[2, 17, 18, 19]]


def view(state, now=20):
    (t,) = state.values()
    positions = torch.arange(t.shape[2]).expand(t.shape[:3])
    at = [torch.full((1, 1, 1), x) for x in (now, 10)]
    return Slots(positions, torch.ones(t.shape[:3], dtype=torch.bool), state, *at, {"recent": torch.full((1, 1, 1), 2)})


def test_code_adds_new_rows_whole_to_a_prompt_that_was_divided():
    dense, obs = ref.make_layer(torch.zeros(2, 4, 4), torch.zeros(1, 4, 4))
    state = Scissorhands(window=8, recent=1).initial_state(dense, obs)
    by_hand = [(1 + 1 / 2 + 1 / 3 + 1 / 4) / 8, (1 / 2 + 1 / 3 + 1 / 4) / 8, (1 / 3 + 1 / 4) / 8, 1 / 32]
    assert state["mass"][0].tolist() == pytest.approx(by_hand)
    probs = torch.tensor([[[0.1, 0.2, 0.3, 0.4]], [[0.3, 0.4, 0.3, 0.0]]])[None]
    slots = view({"mass": state["mass"][None]})
    folded = Scissorhands(window=8, recent=1).fold(slots, probs)
    added = [0.2, 0.3, 0.3, 0.2]
    assert folded["mass"][0, 0].tolist() == pytest.approx([a + b for a, b in zip(by_hand, added, strict=True)])


@pytest.mark.parametrize("chunk", [1, 2, 3, 7])
def test_paper_forgets_rows_that_leave_the_window(chunk):
    stage, rows = Scissorhands(window=3, recent=1, variant="paper"), torch.rand(1, 2, 14, 5)
    slots = view({"ring": torch.zeros(1, 1, 5, 3)}, now=-1)
    for start in range(0, 14, chunk):
        part = rows[:, :, start : start + chunk]
        slots = view(slots.state, now=int(slots.now) + part.shape[2])
        slots = view(stage.fold(slots, part), now=int(slots.now))
        end = start + part.shape[2]
        wanted = rows[0, :, max(0, end - 3) : end].mean(0).sum(0)
        torch.testing.assert_close(slots.state["ring"][0, 0].sum(-1), wanted)


def simulated(model, ids, new, size, window, recent, variant):
    n = len(ids)

    def leaves(attn, held, head, now):
        def mass(row_from, row_to, j):
            return sum(sum(a[i][j] for a in attn[2 * head : 2 * head + 2]) / 2 for i in range(row_from, row_to))

        if variant == "code":
            score = {j: mass(max(0, n - window), n, j) / window + mass(n, now, j) for j in held}
        else:
            score = {j: mass(max(0, now - window), now, j) for j in held}
        old = sorted((j for j in held if j <= now - recent), key=lambda j: (score[j], -j))
        return set(old[: max(0, len(held) - (size - 1))])

    return decoding.evicting(
        model, ids, new, lambda attn: ref.scissorhands(attn, 2, size, window, recent, variant), leaves
    )


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("window", [6, 30])
def test_decoding_equals_a_slow_simulation_with_masks(variant, window):
    model, ids, size, recent, new = build("llama"), prompt(22, 5), 10, 4, 12
    knobs = {"kv_size": size, "recent": recent, "variant": variant, "scissorhands.window": window}
    (cache,) = kvbench.prefill(model, ids, [{"method": "scissorhands", **knobs}])
    answer, kept_tokens = simulated(model, ids, new, size, window, recent, variant)
    assert kvbench.generate(model, [cache], new) == [answer]
    longer = kvbench.extend(model, cache, torch.tensor(answer))
    assert [ref.kept(layer) for layer in longer.layers] == kept_tokens


def test_the_variants_differ_once_decoding_has_begun():
    model, ids = build("llama"), prompt(22, 5)
    kept_tokens = [simulated(model, ids, 12, 10, 6, 4, variant)[1] for variant in VARIANTS]
    assert kept_tokens[0] != kept_tokens[1]


@pytest.mark.parametrize(("variant", "state"), [("code", 4), ("paper", 4 * 9)])
@pytest.mark.parametrize("per", ["kv_head", "query_head"])
def test_the_state_is_declared_and_counted(variant, state, per):
    model = build("llama")
    entry = {"method": "scissorhands", "window": 9, "variant": variant, "kv_size": 15}
    (cache,) = kvbench.prefill(model, prompt(40, 3), [entry], per=per)
    heads = 4 if per == "query_head" else 2
    assert audit(cache, cache_shape(model)).overhead == 3 * heads * 15 * (4 + state)


@pytest.mark.parametrize("n", [3, 12, 40])
@pytest.mark.parametrize("knobs", [{"kv_ratio": 0.1}, {"kv_ratio": 1.0}, {"half_ratio": 0.2}, {"kv_size": 11}])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_newest_tokens_stay_for_the_whole_answer_whatever_the_prompts_length(n, knobs, variant):
    model = build("llama")
    stage = Scissorhands(variant=variant, **knobs)
    entry = {"method": "scissorhands", "variant": variant, "kv_size": None, "kv_ratio": None, **knobs}
    (cache,) = kvbench.prefill(model, prompt(n, 3), [entry])
    audit(cache, cache_shape(model))
    longer = kvbench.extend(model, cache, prompt(16, 4))
    recent = stage.token_counts(n)["recent"]
    for layer in longer.layers:
        for positions in ref.kept(layer):
            assert len(positions) == min(stage.decode_limit(n, 0), n + 16)
            assert positions[-recent:] == list(range(n + 16 - recent, n + 16))


def test_it_asks_for_its_window_of_queries_only():
    assert Scissorhands(window=50).needs(1000) == Needs(last_q=50)


@pytest.mark.parametrize(
    ("knobs", "named"),
    [
        ({"window": 0}, "window"),
        ({"recent": 0}, "recent"),
        ({"variant": "half"}, "variant"),
        ({"half_ratio": 0.6}, "half_ratio"),
        ({"half_ratio": 0.2, "kv_size": 50}, "half_ratio"),
        ({"kv_size": 10}, "kv_size"),
    ],
)
def test_impossible_knobs_are_refused(knobs, named):
    with pytest.raises(UsageError, match=rf"method\.scissorhands\.{named}"):
        chain_of({"method": "scissorhands", **knobs})
