"""Rows that enter and leave a running batch answer as each alone, whatever fails beside them."""

import weakref
from copy import deepcopy
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from support.families import FAMILIES, LOCALS, WHOLE, build, prompt, rounds_alike
from support.law_matrix import CHAINS, SMALL, configured, prefill, supported

from kvbench.audit.accounting import bytes_after_decoding
from kvbench.audit.decode_audit import check_peak
from kvbench.audit.prompt_audit import audit
from kvbench.engine import batch
from kvbench.engine.decode import generate_rows
from kvbench.engine.memory import run_in_parts
from kvbench.engine.stopping import Ending
from kvbench.models.interface import cache_shape
from kvbench.run.answers import DecodeQueue, QueuedRow

pytestmark = pytest.mark.e2e("every chain decodes in a queue")

ROOMY = 2**40
OUT_OF_MEMORY = (
    torch.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried to allocate"),
)


def rows_of(family, chains, prompts=((70, 1), (47, 2)), per="kv_head", most=9):
    """A row per chain and prompt, of 1 to ``most`` tokens; every fifth is drawn, every seventh can stop early."""
    model, rows = build(family), []
    for p in prompts:
        caches = prefill(model, prompt(*p), [configured(c, SMALL) for c in chains], per)
        for chain, held in zip(chains, caches, strict=True):
            i = len(rows)
            stop = frozenset(range(3, 128, 4)) if i % 7 == 0 else frozenset()
            ending = Ending(1 + 5 * i % most, stop, temperature=0.8 if i % 5 == 0 else 0.0, top_p=0.9, seed=i)
            measured = audit(held, cache_shape(model))
            rows.append(QueuedRow(SimpleNamespace(id=chain), SimpleNamespace(id=str(p)), held, measured, 0, ending))
    return model, rows


def alone(model, row):
    return generate_rows(model, [row.cache], [row.ending])[0].tokens


def drained(queue):
    """All outcomes by row, each exactly once, and how many rows ran together when each step began."""
    collected, sizes = {}, []
    while len(queue):
        for row, outcome in queue.advance():
            assert row not in collected
            collected[row] = outcome
        sizes.append(len(queue.running))
    return collected, sizes


@pytest.mark.parametrize(("family", "per"), [*((f, "kv_head") for f in WHOLE + LOCALS), ("qwen2", "query_head")])
def test_rows_that_enter_and_leave_answer_as_alone(family, per, monkeypatch):
    """All chains on Llama, of two prompts; every third of one prompt elsewhere, and answers of fewer tokens."""
    prompts, chains, most, longest = ((70, 1), (47, 2)), CHAINS, 24, 9
    if family != "llama":
        prompts, chains, most = prompts[FAMILIES.index(family) % 2 :][:1], CHAINS[FAMILIES.index(family) % 3 :: 3], 10
        longest = 4
    model, rows = rows_of(family, [c for c in chains if supported(c, family)], prompts, per, longest)
    queue, entries = DecodeQueue(model, most, ROOMY), []
    original = batch.DecodeBatch._step_rows
    monkeypatch.setattr(
        batch.DecodeBatch, "_step_rows", lambda b: entries.append(len({r.entry for r in b.rows})) or original(b)
    )
    for row in rows:
        queue.add(row)
    answers, sizes = drained(queue)
    assert set(answers) == set(rows)
    assert max(sizes) <= most and min(entries) == 1 < max(entries), "no rows entered beside others"
    flipped = []
    for row, answer in answers.items():
        (apart,) = generate_rows(model, [row.cache], [row.ending])
        assert apart.held == answer.held and answer.rows <= most, row.cell.id
        if apart.tokens != answer.tokens:
            flipped.append(row)
    # where products of one row and of many round differently, a code that is near a border may flip
    allowed = 0 if rounds_alike(model, 1, max(sizes)) else 1
    assert len(flipped) <= allowed and all(row.cache.chain.coder is not None for row in flipped), flipped


def some_rows():
    return rows_of("llama", ["snapkv", "h2o", "think", "streamingllm", "kivi", "snapkv+think"])


@cache
def answers_alone():
    """Return the answer of each of ``some_rows`` alone; asked for before anything is broken."""
    model, rows = some_rows()
    return [alone(model, row) for row in rows]


def test_the_limit_of_bytes_holds_and_one_row_always_runs():
    model, rows = some_rows()
    for most in (2 * max(r.cost for r in rows), 1):
        queue = DecodeQueue(model, 100, most)
        assert queue.has_room(100)
        for row in rows:
            queue.add(row)
        assert not queue.has_room(1)
        collected = {}
        while len(queue):
            collected.update(queue.advance())
            assert sum(r.cost for r in queue.running) <= most or len(queue.running) <= 1
        assert [collected[row].tokens for row in rows] == answers_alone() and len(collected) == len(rows)


@pytest.mark.parametrize("chain", CHAINS)
def test_a_caches_shapes_pass_the_checks_of_its_answer(chain):
    """What is checked once an answer has ended reads no number of a cache, which has been given up by then."""
    model, rows = rows_of("llama", [chain], prompts=((70, 1),))
    (row,) = rows
    shapes = row.cache.shapes()
    assert shapes.nbytes() <= row.cache.nbytes() and shapes.seen == row.cache.seen
    assert [layer.tokens for layer in shapes.layers] == [layer.tokens for layer in row.cache.layers]
    for new in (0, 1, 30):
        for i, (whole, left) in enumerate(zip(row.cache.layers, shapes.layers, strict=True)):
            limits = [
                bytes_after_decoding(row.cache.chain, layer, i, new, cache_shape(model)) for layer in (whole, left)
            ]
            assert limits[0] == limits[1]
        held = [0] * len(shapes.layers)
        assert check_peak(shapes, held, new) == check_peak(row.cache, held, new)


