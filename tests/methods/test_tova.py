"""TOVA: the newest query decides, for all heads of a layer, after the prompt and at every step."""

import pytest
import torch
from support import decoding_reference as decoding
from support import method_reference as ref
from support.families import build, prompt

import kvbench
from kvbench.audit.prompt_audit import audit
from kvbench.base.errors import UsageError
from kvbench.methods.core.resolve import chain_of
from kvbench.methods.tova import TOVA
from kvbench.models.interface import cache_shape
from kvbench.storage.roles import Slots

N = 30


def attends(*targets):
    """Return a layer of one head per target, whose last query puts nearly all its attention there."""
    q, k = torch.zeros(len(targets), N, 8), torch.zeros(len(targets), N, 8)
    for h, target in enumerate(targets):
        q[h, -1, 0] = 20
        k[h, target, 0] = 20
    return ref.make_layer(q, k)


def test_what_the_last_query_attends_to_stays_in_every_head():
    assert ref.kept(TOVA(kv_size=3).compress(*attends(11, 20))) == [[11, 20, 29]] * 2
    assert ref.kept(TOVA(kv_size=2, per_head=True).compress(*attends(11, 20))) == [[11, 29], [20, 29]]


def test_uniform_attention_keeps_the_first_tokens_and_the_newest():
    q, k = torch.zeros(2, N, 8), torch.zeros(1, N, 8)
    assert ref.kept(TOVA(kv_size=5).compress(*ref.make_layer(q, k))) == [[0, 1, 2, 3, 29]]


def slots(row, positions, valid=None):
    shape = (1, 1, len(row))
    valid = [True] * len(row) if valid is None else valid
    return Slots(
        torch.tensor(positions).view(shape),
        torch.tensor(valid).view(shape),
        {"row": torch.tensor(row).view(shape)},
        torch.full((1, 1, 1), 9),
        torch.full((1, 1, 1), 4),
    )


def test_the_newest_token_never_goes_even_if_nothing_attends_to_it():
    view = slots([0.5, 0.0, 0.3, 0.2], [3, 8, 0, 5])
    assert TOVA(kv_size=4).keep_scores(view)[0, 0].tolist() == pytest.approx([0.5, torch.inf, 0.3, 0.2])
    free = slots([0.5, 0.0, 0.3, 0.2], [3, 8, 0, 5], [True, False, True, True])
    assert TOVA(kv_size=4).keep_scores(free)[0, 0].tolist() == pytest.approx([0.5, 0.0, 0.3, torch.inf])


def test_the_state_is_the_last_row_of_a_chunk():
    probs = torch.tensor([[[0.1, 0.9], [0.6, 0.4]], [[0.2, 0.8], [0.2, 0.8]]])[None]
    view = Slots(*[torch.zeros(1, 1, 2)] * 2, {}, *[torch.zeros(1, 1, 1)] * 2)
    folded = TOVA(kv_size=4).fold(view, probs)["row"]
    torch.testing.assert_close(folded, torch.tensor([[[0.4, 0.6]]]))
    two = Slots(*[torch.zeros(1, 2, 2)] * 2, {}, *[torch.zeros(1, 1, 1)] * 2)
    folded = TOVA(kv_size=4, per_head=True).fold(two, probs)["row"]
    torch.testing.assert_close(folded, torch.tensor([[[0.6, 0.4], [0.2, 0.8]]]))


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_decoding_equals_a_slow_simulation_with_masks(per_head, seed):
    model, ids, size, new = build("llama"), prompt(22, 8 + seed), 9, 12
    (cache,) = kvbench.prefill(model, ids, [{"method": "tova", "kv_size": size, "per_head": per_head}])

    def leaves(attn, held, head, now):
        rows = [a[-1] for a in attn]
        row = ref.stored(rows, 2)[head] if per_head else ref.stored(rows, 1)[0]
        old = sorted(held - {now - 1}, key=lambda j: (row[j], -j))
        return set(old[: len(held) - (size - 1)])

    answer, held = decoding.evicting(model, ids, new, lambda attn: ref.tova(attn, 2, size, per_head), leaves)
    assert kvbench.generate(model, [cache], new) == [answer]
    longer = kvbench.extend(model, cache, torch.tensor(answer))
    assert [ref.kept(layer) for layer in longer.layers] == held


def test_heads_of_a_layer_hold_the_same_tokens_while_decoding():
    model = build("llama")
    (cache,) = kvbench.prefill(model, prompt(40, 3), ["tova"], kv_size=10, per="query_head")
    audit(cache, cache_shape(model))
    longer = kvbench.extend(model, cache, prompt(15, 4))
    for layer in longer.layers:
        kept_positions = ref.kept(layer)
        assert (
            kept_positions == [kept_positions[0]] * 4 and len(kept_positions[0]) == 10 and kept_positions[0][-1] == 54
        )


def test_the_state_is_declared_and_counted():
    model = build("llama")
    (cache,) = kvbench.prefill(model, prompt(40, 3), ["tova"], kv_size=10)
    measured = audit(cache, cache_shape(model))
    assert measured.overhead == 3 * 2 * 10 * (4 + 4)


def test_impossible_requests_are_refused():
    with pytest.raises(UsageError, match=r"method\.tova\.per_head"):
        chain_of({"method": "tova", "per_head": 1})
    with pytest.raises(UsageError, match=r"method\.tova\.kv_size=1 "):
        chain_of({"method": "tova", "kv_size": 1})
    with pytest.raises(UsageError, match="evicts tokens while decoding"):
        chain_of("tova+kivi")
