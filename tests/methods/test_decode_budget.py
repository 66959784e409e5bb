"""A budget while decoding: selectors are asked again after every so many tokens, over what they hold."""

import json

import pytest
import torch
from support import method_reference as ref
from support.calibrations import ready
from support.families import FAMILIES, WITH_LATENTS, WITH_STATES, build, generated, prompt
from support.grids import grid
from support.law_matrix import supported
from transformers import AttentionInterface, DynamicCache

import kvbench
from kvbench.audit.accounting import bytes_after_decoding
from kvbench.audit.decode_audit import check_bytes, check_peak
from kvbench.audit.prompt_audit import audit
from kvbench.base.errors import Refused, UsageError
from kvbench.cli.main import main
from kvbench.engine.decode import extend_caches, generate_rows
from kvbench.engine.decode_layer import count_allocated
from kvbench.engine.step import build as batch_of
from kvbench.engine.stopping import Ending
from kvbench.methods.core import registry
from kvbench.methods.core.base import Selector
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.contract import Capacity
from kvbench.methods.core.resolve import chain_of
from kvbench.models.interface import cache_shape
from kvbench.models.releases import named_cache

N, NEW, EVERY = 45, 15, 6
SMALL = {"kv_size": 18, "decode_budget": 15, "decode_every": EVERY}
SHARE = {"kv_size": 18, "decode_ratio": 0.33, "decode_every": EVERY}
ASKED = {
    "chunkkv": {"window": 4, "chunk": 3},
    "firsttokens": {},
    "h2o": {"window": 4, "variant": "win"},
    "keydiff": {"variant": "paper", "block": 10},
    "keynorm": {"protect_recent": 2},
    "pyramidkv": {"window": 4, "beta": 5},
    "random": {},
    "snapkv": {"window": 4, "kernel": 3},
    "streamingllm": {"sinks": 2},
}
NOT = {
    "adakv": "follows from the data",
    "cake": "by itself",
    "expectedattention": "reads all queries",
    "kvzip": "over layers",
    "qhitter": "by itself",
    "scissorhands": "by itself",
    "tova": "by itself",
    "uncomp-group": "by itself",
}
PROTECTED = [
    {"method": "random", "keep_window": 4, **SMALL},
    {"method": "random", "keep_window": 9, "kv_ratio": 0.3, "decode_ratio": 0.33, "decode_every": EVERY},
    {"method": "random", "keep_prompt": True, "decode_budget": N + 5, "decode_every": EVERY},
]
"""The control with tokens of the prompt that always stay."""
CHAINS = [*ASKED, "snapkv+think", "keynorm+thinkv", "snapkv+fp8", "h2o+vatp", "chunkkv+turboquant"]


def of(family, chains):
    """All chains on Llama, every seventh that a family runs elsewhere, and others in the family next to it."""
    if family == "llama":
        return chains
    return [c for c in chains if supported(c, family)][FAMILIES.index(family) % 7 :: 7]


