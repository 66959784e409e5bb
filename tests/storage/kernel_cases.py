"""Triton's kernels beside plain PyTorch, which is the reference. Run by test_kernels.py in a process of its own, in
Triton's interpreter where there is no GPU: that must be chosen before anything imports Triton."""

import decode
import pytest
import torch
from support.families import build

import kvbench
from kvbench.engine.cuda_graph import StillLayer
from kvbench.engine.decode_layer import RowLayer
from kvbench.kv.packed import BITS, quantise_channels, quantise_tokens, quantise_zero_point
from kvbench.kv.partly_packed import Codes, Residual
from kvbench.kv.segment import LayerCache, Segment
from kvbench.storage import kernels
from kvbench.storage.attend import attend
from kvbench.storage.format import Room, StoredRow
from kvbench.storage.kernels import SWITCH, exact, softmax
from kvbench.storage.kernels.softmax import Parts
from kvbench.storage.packed_rows import PackedRows
from kvbench.storage.row_segments import Ragged, RowSegment, flatten_rows, stack_rows

DEVICE = torch.device("cuda" if torch.cuda.is_available() and not kernels.interpreted() else "cpu")
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
# of the largest number that plain fp32 gives for the same rounded inputs; bf16 rounds to 2^-9, fp16 to 2^-12
TOLERANCE = {FP32: 1e-5, FP16: 2e-3, BF16: 1.6e-2}
FORMATS = {
    "kivi": (lambda x, bits: quantise_channels(x, bits, 8), lambda x, bits: quantise_tokens(x, bits, 8)),
    "flexgen": (lambda x, bits: quantise_tokens(x, bits, 5, 1.0), lambda x, bits: quantise_tokens(x, bits, 64, 1.0)),
    "qhitter": (quantise_zero_point, quantise_zero_point),
}


