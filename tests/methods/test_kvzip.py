"""KVzip: what the model looks at while it repeats its prompt stays."""

import copy
import sys

import pytest
import torch
from support import method_reference as ref
from support.calibrations import ready
from support.families import LOCALS, PLAIN, build, prompt
from support.grids import grid
from transformers import AttentionInterface, DynamicCache

import kvbench
from kvbench.audit.accounting import bytes_declared
from kvbench.audit.prompt_audit import audit
from kvbench.base.errors import UsageError
from kvbench.engine import prefill, replay
from kvbench.kv.exact_attention import causal_softmax
from kvbench.kv.model_shape import compressed_layers, from_config
from kvbench.methods.core.contract import Capacity
from kvbench.methods.core.resolve import chain_of
from kvbench.methods.kvzip import KVzip
from kvbench.models.interface import cache_shape
from kvbench.models.releases import named_cache

N = 50
SHARED_LOCALS = [family for family in LOCALS if family in ("gemma3n_text", "gemma4_text")]


class Words:
    """A tokenizer of letters; its chat template has a turn before and one after the text."""

    chat_template = "there is one"

    def encode(self, text, add_special_tokens):
        assert not add_special_tokens
        return [3 + ord(letter) % 120 for letter in text]

    def apply_chat_template(self, messages, add_generation_prompt, tokenize, enable_thinking):
        assert add_generation_prompt and not tokenize and not enable_thinking
        return f"<u>{messages[0]['content']}</u><a>"


def distinct(n, seed=0):
    return 3 + torch.randperm(125, generator=torch.Generator().manual_seed(seed))[:n]


def slow_scores(model, ids, chunk, sinks, words):
    """The most attention [layers][query heads][n] of passes through transformers' own cache."""
    first, later, header = words
    asked, n = {}, len(ids)

    def watching(module, query, key, value, mask, scaling, **_):
        group = query.shape[1] // key.shape[1]
        k, v = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
        logits = query @ k.transpose(2, 3) * scaling
        t, m = logits.shape[2:]
        logits = logits.masked_fill(torch.ones(t, m, dtype=torch.bool).triu(m - t + 1), -torch.inf)
        asked[module.layer_idx] = logits[0]
        return (logits.softmax(-1) @ v).transpose(1, 2), None

    AttentionInterface.register("watching", watching)
    before = model.config._attn_implementation
    model.set_attn_implementation("watching")
    prompt_cache, scores = DynamicCache(), [[[] for _ in range(4)] for _ in range(3)]
    with torch.no_grad():
        model(ids[None], **named_cache(prompt_cache))
        for start in range(0, n, chunk):
            end = min(start + chunk, n)
            text = [*(later if start else first), *ids[max(0, start - 8) : start], *header, *ids[start:end]]
            at = torch.arange(n, n + len(text))[None]
            model(torch.tensor([[int(x) for x in text]]), position_ids=at, **named_cache(copy.deepcopy(prompt_cache)))
            for layer, logits in asked.items():
                heads = [*range(min(sinks, start)), *range(start, end), *range(n, n + len(text))]
                attn = logits[:, :, heads].softmax(-1)
                for h in range(4):
                    place = min(sinks, start)
                    scores[layer][h] += attn[h, :, place : place + end - start].amax(0).tolist()
    model.set_attn_implementation(before)
    return scores


def slow_kept(scores, heads, sinks, total, level):
    """The positions kept per layer and head, by Python's sort over all pairs."""
    group = 4 // heads
    best = [[[max(c) for c in zip(*s[h * group : (h + 1) * group], strict=True)] for h in range(heads)] for s in scores]
    n = len(best[0][0])
    pairs = [
        (-(9.0 if j < sinks else best[i][h][j]), i, h, j)
        for i in range(len(best)) for h in range(heads) for j in range(n)
    ]  # fmt: skip
    groups = {"pair": lambda p: 0, "layer": lambda p: p[1], "uniform": lambda p: p[1:3]}[level]
    kept = [[[] for _ in range(heads)] for _ in best]
    for key in dict.fromkeys(map(groups, pairs)):
        for _, i, h, j in sorted(p for p in pairs if groups(p) == key)[:total]:
            kept[i][h].append(j)
    return [[sorted(head) for head in layer] for layer in kept]