def share_of(seen, ratio=33):
    """ceil(ratio / 100 * seen), in whole numbers."""
    return -(-ratio * seen // 100)


def entry(chain, budget=SMALL, **more):
    method = chain.split("+")[0]
    knobs = {f"{method}.{k}": v for k, v in {**budget, **ASKED[method], **more}.items()}
    pruned = {"recent": 3} if "think" in chain else {}
    return {"method": chain, **knobs, **pruned}


def test_every_selector_with_a_budget_is_asked_again_or_says_why_not():
    budgeted = [m for m in registry.available() if "decode_budget" in registry.knob_names(m)]
    assert sorted({*ASKED, *NOT}) == budgeted
    for method, reason in NOT.items():
        for knob, value in (("decode_budget", 64), ("decode_ratio", 0.5)):
            with pytest.raises(UsageError, match=rf"method\.{method}\.{knob}={value} .*{reason}"):
                chain_of({"method": method, knob: value})
    for asked, reason in (
        ({"method": "h2o"}, "reads the attention of all queries"),
        ({"method": "h2o", "variant": "orig"}, "by itself"),
        ({"method": "streamingllm", "mode": "mask"}, "by itself"),
        ({"method": "cake", "decode_evict": False}, "over layers"),
        ({"method": "chunkkv", "reuse": 2}, "over layers"),
        ({"method": "chunkkv", "chunk": 7, "variant": "paper"}, "follows from the data"),
    ):
        for knob, value in (("decode_budget", 64), ("decode_ratio", 0.5)):
            with pytest.raises(UsageError, match=reason):
                chain_of({**asked, knob: value})


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"decode_budget": 32}, r"snapkv\.decode_budget=32 .* above 32 \(sinks 0 \+ window 32\)"),
        ({"decode_budget": 0}, r"snapkv\.decode_budget=0"),
        ({"decode_budget": 64, "decode_every": 0}, r"snapkv\.decode_every=0"),
        ({"decode_every": 8}, "together with decode_budget or decode_ratio"),
        ({"decode_ratio": 0}, r"snapkv\.decode_ratio=0 is not possible: a share of all tokens so far"),
        ({"decode_ratio": 1.01}, r"snapkv\.decode_ratio=1\.01"),
        ({"decode_ratio": 0.5, "decode_budget": 64}, r"decode_budget=64 and decode_ratio=0\.5 are two ways to say one"),
        ({"method": "snapkv+kivi", "decode_ratio": 0.5}, "without decode_budget or decode_ratio"),
        ({"method": "uncomp-stage+snapkv", "decode_ratio": 0.5}, "leave out decode_budget or decode_ratio"),
        ({"method": "snapkv+kivi", "decode_budget": 64}, "without decode_budget"),
        ({"method": "snapkv+palu", "decode_budget": 64}, "without decode_budget"),
        ({"method": "snapkv+twilight", "decode_budget": 64}, "without decode_budget"),
        ({"method": "uncomp-stage+snapkv", "decode_budget": 64}, "leave out decode_budget"),
    ],
)
def test_impossible_requests_are_refused(wrong, match):
    with pytest.raises(UsageError, match=match):
        chain_of({"method": "snapkv", **wrong})


def test_the_knobs_change_no_identity_unless_they_are_set():
    plain = chain_of("snapkv").identity()["stages"][0]["knobs"]
    assert not {"decode_budget", "decode_ratio", "decode_every", "rounds_up"} & set(plain)
    knobs = chain_of({"method": "snapkv", "decode_budget": 64}).identity()["stages"][0]["knobs"]
    assert (knobs["decode_budget"], knobs["decode_every"]) == (64, 128) and "decode_ratio" not in knobs
    knobs = chain_of({"method": "snapkv", "decode_ratio": 1}).identity()["stages"][0]["knobs"]
    assert (knobs["decode_ratio"], knobs["decode_every"]) == (1.0, 128) and "rounds_up" not in knobs


@pytest.mark.parametrize(
    ("ratio", "seen", "tokens"),
    # products of floats lie a little above or below 3, 29 and 6, and are whole numbers all the same
    [(0.1, 30, 3), (0.29, 100, 29), (0.3, 20, 6), (0.29, 101, 30), (0.01, 50, 2), (1, 77, 77), (0.999, 77, 77)],
)
def test_a_share_is_rounded_up_and_leaves_two_tokens(ratio, seen, tokens):
    evictor = chain_of({"method": "random", "decode_ratio": ratio, "kv_round": True}).evictor
    assert evictor.selector.budget(seen, 0, 1) == tokens and evictor.grows


def test_a_share_too_small_for_sinks_and_window_shrinks_them():
    capacity = chain_of({"method": "snapkv", "decode_ratio": 0.25}).evictor.selector.capacity(40)
    assert (capacity.tokens, capacity.sinks, capacity.window, capacity.shrunk) == (10, 0, 5, True)
    assert not chain_of({"method": "snapkv", "decode_budget": 64}).evictor.grows