def random(*shape, seed=0, dtype=FP32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.fixture(autouse=True)
def small_splits(monkeypatch):
    """Many splits of few tokens, and nothing else that could serve in the kernels' place."""
    assert kernels.serves(DEVICE)
    monkeypatch.setattr(softmax, "LEAST_SPAN", 16)
    monkeypatch.setattr(softmax, "TILE_BYTES", 16)
    monkeypatch.setattr(softmax, "WAVES", 1000)


@pytest.fixture
def counted(monkeypatch):
    """How often kernels served."""
    served = []

    def counting(known):
        def call(*given):
            actual = known(*given)
            if actual is not None:
                served.append(actual.shape)
            return actual

        return call

    for name in ("attend", "attend_packed"):
        monkeypatch.setattr(kernels, name, counting(getattr(kernels, name)))
    return served


@pytest.fixture
def both(monkeypatch, counted):
    """What a function returns by kernels, which must serve, and by plain PyTorch."""

    def run(fn, plain=None):
        actual, times = fn(), len(counted)
        assert times
        monkeypatch.setenv(SWITCH, "off")
        want = (plain or fn)()
        monkeypatch.setenv(SWITCH, "on")
        assert len(counted) == times
        return actual, want

    return run


def close(found, want, dtype=FP32):
    assert found.shape == want.shape and found.dtype == dtype
    assert found.isfinite().all()
    assert (found.float() - want.float()).abs().max() <= TOLERANCE[dtype] * max(want.abs().max().item(), 1.0)


def channels(b, h, d, kept, seed):
    return random(b, h, d, seed=seed).argsort(dim=-1)[..., :kept].sort(dim=-1).values


@pytest.mark.parametrize(
    ("h", "group", "t", "d", "lengths", "tail", "dtype"),
    [
        (2, 1, 1, 16, (49,), 1, FP32),
        (1, 2, 1, 20, (33, 5), 19, BF16),
        (1, 4, 1, 64, (70, 47), 3, FP16),
        (1, 8, 1, 24, (33, 0, 32), 24, FP32),
        (1, 8, 1, 24, (35, 9), 17, BF16),
        (2, 2, 3, 32, (41, 41), 7, FP16),
    ],
)
def test_whole_segments_and_the_tail_are_under_one_softmax(both, dtype, h, group, t, d, lengths, tail):
    b, longest = len(lengths), max(lengths)
    rows = [(random(h, n, d, seed=9 * n), random(h, n, d, seed=9 * n + 1)) for n in lengths]
    segments = [Segment(k, v, torch.zeros(h, len(k[0]), dtype=torch.int32)) for k, v in rows]
    query, tail_k, tail_v = (random(b, heads, m, d, seed=m) for heads, m in ((h * group, t), (h, tail), (h, tail)))

    def run(kind):
        def cast(s):
            return Segment(s.k.to(dtype).to(kind), s.v.to(dtype).to(kind), s.positions)

        both_halves = [stack_rows([cast(s) for s in segments]), stack_rows([cast(s) for s in reversed(segments)])]
        assert both_halves[0].longest == longest
        inputs = [x.to(dtype).to(kind) for x in (query, tail_k, tail_v)]
        return attend(inputs[0], both_halves, (inputs[1], inputs[2]), d**-0.5)[0]

    close(*both(lambda: run(dtype), lambda: run(FP32)), dtype)


@pytest.mark.parametrize(
    ("h", "group", "kept_k", "kept_v", "dtype"),
    [(2, 4, 11, None, FP32), (1, 2, 33, 7, FP32), (2, 1, None, 20, BF16), (1, 2, 19, None, BF16), (1, 8, 8, 8, FP16)],
)
def test_thin_keys_meet_the_querys_channels_and_thin_values_their_places(both, dtype, h, group, kept_k, kept_v):
    d, n, b = 40, 45, 2
    of_k = None if kept_k is None else channels(b, h, d, kept_k, 3)
    of_v = None if kept_v is None else channels(b, h, d, kept_v, 4)
    arguments = [random(b, h, n, c or d, seed=s) for s, c in ((5, kept_k), (6, kept_v))]
    arguments += [random(b, h * group, 1, d, seed=7), random(b, h, 2, d, seed=8), random(b, h, 2, d, seed=9)]

    def run(kind):
        k, v, query, tail_k, tail_v = (x.to(dtype).to(kind) for x in arguments)
        return attend(query, [RowSegment(k, v, None, of_k, of_v)], (tail_k, tail_v), 0.3)[0]

    close(*both(lambda: run(dtype), lambda: run(FP32)), dtype)


def ragged(lengths, d, seed, thin=None):
    n, h = sum(lengths), len(lengths)
    ids = None if thin is None else channels(1, h, d, thin, seed)[0].to(torch.int16)
    k, v = random(1, n, thin or d, seed=seed), random(1, n, d, seed=seed + 50)
    positions = torch.cat([torch.arange(m) for m in lengths])[None].int().to(DEVICE)
    return Segment(k, v, positions, torch.tensor(lengths, dtype=torch.int32, device=DEVICE), ids)


@pytest.mark.parametrize(("thin", "group", "t", "dtype"), [(None, 1, 1, FP32), (9, 4, 1, BF16), (None, 2, 2, FP16)])
def test_ragged_heads_are_read_where_they_lie(both, dtype, thin, group, t):
    d, shapes = 24, [(33, 3), (0, 17), (17, 17)]
    segments = [ragged(lengths, d, seed, thin) for seed, lengths in enumerate(shapes)]
    segment = flatten_rows(segments)
    assert segment.lengths.tolist() == [list(lengths) for lengths in shapes]
    query, tail_k, tail_v = (random(3, heads, m, d, seed=m) for heads, m in ((2 * group, t), (2, 4), (2, 4)))

    def run(kind, rows):
        cast = Ragged(segment.k.to(dtype).to(kind), segment.v.to(dtype).to(kind), *list(vars(segment).values())[2:])
        if rows is not None:
            cast = cast.rows(rows)
        index = torch.arange(3, device=DEVICE) if rows is None else rows
        inputs = [x[index].to(dtype).to(kind) for x in (query, tail_k, tail_v)]
        return attend(inputs[0], [cast], (inputs[1], inputs[2]), d**-0.5)[0]

    for rows in (None, torch.tensor([0, 2], device=DEVICE)):
        actual, want = both(lambda at=rows: run(dtype, at), lambda at=rows: run(FP32, at))
        close(actual, want, dtype)
    if dtype == FP32:
        close(actual[:1], attend(query[:1], [flatten_rows(segments[:1])], (tail_k[:1], tail_v[:1]), d**-0.5)[0])


@pytest.mark.parametrize("stored", [2, 4])
def test_decode_batches_of_ragged_rows(both, counted, stored):
    d, shapes = 8, [[3, 24], [17, 17], [40, 9]] if stored == 2 else [[3, 24, 1, 2], [6, 6, 7, 20], [9, 40, 9, 9]]
    segments = [ragged(lengths, d, seed) for seed, lengths in enumerate(shapes)]
    caches = [LayerCache((s,), seen=90, heads=stored, query_heads=4) for s in segments]
    groups, sizes = [], []

    def run():
        batch, collected = RowLayer([StoredRow(cache=c) for c in caches], Room(tokens=3)), []
        groups.append(len(batch.formats[0][1].groups))
        for step in range(2):
            rows = len(batch.next)
            batch.add(random(rows, 2, 1, d, seed=step), random(rows, 2, 1, d, seed=20 + step))
            collected.append(batch.attend(random(rows, 4, 1, d, seed=40 + step), 0.4, None))
            if step == 0:
                batch.keep(torch.tensor([0, 2]))
        sizes.append(batch.payload())
        return torch.cat(collected)

    close(*both(run))
    assert groups[0] == 1 < groups[1] and len(counted) == 2  # one launch a step for all heads
    assert sizes[0] == sizes[1] == [(sum(shapes[i]) + 2 * 2) * 2 * d * 4 for i in (0, 2)]


def test_a_tail_that_is_read_whole_hides_what_is_not_written(both):
    d, segments = 8, [ragged(lengths, 8, seed) for seed, lengths in enumerate([[3, 24], [17, 17]])]
    caches = [LayerCache((s,), seen=90, heads=2, query_heads=4) for s in segments]

    def run(still):
        batch, collected = RowLayer([StoredRow(cache=c) for c in caches], Room(tokens=20)), []
        place = torch.zeros(1, dtype=torch.int64, device=DEVICE)
        layer = StillLayer(batch, place) if still else batch
        for step in range(2):
            place.fill_(step)
            layer.add(random(2, 2, 1, d, seed=step), random(2, 2, 1, d, seed=20 + step))
            collected.append(layer.attend(random(2, 4, 1, d, seed=40 + step), 0.4, None))
        return torch.cat(collected)

    close(*both(lambda: run(True), lambda: run(False)))


class Coder:
    """The format ``name`` with a residual: keys by groups of 8, values one by one."""

    keys, values, grows = Residual(0, 16, 8), Residual(5, 1, 1), True
    packs_after_step = True

    def __init__(self, name, bits):
        self.bits, (self.k, self.v), self.packer = bits, FORMATS[name], self

    def pack_keys(self, x):
        return self.k(x, self.bits)

    def pack_values(self, x):
        return self.v(x, self.bits)


def coded(coder, h, n, d, thin, seed, dtype):
    k, v = random(h, n, d, seed=seed, dtype=dtype), random(h, n, d, seed=seed + 50, dtype=dtype)
    old = [k[:, : coder.keys.packed(n)], v[:, : coder.values.packed(n)]]
    ids = [channels(1, h, d, d // 2 - 3, seed + s)[0] for s in (7, 8)]
    if thin:
        old = [x.gather(2, c[:, None].expand(-1, x.shape[1], -1)) for x, c in zip(old, ids, strict=True)]
    codes = Codes(coder.pack_keys(old[0]), coder.pack_values(old[1]))
    inputs = {"key_channels": ids[0].int(), "value_channels": ids[1].int()} if thin else {}
    exact_k, exact_v = k[:, coder.keys.packed(n) :], v[:, coder.values.packed(n) :]
    positions = torch.zeros(h, n, dtype=torch.int32, device=DEVICE)
    return Segment(exact_k, exact_v, positions, codes=codes, **inputs)


SHAPES = [  # thin, tokens of rows, stored heads, query heads of each, new tokens, head dimension, type
    # the first step makes 32 or 48 of the longest, all of whose keys are packed before the second
    (False, (31,), 2, 1, 1, 33, FP32),
    (True, (3, 31), 1, 8, 1, 20, FP32),
    (False, (20, 30), 1, 2, 3, 64, FP32),
    (False, (31,), 1, 4, 1, 32, BF16),
    (True, (47,), 1, 2, 1, 34, FP16),
]
EVERY = [(name, bits) for name in FORMATS for bits in BITS]


@pytest.mark.parametrize(
    ("name", "bits", "thin", "lengths", "h", "group", "t", "d", "dtype"),
    # all formats and widths in exact numbers, whole and thin; all shapes at 2 bits
    [(*form, *SHAPES[i % 2]) for i, form in enumerate(EVERY)]
    + [(name, 2, *shape) for name in ("kivi", "flexgen") for shape in SHAPES[2:]],
)
def test_packed_steps_equal_the_plain_ones(both, name, bits, thin, lengths, h, group, t, d, dtype):
    coder = Coder(name, bits)

    def run(kind):
        segments = [coded(coder, h, n, d, thin, seed, dtype) for seed, n in enumerate(lengths)]
        caches = [LayerCache((s,), seen=s.tokens, heads=h, query_heads=h * group) for s in segments]
        stored = [StoredRow(cache=c, coder=coder) for c in caches]
        rows, collected, packed = PackedRows(stored, Room(tokens=30, at_once=t)), [], []
        for store in (rows.k, rows.v):
            store.ring = store.ring.to(kind)
        for i in range(2):
            u = rows.k.ring.shape[0]
            rows.add(*(random(u, h, t, d, seed=s + i, dtype=dtype).to(kind) for s in (100, 200)), None)
            collected.append(rows.attend(random(u, h * group, t, d, seed=300 + i, dtype=dtype).to(kind), d**-0.5, None))
            packed.append(rows.k.packed[-1])
            if i == 0 and u > 1:
                rows.keep(torch.tensor([1], device=DEVICE))
        # the first step's tokens are packed when rows leave, or when the second step adds its own
        assert packed[1] > packed[0]
        return collected

    for one, other in zip(*both(lambda: run(dtype), lambda: run(FP32)), strict=True):
        close(one, other, dtype)


def test_the_logarithm_of_sums_is_that_of_the_logits():
    query, keys = random(2, 4, 1, 16), random(2, 2, 70, 16, seed=1)
    run = RowSegment(keys, keys)
    cut = softmax.cut_tokens(query, 2, 70)
    assert cut.count > 2
    parts = Parts.room(cut.count, query)
    exact.attend(query, run, 0.3, cut, parts)
    out, lse = parts.merged(query)
    logits = 0.3 * query @ keys.repeat_interleave(2, dim=1).transpose(2, 3)
    torch.testing.assert_close(lse, logits.logsumexp(dim=-1))
    torch.testing.assert_close(out, logits.softmax(dim=-1) @ keys.repeat_interleave(2, dim=1))


def test_values_that_are_not_numbers_are_not_hidden():
    query, keys = random(1, 2, 1, 16), random(1, 1, 70, 16, seed=1)
    query[0, 1, 0, 3] = torch.nan
    out = kernels.attend(query, [RowSegment(keys, keys)], (keys[:, :, :1], keys[:, :, :1]), 0.3)
    assert out[0, 0].isfinite().all() and out[0, 1].isnan().all()


def test_large_logits_do_not_overflow(both):
    query, keys = 300 * random(1, 2, 1, 16), 300 * random(1, 1, 70, 16, seed=1)
    tail = keys[:, :, :1]
    close(*both(lambda: attend(query, [RowSegment(keys, keys / 300)], (tail, tail / 300), 1.0)[0]))


def test_queries_of_a_transposed_layout(both):
    query, keys = random(2, 3, 4, 16).transpose(1, 2), random(2, 50, 2, 16, seed=1).transpose(1, 2)
    close(*both(lambda: attend(query, [RowSegment(keys, keys)], (keys[:, :, :5], keys[:, :, 5:10]), 0.3)[0]))


def test_what_kernels_do_not_serve_is_plain(monkeypatch, counted):
    query, keys = random(1, 4, 1, 16), random(1, 2, 20, 16, seed=1)
    segment, tail = RowSegment(keys, keys, positions=torch.arange(20).view(1, 1, 20).to(DEVICE)), (keys, keys)
    window = {"floor": torch.tensor([[3]], device=DEVICE), "tail_start": torch.tensor([20], device=DEVICE)}
    attend(query, [segment], tail, 0.3, **window)
    attend(query.double(), [RowSegment(keys.double(), keys.double())], (keys.double(),) * 2, 0.3)
    attend(random(1, 4, 40, 16), [segment], (random(1, 2, 40, 16),) * 2, 0.3)
    monkeypatch.setenv(SWITCH, "off")
    attend(query, [segment], tail, 0.3)
    assert not counted
    monkeypatch.setenv(SWITCH, "on")
    attend(query, [segment], tail, 0.3)
    assert len(counted) == 1


CHAINS = ["full", "snapkv+think", "adakv+thinkv", "think+kivi"]


def test_models_answer_as_by_plain_pytorch(both, monkeypatch):
    monkeypatch.setattr(softmax, "TILE_BYTES", 2**14)
    model = build("llama").to(DEVICE)
    prompt = torch.randint(3, 128, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    knobs = {"kv_size": 24, "ratio": 0.4, "value_ratio": 0.4, "group": 8, "kivi.residual": 8, "window": 4, "recent": 4}

    def run():
        return kvbench.generate(model, kvbench.prefill(model, prompt, CHAINS, **knobs), 2)

    actual, want = both(run)
    assert actual == want and len(actual) == len(CHAINS)


def test_the_benchmark_times_kernels_and_plain_pytorch_side_by_side(monkeypatch, counted):
    monkeypatch.delenv(SWITCH, raising=False)
    monkeypatch.setattr(decode, "WARM_UP", 1)
    shape = decode.StepShape(60, 2, 2, 4, 16, torch.float32)
    served = []

    def timer(call):
        before = len(counted)
        call()
        served.append(len(counted) - before)
        return float(len(served))

    for name in ("adakv 12.5 %", "kivi 2 bits"):
        served.clear()
        row = decode.measure(name, shape, 1, timer, DEVICE)
        assert served == [1, 1, 0, 0] * (1 + decode.WARM_UP) and SWITCH not in decode.os.environ
        # the times are those of the last round
        assert (row.step, row.full, row.plain, row.sdpa) == (5, 6, 7, 8)
        # half of the bandwidth: the bytes take 5 s at it twice
        printed = decode.table({name: row}, shape, row.moved / 2.5)
        for expected in (f"\n{name}  ", "0.83x", "0.71x", "0.62x", "50 %"):
            assert expected in printed
    # 2 rows, 2 heads, 2 x 16 numbers; 7 tokens of each head on average
    assert decode.measure("adakv 12.5 %", shape, 1, timer, DEVICE).moved == 2 * 2 * 7 * 2 * 16 * 4