@grid("family", ["llama", "qwen3", "gpt_neox"])
@grid(("per", "level"), [("kv_head", "pair"), ("query_head", "pair"), ("kv_head", "layer"), ("kv_head", "uniform")])
def test_it_keeps_the_pairs_of_a_slow_reference(family, per, level):
    model, ids = build(family), distinct(N)
    entry = {"method": "kvzip", "kv_ratio": 0.37, "chunk": 20, "level": level, "per": per}
    (cache,) = kvbench.prefill(model, ids, [entry])
    scores = slow_scores(model, ids, 20, 4, ([], [], []))
    heads = cache.layers[0].heads
    total = int(0.37 * N * heads * {"pair": 3, "layer": 1, "uniform": 1 / heads}[level])
    assert [ref.kept(layer) for layer in cache.layers] == slow_kept(scores, heads, 4, total, level)


@pytest.mark.parametrize("instruction", ["plain", "chat"])
def test_instructions_stand_before_the_chunks(instruction):
    model, ids, words = build("llama"), distinct(N), Words()
    header = "\n" if instruction == "plain" else "</u><a>"
    texts = [words.encode(t, add_special_tokens=False) for t in (replay.REPEAT, replay.REPEAT_FROM, header)]
    entry = {"method": "kvzip", "kv_ratio": 0.4, "chunk": 30, "instruction": instruction}
    (cache,) = kvbench.prefill(model, ids, [entry], tokenizer=words)
    wanted = slow_kept(slow_scores(model, ids, 30, 4, texts), 2, 4, int(0.4 * N * 6), "pair")
    assert [ref.kept(layer) for layer in cache.layers] == wanted
    with pytest.raises(UsageError, match=r"needs the tokenizer: kvbench\.prefill\(\.\.\., tokenizer=tokenizer\)"):
        kvbench.prefill(model, ids, [entry])
    if instruction == "chat":
        words.chat_template = None
        with pytest.raises(UsageError, match="no chat template; use instruction=plain"):
            kvbench.prefill(model, ids, [entry], tokenizer=words)


def test_counts_by_hand():
    """Specification: of 10 pairs at a half the released code keeps 4, ours 5; of 1,000 one fewer than asked."""
    scores = torch.tensor([[[9.0, 8, 7, 6, 5, 4, 3, 2, 1, 0]]])
    five = Capacity(5, 0, 0)
    counts = ("exact", "paper", "code")
    kept = {c: KVzip(kv_ratio=0.5, count=c).mark_staying(scores, five)[0, 0].tolist() for c in counts}
    assert kept["exact"] == kept["code"] == [True] * 5 + [False] * 5
    assert kept["paper"] == [True] * 4 + [False] * 6
    assert [int(KVzip(kv_ratio=r).count_staying(1000, 1000)) for r in (0.9, 0.3, 0.1)] == [900, 300, 100]
    thousand = torch.arange(1000.0).view(1, 1, 1000)
    for share, tokens in ((0.9, 899), (0.3, 299), (0.1, 99)):
        stage = KVzip(kv_ratio=share, count="paper")
        assert int(stage.mark_staying(thousand, Capacity(int(1000 * share), 0, 0)).sum()) == tokens
    # N - int(N (1 - r)), where that differs: 21 pairs at a half
    assert (
        KVzip(kv_ratio=0.5, count="code").count_staying(21, 21) == 11
        and KVzip(kv_ratio=0.5).count_staying(21, 21) == 10
    )


@pytest.mark.parametrize("pairs", [21, 1000, 4096, 10_000, 30_000_001])
def test_counts_are_those_of_the_typed_decimal(pairs):
    """kvpress removes int(N c) of N pairs, where c = 1 - r is typed: 0.1, and not the float 1 - 0.9."""
    for thousandths in range(1, 1000):
        share, removed = thousandths / 1000, float(f"0.{1000 - thousandths:03d}")
        released = KVzip(count="code", kv_ratio=share).count_staying(pairs, 40_960)
        assert released == pairs - int(pairs * removed)
        assert KVzip(kv_ratio=share).count_staying(pairs, 40_960) == pairs * thousandths // 1000


def test_whole_heads_by_hand():
    """Of four heads half stay: those with the highest single score, the others hold their first token alone."""
    scores = torch.tensor([[[9.0, 1, 2, 0], [0, 0, 0, 5]], [[0, 4, 4, 4], [0, 3, 0, 6]]])
    kept = KVzip(kv_ratio=0.5, sinks=1, level="head").mark_staying(scores, Capacity(2, 1, 0))
    assert kept.sum(dim=-1).tolist() == [[1, 4], [1, 4]] and kept[..., 0].all()
    model = build("llama")
    (cache,) = kvbench.prefill(model, prompt(70), [{"method": "kvzip", "kv_size": 24, "level": "head"}])
    audit(cache, cache_shape(model))
    assert sorted(len(head) for layer in cache.layers for head in ref.kept(layer)) == [4, 4, 4, 4, 70, 70]
    declared = bytes_declared(cache.chain, from_config(model.config), 70, 4)
    assert declared.tokens == (2 * 70 + 4 * 4) / 6
    assert len(kvbench.generate(model, [cache], 5)[0]) == 5