def chosen(method, q, k, heads, size):
    """What a slow reference keeps of keys [Hk, m, D] by the last queries [Hq, w, D], which are the last tokens'."""
    if method == "keynorm":
        return ref.keynorm(k, heads, size, **ASKED[method])
    if method == "keydiff":
        return ref.keydiff(k, heads, size)
    queries = torch.cat([q.new_zeros(q.shape[0], k.shape[1] - q.shape[1], q.shape[2]), q], dim=1)
    attn = ref.attention(queries, k, 0.25)
    if method == "chunkkv":
        return ref.chunkkv(attn, heads, size, 4, 1, "max", 3, "fill")
    return ref.snapkv(attn, heads, size, 4, 3, "max")


@pytest.mark.parametrize("method", ["snapkv", "keynorm", "keydiff", "chunkkv"])
@pytest.mark.parametrize(("every", "budget"), [(EVERY, SMALL), (2, SMALL), (EVERY, SHARE), (2, SHARE)])
def test_it_equals_transformers_with_keys_removed_by_hand(method, every, budget):
    """A loop over transformers' own cache, whose keys a slow reference chooses; queries are taken as they attend."""
    model, ids = build("llama"), 3 + torch.randperm(125, generator=torch.Generator().manual_seed(1))[:N]
    asked = [[] for _ in range(3)]

    def watching(module, query, key, value, mask, scaling, **_):
        asked[module.layer_idx].append(query[0])
        rows = query @ key.repeat_interleave(2, dim=1).transpose(2, 3) * scaling
        t, m = rows.shape[2:]
        rows = rows.masked_fill(torch.ones(t, m, dtype=torch.bool).triu(m - t + 1), -torch.inf).softmax(-1)
        return (rows @ value.repeat_interleave(2, dim=1)).transpose(1, 2), None

    AttentionInterface.register("watching", watching)
    before = model.config._attn_implementation
    model.set_attn_implementation("watching")
    held, at, answer = DynamicCache(), [[list(range(N))] * 2 for _ in range(3)], []

    def remove(size):
        for i, layer in enumerate(held.layers):
            q = torch.cat(asked[i], dim=1)[:, -4:]
            index = torch.tensor(chosen(method, q, layer.keys[0], 2, size))
            at[i] = [[p[j] for j in row] for p, row in zip(at[i], index.tolist(), strict=True)]
            index = index[None, :, :, None].expand(-1, -1, -1, 16)
            layer.keys, layer.values = layer.keys.gather(2, index), layer.values.gather(2, index)

    with torch.no_grad():
        logits = model(ids[None], **named_cache(held)).logits[0, -1]
        remove(18)
        for j in range(NEW):
            answer.append(int(logits.argmax()))
            if j and j % every == 0:
                size = 15 if budget is SMALL else share_of(N + j)
                remove(min(size, held.layers[0].keys.shape[2]))
            at = [[[*p, N + j] for p in heads] for heads in at]
            position = torch.tensor([[N + j]])
            logits = model(torch.tensor([answer[-1:]]), position_ids=position, **named_cache(held)).logits[0, -1]
    model.set_attn_implementation(before)
    variant = {"variant": "once"} if method == "keydiff" else {}
    (cache,) = kvbench.prefill(model, ids, [entry(method, budget, decode_every=every, **variant)])
    assert kvbench.generate(model, [cache], NEW) == [answer]
    assert [ref.kept(layer) for layer in kvbench.extend(model, cache, answer).layers] == at