@pytest.mark.parametrize("error", [None, OUT_OF_MEMORY[0], ValueError("one of them breaks it")], ids=str)
def test_caches_are_given_up_to_the_batch_and_made_again_where_it_fails(error, steps, capsys):
    model, rows = some_rows()
    want, remade, alive = answers_alone(), [], []
    caches = {(r.cell.id, r.example.id): deepcopy(r.cache) for r in rows}
    # those of think are alone in their format, of 70 and of 47 tokens: the batch attends the cache itself
    watched = [weakref.ref(s.segments[0].v) for r in rows if r.cell.id != "think" for s in r.cache.layers]

    def remake(gone):
        remade.extend((r.cell.id, r.example.id) for r in gone)
        return [(r, replace(r, cache=deepcopy(caches[r.cell.id, r.example.id]), given_up=False)) for r in gone]

    def fail(rows):
        alive.append((rows, sum(w() is not None for w in watched)))
        if error is not None and rows > 4 and len(alive) == 3:
            raise error

    steps.before = fail
    queue = DecodeQueue(model, 24, ROOMY, remake)
    order = [(r.cell.id, r.example.id) for r in rows]
    for row in rows:
        queue.add(row)
    del row, rows
    answers, _ = drained(queue)
    answers = {(r.cell.id, r.example.id): a.tokens for r, a in answers.items()}
    assert [answers[key] for key in order] == want
    assert alive[0][1] == 0, "a cache is kept beside the batch that holds it"
    assert bool(remade) == (error is not None) and len(remade) == len(set(remade))


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=["gpu", "cpu"])
def test_out_of_memory_halves_the_batch_and_every_row_answers_once(error, steps, capsys):
    model, rows = some_rows()
    want = answers_alone()
    steps.rows.clear()

    def fail(rows):
        # in the middle of answers, too
        if rows > 4 and len(steps.rows) % 3 == 0:
            raise error

    steps.before = fail
    queue = DecodeQueue(model, 12, ROOMY)
    for row in rows:
        queue.add(row)
    answers, _ = drained(queue)
    assert [answers[row].tokens for row in rows] == want
    assert queue.most_rows < 12 and "out of memory with" in capsys.readouterr().err


def test_a_row_that_does_not_fit_alone_has_failed_with_the_reason(steps):
    model, rows = some_rows()

    def fail(rows):
        raise OUT_OF_MEMORY[0]

    steps.before = fail
    queue = DecodeQueue(model, 12, ROOMY)
    for row in rows:
        queue.add(row)
    answers, _ = drained(queue)
    short = [row for row in rows if row.ending.limit == 1]
    assert short and all(len(answers[row].tokens) == 1 for row in short)
    assert all(answers[row] is OUT_OF_MEMORY[0] for row in rows if len(alone_limits(row)) == 0)


def alone_limits(row):
    """What tells a row that ends with its first token, which no step is needed for."""
    first = int(row.cache.logits.argmax())
    ends = row.ending.limit == 1 or (row.ending.stop and (row.ending.temperature or first in row.ending.stop))
    return [row] if ends else []


def test_only_the_row_that_breaks_its_batch_has_failed(monkeypatch):
    model, rows = some_rows()
    want, original = answers_alone(), batch.build
    bad = next(r for r in rows if r.cell.id == "think" and r.ending.limit > 2)

    def build_batch(m, caches, *a):
        entering = list(caches)
        if any(c is bad.cache for c in entering):
            raise ValueError("this method cannot decode")
        return original(m, entering, *a)

    monkeypatch.setattr(batch, "build", build_batch)
    queue = DecodeQueue(model, 12, ROOMY)
    for row in rows:
        queue.add(row)
    answers, _ = drained(queue)
    assert str(answers.pop(bad)) == "this method cannot decode"
    assert {r: a.tokens for r, a in answers.items()} == {r: w for r, w in zip(rows, want, strict=True) if r is not bad}


def test_parts_shrink_until_what_fails_is_alone():
    calls = []

    def work(items):
        calls.append(list(items))
        if len(items) > 3:
            raise MemoryError
        if 5 in items:
            raise ValueError("five")
        return [10 * i for i in items]

    actual = run_in_parts(range(8), work)
    assert [(i, x) for i, x in actual if i != 5] == [(i, 10 * i) for i in range(8) if i != 5]
    assert str(dict(actual)[5]) == "five"
    assert calls[:3] == [list(range(8)), [0, 1, 2, 3], [0, 1]]


def test_rows_of_both_rotations_of_a_model_are_never_decoded_together(monkeypatch):
    """Under LongRoPE a step rotates all of its rows alike (tests/models/test_more_families.py has such a model)."""
    model, rows = rows_of("llama", ["snapkv", "think", "tova"])
    rows = [replace(r, cache=replace(r.cache, long=i % 3 == 0)) for i, r in enumerate(rows)]
    want, queue, kinds = [alone(model, r) for r in rows], DecodeQueue(model, 24, ROOMY), []
    original = batch.DecodeBatch._step_rows
    monkeypatch.setattr(
        batch.DecodeBatch, "_step_rows", lambda b: kinds.append({r.key.cache.long for r in b.rows}) or original(b)
    )
    for row in rows:
        queue.add(row)
    answers, _ = drained(queue)
    assert [answers[r].tokens for r in rows] == want
    assert {frozenset(k) for k in kinds} == {frozenset([True]), frozenset([False])}