def test_ties_go_to_the_lower_layer_head_and_position_and_first_tokens_stay():
    scores = torch.zeros(2, 2, 6)
    scores[1, 1, 5] = 1.0
    kept = KVzip(kv_size=3, sinks=1).mark_staying(scores, Capacity(3, 1, 0))  # 12 of 24 pairs, 4 of them first tokens
    assert kept[..., 0].all() and kept[1, 1, 5]
    assert kept.view(4, 6).sum(1).tolist() == [6, 3, 1, 2]
    ties = KVzip(kv_size=3, sinks=1, count="paper").mark_staying(scores, Capacity(3, 1, 0))
    assert ties.view(4, 6).sum(1).tolist() == [1, 1, 1, 2]


@pytest.mark.parametrize("count", ["exact", "paper", "code"])
@pytest.mark.parametrize("per", ["kv_head", "query_head"])
def test_bytes_are_those_declared_and_heads_are_stored_without_padding(count, per):
    model = build("llama")
    (cache,) = kvbench.prefill(model, prompt(70), [{"method": "kvzip", "kv_size": 24, "count": count}], per=per)
    measured = audit(cache, cache_shape(model))
    heads = cache.layers[0].heads
    kept = [len(head) for layer in cache.layers for head in ref.kept(layer)]
    assert len(set(kept)) > 1 and measured.payload == sum(kept) * 2 * 16 * 4
    declared = bytes_declared(cache.chain, from_config(model.config), 70, 4)
    if count == "paper":
        # the 4 first tokens of each head are not counted
        assert declared is None and sum(kept) == 4 * 3 * heads + int(24 / 70 * 66 * 3 * heads) - 1
    else:
        assert sum(kept) == 24 * heads * 3 or count == "code"
        assert (declared.payload, declared.overhead) == (measured.payload, measured.overhead)


def test_passes_are_shared_and_count_as_time_of_compression(monkeypatch):
    model, passes = build("llama"), []
    entries = [{"method": "kvzip", "kv_ratio": r, "chunk": 20} for r in (0.25, 0.5, 1.0)]
    entries.append({"method": "kvzip+think", "kv_ratio": 0.5, "chunk": 10})
    seconds = iter(range(0, 10_000, 7))
    read = replay.replay_prompt
    monkeypatch.setattr(
        "kvbench.engine.prefill.replay_prompt", lambda *a, **more: passes.append(a[3]) or read(*a, **more)
    )
    monkeypatch.setattr("kvbench.engine.prefill.time.perf_counter", lambda: float(next(seconds)))
    quarter, half, whole, pruned = kvbench.prefill(model, prompt(N), entries)
    assert [p.chunk for p in passes] == [20, 10]
    # every clock ticks 7 s: 3 layers, and the settling of each chain with its passes
    assert [c.compress_s for c in (quarter, half, whole, pruned)] == [28.0] * 4
    assert all(layer.tokens == N for layer in whole.layers)
    assert quarter.prefill_s == half.prefill_s


@pytest.mark.e2e("every partner in every family")
@grid(
    ("family", "per"),
    [
        ("llama", "kv_head"),
        *((f, ("query_head", "kv_head")[i % 2]) for i, f in enumerate(PLAIN) if f not in (*LOCALS, "jamba")),
    ],
)
def test_it_stands_before_pruners_quantisers_and_masks(family, per):
    model = build(family)
    partners = ["kvzip+think", "kvzip+kivi", "kvzip+fp8", "kvzip+twilight"]
    if family in ("llama", "gpt_neox"):
        partners.append("kvzip+palu")
    knobs = {"kvzip.kv_size": 20, "kvzip.frozen_layers": [1]}
    quantised = {"kvzip+kivi": {"group": 4, "residual": 8}}
    entries = [ready(model, {"method": m, **knobs, **quantised.get(m, {})}, per) for m in partners]
    caches = kvbench.prefill(model, prompt(60), entries)
    for cache in caches:
        audit(cache, cache_shape(model))
        assert [len(head) for head in ref.kept(cache.layers[1])] == [60] * cache.layers[1].heads
    new = 6 if family == "llama" else 3
    together = kvbench.generate(model, caches, new)
    assert together == [kvbench.generate(model, [c], new)[0] for c in caches]