@pytest.mark.e2e("every chain in every family")
@grid(
    ("family", "per"), [("llama", "kv_head"), *((f, ("query_head", "kv_head")[i % 2]) for i, f in enumerate(FAMILIES))]
)
def test_laws(family, per):
    """Batched = alone, read on = answered at once, tokens and bytes as declared, the first token the full cache's."""
    # a budget in tokens for every second chain, a share of all tokens for the others; on Llama both for all
    if family in WITH_LATENTS:
        per = "kv_head"  # all heads share one latent
    model, chains = build(family), of(family, CHAINS)
    budgets = [SMALL, SHARE] * len(chains)
    if family == "llama":
        chains = [chain for chain in chains for _ in range(2)]
    every, new = 3, 9  # fewer than elsewhere: two choices come all the same
    entries = [ready(model, entry(c, b, decode_every=every), per) for c, b in zip(chains, budgets, strict=False)]
    protected = PROTECTED if family == "llama" else PROTECTED[FAMILIES.index(family) % 3 :: 3]
    entries += [ready(model, {**asked, "decode_every": every}, per) for asked in protected]
    chains = chains + [asked["method"] for asked in protected]
    full, *caches = kvbench.prefill(model, prompt(N), ["full", *entries])
    endings = [Ending(new - i % 3, frozenset()) for i in range(len(caches))]  # rows leave one after the other
    together = generate_rows(model, caches, endings)
    (first,) = kvbench.generate(model, [full], 1)
    for chain, cache, ending, answer in zip(chains, caches, endings, together, strict=True):
        measured = audit(cache, cache_shape(model))
        assert measured.payload + measured.overhead == cache.nbytes()
        # on Llama from the first token on, elsewhere from the one that is read on from
        if family == "llama":
            assert generated(model, [cache], [ending]) == [answer.tokens], chain
        if not cache.chain.prefill_key:
            assert answer.tokens[:1] == first
        fed = ending.limit - 1
        check_peak(cache, answer.held, fed)
        check_bytes(cache, answer.stored, cache_shape(model))
        longer = kvbench.extend(model, cache, answer.tokens[:every])  # and here a choice is due
        assert longer.logits.argmax() == answer.tokens[every], chain
        longer = kvbench.extend(model, longer, answer.tokens[every : every + 2])
        assert kvbench.generate(model, [longer], ending.limit - every - 2) == [answer.tokens[every + 2 :]], chain


@pytest.mark.e2e("every selector in every family")
@grid("family", FAMILIES)
def test_a_budget_for_all_tokens_answers_as_the_full_cache(family):
    model, every = build(family), 3
    entries = [entry(m, kv_size=1000, decode_budget=1000, decode_every=every) for m in of(family, [*ASKED])]
    entries += [entry(m, SHARE, kv_size=1000, decode_ratio=1, decode_every=every) for m in of(family, [*ASKED])]
    full, *caches = kvbench.prefill(model, prompt(N), ["full", *entries])
    new = 3 * every + 2 if family == "llama" else every + 2  # three choices, and one
    answers = kvbench.generate(model, [full, *caches], new)
    assert answers == answers[:1] * len(answers)
    forced = [c.logits for c in extend_caches(model, [full, *caches], prompt(new, 9))]
    near = 1e-4
    if family in WITH_STATES:
        near = 5e-4  # tokens one by one and at once round their state differently
    for logits in forced[1:]:
        torch.testing.assert_close(logits, forced[0], atol=near, rtol=near)


@pytest.mark.e2e("every chain")
@pytest.mark.parametrize(("family", "per"), [("llama", "kv_head"), ("gemma2", "query_head")])
def test_a_share_of_1_answers_as_without_a_budget_while_decoding(family, per):
    model, chains = build(family), of(family, CHAINS)
    shares = [ready(model, entry(c, SHARE, decode_ratio=1), per) for c in chains]
    plain = [ready(model, entry(c, {"kv_size": 18}), per) for c in chains]
    caches = kvbench.prefill(model, prompt(N), [*shares, *plain])
    with_share, without = caches[: len(chains)], caches[len(chains) :]
    assert kvbench.generate(model, with_share, NEW) == kvbench.generate(model, without, NEW)
    for a, b in zip(with_share, without, strict=True):
        longer = [kvbench.extend(model, c, prompt(NEW, 9)) for c in (a, b)]
        assert [ref.kept(layer) for layer in longer[0].layers] == [ref.kept(layer) for layer in longer[1].layers]


@pytest.mark.parametrize("budget", [SMALL, SHARE])
@pytest.mark.parametrize("chain", CHAINS)
def test_tokens_and_bytes_after_every_step_are_those_of_the_formula(chain, budget):
    model = build("llama")
    (cache,) = kvbench.prefill(model, prompt(N), [entry(chain, budget, frozen_layers=[1])])
    batch = batch_of(model, [cache], NEW)
    choices = 0
    for j in range(NEW):
        for i, layer in enumerate(batch.with_keys):
            (_, rows), source = layer.formats[0], cache.layers[i]
            before = int(rows.held()[0, 0])
            k, v = torch.randn(2, 1, 2, 1, 16).unbind()
            layer.add(k, v)
            layer.attend(torch.randn(1, 4, 1, 16), 0.25, None)
            after, most = cache.chain.evictor.tokens_after(source, i, j + 1)
            assert rows.held()[0].tolist() == after and layer.held().tolist() == [max(most)]
            choices += after[0] <= before
            if i == 1:
                assert after == [N + j + 1] * 2
            elif j and j % EVERY == 0:
                size = cache.chain.evictor.selector.budget(N + j, i, 3)
                assert after == [min(size, before) + 1] * 2
                if "pyramidkv" not in chain:
                    assert size == (15 if budget is SMALL else share_of(N + j))
            low, high = bytes_after_decoding(cache.chain, source, i, j + 1, cache_shape(model))
            assert low <= layer.payload()[0] <= high and (low == high or "think" in chain)
    assert choices == 2 * ((NEW - 1) // EVERY)


def test_slots_of_a_share_have_room_for_the_most_tokens_of_an_answer():
    model, sizes = build("llama"), []
    (cache,) = kvbench.prefill(model, prompt(N), [entry("snapkv", SHARE)])
    for new in (60, 600):
        batch = batch_of(model, [cache], new)
        sizes.append({rows.valid.shape[2] for layer in batch.with_keys for _, rows in layer.formats})
    # the last choice is made after 54 and 594 new tokens, and 6 more tokens come
    assert sizes == [{share_of(N + 54) + 6}, {share_of(N + 594) + 6}]


@pytest.mark.parametrize("chain", ["snapkv+think", "keynorm+thinkv", "snapkv+fp8", "snapkv"])
def test_what_is_chosen_from_are_the_keys_and_values_held(chain):
    """Read back from slots: all channels that are there, zeros for those that are gone."""
    model = build("llama")
    (cache,) = kvbench.prefill(model, prompt(N), [entry(chain)])
    batch = batch_of(model, [cache], NEW)
    for _ in range(EVERY + 3):
        batch.with_keys[0].add(*torch.randn(2, 1, 2, 1, 16).unbind())
        batch.with_keys[0].attend(torch.randn(1, 4, 1, 16), 0.25, None)
    ((_, rows),) = batch.with_keys[0].formats
    stored = dict(zip(("k", "v"), rows.store.tokens_of_row(0), strict=True))
    thin = 0
    for h in range(2):
        slot = {p: s for s, p in enumerate(rows.positions[0, h].tolist()) if rows.valid[0, h, s]}
        for segment in rows.segments(0, cache.layers[0]):
            part = segment.head(h)
            tokens = [slot[p] for p in part.positions[0].tolist()]
            for name, values, channels in (("k", part.k, part.key_channels), ("v", part.v, part.value_channels)):
                if part.codes is not None:
                    values = getattr(part.codes, name).dequantise(torch.float32)
                expected = torch.zeros(len(tokens), 16)
                kept = torch.arange(16) if channels is None else channels[0].long()
                expected[:, kept] = values[0]
                thin += len(tokens) * (channels is not None)
                assert torch.equal(stored[name][h, tokens], expected)
    assert (thin > 0) == ("think" in chain)


def test_memory_is_flat():
    """An answer of 2,000 tokens has the storage of one of 60, and holds budget + every tokens at most."""
    model, sizes = build("llama"), []
    (cache,) = kvbench.prefill(model, prompt(N), [entry("snapkv")])
    for new in (60, 2000):
        batch = batch_of(model, [cache], new)
        sizes.append(count_allocated(batch.with_keys))
        assert all(rows.valid.shape[2] == 15 + EVERY + 3 for layer in batch.with_keys for _, rows in layer.formats)
    assert sizes[0] == sizes[1]


def test_a_choice_within_tokens_of_one_step_is_refused():
    model = build("llama")
    (cache,) = kvbench.prefill(model, prompt(N), [entry("snapkv")])
    batch = batch_of(model, [cache], 20, 4)
    k = torch.zeros(1, 2, 4, 16)
    batch.with_keys[0].add(k, k)
    batch.with_keys[0].attend(torch.zeros(1, 4, 4, 16), 0.25, None)
    with pytest.raises(UsageError, match="4 tokens at once go past the next choice of decode_every=6: lower chunk="):
        batch.with_keys[0].add(k, k)


def test_random_draws_anew_at_every_choice():
    model = build("llama")
    (cache,) = kvbench.prefill(model, prompt(N), [entry("random")])
    kept = []
    for new in (EVERY + 1, 2 * EVERY + 1):
        longer = kvbench.extend(model, cache, prompt(new, 3))
        layer = longer.layers[0]
        kept.append([sorted(head[:15]) for head in ref.kept(layer)])
    ranks = [[p for p in head if p < N] for head in kept[1]]
    assert all(set(b) < set(a) for a, b in zip(kept[0], ranks, strict=True))


class Nan(Selector):
    id = "nan"

    def scores(self, cache, obs, capacity):
        value = float("nan") if obs.prompt_tokens > N else 0.0
        return torch.full((cache.heads, obs.n), value)


def test_scores_that_are_no_numbers_are_refused_while_decoding_too():
    model = build("llama")
    (cache,) = kvbench.prefill(model, prompt(N), [Chain((Nan(**SMALL),))])
    with pytest.raises(Refused, match="hold NaN in layer 0"):
        kvbench.generate(model, [cache], NEW)
    assert isinstance(Nan(kv_size=4).capacity(9), Capacity)


@pytest.mark.e2e("measures")
def test_a_run_shows_divergence_over_a_long_answer_its_length_and_the_most_held(tmp_path, capsys):
    words = ["method=snapkv,keynorm", "kv_size=64", "decode_budget=48", "decode_every=16", "fidelity=270", "limit=1"]
    data = ["dataset=fidelity/tiny", "length=160", "forced=262", f"results={tmp_path}"]
    assert main(["run", *words, *data]) == 0
    out = " ".join(capsys.readouterr().out.split())
    lengths = "Mean number of tokens of an answer, and the most that a head held meanwhile:"
    assert f"{lengths} full 262.0 (at most 421 held), snapkv" in out
    assert out.count("262.0 (at most 80 held)") == 2
    assert main(["run", *words, *data, "--json"]) == 0
    _, *rows = json.loads(capsys.readouterr().out)["rows"]
    for row in rows:
        (cell,) = row["cells"]
        assert (cell["decode_peak"], cell["new_tokens"]) == (64 + 16, 262)
        assert cell["fidelity"]["reference"]["n_tokens"] == 261
    chunked = ["dataset=tiny_stream", "method=snapkv", "decode_budget=64", "decode_every=10", "limit=1"]
    assert main(["run", *chunked, "chunk=4", f"results={tmp_path}"]) == 2
    assert "chunk=4 does not divide decode_every=10 of snapkv" in " ".join(capsys.readouterr().err.split())
    for wrong in ("fidelity=1", "fidelity=2.5"):
        assert main(["run", *chunked, wrong]) == 2
        assert "kl_tokens=" in (said := capsys.readouterr().err) and "a number of tokens, 2 or more" in said


@pytest.mark.e2e("measures")
def test_fidelity_says_how_long_its_texts_are(tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "the magic number of paris is", "answers": ["paris " * 400]}) + "\n")
    words = [
        "dataset=file",
        f"path={rows}",
        "metric=f1",
        "max_new_tokens=2",
        "method=full",
        f"results={tmp_path / 'r'}",
    ]
    tokens = {}
    for most in ("true", "100"):
        assert main(["run", *words, f"fidelity={most}", "--json"]) == 0
        (row,) = json.loads(capsys.readouterr().out)["rows"]
        tokens[most] = row["cells"][0]["fidelity"]["reference"]["n_tokens"]
    assert tokens == {"true": 255, "100": 99}