def test_impossible_requests_are_refused():
    for knob, value in (("sinks", 0), ("chunk", 0), ("level", "token"), ("count", "all"), ("instruction", "yes")):
        with pytest.raises(UsageError, match=rf"method\.kvzip\.{knob}"):
            chain_of({"method": "kvzip", knob: value})
    with pytest.raises(UsageError, match=r"kvzip\.count='paper' is not possible: exact, unless level=pair"):
        chain_of({"method": "kvzip", "count": "paper", "level": "layer"})
    with pytest.raises(UsageError, match="over layers"):
        chain_of({"method": "kvzip", "decode_budget": 64})
    with pytest.raises(UsageError, match="all read the whole prompt"):
        chain_of("uncomp-stage+kvzip")
    # 400 tokens and as many read again are more than the 512 that the model has positions for
    with pytest.raises(UsageError, match="= 808 exceed the model's 512 learned positions"):
        kvbench.prefill(build("opt"), prompt(400), ["kvzip"])


def attended_by_the_model(model, ids):
    """{layer: (query, keys, scale, cap, sinks)} of transformers' eager attention over ids."""
    calls, module = {}, sys.modules[type(model).__module__]
    own, before = module.eager_attention_forward, model.config._attn_implementation

    def record(attention, query, key, value, mask, **options):
        calls[attention.layer_idx] = query[0], key[0], *(options.get(name) for name in ("scaling", "softcap", "s_aux"))
        return own(attention, query, key, value, mask, **options)

    module.eager_attention_forward = record
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            model(ids[None], use_cache=False)
    finally:
        module.eager_attention_forward = own
        model.set_attn_implementation(before)
    return calls


@pytest.mark.parametrize("family", sorted(set(LOCALS) - set(SHARED_LOCALS)))
def test_a_pass_past_the_window_measures_what_the_model_itself_attends(family, monkeypatch):
    """Local layers go on from their windows, which the repeated prompt leaves far behind."""
    measured, model, ids, n = [], build(family), prompt(60), 60
    own = prefill.replay_prompt
    monkeypatch.setattr(prefill, "replay_prompt", lambda *a, **k: measured.append(own(*a, **k)) or measured[-1])
    kvbench.prefill(model, ids, [{"method": "kvzip", "kv_ratio": 0.5, "instruction": "none"}])
    calls = attended_by_the_model(model, torch.cat([ids, ids]))
    compressed = compressed_layers(model.config)
    assert len(measured[0]) == len(compressed) < len(calls)
    for index, received in zip(compressed, measured[0], strict=True):
        query, keys, scale, cap, sinks = calls[index]
        logits = query[:, n:].double() @ keys.double().repeat_interleave(len(query) // len(keys), 0).transpose(1, 2)
        logits = logits * scale
        if cap is not None:
            logits = (logits / cap).tanh() * cap
        logits.masked_fill_(torch.ones(n, 2 * n, dtype=torch.bool).triu(n + 1), -torch.inf)
        weights = logits.exp()
        total = weights.sum(dim=2, keepdim=True)
        if sinks is not None:
            total = total + sinks.double().exp()[:, None, None]
        wanted = (weights / total)[:, :, :n].amax(dim=1)
        torch.testing.assert_close(received.double(), wanted, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("family", SHARED_LOCALS)
def test_a_prompt_is_not_read_again_where_layers_share_keys(family):
    with pytest.raises(UsageError, match="layers read the keys of another layer"):
        kvbench.prefill(build(family), prompt(33), ["kvzip"])


@pytest.mark.parametrize(("heads", "fused"), [(2, True), (4, True), (2, False)])
def test_a_pass_attends_all_of_the_prompt_and_its_own_tokens_causally(heads, fused, monkeypatch):
    """By PyTorch's fused function for CPUs, and by masks in blocks where there is none."""
    if not fused:
        monkeypatch.setattr("kvbench.kv.exact_attention.FUSED", None)
        monkeypatch.setattr(replay, "BLOCK_BYTES", 4 * 4 * 60 * 7)
    (k, own_k), (v, own_v) = ((ref.grid(heads, n, 8, seed=seed + n) for n in (40, 19)) for seed in range(2))
    query, scale = ref.grid(4, 19, 8, seed=7), 0.3
    layer = replay.ReplayLayer(k, v, (10, 30), 4)
    layer.add(own_k[None], own_v[None])
    rows = causal_softmax(query, torch.cat([k, own_k], dim=1), scale)
    out = rows.view(heads, -1, 59) @ torch.cat([v, own_v], dim=1)
    torch.testing.assert_close(layer.attend(query[None], scale, None)[0], out.view(4, 19, 8))
    competing = causal_softmax(query, torch.cat([k[:, :4], k[:, 10:30], own_k], dim=1), scale)
    torch.testing.assert_close(layer.received, competing[:, :, 4:24].amax(dim=1))
